"""States: what all records up to a version make of the base, as one delta for each source or lesson.

They are kept in two tables, a part of at most 4 MB at a time. In lessons.db they are what the oldest versions
start from; in snapshots.db they make reading shorter, and can be had again from the records.
"""

import json
import logging
import sqlite3
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from attractor.continual.delta import Delta, merged, pile_up
from attractor.serve.errors import StoreDamaged
from attractor.serve.store.database import empty_log, open_writer, reader, remove, sql
from attractor.serve.store.records import Outline, delta_in, packed, sha256

log = logging.getLogger("attractor")

Item = TypeVar("Item")
Span = tuple[int, int]
"""The records after one number up to another."""
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
        """What leads from the base to here."""
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
    """The versions of which a state was finished."""
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


class Snapshots:
    """States in a database of their own, which make reading shorter.

    The records have everything: whatever is wrong with snapshots, they are begun anew, and `recovered` says
    so. One thread at a time writes them; those that read have connections of their own.
    """

    def __init__(self, path: Path, last: int) -> None:
        """`last` is the newest version that there is."""
        self.path = path
        self.recovered: str | None = None  # what could be done without
        self._damaged: set[int] = set()  # of those that could not be read
        self._database = self._opened(last)

    def _opened(self, last: int) -> sqlite3.Connection:
        with ExitStack() as stack:
            try:
                database = stack.enter_context(closing(open_writer(self.path, "NORMAL")))
                with sql(self.path):
                    drop_unfinished(database)
                    if newer := [version for version in versions(database) if version > last]:
                        raise StoreDamaged(self.path, f"versions {newer} are of other records")
                stack.pop_all()  # it stays open
                return database
            except StoreDamaged as error:
                self._go_without(error)
        remove(self.path)
        return open_writer(self.path, "NORMAL")

    def _go_without(self, error: OSError | StoreDamaged) -> None:
        log.warning("snapshots are made anew: %s", error)
        # no path of the server is shown
        reason = error.reason if isinstance(error, StoreDamaged) else error.strerror
        self.recovered = f"snapshots were damaged, and are made anew from the records ({reason})"

    # --- reading

    @contextmanager
    def reader(self) -> Iterator[sqlite3.Connection | None]:
        """A connection to what there is now; None where it cannot be read."""
        with ExitStack() as stack:
            database = None
            try:
                database = stack.enter_context(reader(self.path))
            except (OSError, StoreDamaged) as error:
                self._go_without(error)
            yield database

    def versions(self, database: sqlite3.Connection | None) -> set[int]:
        """Those of which there is a state, by such a connection."""
        try:
            with sql(self.path):
                return set(versions(database) if database else ()) - self._damaged
        except (OSError, StoreDamaged) as error:
            self._go_without(error)
            return set()

    def load(self, database: sqlite3.Connection, version: int, chain: str, outline: Outline) -> State:
        with sql(self.path):
            return load(database, self.path, version, chain, outline)

    def give_up(self, version: int, error: OSError | StoreDamaged) -> None:
        """The state of this version cannot be read: it is not asked for again."""
        self._go_without(error)
        self._damaged.add(version)

    # --- writing

    def clean(self) -> set[int]:
        """Let go of what was not finished, and of what is damaged; the versions that are left."""
        with sql(self.path):
            drop_unfinished(self._database)
            damaged = set(self._damaged)  # readers may find more of them meanwhile
            for version in damaged:
                self._database.execute("DELETE FROM states WHERE version = ?", [version])
            self._damaged -= damaged
            return set(versions(self._database))

    def write(self, state: State, chain: str, share: float) -> None:
        with sql(self.path):
            finish(self._database, state.version, stage(self._database, nullcontext(), state, chain, share))

    def drop(self, upto: int) -> None:
        with sql(self.path):
            self._database.execute("DELETE FROM states WHERE version <= ?", [upto])

    def forget(self) -> None:
        """All of them, for good: what is erased must not be found here either."""
        try:
            with sql(self.path):
                self._database.execute("DELETE FROM states")
                empty_log(self._database)
        except StoreDamaged:
            self._database.close()
            remove(self.path)
            self._database = open_writer(self.path, "NORMAL")

    def close(self) -> None:
        self._database.close()


def path_to(version: int, roots: Sequence[int], rollbacks: Mapping[int, int]) -> tuple[int, list[Span]]:
    """The root that a version comes from, and the spans of records that lead from there, oldest first.

    Every version has one before it: that of the record before, or the one that a rollback names. Roots are
    sorted, as rollbacks are.
    """
    spans: list[Span] = []
    turns = list(rollbacks)
    while True:
        root, turn = _newest(roots, version), _newest(turns, version)
        assert max(root, turn) >= 0, "every version since the oldest has a root"
        if max(root, turn) < version:
            spans.append((max(root, turn), version))
        if root >= turn:
            return root, spans[::-1]
        version = rollbacks[turn]


def _newest(numbers: Sequence[int], upto: int) -> int:
    """The largest that is not larger than `upto`, or -1."""
    place = bisect_right(numbers, upto)
    return numbers[place - 1] if place else -1
