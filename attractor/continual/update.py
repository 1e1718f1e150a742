"""Patch-local learning: a step changes the rows of the patches that were taught, and no other byte.

    update = LocalUpdate(model.apn_layers(), UpdateConfig(train=("decoders",)))
    logits, stats = model(tokens, return_stats=True)
    loss.backward()
    update.step({layer: taught_patches(stats[layer]) for layer in stats})

A gradient of zero does not leave a row alone: momentum, weight decay and the optimizer's own count of steps
would still move it. So the rules here read and write the rows of taught patches and nothing else, neither of
the parameters nor of their own state. A step happens for all layers or, if anything goes wrong, for none.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attractor import ops
from attractor.continual.config import UpdateConfig
from attractor.continual.delta import Delta, copied, rows_of
from attractor.layer import APN, PATCH_ROLES, ROLES, RoutingStats, check_roles

EPSILON = 1e-8
NO_PATCHES = (
    "this model has no APN layers, so there are no patches that could learn: train one that has "
    "(`attractor train tiny_apn`), give a pretrained one some (`attractor retrofit`), or teach one facts "
    "(`attractor teach smollm2-135m`)"
)
MOMENTS = ("mean", "square", "steps")
"""What AdamW keeps for each parameter, by patch."""
Tensors = list[Tensor] | tuple[Tensor, ...]


class NotFiniteUpdate(RuntimeError):
    """A step would have written a number that is not finite. Nothing was changed."""


Undo = list[Callable[[], object]]
Write = tuple[Tensor, Tensor | None, Tensor]  # where, which rows (None: all of them), what
precise = ops.routing_precision  # float32 at least


class Part(NamedTuple):
    """A parameter that learns in a step, or the rows of it that do (None: all of them)."""

    key: str
    name: str
    parameter: Tensor
    rows: Tensor | None
    by_patch: bool

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self.rows is None else tensor[self.rows]

    def gradient(self) -> Tensor:
        if self.parameter.grad is None:
            raise ValueError(f"{self.key} has no gradient; call backward() first")
        return precise(self.of(self.parameter.grad))


@contextmanager
def all_or_nothing(undo: Undo | None = None) -> Iterator[Undo]:
    """Every change inside appends how to take it back, and an exception takes all of them back.

    With the `undo` of a larger change they become part of it, and are taken back with it.
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
    """Write target[rows] = values, to be taken back byte by byte."""
    undo.append(Overwritten(target, rows, target[rows]))  # indexing by a tensor copies
    target[rows] = values.to(target.dtype)


@torch.no_grad()
def write(writes: Sequence[Write], undo: Undo) -> None:
    """Write everything, to be taken back byte by byte."""
    alike: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}  # torch copies many at once only then
    for target, rows, values in writes:
        if rows is None:
            targets, sources = alike.setdefault((target.device, target.dtype, values.dtype), ([], []))
            targets.append(target)
            sources.append(values)
    for targets, sources in alike.values():
        old = [torch.empty_like(target) for target in targets]
        torch._foreach_copy_(old, targets)
        undo += [
            Overwritten(target, _every_row(len(target), target.device), before)
            for target, before in zip(targets, old, strict=True)
        ]
        torch._foreach_copy_(targets, sources)
    for target, rows, values in writes:
        if rows is not None:
            write_rows(target, rows, values, undo)


def delta_of(before: Mapping[str, Tensor], after: Mapping[str, Tensor], undo: Undo) -> Delta:
    """Return what was changed, by what it overwrote: a row that nothing wrote is not looked at.

    `before` and `after` are the tensors themselves, by name, as they were held before and are held now.
    """
    names = {tensor: name for name, tensor in after.items()}
    whole = {name for name, tensor in after.items() if tensor is not before[name]}  # another one now
    written: dict[str, list[Tensor]] = {}
    for entry in undo:
        if isinstance(entry, Overwritten) and entry.target in names and len(entry.rows):
            written.setdefault(names[entry.target], []).append(entry.rows.cpu())
    numbers = {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in written.items()}
    numbers = {name: torch.from_numpy(np.unique(rows.numpy())) for name, rows in numbers.items()}
    whole |= {name for name, rows in numbers.items() if len(rows) == len(after[name])}
    return Delta(
        {name: rows_of(after[name], rows) for name, rows in sorted(numbers.items()) if name not in whole},
        {name: copied(after[name]) for name in sorted(whole)},
    )


