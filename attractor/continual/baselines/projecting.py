"""What GEM and A-GEM share: they do not move against the gradients of old texts."""

import copy
from typing import Literal, Unpack, get_args

import torch
from torch import Tensor

from attractor.config import check_choice
from attractor.continual.baselines.baseline import Baseline, Options, Train, flatten, write_gradients
from attractor.model import GPT

Projected = Literal["gradient", "step"]


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
