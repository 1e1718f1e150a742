"""The one loop by which studies teach a model that exists: batches, steps, and looks on the way."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from attractor.data import Batch
from studies.methods import Adapter
from studies.plan import Plan

Step = Callable[[int, Tensor, Tensor], float]
"""From the number of a step, inputs and targets to the loss before the step."""


@dataclass
class Course:
    """Steps on batches. Whatever a step raises is raised, and here stands how far it came."""

    step: Step
    batches: Iterator[Batch]
    done: int = 0
    seconds: float = 0.0
    """Of the steps alone."""
    loss: float = math.nan
    """Of the last batch, before its step."""

    def run(self, steps: int, look: Callable[[int], None] = lambda number: None) -> None:
        """So many steps; `look` is called before each of them, and after the last."""
        look(self.done)
        while self.done < steps:
            started = time.perf_counter()
            self.loss = self.step(self.done, *next(self.batches))
            self.seconds += time.perf_counter() - started
            self.done += 1
            look(self.done)


def scheduled(adapter: Adapter, plan: Plan, rate: float, steps: int) -> Step:
    """The steps of a method at a rate that rises and falls as the plan says."""
    return lambda number, inputs, targets: adapter.step(inputs, targets, plan.rate_at(number, rate, steps))
