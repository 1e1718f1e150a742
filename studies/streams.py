"""A stream that goes from domain to domain and back, once, without labels: one method's cell."""

import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attractor.continual import domains
from attractor.continual.config import GuardConfig, LearnConfig, UpdateConfig, rate_factor
from attractor.continual.gates import Surprise
from attractor.continual.guard import BASE, Guard
from attractor.continual.guarded import GuardedLearner
from attractor.continual.observation import Observation, Totals
from attractor.continual.overlay import fingerprint
from attractor.continual.update import NotFiniteUpdate
from attractor.data import windows
from attractor.evaluate import evaluate, token_losses
from attractor.lm import LanguageModel
from attractor.model import GPT
from studies.adapting import Meter, situation, sizes
from studies.grid import Settings, Values
from studies.methods import METHODS, PAPER_ROLES, Adapter, Method, replay
from studies.plan import PLANS, Plan, Text, device_of, domain, load_base

GUARDED = "APN, guarded, no labels"
ONLINE = {
    name: METHODS[name]
    for name in ("dense, full", "dense, FFN only", "dense, EWC 1", "APN, strictly local", "APN, paper rule")
} | {
    "dense, replay 5 % of all so far": Method("dense", replay(0.05, remember=True)),
    "dense, replay 25 % of all so far": Method("dense", replay(0.25, remember=True)),
}
"""Replay begins with a memory of the old text, and EWC with what it says about the weights."""
COPIES = {
    "dense, guarded, no labels": METHODS["dense, full"],
    "dense LoRA on all, guarded, no labels": METHODS["dense, LoRA on all"],
}
"""The rules of the guarded learner without its patches: what those are measured by."""
LEARNERS = {name: method.model for name, method in (ONLINE | COPIES).items()} | {GUARDED: "apn"}
"""Method -> the model it starts from."""


