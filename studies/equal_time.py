"""Quality at equal time: the loss of dense, APN, MoE and Switch models against the time of their steps.

    python -m studies time --size smoke

Byte-level GPTs on the mixture of `match`, without dropout and without choosing a step: the loss is that after
the last one. Trainings run side by side; then every shape is timed alone, one after the other in one process.

At equal steps a shape is `ahead` by the loss of the dense models at its time of a step minus its own. Dense
models of several widths make that curve: between two of them it is straight over the logarithm of time, and
a wider one that predicts worse does not count. A shape faster than the fastest dense model is compared with
that one, which has more time; a slower one than the slowest with the best, which has less, and `inside` is
false. At equal time shapes are trained again for as many steps as fit into the time of one dense model's,
with a schedule of that length.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attractor.config import RunConfig, check_size
from studies.cells import Benchmark, Cells
from studies.grid import Inquiry, Values, ask_each
from studies.match import MIXTURE as MIXTURE
from studies.match import Data
from studies.plan import Size
from studies.rates import best_rate
from studies.statistics import mean
from studies.time_cells import WAYS, is_bank, shape

SHAPES: dict[Size, tuple[str, ...]] = {
    "smoke": ("dense 2d", "dense 4d", "apn 2/16 r16", "apn 4/16 r8", "apn 2/16 r4 product"),
    "small": (
        *(f"dense {width}d" for width in (2, 4, 8)),
        *("apn 4/64 r32", "apn 4/32 r64", "apn 8/32 r64", "moe 2/8 h256", "switch 4 h512"),
    ),
    "full": (
        *(f"dense {width}d" for width in (2, 4, 6, 8, 12, 16)),
        *("apn 4/256 r32", "apn 4/64 r128", "apn 4/256 r128", "apn 2/64 r256", "apn 4/64 r256"),
        *("apn 8/256 r64", "apn 16/256 r128"),
        *("moe 2/8 h768", "moe 8/32 h192", "moe 8/64 h192", "switch 4 h1536"),
    ),
}
"""What is compared where no shapes are named."""
BANKS = (
    "apn 16/256 r2 product @3",
    "apn 16/256 r8 product @3",
    "apn 16/65536 r8 product @3",
    "apn 16/1048576 r2 product @3",
)
"""Up to a million patches in one block, and as few of the same rank beside them. In all six blocks a million
of rank 2 would be 4.8 billion parameters, and 58 GB with AdamW's moments."""
PASSES = 3
"""Over the mixture, at most, as in `match`."""
RATES = {"dense": 1e-3, "apn": 2e-3, "moe": 2e-3, "switch": 2e-3}
"""What suited most models of a kind best in `match`; with one layer of patches the dense one."""


HEAD = 64


class Ask(NamedTuple):
    """What is to be trained and timed."""

    shapes: Sequence[str]
    dim: int | None = None  # of all models, with heads of 64 channels; None is that of the size
    rates: Sequence[float] = ()  # beside its own, those that the first seed of each shape tries
    steps: int | None = None
    again: Sequence[str] = ()  # at equal time
    within: str = "dense 4d"  # in whose time
    by: str | None = None  # the way to time a step that decides; None is the trainer's
    ways: Sequence[str] = WAYS
    decode: bool = True  # and the time of a decoded token
    shift: str | None = None  # what shapes with product prototypes learn locally
    local_rate: float = 3e-3
    compiled: bool = True
    trains: bool = True
    times: bool = True


def of_width(run: RunConfig, dim: int | None) -> RunConfig:
    """A model of this width, with heads of 64 channels."""
    if dim is None:
        return run
    check_size("dim", dim)
    if dim % HEAD:
        raise ValueError(f"dim={dim} must be a multiple of {HEAD}, the channels of a head")
    return dataclasses.replace(run, model=dataclasses.replace(run.model, dim=dim, num_heads=dim // HEAD))


def rate_of(name: str) -> float:
    return RATES["dense" if "@" in name else name.partition(" ")[0]]


class Curve(NamedTuple):
    """The loss of dense models over the time of a step: the best that is no slower."""

    times: tuple[float, ...]
    losses: tuple[float, ...]

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]]) -> "Curve":
        """Of (seconds, loss); a slower model that predicts no better is no part of it."""
        kept: list[tuple[float, float]] = []
        for time, loss in sorted(points):
            if not kept or loss < kept[-1][1]:
                kept.append((time, loss))
        times, losses = zip(*kept, strict=True)
        return cls(times, losses)

    def at(self, time: float) -> float:
        return float(np.interp(math.log(time), np.log(self.times), self.losses))


def _known(rows: Mapping[str, Mapping[str, Any]], way: str) -> dict[str, Mapping[str, Any]]:
    """Shapes that have a time, and a loss of every seed."""
    return {
        name: row
        for name, row in rows.items()
        if row["times"].get(way) and row["val_loss"] and None not in row["val_loss"]
    }


