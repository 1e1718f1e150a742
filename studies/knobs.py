"""What each knob of learning from a stream buys and costs: one is turned at a time, everything else stays.

    python -m studies knobs --size smoke
    python -m studies knobs --size small     an hour on two CPU cores

An APN that was trained on one domain learns a stream of another one, once, by strictly local updates at one
rate: the best of the plan's for no knob. A row says what the model then loses on the old domain and on the
new one, both of which it has not seen, on windows in which they take turns, and how many patches moved. Knobs
of the guard are compared with the guard without them.
"""

import copy
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from attractor.continual.config import AllocationConfig, GateConfig, GuardConfig, LearnConfig, UpdateConfig
from attractor.continual.guarded import GuardedLearner
from attractor.continual.learner import OnlineLearner
from attractor.continual.overlay import fingerprint
from attractor.continual.update import NotFiniteUpdate
from attractor.evaluate import evaluate, routing
from attractor.lm import LanguageModel, TrainableModel
from attractor.model import GPT
from studies.adapting import Meter
from studies.grid import Inquiry, Settings, Values
from studies.methods import CLIP
from studies.plan import HOME, PLANS, Plan, Text, device_of, domain, load_base
from studies.statistics import mean

if TYPE_CHECKING:
    from studies.cells import Benchmark, Cells

SHIFT = "kjv"
SOURCE = "new"
LOWER = (1e-4, 3e-4)
"""Rates besides the plan's: the lowest of those was the best (results/knobs-h200.json)."""
TURN = 3
"""Of a mixed window, one part in so many is of the old domain, then one of the new, then one of the old."""
Changes = dict[str, Any]


@dataclass(frozen=True)
class Knob:
    """One setting. Pairs such as ("norm", 1.1) are in units that are `Measured` in the base."""

    learn: Changes = field(default_factory=dict)
    """Of LearnConfig; "update.x", "gates.x" and "allocation.x" are of its parts."""
    guard: Changes | None = None
    """Of GuardConfig: then a guarded learner learns. None: an online one."""
    background: bool = False
    """Whether patches are ranked by what the old domain uses."""
    consolidates: bool = False
    """Whether the overlay becomes the base in the end, as far as canaries let it."""


KNOBS: dict[str, Knob] = {
    "none": Knob(),
    "rule=sgd": Knob({"update.rule": "sgd", "update.learning_rate": ("times", 100.0)}),
    "rate / 3": Knob({"update.learning_rate": ("times", 1 / 3)}),
    "weight_decay=0.1": Knob({"update.weight_decay": 0.1}),
    "train: also prototypes": Knob({"update.train": ("decoders", "gates", "prototypes")}),
    "train: also encoder": Knob({"update.train": ("decoders", "gates", "encoder")}),
    "train: decoders alone": Knob({"update.train": ("decoders",)}),
    "max_change: 1/3 of the usual": Knob({"update.max_change": ("change", 1 / 3)}),
    "max_change: 1/10 of the usual": Knob({"update.max_change": ("change", 0.1)}),
    "max_decoder: the base's mean": Knob({"update.max_decoder": ("norm", 1.0)}),
    "max_decoder: 1.1 of it": Knob({"update.max_decoder": ("norm", 1.1)}),
    "min_entropy=1": Knob({"gates.min_entropy": 1.0}),
    "max_entropy=2": Knob({"gates.max_entropy": 2.0}),
    "min_confidence: the base's median": Knob({"gates.min_confidence": ("confidence", 0.5)}),
    "max_surprise=1": Knob({"gates.max_surprise": 1.0}),
    "max_surprise=2": Knob({"gates.max_surprise": 2.0}),
    "prototype_rate=0.01": Knob({"prototype_rate": 0.01}),
    "prototype_rate=0.1": Knob({"prototype_rate": 0.1}),
    "max_patches: a quarter": Knob({"max_patches": ("patches", 0.25)}, background=True),
    "max_patches: a tenth": Knob({"max_patches": ("patches", 0.1)}, background=True),
    "allocation: grow": Knob({"allocation.mode": "grow", "allocation.novelty": ("confidence", 0.9)}),
    "allocation: replace": Knob({"allocation.mode": "replace", "allocation.novelty": ("confidence", 0.9)}),
    "allocation: min_share=0.1": Knob(
        {"allocation.mode": "replace", "allocation.min_share": 0.1, "allocation.novelty": -1e9}
    ),
    "rate_horizon: a quarter of the stream": Knob({"rate_horizon": ("stream", 0.25)}),
    "budget x 4": Knob({"budget": ("budget", 4)}),
    "budget / 4": Knob({"budget": ("budget", 0.25)}),
    "scale_factor=0.5": Knob({"scale_factor": 0.5}),
    "dropout": Knob({"dropout": True}),
    "guard": Knob(guard={}),
    "guard, switch_rate=0.01": Knob(guard={"switch_rate": 0.01, "pause": 0.0}),
    "guard, switch_rate=0.05": Knob(guard={"switch_rate": 0.05, "pause": 0.0}),
    "guard, prior=0.9": Knob(guard={"prior": 0.9}),
    "guard, window: a quarter": Knob(guard={"window": ("context", 0.25)}),
    "guard, attention=low_rank": Knob(guard={"attention": "low_rank"}),
    "guard, attention=whole": Knob(guard={"attention": "whole"}),
    "guard, attention=whole, also embedding and norms": Knob(
        guard={"attention": "whole", "also": ("embedding", "norms")}
    ),
    "guard, consolidated": Knob(guard={}, consolidates=True),
}
"""What the table calls it -> what it changes."""


