"""New patches for what no prototype is near: growth, or recycling the least used patch.

A layer asks for one when the mean confidence max_i s_i of its tokens stays below a threshold for a window of
tokens. The new prototype points where the tokens far from all prototypes point on average. The decoder starts
at zero, so the patch adds nothing of its own; but a token that selects it gives it a slot and a share of the
softmax that other patches had. How many tokens do, and how far their updates move, is part of the event.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from attractor import ops
from attractor.continual.config import AllocationConfig
from attractor.continual.update import Undo, write_rows
from attractor.layer import APN
from attractor.lm import mode


class Allocation(NamedTuple):
    """What happened when a patch was allocated, for the log."""

    layer: Any
    patch: int
    mode: str  # "grow" or "replace"
    reason: str  # "novelty" or "idle"
    token: int  # of the stream, when it happened
    confidence: float  # mean over the tokens seen just then
    replaced_usage: float | None  # of the patch that was recycled, as a share of all selections
    selected_by: float  # share of the tokens seen just then that now select the new patch
    weight: float  # the mean weight they give it
    moved: float  # |change of their layer's update| / |update|, over all those tokens, by the insertion


@dataclass(frozen=True)
class Habits:
    """What a layer's router has been doing. Replaced as a whole, never changed in place."""

    usage: Tensor  # (K) moving average of each patch's share of selections
    born: Tensor  # (K) when each patch was allocated, in tokens of the stream
    unfamiliar: int = 0  # tokens since confidence was last high enough
    allocated: int = 0  # when the layer last got a patch


SAMPLE = 1024
"""Tokens that are kept, so that it can be measured what an allocation changed."""


@dataclass(frozen=True, eq=False)
class Outlook:
    """What a layer's router made of some tokens: sums, so that outlooks add up, and the last tokens."""

    tokens: int
    confidence: float  # summed
    far: Tensor  # summed directions of the tokens below the threshold
    busy: Tensor  # and of those whose first choice is the busiest patch
    inputs: Tensor  # (SAMPLE or fewer, d)

    def __add__(self, other: "Outlook") -> "Outlook":
        return Outlook(
            self.tokens + other.tokens,
            self.confidence + other.confidence,
            self.far + other.far,
            self.busy + other.busy,
            torch.cat([self.inputs, other.inputs])[-SAMPLE:],
        )


class Moments(Protocol):
    """What an optimizer remembers of patches."""

    def forget(self, number: Any, patch: int, undo: Undo) -> None: ...
    def follow(self, number: Any, undo: Undo) -> None: ...


