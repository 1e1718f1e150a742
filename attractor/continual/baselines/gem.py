"""Gradient episodic memory: no step may, to first order, raise the loss on any memory of an old task."""

import itertools
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from attractor.config import check_number
from attractor.continual.baselines.baseline import Options, Train, check_batch, flatten
from attractor.continual.baselines.projecting import Projected, Projecting
from attractor.data import Batch
from attractor.model import GPT

MOST_MEMORIES = 10


class GEM(Projecting):
    """Lopez-Paz and Ranzato 2017. `memories` holds one fixed batch per old task.

    Where the gradient g (or the step, see `Projecting`) has a negative inner product with the gradient of a
    memory (a row of G), it is replaced by g + G^T v, the nearest vector with none if `margin` is 0; a larger
    margin leans towards the memories.
    """

    def __init__(
        self,
        model: GPT,
        memories: Sequence[Batch],
        margin: float = 0.0,
        *,
        train: Train = "all",
        of: Projected = "gradient",
        **options: Unpack[Options],
    ) -> None:
        check_number("margin", margin, "a number, 0 or more", lambda number: number >= 0)
        if margin and of == "step":
            raise ValueError("a margin is on the scale of gradients; with of='step' it must be 0")
        if not 1 <= len(memories) <= MOST_MEMORIES:
            raise ValueError(
                f"{len(memories)} memories: give 1 to {MOST_MEMORIES} batches, one for each old task; where "
                "there are more tasks, let some share a batch"
            )
        self.memories = [
            check_batch(model, memory, f"memory {number}") for number, memory in enumerate(memories)
        ]
        self.margin = margin
        super().__init__(model, train, of=of, **options)

    def old_gradients(self) -> Tensor:
        return torch.stack([flatten(self.gradients(self.loss(*memory))) for memory in self.memories])

    def project(self, vector: Tensor, old: Tensor) -> Tensor:
        inner = old @ vector
        return vector + solve_dual(old @ old.T, inner, self.margin) @ old if (inner < 0).any() else vector


def solve_dual(gram: Tensor, inner: Tensor, margin: float = 0.0) -> Tensor:
    """The v >= margin that minimises v^T gram v / 2 + inner^T v, for float64 gram = G G^T and inner = G g.

    The problem is convex, so v is a minimum exactly where its excess over the margin, e = v - margin, and the
    slope s = gram v + inner meet the conditions of Karush, Kuhn and Tucker: e >= 0, s >= 0 and e_i s_i = 0,
    which is to say min(e, s) = 0. Some coordinates have s = 0 and the others e = 0; for a handful of memories
    we solve for every choice of them at once, and take the one that meets the conditions best.
    """
    # Memory gradients of unit length put e and s on one scale; one of zero constrains nothing.
    length = gram.diagonal().sqrt()
    length = length.where(length > 0, 1.0)
    unit_gram = gram / length / length[:, None]
    start = (inner + margin * gram.sum(1)) / length  # the slope at v = margin
    free = torch.tensor(list(itertools.product((0.0, 1.0), repeat=len(inner)))).to(gram)  # (2^m, m)
    systems = unit_gram * free[:, :, None] * free[:, None, :]
    # The pseudo-inverse, since gradients may be parallel: its solution is as good as any.
    excess = -(torch.linalg.pinv(systems, hermitian=True) @ (start * free)[:, :, None])[:, :, 0]
    slope = excess @ unit_gram + start
    best = torch.minimum(excess, slope).abs().amax(1).argmin()
    return excess[best].clamp(min=0) / length + margin
