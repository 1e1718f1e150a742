"""Records: what made each version, and the chain that ties them together.

A record is a row of the table `records`; its number is the version that it made, and version 0 is the base
alone. Its kinds are

    lesson      source, fields, delta: what learning changed of its source, and the source's counters now
    drop        source: it is gone, and a rollback can bring it back
    erase       source: it is gone for good; its deltas were removed from the database
    rollback    target: everything is as it was at that version, without what was erased since
    calibration fields, delta: what the layer of lessons measured before it was taught anything
    nothing     source: of what it sent nothing was kept; the record is there for the answer to its key

The kind "lesson" is older than lessons that own their patches: a server of texts writes it for texts that it
learned at once. Where there are lessons, a record says in `target` which one it is about: its delta is all of
that lesson and takes the place of an earlier one, and `drop` and `erase` are of this lesson alone.

The column `chain` is the SHA-256 of everything in the row but the delta, of the delta's own SHA-256, and of
the chain of the row before. So no record can be removed, repeated, moved or altered unnoticed, and a delta
can be removed on purpose while everything can still be checked.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attractor.continual.delta import Delta
from attractor.serve.errors import StoreDamaged

KINDS = ("lesson", "drop", "erase", "rollback", "calibration", "nothing")
WITH_DELTA = ("lesson", "calibration")
CHAINED = (
    *("number", "kind", "source", "target", "key", "sender", "content"),
    *("answer", "fields", "at", "delta_sha256"),
)
"""The columns that the chain covers, in this order, after the chain of the row before."""
COLUMNS = ", ".join(CHAINED)


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a record is to say; `Store.commit` describes it."""

    kind: str
    answer: Mapping[str, Any]
    source: str | None = None
    target: int | None = None
    fields: Mapping[str, Any] | None = None
    delta: Delta | None = None
    key: str | None = None
    sender: str | None = None
    content: str | None = None
    package: bytes | None = None
    """The bytes of the delta, if they are known already."""

    def packed(self) -> bytes | None:
        return self.package if self.package is not None or self.delta is None else self.delta.to_bytes()


@dataclass(frozen=True)
class Row:
    """A record without its delta, as it lies in the database; `answer` and `fields` are JSON."""

    number: int
    kind: str
    source: str | None
    target: int | None
    key: str | None
    sender: str | None
    content: str | None
    answer: str
    fields: str | None
    at: str
    delta_sha256: str | None

    @classmethod
    def of(cls, change: Change, number: int, at: str, delta: bytes | None) -> "Row":
        """The record of a change; a ValueError for what could not be read again."""
        row = cls(
            number=number,
            kind=change.kind,
            source=change.source,
            target=change.target,
            key=change.key,
            sender=change.sender,
            content=change.content,
            answer=packed(change.answer, "the answer"),
            fields=None if change.fields is None else packed(change.fields, "fields"),
            at=at,
            delta_sha256=None if delta is None else sha256(delta),
        )
        row.check()
        return row

    def check(self) -> None:
        """A ValueError where no record of this kind can be like this."""
        if self.kind not in KINDS:
            raise ValueError(f"a record of kind {self.kind!r}; there are {', '.join(KINDS)}")
        if (self.source is None) != (self.kind in ("rollback", "calibration")) or self.source == "":
            raise ValueError(f"source={self.source!r} cannot be that of a {self.kind}")
        if self.target is not None and (self.kind in ("calibration", "nothing") or self.target < 0):
            raise ValueError(f"target={self.target!r} cannot be that of a {self.kind}")
        if (self.fields is None or self.delta_sha256 is None) == (self.kind in WITH_DELTA):
            raise ValueError(
                f"lessons and calibrations have fields and a delta, nothing else has: this is a {self.kind}"
            )

    def chain(self, before: str) -> str:
        covered = [before, *(getattr(self, name) for name in CHAINED)]
        return sha256(json.dumps(covered, separators=(",", ":")).encode())


def first_chain(identity: str) -> str:
    """What the chain of a store starts from: the base that its records belong to."""
    return sha256(identity.encode())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def packed(about: Mapping[str, Any], what: str) -> str:
    """A value as JSON; what would not come back as it is is a ValueError."""
    try:
        text = json.dumps(about, allow_nan=False, separators=(",", ":"))
        if json.loads(text) != about:
            raise ValueError("JSON gives back something else (say, lists for tuples, or keys as strings)")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON: {error}") from error
    return text


def insert(database: sqlite3.Connection, row: Row, chain: str, delta: bytes | None) -> None:
    marks = ", ".join("?" for _ in range(len(CHAINED) + 2))
    values = [*(getattr(row, name) for name in CHAINED), chain, delta]
    database.execute(f"INSERT INTO records ({COLUMNS}, chain, delta) VALUES ({marks})", values)


