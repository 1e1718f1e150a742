"""The honest benchmark: every method adapts the same models to the same texts, alone and behind the guard.

    python -m studies shifts --size smoke        two CPU cores, a few minutes: every method, no conclusions
    python -m studies shifts --size full         one GPU, an hour, in pieces as short as you like

Byte-level models are pretrained on one domain and on a mixture, and adapted to others. Every method sees
as many tokens, with the same schedule; its learning rate is the best of the same few on the validation text
of one shift (found by climbing from the middle), and then frozen; it stops early on B's validation text; what
is reported is measured on whole test texts that nothing was chosen by. Each cell of the grid is a JSON file.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from studies.adapting import BLOCK
from studies.cells import Benchmark
from studies.grid import Inquiry, Values, ask, ask_each
from studies.methods import METHODS
from studies.plan import HOME, KINDS, TUNED_ON
from studies.rates import best_rate, climb
from studies.statistics import gain_fraction, hypervolume, interval, mean, transfer
from studies.streams import LEARNERS

BEST_FULL = "dense, full"
"""What gains on B are measured by."""
WAYS = ("alone", "guarded")
STREAM = (HOME, "kjv", "python", "first-folio", HOME, "kjv")


def run(bench: Benchmark, result: Path, *, methods: Sequence[str] = tuple(METHODS)) -> dict[str, Any]:
    """Every cell, then the result file."""
    if unknown := set(methods) - set(METHODS):
        raise ValueError(f"unknown methods {sorted(unknown)}; there are: {'; '.join(METHODS)}")
    plan = bench.plan
    sources = (HOME, "mixture")
    order = stream_order(bench)
    pretrained: dict[str, Values] = {}
    rates: dict[str, Any] = {}
    stream_rates: dict[str, Any] = {}
    found: dict[tuple[str, str, str, int], Values] = {}
    streams: dict[tuple[str, int], Values] = {}
    for seed in range(plan.seeds):  # one after the other: a run that is stopped has whole ones
        inquiries: dict[tuple[str, str], Inquiry[Any]] = {}
        for kind in KINDS:
            inquiries["base", kind] = bases(bench, kind, sources, seed)
        for method in methods:
            inquiries["adapt", method] = adapted(bench, method, sources, seed, rates.get(method))
        for method in LEARNERS:
            inquiries["stream", method] = streamed(bench, method, seed, stream_rates.get(method))
        for (what, name), answer in bench.answer(inquiries).items():
            if what == "base":
                pretrained |= answer
            elif what == "adapt":
                rates[name], cells = answer
                found |= {(source, shift, name, seed): cell for (source, shift), cell in cells.items()}
            else:
                stream_rates[name], streams[name, seed] = answer
    shifts = {
        source: {
            shift: {
                method: summary(
                    [found[source, shift, method, seed] for seed in range(plan.seeds)],
                    [found[source, shift, BEST_FULL, seed] for seed in range(plan.seeds)],
                    bench.members(source),
                )
                for method in methods
            }
            for shift in bench.shifts(source)
        }
        for source in sources
    }
    kept = ("val_ppl", "parameters", "multiply_adds_per_token", "best_step")
    recipe = {key: getattr(plan, key) for key in ("steps", "batch_size", "rates")}
    return bench.write(
        result,
        "shifts",
        seeds=plan.seeds,
        device=bench.device,
        mixture=list(bench.mixture),
        block=BLOCK,
        config={kind: plan.config(kind, 0).to_dict() for kind in KINDS},
        recipe=recipe | {"tuned_on": TUNED_ON},
        pretrained={name: {key: part[key] for key in kept} for name, part in pretrained.items()},
        rates=rates,
        shifts=shifts,
        streams={
            "order": order,
            "methods": {
                method: {
                    **stream_rates[method],
                    "seeds": [
                        {**cell, **transfer(cell["matrix"], order)}
                        for cell in (streams[method, seed] for seed in range(plan.seeds))
                    ],
                }
                for method in LEARNERS
            },
        },
    )


def bases(bench: Benchmark, kind: str, sources: Sequence[str], seed: int) -> Inquiry[dict[str, Values]]:
    """The models of one kind, pretrained."""
    cells = [bench.pretrain(kind, source, seed) for source in sources]
    return ask({name: cell for part in cells for name, cell in part.items()})


def adapted(
    bench: Benchmark, method: str, sources: Sequence[str], seed: int, rate: dict[str, Any] | None
) -> Inquiry[tuple[dict[str, Any], dict[tuple[str, str], Values]]]:
    """A method's rate, and what it comes to on every shift.

    If it is not known yet, the rate is that with the best validation loss of one shift, with the first seed.
    """
    kind = METHODS[method].model
    yield from bases(bench, kind, [HOME], seed)
    if rate is None:
        trial = partial(bench.adapt, method, HOME, TUNED_ON, 0)
        rate = best_rate((yield from climb(bench.plan.rates, trial)))
    yield from bases(bench, kind, sources, seed)
    cells = {
        (source, shift): bench.adapt(method, source, shift, seed, rate["rate"])
        for source in sources
        for shift in bench.shifts(source)
    }
    return rate, (yield from ask_each(cells))


def stream_order(bench: Benchmark) -> list[str]:
    return [name for name in STREAM if name == HOME or name in bench.targets]


def streamed(
    bench: Benchmark, method: str, seed: int, rate: dict[str, Any] | None
) -> Inquiry[tuple[dict[str, Any], Values]]:
    """A learner's rate, by the progressive loss on the first new domain, and the stream with it."""
    yield from bases(bench, LEARNERS[method], [HOME], seed)
    if rate is None:
        trial = partial(bench.stream, method, [HOME, TUNED_ON], 0)
        rate = best_rate((yield from climb(bench.plan.rates, trial)))
    done = yield bench.stream(method, stream_order(bench), seed, rate["rate"])
    return rate, next(iter(done.values()))


