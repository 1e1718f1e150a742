"""The grid behind `shifts` and `forgetting`: what a cell is, and running many."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attractor.config import RunConfig, check_number, check_size
from attractor.distributed import parse_device
from attractor.results import write_result
from attractor.version import __version__
from studies import adapting, anatomy, gaps, harm, knobs, locality, streams, time_cells
from studies.grid import (
    Inquiry,
    Key,
    Report,
    Settings,
    T,
    Values,
    Worker,
    ask,
    ask_each,
    made_again,
    origins,
    run_inquiries,
)
from studies.methods import METHODS
from studies.plan import (
    HOME,
    MIXTURE,
    PLANS,
    TARGETS,
    Plan,
    Size,
    device_of,
    read_domains,
    tensor_cores,
)

WORK: dict[str, Callable[[Settings, Path], Values]] = {
    "pretrain": adapting.pretrain,
    "train": adapting.train,
    "adapt": adapting.adapt,
    "stream": streams.run,
    "harm": harm.harm,
    "speed": harm.speed,
    "knob": knobs.learn,
    "anatomy": anatomy.examine,
    "quality": time_cells.quality,
    "clock": time_cells.clock,
    "locality": locality.run,
    "gaps": gaps.measure,
}

Cells = dict[str, Settings]


@dataclass(frozen=True)
class Variant:
    """An APN that differs from the plan's in something."""

    name: str
    apn: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)

    def of(self, config: RunConfig) -> RunConfig:
        apn = dataclasses.replace(config.model.apn, **self.apn)
        model = dataclasses.replace(config.model, apn=apn)
        return dataclasses.replace(config, model=model, train=dataclasses.replace(config.train, **self.train))


def work(settings: Settings, folder: Path) -> Values:
    with tensor_cores(device_of(settings)):
        return WORK[settings["kind"]](settings, folder)


