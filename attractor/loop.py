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
from typing import Any, cast

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

    def run_until(self, step: int) -> None:
        """Take steps where nothing is to be done between them."""
        for _ in self.steps(step):
            pass

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
        clip_gradients(clip, clip_norm)
    optimizer.step()


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> None:
    """`nn.utils.clip_grad_norm_`, which knows no sparse gradients."""
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    sparse = [parameter for parameter in parameters if cast(Tensor, parameter.grad).is_sparse]
    if not sparse:
        nn.utils.clip_grad_norm_(parameters, most)
        return
    for parameter in sparse:
        parameter.grad = _coalesced(cast(Tensor, parameter.grad))
    gradients = [cast(Tensor, parameter.grad) for parameter in parameters]
    values = [gradient.values() if gradient.is_sparse else gradient for gradient in gradients]
    factor = (most / (nn.utils.get_total_norm(values) + 1e-6)).clamp(max=1.0)
    for value in values:
        value.mul_(factor.to(value.device))


def _coalesced(gradient: Tensor) -> Tensor:
    """Each row once. What is zero is left out before.

    Product prototypes fill their gradients up with zeros for one patch, so that nothing waits for how many
    patches were selected. There can be 200,000 rows of them, and a GPU adds those one after the other.
    """
    if gradient.is_coalesced():
        return gradient
    indices, values = gradient._indices(), gradient._values()
    rows = values.flatten(1).any(1).nonzero().squeeze(1)
    kept = torch.sparse_coo_tensor(indices[:, rows], values[rows], gradient.shape, check_invariants=False)
    return kept.coalesce()


@torch.no_grad()
def move_rows(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A hook before the step of AdamW, which knows no sparse gradients: it takes the step of those itself.

        optimizer.register_step_pre_hook(move_rows)

    Only the rows that a gradient has move, and that are not zero. The others keep their values, are not
    decayed, and their moments do not fade, as with `torch.optim.SparseAdam`: a step does not touch a bank of
    a million patches.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                _move_rows(parameter, _coalesced(parameter.grad), optimizer.state[parameter], group)
                parameter.grad = None


def _move_rows(
    parameter: nn.Parameter, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]
) -> None:
    if not state:  # as AdamW begins
        device = parameter.device if group["fused"] else None
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    state["step"] += 1
    rows, gradient = gradient.indices()[0], gradient.values()
    step = state["step"].to(parameter.device, torch.float64)  # a number: it makes nothing else float64
    (fade, fade_sq), rate = group["betas"], group["lr"]
    mean = state["exp_avg"][rows].lerp_(gradient, 1 - fade)
    square = state["exp_avg_sq"][rows].mul_(fade_sq).addcmul_(gradient, gradient, value=1 - fade_sq)
    size = (square.sqrt() / (1 - fade_sq**step).sqrt()).add_(group["eps"])
    kept = parameter[rows] * (1 - rate * group["weight_decay"])
    parameter.index_copy_(0, rows, kept - rate / (1 - fade**step) * mean / size)
    state["exp_avg"].index_copy_(0, rows, mean)
    state["exp_avg_sq"].index_copy_(0, rows, square)


def evenly(steps: int, count: int) -> set[int]:
    """Return the steps to look at: before the first, and `count` times from there to behind the last."""
    return {round(number * steps / count) for number in range(count + 1)}


def annealed(step: int, steps: int, warmup: int = 0) -> float:
    """The share of a learning rate: a warm-up, under half a cosine to zero."""
    return min(1.0, (step + 1) / max(1, warmup)) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
