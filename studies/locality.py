"""A stream of domains that were not pretrained on, seen once, without labels, guard or replay: what is left?

    python -m studies locality --size smoke
    python -m studies locality --size small --jobs 6 --domain german=law.txt austen=austen.txt

Does learning in few patches leave the other domains alone? Strictly local updates of layers with very many
patches, basins beside a model that stays as it is (`studies.beside`), and everything that others do, each at
the rate of a ladder that leaves the lowest validation loss over all domains of a stream of two. What is
reported of a domain is by how much its test loss rose since it was learned (of the base's own text: since the
beginning), what it gained, how many patches were touched, and what a long text does to its own beginning.
"""

import copy
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attractor import monitor
from attractor.continual.baselines import FineTune
from attractor.continual.overlay import fingerprint
from attractor.continual.update import NotFiniteUpdate
from attractor.data import windows
from attractor.evaluate import evaluate, routing
from attractor.lm import LanguageModel
from attractor.model import GPT
from studies.adapting import Meter, situation
from studies.beside import PIECE, BesideBase, BesideLearner
from studies.grid import Inquiry, Settings, Values
from studies.knobs import moved_patches
from studies.methods import METHODS, Adapter, Method, Situation, baseline, replay
from studies.plan import FOLIO, HOME, PAPER, PLANS, Plan, Text, device_of, domain, load_base
from studies.rates import best_rate, climb
from studies.statistics import mean
from studies.streams import Online, visits

if TYPE_CHECKING:
    from studies.cells import Benchmark

LADDER = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
"""Rates for all; smoke has the plan's."""
LONG = 8
"""A long text is as long as so many visits of the stream, if there is as much."""
PATCHES = (1024, 4096)
CALIBRATION = 262_144
"""Bytes of the base's own text, at most, that basins are calibrated by, once."""
OldText = Literal["none", "before", "always"]


class L2(FineTune):
    """Adds strength / 2 times the squared distance to the parameters at the start (arXiv 1802.01483)."""

    def __init__(self, model: GPT, strength: float, **options: Any) -> None:
        super().__init__(model, "all", **options)
        self.strength = strength
        self.start = [parameter.detach().clone() for parameter in self.trainable]

    def penalty(self) -> Tensor:
        pairs = zip(self.trainable, self.start, strict=True)
        return self.strength / 2 * torch.stack([(now - then).square().sum() for now, then in pairs]).sum()


class KL(FineTune):
    """Adds strength times the divergence from the base's predictions on the new text."""

    def __init__(self, model: GPT, strength: float, **options: Any) -> None:
        super().__init__(model, "all", **options)
        self.strength = strength
        self.start = copy.deepcopy(model).requires_grad_(False).eval()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(inputs).flatten(0, 1)
        with torch.no_grad(), self.autocast():
            before = self.start(inputs)
        before = before.float().flatten(0, 1).log_softmax(-1)
        away = F.kl_div(logits.log_softmax(-1), before, reduction="batchmean", log_target=True)
        return F.cross_entropy(logits, targets.flatten()) + self.strength * away


@dataclass(frozen=True)
class Learner:
    """What learns, from which model, and when it is shown the base's own text."""

    method: Method
    patches: int | None = None  # of each layer of a base with more and smaller ones
    old_text: OldText = "none"
    share: float = 1.0  # of what was learned, in the weights that are asked (WiSE-FT)

    @property
    def variant(self) -> str | None:
        return None if self.patches is None else f"k{self.patches}"


def _beside(situation: Situation) -> Adapter:
    raise NotImplementedError("basins read pieces, and not batches")