def summary(cells: Sequence[Values], full: Sequence[Values], old: Sequence[str]) -> dict[str, Any]:
    """One method on one shift over seeds: perplexities, gains and losses, alone and behind the guard."""
    first = cells[0]
    row: dict[str, Any] = {
        "A_before": _ppl(_mean_loss(cell["before"], old) for cell in cells),
        "B_before": _ppl(cell["before"]["B"]["loss"] for cell in cells),
        "full_gained": mean(
            part["before"]["B"]["loss"] - part["best"]["alone"]["B"]["loss"] for part in full
        ),
        "best_steps": [cell["best"]["step"] for cell in cells],
        "trained": first["trained"],
        **{key: max(cell["best"][key] for cell in cells) for key in ("changed", "bytes")},
        "extra_bytes": first["extra_bytes"],
        "tokens": first["tokens"],
        "seconds": mean(cell["seconds"] for cell in cells),
        "base_unchanged": all(cell["base_unchanged"] for cell in cells),
        "bound": first["bound"],
        "trajectory": [
            {"step": point["step"], "A": _mean_of(point["losses"], old), "B": point["losses"]["B"]}
            for point in first["trajectory"]
        ],
        "routing": first["routing"],
    }
    for way in WAYS:
        after = [cell["best"][way] for cell in cells]
        before, best = [cell["before"] for cell in cells], [part["best"]["alone"] for part in full]
        lost = [_mean_loss(now, old) - _mean_loss(then, old) for now, then in zip(after, before, strict=True)]
        over = mean(now["B"]["loss"] - theirs["B"]["loss"] for now, theirs in zip(after, best, strict=True))
        gains = [_gain(now["B"]["loss"], theirs) for now, theirs in zip(after, full, strict=True)]
        row[way] = {
            "A": _ppl(_mean_loss(now, old) for now in after),
            "B": _ppl(now["B"]["loss"] for now in after),
            "forgetting": mean(lost),
            "forgetting_interval": list(interval(_differences(after, before, old), mean(lost))),
            "B_over_full": math.exp(over),
            "B_over_full_interval": [
                math.exp(bound) for bound in interval(_differences(after, best, ["B"]), over)
            ],
            "gain": mean(gains),
            "hypervolume": mean(map(hypervolume, gains, lost)),
        }
    return row


def _gain(loss: float, full: Values) -> float:
    return gain_fraction(full["before"]["B"]["loss"], loss, full["best"]["alone"]["B"]["loss"])


def _mean_of(losses: dict[str, float], names: Sequence[str]) -> float:
    return sum(losses[name] for name in names) / len(names)


def _mean_loss(part: dict[str, Any], names: Sequence[str]) -> float:
    return _mean_of({name: part[name]["loss"] for name in names}, names)


def _ppl(losses: Iterable[float]) -> float:
    """The perplexity of the mean loss over seeds."""
    return math.exp(mean(losses))


def _differences(
    now: Sequence[dict[str, Any]], then: Sequence[dict[str, Any]], names: Sequence[str]
) -> list[list[float]]:
    """For each seed, block by block, the mean over texts: a difference between texts is not an error."""
    found = []
    for after, before in zip(now, then, strict=True):
        pairs = [zip(after[name]["blocks"], before[name]["blocks"], strict=True) for name in names]
        table = [[a - b for a, b in blocks] for blocks in pairs]
        found.append([sum(column) / len(column) for column in zip(*table, strict=True)])
    return found


def seeds_of(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """How many runs stand behind the rows of a shift, in words."""
    seeds = len(next(iter(rows.values()))["best_steps"])
    return f"{seeds} seed{'s' if seeds > 1 else ''}"
