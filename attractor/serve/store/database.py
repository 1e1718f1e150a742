"""The files of a store and how SQLite is set up for them.

lessons.db      everything: a record of each change, and the states that the oldest kept versions start from
snapshots.db    states that make a start or a rollback shorter; it can be deleted, and is made again
acknowledged    the newest record whose commit returned, so that its loss is noticed
lock            held by the one server that has the folder open, or by all that share it
opening         held by a server while it opens a folder that others may share
turn, next      held by the server that changes a shared store, and by the one that waits to be next
"""

import errno
import fcntl
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from attractor.files import STORE, flush
from attractor.serve.errors import StoreDamaged

LESSONS, SNAPSHOTS = STORE, "snapshots.db"
OWN = (LESSONS, SNAPSHOTS, "acknowledged", "lock", "lost+found")
"""What names in a folder may begin with before there is a store in it."""
APPLICATION = 0x41545452  # "ATTR"
FORMAT = 1
STATES = {
    "states": "CREATE TABLE states (version INTEGER PRIMARY KEY, chain TEXT NOT NULL, sha256 TEXT)",
    "parts": "CREATE TABLE parts (id INTEGER PRIMARY KEY, "
    "version INTEGER NOT NULL REFERENCES states(version) ON DELETE CASCADE, "
    "source TEXT NOT NULL, about TEXT NOT NULL, delta_sha256 TEXT, delta BLOB)",
}
"""States of versions, in parts; one without its sha256 was not finished."""
SCHEMAS = {
    LESSONS: {
        "about": "CREATE TABLE about (identity TEXT NOT NULL)",
        "records": "CREATE TABLE records (number INTEGER PRIMARY KEY, kind TEXT NOT NULL, source TEXT, "
        "target INTEGER, key TEXT, sender TEXT, content TEXT, answer TEXT NOT NULL, fields TEXT, "
        "at TEXT NOT NULL, delta_sha256 TEXT, chain TEXT NOT NULL, delta BLOB)",
        **STATES,
    },
    SNAPSHOTS: STATES,
}

Mode = Literal["ro", "rw", "rwc"]
BUSY_SECONDS = 60.0
PAUSE = 0.01
"""Seconds between two attempts to get a lock."""
LOG_PAGES = 16_384
"""Of the write-ahead log, at which a commit moves them into the database, if that was not done before."""
FAILURES = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_BUSY: errno.EAGAIN,
    sqlite3.SQLITE_LOCKED: errno.EAGAIN,
    sqlite3.SQLITE_CANTOPEN: errno.EIO,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
}
"""What the disk or the system may do; whatever else SQLite finds wrong is wrong with the file."""


@contextmanager
def sql(path: Path) -> Iterator[None]:
    """What goes wrong inside is an OSError where the disk failed, and StoreDamaged otherwise."""
    try:
        yield
    except UnicodeDecodeError as error:  # SQLite says what is wrong, in words from a damaged page
        raise StoreDamaged(path, f"it holds text that is none: {error}") from error
    except sqlite3.Error as error:
        code = FAILURES.get(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF)
        if code is None:
            raise StoreDamaged(path, str(error)) from error
        raise OSError(code, f"{os.strerror(code)} ({error})", str(path)) from error


def connect(path: Path, mode: Mode = "ro") -> sqlite3.Connection:
    """A connection for any thread; transactions begin and end where the caller says so."""
    database = sqlite3.connect(
        f"file:{quote(str(path))}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=BUSY_SECONDS,
    )
    try:
        for setting in ("foreign_keys = ON", "trusted_schema = OFF", "cell_size_check = ON"):
            database.execute(f"PRAGMA {setting}")
    except BaseException:
        database.close()
        raise
    return database


