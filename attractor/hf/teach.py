"""Teach a model a text: batches, a warm-up and half a cosine, the best by a validation text.

    done = teach(CausalLM(net, context=256), net.trainable_parameters(), train, validation, steps=300)

The model ends as it was at its best. `keep` is called at every new best: whoever saves it there has it
before something goes wrong.
"""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from attractor.config import check_number, check_size
from attractor.data import Batches
from attractor.evaluate import autocast, evaluate
from attractor.hf.causal import CausalLM
from attractor.lm import mode

Report = Callable[[dict[str, Any]], None]


def annealed(step: int, steps: int, warmup: int) -> float:
    """The share of a learning rate: a warm-up, under half a cosine to zero."""
    return min(1.0, (step + 1) / max(1, warmup)) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def teach(
    model: CausalLM,
    parameters: Iterable[nn.Parameter],
    train: np.ndarray,
    validation: np.ndarray,
    *,
    steps: int = 300,
    batch_size: int = 16,
    learning_rate: float = 1e-3,
    evaluations: int = 4,
    clip_norm: float = 1.0,
    seed: int = 0,
    precision: str = "auto",
    keep: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
    report: Report = lambda record: None,
) -> dict[str, Any]:
    """Returns the validation loss before, the best one and its step, and the losses on the way."""
    check_size("steps", steps)
    check_size("evaluations", evaluations)
    check_number("learning_rate", learning_rate, "a positive number", lambda rate: rate > 0)
    learning = list(parameters)
    if not learning:
        raise ValueError("nothing of the model can learn: use a retrofit")
    device = model.device
    optimizer = torch.optim.AdamW(learning, lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    batches = Batches(train, batch_size, model.config.context, seed)
    evaluated = {round(number * steps / evaluations) for number in range(evaluations + 1)}
    losses: list[dict[str, float]] = []
    kept: list[torch.Tensor] = []
    best, best_step, seconds, diverged = math.inf, 0, 0.0, False
    for step in range(steps + 1):
        stopped = stop()
        if step in evaluated or stopped:
            loss = evaluate(
                model,
                validation,
                batch_size=batch_size,
                autocast=lambda: autocast(device, precision),
            )
            losses.append({"step": step, "validation": loss})
            report({"step": step, "val/ppl": math.exp(min(loss, 50.0))})
            if loss < best:
                best, best_step = loss, step
                kept = [parameter.detach().clone() for parameter in learning]
                keep()
        if step == steps or stopped:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * annealed(step, steps, steps // 12)
        started = time.perf_counter()
        inputs, targets = (part.to(device) for part in next(batches))
        with mode(model, training=True), autocast(device, precision):
            logits = model(inputs)
        loss_now = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        if not loss_now.isfinite():  # the rate is too high: what was best before stays the result
            diverged = True
            break
        optimizer.zero_grad()
        loss_now.backward()
        nn.utils.clip_grad_norm_(learning, clip_norm)
        optimizer.step()
        seconds += time.perf_counter() - started
        report({"step": step + 1})
    with torch.no_grad():
        for parameter, value in zip(learning, kept, strict=bool(kept)):  # nothing, if no loss was finite
            parameter.copy_(value)
    return {
        "before": losses[0]["validation"], "best": best, "best_step": best_step, "losses": losses,
        "steps": step, "stopped": stopped, "diverged": diverged, "seconds": seconds,
        "trained": sum(parameter.numel() for parameter in learning),
        "tokens": step * batch_size * model.config.context,
    }  # fmt: skip