def no_slower(rows: Mapping[str, Mapping[str, Any]], way: str) -> dict[str, dict[str, Any]]:
    """For each dense model the best APN whose step takes no longer, and by how much that is ahead of it."""
    known = _known(rows, way)
    found = {}
    for name, row in known.items():
        time = row["times"][way]
        patches = {other: mean(r["val_loss"]) for other, r in known.items() if r["times"][way] <= time}
        patches = {other: loss for other, loss in patches.items() if other.startswith("apn")}
        if name.startswith("dense") and patches:
            best = min(patches, key=patches.__getitem__)
            found[name] = {"shape": best, "ahead": mean(row["val_loss"]) - patches[best]}
    return found


def compared(rows: Mapping[str, Mapping[str, Any]], way: str) -> dict[str, dict[str, Any]]:
    """By how much each shape but dense is ahead of dense models of its time of a step: by seed, in the mean.

    Shapes without a time or with a seed that diverged are left out.
    """
    known = _known(rows, way)
    dense = [row for name, row in known.items() if name.startswith("dense")]
    if not dense:
        return {}
    seeds = min(len(row["val_loss"]) for row in dense)

    def curve(loss_of: Callable[[Sequence[float]], float]) -> Curve:
        return Curve.of([(row["times"][way], loss_of(row["val_loss"][:seeds])) for row in dense])

    curves = [curve(itemgetter(seed)) for seed in range(seeds)]
    times = [row["times"][way] for row in dense]
    found = {}
    for name, row in known.items():
        if not name.startswith("dense"):
            time = row["times"][way]
            pairs = zip(curves, row["val_loss"], strict=False)
            by_seed = [curve.at(time) - loss for curve, loss in pairs]
            found[name] = {
                "ahead": mean(by_seed),
                "seeds": by_seed,
                "inside": min(times) <= time <= max(times),
            }
    return found


def steps_within(rows: Mapping[str, Mapping[str, Any]], way: str, within: str, steps: int) -> dict[str, int]:
    """How many steps each shape gets within the time in which one of them makes so many."""
    own = rows[within]["times"].get(way)
    if not own:
        why = rows[within].get("errors", {}).get(way, "it was not timed")
        raise ValueError(f"{within!r} has no time as {way!r} ({why}): choose another --by or --within")
    times = {name: row["times"].get(way) for name, row in rows.items()}
    return {name: max(1, round(steps * own / time)) for name, time in times.items() if time}


def forgotten(trajectory: Sequence[Mapping[str, Any]], loss_of_b: float) -> float | None:
    """What A lost, in the mean over its texts, where B first reached this loss; None if it never did."""
    start = trajectory[0]["A"]

    def lost(look: Mapping[str, Any]) -> float:
        return mean([look["A"][name] - start[name] for name in start])

    before: Mapping[str, Any] | None = None
    for look in trajectory:
        if look["B"] <= loss_of_b:
            if before is None or before["B"] == look["B"]:
                return lost(look)
            share = (before["B"] - loss_of_b) / (before["B"] - look["B"])
            return lost(before) + share * (lost(look) - lost(before))
        before = look
    return None


