"""Patch-local learning: a step changes the rows of the patches that were taught, and no other byte.

    update = LocalUpdate(model.apn_layers(), UpdateConfig(train=("decoders",)))
    logits, stats = model(tokens, return_stats=True)
    loss.backward()
    update.step({layer: taught_patches(stats[layer]) for layer in stats})

A gradient of zero does not leave a row alone: momentum, weight decay and the optimizer's own count of steps
would still move it. So the rules here read and write the rows of taught patches and nothing else, neither of
the parameters nor of their own state. A step happens for all layers or, if anything goes wrong, for none.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor import ops
from attractor.continual.config import UpdateConfig
from attractor.layer import APN, PATCH_ROLES, ROLES, RoutingStats, check_roles

EPSILON = 1e-8


class NotFiniteUpdate(RuntimeError):
    """A step would have written a number that is not finite. Nothing was changed."""


Undo = list[Callable[[], object]]
Write = tuple[Tensor, Tensor, Tensor]  # where, which rows, what
Move = tuple[str, Tensor, Tensor, Tensor]  # name, parameter, which rows, how they change
precise = ops.routing_precision  # float32 at least


@contextmanager
def all_or_nothing(undo: Undo | None = None) -> Iterator[Undo]:
    """Whatever is changed inside appends how to take it back; an exception takes everything back.

    With an `undo` of somebody else the changes become part of theirs, who also takes them back.
    """
    if undo is not None:
        yield undo
        return
    undo = []
    random = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield undo
    except BaseException:
        for take_back in reversed(undo):
            take_back()
        torch.set_rng_state(random[0])
        if random[1]:
            torch.cuda.set_rng_state_all(random[1])
        raise


@dataclass(frozen=True, eq=False)
class Overwritten:
    """Rows of a tensor as they were; calling it puts them back."""

    target: Tensor
    rows: Tensor
    old: Tensor

    @torch.no_grad()
    def __call__(self) -> None:
        self.target.data.index_copy_(0, self.rows, self.old)


@torch.no_grad()
def write_rows(target: Tensor, rows: Tensor, values: Tensor, undo: Undo) -> None:
    """target[rows] = values, to be taken back byte by byte."""
    undo.append(Overwritten(target, rows, target[rows]))  # indexing by a tensor copies
    target[rows] = values.to(target.dtype)


def taught_patches(stats: RoutingStats, taught: Tensor | None = None) -> Tensor:
    """The patches that tokens selected (all tokens, or those where `taught` (...) is true), in order."""
    chosen = stats.indices.masked_fill(stats.weights == 0, -1)  # a slot that patch dropout removed
    if taught is not None:
        chosen = chosen[taught]
    patches = chosen.unique()
    return patches[patches >= 0]


def used_patches(
    stats: Mapping[Any, RoutingStats], counted: Tensor, admitted: Tensor
) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
    """For each layer: which patches admitted tokens selected (K), and how often all counted ones each (K)."""
    chosen, counts = {}, {}
    for number, found in stats.items():
        slots = found.indices.masked_fill(~counted[..., None], -1)
        counts[number] = _tally(slots, found.num_patches)
        idle = (found.weights == 0) | ~admitted[..., None]  # also what patch dropout removed
        chosen[number] = _tally(slots.masked_fill(idle, -1), found.num_patches) > 0
    return chosen, counts


def _tally(patches: Tensor, count: int) -> Tensor:
    """(count) how often each patch is named; -1 is none. Unlike `bincount` it never waits for the GPU."""
    places = patches.flatten() + 1
    return places.new_zeros(count + 1).scatter_add_(0, places, torch.ones_like(places))[1:]


def most_specific(patches: Tensor, used_here: Tensor, used_before: Tensor, most: int) -> Tensor:
    """Of `patches`, the `most` with the largest share here over their share before; both are counts (K)."""
    if len(patches) <= most:
        return patches
    here = used_here.double() / used_here.sum().clamp(min=1)
    before = (used_before.double() + 1) / (used_before.sum() + len(used_before))  # none was never seen
    ratio = (here / before)[patches]
    best = ratio.argsort(descending=True, stable=True)[:most]
    return patches[best].sort().values


def _length(moved: list[Move]) -> Tensor:
    """(patches) how far each moves, over all of its parameters."""
    own = [change.flatten(1).norm(dim=1) for name, _, _, change in moved if ROLES[name] in PATCH_ROLES]
    return torch.stack(own).norm(dim=0) if own else torch.zeros(1, device=moved[0][3].device)


class LocalUpdate:
    """The optimizer of patch-local learning, for APN layers by name or number.

    `others` are parameters outside of APN layers that learn as a whole, whenever any patch does.
    """

    def __init__(
        self, layers: Mapping[Any, APN], config: UpdateConfig, others: Mapping[str, Tensor] | None = None
    ) -> None:
        check_roles(config.train)
        if not layers:
            raise ValueError("there are no APN layers to update")
        self.layers, self.config, self.others = dict(layers), config, dict(others or {})
        self.learning_rate = config.learning_rate  # for whoever has a schedule
        self.state: dict[str, Tensor] = {}  # flat, by layer, parameter and part: fit for safetensors
        for number, layer in self.layers.items():
            if not list(self.trained(number)):
                raise ValueError(f"layer {number!r} has no parameters with the roles {list(config.train)}")
            if config.max_decoder is not None and layer.decoder is None:
                raise ValueError("max_decoder needs independent decoders; these are shared")
        if config.max_change is not None and not set(config.train) & set(PATCH_ROLES):
            raise ValueError(
                f"max_change caps the change of a patch, and train={config.train} has no patches"
            )
        for key, name, parameter in self.parameters() if config.rule == "adamw" else ():
            rows = parameter.shape[0] if ROLES.get(name) in PATCH_ROLES else 1
            self.state |= {
                f"{key}.mean": torch.zeros_like(precise(parameter)),
                f"{key}.square": torch.zeros_like(precise(parameter)),
                f"{key}.steps": torch.zeros(rows, dtype=torch.int64, device=parameter.device),
            }

    def trained(self, number: Any) -> Iterator[tuple[str, Tensor]]:
        """Names and parameters of a layer that learn."""
        named = self.layers[number].named_parameters()
        return (pair for pair in named if ROLES[pair[0]] in self.config.train)

    def parameters(self) -> Iterator[tuple[str, str, Tensor]]:
        """Everything that learns: a key of its own, its name in its layer, the parameter."""
        for number in self.layers:
            for name, parameter in self.trained(number):
                yield f"{number}.{name}", name, parameter
        for name, parameter in self.others.items():
            yield f"other.{name}", name, parameter

    @torch.no_grad()
    def step(
        self, taught: Mapping[Any, Tensor], *, gradient_scale: float = 1.0, undo: Undo | None = None
    ) -> dict[Any, float]:
        """Learn from the gradients: patches by layer. Returns the length of the largest change of a patch.

        Parameters that belong to no single patch (the encoder, say) learn whenever any patch does.
        """
        if unknown := set(taught) - set(self.layers):
            raise ValueError(f"unknown layers {sorted(map(str, unknown))}")
        writes: list[Write] = []
        if self.config.clip_norm is not None:
            norm = (gradient_scale * self._gradient_norm(taught)).clamp(min=1e-30)
            scale: float | Tensor = gradient_scale * (self.config.clip_norm / norm).clamp(max=1)
        else:
            scale = gradient_scale
        lengths = {number: self._plan(number, taught[number], scale, writes) for number in taught}
        if any(len(patches) for patches in taught.values()):
            for name, parameter in self.others.items():
                self._plan_whole(f"other.{name}", parameter, scale, writes)
        if writes and not torch.stack([values.isfinite().all() for _, _, values in writes]).all():
            raise NotFiniteUpdate("a gradient or an update is not finite; nothing was changed")
        with all_or_nothing(undo) as undo:
            for target, rows, values in writes:
                write_rows(target, rows, values, undo)
        found = torch.stack(list(lengths.values())).tolist() if lengths else []  # one wait for the GPU
        return dict(zip(lengths, found, strict=True))

    def _gradient_norm(self, taught: Mapping[Any, Tensor]) -> Tensor:
        """Of what a step on these patches reads."""
        found = []
        for number, patches in taught.items():
            for name, parameter in self.trained(number) if len(patches) else ():
                if parameter.grad is not None:
                    read = patches.to(parameter.device) if ROLES[name] in PATCH_ROLES else slice(None)
                    found.append(precise(parameter.grad[read]))
        found += [precise(other.grad) for other in self.others.values() if found and other.grad is not None]
        return torch.nn.utils.get_total_norm(found)

    def _plan(self, number: Any, patches: Tensor, scale: float | Tensor, writes: list[Write]) -> Tensor:
        """Append what a step on these patches writes; change nothing."""
        layer, config = self.layers[number], self.config
        if len(patches) == 0:
            return torch.zeros((), device=layer.prototypes.device)
        if patches.min() < 0 or patches.max() >= layer.num_patches:
            raise ValueError(f"patches {patches.tolist()} must lie in 0 to {layer.num_patches - 1}")
        patches = patches.to(layer.prototypes.device)
        moved: list[Move] = []
        for name, parameter in self.trained(number):
            if parameter.grad is None:
                raise ValueError(f"{name} has no gradient; call backward() first")
            by_patch = ROLES[name] in PATCH_ROLES
            rows = patches if by_patch else torch.arange(parameter.shape[0], device=parameter.device)
            gradient = precise(parameter.grad[rows]) * scale
            change = self._change(f"{number}.{name}", gradient, rows, by_patch, writes)
            if config.weight_decay and ROLES[name] == "decoders":
                change = change - self.learning_rate * config.weight_decay * precise(parameter[rows])
            moved.append((name, parameter, rows, change))
        if config.max_change is not None:
            shrink = (config.max_change / _length(moved).clamp(min=1e-30)).clamp(max=1)
            moved = [
                (name, parameter, rows, change * shrink.view(-1, *[1] * (change.dim() - 1)))
                if ROLES[name] in PATCH_ROLES
                else (name, parameter, rows, change)
                for name, parameter, rows, change in moved
            ]
        for place, (name, parameter, rows, change) in enumerate(moved):
            values = precise(parameter[rows]) + change
            if name == "decoder" and config.max_decoder is not None:
                size = values.flatten(1).norm(dim=1).clamp(min=1e-30)
                values = values * (config.max_decoder / size).clamp(max=1)[:, None, None]
                moved[place] = (name, parameter, rows, values - precise(parameter[rows]))
            writes.append((parameter, rows, values))
        return _length(moved).max()

    def _plan_whole(self, key: str, parameter: Tensor, scale: float | Tensor, writes: list[Write]) -> None:
        if parameter.grad is None:
            raise ValueError(f"{key} has no gradient; call backward() first")
        rows = torch.arange(parameter.shape[0], device=parameter.device)
        change = self._change(key, precise(parameter.grad) * scale, rows, False, writes)
        writes.append((parameter, rows, precise(parameter) + self.config.others_rate * change))

    def _change(
        self, key: str, gradient: Tensor, rows: Tensor, by_patch: bool, writes: list[Write]
    ) -> Tensor:
        config = self.config
        if config.rule == "sgd":
            return -self.learning_rate * gradient
        means, squares, counts = (self.state[f"{key}.{part}"] for part in ("mean", "square", "steps"))
        counted = rows if by_patch else torch.zeros(1, dtype=torch.int64, device=rows.device)
        steps = counts[counted] + 1
        mean = torch.lerp(gradient, means[rows], config.beta1)
        square = torch.lerp(gradient.square(), squares[rows], config.beta2)
        writes += [(means, rows, mean), (squares, rows, square), (counts, counted, steps)]
        age = steps.view(-1, *[1] * (gradient.dim() - 1))  # each patch has its own
        spread = (square / (1 - config.beta2**age)).sqrt() + EPSILON
        return -self.learning_rate * mean / (1 - config.beta1**age) / spread

    @torch.no_grad()
    def forget(self, number: Any, patch: int, undo: Undo) -> None:
        """The patch is a new one now: it has no moments and has made no steps."""
        for name, parameter in self.trained(number):
            if ROLES[name] in PATCH_ROLES and self.config.rule == "adamw":
                row = torch.tensor([patch], device=parameter.device)
                for part in ("mean", "square", "steps"):
                    state = self.state[f"{number}.{name}.{part}"]
                    write_rows(state, row, torch.zeros_like(state[row]), undo)

    @torch.no_grad()
    def follow(self, number: Any, undo: Undo) -> None:
        """The layer was resized: keep the state of the patches that stayed, and none for new ones."""
        old, resized = self.state, dict(self.state)
        undo.append(lambda: setattr(self, "state", old))
        for name, parameter in self.trained(number):
            if ROLES[name] in PATCH_ROLES and self.config.rule == "adamw":
                for part in ("mean", "square", "steps"):
                    state = old[f"{number}.{name}.{part}"]
                    kept = min(len(state), len(parameter))
                    new = state.new_zeros(len(parameter), *state.shape[1:])
                    new[:kept] = state[:kept]
                    resized[f"{number}.{name}.{part}"] = new
        self.state = resized

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.state)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        wrong = sorted(self.state.keys() ^ state.keys()) or [
            key for key, value in self.state.items() if value.shape != state[key].shape
        ]
        if wrong:
            raise ValueError(f"the saved state does not fit, nothing was loaded: {wrong[:4]}")
        for key, value in self.state.items():
            value.copy_(state[key])
