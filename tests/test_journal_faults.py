"""A journal when the power goes, the process is killed, the disk is full or fails: at every call."""

import errno
import resource
import time

import pytest
import torch
from disk import Disk, Killed
from test_journal import FOLDER, opened

from attractor.serve import journal as module
from attractor.serve.journal import Journal, verify


class Told:
    """What a journal has told its user."""

    tried = 0  # the last record that was handed over
    acknowledged = 0
    durable = 0
    dropped = 0


class Life:
    """Everything a journal can do, step by step."""

    def __init__(self, disk, sync, told):
        self.disk, self.sync, self.told = disk, sync, told
        self.journal = None

    def steps(self):
        return [
            self.open, self.append, self.rotate, self.append, self.append, self.rotate, self.append,
            self.append, self.finish, self.append, self.drop, self.append, self.rotate, self.append,
            self.drop, self.close, self.open, self.append, self.append, self.append, self.close,
        ]  # fmt: skip

    def open(self):
        self.journal = opened(self.disk, sync=self.sync)
        assert self.told.durable <= self.journal.last <= self.told.tried

    def append(self):
        number = self.told.tried = self.told.acknowledged + 1
        tensors = {"x": torch.tensor([number])} if number % 2 else {}
        assert self.journal.append("lesson", {"number": number}, tensors) == number
        self.told.acknowledged = number
        if self.sync == "always":
            self.told.durable = number

    def rotate(self):
        self.journal.rotate()
        self.told.durable = self.told.acknowledged

    def finish(self):
        self.journal.sync()
        self.told.durable = self.told.acknowledged

    def drop(self):
        self.told.dropped = self.told.durable
        self.journal.drop_before(self.told.durable)

    def close(self):
        self.journal.close()
        self.told.durable = self.told.acknowledged


def held(journal):
    """The numbers of the records that are there, each checked to be whole."""
    records = list(journal.records(journal.first - 1))
    for record in records:
        assert (record.kind, record.fields) == ("lesson", {"number": record.sequence})
        assert [value.tolist() for value in record.tensors.values()] == [[record.sequence]] * (
            record.sequence % 2
        )
    found = [record.sequence for record in records]
    assert found == list(range(journal.first, journal.last + 1))
    return found


CHECKED = set()


def check(disk, told):
    """Nothing durable is lost, nothing is there that was not handed over, and it goes on.

    Failures at different calls leave many a disk to the last byte as another did: one of them is enough.
    """
    case = (disk.state(), told.durable, told.tried, told.dropped)
    if case in CHECKED:
        return
    with opened(disk) as journal:
        found = held(journal)
        assert told.durable <= journal.last <= told.tried
        assert journal.first <= told.dropped + 1
        next_one = journal.append("lesson", {"number": journal.last + 1}, {})
        assert next_one == (found[-1] if found else journal.first - 1) + 1
    assert not any(name.startswith(".partial") for name in disk.data())
    report = verify(FOLDER, files=disk)
    assert (report.last, report.torn, report.damage) == (next_one, None, None)
    for left in disk.power_losses():
        assert verify(FOLDER, files=left).last == next_one
    CHECKED.add(case)


def check_losses(disk, told, pieces=2):
    for left in [*disk.power_losses(pieces), disk.killed()]:
        check(left, told)


def fail_at(disk, calls, error):
    disk.fault = lambda number, _: error() if number in calls else None


def calls_of(sync):
    disk, told = Disk(), Told()
    for step in Life(disk, sync, told).steps():
        step()
    return len(disk.calls)


def cut_short(call, sync):
    disk, told = Disk(), Told()
    fail_at(disk, {call}, Killed)
    life = Life(disk, sync, told)
    try:
        for step in life.steps():
            step()
    except Killed:
        return disk, told
    raise AssertionError(f"there is no call {call}")


@pytest.mark.parametrize("sync", ["always", "off"])
def test_power_loss_at_every_call(sync):
    """With every subset of what was not synced, and of the pieces of a write."""
    disks = 0
    for call in range(calls_of(sync)):
        disk, told = cut_short(call, sync)
        for left in disk.power_losses(pieces=8 if sync == "always" else 4):
            check(left, told)
            disks += 1
        check(disk.killed(), told)
    assert disks > 1000


def test_power_loss_while_recovering():
    """What the first power loss left, the second one does not lose."""
    disks = 0
    for call in range(calls_of("always")):
        disk, told = cut_short(call, "always")
        if disk.calls[-1] not in ("fsync", "fsync_folder"):  # where most is at stake
            continue
        for left in [*disk.power_losses(), disk.killed()]:
            trial = left.killed()
            opened(trial)
            for second in range(len(trial.calls)):
                again = left.killed()
                fail_at(again, {second}, Killed)
                with pytest.raises(Killed):
                    opened(again)
                for last in again.power_losses():
                    check(last, told)
                    disks += 1
    assert disks > 1000


def test_what_was_seen_after_a_kill_stays():
    """Opening makes durable what it shows, also if the process before had seen its fsync fail."""
    disk = Disk()
    journal = opened(disk)
    journal.append("lesson", {"number": 1}, {"x": torch.tensor([1])})
    disk.fault = lambda number, name: OSError(errno.EIO, "failed") if name in ("fsync", "truncate") else None
    with pytest.raises(OSError, match="read-only"):
        journal.append("lesson", {"number": 2})
    killed = disk.killed()
    with opened(killed) as journal:
        shown = held(journal)
    assert shown == [1, 2]  # nobody was told, and nobody was told otherwise
    for left in killed.power_losses():
        with opened(left) as journal:
            assert held(journal) == shown


