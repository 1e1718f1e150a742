"""Which tokens may teach: the paper's confidence gating, and a gate for loss outliers.

A token here is a prediction: the model has read it and predicts the next one. A gate that holds a token back
takes its loss out of the objective, so the patches that only such tokens chose do not learn.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attractor.continual.config import GateConfig

WARM_UP = 256
"""Tokens of the stream before a loss can be called an outlier."""
HORIZON = 10_000
"""Tokens over which the mean and the spread of the loss forget."""


class Surprise(NamedTuple):
    """What losses of the stream have been like: a moving mean and mean square."""

    mean: float = 0.0
    square: float = 0.0
    tokens: int = 0

    @property
    def deviation(self) -> float:
        return math.sqrt(max(self.square - self.mean**2, 0.0))

    def limit(self, deviations: float) -> float:
        return self.mean + deviations * self.deviation if self.tokens >= WARM_UP else math.inf

    @classmethod
    def from_list(cls, values: list[float]) -> "Surprise":
        """Read it from a file; a ValueError or a TypeError if it is not one."""
        mean, square, tokens = values
        if not (math.isfinite(mean) and math.isfinite(square) and type(tokens) is int and tokens >= 0):
            raise ValueError(f"{values} are not a mean, a mean square and a count")
        return cls(float(mean), float(square), tokens)

    def after(self, losses: Tensor) -> "Surprise":
        losses = losses.double()
        return self.after_sums(losses.numel(), float(losses.sum()), float(losses.square().sum()))

    def after_sums(self, count: int, loss_sum: float, square_sum: float) -> "Surprise":
        if count == 0:
            return self
        tokens = self.tokens + count
        share = count / min(tokens, max(HORIZON, count))  # at first a plain mean
        mean = self.mean + share * (loss_sum / count - self.mean)
        square = self.square + share * (square_sum / count - self.square)
        return Surprise(mean, square, tokens)


class Admission(NamedTuple):
    admitted: Tensor  # bool, like the losses
    held_back: dict[str, Tensor]  # () how many, by which gate; a token may be held back by several


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of predictions in nats: (..., V) -> (...)."""
    log_p = logits.float().log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


@torch.no_grad()
def admit(
    config: GateConfig,
    candidates: Tensor,
    losses: Tensor,
    logits: Tensor,
    confidence: Tensor,
    surprise: Surprise,
) -> Admission:
    """Decide which of the `candidates` (...) may teach.

    `confidence` is the least of the layers' router confidences; where a token was not routed it is NaN, and
    such a token teaches nothing.
    """
    reasons: dict[str, Tensor] = {"not_routed": confidence.isnan()}
    if config.min_entropy is not None or config.max_entropy is not None:
        nats = entropy(logits)
        if config.min_entropy is not None:
            reasons["min_entropy"] = nats < config.min_entropy
        if config.max_entropy is not None:
            reasons["max_entropy"] = nats > config.max_entropy
    if config.min_confidence is not None:
        reasons["min_confidence"] = confidence < config.min_confidence
    if config.max_surprise is not None:
        reasons["max_surprise"] = losses > surprise.limit(config.max_surprise)
    admitted = candidates.clone()
    for refused in reasons.values():
        admitted &= ~refused
    return Admission(admitted, {name: (refused & candidates).sum() for name, refused in reasons.items()})