class Online:
    """A method that learns from batches, fed with the stream as it comes.

    With a horizon its rate falls as that of an overlay does (`LearnConfig.rate_horizon`).
    """

    def __init__(self, adapter: Adapter, plan: Plan, rate: float, horizon: int | None = None) -> None:
        self.adapter, self.plan, self.rate, self.horizon = adapter, plan, rate, horizon
        self.seen = 0

    def learn(self, piece: np.ndarray) -> str:
        context = self.adapter.model.config.context
        whole = piece[: (len(piece) - 1) // context * context + 1]  # a memory has sequences of one length
        for inputs, targets, _ in windows(whole, context, self.plan.batch_size):
            self.adapter.step(inputs, targets, self.rate * rate_factor(self.seen, self.horizon))
            self.seen += targets.numel()
        return "the model"

    def predictor(self) -> LanguageModel:
        return self.adapter.model

    def described(self) -> dict[str, Any]:
        return {"trained": self.adapter.trained}


class Guarded:
    """GuardedLearner without labels: overlays open and are found again by themselves."""

    def __init__(
        self, base: GPT, plan: Plan, rate: float, home: np.ndarray, archive: Path, horizon: int | None = None
    ) -> None:
        block = plan.batch_size * base.config.context
        update = UpdateConfig(train=PAPER_ROLES, learning_rate=rate, clip_norm=1.0)
        config = GuardConfig(
            learn=LearnConfig(update=update, budget=block, rate_horizon=horizon),
            attention="whole",
            also=("embedding", "norms"),
            piece=block,
            keep_versions=1,
        )
        self.learner = GuardedLearner(base, config=config, archive=archive)
        self.learner.calibrate(home)

    def learn(self, piece: np.ndarray) -> str:
        """It remembers what came before: the last token, the next piece's first, comes with that one."""
        return self.learner.observe(piece[:-1], source=None).source or "nobody yet"

    def predictor(self) -> LanguageModel:
        return self.learner.guard

    def described(self) -> dict[str, Any]:
        overlays = self.learner.overlays()
        return {
            "overlays": {name: {"tokens": o["tokens"], "bytes": o["bytes"]} for name, o in overlays.items()}
        }


@dataclass
class Copy:
    """A model of its own for one domain."""

    online: Online
    tokens: int = 0
    usual: tuple[domains.Usual, ...] = ()

    @property
    def model(self) -> LanguageModel:
        return self.online.predictor()


class GuardedCopies:
    """What GuardedLearner does without labels, for a method that knows no overlays: a model for each domain.

    None has to make room for another.
    """

    def __init__(
        self,
        base: GPT,
        plan: Plan,
        home: np.ndarray,
        start: Callable[[], Online],
        autocast: Callable[[], AbstractContextManager],
    ) -> None:
        self.base, self.start, self.autocast = base, start, autocast
        self.config = GuardConfig(piece=plan.batch_size * base.config.context + 1)
        self.usual = Surprise().after(self.losses(base, home))
        self.sources: dict[str, Copy] = {}
        self.totals = Totals()
        self.unclaimed: list[np.ndarray] = []

    def losses(self, path: LanguageModel, tokens: np.ndarray) -> Tensor:
        return token_losses(path, tokens, autocast=self.autocast)

    def taken(self) -> set[str]:
        return set(self.sources)

    def archived(self) -> Iterator[tuple[str, Copy]]:
        return iter(())

    def observe(self, text: np.ndarray, source: str) -> Observation:
        held = self.sources[source] if source in self.sources else Copy(self.start())
        held.online.learn(text)
        held.tokens += len(text)
        for piece in np.array_split(text, -(-len(text) // self.config.piece)):
            held.usual = domains.after_learning(self, held, piece)
        self.sources[source] = held  # if nothing failed
        return Observation(len(text), source=source)

    def learn(self, piece: np.ndarray) -> str:
        return domains.observe(self, piece).source or "nobody yet"

    def predictor(self) -> LanguageModel:
        paths = {BASE: self.base} | {name: held.model for name, held in self.sources.items()}
        guard = Guard(paths, prior=self.config.prior, pause=self.config.pause)
        return guard.to(self.base.device).eval()

    def described(self) -> dict[str, Any]:
        return {
            "overlays": {
                name: {"tokens": held.tokens, "bytes": sizes(held.online.adapter, self.base)["bytes"]}
                for name, held in self.sources.items()
            }
        }


def visits(plan: Plan, order: list[str], texts: dict[str, Text]) -> Iterator[tuple[str, np.ndarray]]:
    """A domain goes on where it was left; there is enough of each, so that nothing is seen twice."""
    place: Counter[str] = Counter()
    for name in order:
        start = place[name]
        tokens = texts[name].train[start : start + plan.stream_tokens + 1]
        if len(tokens) <= plan.stream_tokens:
            raise ValueError(
                f"{name} has too few bytes for {order.count(name)} visits of {plan.stream_tokens}"
            )
        yield name, tokens
        place[name] += plan.stream_tokens


def run(settings: Settings, folder: Path) -> Values:
    """The result matrix: losses of all domains before the stream and after each visit."""
    plan, device = PLANS[settings["size"]], device_of(settings)
    base = load_base(folder, settings["base"], device)
    unchanged = fingerprint(base)
    texts = {name: domain(plan, folder, name) for name in dict.fromkeys(settings["order"])}
    home = {settings["order"][0]: texts[settings["order"][0]]}
    torch.manual_seed(settings["seed"])
    meter = Meter(base, {})
    known = home[settings["order"][0]].validation  # what the base is used to
    rate, horizon = settings["rate"], settings.get("horizon")
    learner: Online | Guarded | GuardedCopies
    if settings["method"] == GUARDED:
        archive = folder / "archives" / f"{'-'.join(settings['order'])}-{rate:g}-{horizon}-{settings['seed']}"
        shutil.rmtree(archive, ignore_errors=True)  # of a run that was stopped
        learner = Guarded(base, plan, rate, known, archive, horizon)
    else:
        make = (ONLINE | COPIES)[settings["method"]].make

        def begin() -> Online:
            return Online(make(situation(plan, settings, base, home)), plan, rate, horizon)

        copies = settings["method"] in COPIES
        learner = GuardedCopies(base, plan, known, begin, meter.cast) if copies else begin()

    def matrix_row() -> dict[str, float]:
        model = learner.predictor()
        return {name: evaluate(model, text.test, autocast=meter.cast) for name, text in texts.items()}

    matrix, progressive, claimed = [matrix_row()], [], []
    started, diverged = time.perf_counter(), None
    block = plan.batch_size * base.config.context
    for visit, (_, tokens) in enumerate(visits(plan, settings["order"], texts)):
        losses: list[float] = []
        took: Counter[str] = Counter()
        for start in range(0, len(tokens) - 1, block) if diverged is None else ():
            piece = tokens[start : start + block + 1]  # its last token is the next one's first
            losses.append(evaluate(learner.predictor(), piece, autocast=meter.cast))  # before it is learned
            try:
                took[learner.learn(piece)] += len(piece) - 1
            except NotFiniteUpdate:
                diverged = visit
                break
        progressive.append(float(np.mean(losses)) if diverged is None else math.nan)
        claimed.append(dict(took))
        matrix.append(matrix_row())
    return {
        "order": settings["order"],
        "matrix": matrix,
        "progressive": progressive,
        "claimed": claimed,
        "diverged": diverged,
        "seconds": time.perf_counter() - started,
        "base": unchanged,
        "base_unchanged": fingerprint(base) == unchanged,
        **learner.described(),
    }