BASINS = "basins beside the base"
LEARNERS = {
    **{
        f"APN, strictly local, 4 of {count} patches": Learner(METHODS["APN, strictly local"], count)
        for count in PATCHES
    },
    "APN, strictly local": Learner(METHODS["APN, strictly local"]),
    BASINS: Learner(Method("dense", _beside), old_text="before"),
    **{name: Learner(METHODS[name]) for name in ("dense, full", "dense, FFN only", "dense, LoRA on all")},
    "dense, L2 to the base 0.001": Learner(
        Method("dense", baseline(lambda model, s: L2(model, 0.001, **s.options())))
    ),
    "dense, L2 to the base 0.01": Learner(
        Method("dense", baseline(lambda model, s: L2(model, 0.01, **s.options())))
    ),
    "dense, KL to the base": Learner(
        Method("dense", baseline(lambda model, s: KL(model, 1.0, **s.options())))
    ),
    "dense, WiSE-FT 0.5": Learner(METHODS["dense, full"], share=0.5),
    "dense, EWC 1": Learner(METHODS["dense, EWC 1"], old_text="before"),
    "dense, EWC 10": Learner(METHODS["dense, EWC 10"], old_text="before"),
    "dense, replay 5 %": Learner(Method("dense", replay(0.05)), old_text="always"),
}
"""Row of the table -> what learns."""


def variant_of(plan: Plan, patches: int) -> dict[str, Any]:
    """A layer of so many patches, 4 of which act, and of the plan's parameters where a rank allows that."""
    dim, apn = plan.model.dim, plan.apn
    numbers = apn.num_patches * (apn.rank * (dim + 2) + dim)
    rank = max(1, round((numbers / patches - dim) / (dim + 2)))
    return {"num_patches": patches, "top_k": 4, "rank": rank, "patch_dropout": apn.patch_dropout}