@dataclass
class Benchmark:
    """Cells of one size over one set of texts, in one folder."""

    size: Size
    folder: Path
    domains: Mapping[str, str] = field(default_factory=dict)  # name -> corpus or file; added or replaced
    mixture: Sequence[str] = MIXTURE
    device: str | None = None
    seeds: int | None = None  # fewer or more than the size has
    jobs: int = 1
    minutes: float | None = None  # start no cell later than this; 0 sums up what any machine has computed
    report: Report = lambda record: None

    def __post_init__(self) -> None:
        self.plan: Plan = PLANS[self.size]
        if self.seeds is not None:
            check_size("seeds", self.seeds)
            self.plan = dataclasses.replace(self.plan, seeds=self.seeds)
        if self.minutes is not None:
            check_number("minutes", self.minutes, "a number, 0 or more", lambda minutes: minutes >= 0)
        self.device = str(parse_device(self.device, must_exist=self.minutes != 0))
        sources = {name: name for name in (HOME, *TARGETS)} | dict(self.domains)
        self.targets = [name for name in sources if name != HOME]
        if not self.mixture:
            raise ValueError("the mixture is empty; name the domains that it is made of")
        if unknown := set(self.mixture) - set(sources):
            raise ValueError(f"the mixture names {sorted(unknown)}; domains: {', '.join(sources)}")
        self.hashes = read_domains(self.plan, sources, self.folder)
        self.started = time.monotonic()
        self.idle: list[Worker] = []
        self.asked: set[str] = set()

    def run(self, cells: Mapping[str, Settings]) -> dict[str, Values]:
        """The values of all cells, computed now where they are not there yet. GridStopped: out of time."""
        return self.answer({"": ask(cells)})[""]

    def alone(self, cells: Mapping[Key, Cells]) -> dict[Key, Values]:
        """What one cell for each key came to, computed in this process while no other one is at work."""
        while self.idle:  # what they hold of a GPU's memory may be needed
            worker = self.idle.pop()
            worker.line.close()
            worker.process.join()
        return self.answer({"": ask_each(cells)}, jobs=1)[""]

    def answer(self, inquiries: Mapping[Key, Inquiry[T]], jobs: int | None = None) -> dict[Key, T]:
        """What each inquiry returns; none waits for another."""
        late = None if self.minutes is None else self.started + 60 * self.minutes

        def report(record: dict[str, Any]) -> None:
            self.asked.add(record["cell"])
            self.report(record)

        with tensor_cores(torch.device(str(self.device))):  # what cells say about where they come from
            return run_inquiries(
                inquiries,
                work,
                self.folder,
                jobs=jobs or self.jobs,
                report=report,
                stop=lambda: late is not None and time.monotonic() >= late,
                idle=self.idle,
            )

    def origins(self) -> dict[str, Any]:
        """Where the cells come from that were asked for since this was asked, and which models were made
        again between some of them and others."""
        asked, self.asked = self.asked, set()
        return {"cells": origins(self.folder, asked), "pretrained_twice": made_again(self.folder, asked)}

    def write(self, result: Path, study: str, **values: Any) -> dict[str, Any]:
        """The result of a study: what it found, and what it was found with."""
        found = {"experiment": study, "size": self.size, "texts": self.hashes, **values, **self.origins()}
        write_result(result, found)
        return found

    def members(self, source: str) -> list[str]:
        """The domains that a pretraining text is made of."""
        return list(self.mixture) if source == "mixture" else [source]

    def shifts(self, source: str) -> list[str]:
        """The domains that it has not seen."""
        return [name for name in self.targets if name not in self.members(source)]

    def _cell(self, kind: str, texts: Sequence[str], **settings: Any) -> Settings:
        hashes = {name: self.hashes[name] for name in dict.fromkeys(texts)}
        plan = dataclasses.asdict(self.plan)
        left_out = ("seeds", "mixture_steps")  # elsewhere, or no cell's business
        recipe = {
            name: value
            for name, value in plan.items()
            if isinstance(value, int | float | None) and name not in left_out
        }
        if "config" not in settings:  # of a model that another cell made
            shape = {name: plan[name] for name in ("model", "apn", "moe", "train")}
            settings["models"] = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()
        return {
            "attractor": __version__,
            "kind": kind,
            "size": self.size,
            "device": self.device,
            "texts": hashes,
            "recipe": recipe,
            **settings,
        }

    def pretrain(self, model: str, source: str, seed: int, variant: Variant | None = None) -> Cells:
        name, members = self.base(model, source, seed, variant), self.members(source)
        config = self.plan.config(model, seed)
        if variant is not None:
            config = variant.of(config)
        settings = {"members": members, "tokenizer": "byte", "config": config.to_dict()}
        return {f"pretrain-{name}": self._cell("pretrain", members, base=name, **settings)}

    def base(self, model: str, source: str, seed: int, variant: Variant | None = None) -> str:
        return f"{model}{'' if variant is None else '@' + variant.name}-{source}-{seed}"

    def adapt(
        self, method: str, source: str, shift: str, seed: int, rate: float, variant: Variant | None = None
    ) -> Cells:
        base, members = self.base(METHODS[method].model, source, seed, variant), self.members(source)
        settings = {"shift": shift, "method": method, "rate": rate, "seed": seed}
        cell = self._cell("adapt", [*members, shift], base=base, members=members, **settings)
        return {f"adapt-{base}-{shift}-{slug(method)}-{rate:g}": cell}

    def train(
        self,
        name: str,
        config: RunConfig,
        members: Sequence[str],
        tokenizer: str,
        seed: int,
        passes: int | None = None,
    ) -> Cells:
        """A model to be compared by how well it predicts, and not to be adapted; `passes` at most."""
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
        base = f"{name}-{tokenizer}-{'-'.join(members)}-{seed}"
        settings = {"members": list(members), "tokenizer": tokenizer, "config": config.to_dict()}
        return {f"train-{base}": self._cell("train", members, base=base, passes=passes, **settings)}

    def quality(
        self,
        name: str,
        config: RunConfig,
        members: Sequence[str],
        seed: int,
        passes: int,
        local: Mapping[str, Any] | None = None,
    ) -> Cells:
        """A shape, trained to its last step; `local` is the shift that it learns then, and the rate."""
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
        train = config.train
        settings = {"members": list(members), "config": config.to_dict(), "passes": passes}
        texts = [*members, *([] if local is None else [local["shift"]])]
        cell = self._cell("quality", texts, **settings, local=None if local is None else dict(local))
        label = f"{slug(name)}-{train.learning_rate:g}-{train.max_steps}-{'-'.join(members)}-{seed}"
        label += "-eager" if train.compile is False else ""
        label += "" if local is None else f"-then-{local['shift']}-{local['rate']:g}"
        return {f"quality-{label}": cell}

    def clock(self, name: str, config: RunConfig, way: str, steps: int) -> Cells:
        """How long a step of a shape takes in this way, in the mean of so many; or ("decode") a token."""
        cell = self._cell("clock", [], config=config.to_dict(), way=way, steps=steps)
        return {f"clock-{slug(name)}-{way}": cell}

    def stream(
        self, method: str, order: Sequence[str], seed: int, rate: float, horizon: int | None = None
    ) -> Cells:
        """The cells of a stream; with a horizon (`LearnConfig.rate_horizon`) the rate falls."""
        base = f"{streams.LEARNERS[method]}-{order[0]}-{seed}"
        settings: Settings = {"order": list(order), "method": method, "rate": rate, "seed": seed}
        named = f"{slug(method)}-{rate:g}"
        if horizon is not None:  # and only then: cells of constant rates stay what they are
            check_size("horizon", horizon)
            settings["horizon"] = horizon
            named += f"-{horizon}"
        cell = self._cell("stream", order, base=base, **settings)
        return {f"stream-{'-'.join(order)}-{named}-{seed}": cell}

    def knob(
        self, name: str, knob: Mapping[str, Any], source: str, shift: str, seed: int, rate: float
    ) -> Cells:
        base, members = self.base("apn", source, seed), self.members(source)
        settings = {"shift": shift, "knob": dict(knob), "rate": rate, "seed": seed}
        cell = self._cell("knob", [*members, shift], base=base, members=members, **settings)
        return {f"knob-{base}-{shift}-{slug(name)}-{rate:g}": cell}

    def anatomy(self, kind: str, source: str, seed: int) -> Cells:
        base, members = self.base(kind, source, seed), self.members(source)
        return {f"anatomy-{base}": self._cell("anatomy", members, base=base, members=members)}

    def locality_base(self, method: str, seed: int) -> Cells:
        """The model that a learner of `locality` starts from."""
        learner = locality.LEARNERS[method]
        return self.pretrain(learner.method.model, HOME, seed, self._sparse(learner))

    def _sparse(self, learner: locality.Learner) -> Variant | None:
        if learner.patches is None or learner.variant is None:
            return None
        return Variant(learner.variant, locality.variant_of(self.plan, learner.patches))

    def locality(
        self, method: str, order: Sequence[str], seed: int, rate: float, *, long: bool = False
    ) -> Cells:
        learner = locality.LEARNERS[method]
        base = self.base(learner.method.model, HOME, seed, self._sparse(learner))
        settings = {"order": list(order), "method": method, "rate": rate, "seed": seed, "long": long}
        cell = self._cell("locality", order, base=base, **settings)
        kind = "long" if long else "stream"
        return {f"locality-{kind}-{'-'.join(order)}-{slug(method)}-{rate:g}-{seed}": cell}

    def gaps(self, new: Sequence[str], seed: int, rates: Mapping[str, float]) -> Cells:
        settings = {"new": list(new), "seed": seed, "rates": dict(rates)}
        cell = self._cell("gaps", [HOME, *new], base=self.base("dense", HOME, seed), **settings)
        return {f"gaps-{'-'.join(new)}-{seed}": cell}

    def harm(self, seed: int) -> Cells:
        cell = self._cell("harm", [HOME], base=f"apn-{HOME}-{seed}", members=[HOME], seed=seed)
        return {f"harm-{seed}": cell}

    def speed(self, method: str, shift: str, seed: int, rate: float) -> Cells:
        settings = {"shift": shift, "method": method, "rate": rate, "seed": seed, "pause": 0.01}
        base = f"apn-{HOME}-{seed}"
        cell = self._cell("speed", [HOME, shift], base=base, members=[HOME], **settings)
        return {f"speed-{shift}-{slug(method)}-{rate:g}-{seed}": cell}


def slug(method: str) -> str:
    kept = "".join(letter if letter.isalnum() else " " for letter in method.lower())
    return "_".join(kept.split())
