"""An append-only journal of what lessons did: acknowledged is durable.

    with Journal.open(folder, identity=fingerprint(model)) as journal:
        for record in journal.records(after=snapshot):    # what happened since a snapshot
            ...
        number = journal.append("lesson", {"source": "kjv"}, {"rows": rows})
        journal.rotate(); journal.drop_before(snapshot)   # once a newer snapshot holds it

When `append` returns, the record is on the disk (sync="always"), will be within a second ("everysec"), or
when the system gets to it ("off"). After a crash the journal opens with every record that was durable and a
beginning of those that were not; what it had to cut off it tells in `recovered`. Damage that no crash
explains is never repaired in silence: JournalDamaged. Records are numbered from 1. A last record or a last
segment that is taken away whole leaves no trace: `records` compares with the number of a snapshot instead.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

from torch import Tensor

from attractor.config import check_choice
from attractor.serve.files import Files
from attractor.serve.segments import (
    DIGEST,
    Entry,
    Header,
    JournalDamaged,
    NotWhole,
    Record,
    Walk,
    chained,
    encode,
    entry_at,
    segment_name,
)

__all__ = ["Journal", "JournalDamaged", "Record", "Report", "read", "verify"]

SyncName = Literal["always", "everysec", "off"]
Seen = Callable[[Entry], None]
INTERVAL = 1.0
PARTIAL = ".partial-"


class Journal:
    """Safe to use from several threads. One process at a time has it open."""

    recovered: str | None  # what opening had to cut off

    def __init__(
        self, folder: Path, identity: str, sync: SyncName, files: Files, lock: int, seen: Seen | None = None
    ) -> None:
        """Use `open`."""
        self.folder, self.identity, self.policy = folder, identity, sync
        self._files, self._folder_lock = files, lock
        self._lock = threading.Lock()
        self._read_only: str | None = None  # why, if it is
        self._failure: OSError | None = None  # of the background, not yet told
        self._closing = threading.Event()
        self._recover(seen)
        self._thread: threading.Thread | None = None
        if sync == "everysec":
            self._thread = threading.Thread(target=self._sync_every_second, name="journal", daemon=True)
            self._thread.start()

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        identity: str,
        sync: SyncName = "always",
        files: Files | None = None,
        seen: Seen | None = None,
    ) -> Self:
        """Make a journal or recover one. `identity` names what its records belong to, say a base model.

        Opening reads every record; `seen` is called with each.
        """
        check_choice("sync", sync, get_args(SyncName))
        folder, files = Path(folder).absolute(), files or Files()
        files.make_folder(folder)
        lock = files.lock(folder / "lock")
        try:
            return cls(folder, identity, sync, files, lock, seen)
        except BaseException:
            files.close(lock)
            raise

    def _recover(self, seen: Seen | None) -> None:
        files = self._files
        for name in files.names(self.folder):
            if name.startswith(PARTIAL):  # a segment that a kill left before it had its name
                files.unlink(self.folder / name)
        if not segment_paths(files, self.folder):
            begin = Header(1, os.urandom(16), bytes(DIGEST), self.identity)
            files.close(make_segment(files, self.folder, begin))
        paths = segment_paths(files, self.folder)
        walk = Walk(files, paths, self.identity)
        for entry in walk:
            if seen is not None:
                seen(entry)
        assert walk.header is not None, "there is a segment"
        files.fsync_folder(self.folder)  # who gave the last segment its name may have been killed
        self._mark = walk.header.mark
        self._firsts = [int(path.name[-20:]) for path in paths]
        self._end, self._synced = walk.end, walk.safe
        self._handle = files.open(paths[-1], os.O_RDWR)
        try:
            if walk.torn:
                files.truncate(self._handle, self._end.offset)
            self._write_again()
        except BaseException:
            files.close(self._handle)
            raise
        self.recovered = walk.torn

    # --- writing

    def append(
        self, kind: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> int:
        """The number of the new record. If this raises, there is no such record.

        One exception: where the journal became read-only, the record could not be taken back for sure. Then
        the next `open` finds it whole or cuts it off.
        """
        payload = encode(kind, fields, tensors or {})
        with self._lock:
            self._check_writable()
            end = chained(self._mark, self._end, self._synced.sequence, payload)
            try:
                self._files.write(self._handle, self._end.offset, payload.data)
                if self.policy == "always":
                    self._files.sync_data(self._handle)
                    self._synced = end
                self._end = end
            except BaseException as error:
                self._cut()
                if not isinstance(error, OSError):
                    raise
                reason = self._read_only or "make room or repair the disk, then append it again"
                message = f"record {end.sequence} was not appended: {error.strerror}; {reason}"
                raise OSError(error.errno, message, str(self.folder)) from error
            return end.sequence

    def _cut(self) -> None:
        """Nothing of a failed append stays.

        When records are promised to be durable, so is the cut: the bytes of a record whose fsync failed may
        be on the disk all the same, and would be back after a power loss.
        """
        if self._synced.sequence > self._end.sequence:
            self._synced = self._end
        try:
            self._files.truncate(self._handle, self._end.offset)
            if self.policy == "always":
                self._files.fsync(self._handle)
        except OSError as error:
            self._stop("a failed append could not be undone", error)

    def sync(self) -> None:
        """Every record so far is durable when this returns. To be called before a snapshot names a record."""
        with self._lock:
            self._check_writable()
            self._sync()

    def _sync(self) -> None:
        if self._synced == self._end:
            return
        try:
            self._files.fsync(self._handle)
            self._synced = self._end
        except OSError:
            try:
                self._write_again()
            except (OSError, NotWhole) as error:
                self._stop("records could not be made durable", error)
            raise

    def _write_again(self) -> None:
        """Make records durable of which we do not know whether they are.

        After a failed fsync a system may count its pages as written and call the next fsync a success. So
        the records since the last good one are read back, checked, written once more and only then synced.
        The same when a journal is opened: we do not know what its last process saw.
        """
        place = self._synced
        while place.offset < self._end.offset:
            entry = entry_at(self._files, self._handle, self._mark, place.offset, self._end.offset)
            if entry.previous != place.chain:
                raise NotWhole(f"record {entry.end.sequence} is not what was written")
            size = entry.end.offset - place.offset
            self._files.write(self._handle, place.offset, self._files.read(self._handle, place.offset, size))
            place = entry.end
        self._files.fsync(self._handle)
        self._synced = self._end

    def _sync_every_second(self) -> None:
        while not self._closing.wait(INTERVAL):
            with self._lock:
                try:
                    if self._read_only is None:
                        self._sync()
                except OSError as error:
                    self._failure = error

    def _stop(self, what: str, error: Exception) -> None:
        self._read_only = (
            f"the journal is read-only, because {what} ({error}): see that the disk works, then open it again"
        )

    def _check_writable(self) -> None:
        if self._closing.is_set():
            raise ValueError(f"the journal in {self.folder} is closed")
        self._tell_failure()
        if self._read_only is not None:
            raise OSError(errno.EROFS, self._read_only, str(self.folder))

    def _tell_failure(self) -> None:
        """An error of the background, once."""
        error, self._failure = self._failure, None
        if error is not None:
            state = self._read_only or "the records before were written again and are durable now"
            message = f"nothing was done, because syncing in the background failed: {error.strerror}; {state}"
            raise OSError(error.errno, message, str(self.folder)) from error

    # --- segments

    def rotate(self) -> int:
        """The next record begins a new segment; everything before it is durable, whatever the policy.

        Returns the number of the last record before it.
        """
        with self._lock:
            self._check_writable()
            if self._end.sequence < self._firsts[-1]:
                return self._end.sequence  # the last segment is empty
            self._sync()
            header = Header(self._end.sequence + 1, self._mark, self._end.chain, self.identity)
            try:
                handle = make_segment(self._files, self.folder, header)
            except HalfMade as error:
                self._stop("a new segment could not be taken back", error)
                raise
            full = self._handle
            self._handle, self._end, self._synced = handle, header.start, header.start
            self._firsts.append(header.first)
            self._files.close(full)
            return header.first - 1

    def drop_before(self, sequence: int) -> int:
        """Delete segments that hold only records up to this one, never the last segment; how many."""
        with self._lock:
            self._check_writable()
            if sequence > self._end.sequence:
                raise ValueError(f"there is no record {sequence} in {self.folder}: it ends at {self.last}")
            before = len(self._firsts)
            while len(self._firsts) > 1 and self._firsts[1] <= sequence + 1:
                # One by one: a crash must not bring back a segment that is older than a lost one.
                self._files.fsync_folder(self.folder)
                self._files.unlink(self.folder / segment_name(self._firsts[0]))
                del self._firsts[0]
            if len(self._firsts) < before:
                self._files.fsync_folder(self.folder)
            return before - len(self._firsts)

    # --- reading

    @property
    def first(self) -> int:
        """The number of the oldest record that is kept, or of the next one where there is none."""
        return self._firsts[0]

    @property
    def last(self) -> int:
        """The number of the newest record."""
        return self._end.sequence

    @property
    def nbytes(self) -> int:
        """Of all segments; one that is dropped meanwhile counts or not."""
        size = 0
        for path in segment_paths(self._files, self.folder):
            with suppress(FileNotFoundError):
                size += path.stat().st_size
        return size

    def records(self, after: int = 0, upto: int | None = None) -> Iterator[Record]:
        """Those after this number, as far as there are now; a ValueError if some of them were dropped."""
        with self._lock:
            if self._closing.is_set():
                raise ValueError(f"the journal in {self.folder} is closed")
            firsts, end = list(self._firsts), self._end
        if not firsts[0] - 1 <= after <= end.sequence:
            raise ValueError(
                f"records after {after} were asked for, and {self.folder} holds {firsts[0]} to "
                f"{end.sequence}: the snapshot and the journal do not belong together"
            )
        paths = [self.folder / segment_name(first) for first in firsts]
        start = max(number for number, first in enumerate(firsts) if first <= after + 1)
        walk = Walk(self._files, paths[start:], known=end)
        return walk.records(after, end.sequence if upto is None else upto)

    # --- closing

    def close(self) -> None:
        """Make everything durable and let others open it. Tells what the background has not told yet."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            try:
                if self._read_only is None:
                    self._sync()
            finally:
                self._files.close(self._handle)
                self._files.close(self._folder_lock)
            self._tell_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class HalfMade(OSError):
    """A new segment has its name, not durably, and it could not be taken away."""


