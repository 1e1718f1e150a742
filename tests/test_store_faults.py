"""A store when the power goes, the process is killed, the disk is full or fails, and when bits flip.

Nothing that was acknowledged is lost, nothing is applied twice, and damage is named.
"""

import copy
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from disk import SHIM, Disk, needs_disk
from stores import Oracle, commit, lesson, opened

from attractor.serve.errors import StoreDamaged
from attractor.serve.store import verify
from attractor.serve.store.database import Acknowledged


@pytest.fixture(autouse=True)
def no_waiting():
    """Nothing here waits for a disk: what is lost is lost by us."""
    with Disk() if SHIM is not None else nullcontext():
        yield


# --- crashes and failures


class Life:
    """Commits of every kind, snapshots and retention; what was promised is kept by an oracle."""

    def __init__(self, folder):
        self.folder, self.oracle, self.store = folder, Oracle(), None
        self.tried = None
        self.history = {0: Oracle()}  # the oracle as it was after each version: erasing changes earlier ones

    def steps(self):
        taught, back = ("lesson", 4, 1), ("rollback", 1, 1)
        first = [self.open, taught, ("lesson", 5, 2), self.snapshot, ("lesson", 7, 0), taught, self.snapshot]
        then = [back, self.snapshot, taught, ("drop", 2, 0), self.snapshot, ("lesson", 5, 5), ("erase", 1, 0)]
        return [*first, *then, ("lesson", 4, 2), self.close, self.open, taught, self.snapshot, self.close]

    def run(self, step):
        if not isinstance(step, tuple):
            step()
            return
        self.tried = step
        commit(self.store, self.oracle, *step)
        self.tried = None

    def open(self):
        self.store = opened(self.folder, keep_snapshots=2)
        self.store._records.execute("PRAGMA wal_autocheckpoint = 12")  # often enough to be seen

    def snapshot(self):
        self.store.snapshot()

    def close(self):
        self.store.close()

    def promised(self):
        return self.oracle.last, self.tried

    def check(self, folder, promised, chance):
        """Every acknowledged version is there, at most one that was being written, and work goes on."""
        acknowledged, tried = promised
        with opened(folder, keep_snapshots=2) as store:
            assert store.last in ({acknowledged, acknowledged + 1} if tried else {acknowledged})
            for version in {store.oldest, store.last, chance.randint(store.oldest, store.last)}:
                self.history[store.last].compare(store.state_at(version))
            store.commit("lesson", **lesson(source="after"))
        assert not verify(folder).damage


def lived(folder):
    """A whole life on a disk that is watched."""
    life = Life(folder)
    with Disk(folder, life.promised) as disk:
        for step in life.steps():
            life.run(step)
            life.history.setdefault(life.oracle.last, copy.deepcopy(life.oracle))
    return life, disk


@needs_disk
def test_power_loss_at_every_moment(tmp_path):
    life, disk = lived(tmp_path / "life")
    chance = random.Random(0)
    assert {moment.call for moment in disk.moments} >= {"write", "sync", "truncate", "delete"}
    checked = set()
    for number, moment in enumerate(disk.moments):
        for loss in range(3):
            folder = tmp_path / f"{number}-{loss}"
            moment.power_loss(folder, chance)
            left = tuple(sorted((path.name, path.read_bytes()) for path in folder.iterdir())), moment.note
            if left not in checked:
                checked.add(left)
                life.check(folder, moment.note, chance)
            shutil.rmtree(folder)
    assert len(checked) > 300


