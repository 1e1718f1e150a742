"""Texts without labels: which path a text belongs to, and when it is time for a new overlay.

A path explains a text that it predicts no worse than it is used to. What it is used to are its losses, as it
is now, on the last piece that it learned (the base: on the text of `calibrate`). Pieces of one domain differ,
and an overlay is used to the one it learned last: so it also explains what it predicts nearer to that than to
what the base makes of it. But where the base does better, an overlay has nothing to say.
"""

import itertools
import logging
import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

from attractor.continual.config import GuardConfig
from attractor.continual.gates import Surprise
from attractor.continual.guard import BASE
from attractor.continual.lesson import Observation, Totals
from attractor.model import GPT

log = logging.getLogger("attractor")


class Path(Protocol):
    """What was learned of one domain."""

    usual: Surprise

    @property
    def model(self) -> GPT: ...


class Paths(Protocol):
    """What has to be known of a learner."""

    base: GPT
    usual: Surprise
    config: GuardConfig
    totals: Totals
    unclaimed: list[np.ndarray]

    @property
    def sources(self) -> Mapping[str, Path]: ...
    def losses(self, path: GPT, tokens: np.ndarray) -> Tensor: ...
    def observe(self, text: np.ndarray, source: str) -> Observation: ...
    def taken(self) -> set[str]:
        """Names that no new overlay may have."""


def owner(learner: Paths, tokens: np.ndarray) -> str | None:
    """The path that predicts the tokens best, of those that explain them."""
    base = float(learner.losses(learner.base, tokens).mean())
    explaining = {BASE: base} if base <= _limit(learner, learner.usual, tokens) else {}
    for name, path in learner.sources.items():
        loss, usual = float(learner.losses(path.model, tokens).mean()), path.usual
        limit = max(_limit(learner, usual, tokens), (usual.mean + base) / 2)
        if usual.tokens and loss < base and loss <= limit:
            explaining[name] = loss
    return min(explaining, key=lambda name: explaining[name]) if explaining else None


def _limit(learner: Paths, usual: Surprise, tokens: np.ndarray) -> float:
    """Worse than usual is a mean loss above the usual one by the tolerance and three standard errors."""
    if not usual.tokens:
        return -math.inf
    return usual.mean + learner.config.tolerance + 3 * usual.deviation / math.sqrt(len(tokens) - 1)


def observe(learner: Paths, tokens: np.ndarray) -> Observation:
    """Piece by piece: the owner learns it, the base learns nothing, and what nobody explains waits.

    When `patience` pieces in a row wait, an overlay is opened for them.
    """
    if not learner.usual.tokens:
        raise ValueError("without a source the base must know its own domain: call calibrate(text) first")
    if len(tokens) < 2:
        raise ValueError("a text without a source needs two tokens or more: the first is not predicted")
    done = Observation()
    for piece in np.array_split(tokens, -(-len(tokens) // learner.config.piece)):
        found = owner(learner, piece) if len(piece) > 1 else None
        if found is None:
            learner.unclaimed.append(piece)
            if len(learner.unclaimed) < learner.config.patience:
                continue
            name = _new_name(learner)
            log.info("nothing known explains the text: overlay %r is opened for it", name)
            done = done.then(learner.observe(np.concatenate(learner.unclaimed), source=name))
        elif found == BASE:
            losses = learner.losses(learner.base, piece)
            seen = Observation(len(piece), float(losses.double().sum()), len(losses), source=BASE)
            learner.totals = learner.totals.after(seen, learner.totals.surprise)
            done = done.then(seen)
        else:
            done = done.then(learner.observe(piece, source=found))
        learner.unclaimed = []
    return done


def _new_name(learner: Paths) -> str:
    used = learner.taken()
    return next(name for number in itertools.count(1) if (name := f"domain-{number}") not in used)