class Interpolated(Online):
    """WiSE-FT (arXiv 2109.01903): asked are weights between the base's and those that learned."""

    def __init__(self, base: GPT, share: float, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.base, self.share = base, share

    @torch.no_grad()
    def predictor(self) -> LanguageModel:
        between = copy.deepcopy(self.base)
        learned = self.adapter.model.state_dict()
        between.load_state_dict(
            {name: torch.lerp(was, learned[name], self.share) for name, was in self.base.state_dict().items()}
        )
        return between


class Beside:
    """Basins, with the manners of the others."""

    def __init__(self, base: GPT, plan: Plan, rate: float, home: Text) -> None:
        self.model = BesideBase(base)
        fit = home.train[:CALIBRATION]
        self.learner = BesideLearner(self.model, fit, home.validation, rate=rate, batch_size=plan.batch_size)

    def learn(self, piece: np.ndarray) -> str:
        return self.learner.learn(piece)

    def predictor(self) -> LanguageModel:
        return self.model

    def described(self) -> dict[str, Any]:
        return {
            "trained": sum(parameter.numel() for parameter in self.model.patches.parameters()),
            "basins": self.learner.tokens,
        }


def start(name: str, plan: Plan, settings: Settings, base: GPT, home: Text) -> Online | Beside:
    """A learner that has seen nothing yet."""
    learner = LEARNERS[name]
    if name == BASINS:
        return Beside(base, plan, settings["rate"], home)
    adapter = learner.method.make(situation(plan, settings, base, {HOME: home}))
    if learner.share != 1:
        return Interpolated(base, learner.share, adapter, plan, settings["rate"])
    return Online(adapter, plan, settings["rate"])


def run(settings: Settings, folder: Path) -> Values:
    """The cell of one learner: a stream, and losses of all domains before it and after each visit."""
    plan, device = PLANS[settings["size"]], device_of(settings)
    base = load_base(folder, settings["base"], device)
    order = settings["order"]
    texts = {name: domain(plan, folder, name) for name in order}
    torch.manual_seed(settings["seed"])
    meter = Meter(base, {})
    learner = start(settings["method"], plan, settings, base, texts[order[0]])

    def losses(part: Callable[[Text], np.ndarray]) -> dict[str, float]:
        model = learner.predictor()
        return {name: evaluate(model, part(text), autocast=meter.cast) for name, text in texts.items()}

    piece = PIECE * plan.batch_size * base.config.context
    matrix, claimed, touched = [losses(lambda text: text.test)], [], []
    started, diverged, seen = time.perf_counter(), None, 0
    beginning: list[float] = []
    for visit, (name, tokens) in enumerate(read(plan, order[1:], texts, settings["long"])):
        took: Counter[str] = Counter()
        tenth = -(-len(tokens) // (10 * piece)) * piece  # whole pieces
        first = tokens[: min(tenth, plan.test_bytes) + 1]
        if settings["long"]:
            beginning.append(evaluate(learner.predictor(), first, autocast=meter.cast))
        for at in range(0, len(tokens) - 1, piece) if diverged is None else ():
            try:
                part = tokens[at : at + piece + 1]
                took[learner.learn(part)] += len(part) - 1
            except NotFiniteUpdate:
                diverged = visit
                break
            seen += len(part) - 1
            if (moved := patches_touched(base, learner)) is not None:
                touched.append([seen, moved])
            if settings["long"] and at + piece == tenth:
                beginning.append(evaluate(learner.predictor(), first, autocast=meter.cast))
        if settings["long"]:
            beginning.append(evaluate(learner.predictor(), first, autocast=meter.cast))
        claimed.append({name: dict(took)})
        matrix.append(losses(lambda text: text.test))
    return {
        "matrix": matrix,
        "best": {"validation": mean(losses(lambda text: text.validation).values())},
        "claimed": claimed,
        "touched": touched,
        "beginning": beginning,
        "overlap": overlap(learner, texts),
        "diverged": diverged,
        "seconds": time.perf_counter() - started,
        "base": fingerprint(base),
        **learner.described(),
    }


def read(plan: Plan, order: Sequence[str], texts: Mapping[str, Text], long: bool) -> Any:
    if not long:
        return visits(plan, list(order), dict(texts))
    return ((name, texts[name].train[: LONG * plan.stream_tokens + 1]) for name in order)


def patches_touched(base: GPT, learner: Online | Beside) -> int | None:
    """How many patches are not what they were, over all layers; None where there are none."""
    if isinstance(learner, Beside):
        return len(learner.model.patches) * base.config.num_layers
    return moved_patches(base, learner.adapter.model) if base.apn_layers() else None


def overlap(learner: Online | Beside, texts: Mapping[str, Text]) -> dict[str, float] | None:
    """The share of a domain's top patches that are also another one's: the mean over pairs, and chance."""
    used = {name: usages(learner, text.validation) for name, text in texts.items()}
    if any(not layers for layers in used.values()):
        return None
    shared, chance = [], []
    for a, b in itertools.combinations(used, 2):
        for one, other in zip(used[a], used[b], strict=True):
            most = max(1, len(one) // 16)
            top = [set(use.argsort(descending=True)[:most].tolist()) for use in (one, other)]
            shared.append(len(top[0] & top[1]) / most)
            chance.append(most / len(one))
    return {"shared": mean(shared), "chance": mean(chance)}


def usages(learner: Online | Beside, text: np.ndarray) -> list[Tensor]:
    """For each layer, how often a text uses each patch. Of basins the base itself counts as one."""
    if isinstance(learner, Beside):
        model, count = learner.model, len(learner.model.patches)
        parts = [
            model.owners(model.contexts(inputs.to(model.device))).flatten().cpu()
            for inputs, _, _ in windows(text, model.config.context, 64)
        ]
        return [torch.bincount(torch.cat(parts) + 1, minlength=count + 1)] if count else []
    found = routing(learner.adapter.model, text).values()
    return [monitor.usage(part.indices, part.num_patches) for part in found]


# --- the study


def stream_of(bench: "Benchmark", given: Sequence[str]) -> list[str]:
    """The domains of the stream: those given, or the first four that say something about locality."""
    if given:
        if unknown := set(given) - set(bench.targets):
            raise ValueError(f"the stream names {sorted(unknown)}; domains: {', '.join(bench.targets)}")
        return list(given)
    known = [name for name in bench.targets if name not in (FOLIO, PAPER)]
    return [*known, FOLIO][:4]  # the First Folio is Shakespeare himself


def study(
    bench: "Benchmark",
    result: Path,
    *,
    stream: Sequence[str] = (),
    methods: Sequence[str] = tuple(LEARNERS),
) -> dict[str, Any]:
    """Every cell, then the result file."""
    if unknown := set(methods) - set(LEARNERS):
        raise ValueError(f"unknown learners {sorted(unknown)}; there are: {'; '.join(LEARNERS)}")
    order = [HOME, *stream_of(bench, stream)]
    ladder = bench.plan.rates if bench.size == "smoke" else LADDER
    seeds = range(bench.plan.seeds)
    rates: dict[str, dict[str, Any]] = {}
    found: dict[tuple[str, int], tuple[Values, Values]] = {}
    for seed in seeds:  # one after the other: a run that is stopped has whole ones
        asked = {name: learned(bench, name, order, seed, ladder, rates.get(name)) for name in methods}
        for name, (rate, *cells) in bench.answer(asked).items():
            rates[name] = rate
            found[name, seed] = (cells[0], cells[1])
    rows = {name: row([found[name, seed] for seed in seeds], order) for name in methods}
    for name in methods:
        rows[name] |= {"rate": rates[name], "old_text": LEARNERS[name].old_text}
    return bench.write(
        result,
        "locality",
        seeds=len(seeds),
        order=order,
        tokens=bench.plan.stream_tokens,
        long=LONG * bench.plan.stream_tokens,
        rows=rows,
        ladder=list(ladder),
        apn={count: variant_of(bench.plan, count) for count in PATCHES},
    )


def learned(
    bench: "Benchmark",
    name: str,
    order: Sequence[str],
    seed: int,
    ladder: Sequence[float],
    rate: dict[str, Any] | None,
) -> Inquiry[tuple[dict[str, Any], Values, Values]]:
    """A learner's rate (by its first seed), its stream, and a long text."""
    yield bench.locality_base(name, 0 if rate is None else seed)
    if rate is None:
        trial = partial(bench.locality, name, order[:3], 0)
        rate = best_rate((yield from climb(ladder, trial)))
    yield bench.locality_base(name, seed)
    whole = bench.locality(name, order, seed, rate["rate"])
    text = bench.locality(name, order[:2], seed, rate["rate"], long=True)
    done = yield whole | text
    return rate, done[next(iter(whole))], done[next(iter(text))]


def row(cells: Sequence[tuple[Values, Values]], order: Sequence[str]) -> dict[str, Any]:
    """A learner over seeds: nats, each the mean and by seed."""
    streams, texts = [cell[0] for cell in cells], [cell[1] for cell in cells]
    rises = [rises_of(cell["matrix"], order) for cell in streams]
    gains = [
        {name: cell["matrix"][0][name] - cell["matrix"][-1][name] for name in order[1:]} for cell in streams
    ]
    worst = [max(rise[-1].values()) for rise in rises]
    ever = [max(max(row.values()) for row in rise) for rise in rises]
    within = [
        cell["beginning"][-1] - cell["beginning"][1] if cell["diverged"] is None else math.nan
        for cell in texts
    ]
    shared = [cell["overlap"] for cell in streams]
    return {
        "worst": mean(worst),
        "worst_seeds": worst,
        "worst_ever": mean(ever),
        "rises": {name: mean(rise[-1][name] for rise in rises) for name in order},
        "gains": {name: mean(gain[name] for gain in gains) for name in order[1:]},
        "gain": mean(mean(gain.values()) for gain in gains),
        "within": mean(within),
        "within_seeds": within,
        "touched": streams[0]["touched"],
        "overlap": None if None in shared else {key: mean(part[key] for part in shared) for key in shared[0]},
        "claimed": streams[0]["claimed"],
        "trained": streams[0]["trained"],
        "diverged": sum(cell["diverged"] is not None for cell in streams),
        "matrix": [cell["matrix"] for cell in streams],
        "seconds": mean(cell["seconds"] for cell in streams),
    }


def rises_of(matrix: Sequence[Mapping[str, float]], order: Sequence[str]) -> list[dict[str, float]]:
    """After each visit, by how much each domain is worse than just after it was learned, or than at first."""
    found = []
    for visit in range(1, len(matrix)):
        learned_at = {name: at if at <= visit else 0 for at, name in enumerate(order)}
        found.append({name: matrix[visit][name] - matrix[learned_at[name]][name] for name in order})
    return found
