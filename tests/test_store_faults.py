"""A store when the power goes, the process is killed, the disk is full or fails, and when bits flip."""

import errno
import random
from functools import partial

import pytest
from disk import Disk, Killed
from test_serve_state import Oracle, few, record_for  # noqa: F401 (a fixture)
from test_store import FOLDER, commit, compare_all, opened, snapshot_names

from attractor.serve.journal import Journal, JournalDamaged
from attractor.serve.store import verify

# --- crashes and failures


class Life:
    """Commits of every kind, snapshots and retention, on a disk that may fail; what was promised is kept."""

    def __init__(self, disk):
        self.disk, self.oracle, self.store = disk, Oracle(), None
        self.tried = None

    def steps(self):
        lesson, drop, back = ("lesson", 4, 1), ("drop", 2, 0), ("rollback", 1, 1)
        return [
            self.open, lesson, self.snapshot, ("lesson", 7, 0), lesson, self.snapshot, back, self.snapshot,
            lesson, drop, self.snapshot, ("lesson", 4, 2), self.close, self.open, lesson, self.close,
        ]  # fmt: skip

    def run(self, step):
        if not isinstance(step, tuple):
            step()
            return
        self.tried = step
        commit(self.store, self.oracle, step)
        self.tried = None

    def run_all(self):
        for step in self.steps():
            self.run(step)

    def open(self):
        self.store = opened(self.disk, keep_snapshots=2)

    def snapshot(self):
        assert self.store.snapshot() == self.oracle.last

    def close(self):
        self.store.close()


CHECKED = set()


def check(disk, life):
    """It opens; every acknowledged commit is there, once; at most the one that was tried is there too.

    A disk that is to the last byte as another was, after as many of the same commits, is not asked again.
    """
    case = (disk.state(), life.oracle.last, life.tried)
    if case in CHECKED:
        return
    with opened(disk, keep_snapshots=2) as store:
        oracle = Oracle()
        oracle.versions = list(life.oracle.versions)
        if store.last == oracle.last + 1 and life.tried is not None:
            oracle.apply(*record_for(oracle, life.tried, oracle.last + 1))
        assert store.last == oracle.last
        for version in {store.oldest, store.last}:
            oracle.compare(store.state_at(version))
        assert not any(".partial" in path.name for path in disk.cache)
        assert not verify(FOLDER, files=disk).damage
        commit(store, oracle, ("lesson", 4, 1))
        assert store.snapshot() == store.last
        oracle.compare(store.state_at())
    CHECKED.add(case)


def calls_of_a_life():
    life = Life(Disk())
    life.run_all()
    return life.disk.calls


def fail_at(disk, call, error):
    disk.fault = lambda number, _: error() if number == call else None


def test_power_loss_and_kill_at_every_call():
    disks = 0
    calls = calls_of_a_life()
    for call, name in enumerate(calls):
        if name in ("read", "size", "names", "lock") and calls[call - 1] == name:
            continue  # the disk is as it was at the call before
        life = Life(Disk())
        fail_at(life.disk, call, Killed)
        with pytest.raises(Killed):
            life.run_all()
        for left in [*life.disk.power_losses(most=8), life.disk.killed()]:
            check(left, life)
            disks += 1
    assert disks > 300


def test_one_failure_at_every_call():
    """It is an OSError, the store goes on, and the same step works right after it."""
    failures, codes = [], {}
    for call, name in enumerate(calls_of_a_life()):
        if name in ("read", "size"):
            continue
        life = Life(Disk())
        codes[name] = code = errno.EIO if codes.get(name) == errno.ENOSPC else errno.ENOSPC  # in turn
        fail_at(life.disk, call, partial(OSError, code, "injected"))
        for step in life.steps():
            try:
                life.run(step)
            except OSError as error:
                failures.append((code, error.errno))
                life.tried = None
                for left in life.disk.power_losses(pieces=1, most=3):
                    check(left, life)
                if step == life.open:
                    life.run(step)
                elif step == life.close:
                    continue
                else:
                    life.oracle.compare(life.store.state_at())
                    if step == life.snapshot:
                        life.store.snapshot()  # all of it again, or what was not done of it
                    else:
                        life.run(step)
        assert not life.disk.handles
        check(life.disk, life)
    assert set(failures) == {(errno.ENOSPC, errno.ENOSPC), (errno.EIO, errno.EIO)}
    assert len(failures) > 50


def test_a_full_disk_while_a_snapshot_is_written():
    disk, oracle = Disk(), Oracle()
    store = opened(disk)
    commit(store, oracle, ("lesson", 4, 1))
    store.snapshot()
    commit(store, oracle, ("lesson", 4, 2))
    start = len(disk.calls)
    disk.fault = lambda number, name: (
        OSError(errno.ENOSPC, "no room") if name == "write" and number > start + 12 else None
    )
    for _ in range(2):
        with pytest.raises(OSError, match="no room"):
            store.snapshot()
        assert snapshot_names(disk) == [1]  # not even a part of the other
        oracle.compare(store.state_at())
    disk.fault = lambda number, name: None
    commit(store, oracle, ("lesson", 7, 1))
    assert store.snapshot() == 3
    assert snapshot_names(disk) == [1, 3]
    compare_all(store, oracle)


