"""Damaged journals: a torn end is cut off, everything else is refused and named."""

import hashlib
import random

import pytest
import torch
from disk import Disk
from test_journal import FOLDER, changed, numbers, opened, pieces, small_journal

from attractor.serve import segments
from attractor.serve.journal import JournalDamaged, verify


def test_a_last_record_cut_at_every_byte():
    disk = small_journal()
    name, (start, end) = "journal-00000000000000000003", pieces(disk)["journal-00000000000000000003"][-1]
    for size in range(start, end):
        torn = changed(disk, name, disk.data()[name][:size])
        before = torn.data()
        report = verify(FOLDER, files=torn)
        assert torn.data() == before
        assert (report.first, report.last, report.damage) == (1, 4, None)
        with opened(torn) as journal:
            assert journal.last == 4
            if size == start:
                assert journal.recovered is report.torn is None
            else:
                assert journal.recovered == report.torn
                assert f"{name}, byte {start}: {size - start} bytes" in journal.recovered
        assert not torn.cache[FOLDER / name].pending  # the cut is durable
        with opened(torn) as journal:
            assert journal.recovered is None
            assert journal.append("lesson", {"number": "new"}) == 5
        assert numbers(torn) == [1, 2, 3, 4, "new"]


@pytest.mark.parametrize("tail", [b"\0" * 300, b"garbage", bytes(range(256)) * 600])
def test_a_tail_that_is_no_record(tail):
    disk = small_journal()
    name = "journal-00000000000000000003"
    torn = changed(disk, name, disk.data()[name] + tail)
    with opened(torn) as journal:
        assert f"{len(tail)} bytes" in journal.recovered
    assert torn.data() == disk.data()


def test_records_of_other_journals_in_a_torn_text_are_text():
    """Nobody can teach a text that keeps a journal from opening."""
    other = small_journal().data()["journal-00000000000000000003"]
    disk = small_journal()
    with opened(disk) as journal:
        journal.append(
            "lesson", {"number": 6}, {"bytes": torch.frombuffer(bytearray(other), dtype=torch.uint8)}
        )
    name = "journal-00000000000000000003"
    assert numbers(changed(disk, name, disk.data()[name][:-1])) == [1, 2, 3, 4, 5]