@functools.lru_cache(maxsize=64)
def _every_row(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Ask all tensors at once: each question would wait for the GPU."""
    total = torch.nn.utils.get_total_norm(tensors, 1.0)
    return bool(total.isfinite()) or all(bool(tensor.isfinite().all()) for tensor in tensors)


def taught_patches(stats: RoutingStats, taught: Tensor | None = None) -> Tensor:
    """Return the patches that all tokens selected, or those where `taught` (...) is true, in order."""
    chosen = stats.indices.masked_fill(stats.weights == 0, -1)  # a slot that patch dropout removed
    if taught is not None:
        chosen = chosen[taught]
    patches = chosen.unique()
    return patches[patches >= 0]


def used_patches(
    stats: Mapping[Any, RoutingStats], counted: Tensor, admitted: Tensor
) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
    """Count by layer: which patches admitted tokens selected (K), and how often all counted ones did (K).

    All layers at once: each would be a dozen tiny kernels. Unlike `bincount` it never waits for the GPU.
    """
    sizes = [found.num_patches + 1 for found in stats.values()]  # one more for -1, which is none
    located = zip(stats.values(), itertools.accumulate([1, *sizes[:-1]]), strict=True)
    places = torch.cat([(found.indices + start).flatten() for found, start in located])
    seen = torch.cat([counted[..., None].expand_as(found.indices).flatten() for found in stats.values()])
    # but not what patch dropout removed
    taught = torch.cat([((found.weights != 0) & admitted[..., None]).flatten() for found in stats.values()])

    def tally(slots: Tensor) -> dict[Any, Tensor]:
        named = places.new_zeros(sum(sizes)).scatter_add_(0, places, slots.to(places.dtype))
        return {number: part[1:] for number, part in zip(stats, named.split(sizes), strict=True)}

    return {number: often > 0 for number, often in tally(seen & taught).items()}, tally(seen)


def most_specific(patches: Tensor, used_here: Tensor, used_before: Tensor, most: int) -> Tensor:
    """Choose the `most` patches with the largest share here over their share before; both are counts (K)."""
    if len(patches) <= most:
        return patches
    here = used_here.double() / used_here.sum().clamp(min=1)
    before = (used_before.double() + 1) / (used_before.sum() + len(used_before))  # none was never seen
    ratio = (here / before)[patches]
    best = ratio.argsort(descending=True, stable=True)[:most]
    return patches[best].sort().values


def _length(moved: Sequence[tuple[Part, Tensor]]) -> Tensor:
    """Return how far each patch moves, over all of its parameters."""
    own = [change.flatten(1).norm(dim=1) for part, change in moved if part.by_patch]
    return torch.stack(own).norm(dim=0) if own else torch.zeros(1, device=moved[0][1].device)


def _unbiased(averages: Tensors, decay: float, ages: Tensors) -> list[Tensor]:
    """Correct averages for having begun at zero; each row has its own age."""
    # at once, but not by _foreach_pow: on a GPU it takes the base for a whole number too, and 0.9 becomes 0
    known = 1 - decay ** torch.cat([age.to(ages[0].device) for age in ages])
    return [
        average / share.to(average.device).view(-1, *[1] * (average.dim() - 1))
        for average, share in zip(averages, known.split([len(age) for age in ages]), strict=True)
    ]


def _by_key(parts: Sequence[Part], values: Sequence[Tensor]) -> dict[str, Tensor]:
    return {part.key: value for part, value in zip(parts, values, strict=True)}


def _is_all(patches: Tensor, count: int) -> bool:
    """Return whether these are all patches, in order: then nothing has to be gathered."""
    return len(patches) == count and torch.equal(patches, torch.arange(count, device=patches.device))


def check_flat(layer: APN) -> None:
    """Refuse a layer whose patches share the rows of two codebooks."""
    if layer.config.prototypes == "product":
        raise ValueError(
            'layers with prototypes="product" do not learn patch by patch yet: their patches share the rows '
            'of two codebooks. Train them with the Trainer, or build the layer with prototypes="static"'
        )


class LocalUpdate:
    """The optimizer of patch-local learning, for APN layers by name or number.

    `others` are parameters outside of APN layers that learn as a whole, whenever any patch does.
    """

    def __init__(
        self, layers: Mapping[Any, APN], config: UpdateConfig, others: Mapping[str, Tensor] | None = None
    ) -> None:
        check_roles(config.train)
        if not layers:
            raise ValueError(NO_PATCHES)
        self.layers, self.config, self.others = dict(layers), config, dict(others or {})
        self.learning_rate = config.learning_rate  # a schedule may set it
        self.state: dict[str, Tensor] = {}  # flat, by layer, parameter and part: fit for safetensors
        for number, layer in self.layers.items():
            check_flat(layer)
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
        self,
        taught: Mapping[Any, Tensor],
        *,
        gradient_scale: float = 1.0,
        rate_scale: float = 1.0,
        undo: Undo | None = None,
    ) -> dict[Any, float]:
        """Learn from the gradients: patches by layer. Returns the length of the largest change of a patch.

        Parameters that belong to no single patch (the encoder, say) learn whenever any patch does.
        """
        rate = self.learning_rate * rate_scale
        if unknown := set(taught) - set(self.layers):
            raise ValueError(f"unknown layers {sorted(map(str, unknown))}")
        parts = {number: self._parts(number, patches) for number, patches in taught.items()}
        learning = [part for own in parts.values() for part in own]
        if not learning:
            return dict.fromkeys(taught, 0.0)
        others = [Part(f"other.{name}", name, other, None, False) for name, other in self.others.items()]
        writes: list[Write] = []
        changes = self._changes([*learning, *others], gradient_scale, rate, writes)
        lengths = {
            number: self._place([(part, changes[part.key]) for part in own], rate, writes)
            for number, own in parts.items()
        }
        for part in others:
            change = self.config.others_rate * changes[part.key]
            writes.append((part.parameter, None, precise(part.parameter) + change))
        if not all_finite([values for _, _, values in writes if values.is_floating_point()]):
            raise NotFiniteUpdate("a gradient or an update is not finite; nothing was changed")
        largest = torch.stack([length.to(self._device()) for length in lengths.values()])
        with all_or_nothing(undo) as undo:
            write(writes, undo)
        return dict(zip(lengths, largest.tolist(), strict=True))

    def _parts(self, number: Any, patches: Tensor) -> list[Part]:
        """Return the parts of a layer that learn with these patches."""
        layer = self.layers[number]
        if len(patches) == 0:
            return []
        if patches.min() < 0 or patches.max() >= layer.num_patches:
            raise ValueError(f"patches {patches.tolist()} must lie in 0 to {layer.num_patches - 1}")
        rows = None if _is_all(patches, layer.num_patches) else patches.to(layer.encoder.device)
        found = []
        for name, parameter in self.trained(number):
            by_patch = ROLES[name] in PATCH_ROLES
            found.append(Part(f"{number}.{name}", name, parameter, rows if by_patch else None, by_patch))
        return found

    def _changes(
        self, parts: Sequence[Part], gradient_scale: float, rate: float, writes: list[Write]
    ) -> dict[str, Tensor]:
        """Return how each part moves by the rule; what its moments become is appended to `writes`.

        Many tensors at a time, where torch can: a step is otherwise thousands of tiny kernels.
        """
        config = self.config
        gradients = self._gradients(parts, gradient_scale)
        if config.rule == "sgd":
            return _by_key(parts, torch._foreach_mul(gradients, -rate))
        old = [[part.of(self.state[f"{part.key}.{name}"]) for part in parts] for name in MOMENTS]
        means = torch._foreach_lerp(gradients, old[0], config.beta1)
        squares = torch._foreach_lerp(torch._foreach_mul(gradients, gradients), old[1], config.beta2)
        steps = torch._foreach_add(old[2], 1)
        for name, new in zip(MOMENTS, (means, squares, steps), strict=True):
            writes += [
                (self.state[f"{part.key}.{name}"], part.rows, values)
                for part, values in zip(parts, new, strict=True)
            ]
        spread = torch._foreach_sqrt(_unbiased(squares, config.beta2, steps))
        torch._foreach_add_(spread, EPSILON)
        changes = _unbiased(torch._foreach_mul(means, -rate), config.beta1, steps)
        torch._foreach_div_(changes, spread)
        return _by_key(parts, changes)

    def _gradients(self, parts: Sequence[Part], scale: float) -> Tensors:
        """Return the gradients times `scale`, and all together no longer than `clip_norm`."""
        found = [part.gradient() for part in parts]
        if self.config.clip_norm is None:
            return torch._foreach_mul(found, scale)
        norm = (scale * torch.nn.utils.get_total_norm(found)).clamp(min=1e-30)
        return torch._foreach_mul(found, scale * (self.config.clip_norm / norm).clamp(max=1))

    def _place(self, moved: list[tuple[Part, Tensor]], rate: float, writes: list[Write]) -> Tensor:
        """Append where the parameters of one layer go, within the caps; returns the largest change."""
        config = self.config
        if not moved:
            return torch.zeros((), device=self._device())
        if config.weight_decay:
            decay = rate * config.weight_decay
            moved = [
                (part, change - decay * precise(part.of(part.parameter)))
                if ROLES[part.name] == "decoders"
                else (part, change)
                for part, change in moved
            ]
        if config.max_change is not None:
            shrink = (config.max_change / _length(moved).clamp(min=1e-30)).clamp(max=1)
            moved = [
                (part, change * shrink.view(-1, *[1] * (change.dim() - 1)) if part.by_patch else change)
                for part, change in moved
            ]
        for place, (part, change) in enumerate(moved):
            before = precise(part.of(part.parameter))
            values = before + change
            if part.name == "decoder" and config.max_decoder is not None:
                size = values.flatten(1).norm(dim=1).clamp(min=1e-30)
                values = values * (config.max_decoder / size).clamp(max=1)[:, None, None]
                moved[place] = (part, values - before)
            writes.append((part.parameter, part.rows, values))
        return _length(moved).max()

    def _device(self) -> torch.device:
        return next(iter(self.layers.values())).encoder.device

    @torch.no_grad()
    def forget(self, number: Any, patch: int, undo: Undo) -> None:
        """Make the patch a new one: it has no moments and has made no steps."""
        for name, parameter in self.trained(number):
            if ROLES[name] in PATCH_ROLES and self.config.rule == "adamw":
                row = torch.tensor([patch], device=parameter.device)
                for part in MOMENTS:
                    state = self.state[f"{number}.{name}.{part}"]
                    write_rows(state, row, torch.zeros_like(state[row]), undo)

    @torch.no_grad()
    def follow(self, number: Any, undo: Undo) -> None:
        """Follow a layer that was resized: patches that stayed keep their state, and new ones have none."""
        old, resized = self.state, dict(self.state)
        undo.append(lambda: setattr(self, "state", old))
        for name, parameter in self.trained(number):
            if ROLES[name] in PATCH_ROLES and self.config.rule == "adamw":
                for part in MOMENTS:
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
