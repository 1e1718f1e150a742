"""Gradient episodic memory, also averaged: no step may, to first order, raise the loss on old texts."""

import copy
import itertools
from collections.abc import Sequence
from typing import Literal, Unpack, get_args

import torch
from torch import Tensor

from attractor.config import check_choice, check_number, check_size
from attractor.continual.baselines.baseline import (
    Baseline,
    Memory,
    Options,
    Train,
    check_batch,
    flatten,
    write_gradients,
)
from attractor.data import Batch
from attractor.model import GPT

Projected = Literal["gradient", "step"]
MOST_MEMORIES = 10


class Projecting(Baseline):
    """Subclasses say which gradients are old, and what becomes of a vector that points against some.

    The papers project the gradient and step along it. AdamW does not step along it, and may go where old
    losses rise all the same; `of="step"` projects what AdamW would do, so that to first order they do not.
    """

    def __init__(
        self, model: GPT, train: Train, *, of: Projected = "gradient", **options: Unpack[Options]
    ) -> None:
        check_choice("of", of, get_args(Projected))
        self.of = of
        super().__init__(model, train, **options)

    def old_gradients(self) -> Tensor:
        """Return the gradients of old texts (m, n), one row for each."""
        raise NotImplementedError

    def project(self, vector: Tensor, old: Tensor) -> Tensor:
        """Return the vector, a direction of descent, or another one to take in its place."""
        raise NotImplementedError

    def project_gradients(self) -> None:
        old = self.old_gradients()
        if self.of == "step":
            self._old = old
            return
        gradient = flatten(parameter.grad for parameter in self.trainable)
        projected = self.project(gradient, old)
        if projected is not gradient:
            write_gradients(projected, self.trainable)

    @torch.no_grad()
    def take_step(self) -> None:
        if self.of == "gradient":
            return super().take_step()
        before = [parameter.clone() for parameter in self.trainable]
        moments = copy.deepcopy(self.optimizer.state_dict())
        try:
            super().take_step()
            way = flatten(old - new for old, new in zip(before, self.trainable, strict=True))
            projected = self.project(way, self._old)
            if projected is not way:
                pieces = projected.split([parameter.numel() for parameter in self.trainable])
                for parameter, old, piece in zip(self.trainable, before, pieces, strict=True):
                    parameter.copy_(old.double() - piece.view_as(old))
        except BaseException:
            for parameter, old in zip(self.trainable, before, strict=True):
                parameter.copy_(old)
            self.optimizer.load_state_dict(moments)
            raise
        finally:
            del self._old


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