def open_writer(path: Path, synchronous: Literal["FULL", "NORMAL"]) -> sqlite3.Connection:
    """The one connection that writes. The database is made where there is none, and is checked."""
    with sql(path):
        database = connect(path, "rwc")
        try:
            if database.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
                _make(database, SCHEMAS[path.name])
                flush(path.parent)
            if (mode := database.execute("PRAGMA journal_mode = WAL").fetchone()[0]) != "wal":
                raise ValueError(f"{path} needs a file system with shared memory for WAL, not {mode!r}")
            database.execute(f"PRAGMA synchronous = {synchronous}")
            for setting in ("fullfsync = ON", "secure_delete = ON", f"wal_autocheckpoint = {LOG_PAGES}"):
                database.execute(f"PRAGMA {setting}")
            check_form(database, path)
            check_structure(database, path, quick=True)
        except BaseException:
            database.close()
            raise
    return database


@contextmanager
def reader(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that sees the database as it is now, whatever is written meanwhile."""
    with sql(path):
        database = connect(path)
    try:
        with sql(path):
            database.execute("BEGIN")
            database.execute("SELECT count(*) FROM states").fetchone()  # what it sees is fixed by this
        yield database
    finally:
        database.close()


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """All or nothing; durable when it ends, as far as `synchronous` says so."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            with suppress(sqlite3.Error):
                database.execute("ROLLBACK")
        raise


def empty_log(database: sqlite3.Connection, patience: float = BUSY_SECONDS) -> bool:
    """Move what was committed into the database and empty its write-ahead log; whether that was possible.

    So nothing stays of what was erased, or of a transaction that failed.
    """
    try:
        database.execute(f"PRAGMA busy_timeout = {round(1000 * patience)}")
        return bool(database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)
    except sqlite3.OperationalError:
        return False
    finally:
        database.execute(f"PRAGMA busy_timeout = {round(1000 * BUSY_SECONDS)}")


def _make(database: sqlite3.Connection, schema: dict[str, str]) -> None:
    with transaction(database):
        for statement in schema.values():
            database.execute(statement)
        database.execute(f"PRAGMA application_id = {APPLICATION}")
        database.execute(f"PRAGMA user_version = {FORMAT}")


def check_form(database: sqlite3.Connection, path: Path) -> None:
    """Whether this is a database of ours, in the format that this release reads."""
    (application,), (form,) = (
        database.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
    )
    with path.open("rb") as file:
        if (written := file.read(20)[18:]) not in (b"\1\1", b"\2\2"):  # else SQLite only reads it
            raise StoreDamaged(path, f"its header has {written!r} for the versions of SQLite's format")
    if application != APPLICATION:
        raise StoreDamaged(path, f"application_id is {application:#x} and not {APPLICATION:#x}")
    found = dict(database.execute("SELECT name, sql FROM sqlite_master"))
    if form > FORMAT and found != SCHEMAS[path.name]:
        raise ValueError(f"{path} has format {form} and this release reads {FORMAT}: take a newer one")
    if form != FORMAT:
        raise StoreDamaged(path, f"user_version is {form} and not {FORMAT}")
    if found != SCHEMAS[path.name]:
        raise StoreDamaged(path, "its tables are not those of a store")


def check_structure(database: sqlite3.Connection, path: Path, *, quick: bool) -> None:
    """SQLite's own check of every page."""
    found = database.execute(f"PRAGMA {'quick' if quick else 'integrity'}_check(3)").fetchall()
    if found != [("ok",)]:
        raise StoreDamaged(path, "; ".join(str(line) for (line,) in found).replace("\n", " "))


def remove(path: Path) -> None:
    """The database with the files that SQLite keeps beside it."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


# --- the folder


def check_release(folder: Path) -> None:
    """An error for the folder of an earlier release."""
    if (folder / "journal").is_dir():
        raise ValueError(
            f"{folder} holds journal/, which versions before 0.2.0 wrote and this one does not read: serve "
            "it with the version that wrote it, or give another --store and teach it all again"
        )


def make_folder(folder: Path) -> None:
    """Make the folder and its parents, all of them durable."""
    check_release(folder)
    check_alone(folder)
    missing = [place for place in [folder, *folder.parents] if not place.is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in {*missing, folder}:  # the folder itself too: who made it may have been killed
        flush(place.parent)


def check_alone(folder: Path) -> None:
    """An error where a new store would lie among other files: who wrote them may replace the whole folder."""
    if (folder / LESSONS).exists() or not folder.is_dir():
        return
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith((".", *OWN)))
    if others:
        few = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise ValueError(
            f"{folder} holds {few}, and a store needs a folder of its own: give another --store. Saved "
            "lessons are served as the model"
        )


def check_folder(folder: Path, *, shared: bool = False) -> None:
    """An error where no store could be opened in a folder; nothing is left of trying."""
    folder = folder.absolute()
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    missing = [place for place in [folder, *folder.parents] if not place.exists()]
    try:
        make_folder(folder)
        if (folder / "lock").exists():
            os.close(lock(folder, shared=shared))
        elif not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    finally:
        with suppress(OSError):  # others may have put something there
            for place in missing:
                place.rmdir()


def lock(folder: Path, *, shared: bool = False) -> int:
    """A handle that no one else can get until it is closed or its process ends; or only those who share."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not _try_lock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                f"{folder} is open already, here or in another process: close it there, or take another "
                "folder (servers of lessons can share one, if each is started with --shared)",
            )
    except BaseException:
        os.close(handle)
        raise
    return handle


