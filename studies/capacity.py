"""How much patches hold: bits of made-up biographies per parameter, after 100 and 1000 exposures.

    python -m studies capacity --size smoke             half a minute on two CPU cores
    python -m studies capacity --size full --jobs 5     one GPU

A person has a name and six attributes, each drawn from a pool of a known size, and every name, value and
relation is one token: so a biography has exactly sum(log2(pool)) bits beside its name. What is kept of that
is counted as in the literature (Allen-Zhu and Li, "Knowledge Capacity Scaling Laws", arXiv 2404.05405,
whose lower bound on the bits of a model this is without the names and the terms that vanish): a model that
gives the right value a loss of `nats` when it is asked rightly keeps log2(pool) - nats / ln 2 bits of it. To
know nothing but the pools is 0 bits, to know every value is all of them, and being wrong for sure is less
than nothing.

Models of the same size with dense and with APN FFNs are trained from scratch on more people than they can
hold, each read so often ("exposures"), in a new order of attributes each time. The learning rate is the best
of the same few after the fewest exposures. Then a dense model stays as it is, and lessons teach it people
that it never saw: bits per number of a decoder, per number and per byte of all that a lesson keeps.
"""

import copy
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor.config import GPTConfig, TrainConfig
from attractor.continual.calibrate import CLOSED, Calibration
from attractor.continual.config import LessonConfig
from attractor.continual.lessons import Lessons
from attractor.distributed import parse_device
from attractor.evaluate import autocast
from attractor.layer import APN
from attractor.lm import inputs_of
from attractor.model import GPT
from attractor.results import write_result
from attractor.trainer import learning_rate, make_optimizer
from studies.grid import Inquiry, Report, Settings, Values, ask_each, origins, run_inquiries
from studies.plan import device_of, tensor_cores

Size = Literal["smoke", "full", "large"]
KINDS = ("dense", "apn")
NAMES = (150, 150, 150)
"""First, middle and last names: one token each."""
POOLS = {"month": 12, "day": 28, "city": 200, "school": 300, "field": 100, "firm": 256}
"""How many values each attribute can have."""
STEPS = (0.3, 1.0, 3.0, 10.0)
ASKED = 2000
"""So many of the people that a model knew are background to calibrate by, and are asked after as well."""
PLAIN: dict[str, Any] = {
    "enough": 0.0,
    "contexts": 1,  # a name looks the same wherever it stands
    "after": 0,
    "mention": 0,
    "strangers": 0,
    "least_forms": 0,
    "questions": 0,
}
"""Of a lesson nothing is read but what it says."""
START = "note"
"""What every biography begins with: models keep a sink at their first token."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a size means."""

    dim: int
    layers: int
    people: int
    exposures: tuple[int, ...]
    batches: tuple[int, ...]
    """How many are read at once for each number of exposures: few exposures need many steps."""
    rates: tuple[float, ...]
    steps: tuple[float, ...]
    """Lengths of steps of lessons; the best one is chosen in the same way."""
    lessons: int
    """People that are taught to a dense model which is done."""
    together: int
    """Lessons of one batch."""
    apn: dict[str, Any]
    pools: dict[str, int] = dataclasses.field(default_factory=lambda: dict(POOLS))


PLANS: dict[Size, Plan] = {
    "smoke": Plan(32, 2, 60, (20, 40), (30, 30), (1e-2,), (0.3, 1.0), 6, 6, {"top_k": 2}),
    "full": Plan(64, 4, 20_000, (100, 1000), (500, 1000), (1e-3, 3e-3, 1e-2), STEPS, 200, 50, {"top_k": 4}),
    "large": Plan(128, 4, 50_000, (100, 1000), (500, 2000), (1e-3, 3e-3), STEPS, 200, 50, {"top_k": 4}),
}