@pytest.mark.parametrize(
    ("code", "stores", "again"),  # the code is only passed on: each with either value of the others
    [
        (errno.ENOSPC, False, False),
        (errno.EIO, False, True),
        (errno.EIO, True, False),
        (errno.ENOSPC, True, True),
    ],
)
@pytest.mark.parametrize("sync", ["always", "off"])
def test_one_failure_at_every_call(sync, code, stores, again):
    """It is told, nothing of the step is left, and the same step works right after it, or the next one."""
    for call in range(calls_of(sync)):
        disk, told = Disk(), Told()
        disk.failed_fsync_stores = stores
        fail_at(disk, {call}, lambda: OSError(code, "injected"))
        life, failures = Life(disk, sync, told), []
        for step in life.steps():
            try:
                step()
                if failures:
                    check_losses(disk, told, pieces=1)
            except OSError as error:
                failures.append(error)
                told.tried = told.acknowledged
                check_losses(disk, told)
                if step == life.close:
                    told.durable = told.acknowledged  # it told that it could not be sure
                    continue
                if step != life.open:
                    assert held(life.journal)[-1:] == [told.acknowledged][: told.acknowledged]
                if again or step in (life.open, life.append):
                    step()
        assert [error.errno for error in failures] == [code]
        assert "injected" in str(failures[0])
        assert not disk.handles  # nothing stays open
        assert told.acknowledged == life.steps().count(life.append)
        check_losses(disk, told)


@pytest.mark.parametrize("count", [2, 3, 10_000])
@pytest.mark.parametrize("stores", [False, True])
def test_failures_that_last(count, stores):
    """Whatever cannot be undone makes a journal read-only; it says so, it can be read, and reopened."""
    stopped = 0
    for call in range(calls_of("always")):
        disk, told = Disk(), Told()
        disk.failed_fsync_stores = stores
        fail_at(disk, range(call, call + count), lambda: OSError(errno.EIO, "injected"))
        life = Life(disk, "always", told)
        try:
            for step in life.steps():
                step()
        except OSError as error:
            disk.fault = lambda number, name: None  # the disk works again
            if step in (life.open, life.close):
                told.tried = told.acknowledged
            elif "read-only" in str(error) or "HalfMade" in repr(error):
                stopped += 1
                for _ in range(2):
                    with pytest.raises(
                        OSError, match=r"the journal is read-only, because .*: see that the disk"
                    ):
                        life.journal.append("lesson", {})
                assert held(life.journal)[-1:] == [told.acknowledged][: told.acknowledged]
                life.journal.close()
            else:
                told.tried = told.acknowledged
                assert held(life.journal)[-1:] == [told.acknowledged][: told.acknowledged]
                step()
                life.journal.close()
        check_losses(disk, told)
    assert stopped > 10


def test_a_file_that_may_not_grow(tmp_path):
    """The same with a real file, which takes a part of the record before it refuses the rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal.open(tmp_path, identity="base") as journal:
        journal.append("lesson", {"number": 1}, {"x": torch.tensor([1])})
        size = (tmp_path / f"journal-{1:020d}").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        try:
            with pytest.raises(OSError, match="record 2 was not appended: File too large; make room"):
                journal.append("lesson", {"number": 2}, {"x": torch.zeros(100_000)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (tmp_path / f"journal-{1:020d}").stat().st_size == size
        assert held(journal) == [1]
        journal.append("lesson", {"number": 2})
        assert held(journal) == [1, 2]


def wait_for(condition):
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_the_background_syncs(monkeypatch):
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    disk = Disk()
    with opened(disk, sync="everysec") as journal:
        for _ in range(2):
            journal.append("lesson", {"number": journal.last + 1}, {"x": torch.tensor([1])})
            wait_for(lambda: not any(file.pending for file in disk.cache.values()))
            syncs = disk.calls.count("fsync")
            time.sleep(0.03)
            assert disk.calls.count("fsync") == syncs  # nothing new, nothing to do
    assert journal._thread is not None
    assert not journal._thread.is_alive()


def test_a_failure_in_the_background_is_told_by_the_next_append(monkeypatch):
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    disk, told = Disk(), Told()
    life = Life(disk, "everysec", told)
    life.open()
    failures = [OSError(errno.EIO, "injected")]
    disk.fault = lambda number, name: failures.pop() if name == "fsync" and failures else None
    life.append()
    wait_for(lambda: life.journal._failure is not None)
    told.durable = 1  # it was written once more
    for left in disk.power_losses():
        check(left, told)
    with pytest.raises(OSError, match=r"syncing in the background failed: injected; .* are durable now"):
        life.append()
    told.tried = 1
    life.append()
    life.close()
    check(disk, told)


def test_a_failure_in_the_background_that_lasts(monkeypatch):
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    disk, told = Disk(), Told()
    life = Life(disk, "everysec", told)
    life.open()
    disk.fault = lambda number, name: OSError(errno.EIO, "injected") if name == "fsync" else None
    life.append()
    wait_for(lambda: life.journal._failure is not None)
    with pytest.raises(OSError, match="background failed: injected; the journal is read-only"):
        life.append()
    told.tried = 1
    for _ in range(2):
        with pytest.raises(OSError, match="read-only, because records could not be made durable"):
            life.journal.append("lesson", {})
    assert held(life.journal) == [1]
    life.journal.close()
    for left in disk.power_losses():
        check(left, told)


def test_close_tells_what_nobody_was_told(monkeypatch):
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    disk = Disk()
    journal = opened(disk, sync="everysec")
    disk.fault = lambda number, name: OSError(errno.EIO, "injected") if name == "fsync" else None
    journal.append("lesson", {"number": 1})
    wait_for(lambda: journal._failure is not None)
    with pytest.raises(OSError, match="injected"):
        journal.close()
    assert not disk.handles
