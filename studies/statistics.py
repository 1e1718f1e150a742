"""Numbers about losses: intervals, gains, forgetting, transfer. Losses are in nats per token throughout."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

RUN = 8
"""Neighbouring blocks that are drawn together: they share a scene or a file, and are not independent."""


def interval(
    differences: Sequence[Sequence[float]], around: float | None = None, *, samples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of a mean difference, (seeds, blocks); `around` is the mean, if it is of more than those.

    The differences are paired: the same block under two models. Two errors add up: that of the text, from a
    bootstrap of runs of blocks, which all seeds share, widened because there are few of them; and that of
    the seeds, by Student's t over their means. With one seed it is the error of the text alone: what another
    seed would give is unknown.
    """
    table = np.asarray(differences, dtype=np.float64)
    seeds, blocks = table.shape
    of_blocks, of_seeds = table.mean(0), table.mean(1)
    run = max(1, min(RUN, blocks // 4))
    first = np.random.default_rng(seed).integers(0, blocks, (samples, -(-blocks // run)))
    drawn = ((first[..., None] + np.arange(run)) % blocks).reshape(samples, -1)[:, :blocks]
    mean = float(of_blocks.mean())
    runs = max(2, blocks // run)
    few = _t_95(runs - 1) / _t_95(math.inf) * math.sqrt(runs / (runs - 1))
    below, above = (few * abs(q - mean) for q in np.quantile(of_blocks[drawn].mean(1), [0.025, 0.975]))
    apart = _t_95(seeds - 1) * of_seeds.std(ddof=1) / math.sqrt(seeds) if seeds > 1 else 0.0
    middle = mean if around is None else around
    return middle - math.hypot(below, apart), middle + math.hypot(above, apart)


@functools.cache  # scipy takes milliseconds for each
def _t_95(freedom: float) -> float:
    """What 1.96 becomes when the spread is known from few."""
    from scipy import stats  # most of a second, which is spared where no interval is asked for

    return float(stats.t.ppf(0.975, freedom))


def gain_fraction(start: float, after: float, best_full: float) -> float:
    """How much of the way from one model's loss on B to what the best full fine-tuning of it reached.

    The start is that model's for every method: equal losses on B are equal gains, wherever they came from.
    Where full fine-tuning gained nothing there is no such share: NaN.
    """
    return (start - after) / (start - best_full) if best_full < start else math.nan


def hypervolume(gain: float, lost: float) -> float:
    """The area that a point dominates: gain from 0 up, forgetting from one nat down to none.

    A method that gains all that full fine-tuning gains, and forgets nothing, has an area of 1. A gain that is
    no number has no area: NaN.
    """
    return math.nan if math.isnan(gain) else max(gain, 0.0) * max(1.0 - max(lost, 0.0), 0.0)


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def or_nan(value: float | None) -> float:
    """JSON has no NaN: what did not stay finite is null there."""
    return math.nan if value is None else value


def transfer(matrix: Sequence[Mapping[str, float | None]], order: Sequence[str]) -> dict[str, float]:
    """Of a stream: backward and forward transfer (positive is good), and the worst forgetting, in nats.

    matrix[0] is before the stream and matrix[i] after visit i of `order`. As in Lopez-Paz and Ranzato 2017, a
    domain's backward transfer is from the end of its first visit to when all have been visited once: who
    comes back later is learned again. Its forward transfer is from the start of the stream to the start of
    its first visit; there stands the pretrained model, and not one that knows nothing. Forgetting is the rise
    from the best loss it ever had: at the end, and at its worst on the way.
    """
    losses = [{name: or_nan(loss) for name, loss in row.items()} for row in matrix]
    first = {name: order.index(name) for name in order}
    last = max(first.values())
    forward = [losses[0][name] - losses[first[name]][name] for name in first if first[name] > 0]
    backward = [losses[at + 1][name] - losses[last + 1][name] for name, at in first.items() if at < last]
    rises = [losses[-1][name] - np.min([row[name] for row in losses]) for name in first]
    on_the_way = [
        losses[visit][name] - np.min([row[name] for row in losses[: visit + 1]])
        for name in first
        for visit in range(len(losses))
    ]
    return {
        "BWT": mean(backward) if backward else 0.0,
        "FWT": mean(forward) if forward else 0.0,
        "worst_forgetting": float(np.max(rises)),
        "worst_on_the_way": float(np.max(on_the_way)),
        "final": mean(losses[-1][name] for name in first),
    }
