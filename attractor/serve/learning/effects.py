"""A live source as named tensors and JSON, and copies of it that readers keep.

with held.learner.attempt() as undo:
    before = tensors_of(held)                       # name -> the live tensor: weights, moments, usage
    held.learner.observe(text)
    delta = delta_of(before, tensors_of(held), undo)
frames.after(delta)                                 # readers get a copy that has this delta too
"""

import copy
import weakref
from typing import Any

from torch import Tensor, nn

from attractor.continual import state as states
from attractor.continual.delta import Delta
from attractor.continual.guarded import Source
from attractor.layer import PATCH_ROLES, ROLES
from attractor.lm import TrainableModel

WEIGHTS = "weights/"
MOST_FRAMES = 16
"""Copies of a source that readers may hold: each is as large as its banks."""


def tensors_of(held: Source) -> dict[str, Tensor]:
    """Everything that makes this source what it is, by name; the tensors themselves, not copies."""
    tensors: dict[str, Tensor] = {f"{WEIGHTS}{name}": p for name, p in held.branch.parameters().items()}
    return tensors | {f"state/{name}": value for name, value in states.tensors_of(held.learner).items()}


def fields_of(held: Source) -> dict[str, Any]:
    """The rest of it: counters, as JSON."""
    return {**states.counters_of(held.learner), "lessons": held.version}


def fill(held: Source, delta: Delta, fields: dict[str, Any]) -> None:
    """Make a new source what was kept of it."""
    tensors = tensors_of(held)
    now = dict(tensors)
    delta.apply(now)
    if wrong := [name for name, tensor in tensors.items() if now[name] is not tensor]:
        raise ValueError(
            f"{wrong[0]} was kept as {tuple(now[wrong[0]].shape)} and is {tuple(tensors[wrong[0]].shape)}"
        )
    own = {name.removeprefix("state/"): x for name, x in tensors.items() if name.startswith("state/")}
    states.restore(held.learner, {**fields, "history": [], "notes": {}, "source": None}, own)
    held.version = fields["lessons"]


def patches_of(weights: Delta, layer: int) -> list[int]:
    """The patches of a layer that a delta of weights changes in anything."""
    found: set[int] = set()
    part = weights.under(f"blocks.{layer}.ffn.")
    for name, (numbers, _) in part.rows.items():
        found |= set(numbers.tolist()) if ROLES[name] in PATCH_ROLES else set()
    for name, value in part.whole.items():
        found |= set(range(len(value))) if ROLES[name] in PATCH_ROLES else set()
    return sorted(found)


class Frame:
    """A copy of a source's path for readers, which is not written while a publication uses it."""

    def __init__(self, held: Source) -> None:
        shared = {id(p): nn.Parameter(p.data, requires_grad=False) for p in held.branch.model.parameters()}
        own = held.branch.parameters()
        for parameter in own.values():
            shared[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
        # a deep copy takes what its memo holds
        self.model: TrainableModel = copy.deepcopy(held.branch.model, dict(shared)).eval()
        self.own: dict[str, Tensor] = {name: shared[id(p)].data for name, p in own.items()}
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.behind = Delta()  # what happened to the source since it was copied

    def catch_up(self) -> None:
        self.behind.apply(self.own)
        self.behind = Delta()


class Frames:
    """The copies of one source: the newest is what readers get, others are brought up to date in turn."""

    def __init__(self, held: Source) -> None:
        self.held = held
        self.all = [Frame(held)]
        self.newest = self.all[0]

    @property
    def crowded(self) -> bool:
        """So many versions are being read that one more would be a copy too many."""
        return sum(bool(frame.users) for frame in self.all) >= MOST_FRAMES

    def after(self, weights: Delta) -> Frame:
        """A frame of the source as it is now; no frame that somebody reads is written."""
        for frame in self.all:
            frame.behind = frame.behind.merge(weights)
        idle = [frame for frame in self.all if not frame.users and frame is not self.newest]
        if idle:
            idle[0].catch_up()
            self.newest = idle[0]
            self.all = [f for f in self.all if f.users or f is self.newest or f is idle[-1]]
        else:
            self.newest = Frame(self.held)
            self.all.append(self.newest)
        return self.newest


def reading_copy(base: TrainableModel) -> TrainableModel:
    """The same weights in modules of their own: a thread that reads shares no switch with one that learns."""
    return copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()}).eval()
