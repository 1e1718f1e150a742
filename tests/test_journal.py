"""Journal: what is written comes back, and what was damaged is named."""

import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from disk import Disk
from hypothesis import given, settings

from attractor.serve import journal as module
from attractor.serve import segments
from attractor.serve.files import Files
from attractor.serve.journal import Journal, read, verify

FOLDER = Path("/journal")
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip
HEADER = 8 + 4 + 4 + 8 + 16 + 32  # before the identity
RECORD = 16 + 4 + 4 + 8 + 8 + 32 + 32


def opened(files, identity="base", **options):
    return Journal.open(FOLDER, identity=identity, files=files, **options)


def small_journal(sync="always"):
    """Records 1 and 2 in one segment, 3 to 5 in another, on a disk in memory."""
    disk = Disk()
    with opened(disk, sync=sync) as journal:
        for number in range(1, 6):
            if number == 3:
                journal.rotate()
            journal.append(
                "lesson", {"number": number}, {"x": torch.tensor([number])} if number % 2 else None
            )
    return disk


def pieces(disk):
    """Segment -> the (start, end) of its header and of its records, read without our code."""
    found = {}
    for name, data in sorted(disk.data().items()):
        places = [(0, struct.unpack_from("<I", data, 12)[0])]
        while places[-1][1] < len(data):
            start = places[-1][1]
            text, tensors = struct.unpack_from("<II", data, start + 16)
            places.append((start, start + RECORD + text + tensors))
        found[name] = places
    return found


def changed(disk, name, data):
    return Disk({FOLDER / other: old for other, old in (disk.data() | {name: data}).items()})


def numbers(files):
    with opened(files) as journal:
        return [record.fields["number"] for record in journal.records(journal.first - 1)]


def bits(tensor):
    return tensor.dtype, tensor.shape, tensor.contiguous().flatten().view(torch.uint8).tolist()