@needs_disk
@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_FSYNC])
def test_one_failure_at_every_call(tmp_path, code):
    """It is an OSError and nothing changed, or it did no harm; the same step works right after it."""
    calls, failures = lived(tmp_path / "first")[1].calls, 0
    for call in range(1 + code % 2, calls + 1, 8):
        life = Life(tmp_path / str(call))
        with Disk(life.folder) as disk:
            disk.fault = lambda number, *_, call=call: code if number == call else 0
            for step in life.steps():
                try:
                    life.run(step)
                except OSError as error:
                    failures += 1
                    assert error.errno in (28, 5)  # noqa: PT017
                    life.tried = None
                    if step != life.open:
                        life.oracle.compare(life.store.state_at())
                    life.run(step)
        assert not verify(life.folder).damage
        with opened(life.folder) as store:
            life.oracle.compare(store.state_at())
    assert failures > 10


@needs_disk
def test_a_disk_that_stays_full(tmp_path):
    oracle = Oracle()
    with Disk(tmp_path / "data") as disk, opened(tmp_path / "data") as store:
        commit(store, oracle, "lesson", 4, 1)
        disk.fault = lambda *_: sqlite3.SQLITE_FULL
        for kind in ("lesson", "drop", "erase", "rollback"):
            with pytest.raises(OSError, match="No space left on device"):
                commit(store, oracle, kind, 4, 1)
        with pytest.raises(OSError, match="No space left on device"):
            store.snapshot()
        oracle.compare(store.state_at())
        disk.fault = lambda *_: 0
        commit(store, oracle, "lesson", 4, 2)
        store.snapshot()
    assert not verify(tmp_path / "data").damage
    with opened(tmp_path / "data") as store:
        oracle.compare(store.state_at())


LIMITED = """
import resource, signal, sys
sys.path.insert(0, sys.argv[2])
from stores import lesson, opened
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with opened(sys.argv[1]) as store:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, -1))
    try:
        while True:
            store.commit("lesson", **lesson())
    except OSError as error:
        print(store.last, error.strerror)
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    print(store.commit("lesson", **lesson()))
"""


def test_files_that_may_not_grow(tmp_path):
    """By the system itself, as a quota does it."""
    assert hasattr(resource, "RLIMIT_FSIZE")
    command = [sys.executable, "-c", LIMITED, tmp_path / "data", Path(__file__).parent]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    last, reason, more = (
        done.stdout.replace("\n", " ", 1).partition(" ")[0],
        done.stdout,
        done.stdout.split()[-1],
    )
    assert int(last) > 10
    assert "disk" in reason
    assert int(more) == int(last) + 1
    assert verify(tmp_path / "data").last == int(more)


KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from stores import lesson, opened

for line in sys.stdin:  # a child for every line: torch is imported once
    child = os.fork()
    if child == 0:
        with opened(line.strip(), keep_snapshots=2) as store:
            os.write(1, f"pid {os.getpid()}\\n".encode())
            while True:
                number = store.commit("lesson", **lesson(fields={"next": store.last + 1}))
                os.write(1, f"{number}\\n".encode())
                if number % 20 == 0:
                    store.snapshot()
    os.waitpid(child, 0)
    os.write(1, b"gone\\n")
"""


def test_kill_9(tmp_path):
    """Wherever it is: what it said it had committed is there, and at most one record more."""
    folder, chance = tmp_path / "data", random.Random(0)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, Path(__file__).parent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    acknowledged = kills = 0
    with process:
        while kills < 25 or acknowledged <= 100:
            kills += 1
            print(folder, file=process.stdin, flush=True)
            victim = int(process.stdout.readline().removeprefix("pid "))
            with pytest.raises(BlockingIOError, match="open already, here or in another process"):
                opened(folder)
            time.sleep(chance.uniform(0, 0.05))
            os.kill(victim, signal.SIGKILL)
            while (line := process.stdout.readline()) != "gone\n":
                assert int(line) == acknowledged + 1
                acknowledged += 1
            with opened(folder, keep_snapshots=2) as store:
                assert acknowledged <= store.last <= acknowledged + 1
                acknowledged = store.last
                if acknowledged:
                    assert store.state_at().sources["kjv"].fields == {"next": acknowledged}
        process.stdin.close()
    assert not verify(folder).damage


# --- damage


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A store that was closed, with roots, snapshots, an erased source and a rollback; and the same as it was
    when it was killed, with a write-ahead log."""
    folder, oracle = tmp_path_factory.mktemp("small"), Oracle()
    store = opened(folder / "data", keep_snapshots=2)
    steps = [("lesson", 4, 1), ("lesson", 3, 1), "snapshot", ("lesson", 4, 2), ("lesson", 2, 0), "snapshot"]
    steps += [("lesson", 4, 5), ("erase", 1, 0), ("lesson", 5, 1), "snapshot", ("rollback", 1, 6)]
    for step in [*steps, ("lesson", 4, 1), ("lesson", 4, 9)]:
        if step == "snapshot":
            store.snapshot()
        else:
            commit(store, oracle, *step)
    assert store.oldest > 0
    shutil.copytree(folder / "data", folder / "killed")
    store.close()
    for name in ("data", "killed"):
        assert not verify(folder / name).damage
    assert (folder / "killed" / "lessons.db-wal").stat().st_size > 4096
    return folder, oracle


