"""A live source as flat tensors and JSON, what a lesson changed of it, and copies of it that readers keep.

tensors = tensors_of(held)                          # name -> the live tensor: weights, moments, usage
with held.learner.attempt() as undo:
    before = tensors_of(held)
    held.learner.observe(text)
    change = change_of(before, tensors_of(held), undo)
change.tensors()                                    # what a journal keeps of the lesson
"""

import copy
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attractor.continual import state as states
from attractor.continual.guarded import Source
from attractor.continual.update import Overwritten, Undo
from attractor.layer import PATCH_ROLES, ROLES
from attractor.lm import TrainableModel

WEIGHTS = "weights/"
MOST_BEHIND = 64
MOST_FRAMES = 16
"""Copies of a source that readers may hold: each is as large as its banks."""


def tensors_of(held: Source) -> dict[str, Tensor]:
    """Everything that makes this source what it is, by name; the tensors themselves, not copies."""
    tensors: dict[str, Tensor] = {f"{WEIGHTS}{name}": p for name, p in held.branch.parameters().items()}
    return tensors | {f"state/{name}": value for name, value in states.tensors_of(held.learner).items()}


def fields_of(held: Source) -> dict[str, Any]:
    """The rest of it: counters, as JSON."""
    return {**states.counters_of(held.learner), "lessons": held.version}


@torch.no_grad()
def fill(held: Source, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> None:
    """Make a new source what these tell."""
    patches = {number: len(tensors[f"state/usage.{number}"]) for number in held.learner.layers}
    for number, layer in held.learner.layers.items():
        if layer.num_patches != patches[number]:
            raise ValueError(
                f"layer {number} has {layer.num_patches} patches, and {patches[number]} were kept"
            )
    for name, parameter in held.branch.parameters().items():
        parameter.copy_(tensors[f"{WEIGHTS}{name}"])
    own = {n.removeprefix("state/"): v for n, v in tensors.items() if n.startswith("state/")}
    if fields:
        state = {**fields, "history": [], "notes": {}, "source": None}
        states.restore(held.learner, state, {name: value.clone() for name, value in own.items()})
        held.version = fields["lessons"]


@dataclass
class Change:
    """Rows and whole tensors of a source that differ from what they were."""

    rows: dict[str, Tensor] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    live: Mapping[str, Tensor] = field(default_factory=dict)

    def patches(self, prefix: str) -> list[int]:
        """Rows of the tensors whose names begin so, and of no patch's moments."""
        found = {int(row) for name, rows in self.rows.items() if name.startswith(prefix) for row in rows}
        for name in self.whole:
            if name.startswith(prefix) and ROLES[name.removeprefix(prefix)] in PATCH_ROLES:
                found |= set(range(len(self.live[name])))
        return sorted(found)

    def tensors(self) -> dict[str, Tensor]:
        """As a journal keeps them: with the numbers that are there now."""
        told = {f"whole/{name}": self.live[name].detach() for name in sorted(self.whole)}
        for name, rows in sorted(self.rows.items()):
            told |= {f"rows/{name}": rows, f"values/{name}": self.live[name].detach()[rows]}
        return told


def change_of(before: Mapping[str, Tensor], live: Mapping[str, Tensor], undo: Undo) -> Change:
    """What an attempt changed, by what it overwrote: a row that nobody wrote is not looked at."""
    names = {id(tensor): name for name, tensor in [*before.items(), *live.items()]}
    change = Change(live=live)
    change.whole = {name for name, tensor in live.items() if tensor is not before[name]}
    found: dict[str, list[Tensor]] = {}
    for entry in undo:
        if isinstance(entry, Overwritten):
            found.setdefault(names[id(entry.target)], []).append(entry.rows)
    for name, parts in found.items():
        rows = parts[0].cpu() if len(parts) == 1 else torch.cat([part.cpu() for part in parts]).unique()
        if name in change.whole or len(rows) == len(live[name]):
            change.whole.add(name)
        else:
            change.rows[name] = rows
    return change


class Frame:
    """A copy of a source's path for readers, which is not written while a publication uses it."""

    def __init__(self, held: Source) -> None:
        shared = {id(p): nn.Parameter(p.data, requires_grad=False) for p in held.branch.model.parameters()}
        own = held.branch.parameters()
        for parameter in own.values():
            shared[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
        self.model: TrainableModel = copy.deepcopy(held.branch.model, dict(shared)).eval()
        self.own: dict[str, Tensor] = {name: shared[id(p)].data for name, p in own.items()}
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.behind: list[Change] = []  # what happened to the source since it was copied

    def missed(self, change: Change) -> None:
        self.behind.append(change)
        if len(self.behind) > MOST_BEHIND:  # somebody reads it for long: then all of it is copied
            self.behind = [Change(whole={WEIGHTS + name for name in self.own})]

    @torch.no_grad()
    def catch_up(self, held: Source) -> None:
        live = held.branch.parameters()
        for name, mine in self.own.items():
            parts = [change.rows[WEIGHTS + name] for change in self.behind if WEIGHTS + name in change.rows]
            if any(WEIGHTS + name in change.whole for change in self.behind):
                mine.copy_(live[name])
            elif parts:
                rows = torch.cat(parts).unique().to(mine.device)
                mine[rows] = live[name][rows]
        self.behind = []


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

    def after(self, change: Change) -> Frame:
        """A frame of the source as it is now; no frame that somebody reads is written."""
        for frame in self.all:
            frame.missed(change)
        idle = [frame for frame in self.all if not frame.users and frame is not self.newest]
        if idle:
            idle[0].catch_up(self.held)
            self.newest = idle[0]
            self.all = [f for f in self.all if f.users or f is self.newest or f is idle[-1]]
        else:
            self.newest = Frame(self.held)
            self.all.append(self.newest)
        return self.newest


def reading_copy(base: TrainableModel) -> TrainableModel:
    """The same weights in modules of their own: a thread that reads shares no switch with one that learns."""
    return copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()}).eval()


@dataclass
class Touched:
    """What of a source's weights was ever written, as a whole or by rows: what it costs to keep it."""

    rows: dict[str, set[int]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, held: Source) -> "Touched":
        overlay = held.branch.overlay()
        rows = {name: set(numbers.tolist()) for name, (numbers, _) in overlay.rows.items()}
        return cls(rows, {*overlay.whole, *overlay.factors})

    def add(self, change: Change) -> None:
        self.whole |= {name.removeprefix(WEIGHTS) for name in change.whole if name.startswith(WEIGHTS)}
        for name, rows in change.rows.items():
            if name.startswith(WEIGHTS):
                self.rows.setdefault(name.removeprefix(WEIGHTS), set()).update(rows.tolist())

    def figures(self, held: Source) -> dict[str, Any]:
        """Bytes, and how many patches of each layer."""
        size, patches = 0, {}
        own = held.branch.parameters()
        for number, layer in held.learner.layers.items():
            found: set[int] = set()
            for name, _ in layer.named_parameters():
                key = f"blocks.{number}.ffn.{name}"
                if ROLES[name] in PATCH_ROLES:
                    found |= set(range(len(own[key]))) if key in self.whole else self.rows.get(key, set())
            patches[str(number)] = len(found)
        for name, parameter in own.items():
            if name in self.whole:
                size += parameter.nbytes
            elif name in self.rows:
                size += len(self.rows[name]) * parameter[0].nbytes
        return {"bytes": size, "patches": patches}