# --- what is written comes back

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda name: name != "__metadata__")


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    width = torch.empty(0, dtype=dtype).element_size()
    most = 2 if dtype == torch.bool else 256  # any bits, so NaN and -0.0 too
    raw = torch.randint(0, most, (*shape, width), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


RECORDS = st.tuples(
    st.text(min_size=1), st.dictionaries(st.text(), JSON, max_size=3),
    st.dictionaries(NAMES, tensors(), max_size=3),
)  # fmt: skip


@settings(max_examples=80)
@given(st.lists(RECORDS, max_size=4))
def test_records_come_back(records):
    disk = Disk()
    with opened(disk) as journal:
        for number, record in enumerate(records, 1):
            assert journal.append(*record) == number
        live = list(journal.records())
    with opened(disk) as journal:
        back = list(journal.records())
        assert journal.recovered is None
    for found in (live, back, list(read(FOLDER, files=disk))):
        assert [record.sequence for record in found] == list(range(1, len(records) + 1))
        for record, (kind, fields, values) in zip(found, records, strict=True):
            assert (record.kind, record.fields) == (kind, fields)
            assert {name: bits(value) for name, value in record.tensors.items()} == {
                name: bits(value) for name, value in values.items()
            }


def test_tensors_of_any_memory(tmp_path):
    """Views that overlap, strides, gradients: what counts are the values."""
    base = torch.arange(12.0).view(3, 4)
    given = {"a": base, "b": base, "t": base.t(), "row": base[1], "wide": torch.ones(1).expand(3),
             "learned": torch.nn.Parameter(base)}  # fmt: skip
    with Journal.open(tmp_path / "new" / "folder", identity="base") as journal:
        journal.append("lesson", {}, given)
        base.zero_()  # the record is of its own
        found = next(journal.records()).tensors
    assert torch.equal(found["t"], torch.arange(12.0).view(3, 4).t())
    assert torch.equal(found["row"], torch.arange(4.0, 8.0))
    assert found["wide"].tolist() == [1, 1, 1]
    found["a"].add_(1)  # writable


@pytest.mark.parametrize(
    ("kind", "fields", "tensors"),
    [
        ("", {}, {}), (3, {}, {}), ("x", {"a": float("nan")}, {}), ("x", {"a": (1, 2)}, {}),
        ("x", {1: 2}, {}), ("x", {"a": object()}, {}), ("x", {}, {"__metadata__": torch.ones(1)}),
        ("x", {}, {"a": 3}), ("x", {}, {"a": torch.ones(2).to_sparse()}), ("x", {"a": "b" * (1 << 24)}, {}),
        ("x", {}, {"a": torch.ones(1, device="meta")}), ("x", {}, {"\ud800": torch.ones(1)}),
    ],
)  # fmt: skip
def test_what_would_not_come_back_is_refused(kind, fields, tensors):
    disk = Disk()
    with opened(disk) as journal:
        with pytest.raises(ValueError, match=r"kind|fields|tensors"):
            journal.append(kind, fields, tensors)
        assert journal.append("fine", {}) == 1


def test_too_many_tensor_bytes_are_refused(monkeypatch):
    monkeypatch.setattr(segments, "MOST_TENSORS", 1000)
    with opened(Disk()) as journal, pytest.raises(ValueError, match="a record holds 1,000: split it"):
        journal.append("x", {}, {"a": torch.zeros(250)})


def test_the_format_byte_by_byte():
    """Against the description, with nothing of ours."""
    disk = small_journal()
    previous, expected, mark = bytes(32), 1, None
    for name, places in pieces(disk).items():
        data = disk.data()[name]
        (_, size), *records = places
        assert name == f"journal-{expected:020d}"
        assert data[:24] == b"ATTRJRNL" + struct.pack("<IIQ", 1, HEADER + len("base") + 32, expected)
        mark = mark or data[24:40]
        assert data[24:40] == mark
        assert data[40:72] == previous
        assert data[72:76] == b"base"
        assert data[76:size] == hashlib.sha256(data[:76]).digest()
        for start, end in records:
            record = data[start:end]
            text, tensors, sequence, durable = struct.unpack("<IIQQ", record[16:40])
            assert (record[:16], sequence, durable) == (mark, expected, expected - 1)
            assert record[40:72] == previous
            assert record[72:104] == hashlib.sha256(record[:72] + record[104:]).digest()
            assert json.loads(record[104 : 104 + text]) == {"kind": "lesson", "fields": {"number": sequence}}
            assert tensors == len(record) - 104 - text
            assert (tensors > 0) == sequence % 2
            previous, expected = record[72:104], expected + 1
    assert expected == 6


# --- segments, threads, processes


def test_rotation_and_dropping(tmp_path):
    journal = Journal.open(tmp_path, identity="base")
    for number in range(1, 10):
        journal.append("lesson", {"number": number})
        if number % 3 == 0:
            journal.rotate()
            journal.rotate()  # an empty segment is not followed by another
    assert sorted(os.listdir(tmp_path)) == [*(f"journal-{first:020d}" for first in (1, 4, 7, 10)), "lock"]
    for after in range(10):
        assert [record.sequence for record in journal.records(after)] == list(range(after + 1, 10))
    assert journal.drop_before(2) == 0
    assert journal.drop_before(5) == 1
    assert (journal.first, journal.last) == (4, 9)
    assert [record.sequence for record in journal.records(3)] == list(range(4, 10))
    for after in (2, 10):
        with pytest.raises(ValueError, match=f"after {after} were asked for, and .* holds 4 to 9"):
            journal.records(after)
    with pytest.raises(ValueError, match="no record 10"):
        journal.drop_before(10)
    assert journal.drop_before(9) == 2
    journal.close()
    journal.close()
    for use in (lambda: journal.append("x", {}), journal.records, journal.rotate, journal.sync):
        with pytest.raises(ValueError, match="closed"):
            use()
    with Journal.open(tmp_path, identity="base") as journal:
        assert (journal.first, journal.last, list(journal.records(9))) == (10, 9, [])
        assert journal.append("lesson", {}) == 10
    report = verify(tmp_path)
    assert (report.identity, report.first, report.last) == ("base", 10, 10)
    assert report.segments == [f"journal-{10:020d}"]
    assert report.torn is report.damage is None


@pytest.mark.parametrize("sync", ["always", "everysec", "off"])
def test_many_threads(sync, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "INTERVAL", 0.005)
    acknowledged: dict[int, tuple[int, int]] = {}
    with Journal.open(tmp_path, identity="base", sync=sync) as journal:

        def work(thread):
            for step in range(40):
                number = journal.append("lesson", {"by": [thread, step]}, {"x": torch.full((50,), step)})
                acknowledged[number] = [thread, step]
                if step % 20 == 10:
                    journal.rotate()
                if step % 20 == 15:
                    assert sum(1 for _ in journal.records(number - 1)) >= 1

        threads = [threading.Thread(target=work, args=[thread]) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(acknowledged) == list(range(1, 161))
    assert {record.sequence: record.fields["by"] for record in read(tmp_path)} == acknowledged


def test_one_at_a_time(tmp_path):
    with Journal.open(tmp_path, identity="base") as journal:
        with pytest.raises(BlockingIOError, match="open already, here or in another process"):
            Journal.open(tmp_path, identity="base")
        journal.append("lesson", {})
        assert len(list(read(tmp_path))) == 1  # to look at it is allowed
    Journal.open(tmp_path, identity="base").close()
    with pytest.raises(ValueError, match="not of 'other'"):
        Journal.open(tmp_path, identity="other")
    Journal.open(tmp_path, identity="base").close()  # a refusal keeps no lock


APPENDER = """
import os, sys
import torch
from attractor.serve.journal import Journal

for line in sys.stdin:  # a child for every line: torch is imported once
    child = os.fork()
    if child == 0:
        with Journal.open(line.strip(), identity="base") as journal:
            os.write(1, f"pid {os.getpid()}\\n".encode())
            while True:
                number = journal.append("lesson", {"next": journal.last + 1}, {"x": torch.full((2000,), 1.0)})
                os.write(1, f"{number}\\n".encode())
                if number % 50 == 0:
                    journal.rotate()
    os.waitpid(child, 0)
    os.write(1, b"gone\\n")
"""


def test_kill_9(tmp_path):
    """30 times, wherever it is: what it said it had appended is there, and at most one record more."""
    folder, chance = tmp_path / "journal", random.Random(0)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", APPENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        bufsize=1, env=environment,
    )  # fmt: skip
    acknowledged = kills = 0
    with process:
        while kills < 30 or acknowledged <= 100:
            kills += 1
            print(folder, file=process.stdin, flush=True)
            appender = int(process.stdout.readline().removeprefix("pid "))
            with pytest.raises(BlockingIOError):
                Journal.open(folder, identity="base")
            time.sleep(chance.uniform(0, 0.03))
            os.kill(appender, signal.SIGKILL)
            while (line := process.stdout.readline()) != "gone\n":
                assert int(line) == acknowledged + 1
                acknowledged += 1
            with Journal.open(folder, identity="base") as journal:
                found = [record.fields["next"] for record in journal.records()]
            assert found == list(range(1, len(found) + 1))
            assert acknowledged <= len(found) <= acknowledged + 1
            acknowledged = len(found)
        process.stdin.close()
    assert verify(folder).damage is None


def test_files_read_and_write_in_pieces(tmp_path, monkeypatch):
    """Systems may do less than was asked for."""
    whole_write, whole_read = os.pwrite, os.pread
    monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: whole_write(handle, data[:7], offset))
    monkeypatch.setattr(os, "pread", lambda handle, size, offset: whole_read(handle, min(size, 7), offset))
    handle = Files().open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    Files().write(handle, 3, bytes(range(100)))
    assert Files().read(handle, 0, 1000) == bytes(3) + bytes(range(100))
    Files().close(handle)