def damaged_copy(small, which, name, change, target):
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(small[0] / which, target)
    path = target / name
    path.write_bytes(change(path.read_bytes()))
    return target


def flip(bit):
    def change(data):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    return change


def is_named_or_harmless(folder, oracle):
    """True where the damage was named, False where everything is to the bit as it was."""
    try:
        with opened(folder, keep_snapshots=2) as store:
            assert store.last == oracle.last
            for version in range(store.oldest, store.last + 1):
                oracle.compare(store.state_at(version))
    except StoreDamaged as error:
        assert "lessons.db" in str(error)  # noqa: PT017
        return True
    return False


def places(small, which, name, count, seed):
    size, chance = (small[0] / which / name).stat().st_size, random.Random(seed)
    header = range(8 * 100) if name.endswith(".db") else range(8 * 32)
    return [*header[::5], *(chance.randrange(8 * size) for _ in range(count))]


@pytest.mark.parametrize(("which", "name"), [("data", "lessons.db"), ("killed", "lessons.db-wal")])
def test_a_flipped_bit_is_named_or_harmless(small, tmp_path, which, name):
    named = 0
    bits = places(small, which, name, 100, 1)
    for bit in bits:
        folder = damaged_copy(small, which, name, flip(bit), tmp_path / "copy")
        report = verify(folder)
        is_named = is_named_or_harmless(folder, small[1])
        assert not is_named or report.damage, f"a start refuses bit {bit}, and verify does not find it"
        named += bool(report.damage)
    assert named > 0.3 * len(bits)


def test_a_log_cut_short_is_named(small, tmp_path):
    """SQLite takes it for the end of what was written; the record that was acknowledged tells."""
    size = (small[0] / "killed" / "lessons.db-wal").stat().st_size
    chance = random.Random(2)
    for cut in [0, 1, 31, 32, 33, *(chance.randrange(size) for _ in range(30)), size - 1]:
        folder = damaged_copy(
            small, "killed", "lessons.db-wal", lambda data, cut=cut: data[:cut], tmp_path / "c"
        )
        report = verify(folder)
        assert is_named_or_harmless(folder, small[1]) == bool(report.damage)
        if cut < 32:
            assert "was acknowledged, and the last one here is" in str(report.damage[0])
    folder = damaged_copy(small, "killed", "lessons.db-wal", lambda data: data, tmp_path / "c")
    (folder / "lessons.db-wal").unlink()
    with pytest.raises(StoreDamaged, match="its end or its -wal file was damaged or removed"):
        opened(folder)
    (folder / "acknowledged").unlink()  # as the message says, for whoever means it
    with opened(folder) as store:
        assert store.last < small[1].last