# --- damage


def small_store():
    """Snapshots of versions 2 and 4 on disk, and a rollback."""
    disk, oracle = Disk(), Oracle()
    with opened(disk) as store:
        for step in [("lesson", 4, 1), ("lesson", 7, 0), "snapshot", ("lesson", 4, 2), ("lesson", 2, 0),
                     "snapshot", ("lesson", 4, 0), ("lesson", 4, 1)]:  # fmt: skip
            if step == "snapshot":
                store.snapshot()
            else:
                commit(store, oracle, step)
    return disk, oracle


def flipped(disk, path, bit):
    data = bytearray(disk.cache[path].cache)
    data[bit // 8] ^= 1 << bit % 8
    return Disk({each: bytes(file.cache) for each, file in disk.cache.items()} | {path: bytes(data)})


def test_a_flipped_bit_is_refused_where_it_is_needed():
    disk, oracle = small_store()
    chance = random.Random(0)
    for version in (2, 4):
        path = FOLDER / "snapshots" / f"{version:020d}"
        size = 8 * len(disk.cache[path].cache)
        for bit in [*range(0, 8 * 120, 7), *(chance.randrange(size) for _ in range(150)), size - 1]:
            damaged = flipped(disk, path, bit)
            before = damaged.data()
            report = verify(FOLDER, files=damaged)
            assert [error.path for error in report.damage] == [path]
            assert report.damage[0].offset <= bit // 8
            assert report.snapshots[version] is report.damage[0]
            if version == 4:
                with pytest.raises(JournalDamaged, match=f"{path}, byte {report.damage[0].offset}: "):
                    opened(damaged)
                assert damaged.data() == before
                assert not damaged.handles
                continue
            with opened(damaged) as store:  # nothing of it is needed for the newest versions
                for usable in (0, 1, 4, 5, 6):
                    oracle.compare(store.state_at(usable))
                with pytest.raises(JournalDamaged, match=f"{path}, byte"):
                    store.state_at(3)


def test_any_bit_of_a_journal_is_refused_but_in_its_last_record():
    disk, oracle = small_store()
    chance = random.Random(1)
    paths = [path for path in disk.cache if path.name.startswith("journal-")]
    assert len(paths) == 3
    for path in paths:
        data = disk.cache[path].cache
        end = len(data) if path != paths[-1] else data.rindex(data[24:40])
        for _ in range(60):
            bit = chance.randrange(8 * end)
            damaged = flipped(disk, path, bit)
            with pytest.raises(JournalDamaged) as caught:
                opened(damaged)
            assert caught.value.path == path
            assert caught.value.offset <= bit // 8
            assert str(verify(FOLDER, files=damaged).damage[0]) == str(caught.value)
    torn = flipped(disk, paths[-1], 8 * len(disk.cache[paths[-1]].cache) - 1)
    with opened(torn) as store:
        assert "torn off" in store.recovered
        assert store.last == 5
        oracle.compare(store.state_at())


def test_snapshots_cut_short_or_of_another_store():
    disk, _ = small_store()
    path = FOLDER / "snapshots" / f"{4:020d}"
    data = {each: bytes(file.cache) for each, file in disk.cache.items()}
    end = data[path].rindex(data[path][24:40])
    other = small_store()[0].cache[path].cache
    for changed, offset in [
        (data[path][:end], end), (data[path][:-1], end), (b"", 0), (data[path] + b"more", len(data[path])),
        (data[path] + data[path][end:], len(data[path])), (bytes(other), 0),
        (data[path.with_name(f"{2:020d}")], 0),
    ]:  # fmt: skip
        with pytest.raises(JournalDamaged) as caught:
            opened(Disk(data | {path: changed}))
        assert (caught.value.path, caught.value.offset) == (path, offset)
    with pytest.raises(JournalDamaged, match="the journal ends at record 2: its end is missing"):
        opened(Disk({each: value for each, value in data.items() if each.name[-1:] not in "35"}))
    with pytest.raises(ValueError, match="there is no snapshot from which version 6"):
        opened(Disk({each: value for each, value in data.items() if each.name == f"journal-{5:020d}"}))
    with pytest.raises(ValueError, match="not of 'other'"):
        opened(Disk(data), identity="other")


def test_records_of_something_else():
    disk = Disk()
    with Journal.open(FOLDER / "journal", identity="base", files=disk) as journal:
        journal.append("lesson", {"number": 1})
    with pytest.raises(ValueError, match="record 1 is whole but not one of ours"):
        opened(disk)
    assert not disk.handles
