"""Learning rates, chosen the same way for every method: on a ladder that each method climbs as it needs."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from studies.grid import Inquiry, Values, ask_each

if TYPE_CHECKING:
    from studies.cells import Cells


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
        "rate": chosen,
        "at_edge": not tied and len(rates) > 1 and chosen in (rates[0], rates[-1]),
        "tied": tied,
        "validation": {str(rate): loss for rate, loss in losses.items()},
    }


def climb(ladder: Sequence[float], cell: Callable[[float], "Cells"]) -> Inquiry[dict[float, Values]]:
    """What the rates came to that were tried, until the neighbours of the best one are among them.

    From the middle up or down, so that the best of those tried is the best nearby. Of equals the lowest is
    taken: who diverges goes down the whole ladder.
    """
    tried: dict[float, Values] = {}
    middle = len(ladder) // 2
    asked = set(ladder[middle - 1 : middle + 1])
    while asked:
        tried |= yield from ask_each({rate: cell(rate) for rate in sorted(asked)})
        best = ladder.index(min(tried, key=lambda rate: (loss_of(tried[rate]), rate)))
        asked = set(ladder[max(0, best - 1) : best + 2]) - tried.keys()
    return tried