def test_a_database_cut_short_is_named(small, tmp_path):
    size = (small[0] / "data" / "lessons.db").stat().st_size
    for cut in [0, 1, 99, 100, 512, *range(1024, size, 2048), size - 1]:
        folder = damaged_copy(
            small, "data", "lessons.db", lambda data, cut=cut: data[:cut], tmp_path / "copy"
        )
        assert verify(folder).damage
        assert is_named_or_harmless(folder, small[1])
    (folder / "lessons.db").unlink()
    with pytest.raises(StoreDamaged, match="was acknowledged, and the last one here is 0"):
        opened(folder)
    assert not (folder / "lessons.db").exists()


def test_damaged_snapshots_never_stop_a_start(small, tmp_path):
    """They are named, and the records serve every version."""
    for which, name in (("data", "snapshots.db"), ("killed", "snapshots.db-wal"), ("killed", "snapshots.db")):
        found = 0
        for bit in places(small, which, name, 80, 3)[::4]:
            folder = damaged_copy(small, which, name, flip(bit), tmp_path / "copy")
            found += bool(verify(folder).damage)
            assert not is_named_or_harmless(folder, small[1])
        assert found or name != "snapshots.db"
    for data in (b"", b"no database", bytes(5000)):
        folder = damaged_copy(small, "data", "snapshots.db", lambda _, data=data: data, tmp_path / "copy")
        assert not is_named_or_harmless(folder, small[1])


def test_a_damaged_snapshot_is_told_and_made_anew(small, tmp_path):
    folder = damaged_copy(small, "data", "snapshots.db", lambda data: data, tmp_path / "copy")
    with sqlite3.connect(folder / "snapshots.db") as database:
        database.execute("UPDATE parts SET delta = zeroblob(length(delta))")
        versions = [version for (version,) in database.execute("SELECT version FROM states")]
    database.close()
    assert versions
    with opened(folder, keep_snapshots=2) as store:
        for version in (*versions, store.last):
            small[1].compare(store.state_at(version))
        assert "snapshots were damaged, and are made anew from the records" in store.recovered
        assert str(folder) not in store.recovered
        store.snapshot()
        small[1].compare(store.state_at())
    assert not verify(folder).damage


def test_snapshots_that_are_lost_while_a_server_runs(small, tmp_path):
    folder = damaged_copy(small, "data", "snapshots.db", lambda data: data, tmp_path / "copy")
    with opened(folder, keep_snapshots=2) as store:
        for data in (bytes(12_288), b"", None):
            if data is None:
                (folder / "snapshots.db").unlink()
            else:
                (folder / "snapshots.db").write_bytes(data)
            for version in range(store.oldest, store.last + 1):
                small[1].compare(store.state_at(version))
        store.commit("lesson", **lesson(source="more"))
    with opened(folder, keep_snapshots=2) as store:
        assert store.last == small[1].last + 1
        store.snapshot()
    assert not verify(folder).damage


def test_either_line_of_what_was_acknowledged(small, tmp_path):
    size = (small[0] / "data" / "acknowledged").stat().st_size
    for bit in range(0, 8 * size, 13):
        folder = damaged_copy(small, "data", "acknowledged", flip(bit), tmp_path / "copy")
        assert not is_named_or_harmless(folder, small[1])
    for data, error in ((b"x" * size, "neither of its two lines"), (b"", None), (bytes(size), None)):
        folder = damaged_copy(small, "data", "acknowledged", lambda _, data=data: data, tmp_path / "copy")
        assert bool(verify(folder).damage) == (error is not None)
        if error:
            with pytest.raises(StoreDamaged, match=error):
                opened(folder)


REPEAT = """INSERT INTO records SELECT 11, kind, source, target, NULL, sender, content, answer, fields, at,
delta_sha256, chain, delta FROM records WHERE number = 10"""