class Allocator:
    def __init__(self, layers: Mapping[Any, APN], config: AllocationConfig) -> None:
        self.layers, self.config = dict(layers), config
        self.habits: dict[Any, Habits] = {}
        self.most: dict[Any, int] = {}
        for number, layer in self.layers.items():
            count, device = layer.num_patches, layer.prototypes.device
            self.habits[number] = Habits(
                torch.full((count,), 1 / count, dtype=torch.float64, device=device),
                torch.full((count,), -config.cooldown, dtype=torch.int64, device=device),
                allocated=-config.cooldown,
            )
            self.most[number] = config.most_patches or 2 * count
            if config.mode == "grow" and self.most[number] < count:
                raise ValueError(
                    f"most_patches={config.most_patches} is below the {count} patches of layer {number!r}"
                )

    def with_usage(self, number: Any, counts: Tensor, tokens: int) -> Habits:
        """The layer's habits after `tokens` tokens that selected patches `counts` (K) times."""
        habits = self.habits[number]
        share = 1 - (1 - 1 / self.config.usage_horizon) ** tokens
        now = counts.double() / counts.sum().clamp(min=1)
        return replace(habits, usage=torch.lerp(habits.usage, now, share))

    @torch.no_grad()
    def outlook(self, number: Any, inputs: Tensor, indices: Tensor, confidence: Tensor) -> Outlook:
        """Summarise tokens (n, d) with their active sets (n, k) and confidences (n)."""
        routed = ~confidence.isnan()
        inputs, indices, confidence = inputs[routed], indices[routed], confidence[routed]
        directions = self.layers[number].represent(inputs)
        busiest = self.habits[number].usage.argmax()
        return Outlook(
            len(inputs),
            float(confidence.double().sum()),
            directions[confidence < self.config.novelty].sum(0),
            directions[indices[:, 0] == busiest].sum(0),
            inputs[-SAMPLE:],
        )

    @torch.no_grad()
    def allocate(
        self, number: Any, habits: Habits, seen: Outlook, token: int, update: Moments, undo: Undo
    ) -> tuple[Habits, Allocation | None]:
        """Give the layer a patch if it is time; `undo` takes it back. Returns what its habits become."""
        config, layer = self.config, self.layers[number]
        confidence = seen.confidence / max(1, seen.tokens)
        unfamiliar = habits.unfamiliar + seen.tokens if confidence < config.novelty else 0
        habits = replace(habits, unfamiliar=unfamiliar)
        if config.mode == "off" or token - habits.allocated < config.cooldown:
            return habits, None
        rested = token - habits.born >= config.cooldown
        idlest = int(habits.usage.masked_fill(~rested, torch.inf).argmin())
        if unfamiliar >= config.window:
            reason, direction = "novelty", seen.far
        elif config.min_share is not None and habits.usage[idlest] < config.min_share / layer.num_patches:
            reason, direction = "idle", seen.busy
        else:
            return habits, None
        full = layer.num_patches >= self.most[number] if config.mode == "grow" else not rested.any()
        if full or not direction.isfinite().all() or not direction.any():
            return habits, None

        with mode(layer, training=False):
            before = layer(seen.inputs)
        length = ops.routing_precision(layer.prototypes).norm(dim=1).mean()
        usage, born = habits.usage, habits.born
        if config.mode == "grow":
            patch, replaced_usage = layer.num_patches, None
            grow(layer, undo)
            update.follow(number, undo)
            usage, born = torch.cat([usage, usage[:1]]), torch.cat([born, born[:1]])
        else:
            patch, replaced_usage = idlest, float(usage[idlest])
            reset_patch(layer, patch, undo)
            update.forget(number, patch, undo)
        row = torch.tensor([patch], device=usage.device)
        write_rows(layer.prototypes, row, length * ops.unit(direction[None]), undo)
        others = float((usage.sum() - usage[patch]) / (len(usage) - 1))
        usage = usage.index_fill(0, row, others)  # neither idle nor busy before it had a chance
        habits = Habits(usage / usage.sum(), born.index_fill(0, row, token), 0, token)

        with mode(layer, training=False):
            after, stats = layer(seen.inputs, return_stats=True)
        takes = stats.indices == patch
        selected_by = float(takes.any(-1).double().mean())
        weight = float(stats.weights[takes].mean()) if selected_by else 0.0
        moved = float((after - before).norm() / before.norm().clamp(min=1e-30))
        event = Allocation(
            number, patch, config.mode, reason, token, confidence, replaced_usage, selected_by, weight, moved
        )
        return habits, event


def grow(layer: APN, undo: Undo) -> None:
    """Append a patch with a zero decoder; the old parameters stay as they are, for the undo."""
    old, config = dict(layer.named_parameters(recurse=False)), layer.config

    def take_back() -> None:
        for name, parameter in old.items():
            setattr(layer, name, parameter)
        layer.config = config

    undo.append(take_back)
    layer.resize(layer.num_patches + 1)


def reset_patch(layer: APN, patch: int, undo: Undo) -> None:
    row = torch.tensor([patch], device=layer.prototypes.device)
    parameters = dict(layer.named_parameters(recurse=False))
    for name, values in layer.fresh_patches(1).items():
        write_rows(parameters[name], row, values, undo)
