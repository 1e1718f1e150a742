"""Learning rates, chosen the same way for everybody: on a ladder that each method climbs as it needs."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attractor.experiments.benchmark import Benchmark, Cells
from attractor.experiments.grid import Values


def or_worst(loss: float | None) -> float:
    return loss if loss is not None and math.isfinite(loss) else math.inf


def loss_of(cell: Values) -> float:
    """What is chosen by: the validation text or, of a stream, what was read before it was learned."""
    if "val_loss" in cell:  # of a model that was trained
        return or_worst(cell["val_loss"])
    return or_worst(cell["best"]["validation"] if "best" in cell else cell["progressive"][1])


def best_rate(cells: Mapping[float, Values]) -> dict[str, Any]:
    """The rate with the lowest loss, and what to know about that: is it at an edge, did it matter at all?"""
    losses = {rate: loss_of(cells[rate]) for rate in sorted(cells)}
    rates = list(losses)
    tied = len(set(losses.values())) == 1 and len(losses) > 1
    chosen = rates[len(rates) // 2] if tied else min(losses, key=lambda rate: losses[rate])
    return {
        "rate": chosen, "at_edge": not tied and len(rates) > 1 and chosen in (rates[0], rates[-1]),
        "tied": tied, "validation": {str(rate): loss for rate, loss in losses.items()},
    }  # fmt: skip


def climb(
    bench: Benchmark, ladder: Sequence[float], searched: Mapping[Any, Callable[[float], Cells]]
) -> dict[Any, dict[float, Values]]:
    """What each came to with the rates it tried, until the neighbours of its best rate are among them.

    From the middle up or down, so that the best of those tried is the best nearby. Of equals the lowest is
    taken: who diverges goes down the whole ladder.
    """
    tried: dict[Any, dict[float, Values]] = {key: {} for key in searched}
    middle = len(ladder) // 2
    asked = {key: set(ladder[middle - 1 : middle + 1]) for key in searched}
    while any(asked.values()):
        cells = {(key, rate): searched[key](rate) for key, rates in asked.items() for rate in sorted(rates)}
        done = bench.run({name: cell for part in cells.values() for name, cell in part.items()})
        for (key, rate), part in cells.items():
            tried[key][rate] = done[next(iter(part))]
        for key, results in tried.items():
            best = ladder.index(min(results, key=lambda rate: (loss_of(results[rate]), rate)))
            asked[key] = set(ladder[max(0, best - 1) : best + 2]) - results.keys()
    return tried
