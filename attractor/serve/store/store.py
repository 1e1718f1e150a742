"""Store: every version of what was learned, in SQLite.

    with Store.open(folder, identity=fingerprint(model)) as store:
        state = store.state_at()               # the newest, or any since store.oldest
        version = store.commit("lesson", answer, at=now, source="kjv", fields=fields, delta=delta)
        store.snapshot()                       # now and then, in a thread of its own

A commit that returned is durable; one that raised changed nothing. Commits go on while a snapshot is written.
Damage is refused and named: StoreDamaged.

Servers of lessons can share a store. Each change is then made in a turn, of which there is one at a time, and
which begins with everything that others committed:

    with Store.open(folder, identity=name, shared=True) as store, store.turn():
        store.commit(...)
"""

import json
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

from attractor.config import check_choice, check_size
from attractor.continual.delta import Delta
from attractor.serve.config import SyncName
from attractor.serve.errors import KeyReused, StoreDamaged
from attractor.serve.store import states
from attractor.serve.store.database import (
    LESSONS,
    SNAPSHOTS,
    Acknowledged,
    empty_log,
    lock,
    make_folder,
    open_writer,
    opening,
    pause,
    reader,
    remove,
    sql,
    transaction,
    turn,
)
from attractor.serve.store.records import (
    Change,
    Outline,
    Row,
    chain_of,
    check_promise,
    delta_in,
    history_line,
    insert,
    readable,
    walk,
)
from attractor.serve.store.states import Snapshots, State, paced, path_to

log = logging.getLogger("attractor")

SETTLE = 4 << 20
"""Bytes in the write-ahead log that are worth to be moved into the database."""


class _Now(NamedTuple):
    """Both databases at one moment, and the versions that there are in them."""

    lessons: sqlite3.Connection
    snapshots: sqlite3.Connection | None
    oldest: int
    last: int


