"""Texts without labels: which path a text belongs to, and when it is time for a new overlay.

A path explains a text that it predicts no worse than it is used to. What it is used to are its losses, as it
is now, on the last piece that it learned (the base: on the text of `calibrate`).
"""

import itertools
import logging
import math
from typing import TYPE_CHECKING

import numpy as np

from attractor.continual.guard import BASE
from attractor.continual.lesson import Observation

if TYPE_CHECKING:
    from attractor.continual.guarded import GuardedLearner

log = logging.getLogger("attractor")


def owner(learner: "GuardedLearner", tokens: np.ndarray) -> str | None:
    """The path that predicts the tokens best, of those that explain them.

    Worse than usual is a mean loss above the usual one by more than the tolerance and three standard errors.
    """
    paths = {BASE: (learner.base, learner.usual)}
    paths |= {name: (held.branch.model, held.usual) for name, held in learner.sources.items()}
    explaining = {}
    for name, (path, usual) in paths.items():
        losses = learner._losses(path, tokens)
        error = usual.deviation / math.sqrt(len(losses))
        if usual.tokens and float(losses.mean()) <= usual.mean + learner.config.tolerance + 3 * error:
            explaining[name] = float(losses.mean())
    return min(explaining, key=lambda name: explaining[name]) if explaining else None


def observe(learner: "GuardedLearner", tokens: np.ndarray) -> Observation:
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
            losses = learner._losses(learner.base, piece)
            seen = Observation(len(piece), float(losses.double().sum()), len(losses), source=BASE)
            learner.totals = learner.totals.after(seen, learner.totals.surprise)
            done = done.then(seen)
        else:
            done = done.then(learner.observe(piece, source=found))
        learner.unclaimed = []
    return done


def _new_name(learner: "GuardedLearner") -> str:
    used = {*learner.sources, *learner.consolidated, *(learner.archive.names() if learner.archive else ())}
    return next(name for number in itertools.count(1) if (name := f"domain-{number}") not in used)