def at_equal_b(cells: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """What each shape forgot where all had the same loss on B: the lowest that every seed of each reached."""
    ways = {
        name: [cell["local"]["trajectory"] for cell in part if "local" in cell]
        for name, part in cells.items()
    }
    ways = {name: part for name, part in ways.items() if part}
    if not ways:
        return {}
    loss = max(min(look["B"] for look in way) for part in ways.values() for way in part)
    return {"B": loss, "forgotten": {name: [forgotten(w, loss) for w in part] for name, part in ways.items()}}


def run(bench: Benchmark, result: Path, ask: Ask | None = None) -> dict[str, Any]:
    ask = ask or Ask(SHAPES[bench.size])
    on_gpu = str(bench.device).startswith("cuda")
    ways = list(ask.ways) if on_gpu else ["eager"]
    by = ask.by or ("graphs" if "graphs" in ways else ways[0])
    if by not in ways:
        raise ValueError(f"times are compared as {by!r}, which is not among those taken: {', '.join(ways)}")
    steps = ask.steps or bench.plan.mixture_steps
    members = list(bench.mixture)
    data = Data("byte", members)
    shift = ask.shift or next(iter(bench.shifts("mixture")), None)
    if shift is not None and (shift in members or shift not in bench.hashes):
        raise ValueError(f"shift {shift!r} must be a domain that is not in the mixture, {', '.join(members)}")
    base = of_width(bench.plan.config("dense", 0), ask.dim)
    configs = {name: shape(name, base) for name in dict.fromkeys(ask.shapes)}
    if unknown := set(ask.again) - set(configs):
        raise ValueError(f"equal time is asked for {sorted(unknown)}, which --shapes does not name")
    if ask.again and ask.within not in configs:
        raise ValueError(f"equal time is within that of {ask.within!r}, which --shapes does not name")

    def train(name: str, seed: int, rate: float, steps: int) -> Cells:
        config = _trained(data.of(configs[name], rate, steps), ask.compiled)
        local = {"shift": shift, "rate": ask.local_rate} if is_bank(name) and shift is not None else None
        return bench.quality(name, config, members, seed, PASSES, local)

    def learned(name: str) -> Inquiry[tuple[dict[str, Any], list[Values]]]:
        """Seed by seed: what a run that is stopped has of one shape it has of all."""
        ladder = sorted(set(ask.rates)) or [rate_of(name)]
        tried = yield from ask_each({rate: train(name, 0, rate, steps) for rate in ladder})
        choice = best_rate(tried)
        cells = [tried[choice["rate"]]]
        for seed in range(1, bench.plan.seeds):
            cells += (yield from ask_each({0: train(name, seed, choice["rate"], steps)})).values()
        return choice, cells

    done = bench.answer({name: learned(name) for name in configs}) if ask.trains else {}
    best = {name: choice for name, (choice, _) in done.items()}
    trained = {name: cells for name, (_, cells) in done.items()}
    taken: dict[tuple[str, str], Values] = {}
    if ask.times:
        few = 20 if on_gpu else 3
        timed = {name: data.of(config, 1e-4, 1000) for name, config in configs.items()}
        every = (*ways, "decode") if ask.decode else ways
        asked = [(name, way) for way in every for name in timed]  # neighbours are compared
        taken = bench.alone({(name, way): bench.clock(name, timed[name], way, few) for name, way in asked})
    times = {name: {way: cell for (own, way), cell in taken.items() if own == name} for name in configs}
    rows = {name: _row(trained.get(name, []), times[name], best.get(name)) for name in configs}
    found = {
        "by": by,
        "ways": ways,
        "steps": steps,
        "dim": base.model.dim,
        "rows": rows,
        "equal_steps": {way: compared(rows, way) for way in ways},
        "no_slower": {way: no_slower(rows, way) for way in ways},
        "local": at_equal_b(trained) | {"shift": shift},
    }
    if ask.again and ask.trains and ask.times:
        found["equal_time"] = _again(bench, ask, rows, by, steps, best, train)
    return bench.write(result, "time", seeds=bench.plan.seeds, mixture=members, **found)


def _trained(config: RunConfig, compiled: bool) -> RunConfig:
    """With a warm-up that is short beside its steps. Rows of gradients break compiled graphs: no compiler."""
    train = config.train
    warmup = min(train.warmup_steps, train.max_steps // 10)
    compile = None if compiled and not config.model.apn.sparse_gradients else False
    return dataclasses.replace(config, train=dataclasses.replace(train, warmup_steps=warmup, compile=compile))


def _row(
    cells: Sequence[Values], times: Mapping[str, Values], choice: Mapping[str, Any] | None
) -> dict[str, Any]:
    """A shape in the result: what it predicts by seed, what it takes, how its patches are used."""
    row: dict[str, Any] = {
        "val_loss": [cell["val_loss"] for cell in cells],
        "times": {way: times[way]["seconds"] if way in times else None for way in WAYS},
        "decode": (times["decode"]["seconds"] or {}) if "decode" in times else {},
        "errors": {way: cell["error"] for way, cell in times.items() if cell["error"]},
    }
    if cells and choice is not None:
        keys = ("parameters", "multiply_adds_per_token", "steps", "capped", "config")
        row |= {key: cells[0][key] for key in keys}
        row |= {"rate": choice["rate"], "first_seed": choice["validation"], "at_edge": choice["at_edge"]}
        row["seconds"] = [cell["training_seconds"] for cell in cells]
        for key in ("test", "patches", "local"):
            row[key] = [cell[key] for cell in cells if key in cell]
    return row


def _again(
    bench: Benchmark,
    ask: Ask,
    rows: Mapping[str, Mapping[str, Any]],
    by: str,
    steps: int,
    best: Mapping[str, Mapping[str, Any]],
    train: Any,
) -> dict[str, Any]:
    """Those asked for, in the time of one of them: what each predicts with as many steps as fit into it."""
    allowed = steps_within(rows, by, ask.within, steps)
    named = [name for name in ask.again if name in allowed]
    cells = {
        (name, seed): train(name, seed, best[name]["rate"], allowed[name])
        for seed in range(bench.plan.seeds)
        for name in named
    }
    done = bench.answer({"": ask_each(cells)})[""]
    found = {name: [done[name, seed] for seed in range(bench.plan.seeds)] for name in named}
    again = {
        name: {key: cells[0][key] for key in ("steps", "capped")}
        | {"val_loss": [cell["val_loss"] for cell in cells]}
        for name, cells in found.items()
    }
    return {"within": ask.within, "way": by, "rows": again}
