"""Numbers about losses: intervals, gains, forgetting, transfer. Losses are in nats per token throughout."""

import math
from collections.abc import Sequence

import numpy as np

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's t, by degrees of freedom: what 1.96 becomes when the spread is known from few seeds."""


def interval(
    differences: Sequence[Sequence[float]], *, samples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of a mean difference, (seeds, blocks).

    The differences are paired: the same block under two models. Two errors add up: that of the text, from a
    bootstrap of blocks, which all seeds share; and that of the seeds, by Student's t over their means. With
    one seed it is the error of the text alone: what another seed would give, nobody knows.
    """
    table = np.asarray(differences, dtype=np.float64)
    seeds, blocks = table.shape
    of_blocks, of_seeds = table.mean(0), table.mean(1)
    drawn = np.random.default_rng(seed).integers(0, blocks, (samples, blocks))
    mean = float(of_blocks.mean())
    below, above = (abs(q - mean) for q in np.quantile(of_blocks[drawn].mean(1), [0.025, 0.975]))
    apart = T_95.get(seeds - 1, 1.96) * of_seeds.std(ddof=1) / math.sqrt(seeds) if seeds > 1 else 0.0
    return mean - math.hypot(below, apart), mean + math.hypot(above, apart)


def gain_fraction(start: float, after: float, best_full: float) -> float:
    """How much of the way from one model's loss on B to what the best full fine-tuning of it reached.

    The start is that model's for everybody: equal losses on B are equal gains, wherever they came from.
    Where full fine-tuning gained nothing there is no such share: NaN.
    """
    return (start - after) / (start - best_full) if best_full < start else math.nan


def hypervolume(gain: float, lost: float, worst: float = 1.0) -> float:
    """The area that a point dominates: gain from 0 up, forgetting from `worst` nats down to none.

    A method that gains all that full fine-tuning gains, and forgets nothing, has area `worst`. A gain that is
    no number has no area: NaN.
    """
    return math.nan if math.isnan(gain) else max(gain, 0.0) * max(worst - max(lost, 0.0), 0.0)


def transfer(matrix: Sequence[dict[str, float]], order: Sequence[str]) -> dict[str, float]:
    """Of a stream: backward and forward transfer (positive is good), and the worst forgetting, in nats.

    matrix[0] is before the stream and matrix[i] after visit i of `order`. As in Lopez-Paz and Ranzato 2017, a
    domain's backward transfer is from the end of its first visit to when all have been visited once: who
    comes back later is learned again. Its forward transfer is from the start of the stream to the start of
    its first visit; there stands the pretrained model, and not one that knows nothing. Forgetting is the rise
    from the best loss it ever had: at the end, and at its worst on the way.
    """
    first = {name: order.index(name) for name in order}
    last = max(first.values())
    forward = [matrix[0][name] - matrix[first[name]][name] for name in first if first[name] > 0]
    backward = [matrix[at + 1][name] - matrix[last + 1][name] for name, at in first.items() if at < last]
    rises = [matrix[-1][name] - min(row[name] for row in matrix) for name in first]
    on_the_way = [
        matrix[visit][name] - min(row[name] for row in matrix[: visit + 1])
        for name in first for visit in range(len(matrix))
    ]  # fmt: skip
    return {
        "BWT": float(np.mean(backward)) if backward else 0.0,
        "FWT": float(np.mean(forward)) if forward else 0.0,
        "worst_forgetting": max(rises),
        "worst_on_the_way": max(on_the_way),
        "final": float(np.mean([matrix[-1][name] for name in first])),
    }
