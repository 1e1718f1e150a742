"""The bytes of a journal: segments of chained records, how they are written and how they are read.

    segment   magic 8 | format u32 | header bytes u32 | first sequence u64 | mark 16 | previous 32 | identity
              | SHA-256 of all these 32 | records
    record    mark 16 | JSON bytes u32 | tensor bytes u32 | sequence u64 | durable u64 | previous 32
              | SHA-256 of these and of the payload 32 | JSON | tensors as safetensors

Numbers are little-endian. `previous` is the SHA-256 of the record before, so no record can be removed,
repeated, moved or altered without breaking the chain. `mark` is drawn at random for every journal: no text
that is taught can contain it, and so whole records are found even behind bytes that mean nothing. `durable`
is the last record that was known to be on the disk when this one was written: it tells bytes that a power
loss may take from bytes that something else has damaged.
"""

import hashlib
import json
import math
import os
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attractor.serve.files import Files

FORMAT = 1
MAGIC = b"ATTRJRNL"
HEADER = struct.Struct("<8sIIQ16s32s")
RECORD = struct.Struct("<16sIIQQ32s")
DIGEST = 32
FIXED = RECORD.size + DIGEST
MOST_HEADER = 4096
MOST_JSON = 1 << 24
MOST_TENSORS = 1 << 30
CHUNK = 1 << 16
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip
"""By their names in safetensors."""
NAMED = {name: dtype for dtype, name in DTYPES.items()}


class JournalDamaged(ValueError):
    """Bytes of a journal are not what was written there; `path` and `offset` say where."""

    def __init__(self, path: Path, offset: int, reason: str) -> None:
        super().__init__(
            f"{path}, byte {offset}: {reason}. Nothing was changed; bring the file back from a copy, or move "
            "the folder away and start again from a snapshot"
        )
        self.path, self.offset = path, offset


class NotWhole(Exception):
    """There is no whole record where one was looked for."""


@dataclass(frozen=True)
class Place:
    """Where a chain of records stands: behind which byte, which record, and its SHA-256."""

    offset: int
    sequence: int
    chain: bytes


@dataclass(frozen=True, eq=False)
class Record:
    sequence: int
    kind: str
    fields: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Entry:
    """A whole record as it lies in a segment."""

    offset: int
    durable: int
    previous: bytes
    end: Place
    text: bytes
    tensors: memoryview

    def record(self) -> Record:
        try:
            told = json.loads(self.text)
            return Record(self.end.sequence, told["kind"], told["fields"], _unpack(self.tensors))
        except (LookupError, TypeError, ValueError, RuntimeError, struct.error) as error:
            raise ValueError(f"record {self.end.sequence} is whole but not one of ours: {error}") from error

    def outline(self) -> tuple[str, dict[str, Any], dict[str, tuple[str, list[int]]]]:
        """Kind, fields, and the types and shapes of its tensors, without their bytes."""
        told = json.loads(self.text)
        index, _ = _index_of(self.tensors)
        tensors = {name: (about["dtype"], about["shape"]) for name, about in index.items()}
        return told["kind"], told["fields"], tensors


@dataclass(frozen=True)
class Payload:
    """What a record holds, with room before it for what only its place in the chain tells.

    The bytes of tensors are copied once, to here: checksum and disk see the same, whatever becomes of them.
    """

    data: bytearray
    text_size: int

    @property
    def tensor_size(self) -> int:
        return len(self.data) - FIXED - self.text_size


