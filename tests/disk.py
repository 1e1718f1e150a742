"""A disk in memory that fails, is killed and loses power, to put under a journal.

A write reaches the cache at once and the platter with the next fsync of its file; a new, changed or removed
name with the next fsync of the folder. Until then a power loss may take any subset of them, and of a write
any part. An fsync that fails counts the pages as written all the same, as Linux does.
"""

import copy
import errno
import hashlib
import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from attractor.serve.files import Files

Write = tuple[int, bytes]
Pending = Write | int  # a write at an offset, or a new size


class Killed(BaseException):
    """The process ends here."""


class File:
    def __init__(self, data: bytes = b"") -> None:
        self.cache, self.stored = bytearray(data), bytearray(data)
        self.pending: list[Pending] = []


def change(data: bytearray, pending: Pending) -> None:
    if isinstance(pending, int):
        data[pending:] = bytes(max(0, pending - len(data)))
    else:
        offset, new = pending
        data.extend(bytes(max(0, offset - len(data))))
        data[offset : offset + len(new)] = new


def fates(pending: Pending, pieces: int) -> list[list[Pending]]:
    """What a power loss may leave of one operation: of a write, any of its pieces."""
    if isinstance(pending, int):
        return [[], [pending]]
    offset, data = pending
    cuts = [len(data) * number // pieces for number in range(pieces + 1)]
    parts = [(offset + start, data[start:end]) for start, end in itertools.pairwise(cuts)]
    return [list(kept) for count in range(pieces + 1) for kept in itertools.combinations(parts, count)]


Kept = tuple[Sequence[list[Pending]], Sequence[bool]]


def choices(ways: list[list[list[Pending]]], named: list[list[bool]], most: int | None) -> Iterator[Kept]:
    if most is None or math.prod(map(len, [*ways, *named])) <= most:
        yield from itertools.product(itertools.product(*ways), itertools.product(*named))
        return
    for pick in (lambda fates: fates[0], lambda fates: fates[-1]):
        yield [pick(way) for way in ways], [pick(flag) for flag in named]
    chance = random.Random(0)
    for _ in range(most - 2):
        yield [chance.choice(way) for way in ways], [chance.choice(flag) for flag in named]


class Disk(Files):
    def __init__(self, files: dict[Path, bytes] | None = None) -> None:
        self.cache = {path: File(data) for path, data in (files or {}).items()}
        self.stored = dict(self.cache)
        self.pending: list[dict[Path, File | None]] = []
        self.restart()

    def restart(self) -> None:
        """A new process: no handles, no locks, no faults."""
        self.handles: dict[int, File | Path] = {}
        self.calls: list[str] = []
        self.fault: Callable[[int, str], BaseException | None] = lambda number, name: None
        self.is_dead = False
        self.failed_fsync_stores = False
        self.largest_read = 0

    def data(self) -> dict[str, bytes]:
        return {path.name: bytes(file.cache) for path, file in self.cache.items()}

    def state(self) -> bytes:
        """A digest of all that a new process could find here, and lose: equal ones have the same future."""
        known = [*self.cache.values(), *self.stored.values()]
        known += [file for changed in self.pending for file in changed.values() if file is not None]
        files = list({id(file): file for file in known}.values())
        numbers = {id(file): number for number, file in enumerate(files)} | {id(None): None}
        named = [
            [(str(path), numbers[id(file)]) for path, file in names.items()]
            for names in (self.cache, self.stored, *self.pending)
        ]
        held = [(bytes(file.cache), bytes(file.stored), file.pending) for file in files]
        return hashlib.sha256(repr((named, held)).encode()).digest()

    # --- what can happen

    def killed(self) -> "Disk":
        """The process is gone, the machine is not."""
        disk = copy.deepcopy(self)
        disk.restart()
        return disk

    def power_losses(self, pieces: int = 2, most: int | None = None) -> Iterator["Disk"]:
        """Every disk that a power loss at this moment may leave, if writes are done in so many pieces.

        Where there are more than `most`: nothing of it, all of it, and others drawn at random.
        """
        known = [*self.stored.values(), *(file for changed in self.pending for file in changed.values())]
        files = list({id(file): file for file in known if file is not None}.values())
        ways = [fates(pending, pieces) for file in files for pending in file.pending]
        named = [[False, True] for _ in self.pending]
        for kept, flags in choices(ways, named, most):
            rest = iter(kept)
            left = {}
            for file in files:
                data = bytearray(file.stored)
                for _ in file.pending:
                    for pending in next(rest):
                        change(data, pending)
                left[id(file)] = bytes(data)
            names: dict[Path, File | None] = dict(self.stored)
            for flag, changed in zip(flags, self.pending, strict=True):
                names |= changed if flag else {}
            yield Disk({path: left[id(file)] for path, file in names.items() if file is not None})

    def _call(self, name: str) -> None:
        if self.is_dead:
            raise Killed
        self.calls.append(name)
        error = self.fault(len(self.calls) - 1, name)
        if error is not None:
            self.is_dead = isinstance(error, Killed)
            raise error

    # --- Files

    def make_folder(self, folder: Path) -> None:
        self._call("make_folder")

    def names(self, folder: Path) -> list[str]:
        self._call("names")
        return [path.name for path in self.cache if path.parent == folder]

    def lock(self, path: Path) -> int:
        self._call("lock")
        if path in self.handles.values():
            raise BlockingIOError(errno.EWOULDBLOCK, "is open already")
        return self._handle(path)

    def open(self, path: Path, flags: int) -> int:
        self._call("open")
        if flags & os.O_CREAT:
            self._name({path: File()})
        if path not in self.cache:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return self._handle(self.cache[path])

    def _handle(self, what: File | Path) -> int:
        handle = max(self.handles, default=0) + 1
        self.handles[handle] = what
        return handle

    def close(self, handle: int) -> None:
        if not self.is_dead:
            del self.handles[handle]

    def size(self, handle: int) -> int:
        self._call("size")
        return len(self._file(handle).cache)

    def read(self, handle: int, offset: int, size: int) -> bytes:
        self._call("read")
        self.largest_read = max(size, self.largest_read)
        return bytes(self._file(handle).cache[offset : offset + size])

    def write(self, handle: int, offset: int, data: bytes) -> None:
        try:
            self._call("write")
        except OSError:
            self._change(handle, (offset, bytes(data[: len(data) // 2])))  # that much there was room for
            raise
        self._change(handle, (offset, bytes(data)))

    def truncate(self, handle: int, size: int) -> None:
        self._call("truncate")
        self._change(handle, size)

    def fsync(self, handle: int) -> None:
        file = self._file(handle)
        try:
            self._call("fsync")
        except OSError:
            stored, file.pending = file.pending, []
            for pending in stored:
                if isinstance(pending, int) or self.failed_fsync_stores:  # sizes are in the system's journal
                    change(file.stored, pending)
            raise
        for pending in file.pending:  # not the cache: what a failed fsync gave up stays lost
            change(file.stored, pending)
        file.pending = []

    def sync_data(self, handle: int) -> None:
        self.fsync(handle)

    def fsync_folder(self, folder: Path) -> None:
        self._call("fsync_folder")
        for changed in self.pending:
            if any(path.parent == folder for path in changed):
                for path, file in changed.items():
                    if file is None:
                        self.stored.pop(path, None)
                    else:
                        self.stored[path] = file
        self.pending = [each for each in self.pending if all(path.parent != folder for path in each)]

    def rename(self, old: Path, new: Path) -> None:
        self._call("rename")
        self._name({old: None, new: self.cache[old]})

    def unlink(self, path: Path) -> None:
        self._call("unlink")
        self._name({path: None})

    def _name(self, changed: dict[Path, File | None]) -> None:
        self.pending.append(changed)
        for path, file in changed.items():
            if file is None:
                del self.cache[path]
            else:
                self.cache[path] = file

    def _file(self, handle: int) -> File:
        file = self.handles[handle]
        assert isinstance(file, File)
        return file

    def _change(self, handle: int, pending: Pending) -> None:
        file = self._file(handle)
        change(file.cache, pending)
        file.pending.append(pending)
