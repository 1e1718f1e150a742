"""How well a model predicts a text: the one evaluator."""

import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attractor.data import windows
from attractor.distributed import World
from attractor.layer import RoutingStats
from attractor.lm import LanguageModel, TrainableModel, mode


@torch.no_grad()
def evaluate(
    model: LanguageModel,
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
    device = model.device
    total, count = 0.0, 0
    with mode(model, training=False):
        for inputs, targets, number in windows(tokens, model.config.context, batch_size):
            mine = slice(world.rank, None, world.size) if len(inputs) > world.rank else slice(0, 1)
            with autocast():
                logits = model(inputs[mine].to(device))
            losses = F.cross_entropy(
                logits.flatten(0, 1).float(), targets[mine].to(device).flatten(), reduction="none"
            )
            if len(inputs) > world.rank:  # else no window is left for us, and we keep the others company
                total += float(losses.double().sum())
            count += number
    return float(world.sum(torch.tensor(total, dtype=torch.float64))) / count


@torch.no_grad()
def token_losses(
    model: LanguageModel,
    tokens: np.ndarray,
    *,
    batch_size: int = 64,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> Tensor:
    """Return the loss of each token but the first (n - 1), in the windows of `evaluate`."""
    device, found = model.device, []
    with mode(model, training=False):
        for inputs, targets, _ in windows(tokens, model.config.context, batch_size):
            with autocast():
                logits = model(inputs.to(device)).flatten(0, 1)
            found.append(F.cross_entropy(logits.float(), targets.to(device).flatten(), reduction="none"))
    return torch.cat(found)


@torch.no_grad()
def routing(
    model: TrainableModel, tokens: np.ndarray, *, autocast: Callable[[], AbstractContextManager] = nullcontext
) -> dict[int, RoutingStats]:
    """What the router of each APN layer does with every token but the last, on the CPU.

    The two regularisers are means over batches.
    """
    device = model.device
    parts: dict[int, list[RoutingStats]] = defaultdict(list)
    with mode(model, training=False):
        for inputs, _, _ in windows(tokens, model.config.context, 64):
            with autocast():
                _, found = model(inputs.to(device), return_stats=True)
            for layer, stats in found.items():
                parts[layer].append(stats)
    return {layer: _joined(pieces) for layer, pieces in parts.items()}


def _joined(parts: list[RoutingStats]) -> RoutingStats:
    """One statistic over all tokens, (n, ...)."""

    def all_of(name: str) -> Tensor:
        return torch.cat([getattr(part, name).flatten(0, 1).cpu() for part in parts])

    def mean_of(name: str) -> Tensor:
        return torch.stack([getattr(part, name).cpu() for part in parts]).mean()

    return RoutingStats(
        indices=all_of("indices"),
        weights=all_of("weights"),
        confidence=all_of("confidence"),
        balance=mean_of("balance"),
        entropy=mean_of("entropy"),
        update_norm=all_of("update_norm"),
        input_norm=all_of("input_norm"),
        num_patches=parts[0].num_patches,
    )


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    use_bfloat16 = precision == "bfloat16" or (
        precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported()
    )
    return torch.autocast(device.type, torch.bfloat16, enabled=use_bfloat16)