class Words:
    """One token for every word there is."""

    def __init__(self, pools: Mapping[str, int], names: Sequence[int] = NAMES) -> None:
        self.pools, self.names = dict(pools), tuple(names)
        words = [START, *(f"name{place}.{n}" for place, count in enumerate(names) for n in range(count))]
        words += [*pools, *(f"{relation}.{n}" for relation, count in pools.items() for n in range(count))]
        self.words, self.number = words, {word: number for number, word in enumerate(words)}

    def encode(self, text: str) -> list[int]:
        return [self.number[word] for word in text.split()]

    def people(self, count: int, seed: int) -> Tensor:
        """(people, names and values): tokens of different people, values drawn evenly from their pools."""
        draw = torch.Generator().manual_seed(seed)
        every = math.prod(self.names)
        if count > every:
            raise ValueError(f"{count} people: there are no more than {every} names")
        number = torch.randperm(every, generator=draw)[:count]
        columns = []
        for place, size in enumerate(self.names):
            columns.append(number % size + self.number[f"name{place}.0"])
            number = number // size
        for relation, size in self.pools.items():
            value = torch.randint(size, (count,), generator=draw)
            columns.append(value + self.number[f"{relation}.0"])
        return torch.stack(columns, dim=1)

    def read(self, people: Tensor, order: Tensor) -> Tensor:
        """Biographies (people, time) with the attributes of each in this order (people, attributes)."""
        relations = torch.tensor([self.number[name] for name in self.pools], device=people.device)
        names, values = people.split([len(self.names), len(self.pools)], dim=1)
        told = torch.stack([relations[order], values.gather(1, order)], dim=2).flatten(1)
        return torch.cat([torch.full_like(names[:, :1], self.number[START]), names, told], dim=1)

    @property
    def first_value(self) -> int:
        """Where the first value stands in a biography; others follow at every second place."""
        return 2 + len(self.names)


def bits_of(pools: Mapping[str, int]) -> float:
    """The bits of a biography beside its name.

    >>> bits_of({"one of eight": 8, "one of two": 2})
    4.0
    """
    return sum(math.log2(size) for size in pools.values())


def kept(nats: Sequence[float], pools: Mapping[str, int]) -> float:
    """The bits that are kept of a biography, from the mean loss of each of its attributes.

    >>> kept([0.0, math.log(2)], {"known": 8, "guessed": 2})
    3.0
    """
    return bits_of(pools) - sum(nats) / math.log(2)


class Kept(NamedTuple):
    """What is kept of some people, one for another."""

    bits: float
    """Of each, without its name."""
    right: float
    """The share of the values that are likeliest."""
    of: dict[str, float]
    """The bits of each attribute."""


def orders(count: int, attributes: int, draw: torch.Generator) -> Tensor:
    return torch.rand(count, attributes, generator=draw, device=draw.device).argsort(1)


@torch.no_grad()
def ask(model: Any, words: Words, people: Tensor, precision: str = "float32", rows: int = 2048) -> Kept:
    """What a model keeps of these people: every value is asked for after a name and its relation.

    Other attributes may stand before, as they do where it learned; values do not depend on each other.
    """
    draw = torch.Generator(device=people.device).manual_seed(0)
    nats = torch.zeros(len(words.pools), device=people.device, dtype=torch.double)
    right = 0
    for part in people.split(rows):
        order = orders(len(part), len(words.pools), draw)
        tokens = words.read(part, order)
        with autocast(people.device, precision):
            logits = model(tokens)[:, words.first_value - 1 : -1 : 2].float()
        values = tokens[:, words.first_value :: 2]
        loss = F.cross_entropy(logits.flatten(0, 1), values.flatten(), reduction="none")
        nats.index_add_(0, order.flatten(), loss.double())
        right += int((logits.argmax(-1) == values).sum())
    own = (nats / len(people)).tolist()
    pools = words.pools
    return Kept(
        kept(own, pools),
        right / (len(people) * len(pools)),
        {name: kept([loss], {name: pools[name]}) for name, loss in zip(pools, own, strict=True)},
    )


def model_of(kind: str, plan: Plan, words: Words) -> GPT:
    """Dense or APN, of as many parameters."""
    context = words.first_value - 1 + 2 * len(words.pools)
    config = GPTConfig(
        vocab_size=len(words.words),
        context=context,
        num_layers=plan.layers,
        num_heads=plan.dim // 16,
        dim=plan.dim,
        ffn_start="unit",
    )
    if kind == "apn":
        like = APN.like_ffn(plan.dim, **plan.apn).config
        config = dataclasses.replace(config, ffn="apn", apn=like)
    return GPT(config)


def sizes(model: GPT) -> dict[str, int]:
    ffns = sum(p.numel() for block in model.blocks for p in block.ffn.parameters())
    return {"parameters": sum(p.numel() for p in model.parameters()), "of FFNs": ffns}