class Outline:
    """What the records say without their deltas, as far as it is needed all the time."""

    def __init__(self, identity: str) -> None:
        self.last, self.chain = 0, first_chain(identity)
        self.rollbacks: dict[int, int] = {}  # version -> the version that it is like, in rising order
        self.erased: dict[str, int] = {}  # source -> the version that erased it
        self.erased_lessons: dict[int, int] = {}  # number of a lesson -> the version that erased it
        self.lessons: dict[int, tuple[str, int]] = {}  # number -> source, and the newest record of it
        self.calibration: int | None = None  # its record
        self.keys: dict[str, int] = {}  # idempotency key -> the record it came with
        self.taught: dict[str, int] = {}  # source -> the newest record from which it learned
        self.taken_back = 0  # the newest version that took something back

    def add(self, row: Row, chain: str) -> None:
        self.last, self.chain = row.number, chain
        if row.key is not None:
            self.keys[row.key] = row.number
        if row.kind == "lesson":
            assert row.source is not None
            self.taught[row.source] = row.number
            if row.target is not None:
                self.lessons[row.target] = (row.source, row.number)
        elif row.kind == "calibration":
            self.calibration = row.number
        elif row.kind != "nothing":
            self.taken_back = row.number
        if row.kind == "rollback":
            assert row.target is not None
            self.rollbacks[row.number] = row.target
        if row.kind == "erase":
            assert row.source is not None
            if row.target is None:
                self.erased[row.source] = row.number
            else:
                self.erased_lessons[row.target] = row.number

    def is_erased(self, source: str, lesson: int | None, version: int) -> bool:
        """Whether what this source, or this lesson of it, had taught at a version was erased later."""
        erased = self.erased.get(source, 0)
        if lesson is not None:
            erased = max(erased, self.erased_lessons.get(lesson, 0))
        return erased > version


def walk(database: sqlite3.Connection, path: Path, outline: Outline) -> Iterator[tuple[Row, str, bool]]:
    """Add every record to an outline that it does not have yet.

    Gives each with its chain, and whether its delta is there; StoreDamaged where the chain breaks.
    """
    query = f"SELECT {COLUMNS}, chain, delta IS NOT NULL FROM records WHERE number > ? ORDER BY number"
    with closing(database.execute(query, [outline.last])) as found:
        for *values, chain, has_delta in found:
            row, expected = Row(*values), outline.last + 1
            if row.number != expected:
                raise StoreDamaged(path, f"record {expected} is missing", expected)
            try:
                is_next = row.chain(outline.chain) == chain
            except TypeError:  # a column of another type
                is_next = False
            if not is_next:
                raise StoreDamaged(
                    path, "it is not what was written, or not what followed the record before", row.number
                )
            if row.key in outline.keys or row.kind not in KINDS:
                raise StoreDamaged(path, f"kind {row.kind!r} or key {row.key!r} cannot be", row.number)
            outline.add(row, chain)
            yield row, chain, bool(has_delta)


def chain_of(database: sqlite3.Connection, number: int) -> str:
    """The chain of a record; it is empty where there is no such record."""
    found = database.execute("SELECT chain FROM records WHERE number = ?", [number]).fetchone()
    return str(found[0]) if found else ""


def check_promise(path: Path, promised: tuple[int, str] | None, chains: Sequence[str]) -> None:
    """Whether the record that was acknowledged last is here; `chains` are those of all records, in order."""
    (number, chain), last = promised or (0, ""), len(chains)
    if number > last:
        raise StoreDamaged(
            path,
            f"record {number} was acknowledged, and the last one here is {last}: its end or its -wal file "
            "was damaged or removed (if you restored an older copy on purpose, delete `acknowledged`)",
            last + 1,
        )
    if number and chains[number - 1] != chain:
        raise StoreDamaged(path, "it is not the one that was acknowledged", number)


def readable(database: sqlite3.Connection, which: str, values: list[Any]) -> Iterator[dict[str, Any]]:
    """Records as a person reads them, without their deltas but with how many bytes these take."""
    query = f"SELECT {COLUMNS}, length(delta) FROM records WHERE {which}"
    for *columns, size in database.execute(query, values):
        row = Row(*columns)
        record = {name: value for name in CHAINED if (value := getattr(row, name)) is not None}
        record |= {"answer": json.loads(row.answer)} | ({"bytes": size} if size is not None else {})
        if row.fields is not None:
            record["fields"] = json.loads(row.fields)
        yield record


def history_line(record: dict[str, Any]) -> dict[str, Any]:
    """What there is to know of a version in a list of them."""
    answer = record["answer"]
    line = {"version": record["number"], "kind": record["kind"]}
    names = {"source": "source", "target": "to" if record["kind"] == "rollback" else "lesson", "at": "at"}
    line |= {new: record[name] for name, new in names.items() if name in record}
    line |= {name: answer[name] for name in ("loss", "tokens") if isinstance(answer.get(name), int | float)}
    patches = answer.get("patches")
    if isinstance(patches, dict):
        line["patches"] = sum(len(numbers) for numbers in patches.values() if isinstance(numbers, list))
    elif isinstance(patches, int):
        line["patches"] = patches
    return line


def delta_in(path: Path, data: bytes | None, expected: str | None, record: int | None = None) -> Delta:
    """The delta that was written, or StoreDamaged."""
    if data is None:
        raise StoreDamaged(path, "its delta is missing, and was not erased", record)
    if not isinstance(data, bytes) or sha256(data) != expected:
        raise StoreDamaged(path, "its delta is not what was written", record)
    try:
        return Delta.from_bytes(data)
    except ValueError as error:
        raise StoreDamaged(path, f"its delta cannot be read: {error}", record) from error
