"""Experience replay: old sequences take the place of some new ones."""

import math
from typing import Unpack

import torch
from torch import Tensor

from attractor.config import check_probability
from attractor.continual.baselines.baseline import Baseline, Memory, Options, Train, check_batch
from attractor.data import Batch
from attractor.model import GPT


class Replay(Baseline):
    """Each step replaces a `fraction` of the batch by sequences of `memory`, (N, T) inputs and targets.

    Their number is rounded up, so it is at least one unless `fraction` is 0; it is the last sequences of the
    batch that go, and as many tokens are seen as without replay. The loss is that of the mixed batch.
    """

    def __init__(
        self,
        model: GPT,
        memory: Batch,
        fraction: float = 0.05,
        *,
        seed: int = 0,
        train: Train = "all",
        **options: Unpack[Options],
    ) -> None:
        check_probability("fraction", fraction)
        self.memory, self.fraction = Memory(model, memory, seed), fraction
        super().__init__(model, train, **options)

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        return super().step(*self.mix(inputs, targets))

    def mix(self, inputs: Tensor, targets: Tensor) -> Batch:
        """The batch that is learned from instead of this one."""
        inputs, targets = check_batch(self.model, (inputs, targets))
        count = math.ceil(self.fraction * len(inputs) - 1e-9)  # 0.07 * 100 is a little above 7
        if count == len(inputs):
            raise ValueError(
                f"fraction={self.fraction} of {len(inputs)} sequences, rounded up, leaves none of the batch"
            )
        old_inputs, old_targets = self.memory.draw(count)
        if old_inputs.shape[1] != inputs.shape[1]:
            raise ValueError(
                f"the memory has sequences of {old_inputs.shape[1]} tokens, the batch of {inputs.shape[1]}"
            )
        kept = len(inputs) - count
        return torch.cat([inputs[:kept], old_inputs]), torch.cat([targets[:kept], old_targets])