def train(settings: Settings) -> tuple[GPT, Values]:
    """A model that read every person so often, and what it keeps of them."""
    plan, device = PLANS[settings["size"]], device_of(settings)
    words = Words(plan.pools)
    people = words.people(plan.people, settings["seed"]).to(device)
    torch.manual_seed(settings["seed"])
    model = model_of(settings["kind"], plan, words).to(device)
    batch = plan.batches[plan.exposures.index(settings["exposures"])]
    steps = plan.people * settings["exposures"] // batch
    rates = TrainConfig(
        max_steps=steps,
        learning_rate=settings["rate"],
        min_learning_rate=settings["rate"] / 100,
        warmup_steps=steps // 50,
        weight_decay=0.01,
        batch_size=batch,
    )
    optimizer = make_optimizer(model, rates, fused=device.type == "cuda")
    draw = torch.Generator(device=device).manual_seed(settings["seed"])
    started = time.perf_counter()
    for step, part in zip(range(steps), _parts(people, batch, draw), strict=False):
        tokens = words.read(part, orders(len(part), len(words.pools), draw))
        with autocast(device, "auto"):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(rates, step)
        optimizer.step()
    model.eval()
    found = ask(model, words, people)
    size = sizes(model)
    values = {
        **size,
        "people": plan.people,
        "exposures": settings["exposures"],
        "rate": settings["rate"],
        "bits of a person": bits_of(plan.pools),
        "bits kept of a person": found.bits,
        "bits by attribute": found.of,
        "values right": found.right,
        "bits per parameter": plan.people * found.bits / size["parameters"],
        "bits per parameter of FFNs": plan.people * found.bits / size["of FFNs"],
        "bits given per parameter": plan.people * bits_of(plan.pools) / size["parameters"],
        "seconds": time.perf_counter() - started,
    }
    return model, values


def _parts(people: Tensor, batch: int, draw: torch.Generator) -> Iterator[Tensor]:
    """Everybody once, in a new order, again and again; who does not fill a batch begins the next one."""
    left = people[:0]
    while True:
        order = torch.randperm(len(people), generator=draw, device=people.device)
        *parts, left = torch.cat([left, people[order]]).split(batch)
        yield from parts
        if len(left) == batch:
            yield left
            left = left[:0]


class Beside(nn.Module):
    """An FFN and a layer that adds to it."""

    def __init__(self, ffn: nn.Module, layer: APN) -> None:
        super().__init__()
        self.ffn, self.layer = ffn, layer

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(x) + self.layer(x)


