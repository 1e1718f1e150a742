"""Elastic weight consolidation: parameters that mattered for the old text are tied to their old values."""

from collections.abc import Iterable
from typing import Literal, Unpack, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from attractor.config import check_choice, check_number
from attractor.continual.baselines.baseline import Baseline, Options, Train, check_batch
from attractor.data import IGNORED, Batch, Batches
from attractor.lm import mode
from attractor.model import GPT

LabelsName = Literal["model", "data"]


class EWC(Baseline):
    """Kirkpatrick et al. 2017: adds strength/2 * sum_i F_i (theta_i - theta*_i)^2 to the loss.

    F is the diagonal of the Fisher information on the batches of `anchor`, theta* the parameters as they are
    now. A sample is a sequence: F_i is the mean over sequences of (d log p(sequence) / d theta_i)^2, where
    log p sums over tokens, with dropout off. `labels="model"` draws the targets from the model's own
    predictions, which is the Fisher information; "data" takes those of the text, the empirical Fisher.
    Adam normalises gradients: however strong the penalty, a parameter wanders by a few learning rates.
    """

    def __init__(
        self,
        model: GPT,
        anchor: Iterable[Batch],
        strength: float,
        *,
        labels: LabelsName = "model",
        fisher_decay: float = 1.0,
        seed: int = 0,
        train: Train = "all",
        **options: Unpack[Options],
    ) -> None:
        check_number("strength", strength, "a number, 0 or more", lambda number: number >= 0)
        check_number("fisher_decay", fisher_decay, "between 0 and 1", lambda decay: 0 <= decay <= 1)
        check_choice("labels", labels, get_args(LabelsName))
        super().__init__(model, train, **options)
        self.strength, self.labels, self.fisher_decay = strength, labels, fisher_decay
        self._generator = torch.Generator(model.device).manual_seed(seed)
        self.fisher = [
            torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
            for parameter in self.trainable
        ]
        self.centre = [parameter.detach().clone() for parameter in self.trainable]  # theta*
        try:
            self.consolidate(anchor)
        except BaseException:
            self.finish()  # the caller has no method to finish: leave the model as it was found
            raise

    @torch.no_grad()
    def consolidate(self, anchor: Iterable[Batch]) -> None:
        """A further task is learned: F becomes fisher_decay * F + its Fisher, and theta* the parameters now.

        This is online EWC, Schwarz et al. 2018, whose gamma is `fisher_decay`.
        """
        further = self._measure(anchor)
        for total, more in zip(self.fisher, further, strict=True):
            total.mul_(self.fisher_decay).add_(more)
        for old, parameter in zip(self.centre, self.trainable, strict=True):
            old.copy_(parameter)

    def penalty(self) -> Tensor:
        terms = [
            (fisher * (parameter - old).square()).sum()
            for fisher, parameter, old in zip(self.fisher, self.trainable, self.centre, strict=True)
        ]
        return self.strength / 2 * torch.stack(terms).sum()

    @torch.enable_grad()
    def _measure(self, anchor: Iterable[Batch]) -> list[Tensor]:
        """The diagonal Fisher: one backward pass per sequence, for each gradient is squared on its own."""
        if isinstance(anchor, Batches):
            raise ValueError("anchor never ends: give itertools.islice(batches, n) or a list of batches")
        squares, count = [torch.zeros_like(total) for total in self.fisher], 0
        with mode(self.model, training=False):
            for batch in anchor:
                for inputs, targets in zip(*check_batch(self.model, batch, "the anchor"), strict=True):
                    logits = self.logits(inputs[None])[0]
                    surprise = F.cross_entropy(
                        logits, self._label(logits, targets), ignore_index=IGNORED, reduction="sum"
                    )
                    for square, gradient in zip(squares, self.gradients(surprise), strict=True):
                        square += gradient.to(square.dtype).square()
                    count += 1
        if count == 0:
            raise ValueError("anchor is empty: give batches of the text to remember")
        return [square / count for square in squares]

    def _label(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.labels == "data":
            return targets
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=self._generator)[:, 0]
        return drawn.where(targets != IGNORED, IGNORED)
