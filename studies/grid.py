"""Many small computations, each a JSON file: what is done is not done again, and a crash loses one.

    cells = {"dense-0": {"kind": "pretrain", ...}, ...}       # name -> settings, anything JSON can hold
    found = run_inquiries({"all": ask(cells)}, work, folder, jobs=4)
    found["all"]["dense-0"]                                   # what work(settings, folder) returned

`work` is a function of a module: with several jobs, cells run side by side in processes of their own. What to
compute next may depend on what came out: an inquiry is a generator that yields cells, is sent their values,
and returns what it found. Of several none waits for another, and what two ask for is computed once.
"""

import fcntl
import json
import logging
import multiprocessing
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch

from attractor.config import check_size
from attractor.results import write_result

log = logging.getLogger("attractor")

Settings = dict[str, Any]
Values = dict[str, Any]
Work = Callable[[Settings, Path], Values]
Report = Callable[[dict[str, Any]], None]
Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")
Inquiry = Generator[Mapping[str, Settings], dict[str, Values], T]


class Worker(NamedTuple):
    """A process that computes cells, and the line to it. When the line is closed, it ends."""

    line: Connection
    process: Any


class CellsFailed(RuntimeError):
    """Some cells failed; the others are done. Run again to try those once more."""


class GridStopped(RuntimeError):
    """There was no time for all cells. Run again to go on."""


class OtherSettings(ValueError):
    """A cell of that name is there, and was computed with other settings."""


def ask(cells: Mapping[str, Settings]) -> Inquiry[dict[str, Values]]:
    """Ask for these cells, and nothing else."""
    return (yield cells)


def ask_each(cells: Mapping[Key, Mapping[str, Settings]]) -> Inquiry[dict[Key, Values]]:
    """One cell for each key: what each came to."""
    done = yield {name: settings for part in cells.values() for name, settings in part.items()}
    return {key: done[next(iter(part))] for key, part in cells.items()}


def run_inquiries(
    inquiries: Mapping[Key, Inquiry[T]],
    work: Work,
    folder: Path,
    *,
    jobs: int = 1,
    report: Report = lambda record: None,
    stop: Callable[[], bool] = lambda: False,
    idle: list[Worker] | None = None,
) -> dict[Key, T]:
    """What each inquiry returns. `report` gets "cell" after each one.

    When `stop` says so, no further cell is started, and GridStopped is raised when the others are done. A
    cell that fails ends those that asked for it, a mistake in an inquiry ends that one; CellsFailed or the
    mistake is raised when the others are done.
    Processes come from `idle` and go back to it: starting one takes seconds, and many when all start at once.
    """
    check_size("jobs", jobs)
    queue = _Queue(inquiries, folder, report)
    with alone_in(folder):
        try:
            queue.open()
            if jobs == 1:
                _in_turn(queue, work, stop)
            else:
                _side_by_side(queue, work, stop, jobs, [] if idle is None else idle)
        finally:
            queue.close()
    return queue.results()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Two grids in one folder would write the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another process works in {folder}: wait for it, or give another folder (--out)"
            ) from error
        yield


class _Queue(Generic[Key, T]):
    """Where inquiries wait for the cells that they asked for."""

    def __init__(self, inquiries: Mapping[Key, Inquiry[T]], folder: Path, report: Report) -> None:
        self.inquiries, self.folder, self.report = dict(inquiries), folder, report
        self.cells: dict[str, Settings] = {}  # all that were asked for
        self.waiting: deque[str] = deque()  # those that no worker computes yet
        self.values: dict[str, Values] = {}
        self.failed: dict[str, str] = {}
        self.asked: dict[Key, list[str]] = {}  # by those that wait
        self.done: dict[Key, T] = {}
        self.mistakes: list[Exception] = []

    def open(self) -> None:
        for key in self.inquiries:
            self._go_on(key, None)

    def _go_on(self, key: Key, answer: dict[str, Values] | None) -> None:
        """It gets what it asked for, and asks again; what is known already is no reason to wait."""
        try:
            while True:
                cells = self.inquiries[key].send(cast(dict[str, Values], answer))
                for name, settings in cells.items():
                    self._ask(name, json.loads(json.dumps(settings)))
                if cells.keys() - self.values.keys():
                    self.asked[key] = list(cells)
                    return
                answer = {name: self.values[name] for name in cells}
        except StopIteration as end:
            self.done[key] = end.value
        except OtherSettings:  # before anything is overwritten
            raise
        except Exception as mistake:  # the others go on
            self.mistakes.append(mistake)

    def _ask(self, name: str, settings: Settings) -> None:
        if name in self.cells:
            if self.cells[name] != settings:
                raise ValueError(f"cell {name} is asked for with two settings")
            return
        self.cells[name] = settings
        if (saved := _saved(self.folder, name)) is None:
            self.waiting.append(name)
            return
        known, self.values[name] = saved
        if known != settings:
            differing = sorted(key for key in known | settings if known.get(key) != settings.get(key))
            raise OtherSettings(
                f"{cell_file(self.folder, name)} was computed with other settings ({', '.join(differing)}): "
                "give another folder (--out), or remove it"
            )
        self.report({"cell": name, "found": True})

    def keep(self, name: str, values: Values | None, error: str = "") -> None:
        """A cell was computed, or failed: cells that wait for it go on, or end."""
        settings = self.cells[name]
        if values is None:
            self.failed[name] = error
            log.warning("cell %s failed: %s", name, error)
        else:
            write_result(cell_file(self.folder, name), {"settings": settings, "values": values})
            self.values[name] = _values(self.folder, name, settings)
        self.report({"cell": name, "found": False})
        for key, names in list(self.asked.items()):
            if name in names and name in self.failed:
                del self.asked[key]
            elif name in names and all(part in self.values for part in names):
                del self.asked[key]
                self._go_on(key, {part: self.values[part] for part in names})

    def results(self) -> dict[Key, T]:
        failures = "; ".join(f"{name}: {error}" for name, error in sorted(self.failed.items())[:3])
        if self.mistakes:
            raise self.mistakes[0]
        if self.waiting:
            also = f" {len(self.failed)} failed: {failures}" if self.failed else ""
            raise GridStopped(
                f"{len(self.waiting)} of {len(self.cells)} cells known so far wait; the same command goes on "
                f"with them.{also}"
            )
        if self.failed:
            raise CellsFailed(
                f"{len(self.failed)} of {len(self.cells)} cells failed, the rest is kept. {failures}"
            )
        return {key: self.done[key] for key in self.inquiries}

    def close(self) -> None:
        for inquiry in self.inquiries.values():
            inquiry.close()


