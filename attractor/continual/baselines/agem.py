"""Averaged GEM: one constraint, from a random batch of everything old."""

from typing import Unpack

from attractor.config import check_size
from attractor.continual.baselines.baseline import (
    Baseline,
    Memory,
    Options,
    Train,
    flatten,
    write_gradients,
)
from attractor.data import Batch
from attractor.model import GPT


class AGEM(Baseline):
    """Chaudhry et al. 2019: each step draws `batch_size` sequences of `memory`, (N, T) inputs and targets.

    Where the gradient g points against their gradient r, it loses that part: g - (g.r / r.r) r.
    """

    def __init__(
        self,
        model: GPT,
        memory: Batch,
        batch_size: int = 16,
        *,
        seed: int = 0,
        train: Train = "all",
        **options: Unpack[Options],
    ) -> None:
        check_size("batch_size", batch_size)
        self.memory, self.batch_size = Memory(model, memory, seed), batch_size
        if batch_size > len(self.memory.inputs):
            raise ValueError(f"batch_size={batch_size} is more than the memory's {len(self.memory.inputs)}")
        super().__init__(model, train, **options)

    def project_gradients(self) -> None:
        gradient = flatten(parameter.grad for parameter in self.trainable)
        reference = flatten(self.gradients(self.loss(*self.memory.draw(self.batch_size))))
        if (inner := gradient @ reference) < 0:
            write_gradients(gradient - inner / (reference @ reference) * reference, self.trainable)