def encode(kind: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Payload:
    """JSON and tensors. A ValueError for what would not come back as it is."""
    if not isinstance(kind, str) or not kind:
        raise ValueError(f"kind={kind!r} must be a word")
    told = {"kind": kind, "fields": dict(fields)}
    try:
        text = json.dumps(told, allow_nan=False, separators=(",", ":")).encode()
        if json.loads(text) != told:
            raise ValueError("JSON gives back something else (say, lists for tuples, or keys as strings)")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the fields of {kind!r} are not JSON: {error}") from error
    try:
        plain = {name: _plain(name, value) for name, value in tensors.items()}
        index = _index(plain)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the tensors of {kind!r} cannot be written: {error}") from error
    tensor_size = len(index) + sum(value.nbytes for value in plain.values())
    for what, size, most in (("fields", len(text), MOST_JSON), ("tensors", tensor_size, MOST_TENSORS)):
        if size > most:
            raise ValueError(f"the {what} of {kind!r} take {size:,} bytes; a record holds {most:,}: split it")
    data = bytearray(FIXED + len(text) + tensor_size)
    data[FIXED : FIXED + len(text) + len(index)] = text + index
    rest = np.frombuffer(data, np.uint8)[FIXED + len(text) + len(index) :]
    for name in _in_order(plain):
        raw = plain[name].flatten().view(torch.uint8).numpy()
        rest[: len(raw)] = raw
        rest = rest[len(raw) :]
    return Payload(data, len(text))


def _plain(name: str, value: Tensor) -> Tensor:
    if name == "__metadata__":
        raise ValueError("safetensors keeps the name '__metadata__' for itself")
    if value.layout != torch.strided or value.dtype not in DTYPES:
        raise ValueError(f"{name} is {value.layout} of {value.dtype}")
    return value.detach().to("cpu").contiguous()


def _in_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """As safetensors wants them: the widest first, so that all are aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def _index(tensors: Mapping[str, Tensor]) -> bytes:
    """How bytes in the format of safetensors begin: which tensor lies where."""
    if not tensors:
        return b""
    places, end = {}, 0
    for name in _in_order(tensors):
        value, start = tensors[name], end
        end += value.nbytes
        shape = list(value.shape)
        places[name] = {"dtype": DTYPES[value.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(places, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _index_of(packed: memoryview) -> tuple[dict[str, Any], int]:
    """Which tensor lies where, and where all of them begin."""
    if not packed:
        return {}, 0
    (size,) = struct.unpack_from("<Q", packed)
    return json.loads(bytes(packed[8 : 8 + size])), 8 + size


def _unpack(packed: memoryview) -> dict[str, Tensor]:
    """As safetensors' own `load`, but that copies with the interpreter locked, which stops every thread."""
    index, start = _index_of(packed)
    body = np.frombuffer(packed or b" ", np.uint8)[start:]  # numpy wants a byte
    found = {}
    for name, about in index.items():
        first, last = about["data_offsets"]
        flat = torch.empty(math.prod(about["shape"]), dtype=NAMED[about["dtype"]])
        if last - first != flat.nbytes:
            raise ValueError(f"{name} has {last - first} bytes for {about['shape']} of {about['dtype']}")
        if len(flat):
            flat.view(torch.uint8).numpy()[:] = body[first:last]
        found[name] = flat.reshape(about["shape"])
    return found


def chained(mark: bytes, place: Place, durable: int, payload: Payload) -> Place:
    """Fill in what makes the payload the record that follows a place; the place behind it."""
    data, sequence = payload.data, place.sequence + 1
    data[: RECORD.size] = RECORD.pack(
        mark, payload.text_size, payload.tensor_size, sequence, durable, place.chain
    )
    view = memoryview(data)
    digest = _digest(view[: RECORD.size], view[FIXED:])
    data[RECORD.size : FIXED] = digest
    return Place(place.offset + len(data), sequence, digest)


def entry_at(files: Files, handle: int, mark: bytes, offset: int, size: int) -> Entry:
    """The whole record at an offset of a segment of this size, whatever comes before it."""
    header = files.read(handle, offset, min(FIXED, size - offset))
    if len(header) < FIXED:
        raise NotWhole("the header of a record is cut short")
    found, text_size, tensor_size, sequence, durable, previous = RECORD.unpack_from(header)
    if found != mark:
        raise NotWhole("no record begins here")
    end = offset + FIXED + text_size + tensor_size
    if text_size > MOST_JSON or tensor_size > MOST_TENSORS or end > size:
        raise NotWhole("a record is cut short, or its length is damaged")
    payload = files.read(handle, offset + FIXED, text_size + tensor_size)
    digest = header[RECORD.size :]
    if _digest(header[: RECORD.size], payload) != digest:
        raise NotWhole("the checksum of a record is wrong")
    text, tensors = payload[:text_size], memoryview(payload)[text_size:]
    return Entry(offset, durable, previous, Place(end, sequence, digest), text, tensors)


def entries_behind(files: Files, handle: int, mark: bytes, offset: int, size: int) -> Iterator[Entry]:
    """Every whole record at or after an offset, whatever lies between them."""
    while offset < size:
        found = files.read(handle, offset, min(CHUNK, size - offset)).find(mark)
        if found < 0:
            offset += CHUNK - len(mark) + 1  # a mark may lie across two chunks
            continue
        try:
            entry = entry_at(files, handle, mark, offset + found, size)
        except NotWhole:
            offset += found + 1
        else:
            yield entry
            offset = entry.end.offset


@dataclass(frozen=True)
class Header:
    """How a segment begins."""

    first: int
    mark: bytes
    previous: bytes
    identity: str

    def to_bytes(self) -> bytes:
        identity = self.identity.encode()
        size = HEADER.size + len(identity) + DIGEST
        if not identity or size > MOST_HEADER:
            raise ValueError(f"identity={self.identity!r} must be a fingerprint, not {len(identity)} bytes")
        data = HEADER.pack(MAGIC, FORMAT, size, self.first, self.mark, self.previous) + identity
        return data + _digest(data)

    @property
    def start(self) -> Place:
        return Place(len(self.to_bytes()), self.first - 1, self.previous)

    @classmethod
    def read(cls, files: Files, handle: int, path: Path) -> "Header":
        """Every format has magic, format and size first, and the SHA-256 last: damage is not a new format."""
        data = files.read(handle, 0, HEADER.size)
        magic, version, size = struct.unpack_from("<8sII", data.ljust(HEADER.size, b"\0"))
        if magic != MAGIC or not HEADER.size + DIGEST < size <= MOST_HEADER:
            raise JournalDamaged(path, 0, "no segment of a journal begins like this")
        data = files.read(handle, 0, size)
        if len(data) < size or _digest(data[:-DIGEST]) != data[-DIGEST:]:
            raise JournalDamaged(path, 0, "the header of the segment is damaged")
        if version != FORMAT:
            raise ValueError(f"{path} has format {version} and this release reads {FORMAT}: take a newer one")
        first, mark, previous = HEADER.unpack_from(data)[3:]
        return cls(first, mark, previous, data[HEADER.size : -DIGEST].decode())


def segment_name(first: int) -> str:
    return f"journal-{first:020d}"


class Walk:
    """One pass over segments, in order: whole records, each chained to the one before.

    It ends before a torn tail and tells in `torn` what is there; anything else that is wrong is raised. Up to
    a place `known` to be good nothing can be torn, and nothing is read behind it.
    """

    def __init__(
        self, files: Files, paths: Sequence[Path], identity: str | None = None, known: Place | None = None
    ) -> None:
        self.files, self.paths, self.identity, self.known = files, paths, identity, known
        self.header: Header | None = None  # of the segment that was read last
        self.end = Place(0, 0, b"")
        self.size = 0  # of that segment; more than `end` where a tail is torn
        self.safe = self.end  # up to here the last segment was durable, by the word of its own records
        self.torn: str | None = None

    def __iter__(self) -> Iterator[Entry]:
        for path in self.paths:
            handle = self.files.open(path, os.O_RDONLY)
            try:
                header = Header.read(self.files, handle, path)
                self._check(header, path)
                self.header, self.end, self.safe = header, header.start, header.start
                is_last = path == self.paths[-1]
                self.size = self.known.offset if is_last and self.known else self.files.size(handle)
                yield from self._entries(handle, path, header.mark, is_last)
            finally:
                self.files.close(handle)

    def records(self, after: int, upto: int) -> Iterator[Record]:
        """Nothing is read behind `upto`."""
        for entry in self if after < upto else ():
            if entry.end.sequence > after:
                yield entry.record()
            if entry.end.sequence >= upto:
                return

    def _check(self, header: Header, path: Path) -> None:
        if path.name != segment_name(header.first):
            raise JournalDamaged(path, 0, f"by its header this is {segment_name(header.first)}")
        if self.header is None:
            if self.identity not in (None, header.identity):
                raise ValueError(
                    f"{path.parent} is the journal of {header.identity!r}, not of {self.identity!r}: open it "
                    "with the model and settings it was written for"
                )
            return
        if (header.mark, header.identity) != (self.header.mark, self.header.identity):
            raise JournalDamaged(path, 0, "this segment belongs to another journal")
        if (header.first, header.previous) != (self.end.sequence + 1, self.end.chain):
            reason = f"record {self.end.sequence + 1} is next, and this segment does not begin with it"
            raise JournalDamaged(path, 0, f"{reason}: a segment is missing or was replaced")

    def _entries(self, handle: int, path: Path, mark: bytes, is_last: bool) -> Iterator[Entry]:
        recent = deque([self.end])  # from the last durable record on
        while self.end.offset < self.size:
            try:
                entry = entry_at(self.files, handle, mark, self.end.offset, self.size)
            except NotWhole as why:
                if not is_last or self.known:
                    raise JournalDamaged(path, self.end.offset, str(why)) from why
                self.torn = self._torn_tail(handle, path, mark, str(why))
                return
            if (entry.end.sequence, entry.previous) != (self.end.sequence + 1, self.end.chain):
                reason = (
                    f"record {entry.end.sequence} is whole, but it is not what follows {self.end.sequence}"
                )
                raise JournalDamaged(path, self.end.offset, reason)
            self.end = entry.end
            recent.append(self.end)
            while recent[0].sequence < entry.durable:
                recent.popleft()
            self.safe = recent[0]
            yield entry

    def _torn_tail(self, handle: int, path: Path, mark: bytes, why: str) -> str:
        """What a power loss leaves of bytes that nobody was told are durable; anything else is damage."""
        lost, offset = self.end.sequence + 1, self.end.offset
        behind = 0
        for entry in entries_behind(self.files, handle, mark, offset + 1, self.size):
            if entry.durable >= lost or entry.end.sequence <= lost:
                reason = f"{why}, and record {entry.end.sequence} is whole at byte {entry.offset}"
                raise JournalDamaged(path, offset, reason)
            behind += 1
        also = f"; {behind} later records that were not durable either go with it" if behind else ""
        return f"{path.name}, byte {offset}: {self.size - offset} bytes were torn off the end ({why}){also}"


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()
