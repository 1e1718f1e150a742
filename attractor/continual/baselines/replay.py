"""Experience replay: old sequences take the place of some new ones."""

import math
from typing import Unpack

import torch
from torch import Tensor

from attractor.config import check_number
from attractor.continual.baselines.baseline import Baseline, Memory, Options, Train, check_batch
from attractor.data import Batch
from attractor.model import GPT


class Replay(Baseline):
    """Replaces a `fraction` of the sequences by those of `memory`, (N, T) inputs and targets.

    Over many steps the fraction is exact: where it is less than one sequence of a batch, some batches have
    none. It is the last sequences of a batch that go, and as many tokens are seen as without replay. The loss
    is that of the mixed batch. With `remember` the new sequences then take places in the memory at random: a
    reservoir of everything so far (Vitter, 1985).
    """

    def __init__(
        self,
        model: GPT,
        memory: Batch,
        fraction: float = 0.05,
        *,
        remember: bool = False,
        seed: int = 0,
        train: Train = "all",
        **options: Unpack[Options],
    ) -> None:
        check_number("fraction", fraction, "a share, 0 <= fraction < 1", lambda share: 0 <= share < 1)
        self.memory, self.fraction, self.remember = Memory(model, memory, seed), fraction, remember
        self.seen = self.replayed = 0  # sequences
        super().__init__(model, train, **options)

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        return super().step(*self.mix(inputs, targets))

    def mix(self, inputs: Tensor, targets: Tensor) -> Batch:
        """The batch that is learned from instead of this one."""
        inputs, targets = check_batch(self.model, (inputs, targets))
        owed = math.floor(self.fraction * (self.seen + len(inputs)) + 1e-9)  # 0.07 * 100 is a little above 7
        count = owed - self.replayed
        old_inputs, old_targets = self.memory.draw(count)
        if old_inputs.shape[1] != inputs.shape[1]:
            raise ValueError(
                f"the memory has sequences of {old_inputs.shape[1]} tokens, the batch of {inputs.shape[1]}"
            )
        self.seen, self.replayed = self.seen + len(inputs), owed
        if self.remember:
            self.memory.offer(inputs, targets)
        kept = len(inputs) - count
        return torch.cat([inputs[:kept], old_inputs]), torch.cat([targets[:kept], old_targets])
