"""How well a model predicts a text: the one evaluator."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch.nn import functional as F

from attractor.data import windows
from attractor.distributed import World
from attractor.model import GPT


@torch.no_grad()
def evaluate(
    model: GPT,
    tokens: np.ndarray,
    *,
    batch_size: int = 64,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    world: World | None = None,
) -> float:
    """Mean loss in nats per token over all of `tokens`, in contiguous windows of the model's context.

    Every token but the first is predicted exactly once: no sampling, so two evaluations agree. The processes
    of `world` share the windows of each batch.
    """
    world = world or World()
    was_training = model.training
    model.eval()
    device = model.embedding.weight.device
    total, count = 0.0, 0
    for inputs, targets, number in windows(tokens, model.config.context, batch_size):
        mine = slice(world.rank, None, world.size) if len(inputs) > world.rank else slice(0, 1)
        with autocast():
            logits = model(inputs[mine].to(device))
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), targets[mine].to(device).flatten(), reduction="sum"
        )
        if (
            len(inputs) > world.rank
        ):  # else there is no window left for us, and we only keep the others company
            total += float(losses.double())
        count += number
    model.train(was_training)
    return float(world.sum(torch.tensor(total, dtype=torch.float64))) / count


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    use_bfloat16 = precision == "bfloat16" or (
        precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported()
    )
    return torch.autocast(device.type, torch.bfloat16, enabled=use_bfloat16)
