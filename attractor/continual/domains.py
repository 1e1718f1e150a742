"""Texts without labels: which path a text belongs to, and when it is time for a new overlay.

A path explains a text that it predicts no worse than it is used to. An overlay is used to what it made of the
last pieces that it learned, the hardest of them: pieces of one domain differ, by a lot in some domains and by
little in others. And it must not be further behind the base than it is used to, which is not at all, once it
has learned something. What the base is used to are its losses on the text of `calibrate`.
"""

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from attractor.continual.config import GuardConfig
from attractor.continual.gates import Surprise
from attractor.continual.guard import BASE
from attractor.continual.observation import Observation, Totals
from attractor.lm import LanguageModel

log = logging.getLogger("attractor")


class Usual(NamedTuple):
    """What a path made of a piece that it had just learned, in nats per token."""

    loss: float
    deviation: float  # of the losses of its tokens
    base: float  # what the base makes of it


REMEMBERED = 8
"""The last pieces, by which it is known what an overlay is used to."""


def usual_in(values: Any) -> tuple[Usual, ...]:
    """Read what an overlay is used to from a file of unknown origin; a ValueError where it is damaged."""
    try:
        found = tuple(Usual(*map(float, piece)) for piece in values)[-REMEMBERED:]
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{values!r} does not say what an overlay is used to") from error
    if not all(math.isfinite(number) for piece in found for number in piece):
        raise ValueError("what an overlay is used to has numbers that are not finite")
    return found


class Path(Protocol):
    """What was learned of one domain."""

    @property
    def usual(self) -> tuple[Usual, ...]: ...
    @property
    def model(self) -> LanguageModel: ...


class Paths(Protocol):
    """What has to be known of a learner."""

    usual: Surprise  # of the base
    config: GuardConfig
    totals: Totals
    unclaimed: list[np.ndarray]

    @property
    def base(self) -> LanguageModel: ...
    @property
    def sources(self) -> Mapping[str, Path]: ...
    def losses(self, path: LanguageModel, tokens: np.ndarray) -> Tensor: ...
    def observe(self, text: np.ndarray, source: str) -> Observation: ...
    def archived(self) -> Iterator[tuple[str, Path]]:
        """Overlays that had to make room, one after the other."""

    def taken(self) -> set[str]:
        """Names that no new overlay may have."""


def owner(learner: Paths, tokens: np.ndarray) -> str | None:
    """The path that predicts the tokens best, of those that explain them."""
    base = float(learner.losses(learner.base, tokens).mean())
    own = learner.usual
    known = [Usual(own.mean, own.deviation, own.mean)] if own.tokens else []
    explaining = {BASE: base} if _explains(learner, known, base, base, tokens) else {}
    return _best(explaining | _explaining(learner, learner.sources.items(), base, tokens))


def who_returns(learner: Paths, tokens: np.ndarray) -> str | None:
    """The same among the overlays that had to make room, which takes reading them."""
    base = float(learner.losses(learner.base, tokens).mean())
    return _best(_explaining(learner, learner.archived(), base, tokens))


def _explaining(
    learner: Paths, paths: Iterable[tuple[str, Path]], base: float, tokens: np.ndarray
) -> dict[str, float]:
    """The losses of those that explain the tokens."""
    found = {}
    for name, path in paths:
        loss = float(learner.losses(path.model, tokens).mean())
        if _explains(learner, path.usual, loss, base, tokens):
            found[name] = loss
    return found


def _best(losses: Mapping[str, float]) -> str | None:
    return min(losses, key=lambda name: losses[name]) if losses else None


def _explains(learner: Paths, usual: Sequence[Usual], loss: float, base: float, tokens: np.ndarray) -> bool:
    """Worse than usual is a loss above the usual one by more than the tolerance and three standard errors."""
    if not usual:
        return False
    tolerance, count = learner.config.tolerance, math.sqrt(len(tokens) - 1)
    hardest = max(piece.loss + 3 * piece.deviation / count for piece in usual)
    behind = max(0.0, *(piece.loss - piece.base for piece in usual))
    return loss <= hardest + tolerance and loss - base <= behind + tolerance


def after_learning(learner: Paths, path: Path, piece: np.ndarray) -> tuple[Usual, ...]:
    """What a path is used to, now that it has learned this piece."""
    own, base = (learner.losses(model, piece).double() for model in (path.model, learner.base))
    now = Usual(float(own.mean()), float(own.std(correction=0)), float(base.mean()))
    return (*path.usual, now)[-REMEMBERED:]


def observe(learner: Paths, tokens: np.ndarray) -> Observation:
    """Piece by piece: the owner learns it, the base learns nothing, and what no path explains waits.

    When `patience` pieces in a row wait, an overlay comes back from the archive or is opened for them. If
    a path explains the next one before that, they are let go, and counted as held back.
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
            waiting = np.concatenate(learner.unclaimed)
            name = who_returns(learner, waiting) if len(waiting) > 1 else None
            if name is None:
                name = _new_name(learner)
                log.info("nothing known explains the text: overlay %r is opened for it", name)
            done = done.then(learner.observe(waiting, source=name))
            learner.unclaimed = []
            continue
        if waited := sum(map(len, learner.unclaimed)):
            done = done.then(_noted(learner, Observation(waited, held_back={"unclaimed": waited})))
        learner.unclaimed = []
        if found == BASE:
            losses = learner.losses(learner.base, piece)
            seen = Observation(len(piece), float(losses.double().sum()), len(losses), source=BASE)
            done = done.then(_noted(learner, seen))
        else:
            done = done.then(learner.observe(piece, source=found))
    return done


def _noted(learner: Paths, seen: Observation) -> Observation:
    """What was seen without being learned."""
    learner.totals = learner.totals.after(seen, learner.totals.surprise)
    return seen


def _new_name(learner: Paths) -> str:
    used = learner.taken()
    return next(name for number in itertools.count(1) if (name := f"domain-{number}") not in used)