class Measured(NamedTuple):
    """What a setting may be given in units of."""

    rate: float
    budget: int
    stream: int
    context: int
    patches: int
    change: float  # the norm by which a step moves a patch, at most: Adam moves every number by its rate
    norm: float  # of decoders, in the mean
    confidence: np.ndarray  # of the tokens of the old domain

    @classmethod
    def of(cls, base: GPT, plan: Plan, rate: float, old: np.ndarray) -> "Measured":
        layers = list(base.apn_layers().values())
        decoders = torch.cat(
            [
                bank.detach().flatten(1).norm(dim=1)
                for layer in layers
                for bank in layer.parameters_of("decoders")
            ]
        )
        numbers = layers[0].config.rank * (layers[0].dim + 2)
        stats = routing(base, old).values()
        return cls(
            rate=rate,
            budget=plan.batch_size * base.config.context,
            stream=plan.stream_tokens,
            context=base.config.context,
            patches=min(layer.num_patches for layer in layers),
            change=rate * numbers**0.5,
            norm=float(decoders.mean()),
            confidence=np.concatenate([part.confidence.flatten().numpy() for part in stats]),
        )

    def resolve(self, value: Any) -> Any:
        """A setting as the learner takes it."""
        if not (isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], float | int)):
            return value
        unit, share = value
        if unit == "times":
            return share * self.rate
        if unit == "confidence":
            return float(np.quantile(self.confidence, share))
        amount = share * getattr(self, unit)
        return amount if unit in ("change", "norm") else max(1, round(amount))


def config_of(knob: Knob, measured: Measured) -> LearnConfig:
    plain = {
        "budget": measured.budget,
        "update.learning_rate": measured.rate,
        "update.clip_norm": CLIP,
        "allocation.window": measured.budget,
        "allocation.cooldown": 2 * measured.budget,
    }
    changes = plain | {name: measured.resolve(value) for name, value in knob.learn.items()}

    def of(part: str) -> Changes:
        return {
            name.removeprefix(f"{part}."): value
            for name, value in changes.items()
            if name.startswith(f"{part}.")
        }

    return LearnConfig(
        update=UpdateConfig(**of("update")),
        gates=GateConfig(**of("gates")),
        allocation=AllocationConfig(**of("allocation")),
        **{name: value for name, value in changes.items() if "." not in name},
    )


class Learned(NamedTuple):
    """What a stream made of the base."""

    path: TrainableModel  # that learned
    whole: LanguageModel  # that is asked: the path itself, or the guard's mixture
    refused: str | None = None  # why the overlay did not become the base


def learn(settings: Settings, folder: Path) -> Values:
    """The cell of one knob: a stream is learned, and the old and the new domain are measured."""
    plan, knob = PLANS[settings["size"]], Knob(**settings["knob"])
    base = load_base(folder, settings["base"], device_of(settings))
    old, new = (domain(plan, folder, name) for name in (settings["members"][0], settings["shift"]))
    measured = Measured.of(base, plan, settings["rate"], old.validation)
    config = config_of(knob, measured)
    torch.manual_seed(settings["seed"])
    mixture = mixed(old, new, base.config.context)
    meter = Meter(base, {"old": old.test, "new": new.test, "mixed": mixture, "chosen by": new.validation})
    before = losses(meter, base)
    learner: OnlineLearner | GuardedLearner
    if knob.guard is None:
        learner = OnlineLearner(copy.deepcopy(base), config=config)
        if knob.background:
            learner.set_background(old.validation)
    else:
        changes = {name: measured.resolve(value) for name, value in knob.guard.items()}
        guard = GuardConfig(learn=config, **changes)
        learner = GuardedLearner(copy.deepcopy(base), config=guard)
    started, diverged = time.perf_counter(), False
    try:
        for start in range(0, plan.stream_tokens, measured.budget):
            learner.observe(new.train[start : start + measured.budget], source=SOURCE)
        learner.flush()
    except NotFiniteUpdate:
        diverged = True
    seconds = time.perf_counter() - started
    learned = what_it_made(learner, old.validation if knob.consolidates else None)
    return {
        "before": before,
        "after": losses(meter, learned.whole),
        "path": losses(meter, learned.path),
        "moved": moved_patches(base, learned.path) / patches_of(base),
        "allocated": patches_of(learned.path) - patches_of(base),
        "diverged": diverged,
        "refused": learned.refused,
        "seconds": seconds,
        "config": config.to_dict(),
        "base": fingerprint(base),
    }


