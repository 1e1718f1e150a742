"""Averaged GEM: one constraint, from a random batch of everything old."""

from typing import Unpack

from torch import Tensor

from attractor.config import check_size
from attractor.continual.baselines.baseline import Memory, Options, Train, flatten
from attractor.continual.baselines.projecting import Projected, Projecting
from attractor.data import Batch
from attractor.model import GPT


class AGEM(Projecting):
    """Chaudhry et al. 2019: each step draws `batch_size` sequences of `memory`, (N, T) inputs and targets.

    Where the gradient g (or the step, see `Projecting`) points against their gradient r, it loses that part:
    g - (g.r / r.r) r.
    """

    def __init__(
        self,
        model: GPT,
        memory: Batch,
        batch_size: int = 16,
        *,
        seed: int = 0,
        train: Train = "all",
        of: Projected = "gradient",
        **options: Unpack[Options],
    ) -> None:
        check_size("batch_size", batch_size)
        self.memory, self.batch_size = Memory(model, memory, seed), batch_size
        if batch_size > len(self.memory.inputs):
            raise ValueError(f"batch_size={batch_size} is more than the memory's {len(self.memory.inputs)}")
        super().__init__(model, train, of=of, **options)

    def old_gradients(self) -> Tensor:
        return flatten(self.gradients(self.loss(*self.memory.draw(self.batch_size))))[None]

    def project(self, vector: Tensor, old: Tensor) -> Tensor:
        (reference,) = old
        inner = vector @ reference
        return vector - inner / (reference @ reference) * reference if inner < 0 else vector