def make_segment(files: Files, folder: Path, header: Header) -> int:
    """A handle on a segment that is there, whole and durable; nothing is there if this raises OSError."""
    path = folder / segment_name(header.first)
    partial = folder / (PARTIAL + path.name)
    data = header.to_bytes()
    handle = files.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        files.write(handle, 0, data)
        files.fsync(handle)
        try:
            files.rename(partial, path)
            files.fsync_folder(folder)
        except BaseException:
            # Were it there after a crash, it would contradict records that went on in the segment before.
            try:
                if path.name in files.names(folder):
                    files.unlink(path)
                    files.fsync_folder(folder)
            except OSError as error:
                raise HalfMade(
                    error.errno, f"{error.strerror}; see that the disk works", str(path)
                ) from error
            raise
    except BaseException:
        files.close(handle)
        raise
    return handle


def segment_paths(files: Files, folder: Path) -> list[Path]:
    names = [name for name in files.names(folder) if name.startswith("journal-")]
    return [folder / name for name in sorted(names)]


@dataclass(frozen=True)
class Report:
    """What is in a journal; up to the damage, if there is any."""

    identity: str | None
    segments: list[str]
    first: int
    last: int
    torn: str | None  # what opening would cut off
    damage: ValueError | None  # why opening refuses


def verify(folder: str | Path, *, files: Files | None = None) -> Report:
    """Check every byte and change none. Of a journal in use, a record that is being written looks torn."""
    files = files or Files()
    paths = segment_paths(files, Path(folder))
    walk, damage = Walk(files, paths), None
    count = 0
    try:
        for _ in walk:
            count += 1
    except ValueError as error:
        damage = error
    identity = walk.header.identity if walk.header else None
    last = walk.end.sequence
    return Report(identity, [path.name for path in paths], last - count + 1, last, walk.torn, damage)


def read(folder: str | Path, *, files: Files | None = None) -> Iterator[Record]:
    """The records of a journal that nobody needs to have open, up to a torn tail; damage is raised."""
    files = files or Files()
    walk: Iterator[Entry] = iter(Walk(files, segment_paths(files, Path(folder))))
    return (entry.record() for entry in walk)
