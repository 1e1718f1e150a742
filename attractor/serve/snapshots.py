"""Snapshots: a state in one file, so that not every record since the base has to be read.

A file is a segment as a journal has them (see segments), under the number of its version:

    head        version; the shapes of tensors that are not blank's
    answers, history    some at a time
    source      its fields
    rows        rows of its tensors that are not blank's, at most 4 MB at a time
    end         so that a missing tail is noticed

Its header names the journal and the record that it follows. It has its name only once it is durable.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from attractor.serve.files import Files
from attractor.serve.journal import PARTIAL
from attractor.serve.segments import (
    Entry,
    Header,
    JournalDamaged,
    NotWhole,
    Record,
    chained,
    encode,
    entry_at,
    segment_name,
)
from attractor.serve.state import Shapes, SourceState, State, Tensors, check_tensors, shapes, write

Item = TypeVar("Item")

PIECE = 4 << 20
"""No call works on more bytes at once, and so none keeps other threads waiting (one row may be larger)."""
LINES = 256
SYNC_EVERY = 16 << 20
"""Bytes: one large fsync in the end would hold up those of the journal."""


def snapshot_path(folder: Path, version: int) -> Path:
    return folder / "snapshots" / f"{version:020d}"


def versions(files: Files, folder: Path) -> list[int]:
    names = files.names(folder / "snapshots")
    return sorted(int(name) for name in names if len(name) == 20 and name.isdecimal())


def header_of(files: Files, folder: Path, version: int) -> Header:
    """How the snapshot of a version begins: by the segment of the journal that goes on where it stands."""
    path = folder / "journal" / segment_name(version + 1)
    try:
        handle = files.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        reason = f"there is no {path.name} in the journal that would follow it"
        raise JournalDamaged(snapshot_path(folder, version), 0, reason) from error
    try:
        segment = Header.read(files, handle, path)
    finally:
        files.close(handle)
    return Header(1, segment.mark, segment.previous, f"snapshot {version} of {segment.identity}")


# --- writing


def paced(items: Iterable[Item], share: float) -> Iterator[Item]:
    """The same with pauses: whoever works on them takes this share of the time, and others the rest."""
    started = time.perf_counter()
    for item in items:
        yield item
        if share < 1:
            time.sleep((time.perf_counter() - started) * (1 - share) / share)
            started = time.perf_counter()


def save(files: Files, folder: Path, state: State, blank: Tensors, share: float = 1.0) -> None:
    """All or nothing. Afterwards it is durable."""
    header, path = header_of(files, folder, state.version), snapshot_path(folder, state.version)
    partial = path.with_name(PARTIAL + path.name)
    handle = files.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        try:
            files.write(handle, 0, header.to_bytes())
            place, synced = header.start, 0
            for kind, fields, tensors in paced(parts(state, blank), share):
                payload = encode(kind, fields, tensors)
                start, place = place, chained(header.mark, place, 0, payload)
                files.write(handle, start.offset, payload.data)
                if place.offset - synced > SYNC_EVERY:
                    files.fsync(handle)
                    synced = place.offset
            files.fsync(handle)
        finally:
            files.close(handle)
        files.rename(partial, path)
    except BaseException:
        with suppress(OSError):
            files.unlink(partial)  # else the next opening does it
        raise
    files.fsync_folder(path.parent)


def parts(state: State, blank: Tensors) -> Iterator[tuple[str, dict[str, Any], dict[str, Tensor]]]:
    usual = shapes(blank)
    other: dict[str, dict[str, list[int]]] = {}
    for source, own in state.sources.items():
        now = shapes(own.tensors)
        other[source] = {name: list(shape) for name, shape in now.items() if shape != usual[name]}
    yield "head", {"version": state.version, "shapes": other}, {}
    for some in grouped([list(item) for item in state.answers.items()]):
        yield "answers", {"items": some}, {}
    for some in grouped(state.history):
        yield "history", {"lines": some}, {}
    for source, own in state.sources.items():
        yield "source", {"source": source, "fields": own.fields}, {}
        for name, value in own.tensors.items():
            for tensors in pieces(name, value, blank[name]):
                yield "rows", {"source": source}, tensors
    yield "end", {}, {}


def grouped(lines: list[Any]) -> Iterator[list[Any]]:
    """Some at a time: an answer may name every patch of a large model, and a record holds only so much."""
    some: list[Any] = []
    size = 0
    for line in lines:
        own = len(json.dumps(line))
        if some and (len(some) == LINES or size + own > PIECE):
            yield some
            some, size = [], 0
        some.append(line)
        size += own
    if some:
        yield some


def pieces(name: str, value: Tensor, blank: Tensor) -> Iterator[dict[str, Tensor]]:
    """What differs from blank in a bit, in the form that lessons have."""
    is_same_shape = value.shape == blank.shape
    if value.numel() == 0 or (is_same_shape and value.dim() == 0 and raw(value).equal(raw(blank))):
        return
    if value.dim() == 0:
        yield {f"whole/{name}": value}
        return
    if is_same_shape:
        rows = (raw(value) != raw(blank)).any(1).nonzero().flatten()
    else:
        rows = torch.arange(len(value))
    count = max(1, PIECE // (value[0].nbytes + rows.element_size()))
    for some in rows.split(count) if len(rows) else ():
        yield {f"rows/{name}": some, f"values/{name}": value[some]}


def raw(value: Tensor) -> Tensor:
    """The bytes of each row: 0.0 == -0.0, and they are not the same."""
    rows = value.shape[0] if value.dim() else 1
    return value.detach().cpu().contiguous().view(rows, -1).view(torch.uint8)


# --- reading


def entries(files: Files, folder: Path, version: int) -> Iterator[Entry]:
    """The whole file, each byte checked, or as much as the caller takes; JournalDamaged says where."""
    path, expected = snapshot_path(folder, version), header_of(files, folder, version)
    handle = files.open(path, os.O_RDONLY)
    try:
        header = Header.read(files, handle, path)
        if header != expected:
            raise JournalDamaged(path, 0, "this snapshot is of another journal, or of another version")
        place, size, kind = header.start, files.size(handle), ""
        while place.offset < size or kind != "end":
            try:
                entry = entry_at(files, handle, header.mark, place.offset, size)
            except NotWhole as why:
                raise JournalDamaged(path, place.offset, str(why)) from why
            if kind == "end" or (entry.end.sequence, entry.previous) != (place.sequence + 1, place.chain):
                raise JournalDamaged(path, place.offset, "a record that does not belong here")
            place, kind = entry.end, entry.outline()[0]
            yield entry
    finally:
        files.close(handle)


def head(files: Files, folder: Path, version: int, blank: Tensors) -> dict[str, Shapes]:
    """The sources there are, and the shapes of their tensors."""
    return layout(next(entries(files, folder, version)).record(), blank)


def layout(record: Record, blank: Tensors) -> dict[str, Shapes]:
    usual = shapes(blank)
    return {
        source: usual | {name: tuple(shape) for name, shape in other.items()}
        for source, other in record.fields["shapes"].items()
    }


def load(files: Files, folder: Path, version: int, blank: Tensors, *, notes_only: bool = False) -> State:
    """What `save` wrote; only answers and history, if these are all that is wanted."""
    state, known = State(version), dict[str, Shapes]()
    for entry in entries(files, folder, version):
        record = entry.record()
        told = record.fields
        if record.kind == "head":
            known = layout(record, blank)
        elif record.kind == "answers":
            state.answers |= dict(told["items"])
        elif record.kind == "history":
            state.history += told["lines"]
        elif record.kind == "source":
            if notes_only:
                break
            state.sources[told["source"]] = shaped(known[told["source"]], told["fields"], blank)
        elif record.kind == "rows":
            check_tensors(record.tensors, known[told["source"]], blank)
            write(state.sources[told["source"]].tensors, record.tensors)
    return state


def shaped(known: Shapes, fields: dict[str, Any], blank: Tensors) -> SourceState:
    """As blank, with nothing yet in tensors that have another shape."""
    own = SourceState.fresh(blank)
    for name, shape in known.items():
        if own.tensors[name].shape != shape:
            own.tensors[name] = own.tensors[name].new_zeros(shape)
    return SourceState(own.tensors, fields)