@pytest.mark.parametrize(
    ("statement", "record"),
    [
        ("DELETE FROM records WHERE number = 5", 5),
        ("DELETE FROM records WHERE number = (SELECT max(number) FROM records)", 10),
        ("DELETE FROM records WHERE number = 1", 1),
        ("UPDATE records SET number = 100 WHERE number = 5", 5),
        ("UPDATE records SET number = 50 - number WHERE number IN (5, 45)", 5),
        ("UPDATE records SET source = 'other' WHERE number = 5", 5),
        ("UPDATE records SET kind = 'drop' WHERE number = 5", 5),
        ("UPDATE records SET answer = '{}' WHERE number = 5", 5),
        ("UPDATE records SET at = at || ' ' WHERE number = 5", 5),
        ("UPDATE records SET sender = 'bob' WHERE number = 5", 5),
        ("UPDATE records SET target = 5 WHERE kind = 'rollback'", 8),
        ("UPDATE records SET chain = (SELECT chain FROM records WHERE number = 4) WHERE number = 5", 5),
        ("UPDATE records SET delta = (SELECT delta FROM records WHERE number = 9) WHERE number = 10", 10),
        ("UPDATE records SET delta = NULL WHERE number = 10", 10),
        ("UPDATE records SET delta = CAST(delta AS TEXT) WHERE number = 10", None),
        (REPEAT, 11),
        ("UPDATE parts SET delta = NULL", None),
        ("DELETE FROM parts WHERE id = (SELECT max(id) FROM parts)", None),
        ("DELETE FROM states", None),
        ("UPDATE about SET identity = 'other'", None),
        ("PRAGMA user_version = 2", None),
        ("PRAGMA application_id = 2", None),
        ("ALTER TABLE records ADD COLUMN more", None),
    ],
)
def test_removed_repeated_moved_and_altered_records_are_named(small, tmp_path, statement, record):
    folder = damaged_copy(small, "data", "lessons.db", lambda data: data, tmp_path / "copy")
    with sqlite3.connect(folder / "lessons.db") as database:
        database.execute(statement)
    database.close()
    report = verify(folder)
    assert report.damage
    if record is not None:
        assert report.damage[0].record == record
        assert f"lessons.db, record {record}: " in str(report.damage[0])
    (folder / "snapshots.db").unlink()
    with pytest.raises(ValueError, match=r"lessons\.db|belongs to"), opened(folder) as store:
        store.state_at()


def test_what_sqlite_says_of_a_damaged_name_may_be_no_text(small, tmp_path):
    folder = damaged_copy(small, "data", "lessons.db", lambda data: data, tmp_path / "copy")
    with sqlite3.connect(folder / "lessons.db") as database:
        database.execute("PRAGMA writable_schema = ON")
        database.execute("UPDATE sqlite_master SET name = CAST(x'ff' AS TEXT) WHERE name = 'parts'")
    database.close()
    with pytest.raises(StoreDamaged, match=r"lessons\.db.*text that is none"):
        opened(folder)


def test_history_of_a_copy_that_went_its_own_way(small, tmp_path):
    """Every record is whole and every hash is right; it is not what was acknowledged here."""
    folder = damaged_copy(small, "data", "lessons.db", lambda data: data, tmp_path / "copy")
    other = damaged_copy(small, "data", "lessons.db", lambda data: data, tmp_path / "other")
    for each, source in ((folder, "ours"), (other, "theirs")):
        with opened(each) as store:
            store.commit("lesson", **lesson(source=source))
    shutil.copy(other / "lessons.db", folder / "lessons.db")
    with pytest.raises(StoreDamaged, match="not the one that was acknowledged"):
        opened(folder)


def test_a_promise_that_cannot_be_written_denies_no_commit(tmp_path, monkeypatch, caplog):
    def broken(*_, **__):
        raise OSError(5, "Input/output error")

    with opened(tmp_path) as store:
        monkeypatch.setattr(Acknowledged, "write", broken)
        assert store.commit("lesson", **lesson()) == 1
        monkeypatch.undo()
        assert "was not brought up to date" in caplog.text
    with opened(tmp_path) as store:
        assert store.last == 1
