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
import os
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from attractor.serve.files import Files

FORMAT = 1
MAGIC = b"ATTRJRNL"
HEADER = struct.Struct("<8sIIQ16s32s")
RECORD = struct.Struct("<16sIIQQ32s")
DIGEST = 32
MOST_HEADER = 4096
MOST_JSON = 1 << 24
MOST_TENSORS = 1 << 30
CHUNK = 1 << 16


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
    tensors: bytes

    def record(self) -> Record:
        try:
            told = json.loads(self.text)
            tensors = load(self.tensors) if self.tensors else {}
            return Record(self.end.sequence, told["kind"], told["fields"], tensors)
        except (LookupError, TypeError, ValueError, SafetensorError) as error:
            raise ValueError(f"record {self.end.sequence} is whole but not one of ours: {error}") from error


def encode(kind: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[bytes, bytes]:
    """The payload of a record: JSON and tensors. A ValueError for what would not come back as it is."""
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
        if "__metadata__" in tensors:
            raise ValueError("safetensors keeps the name '__metadata__' for itself")
        own = {  # copies: safetensors takes neither views that overlap nor strides
            name: value.detach().to("cpu").clone(memory_format=torch.contiguous_format)
            for name, value in tensors.items()
        }
        packed = save(own) if own else b""
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"the tensors of {kind!r} cannot be written: {error}") from error
    for what, size, most in (("fields", len(text), MOST_JSON), ("tensors", len(packed), MOST_TENSORS)):
        if size > most:
            raise ValueError(f"the {what} of {kind!r} take {size:,} bytes; a record holds {most:,}: split it")
    return text, packed


def chained(mark: bytes, place: Place, durable: int, text: bytes, tensors: bytes) -> tuple[bytes, Place]:
    """The bytes of the record that follows a place, and the place behind it."""
    sequence = place.sequence + 1
    header = RECORD.pack(mark, len(text), len(tensors), sequence, durable, place.chain)
    digest = _digest(header, text, tensors)
    data = b"".join([header, digest, text, tensors])
    return data, Place(place.offset + len(data), sequence, digest)


def entry_at(files: Files, handle: int, mark: bytes, offset: int, size: int) -> Entry:
    """The whole record at an offset of a segment of this size, whatever comes before it."""
    fixed = RECORD.size + DIGEST
    header = files.read(handle, offset, min(fixed, size - offset))
    if len(header) < fixed:
        raise NotWhole("the header of a record is cut short")
    found, text_size, tensor_size, sequence, durable, previous = RECORD.unpack_from(header)
    if found != mark:
        raise NotWhole("no record begins here")
    end = offset + fixed + text_size + tensor_size
    if text_size > MOST_JSON or tensor_size > MOST_TENSORS or end > size:
        raise NotWhole("a record is cut short, or its length is damaged")
    payload = files.read(handle, offset + fixed, text_size + tensor_size)
    digest = header[RECORD.size :]
    if _digest(header[: RECORD.size], payload) != digest:
        raise NotWhole("the checksum of a record is wrong")
    text, tensors = payload[:text_size], payload[text_size:]
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

    def _check(self, header: Header, path: Path) -> None:
        if path.name != segment_name(header.first):
            raise JournalDamaged(path, 0, f"by its header this is {segment_name(header.first)}")
        if self.header is None:
            if self.identity not in (None, header.identity):
                raise ValueError(
                    f"{path.parent} is the journal of {header.identity!r}, not of {self.identity!r}: open it "
                    "with the model it was written for"
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


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()
