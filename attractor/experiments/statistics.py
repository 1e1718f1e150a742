"""Numbers about losses: intervals, gains, forgetting, transfer. Losses are in nats per token throughout."""

from collections.abc import Sequence

import numpy as np


def interval(
    differences: Sequence[Sequence[float]], *, samples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of a mean difference, (seeds, blocks), by a bootstrap of blocks and of seeds.

    The differences are paired: the same block under two models. Blocks are drawn for all seeds alike.
    """
    table = np.asarray(differences, dtype=np.float64)
    chance = np.random.default_rng(seed)
    seeds, blocks = table.shape
    means = np.empty(samples)
    for sample in range(samples):
        drawn = table[chance.integers(0, seeds, seeds)]
        means[sample] = drawn[:, chance.integers(0, blocks, blocks)].mean()
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def gain_fraction(before: float, after: float, best_full: float) -> float:
    """How much of what the best full fine-tuning gained on B this gained; 1 is as much."""
    return (before - after) / (before - best_full)


def hypervolume(points: Sequence[tuple[float, float]], worst: float = 1.0) -> float:
    """The area that (gain, forgetting) points dominate: gain from 0 up, forgetting from `worst` nats down.

    A method that gains all and forgets nothing has area `worst`.
    """
    reached = sorted(((gain, lost) for gain, lost in points if gain > 0 and lost < worst), reverse=True)
    area, least = 0.0, worst
    for gain, lost in reached:  # the largest gain first: each adds the strip below what was covered so far
        lost = max(lost, 0.0)
        if lost < least:
            area += gain * (least - lost)
            least = lost
    return area


def transfer(matrix: Sequence[dict[str, float]], order: Sequence[str]) -> dict[str, float]:
    """Of a stream: backward and forward transfer (positive is good), and the worst forgetting, in nats.

    matrix[0] is before the stream and matrix[i] after visit i of `order`. A domain's backward transfer is
    from the end of its first visit to the end of the stream, its forward transfer from the start of the
    stream to the start of its first visit. Forgetting is the rise from the best loss it ever had.
    """
    first = {name: order.index(name) for name in order}
    later = [name for name in first if first[name] < len(order) - 1]
    forward = [matrix[0][name] - matrix[first[name]][name] for name in first if first[name] > 0]
    backward = [matrix[first[name] + 1][name] - matrix[-1][name] for name in later]
    rises = [matrix[-1][name] - min(row[name] for row in matrix) for name in first]
    return {
        "BWT": float(np.mean(backward)) if backward else 0.0,
        "FWT": float(np.mean(forward)) if forward else 0.0,
        "worst_forgetting": max(rises),
        "final": float(np.mean([matrix[-1][name] for name in first])),
    }