def pause() -> None:
    """Wait until somebody may have let go of a lock."""
    time.sleep(PAUSE)


@contextmanager
def opening(folder: Path) -> Iterator[None]:
    """One server at a time makes or checks the files of a folder that others may share."""
    until = time.monotonic() + BUSY_SECONDS

    def wait() -> None:
        if time.monotonic() > until:
            raise BlockingIOError(errno.EWOULDBLOCK, f"another server has been opening {folder} for long")
        pause()

    with _held(folder / "opening", wait):
        yield


@contextmanager
def turn(folder: Path, wait: Callable[[], None]) -> Iterator[None]:
    """One server at a time is in here, of those that share a folder.

    While others are, `wait` is called again and again; it gives up by raising. The system ends the turn of a
    process that was killed. Who is next holds a lock of its own, so that nobody has two turns in a row while
    somebody waits.
    """
    with ExitStack() as stack:
        with _held(folder / "next", wait):
            stack.enter_context(_held(folder / "turn", wait))
        yield


@contextmanager
def _held(path: Path, wait: Callable[[], None]) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        while not _try_lock(handle, fcntl.LOCK_EX):
            wait()
        yield
    finally:
        os.close(handle)


def _try_lock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Acknowledged:
    """The newest record whose commit returned, in a file beside the database.

    SQLite takes damage in its write-ahead log for the end of it, as after a power loss, and drops what
    follows without a word. This file tells the two apart. It has two lines that are written in turn, each
    with a checksum: a write that is cut short leaves the other one.
    """

    WIDTH = 95

    def __init__(self, folder: Path) -> None:
        self.path = folder / "acknowledged"

    def read(self) -> tuple[int, str] | None:
        """Number and chain; None where there is no such file, as beside a copy that was restored."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        lines = [data[start : start + self.WIDTH] for start in range(0, len(data), self.WIDTH)]
        found = [line.split() for line in lines if len(line) == self.WIDTH and line[-9:-1] == _sum(line[:-9])]
        if not found:
            if not data.strip(b"\0"):
                return None
            raise StoreDamaged(self.path, "neither of its two lines is whole")
        number, chain, _ = max(found)
        return int(number), chain.decode()

    def write(self, number: int, chain: str, *, sync: bool = False) -> None:
        """Note a record; this is called once the record is durable.

        Usually this waits for no disk, as that would double the time of a commit. So after a power loss the
        file may name a record from some seconds before, and never one that is not there.
        """
        line = f"{number:020d} {chain} ".encode()
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            os.pwrite(handle, line + _sum(line) + b"\n", self.WIDTH * (number % 2))
            if sync:
                os.fsync(handle)
        finally:
            os.close(handle)


def _sum(line: bytes) -> bytes:
    return f"{zlib.crc32(line):08x}".encode()