class Store:
    """Safe to use from several threads. One process at a time has it open, unless all of them share it."""

    def __init__(
        self, folder: Path, identity: str, sync: SyncName, keep: int, shared: bool, folder_lock: int
    ) -> None:
        """Use `open`."""
        self.folder, self.identity, self.shared = folder, identity, shared
        self.has_turn = not shared  # nobody else can change it now
        self._keep, self._folder_lock = keep, folder_lock
        self._lessons = folder / LESSONS
        self._acknowledged = Acknowledged(folder) if sync == "always" else None
        self._lock = threading.Lock()  # held for a commit, or for less
        self._snapshotting = threading.Lock()  # taken before the other one
        self._closed = False
        self._logged = 0  # bytes that went to the write-ahead log
        promised = Acknowledged(folder).read()
        if not self._lessons.exists():  # nothing is made in the place of what is lost
            check_promise(self._lessons, promised, [])
            if (folder / SNAPSHOTS).exists():
                raise StoreDamaged(self._lessons, f"it is missing, and {SNAPSHOTS} beside it is not")
        self._records = open_writer(self._lessons, "FULL" if sync == "always" else "NORMAL")
        try:
            with sql(self._lessons):
                self.outline = self._read(identity, promised)
                states.drop_unfinished(self._records)
                self._roots = states.versions(self._records)
            if self._acknowledged is None:  # what is not synced must not be promised
                Acknowledged(folder).path.unlink(missing_ok=True)
            elif not shared:  # others may have promised more meanwhile
                self._acknowledged.write(self.outline.last, self.outline.chain, sync=True)
            self._snapshots = None if shared else Snapshots(folder / SNAPSHOTS, self.last)
            if shared:  # of a time when it was not
                remove(folder / SNAPSHOTS)
        except BaseException:
            self._records.close()
            raise

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        identity: str,
        sync: SyncName = "always",
        keep_snapshots: int = 8,
        shared: bool = False,
    ) -> Self:
        """Make a store or open one. `identity` names what its records belong to, say a base model.

        With sync="off" a commit is durable when the system gets to it: a power loss may take the last ones,
        and never anything in the middle. A store that is shared has no snapshots.
        """
        check_choice("sync", sync, get_args(SyncName))
        check_size("keep_snapshots", keep_snapshots)
        if shared and sync != "always":
            raise ValueError(f"sync={sync!r} is not for a store that servers share: leave it at 'always'")
        folder = Path(folder).absolute()
        make_folder(folder)
        folder_lock = lock(folder, shared=shared)
        try:
            with opening(folder) if shared else nullcontext():
                return cls(folder, identity, sync, keep_snapshots, shared, folder_lock)
        except BaseException:
            os.close(folder_lock)
            raise

    def _read(self, identity: str, promised: tuple[int, str] | None) -> Outline:
        """Every record but the deltas; these are checked when they are needed, and by `verify`."""
        database = self._records
        found = database.execute("SELECT identity FROM about").fetchall()
        if not found and database.execute("SELECT count(*) FROM records").fetchone() == (0,):
            database.execute("INSERT INTO about VALUES (?)", [identity])
        elif found != [(identity,)]:
            raise ValueError(
                f"{self.folder} belongs to {[name for (name,) in found]}, not to {identity!r}: open it with "
                "the model and settings it was written for"
            )
        outline = Outline(identity)
        chains = [chain for _, chain, _ in walk(database, self._lessons, outline)]
        check_promise(self._lessons, promised, chains)
        return outline

    @property
    def recovered(self) -> str | None:
        """What was found damaged and could be done without."""
        return None if self._snapshots is None else self._snapshots.recovered

    @property
    def last(self) -> int:
        """The newest version."""
        return self.outline.last

    @property
    def oldest(self) -> int:
        """The oldest version that `state_at` can give."""
        return self._roots[0] if self._roots else 0

    @property
    def taken_back(self) -> int:
        """The newest version that took something back."""
        return self.outline.taken_back

    def holds(self, source: str) -> bool:
        """Whether anything of a source was not erased, live or not."""
        return self.outline.taught.get(source, 0) > self.outline.erased.get(source, 0)

    def source_of(self, lesson: int) -> str | None:
        """The source of a lesson that was not erased, live or not."""
        source, number = self.outline.lessons.get(lesson, ("", 0))
        return None if not number or self.outline.is_erased(source, lesson, number) else source

    @property
    def next_lesson(self) -> int:
        """The number of a new lesson: none is ever given twice."""
        return 1 + max(self.outline.lessons, default=-1)

    @property
    def nbytes(self) -> int:
        """The size of all files."""
        size = 0
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):
                size += path.stat().st_size
        return size

    # --- sharing

    @contextmanager
    def turn(self, wait: Callable[[], None] = pause) -> Iterator[None]:
        """Be alone among those that share the store, and know all that they have committed.

        One thread of a server may ask for it. While others have theirs, `wait` is called again and again; it
        gives up by raising.
        """
        if not self.shared:
            yield
            return
        with turn(self.folder, wait):
            self.catch_up()
            self._promise(self.last, self.outline.chain)  # who committed it may have been killed before
            self.has_turn = True
            try:
                yield
            finally:
                self.has_turn = False

    def catch_up(self) -> None:
        """Know the records that others committed, of a store that is shared."""
        if self.shared:
            with self._lock, sql(self._lessons):
                self._catch_up(self._records)

    def _catch_up(self, database: sqlite3.Connection) -> None:
        (newest,) = database.execute("SELECT coalesce(max(number), 0) FROM records").fetchone()
        if newest < self.last:
            raise StoreDamaged(self._lessons, f"it was there, and the last one is {newest} now", self.last)
        if newest > self.last:
            for _ in walk(database, self._lessons, self.outline):
                pass

    # --- writing

    def commit(self, kind: str, answer: Mapping[str, Any], *, at: str, **columns: Any) -> int:
        """The new version. A ValueError for what could not be read again, an OSError where the disk fails.

        Other columns are those of a `Change`: a `key` comes with a hash of the `content` it stands for, and
        with its `sender` if that is known.
        """
        return self.commit_all([Change(kind=kind, answer=answer, **columns)], at=at)

    def commit_all(self, changes: Sequence[Change], *, at: str) -> int:
        """Records one after the other, all of them or none; the last one's version."""
        for change in changes:
            if change.delta is not None:
                change.delta.check()
        packages = [change.packed() for change in changes]
        erases = any(change.kind == "erase" for change in changes)
        with self._snapshotting if erases else nullcontext(), self._lock:
            rows = self._rows(changes, packages, at)
            if erases and self._snapshots is not None:
                self._snapshots.forget()
            with sql(self._lessons):
                try:
                    with transaction(self._records):
                        for row, chain, data in rows:
                            if row.kind == "erase":
                                self._remove_deltas(row.source, row.target)
                            insert(self._records, row, chain, data)
                except BaseException:
                    empty_log(self._records, patience=0)
                    raise
            for row, chain, data in rows:
                self.outline.add(row, chain)
                self._logged += len(data or b"") + len(row.answer)
            self._promise(self.outline.last, self.outline.chain)
            if erases and not empty_log(self._records):
                log.warning(
                    "what was erased is in %s-wal until those who read it now have ended", self._lessons
                )
            return self.last

    def _rows(
        self, changes: Sequence[Change], packages: Sequence[bytes | None], at: str
    ) -> list[tuple[Row, str, bytes | None]]:
        """Rows for changes, each with its chain and its delta; nothing is written yet."""
        if self._closed:
            raise ValueError(f"the store in {self.folder} is closed")
        if not self.has_turn:
            raise ValueError(f"others share the store in {self.folder}: change it in a `turn`")
        rows = []
        chain = self.outline.chain
        for number, (change, data) in enumerate(zip(changes, packages, strict=True), self.last + 1):
            row = Row.of(change, number, at, data)
            if row.key in self.outline.keys:
                raise KeyReused(f"the key {row.key!r} came with record {self.outline.keys[row.key]} before")
            if row.kind == "rollback":
                self._check_version(row.target, self.oldest, self.last)
            chain = row.chain(chain)
            rows.append((row, chain, data))
        return rows

    def _remove_deltas(self, source: str | None, lesson: int | None) -> None:
        """Their hashes stay, and so the chain can be checked."""
        of_lesson = [] if lesson is None else [lesson]
        which = "source = ? AND delta IS NOT NULL" + (" AND target = ?" if of_lesson else "")
        self._records.execute(f"UPDATE records SET delta = NULL WHERE {which}", [source, *of_lesson])
        which = "source = ?" + (" AND about ->> 'lesson' = ?" if of_lesson else "")
        self._records.execute(f"UPDATE parts SET delta = NULL WHERE {which}", [source, *of_lesson])

    def settle(self) -> None:
        """Move commits from the write-ahead log into the database, if they are many and nothing waits."""
        with self._lock:
            if self._logged > SETTLE and not self._closed:
                self._logged = 0
                with suppress(sqlite3.Error):  # the next one will do it
                    self._records.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def _promise(self, number: int, chain: str) -> None:
        """Note the newest record. Where this fails it is durable all the same; its loss goes unnoticed."""
        if self._acknowledged is not None:
            try:
                self._acknowledged.write(number, chain)
            except OSError as error:
                log.warning("%s was not brought up to date: %s", self._acknowledged.path, error)

    # --- what was answered

    def answer_to(self, key: str | None, sender: str | None, content: str) -> dict[str, Any] | None:
        """The answer that was given to this key before, whatever became of it since.

        KeyReused if the key came with something else, or from somebody else.
        """
        number = self.outline.keys.get(key) if key is not None else None
        if number is None:
            return None
        with sql(self._lessons), reader(self._lessons) as database:
            query = "SELECT sender, content FROM records WHERE number = ?"
            if database.execute(query, [number]).fetchone() != (sender, content):
                raise KeyReused(
                    f"the key {key!r} was given with something else before, or by somebody else: take a new "
                    "one"
                )
            return next(readable(database, "number = ?", [number]))["answer"]

    def calibration(self) -> tuple[dict[str, Any], Delta] | None:
        """What the layer of lessons measured at first; None where there is no such record."""
        if (number := self.outline.calibration) is None:
            return None
        query = "SELECT fields, delta_sha256, delta FROM records WHERE number = ?"
        with sql(self._lessons), reader(self._lessons) as database:
            fields, expected, data = database.execute(query, [number]).fetchone()
        return json.loads(fields), delta_in(self._lessons, data, expected, number)

    def history(self, limit: int, before: int | None = None) -> list[dict[str, Any]]:
        """A line for each version, the newest first."""
        before = self.last + 1 if before is None else before
        with sql(self._lessons), reader(self._lessons) as database:
            return [
                history_line(record)
                for record in readable(database, "number < ? ORDER BY number DESC LIMIT ?", [before, limit])
            ]

    # --- reading

    def state_at(
        self, version: int | None = None, *, start: State | None = None, share: float = 1.0
    ) -> State:
        """Everything at a version, from the nearest state that is kept, or `start`, and the records since.

        It takes this share of the time.
        """
        with sql(self._lessons), self._reading() as now:
            lessons, snapshots = now.lessons, now.snapshots
            wanted = now.last if version is None else version
            self._check_version(wanted, now.oldest, now.last)
            cached = self._cached(snapshots)
            roots = {*states.versions(lessons), *cached, *([0] if now.oldest == 0 else [])}
            given = {} if start is None else {start.version: start}
            while True:
                root, spans = path_to(wanted, sorted({*roots, *given}), self.outline.rollbacks)
                if root in given:
                    state = given[root].without_erased(self.outline)
                    break
                try:
                    state = self._root(root, lessons, snapshots if root in cached else None)
                    break
                except (OSError, StoreDamaged) as error:
                    if self._snapshots is None or root not in cached:
                        raise
                    self._snapshots.give_up(root, error)
                    roots -= {root} - set(states.versions(lessons))
                    cached.discard(root)
            for after, upto in spans:
                self._replay(lessons, state, after, upto, share)
            state.version = wanted
            return state

    @contextmanager
    def _reading(self) -> Iterator[_Now]:
        """Both databases as they are now, by connections of their own; records alone have to be readable."""
        with ExitStack() as stack:
            with self._lock:  # no commit is half done
                lessons, snapshots = stack.enter_context(reader(self._lessons)), None
                if self.shared:  # what is missing here was erased by one of these records
                    self._catch_up(lessons)
                if self._snapshots is not None:
                    snapshots = stack.enter_context(self._snapshots.reader())
                now = _Now(lessons, snapshots, self.oldest, self.last)
            yield now

    def _cached(self, snapshots: sqlite3.Connection | None) -> set[int]:
        """The versions of which there are snapshots."""
        return set() if self._snapshots is None else self._snapshots.versions(snapshots)

    def _root(self, root: int, lessons: sqlite3.Connection, snapshots: sqlite3.Connection | None) -> State:
        if root == 0:
            return State()
        chain = chain_of(lessons, root)
        if self._snapshots is None or snapshots is None:
            return states.load(lessons, self._lessons, root, chain, self.outline)
        return self._snapshots.load(snapshots, root, chain, self.outline)

    def _replay(
        self, database: sqlite3.Connection, state: State, after: int, upto: int, share: float
    ) -> None:
        query = (
            "SELECT number, kind, source, target, fields, delta_sha256, delta FROM records "
            "WHERE number > ? AND number <= ? ORDER BY number"
        )
        for number, kind, source, target, fields, expected, data in paced(
            database.execute(query, [after, upto]), share
        ):
            if kind in ("drop", "erase"):
                state.drop(source, target)
            elif kind == "lesson" and not self.outline.is_erased(source, target, number):
                delta = delta_in(self._lessons, data, expected, number)
                state.learn(source, target, delta, json.loads(fields), number)

    def _check_version(self, version: int | None, oldest: int, last: int) -> None:
        if version is None or not oldest <= version <= last:
            raise ValueError(f"version {version!r} is not there: {self.folder} has {oldest} to {last}")

    # --- snapshots and old versions

    @property
    def bytes_to_read(self) -> int:
        """The size of the deltas that a start has to read after the newest state that is kept."""
        with sql(self._lessons), self._reading() as now:
            newest = max([*states.versions(now.lessons), *self._cached(now.snapshots)], default=0)
            query = "SELECT coalesce(sum(length(delta)), 0) FROM records WHERE number > ?"
            return int(now.lessons.execute(query, [newest]).fetchone()[0])

    def snapshot(self, *, share: float = 1.0) -> int | None:
        """Write the newest version whole, then let go of versions older than the snapshots to keep.

        It takes this share of the time, at most. Returns its version, None where there is nothing new. After
        an OSError everything is as before, or more is kept than needed.
        """
        if (snapshots := self._snapshots) is None:
            raise ValueError(f"the store in {self.folder} is shared, and has no snapshots")
        with self._snapshotting:
            version = self.last
            with self._lock, sql(self._lessons):  # that an attempt before this one left
                states.drop_unfinished(self._records)
            known = {*snapshots.clean(), self.oldest}
            is_new = version not in {*known, *self._roots}
            if is_new:
                snapshots.write(self.state_at(version, share=share), self._chain(version), share)
            oldest = sorted({*known, version})[-self._keep :][0]
            if oldest > self.oldest:
                self._let_go(oldest, share)
            snapshots.drop(self.oldest)
            return version if is_new else None

    def _let_go(self, oldest: int, share: float) -> None:
        """Drop the deltas before a version, once the states that this and later ones start from are written.

        Records stay: the chain is checked from the first one on, and no key is ever taken twice.
        """
        written: dict[int, str] = {}
        while missing := self._replace_roots(oldest, written):
            for version in missing:
                state = self.state_at(version, share=share)
                with sql(self._lessons):
                    chain = self._chain(version)
                    written[version] = states.stage(self._records, self._lock, state, chain, share)
        query = "SELECT number FROM records WHERE number <= ? AND delta IS NOT NULL AND kind = 'lesson'"
        with sql(self._lessons):
            with self._lock:
                leaving = self._records.execute(query, [oldest]).fetchall()
            for number in paced(leaving, share):  # one by one: commits go on in between
                with self._lock:
                    self._records.execute("UPDATE records SET delta = NULL WHERE number = ?", number)

    def _replace_roots(self, oldest: int, written: Mapping[int, str]) -> list[int]:
        """Let the versions since the oldest one start from the states that were written for them.

        Returns the versions whose states have to be written before that. A rollback may have been committed
        while others were written: then one more is missing.
        """
        with self._lock:
            turns = self.outline.rollbacks.items()
            needed = {oldest, *(version for version, to in turns if version > oldest > to)}
            if missing := needed - set(self._roots) - set(written):
                return sorted(missing)
            with sql(self._lessons), transaction(self._records):
                for version, digest in written.items():
                    states.finish(self._records, version, digest)
                for version in set(self._roots) - needed:
                    self._records.execute("DELETE FROM states WHERE version = ?", [version])
            self._roots = sorted(needed)
            return []

    def _chain(self, version: int) -> str:
        with sql(self._lessons), reader(self._lessons) as database:
            return chain_of(database, version)

    # --- closing

    def close(self) -> None:
        """Let others open the folder, once a snapshot that is being written is done."""
        with self._snapshotting, self._lock:
            if self._closed:
                return
            self._closed = True
            if self._acknowledged is not None and not self.shared:  # others may have promised more
                with suppress(OSError):
                    self._acknowledged.write(self.outline.last, self.outline.chain, sync=True)
            if self._snapshots is not None:
                self._snapshots.close()
            self._records.close()
            os.close(self._folder_lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
