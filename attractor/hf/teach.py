"""Teach a model a text: batches, a warm-up and half a cosine, the best by a validation text.

    done = teach(CausalLM(net, context=256), net.trainable_parameters(), train, validation, steps=300)

The model ends as it was at its best. `keep` is called at every new best: what it saves is there
before something goes wrong.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor.config import check_number, check_size
from attractor.continual.update import NotFiniteUpdate
from attractor.data import Batches
from attractor.evaluate import autocast, evaluate
from attractor.lm import LanguageModel, mode
from attractor.loop import Loop, annealed, descend, evenly

Report = Callable[[dict[str, Any]], None]


def teach(
    model: LanguageModel,
    parameters: Iterable[nn.Parameter],
    train: np.ndarray,
    validation: np.ndarray,
    *,
    steps: int = 300,
    batch_size: int = 16,
    learning_rate: float = 1e-3,
    evaluations: int = 4,
    seed: int = 0,
    keep: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
    report: Report = lambda record: None,
) -> dict[str, Any]:
    """Train these parameters of a model on the tokens `train`, and keep what predicts `validation` best.

    It takes `steps` steps with `batch_size` sequences of the model's context each. `keep` is called at every
    new best, `report` with a record after every step, and training ends early when `stop()` is true.

    Returns the validation loss before, the best one and its step, the losses on the way, and whether a loss
    was not finite, which ends training. Wrong settings, and no parameters, are a ValueError.
    """
    check_size("steps", steps)
    check_size("evaluations", evaluations)
    check_number("learning_rate", learning_rate, "a positive number", lambda rate: rate > 0)
    learning = list(parameters)
    if not learning:
        raise ValueError("nothing of the model can learn: use a retrofit")
    optimizer = torch.optim.AdamW(learning, betas=(0.9, 0.99), weight_decay=0.0)
    batches = Batches(train, batch_size, model.config.context, seed)

    def cast() -> AbstractContextManager:
        return autocast(model.device, "auto")

    def take(step: int) -> Tensor:
        inputs, targets = (part.to(model.device) for part in next(batches))
        with mode(model, training=True), cast():
            logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        if not loss.isfinite():
            raise NotFiniteUpdate(f"the loss is {float(loss.detach())} at step {step}")
        rate = learning_rate * annealed(step, steps, steps // 12)
        descend(optimizer, [loss], rate, clip=learning, clip_norm=1.0)
        return loss.detach()

    loop = Loop(take)
    evaluated = evenly(steps, evaluations)
    losses: list[dict[str, float]] = []
    kept: list[Tensor] = []
    best, best_step, stopped, diverged = math.inf, 0, False, False
    try:
        for step in loop.steps(steps):
            if step:
                report({"step": step})
            stopped = stop()
            if step in evaluated or stopped:
                loss = evaluate(model, validation, batch_size=batch_size, autocast=cast)
                losses.append({"step": step, "validation": loss})
                report({"step": step, "val/ppl": math.exp(min(loss, 50.0))})
                if loss < best:
                    best, best_step = loss, step
                    kept = [parameter.detach().clone() for parameter in learning]
                    keep()
            if stopped:
                break
    except NotFiniteUpdate:  # the rate is too high: what was best before stays the result
        diverged = True
    with torch.no_grad():
        for parameter, value in zip(learning, kept, strict=bool(kept)):  # nothing, if no loss was finite
            parameter.copy_(value)
    return {
        "before": losses[0]["validation"],
        "best": best,
        "best_step": best_step,
        "losses": losses,
        "steps": loop.step,
        "stopped": stopped,
        "diverged": diverged,
        "seconds": loop.seconds,
        "trained": sum(parameter.numel() for parameter in learning),
        "tokens": loop.step * batch_size * model.config.context,
    }
