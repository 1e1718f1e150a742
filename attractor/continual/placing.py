"""Where the basins of new lessons lie: around their subjects as they were read, and around nothing else.

    placed = place(keys, taken, nearest, replaces, config)
    placed.prototypes, placed.radius, placed.lesson

A subject looks different in every context, and subjects that share their last word look alike. Where
strangers are known, somebody else of that name in the same contexts, a lesson begins with one prototype that
turns from them to the subject, otherwise with a few that are spread out. It gets another one wherever a
context of its own would be taken for another lesson's, as in the condensed nearest neighbour rule (Hart,
1968). Its radii leave alone what background text and earlier lessons have.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attractor import ops
from attractor.continual.config import LessonConfig

CLOSE = 1e-3
"""A context counts as recognised if its own basin is deeper than every other by this much. So much deeper are
basins that take the place of others."""


@dataclasses.dataclass(frozen=True)
class Taken:
    """The basins of earlier lessons, and contexts of their subjects that must stay theirs."""

    prototypes: Tensor  # (p, m) unit vectors
    radius: Tensor  # (p)
    owner: Tensor  # (p) the number of the lesson
    keys: Tensor  # (n, m) contexts
    depth: Tensor  # (n) by how much the nearest own prototype exceeds its radius there
    key_owner: Tensor  # (n)


@dataclasses.dataclass(frozen=True)
class Placed:
    """New basins; `lesson` is the place in the batch of the lesson that each belongs to."""

    prototypes: Tensor  # (p, m)
    radius: Tensor  # (p)
    lesson: list[int]

    def depth(self, keys: Tensor, lesson: int) -> Tensor:
        """How deep each of these contexts (n, m) lies in the basins of a lesson; negative outside."""
        own = torch.tensor(self.lesson, device=keys.device) == lesson
        return (keys @ self.prototypes[own].T - self.radius[own]).amax(1)


@torch.no_grad()
def place(
    keys: Sequence[Tensor],
    taken: Taken,
    nearest: Callable[[Tensor], Tensor],
    replaces: Sequence[int | None],
    config: LessonConfig,
    strangers: Sequence[Tensor] | None = None,
) -> Placed:
    """Basins for lessons whose subjects gave these directions, (n, m) each, in the contexts that were read.

    `nearest` says how close background comes to a direction. A lesson may take the place of an earlier one:
    then its basins are deeper than that one's everywhere, which need no protection from it. `strangers` are
    directions (n, m) of what resembles each subject and is not meant, if there are any.
    """
    every = torch.cat(list(keys))
    device = every.device
    whose = torch.tensor([number for number, own in enumerate(keys) for _ in own], device=device)
    first = torch.cat([whose.new_zeros(1), torch.bincount(whose).cumsum(0)]).tolist()
    strange = [own[:0] for own in keys] if strangers is None else strangers
    away = torch.stack([config.contrast * own.sum(0) / max(1, len(own)) for own in strange])
    directions = ops.unit(every - away[whose])  # what a prototype at each context would be
    replaced = torch.tensor([-1 if number is None else number for number in replaces], device=device)
    points = torch.cat([taken.prototypes, taken.keys])  # what must stay with earlier lessons, and how deep
    depth = torch.cat([1 - taken.radius, taken.depth.clamp(min=0)])
    point_owner = torch.cat([taken.owner, taken.key_owner])

    def radii(prototypes: Tensor, owner: Tensor, least: Tensor) -> Tensor:
        radius = torch.maximum(nearest(prototypes) + config.room, least)
        if len(points):
            others = prototypes @ points.T - depth  # shallower there than the basins of its own lesson
            others = others.masked_fill(point_owner == replaced[owner][:, None], -1)
            radius = torch.maximum(radius, others.amax(1) + config.room)
        return radius.clamp(max=1 - config.room)

    def least(place: int) -> float:
        """The least radius of a prototype at a context: no stranger is inside if that can be, and it is."""
        seen, prototype = strange[int(whose[place])], directions[place]
        if not len(seen):
            return config.radius
        own, other = float(every[place] @ prototype), float((seen @ prototype).max())
        return min(other, own - 2 * config.room) + config.room

    chosen: list[int] = []  # contexts with a prototype of their own
    begun = []
    for number, (own, seen) in enumerate(zip(keys, strange, strict=True)):
        if len(seen):
            begun.append((number, *between(own, seen, away[number], config.edge)))
            continue
        for place in spread_out(own, config.prototypes, config.cover):
            chosen.append(first[number] + place)
            begun.append((number, own[place], config.radius))
    owner = torch.tensor([number for number, _, _ in begun], device=device)
    prototypes = torch.stack([prototype for _, prototype, _ in begun])
    radius = radii(prototypes, owner, torch.tensor([edge for _, _, edge in begun], device=device))
    while True:
        inside = every @ prototypes.T - radius
        is_own = owner == whose[:, None]
        own = inside.masked_fill(~is_own, -2).amax(1)
        other = inside.masked_fill(is_own, -2).amax(1)
        if len(taken.radius):
            theirs = every @ taken.prototypes.T - taken.radius
            theirs = theirs.masked_fill(taken.owner == replaced[whose][:, None], -2)
            other = torch.maximum(other, theirs.amax(1))
        ahead = own - other.clamp(min=0)
        ahead[chosen] = torch.inf  # a prototype of its own is all that can be done for a context
        counts, margins = torch.bincount(owner, minlength=len(keys)).tolist(), ahead.tolist()
        more = []
        for number, count in enumerate(counts):
            worst = min(range(first[number], first[number + 1]), key=margins.__getitem__)
            if count < config.most and margins[worst] <= CLOSE:
                more.append(worst)
        if not more:
            return deeper(Placed(prototypes, radius, owner.tolist()), taken, replaces)
        edges = torch.tensor([least(place) for place in more], device=device)
        radius = torch.cat([radius, radii(directions[more], whose[more], edges)])
        prototypes = torch.cat([prototypes, directions[more]])
        owner = torch.cat([owner, whose[more]])
        chosen += more


def between(own: Tensor, strangers: Tensor, away: Tensor, edge: float) -> tuple[Tensor, float]:
    """A prototype that turns from strangers to a subject's own contexts, and an edge between the two."""
    prototype = ops.unit(own.mean(0, keepdim=True) - away)[0]
    inner, outer = float((own @ prototype).mean()), float((strangers @ prototype).mean())
    return prototype, outer + edge * (inner - outer)


def deeper(placed: Placed, taken: Taken, replaces: Sequence[int | None]) -> Placed:
    """The same, and the basins of replaced lessons, a little deeper: there the newer lesson acts."""
    prototypes, radius, lesson = [placed.prototypes], [placed.radius], list(placed.lesson)
    for number, old in enumerate(replaces):
        if old is not None:
            theirs = taken.owner == old
            prototypes.append(taken.prototypes[theirs])
            radius.append(taken.radius[theirs] - CLOSE)
            lesson += [number] * int(theirs.sum())
    return Placed(torch.cat(prototypes), torch.cat(radius), lesson)


def spread_out(keys: Tensor, most: int, cover: float) -> list[int]:
    """Up to `most` of the keys (n, m) that are close to all others: the central one, then the farthest."""
    chosen = [int((keys @ ops.unit(keys.mean(0, keepdim=True)).T).argmax())]
    while len(chosen) < most:
        near = (keys @ keys[chosen].T).amax(1)
        if near.min() >= cover:
            break
        chosen.append(int(near.argmin()))
    return chosen