def cell_file(folder: Path, name: str) -> Path:
    return folder / "cells" / f"{name}.json"


def read_cell(folder: Path, name: str, settings: Settings) -> Values | None:
    """What a cell computed, if it did so with these settings."""
    saved = _saved(folder, name)
    return saved[1] if saved is not None and saved[0] == settings else None


def _saved(folder: Path, name: str) -> tuple[Settings, Values] | None:
    """The settings and the values of a cell, if there is one that can be read."""
    try:
        saved = json.loads(cell_file(folder, name).read_text())
        return dict(saved["settings"]), dict(saved["values"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def origins(folder: Path, names: Iterable[str]) -> list[dict[str, Any]]:
    """Where these cells come from: a grid that was resumed may be of several versions of the code."""
    counts: Counter[str] = Counter()
    for name in sorted(names):
        made = json.loads(cell_file(folder, name).read_text())["provenance"]
        made["machine"].pop("cpu_threads")  # of the process that wrote it, and not of the one that computed
        counts[json.dumps(made, sort_keys=True)] += 1
    return [{**json.loads(made), "cells": count} for made, count in counts.most_common()]


def made_again(folder: Path, names: Iterable[str]) -> list[str]:
    """Models that cells started from, where the cells of one name say that they were several."""
    models: dict[str, set[str]] = {}
    for name in names:
        cell = json.loads(cell_file(folder, name).read_text())
        if "base" in cell["values"]:
            models.setdefault(cell["settings"]["base"], set()).add(cell["values"]["base"])
    return sorted(name for name, known in models.items() if len(known) > 1)


def _values(folder: Path, name: str, settings: Settings) -> Values:
    values = read_cell(folder, name, settings)
    assert values is not None, name
    return values


def _in_turn(queue: _Queue, work: Work, stop: Callable[[], bool]) -> None:
    while queue.waiting and not stop():
        name = queue.waiting.popleft()
        try:
            values = work(queue.cells[name], queue.folder)
        except Exception as error:
            queue.keep(name, None, f"{type(error).__name__}: {error}")
        else:
            queue.keep(name, values)


def _side_by_side(queue: _Queue, work: Work, stop: Callable[[], bool], jobs: int, idle: list[Worker]) -> None:
    """Hand cells to processes; one that dies loses the cell that it had, and another takes its place."""
    busy: dict[Connection, tuple[str, Worker]] = {}

    def start(name: str) -> None:
        side_by_side = min(jobs, len(busy) + len(queue.waiting) + 1)
        while True:  # a worker that died while idle is passed over
            worker = idle.pop() if idle else _spawn()
            try:
                worker.line.send((work, queue.cells[name], queue.folder, side_by_side))
            except OSError:
                continue
            busy[worker.line] = name, worker
            return

    def start_some() -> None:
        while queue.waiting and len(busy) < jobs and not stop():
            start(queue.waiting.popleft())

    try:
        start_some()
        while busy:
            for line in wait(list(busy)):
                assert isinstance(line, Connection)
                name, worker = busy.pop(line)
                try:
                    values, error = line.recv()
                except (EOFError, OSError):
                    worker.process.join()
                    queue.keep(name, None, f"its process died with exit code {worker.process.exitcode}")
                else:
                    idle.append(worker)
                    queue.keep(name, values, error)
                start_some()
    finally:
        for _, worker in busy.values():
            worker.process.kill()


def _spawn() -> Worker:
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return Worker(ours, process)


def _serve(line: Connection) -> None:
    threads = torch.get_num_threads()
    parent = multiprocessing.parent_process()
    if parent is not None:  # a kill of the parent must not leave us writing
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    try:
        while True:
            work, settings, folder, jobs = line.recv()
            torch.set_num_threads(max(1, threads // jobs))  # else they wait for each other's threads
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
            try:
                answer: tuple[Values | None, str] = work(settings, folder), ""
            except Exception as error:
                answer = None, f"{type(error).__name__}: {error}"
            line.send(answer)
    except (EOFError, OSError, KeyboardInterrupt):
        pass  # the parent is gone