def test_every_bit():
    """In a header or an earlier record: refused, and named. In the last record: as if it were torn."""
    disk = small_journal()
    flips = 0
    for name, places in pieces(disk).items():
        data = disk.data()[name]
        for start, end in places:
            is_last = name.endswith("3") and end == len(data)
            for bit in range(8 * start, 8 * end):
                damaged = bytearray(data)
                damaged[bit // 8] ^= 1 << bit % 8
                other = changed(disk, name, bytes(damaged))
                if is_last:
                    with opened(other) as journal:
                        assert (journal.last, journal.recovered is None) == (4, False)
                else:
                    before = other.data()
                    with pytest.raises(JournalDamaged) as caught:
                        opened(other)
                    assert (caught.value.path.name, caught.value.offset) == (name, start)
                    assert f"{name}, byte {start}: " in str(caught.value)
                    assert other.data() == before
                assert other.largest_read <= 2 * segments.CHUNK  # a damaged length allocates nothing
                flips += 1
    assert flips > 8000


def test_some_bits_of_a_larger_journal():
    disk, chance = Disk(), random.Random(0)
    with opened(disk) as journal:
        for number in range(1, 9):
            journal.append("lesson", {"number": number}, {"x": torch.full((25_000,), float(number))})
            if number == 5:
                journal.rotate()
    for _ in range(150):
        name = chance.choice(sorted(disk.data()))
        start, end = chance.choice([*pieces(disk)[name]][: -1 if name.endswith("6") else None])
        damaged = bytearray(disk.data()[name])
        damaged[chance.randrange(start, end)] ^= 1 << chance.randrange(8)
        with pytest.raises(JournalDamaged) as caught:
            opened(changed(disk, name, bytes(damaged)))
        assert (caught.value.path.name, caught.value.offset) == (name, start)


@pytest.mark.parametrize(
    "order",
    [
        [0, 2], [1, 2], [0, 0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 1], [1, 0, 2], [0, 2, 1], [0, 1, b"garbage", 2],
        [b"garbage", 0, 1, 2], [0, b"\0" * 400, 1, 2],
    ],
)  # fmt: skip
def test_removed_repeated_and_moved_records(order):
    """Of the three records in the last segment; the damage is where the order first is another."""
    disk, name = small_journal(), "journal-00000000000000000003"
    data, ((_, size), *places) = disk.data()[name], pieces(disk)[name]
    parts = [part if isinstance(part, bytes) else data[slice(*places[part])] for part in order]
    where = next(number for number, part in enumerate(order) if part != number)
    with pytest.raises(JournalDamaged) as caught:
        opened(changed(disk, name, data[:size] + b"".join(parts)))
    assert caught.value.offset == size + sum(map(len, parts[:where]))


def test_a_record_of_a_copy_that_went_its_own_way():
    """It has the right mark, number and size, and it is whole: the chain tells."""
    disk = Disk()
    with opened(disk) as journal:
        journal.append("lesson", {"number": 1})
    copied = disk.killed()
    for each, number in ((disk, 2), (copied, 7)):
        with opened(each) as journal:
            journal.append("lesson", {"number": number})
            journal.append("lesson", {"number": 3})
    ((name, places),) = pieces(disk).items()
    (start, end), (last, _) = places[2:]
    ours, theirs = disk.data()[name], copied.data()[name]
    with pytest.raises(JournalDamaged, match="not what follows 2") as caught:
        opened(changed(disk, name, ours[:start] + theirs[start:end] + ours[end:]))
    assert caught.value.offset == last


def test_segments_that_are_missing_cut_or_of_another_journal():
    disk = small_journal()
    with opened(disk) as journal:
        journal.rotate()
        journal.append("lesson", {"number": 6})
    one, two, three = sorted(disk.data())
    files = disk.data()

    def damage(changes):
        data = {name: value for name, value in (files | changes).items() if value is not None}
        with pytest.raises(JournalDamaged) as caught:
            opened(Disk({FOLDER / name: value for name, value in data.items()}))
        return caught.value.path.name, caught.value.offset

    another = small_journal().data()
    last_of_two = pieces(disk)[two][-1][0]
    assert damage({two: None}) == (three, 0)
    assert damage({two: files[two][:last_of_two]}) == (three, 0)  # its last record is missing
    assert damage({two: files[two][:-1]}) == (two, last_of_two)  # torn, but not at the end of the journal
    assert damage({two: files[two] + b"garbage"}) == (two, len(files[two]))
    assert damage({two: another[two]}) == (two, 0)
    assert damage({one: another[one]}) == (two, 0)
    assert damage({three: files[two]}) == (three, 0)  # by its header it is not what its name says
    assert damage({one: files[one][:40]}) == (one, 0)
    assert damage({three: b""}) == (three, 0)
    assert verify(FOLDER, files=Disk({FOLDER / one: files[one], FOLDER / three: files[three]})).last == 2


def test_another_identity_and_another_format():
    disk = small_journal()
    with pytest.raises(ValueError, match="the journal of 'base', not of 'other'") as caught:
        opened(disk, identity="other")
    assert not isinstance(caught.value, JournalDamaged)
    data = bytearray(disk.data()["journal-00000000000000000001"])
    data[8] = 2
    data[76:108] = hashlib.sha256(data[:76]).digest()
    newer = changed(disk, "journal-00000000000000000001", bytes(data))
    with pytest.raises(ValueError, match="format 2 and this release reads 1") as caught:
        opened(newer)
    assert not isinstance(caught.value, JournalDamaged)
    assert "format 2" in str(verify(FOLDER, files=newer).damage)
    with pytest.raises(ValueError, match="fingerprint"):
        opened(Disk(), identity="x" * 5000)
    with pytest.raises(ValueError, match="sync='sometimes'"):
        opened(Disk(), sync="sometimes")


def test_a_bit_is_damage_once_a_later_record_knows_better():
    """Without fsync a lost write in the middle is a crash's doing until a record says it was durable."""
    disk = Disk()
    with opened(disk, sync="off") as journal:
        for number in range(1, 6):
            journal.append("lesson", {"number": number})
            if number == 3:
                journal.sync()
    ((name, places),) = pieces(disk).items()
    for number, (start, _) in enumerate(places[1:], 1):
        damaged = bytearray(disk.data()[name])
        damaged[start + 20] ^= 1
        other = changed(disk, name, bytes(damaged))
        if number <= 3:
            with pytest.raises(JournalDamaged):
                opened(other)
        else:
            assert numbers(other) == [1, 2, 3, 4][: number - 1]
    assert numbers(disk) == [1, 2, 3, 4, 5]
