"""Every version of what was learned, on disk: a journal of records and snapshots of states.

    with Store.open(folder, identity=fingerprint(model), blank=fresh_tensors) as store:
        state = store.state_at()                                 # the newest, or any since store.oldest
        version = store.commit("lesson", fields, tensors)        # durable when it returns
        store.snapshot()                                         # now and then, in a thread of its own

A commit that raises leaves no record. What a record could not be replayed from is refused before it is
written. Commits go on while a snapshot is written. Damage is refused with path and offset.
"""

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from attractor.config import check_size
from attractor.serve import journal as journals
from attractor.serve import snapshots
from attractor.serve.files import Files
from attractor.serve.journal import PARTIAL, Journal, SyncName
from attractor.serve.lineage import Lineage, Span, newest
from attractor.serve.segments import Entry, JournalDamaged, Record, Walk
from attractor.serve.state import FIELDS, Blank, Shapes, State, change, check, note, reshaped, shapes

__all__ = ["Store", "StoreReport", "show", "verify"]

Layout = Mapping[str, Shapes]
"""The sources there are, and the shapes of their tensors."""


class Store:
    """Safe to use from several threads. One process at a time has it open."""

    recovered: str | None  # what opening had to cut off

    def __init__(self, folder: Path, journal: Journal, seen: "Seen", blank: Blank, keep: int, files: Files):
        """Use `open`."""
        self.folder, self.journal, self.recovered = folder, journal, journal.recovered
        self._blank, self._keep, self._files = blank, keep, files
        self._outline = {name: torch.empty_like(value, device="meta") for name, value in blank().items()}
        self._lock = threading.Lock()  # held for a commit, or for less
        self._snapshotting = threading.Lock()
        self._reading: Counter[int] = Counter()  # roots in use: no retention takes them away
        files.make_folder(folder / "snapshots")
        for name in files.names(folder / "snapshots"):
            if name.startswith(PARTIAL):
                files.unlink(folder / "snapshots" / name)
        self._lineage = self._find(seen.rollbacks)
        self._layouts = self._follow(seen.events)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        identity: str,
        blank: Blank,
        sync: SyncName = "always",
        keep_snapshots: int = 4,
        files: Files | None = None,
    ) -> Self:
        """Make a store or recover one. `blank` gives the tensors that a source begins with, always the same.

        The base counts as a snapshot, as long as it is among the newest.
        """
        check_size("keep_snapshots", keep_snapshots)
        folder, files, seen = Path(folder).absolute(), files or Files(), Seen()
        journal = Journal.open(folder / "journal", identity=identity, sync=sync, files=files, seen=seen.see)
        try:
            return cls(folder, journal, seen, blank, keep_snapshots, files)
        except BaseException:
            journal.close()
            raise

    def _find(self, rollbacks: dict[int, int]) -> Lineage:
        """What there is to start from. What the newest version needs is checked, byte by byte."""
        first, last = self.journal.first, self.journal.last
        roots = [version for version in snapshots.versions(self._files, self.folder) if version >= first - 1]
        if roots and roots[-1] > last:
            reason = f"the journal ends at record {last}: its end is missing"
            raise JournalDamaged(snapshots.snapshot_path(self.folder, roots[-1]), 0, reason)
        lineage = Lineage((0, *roots) if first == 1 else tuple(roots), rollbacks)
        path = lineage.path(last)
        if path is None:
            raise ValueError(
                f"{self.folder}: the journal begins with record {first} and there is no snapshot from which "
                f"version {last} could be had: bring it back from a copy"
            )
        for root in {path[0], lineage.roots[-1]} - {0}:
            for _ in snapshots.entries(self._files, self.folder, root):
                pass
        return lineage

    def _follow(self, events: list["Event"]) -> list[tuple[int, Layout | None]]:
        """The layouts since the first root, each with the version that made it; None: not known."""
        roots = list(self._lineage.roots)
        layouts = [(roots[0], self._head(roots.pop(0)))]
        for version, kind, about, whole in events:
            before = layouts[-1][1]
            while roots and roots[0] < version:
                root = roots.pop(0)
                if before is None:
                    before = self._head(root)
                    layouts.append((root, before))
            if kind == "rollback":
                now = layout_at(layouts, about)
            elif before is not None:
                own = {**before.get(about, shapes(self._outline)), **whole}
                now = reshaped(before, kind, about, own)
            else:
                now = None
            if now is not before:
                layouts.append((version, now))
        if layouts[-1][1] is None:  # the newest version is a snapshot
            layouts.append((self.last, self._head(self.last)))
        return layouts

    def _head(self, root: int) -> Layout | None:
        """None where it is damaged: only who needs this snapshot has to be told."""
        try:
            return snapshots.head(self._files, self.folder, root, self._outline) if root else {}
        except JournalDamaged:
            return None

    @property
    def last(self) -> int:
        """The newest version."""
        return self.journal.last

    @property
    def oldest(self) -> int:
        """The oldest version that `state_at` can give."""
        assert self._lineage.oldest is not None, "opening refused it"
        return self._lineage.oldest

    # --- writing

    def commit(
        self, kind: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> int:
        """The new version. A ValueError for what could not be replayed, an OSError where the disk fails."""
        with self._lock:
            record = Record(self.last + 1, kind, dict(fields), dict(tensors or {}))
            before = self._layouts[-1][1]
            assert before is not None, "the newest layout is known"
            check(record, before, self._outline)
            now = self._layout_after(record, before)
            version = self.journal.append(kind, record.fields, record.tensors)
            assert version == record.sequence
            if kind == "rollback":
                self._lineage = self._lineage.with_rollback(version, record.fields["to"])
            if now is not before:
                self._layouts.append((version, now))
            return version

    def _layout_after(self, record: Record, before: Layout) -> Layout:
        if record.kind == "rollback":
            to = record.fields["to"]
            self._check_version(to)
            found = layout_at(self._layouts, to)
            if found is None:
                raise ValueError(f"version {to} cannot be had again: the snapshot before it is damaged")
            return found
        source = record.fields["source"]
        whole = whole_shapes(shapes(record.tensors))
        own = {**before.get(source, shapes(self._outline)), **whole}
        return reshaped(before, record.kind, source, own)

    # --- reading

    def state_at(self, version: int | None = None, *, share: float = 1.0) -> State:
        """From the newest snapshot that can be used and the journal; the state is the caller's own.

        It takes this share of the time, at most.
        """
        with self._planned(version) as (version, root, spans, noted):
            blank = self._blank()
            state = self._load(root, blank)
            if noted != root:
                notes = self._load(noted, blank, notes_only=True)
                state = State(noted, state.sources, notes.answers, notes.history)
            for after, upto in spans:
                if upto <= noted:
                    for record in snapshots.paced(self.journal.records(after, upto), share):
                        self._change(state, record, blank)
            for record in snapshots.paced(self.journal.records(noted, version), share):
                if any(after < record.sequence <= upto for after, upto in spans):
                    self._change(state, record, blank)
                note(state, record)
            return state

    @contextmanager
    def _planned(self, version: int | None) -> Iterator[tuple[int, int, list[Span], int]]:
        """What to read: root, spans, and the root with the latest answers and history; kept meanwhile."""
        with self._lock:
            version = self.last if version is None else version
            self._check_version(version)
            path = self._lineage.path(version)
            assert path is not None, "every version since the oldest has a root"
            self._reading[path[0]] += 1
            noted = newest(self._lineage.roots, version)
            self._reading[noted] += 1
        try:
            yield version, *path, noted
        finally:
            with self._lock:
                self._reading -= Counter([path[0], noted])

    def _check_version(self, version: int) -> None:
        if not self.oldest <= version <= self.last:
            raise ValueError(
                f"version {version!r} is not there: {self.folder} has {self.oldest} to {self.last}"
            )

    def _load(self, root: int, blank: Mapping[str, Tensor], notes_only: bool = False) -> State:
        if root == 0:
            return State()
        return snapshots.load(self._files, self.folder, root, blank, notes_only=notes_only)

    def _change(self, state: State, record: Record, blank: Mapping[str, Tensor]) -> None:
        try:
            change(state.sources, record, blank)
        except ValueError as error:
            raise ValueError(f"record {record.sequence} in {self.folder} does not fit: {error}") from error

    # --- snapshots

    def snapshot(self, state: State | None = None, *, share: float = 1.0) -> int | None:
        """Write the newest version whole, then let go of what is older than the snapshots to keep.

        Whoever has the state of a version in memory gives it, after a `rotate` with which a segment ended
        there, and nothing has to be read again. It takes this share of the time, at most. Returns its
        version, None where there is nothing new. After an OSError everything is as before, or more is kept
        than needed.
        """
        with self._snapshotting:
            version = self.last if state is None else state.version
            if version <= self._lineage.roots[-1]:
                return None
            if state is None:
                state = self.state_at(self.journal.rotate(), share=share)
            snapshots.save(self._files, self.folder, state, self._blank(), share)
            with self._lock:
                self._lineage = self._lineage.with_roots({*self._lineage.roots, state.version})
            self._retain()
            return state.version

    def rotate(self) -> None:
        """The next commit begins a new segment: a snapshot of this version is where reading starts then."""
        self.journal.rotate()

    def _retain(self) -> None:
        """Snapshots first: none is ever without the records that follow it."""
        with self._lock:
            roots = self._lineage.needed(self._keep) | set(self._reading)
            self._lineage = self._lineage.with_roots(roots)
            while len(self._layouts) > 1 and self._layouts[1][0] <= min(roots):
                del self._layouts[0]
        leaving = [each for each in snapshots.versions(self._files, self.folder) if each not in roots]
        for version in leaving:
            self._files.unlink(snapshots.snapshot_path(self.folder, version))
        if leaving:
            self._files.fsync_folder(self.folder / "snapshots")
        self.journal.drop_before(min(roots))

    # --- closing

    def close(self) -> None:
        """Once a snapshot that is being written is done."""
        with self._snapshotting:
            self.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def layout_at(layouts: list[tuple[int, Layout | None]], version: int) -> Layout | None:
    place = bisect_right(layouts, version, key=lambda each: each[0])
    return layouts[place - 1][1] if place else None


def whole_shapes(tensors: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    whole = "whole/"
    return {
        full.removeprefix(whole): tuple(shape) for full, shape in tensors.items() if full.startswith(whole)
    }


Event = tuple[int, str, Any, dict[str, tuple[int, ...]]]
"""Version, kind, the source or the version to go back to, the shapes of whole tensors."""


class Seen:
    """What opening the journal has seen of its records."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.rollbacks: dict[int, int] = {}

    def see(self, entry: Entry) -> None:
        version, (kind, fields, tensors) = entry.end.sequence, entry.outline()
        about: Any = fields.get("to" if kind == "rollback" else "source")
        is_ours = kind in FIELDS and type(about) is (int if kind == "rollback" else str)
        if not is_ours:
            raise ValueError(f"record {version} is whole but not one of ours: {kind} {about!r}")
        if kind == "rollback":
            self.rollbacks[version] = about
        whole = whole_shapes({full: shape for full, (_, shape) in tensors.items()})
        self.events.append((version, kind, about, whole))


# --- from outside


@dataclass(frozen=True)
class StoreReport:
    """What is in a store; nothing was changed."""

    journal: journals.Report
    snapshots: dict[int, ValueError | None]  # version -> what is wrong with it
    missing: ValueError | None = None  # where the journal begins too late for any snapshot

    @property
    def damage(self) -> list[ValueError]:
        found = [self.journal.damage, *self.snapshots.values(), self.missing]
        return [error for error in found if error is not None]


def verify(folder: str | Path, *, files: Files | None = None) -> StoreReport:
    """Check every byte of journal and snapshots. Of a store in use, a record being written looks torn."""
    folder, files = Path(folder).absolute(), files or Files()
    journal = journals.verify(folder / "journal", files=files)
    found: dict[int, ValueError | None] = {}
    versions: list[int] = []
    with suppress(FileNotFoundError):  # who made the journal was killed before it made the other folder
        versions = snapshots.versions(files, folder)
    for version in versions:
        found[version] = None
        try:
            for entry in snapshots.entries(files, folder, version):
                entry.record()
        except ValueError as error:
            found[version] = error
    missing = None
    if journal.first > 1 and not any(version >= journal.first - 1 for version in versions):
        missing = ValueError(
            f"{folder}: the journal begins with record {journal.first}, and no snapshot goes before it"
        )
    return StoreReport(journal, found, missing)


def show(folder: str | Path, *, files: Files | None = None) -> Iterator[dict[str, Any]]:
    """A line for each record, oldest first, up to a torn tail: without the bytes of tensors, and without the
    fields of the source, whose names are told."""
    files = files or Files()
    for entry in Walk(files, journals.segment_paths(files, Path(folder).absolute() / "journal")):
        kind, fields, tensors = entry.outline()
        line: dict[str, Any] = {"version": entry.end.sequence, "kind": kind, **fields}
        if "fields" in fields:
            line["fields"] = sorted(fields["fields"])
        line["tensors"] = {name: [dtype, *shape] for name, (dtype, shape) in tensors.items()}
        line["bytes"] = entry.end.offset - entry.offset
        yield line
