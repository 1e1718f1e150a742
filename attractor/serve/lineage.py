"""Which records made a version: what has to be read to have it again, and what has to be kept for that.

Every version has one before it: that of the record before, or the one that a rollback names. So from each a
single path leads back to a root: a version that is there as a whole, as a snapshot or as the base.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

Span = tuple[int, int]
"""The records after one number up to another."""


def newest(numbers: Sequence[int], upto: int) -> int:
    """The largest that is not larger than `upto`, or -1. Numbers are sorted."""
    place = bisect_right(numbers, upto)
    return numbers[place - 1] if place else -1


@dataclass(frozen=True)
class Lineage:
    roots: tuple[int, ...]  # sorted, as rollbacks are
    rollbacks: Mapping[int, int] = field(default_factory=dict)  # version -> the version that it is like

    @cached_property
    def _starts(self) -> dict[int, int]:
        """The root of each rollback, or -1."""
        found: dict[int, int] = {}
        for version, to in self.rollbacks.items():
            root, turn = newest(self.roots, to), newest(list(found), to)
            found[version] = version if version in self.roots else root if root >= turn else found[turn]
        return found

    def path(self, version: int) -> tuple[int, list[Span]] | None:
        """The root, and the spans that lead from there, oldest first; None where there is no root."""
        spans: list[Span] = []
        turns = list(self.rollbacks)
        while True:
            root, turn = newest(self.roots, version), newest(turns, version)
            if root == turn == -1:
                return None
            if max(root, turn) < version:
                spans.append((max(root, turn), version))
            if root >= turn:
                return root, spans[::-1]
            version = self.rollbacks[turn]

    @cached_property
    def oldest(self) -> int | None:
        """The oldest version since which every one has a root; None where the newest has none."""
        lost = max((turn for turn, root in self._starts.items() if root == -1), default=-1)
        return min((each for each in (*self.roots, *self.rollbacks) if each > lost), default=None)

    def needed(self, count: int) -> set[int]:
        """The newest roots, so many, and those without which a later rollback could not be followed."""
        kept = self.roots[-count:]
        return {*kept, *(root for turn, root in self._starts.items() if turn >= kept[0] and root != -1)}

    def with_roots(self, roots: set[int]) -> "Lineage":
        """Rollbacks before the first root leave with the records that they were."""
        first = min(roots)
        turns = {turn: to for turn, to in self.rollbacks.items() if turn > first}
        return Lineage(tuple(sorted(roots)), turns)

    def with_rollback(self, version: int, to: int) -> "Lineage":
        return Lineage(self.roots, {**self.rollbacks, version: to})
