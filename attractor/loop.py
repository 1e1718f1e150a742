"""The one loop that everything here trains with, and the step that it takes.

loop = Loop(lambda number: descend(optimizer, [loss_of(next(batches))], rate * annealed(number, 300)))
for done in loop.steps(300):
    if done % 100 == 0:
        print(done, loop.seconds, evaluate(model, text))
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Loop:
    """Steps, one after the other: how many were taken, the loss of the last one, and the seconds they took.

    `take` is given the number of a step, takes it and returns its loss.
    """

    def __init__(self, take: Callable[[int], Any]) -> None:
        self.take = take
        self.step = 0
        self.loss: Any = math.nan
        self.seconds = 0.0

    def steps(self, until: int) -> Iterator[int]:
        """Yield how many steps are done, before the first one and after each. Leave the loop to stop early.

        What is done between the steps takes no time of theirs. A step that raises does not count.
        """
        yield self.step
        while self.step < until:
            with self.timed():
                self.loss = self.take(self.step)
            self.step += 1
            yield self.step

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count these seconds too: a GPU is at work after `take`, until the loss is read."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started


def descend(
    optimizer: torch.optim.Optimizer,
    objectives: Iterable[Tensor],
    rate: float,
    *,
    clip: Iterable[nn.Parameter] = (),
    clip_norm: float | None = None,
) -> None:
    """One step at this rate down the sum of the objectives, with the gradients of `clip` clipped to a norm.

    An objective may be computed when it is asked for: those before it are out of memory by then.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    for objective in objectives:
        objective.backward()
    if clip_norm:
        nn.utils.clip_grad_norm_(clip, clip_norm)
    optimizer.step()


def evenly(steps: int, count: int) -> set[int]:
    """Return the steps to look at: before the first, and `count` times from there to behind the last."""
    return {round(number * steps / count) for number in range(count + 1)}


def annealed(step: int, steps: int, warmup: int = 0) -> float:
    """The share of a learning rate: a warm-up, under half a cosine to zero."""
    return min(1.0, (step + 1) / max(1, warmup)) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
