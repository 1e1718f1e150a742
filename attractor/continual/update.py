"""Patch-local learning: a step changes the rows of the patches that were taught, and no other byte.

    update = LocalUpdate(model.apn_layers(), UpdateConfig(train=("decoders",)))
    logits, stats = model(tokens, return_stats=True)
    loss.backward()
    update.step({layer: taught_patches(stats[layer]) for layer in stats})

A gradient of zero does not leave a row alone: momentum, weight decay and the optimizer's own count of steps
would still move it. So the rules here read and write the rows of taught patches and nothing else, neither of
the parameters nor of their own state. A step happens for all layers or, if anything goes wrong, for none.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from attractor.config import UpdateConfig
from attractor.layer import APN, PATCH_ROLES, ROLES, RoutingStats, check_roles

EPSILON = 1e-8


class NotFiniteUpdate(RuntimeError):
    """A step would have written a number that is not finite. Nothing was changed."""


def taught_patches(stats: RoutingStats, taught: Tensor | None = None) -> Tensor:
    """The patches that tokens selected (all tokens, or those where `taught` (...) is true), in order."""
    chosen = stats.indices.masked_fill(stats.weights == 0, -1)  # a slot that patch dropout removed
    if taught is not None:
        chosen = chosen[taught]
    patches = chosen.unique()
    return patches[patches >= 0]


def most_specific(patches: Tensor, used_here: Tensor, used_before: Tensor, most: int) -> Tensor:
    """Of `patches`, the `most` with the largest share here over their share before; both are counts (K)."""
    if len(patches) <= most:
        return patches
    here = used_here.double() / used_here.sum().clamp(min=1)
    before = (used_before.double() + 1) / (used_before.sum() + len(used_before))  # none was never seen
    ratio = (here / before)[patches]
    best = ratio.argsort(descending=True, stable=True)[:most]
    return patches[best].sort().values


class LocalUpdate:
    """The optimizer of patch-local learning, for APN layers by name or number."""

    def __init__(self, layers: Mapping[Any, APN], config: UpdateConfig) -> None:
        check_roles(config.train)
        if not layers:
            raise ValueError("there are no APN layers to update")
        self.layers, self.config = dict(layers), config
        for name, layer in self.layers.items():
            if not list(self._trained(layer)):
                raise ValueError(f"layer {name!r} has no parameters with the roles {list(config.train)}")
            if config.max_decoder is not None and layer.decoder is None:
                raise ValueError("max_decoder needs independent decoders; these are shared")
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        if config.rule == "adamw":
            for layer in self.layers.values():
                for name, parameter in self._trained(layer):
                    rows = parameter.shape[0] if ROLES[name] in PATCH_ROLES else 1
                    self.state[parameter] = {
                        "mean": torch.zeros_like(parameter, dtype=torch.float32),
                        "square": torch.zeros_like(parameter, dtype=torch.float32),
                        "steps": torch.zeros(rows, dtype=torch.int64, device=parameter.device),
                    }

    def _trained(self, layer: APN) -> Iterator[tuple[str, Tensor]]:
        return (pair for pair in layer.named_parameters() if ROLES[pair[0]] in self.config.train)

    @torch.no_grad()
    def step(self, taught: Mapping[Any, Tensor]) -> dict[Any, float]:
        """Learn from the gradients: patches by layer. Returns the length of the largest change of a patch.

        Parameters that belong to no single patch (the encoder, say) learn whenever any patch does.
        """
        if unknown := set(taught) - set(self.layers):
            raise ValueError(f"unknown layers {sorted(map(str, unknown))}")
        writes: list[tuple[Tensor, Tensor, Tensor]] = []  # where, which rows, what
        largest = {name: self._plan(self.layers[name], patches, writes) for name, patches in taught.items()}
        for _, _, values in writes:
            if not values.isfinite().all():
                raise NotFiniteUpdate("a gradient or an update is not finite; nothing was changed")
        for target, rows, values in writes:
            target[rows] = values.to(target.dtype)
        return largest

    def _plan(self, layer: APN, patches: Tensor, writes: list[tuple[Tensor, Tensor, Tensor]]) -> float:
        """Append what a step on these patches writes; change nothing."""
        if len(patches) == 0:
            return 0.0
        if patches.min() < 0 or patches.max() >= layer.num_patches:
            raise ValueError(f"patches {patches.tolist()} must lie in 0 to {layer.num_patches - 1}")
        moved: list[tuple[str, Tensor, Tensor, Tensor]] = []
        for name, parameter in self._trained(layer):
            if parameter.grad is None:
                raise ValueError(f"{name} has no gradient; call backward() first")
            by_patch = ROLES[name] in PATCH_ROLES
            rows = patches if by_patch else torch.arange(parameter.shape[0], device=parameter.device)
            change = self._change(name, parameter, rows, by_patch, writes)
            moved.append((name, parameter, rows, change))
        own = [change.flatten(1) for name, _, _, change in moved if ROLES[name] in PATCH_ROLES]
        length = torch.cat(own, 1).norm(dim=1) if own else torch.zeros(len(patches), device=patches.device)
        if self.config.max_change is not None:
            shrink = (self.config.max_change / length.clamp(min=1e-30)).clamp(max=1)
            length = length.clamp(max=self.config.max_change)
        for name, parameter, rows, change in moved:
            if self.config.max_change is not None and ROLES[name] in PATCH_ROLES:
                change = change * shrink.view(-1, *[1] * (change.dim() - 1))
            values = parameter[rows].float() + change
            if name == "decoder" and self.config.max_decoder is not None:
                size = values.flatten(1).norm(dim=1).clamp(min=1e-30)
                values = values * (self.config.max_decoder / size).clamp(max=1)[:, None, None]
            writes.append((parameter, rows, values))
        return float(length.max())

    def _change(
        self, name: str, parameter: Tensor, rows: Tensor, by_patch: bool,
        writes: list[tuple[Tensor, Tensor, Tensor]],
    ) -> Tensor:  # fmt: skip
        config = self.config
        assert parameter.grad is not None
        gradient = parameter.grad[rows].float()
        if config.rule == "sgd":
            change = -config.learning_rate * gradient
        else:
            state = self.state[parameter]
            counted = rows if by_patch else torch.zeros(1, dtype=torch.int64, device=rows.device)
            steps = state["steps"][counted] + 1
            mean = torch.lerp(gradient, state["mean"][rows], config.beta1)
            square = torch.lerp(gradient.square(), state["square"][rows], config.beta2)
            age = steps.view(-1, *[1] * (gradient.dim() - 1))  # each patch has its own
            corrected = mean / (1 - config.beta1**age)
            spread = (square / (1 - config.beta2**age)).sqrt() + EPSILON
            change = -config.learning_rate * corrected / spread
            writes += [(state["mean"], rows, mean), (state["square"], rows, square)]
            writes.append((state["steps"], counted, steps))
        if config.weight_decay and ROLES[name] == "decoders":
            change = change - config.learning_rate * config.weight_decay * parameter[rows].float()
        return change

    def state_dict(self) -> dict[str, Tensor]:
        """Flat, by layer and parameter: fit for safetensors."""
        return {
            f"{number}.{name}.{part}": value
            for number, layer in self.layers.items()
            for name, parameter in self._trained(layer)
            for part, value in self.state.get(parameter, {}).items()
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = self.state_dict()
        wrong = sorted(own.keys() ^ state.keys()) or [
            key for key, value in own.items() if value.shape != state[key].shape
        ]
        if wrong:
            raise ValueError(f"the saved state does not fit, nothing was loaded: {wrong[:4]}")
        for key, value in own.items():
            value.copy_(state[key])
