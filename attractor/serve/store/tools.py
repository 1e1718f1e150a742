"""Looking at a store from outside, also while a server has it open: nothing of it is changed."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attractor.files import write_folder
from attractor.serve.errors import StoreDamaged
from attractor.serve.store import states
from attractor.serve.store.database import (
    LESSONS,
    SNAPSHOTS,
    Acknowledged,
    check_form,
    check_release,
    check_structure,
    reader,
    sql,
)
from attractor.serve.store.records import WITH_DELTA, Outline, check_promise, delta_in, readable, walk


@dataclass
class Report:
    """What is in a store, and what is wrong with it."""

    identity: str | None = None
    last: int = 0
    oldest: int = 0
    erased: list[str] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)
    damage: list[ValueError] = field(default_factory=list)


def lessons_in(folder: str | Path) -> Path:
    path = Path(folder).absolute() / LESSONS
    if not path.is_file():
        if path.parent.is_dir():
            check_release(path.parent)
        raise ValueError(f"{folder} holds no {LESSONS}: it is not the data folder of a server")
    return path


@contextmanager
def _noted(report: Report) -> Iterator[None]:
    """Damage found inside goes into the report."""
    try:
        yield
    except StoreDamaged as error:
        report.damage.append(error)


def verify(folder: str | Path) -> Report:
    """Check every page, record, delta and state."""
    path, report = lessons_in(folder), Report()
    chains: dict[int, str] = {}
    outline, promised = Outline(""), None
    with _noted(report):
        promised = Acknowledged(path.parent).read()  # first: a server may go on meanwhile
    with _noted(report), sql(path), reader(path) as database:
        check_structure(database, path, quick=False)
        check_form(database, path)
        report.identity = "".join(name for (name,) in database.execute("SELECT identity FROM about"))
        report.oldest = min(states.versions(database), default=0)
        outline = Outline(report.identity)
        rows = list(walk(database, path, outline))
        chains |= {row.number: chain for row, chain, _ in rows}
        report.last = outline.last
        report.erased = [*sorted(outline.erased), *(f"lesson {n}" for n in sorted(outline.erased_lessons))]
        with _noted(report):
            check_promise(path, promised, list(chains.values()))
        for row, _, has_delta in rows:
            is_old = row.number <= report.oldest and row.kind == "lesson"
            is_gone = is_old or outline.is_erased(row.source or "", row.target, row.number)
            if row.kind in WITH_DELTA and (has_delta or not is_gone):
                with _noted(report), sql(path):
                    query = "SELECT delta, delta_sha256 FROM records WHERE number = ?"
                    data, expected = database.execute(query, [row.number]).fetchone()
                    delta_in(path, data, expected, row.number)
        _check_states(report, database, path, chains, outline)
    snapshots = path.with_name(SNAPSHOTS)
    if snapshots.exists():
        with _noted(report), sql(snapshots), reader(snapshots) as cache:
            check_structure(cache, snapshots, quick=False)
            check_form(cache, snapshots)
            report.snapshots = states.versions(cache)
            _check_states(report, cache, snapshots, chains, outline)
    return report


def _check_states(
    report: Report, database: sqlite3.Connection, path: Path, chains: dict[int, str], outline: Outline
) -> None:
    for version in states.versions(database):
        with _noted(report), sql(path):
            states.load(database, path, version, chains.get(version, ""), outline)


def show(folder: str | Path) -> Iterator[dict[str, Any]]:
    """Every record as a dictionary, oldest first, without its delta."""
    path = lessons_in(folder)
    with sql(path), reader(path) as database:
        yield from readable(database, "1 ORDER BY number", [])


def backup(folder: str | Path, target: str | Path) -> Report:
    """Copy a store to a new folder by SQLite's backup API, and verify the copy; a server can go on meanwhile.

    The copy is a data folder as it is. Snapshots are not part of it: a server makes new ones.
    """
    source, target = lessons_in(folder), Path(target).absolute()
    if target.exists():
        raise ValueError(f"{target} is there already: give a folder that is not")
    report = Report()

    def fill(partial: Path) -> None:
        nonlocal report
        copy = partial / LESSONS
        with sql(source), reader(source) as database, closing(sqlite3.connect(copy)) as new:
            database.backup(new)
        with sql(copy), closing(sqlite3.connect(copy)) as new:  # one file, without a log beside it
            new.execute("PRAGMA journal_mode = DELETE")
            last = new.execute("SELECT number, chain FROM records ORDER BY number DESC LIMIT 1").fetchone()
        if last is not None:
            Acknowledged(partial).write(*last, sync=True)
        report = verify(partial)
        if report.damage:
            raise report.damage[0]

    write_folder(target, fill, hashed=False)  # a database changes
    return report
