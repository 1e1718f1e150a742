"""Where the basins of new lessons lie: around their subjects as they were read, and around nothing else.

    placed = place(keys, taken, nearest, replaces, config)
    placed.prototypes, placed.radius, placed.lesson

A subject looks different in every context, and subjects that share their last word look alike. A lesson
begins with a few prototypes that are spread out, and gets another one wherever a context of its own would be
taken for another lesson's, as in the condensed nearest neighbour rule (Hart, 1968). Its radii leave alone
what background text and earlier lessons have.

No radius separates the subject from another person of the same last name, but competition does: beside each
basin that such strangers come near lies a silent one, turned a little towards them. It adds nothing, and is
the deeper one where a token is more like them. So silent basins can only make lessons act on less.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attractor import ops
from attractor.continual.config import LessonConfig

TURN = 0.1
"""So far the prototypes of silent basins turn towards strangers: little, so that one takes over from the
basin beside it and from hardly any other."""
CLOSE = 1e-3
"""A context counts as recognised if its own basin is deeper than every other by this much. So much deeper are
basins that take the place of others."""


@dataclasses.dataclass(frozen=True)
class Taken:
    """The basins of earlier lessons, and contexts of their subjects that must stay theirs."""

    prototypes: Tensor  # (p, m) unit vectors
    radius: Tensor  # (p)
    owner: Tensor  # (p) the number of the lesson
    acts: Tensor  # (p) whether anything is added there; if not, nothing needs protection
    keys: Tensor  # (n, m) contexts
    depth: Tensor  # (n) by how much the nearest own prototype exceeds its radius there
    key_owner: Tensor  # (n)

    def points(self) -> tuple[Tensor, Tensor, Tensor]:
        """What must stay with earlier lessons, how deep it lies in their basins, and whose it is."""
        acts = self.acts
        return (
            torch.cat([self.prototypes[acts], self.keys]),
            torch.cat([1 - self.radius[acts], self.depth.clamp(min=0)]),
            torch.cat([self.owner[acts], self.key_owner]),
        )


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
) -> Placed:
    """Basins for lessons whose subjects gave these directions, (n, m) each, in the contexts that were read.

    `nearest` says how close background comes to a direction. A lesson may take the place of an earlier one:
    then its basins are deeper than that one's everywhere, which need no protection from it.
    """
    every = torch.cat(list(keys))
    device = every.device
    whose = torch.tensor([number for number, own in enumerate(keys) for _ in own], device=device)
    first = torch.cat([whose.new_zeros(1), torch.bincount(whose).cumsum(0)]).tolist()
    replaced = torch.tensor([-1 if number is None else number for number in replaces], device=device)
    points, depth, point_owner = taken.points()

    def radii(contexts: list[int]) -> Tensor:
        """The radius of a prototype at each of these contexts."""
        prototypes, owner = every[contexts], whose[contexts]
        radius = (nearest(prototypes) + config.room).clamp(min=config.radius)
        if len(points):
            others = prototypes @ points.T - depth  # shallower there than the basins of its own lesson
            others = others.masked_fill(point_owner == replaced[owner][:, None], -1)
            radius = torch.maximum(radius, others.amax(1) + config.room)
        return radius.clamp(max=1 - config.room)

    chosen = [  # contexts with a prototype of their own
        first[number] + place
        for number, own in enumerate(keys)
        for place in spread_out(own, config.prototypes, config.cover)
    ]
    radius = radii(chosen)
    while True:
        prototypes, owner = every[chosen], whose[chosen]
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
        radius = torch.cat([radius, radii(more)])
        chosen += more


@torch.no_grad()
def silent(
    placed: Placed, keys: Sequence[Tensor], strangers: Sequence[Tensor], taken: Taken, config: LessonConfig
) -> Placed:
    """Basins in which nothing is added, one beside each of the new ones that a stranger comes near.

    `strangers` are directions (n, m) of what resembles each subject and is not it. With w the direction from
    their mean to that of the subject's own contexts, the basin (p, r) gets a silent neighbour of prototype
    q = unit(p - TURN w). It is the deeper one where x (q - p) exceeds the difference of their radii, which
    lies at `config.apart` between the means; but it stays shallower than the lesson itself in every context
    of its own, and than other lessons in theirs.
    """
    points, depth, _ = taken.points()
    own_depth = [placed.depth(own, number) for number, own in enumerate(keys)]
    points, depth = torch.cat([points, *keys]), torch.cat([depth, *own_depth])
    owner = torch.tensor(placed.lesson, device=points.device)
    found = Placed(points[:0], depth[:0], [])
    for number, (own, seen) in enumerate(zip(keys, strangers, strict=True)):
        if not len(seen):
            continue
        prototypes, radius = placed.prototypes[owner == number], placed.radius[owner == number]
        away = ops.unit(own.mean(0, keepdim=True) - seen.mean(0, keepdim=True))
        turned = ops.unit(prototypes - TURN * away)
        ahead = own @ (turned - prototypes).T  # of the basin beside it, if their radii were the same
        inside = (own @ prototypes.T > radius).float()
        count = inside.sum(0)
        inner = torch.where(count > 0, (ahead * inside).sum(0) / count.clamp(min=1), ahead.mean(0))
        outer = (seen @ (turned - prototypes).T).mean(0)
        edges = radius + config.apart * inner + (1 - config.apart) * outer
        edges = torch.maximum(edges, (points @ turned.T - depth[:, None]).amax(0) + 2 * CLOSE)
        entered = (seen @ prototypes.T - radius).amax(0) > -config.near
        useful = entered & (edges < 1)
        found = Placed(
            torch.cat([found.prototypes, turned[useful]]),
            torch.cat([found.radius, edges[useful]]),
            found.lesson + [number] * int(useful.sum()),
        )
    return found


def deeper(placed: Placed, taken: Taken, replaces: Sequence[int | None]) -> Placed:
    """The same, and the basins of replaced lessons, a little deeper: there the newer lesson acts."""
    prototypes, radius, lesson = [placed.prototypes], [placed.radius], list(placed.lesson)
    for number, old in enumerate(replaces):
        if old is not None:
            theirs = (taken.owner == old) & taken.acts
            prototypes.append(taken.prototypes[theirs])
            radius.append(taken.radius[theirs] - CLOSE)
            lesson += [number] * int(theirs.sum())
    return Placed(torch.cat(prototypes), torch.cat(radius), lesson)


def spread_out(keys: Tensor, most: int, cover: float) -> list[int]:
    """Up to `most` of the keys (n, m) that are close to all others: the central one, then the farthest."""
    if not len(keys):
        return []
    chosen = [int((keys @ ops.unit(keys.mean(0, keepdim=True)).T).argmax())]
    while len(chosen) < most:
        near = (keys @ keys[chosen].T).amax(1)
        if near.min() >= cover:
            break
        chosen.append(int(near.argmin()))
    return chosen
