"""States: what all records up to a version make of the base, as one delta for each source or lesson.

They are kept in two tables, a part of at most 4 MB at a time. In lessons.db they are what the oldest versions
start from; in snapshots.db they make reading shorter, and can be had again from the records.
"""

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from attractor.continual.delta import Delta, merged, pile_up
from attractor.serve.errors import StoreDamaged
from attractor.serve.store.records import Outline, delta_in, packed, sha256

Item = TypeVar("Item")
PART = 4 << 20
"""No call works on more bytes at once, and so none keeps other threads waiting (one row may be larger)."""


@dataclass
class SourceState:
    """What a source is at a version, beside the base."""

    pile: list[Delta] = field(default_factory=list)  # one after the other, from the base on
    fields: dict[str, Any] = field(default_factory=dict)
    version: int = 0  # that changed it last

    def learn(self, delta: Delta, fields: dict[str, Any], version: int) -> None:
        pile_up(self.pile, delta)
        self.fields, self.version = fields, version

    @property
    def delta(self) -> Delta:
        """From the base to here."""
        return merged(self.pile)


@dataclass
class LessonState:
    """A lesson that owns its patches, at a version: its delta is all of it."""

    source: str
    delta: Delta
    fields: dict[str, Any]
    version: int  # that it was taught, or learned again, with


@dataclass
class State:
    version: int = 0
    sources: dict[str, SourceState] = field(default_factory=dict)
    lessons: dict[int, LessonState] = field(default_factory=dict)  # by their numbers

    @property
    def nbytes(self) -> int:
        piles = [*(own.pile for own in self.sources.values()), [own.delta for own in self.lessons.values()]]
        return sum(delta.nbytes for pile in piles for delta in pile)

    def learn(
        self, source: str, lesson: int | None, delta: Delta, fields: dict[str, Any], version: int
    ) -> None:
        if lesson is None:
            self.sources.setdefault(source, SourceState()).learn(delta, fields, version)
        else:
            self.lessons[lesson] = LessonState(source, delta, fields, version)

    def without_erased(self, outline: Outline) -> "State":
        """The same without what was erased since: of lessons, which are known by their numbers."""
        assert not self.sources
        kept = {
            number: own
            for number, own in self.lessons.items()
            if not outline.is_erased(own.source, number, own.version)
        }
        return State(self.version, lessons=kept)

    def drop(self, source: str, lesson: int | None) -> None:
        """A lesson, or all that a source taught."""
        if lesson is None:
            self.sources.pop(source, None)
            self.lessons = {number: own for number, own in self.lessons.items() if own.source != source}
        else:
            self.lessons.pop(lesson, None)


def paced(items: Iterable[Item], share: float) -> Iterator[Item]:
    """The same with pauses: the work on them takes this share of the time, and others have the rest."""
    started = time.perf_counter()
    for item in items:
        yield item
        if share < 1:
            time.sleep((time.perf_counter() - started) * (1 - share) / share)
            started = time.perf_counter()


def versions(database: sqlite3.Connection) -> list[int]:
    """Of states that were finished."""
    return [
        version
        for (version,) in database.execute(
            "SELECT version FROM states WHERE sha256 IS NOT NULL ORDER BY version"
        )
    ]


def stage(
    database: sqlite3.Connection, lock: AbstractContextManager[Any], state: State, chain: str, share: float
) -> str:
    """Write a state part by part, each with the lock held, so that others can write in between.

    `chain` is that of the record which made the version. The state counts once it is finished, with the hash
    that this returns.
    """
    listed: list[list[Any]] = []
    with lock:
        database.execute("INSERT INTO states VALUES (?, ?, NULL)", [state.version, chain])
    try:
        for source, about, delta in paced(_parts(state), share):
            data = delta.to_bytes()
            listed.append([source, about, sha256(data)])
            with lock:
                database.execute(
                    "INSERT INTO parts (version, source, about, delta_sha256, delta) VALUES (?, ?, ?, ?, ?)",
                    [state.version, *listed[-1], data],
                )
    except BaseException:
        with lock, suppress(sqlite3.Error):
            drop_unfinished(database)
        raise
    return _hash(state.version, chain, listed)


def finish(database: sqlite3.Connection, version: int, sha256: str) -> None:
    database.execute("UPDATE states SET sha256 = ? WHERE version = ?", [sha256, version])


def _parts(state: State) -> Iterator[tuple[str, str, Delta]]:
    for source, own in state.sources.items():
        about = packed({"version": own.version, "fields": own.fields}, f"what is kept of {source!r}")
        pieces = own.delta.pieces(PART)
        yield source, about, next(pieces, Delta())
        for piece in pieces:
            yield source, about, piece
    for number, lesson in state.lessons.items():
        kept = {"version": lesson.version, "fields": lesson.fields, "lesson": number}
        yield lesson.source, packed(kept, f"what is kept of lesson {number}"), lesson.delta


def _hash(version: int, chain: str, listed: list[list[Any]]) -> str:
    return sha256(json.dumps([version, chain, listed], separators=(",", ":")).encode())


def load(database: sqlite3.Connection, path: Path, version: int, chain: str, outline: Outline) -> State:
    """What was written, without what was erased since; StoreDamaged where it is not that."""
    row = database.execute("SELECT chain, sha256 FROM states WHERE version = ?", [version]).fetchone()
    query = "SELECT source, about, delta_sha256, delta FROM parts WHERE version = ? ORDER BY id"
    listed: list[list[Any]] = []
    state = State(version)
    try:
        for *about, data in database.execute(query, [version]):
            listed.append(about)
            source, text, expected = about
            kept = json.loads(text)
            lesson = kept.get("lesson")
            if not outline.is_erased(source, lesson, version):
                delta = delta_in(path, data, expected)
                state.learn(source, lesson, delta, kept["fields"], kept["version"])
        is_whole = row == (chain, _hash(version, chain, listed))
    except StoreDamaged as error:
        raise StoreDamaged(path, f"in the state of version {version}, {error.reason}") from error
    except (LookupError, TypeError, ValueError) as error:
        raise StoreDamaged(path, f"the state of version {version} is damaged: {error!r}") from error
    if not is_whole:
        raise StoreDamaged(path, f"the state of version {version} is not what was written")
    return state


def drop_unfinished(database: sqlite3.Connection) -> None:
    database.execute("DELETE FROM states WHERE sha256 IS NULL")
