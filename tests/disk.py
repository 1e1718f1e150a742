"""A disk below SQLite that can be looked at in every moment, and that can fail.

    with Disk(folder) as disk:                # SQLite writes through it from now on
        ...
    for moment in disk.moments: ...           # after each write, sync, truncation and deletion
    moment.power_loss(target, chance)         # what may be left there: synced bytes, and some of the others

It stands between SQLite and its own files: a virtual file system that hands everything on. Bytes that were
written since the last sync of their file may be lost in any combination, sector by sector, as may truncations
and deletions. What SQLite itself assumes is assumed here too: a sector that was not written stays as it was.
"""

import ctypes
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest

from attractor.serve.store import database

SECTOR = 512
METHODS = ["xClose", "xRead", "xWrite", "xTruncate", "xSync"]


class Methods(Structure):
    _fields_ = [("iVersion", c_int), *((name, c_void_p) for name in METHODS), ("others", c_void_p * 13)]


class System(Structure):
    _fields_ = [
        ("iVersion", c_int),
        ("szOsFile", c_int),
        ("mxPathname", c_int),
        ("pNext", c_void_p),
        ("zName", c_char_p),
        ("pAppData", c_void_p),
        ("xOpen", c_void_p),
        ("xDelete", c_void_p),
        ("others", c_void_p * 14),
    ]


OPEN = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, POINTER(c_int))
DELETE = CFUNCTYPE(c_int, c_void_p, c_char_p, c_int)
CLOSE = CFUNCTYPE(c_int, c_void_p)
WRITE = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
TRUNCATE = CFUNCTYPE(c_int, c_void_p, c_int64)
SYNC = CFUNCTYPE(c_int, c_void_p, c_int)


@dataclass
class File:
    """What is surely on the disk (None: there is no such file), and what may be."""

    durable: bytes | None = None
    pending: list[tuple] = field(default_factory=list)

    def copy(self):
        return File(self.durable, list(self.pending))

    def left(self, chance):
        """After a power loss."""
        how = chance.choice(["all", "nothing", "a beginning", "any"])
        count = len(self.pending) if how != "a beginning" else chance.randrange(len(self.pending) + 1)
        data = self.durable
        for what, *about in [] if how == "nothing" else self.pending[:count]:
            if how == "any" and what != "write" and chance.random() < 0.5:
                continue
            data = changed(data, what, *about, lost=chance if how == "any" else None)
        return data


def changed(data, what, *about, lost=None):
    if what == "delete":
        return None
    data = data or b""
    if what == "truncate":
        return data[: about[0]].ljust(about[0], b"\0")
    offset, written = about
    for start in range(0, len(written), SECTOR):
        if lost is None or lost.random() < 0.5:
            piece, place = written[start : start + SECTOR], offset + start
            data = data[:place].ljust(place, b"\0") + piece + data[place + len(piece) :]
    return data


@dataclass
class Moment:
    call: str
    files: dict[str, File]
    acknowledged: list[bytes]  # what that file was up to now: nobody waits until it is on the disk
    note: object  # what the test said was promised then

    def power_loss(self, target, chance):
        target.mkdir()
        for name, file in self.files.items():
            if (data := file.left(chance)) is not None:
                (target / name).write_bytes(data)
        if self.acknowledged and chance.random() < 0.9:
            told = self.acknowledged[-1] if chance.random() < 0.5 else chance.choice(self.acknowledged)
            (target / "acknowledged").write_bytes(told)


class Disk:
    def __init__(self, folder=None, note=lambda: None):
        """Without a folder it keeps nothing in mind; it is quick all the same, as no sync is waited for."""
        self.folder, self.note = None if folder is None else Path(folder), note
        self.files, self.moments, self.acknowledged = {}, [], []
        self.calls = 0
        self.fault = lambda number, call, name: 0  # a code of SQLite's, to fail with

    def __enter__(self):
        self.before_us, SHIM.disk = SHIM.disk, self
        SHIM.use(True)
        self.patches = [
            mock.patch.object(database, "flush", self.folder_synced),
            mock.patch("os.fsync"),
        ]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()
        SHIM.disk = self.before_us
        SHIM.use(SHIM.disk is not None)

    def folder_synced(self, folder):
        """What was deleted stays so."""
        for file in self.files.values():
            while any(what == "delete" for what, *_ in file.pending):
                file.durable = changed(file.durable, *file.pending.pop(0))

    def before(self, call, name):
        self.calls += 1
        return self.fault(self.calls, call, name)

    def after(self, call, name, *about):
        file = self.files.setdefault(name, File())
        if call == "sync":
            for each in file.pending:
                file.durable = changed(file.durable, *each)
            file.pending.clear()
        else:
            file.pending.append((call, *about))
        path = self.folder / "acknowledged"
        if path.exists() and path.read_bytes() not in self.acknowledged[-1:]:
            self.acknowledged = [*self.acknowledged, path.read_bytes()]
        files = {name: file.copy() for name, file in self.files.items()}
        self.moments.append(Moment(call, files, self.acknowledged, self.note()))