def lessons_beside(model: GPT, words: Words, people: Tensor, config: LessonConfig) -> Lessons:
    """A model that can be taught people beside those it knows, just below the middle of its blocks."""
    block = model.blocks[(model.config.num_layers - 1) // 2]
    dim, device = model.config.dim, people.device
    layer = APN(dim, num_patches=64, top_k=1, rank=1, temperature=0.02, radius=CLOSED, whiten=True).to(device)
    tokens = words.read(people, orders(len(people), len(words.pools), torch.Generator(device).manual_seed(1)))
    with torch.no_grad():
        with inputs_of(block.ffn) as seen:
            model(tokens)
        unit = block.ffn(seen[0]).norm(dim=-1).median().item()
    calibration = Calibration.fit(seen[0])
    block.ffn = Beside(block.ffn, layer)
    model.requires_grad_(False)
    return Lessons(model, layer, words.encode, calibration, config, unit=unit, frames=["{}"])


def teach(settings: Settings) -> Values:
    """Lessons about people whom a frozen model never saw; an exposure is a pass over all that is said.

    After the fewest exposures the best length of a step is chosen, as rates are for models.
    """
    plan = PLANS[settings["size"]]
    base, learned = train({**settings, "kind": "dense"})
    words = Words(plan.pools)
    every = words.people(plan.people + plan.lessons, settings["seed"]).to(base.device)
    known, strangers = every.split([plan.people, plan.lessons])
    fewest, *more = plan.exposures
    tried = {step: taught(base, words, known, strangers, plan, step, fewest) for step in plan.steps}
    best = max(tried, key=lambda step: tried[step]["bits kept of a person"])
    rows = {str(fewest): tried[best]}
    rows |= {str(count): taught(base, words, known, strangers, plan, best, count) for count in more}
    return {"base": learned, "rows": rows, "steps": {f"{step:g}": row for step, row in tried.items()}}


def taught(
    base: GPT, words: Words, known: Tensor, strangers: Tensor, plan: Plan, step: float, exposures: int
) -> Values:
    """What a copy of a model keeps of strangers after lessons, and of those that it knew."""
    model = copy.deepcopy(base)
    before, own_before = ask(model, words, strangers), ask(model, words, known[:ASKED])
    config = LessonConfig(step=step, passes=exposures, **PLAIN)
    started = time.perf_counter()
    lessons = lessons_beside(model, words, known[:ASKED], config)
    for part in strangers.split(plan.together):
        some = part.tolist()
        lessons.learn_many(
            [forms_of(words, person) for person in some], subjects=[name_of(words, person) for person in some]
        )
    seconds = time.perf_counter() - started
    after, own_after = ask(model, words, strangers), ask(model, words, known[:ASKED])
    count, every = len(strangers), lessons.lessons.values()
    patches = sum(lesson.patches for lesson in every)
    weight = sum(lesson.bytes for lesson in every)
    return {
        "people": count,
        "exposures": exposures,
        "rate": step,
        "bits of a person": bits_of(words.pools),
        "bits kept before": before.bits,
        "bits kept of a person": after.bits,
        "bits by attribute": after.of,
        "values right": after.right,
        "patches of a lesson": patches / count,
        "bytes of a lesson": weight / count,
        "bits per number of a decoder": after.bits / plan.dim,  # one, which the patches of a lesson share
        "bits per parameter": count * after.bits / (patches * (2 * plan.dim + 1)),
        "bits per byte": count * after.bits / weight,
        "bits of others lost": own_before.bits - own_after.bits,
        "seconds": seconds,
    }


def name_of(words: Words, person: Sequence[int]) -> str:
    return " ".join(words.words[token] for token in person[: len(words.names)])


def forms_of(words: Words, person: Sequence[int]) -> list[tuple[str, str]]:
    """What a lesson says: a prompt and a value for each attribute."""
    values = person[len(words.names) :]
    return [
        (f"{START} {name_of(words, person)} {relation}", f" {words.words[value]}")
        for relation, value in zip(words.pools, values, strict=True)
    ]


def work(settings: Settings, folder: Path) -> Values:
    with tensor_cores(device_of(settings)):
        return teach(settings) if settings["kind"] == "basins" else train(settings)[1]


def run(
    size: Size,
    folder: Path,
    result: Path,
    *,
    device: str | None = None,
    jobs: int = 1,
    seed: int = 0,
    report: Report = lambda record: None,
) -> dict[str, Any]:
    plan = PLANS[size]
    asked: set[str] = set()
    tries: dict[str, dict[str, Values]] = {}
    fewest, *more = plan.exposures

    def cell(kind: str, exposures: int, rate: float) -> dict[str, Settings]:
        settings = {
            "size": size,
            "kind": kind,
            "exposures": exposures,
            "rate": rate,
            "seed": seed,
            "plan": dataclasses.asdict(plan),
            "device": str(parse_device(device)),
        }
        return {f"{kind}-{exposures}-{rate:g}-{seed}": settings}

    def models(kind: str) -> Inquiry[dict[str, Values]]:
        """By every rate after the fewest exposures, by the best after more; then lessons beside dense."""
        tried = yield from ask_each({rate: cell(kind, fewest, rate) for rate in plan.rates})
        best = max(tried, key=lambda rate: tried[rate]["bits kept of a person"])
        cells = {f"{kind}, {count}": cell(kind, count, best) for count in more}
        if kind == "dense":
            cells["basins"] = cell("basins", fewest, best)
        later = yield from ask_each(cells)
        found = {f"{kind}, {fewest}": tried[best], **later}
        ladder = {f"{rate:g}": values for rate, values in tried.items()}
        tries[kind] = ladder
        if "basins" in found:
            beside = found.pop("basins")
            found |= {f"basins, {count}": row for count, row in beside["rows"].items()}
            tries["basins"] = beside["steps"]
        return found

    def relayed(record: dict[str, Any]) -> None:
        asked.add(record["cell"])
        report(record)

    found = run_inquiries({kind: models(kind) for kind in KINDS}, work, folder, jobs=jobs, report=relayed)
    rows = {name: row for own in found.values() for name, row in own.items()}
    values = {
        "experiment": "capacity",
        "size": size,
        "seed": seed,
        "pools": plan.pools,
        "rows": dict(sorted(rows.items(), key=lambda row: ("basins" in row[0], row[1]["exposures"], row[0]))),
        "rates": {
            kind: {rate: row["bits kept of a person"] for rate, row in own.items()}
            for kind, own in sorted(tries.items())
        },
        "cells_made_by": origins(folder, asked),
    }
    write_result(result, values)
    return values