def what_it_made(learner: OnlineLearner | GuardedLearner, canary: np.ndarray | None) -> Learned:
    """With a canary the overlay becomes the base, unless that makes the canary worse."""
    if isinstance(learner, OnlineLearner):
        return Learned(learner.model, learner.model)
    path = learner.sources[SOURCE].branch.model
    if canary is not None:
        try:
            learner.consolidate(SOURCE, {"old": canary}).confirm()
        except ValueError as error:
            return Learned(path, learner.guard, str(error))
    return Learned(path, learner.guard)


def losses(meter: Meter, model: LanguageModel) -> dict[str, float]:
    return {name: evaluate(model, text, autocast=meter.cast) for name, text in meter.texts.items()}


def mixed(old: Text, new: Text, context: int) -> np.ndarray:
    """The old and the new domain in turn, so that every window holds both."""
    part = max(1, context // TURN)
    count = min(len(old.test), len(new.test)) // part
    texts = (old.test, new.test)
    return np.concatenate([texts[turn % 2][turn * part : (turn + 1) * part] for turn in range(count)])


def patches_of(model: TrainableModel) -> int:
    return sum(layer.num_patches for layer in model.apn_layers().values())


def moved_patches(base: TrainableModel, learned: TrainableModel) -> int:
    """How many of the base's patches are not what they were."""
    count = 0
    for number, layer in base.apn_layers().items():
        moved = torch.zeros(layer.num_patches, dtype=torch.bool, device=layer.encoder.device)
        banks = zip(layer.patch_parameters(), learned.apn_layers()[number].patch_parameters(), strict=True)
        for bank, now in banks:
            moved |= (bank != now[: len(moved)]).flatten(1).any(1)
        count += int(moved.sum())
    return count


def run(bench: "Benchmark", result: Path) -> dict[str, Any]:
    seeds = range(bench.plan.seeds)

    def tried(seed: int) -> Inquiry[dict[str, Values]]:
        yield bench.pretrain("apn", HOME, seed)
        cells: Cells = {}
        for rate in bench.plan.rates if bench.size == "smoke" else sorted({*LOWER, *bench.plan.rates}):
            cells |= bench.knob("none", asdict(KNOBS["none"]), HOME, SHIFT, seed, rate)
        return (yield cells)

    ladder = bench.answer({0: tried(0)})[0]
    best = min(ladder.values(), key=lambda cell: cell["after"]["chosen by"])
    rate = best["config"]["update"]["learning_rate"]

    def turned(seed: int) -> Inquiry[dict[str, Values]]:
        yield bench.pretrain("apn", HOME, seed)
        cells: Cells = {}
        for name, knob in KNOBS.items():
            cells |= bench.knob(name, asdict(knob), HOME, SHIFT, seed, rate)
        found = yield cells
        return dict(zip(KNOBS, found.values(), strict=True))

    found: dict[int, dict[str, Values]] = {}
    for seed in seeds:  # one after the other: a run that is stopped has whole ones
        found |= bench.answer({seed: turned(seed)})
    rows = {name: row([found[seed][name] for seed in seeds]) for name in KNOBS}
    return bench.write(
        result,
        "knobs",
        seeds=len(seeds),
        rate=rate,
        shift=[HOME, SHIFT],
        tokens=bench.plan.stream_tokens,
        rows=rows,
        config=bench.plan.config("apn", 0).to_dict(),
    )


def row(cells: list[Values]) -> dict[str, Any]:
    """Nats lost (less than 0: gained) on each text, per seed and in the mean; what it took."""
    rises = {
        text: [cell["after"][text] - cell["before"][text] for cell in cells]
        for text in ("old", "new", "mixed")
    }
    return {
        **{text: mean(values) for text, values in rises.items()},
        "by_seed": rises,
        "path_old": mean(cell["path"]["old"] - cell["before"]["old"] for cell in cells),
        "path_new": mean(cell["path"]["new"] - cell["before"]["new"] for cell in cells),
        "moved": mean(cell["moved"] for cell in cells),
        "allocated": mean(cell["allocated"] for cell in cells),
        "seconds": mean(cell["seconds"] for cell in cells),
        "diverged": sum(cell["diverged"] for cell in cells),
        "refused": [cell["refused"] for cell in cells if cell["refused"]],
    }