class Shim:
    """The file system that SQLite is given; one for the whole process, as SQLite keeps it."""

    def __init__(self):
        import _sqlite3

        library = ctypes.CDLL(_sqlite3.__file__)  # and so the very SQLite that Python uses
        library.sqlite3_vfs_find.restype = POINTER(System)
        library.sqlite3_vfs_find.argtypes = [c_char_p]
        library.sqlite3_vfs_register.argtypes = [c_void_p, c_int]
        self.library, self.usual = library, library.sqlite3_vfs_find(None)
        self.system = System.from_buffer_copy(self.usual.contents)
        self.system.zName, self.system.pNext = b"attractor-test", None
        self.real_open, self.real_delete = (
            OPEN(self.usual.contents.xOpen),
            DELETE(self.usual.contents.xDelete),
        )
        self.disk, self.tables, self.real, self.names = None, {}, {}, {}
        self.kept = [
            OPEN(self.opened),
            DELETE(self.delete),
            CLOSE(self.close),
            WRITE(self.write),
            TRUNCATE(self.truncate),
            SYNC(self.sync),
        ]
        self.system.xOpen, self.system.xDelete = (ctypes.cast(each, c_void_p).value for each in self.kept[:2])

    def use(self, ours):
        chosen = ctypes.addressof(self.system) if ours else ctypes.cast(self.usual, c_void_p)
        assert self.library.sqlite3_vfs_register(chosen, 1) == 0

    def opened(self, system, name, file, flags, told):
        code = self.real_open(ctypes.cast(self.usual, c_void_p), name, file, flags, told)
        methods = ctypes.cast(file, POINTER(c_void_p))
        if code == 0 and methods[0] and name:
            if methods[0] not in self.tables:
                real = ctypes.cast(methods[0], POINTER(Methods)).contents
                table = Methods.from_buffer_copy(real)
                for place, each in zip(
                    ("xClose", "xWrite", "xTruncate", "xSync"), self.kept[2:], strict=True
                ):
                    setattr(table, place, ctypes.cast(each, c_void_p).value)
                calls = (CLOSE(real.xClose), WRITE(real.xWrite), TRUNCATE(real.xTruncate), SYNC(real.xSync))
                self.tables[methods[0]] = (table, calls)
            table, calls = self.tables[methods[0]]
            self.real[file], self.names[file] = calls, Path(ctypes.string_at(name).decode()).name
            methods[0] = ctypes.addressof(table)
        return code

    def around(self, call, name, work, *about):
        disk = self.disk
        if disk is not None and (code := disk.before(call, name)):
            return code
        code = work()
        if disk is not None and disk.folder is not None and code == 0:
            disk.after(call, name, *about)
        return code

    def delete(self, system, name, sync):
        def work():
            return self.real_delete(ctypes.cast(self.usual, c_void_p), name, 0)

        return self.around("delete", Path(name.decode()).name, work)

    def close(self, file):
        self.names.pop(file)
        return self.real.pop(file)[0](file)

    def write(self, file, data, size, offset):
        written = ctypes.string_at(data, size)
        work = self.real[file][1]
        return self.around("write", self.names[file], lambda: work(file, data, size, offset), offset, written)

    def truncate(self, file, size):
        return self.around("truncate", self.names[file], lambda: self.real[file][2](file, size), size)

    def sync(self, file, flags):
        return self.around("sync", self.names[file], lambda: 0)  # nothing is lost in a test but by us


try:
    SHIM = Shim()
except (AttributeError, OSError, ImportError):  # an SQLite that is a part of Python itself
    SHIM = None

needs_disk = pytest.mark.skipif(SHIM is None, reason="this Python's SQLite cannot be reached with ctypes")
