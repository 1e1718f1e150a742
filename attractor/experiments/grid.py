"""Many small computations, each a JSON file: what is done is not done again, and a crash loses one.

    cells = {"dense-0": {"kind": "pretrain", ...}, ...}       # name -> settings, anything JSON can hold
    values = run_cells(cells, work, folder, jobs=4)           # name -> what work(settings, folder) returned

`work` is a function of a module: with several jobs, cells run side by side in processes of their own.
"""

import json
import logging
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attractor.config import check_size
from attractor.experiments.result import write_result

log = logging.getLogger("attractor")

Settings = dict[str, Any]
Values = dict[str, Any]
Work = Callable[[Settings, Path], Values]
Report = Callable[[dict[str, Any]], None]


class Worker(NamedTuple):
    """A process that computes cells, and the line to it. When the line is closed, it ends."""

    line: Connection
    process: Any


class CellsFailed(RuntimeError):
    """Some cells failed; the others are done. Run again to try those once more."""


class GridStopped(RuntimeError):
    """There was no time for all cells. Run again to go on."""


def run_cells(
    cells: Mapping[str, Settings],
    work: Work,
    folder: Path,
    *,
    jobs: int = 1,
    report: Report = lambda record: None,
    stop: Callable[[], bool] = lambda: False,
    idle: list[Worker] | None = None,
) -> dict[str, Values]:
    """Every cell that is not done yet, then the values of all. `report` gets "cell" after each one.

    When `stop` says so, no further cell is started, and GridStopped is raised when the others are done.
    Processes come from `idle` and go back to it: starting one takes seconds, and many when all start at once.
    """
    check_size("jobs", jobs)
    cells = {name: json.loads(json.dumps(settings)) for name, settings in cells.items()}
    todo = {name: settings for name, settings in cells.items() if read_cell(folder, name, settings) is None}
    for name in cells.keys() - todo.keys():
        report({"cell": name, "found": True})
    failed: dict[str, str] = {}
    waiting = list(todo)

    def next_one() -> str | None:
        return waiting.pop(0) if waiting and not stop() else None

    def keep(name: str, values: Values | None, error: str = "") -> None:
        if values is None:
            failed[name] = error
            log.warning("cell %s failed: %s", name, error)
        else:
            write_result(cell_file(folder, name), {"settings": cells[name], "values": values})
        report({"cell": name, "found": False})

    if jobs == 1:
        while (mine := next_one()) is not None:
            try:
                values = work(todo[mine], folder)
            except Exception as error:
                keep(mine, None, f"{type(error).__name__}: {error}")
            else:
                keep(mine, values)
    elif todo:
        _side_by_side(todo, next_one, work, folder, min(jobs, len(todo)), keep, [] if idle is None else idle)
    if waiting:
        raise GridStopped(f"{len(waiting)} of {len(cells)} cells wait; the same command goes on with them")
    if failed:
        told = "; ".join(f"{name}: {error}" for name, error in sorted(failed.items())[:3])
        raise CellsFailed(f"{len(failed)} of {len(cells)} cells failed, the rest is kept. {told}")
    return {name: _values(folder, name, settings) for name, settings in cells.items()}


def cell_file(folder: Path, name: str) -> Path:
    return folder / "cells" / f"{name}.json"


def read_cell(folder: Path, name: str, settings: Settings) -> Values | None:
    """What a cell computed, if it did so with these settings."""
    try:
        saved = json.loads(cell_file(folder, name).read_text())
        return saved["values"] if saved["settings"] == settings else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def origins(folder: Path, names: Iterable[str]) -> list[dict[str, Any]]:
    """Where these cells come from: a grid that was resumed may be of several versions of the code."""
    counts: Counter[str] = Counter()
    for name in names:
        made = json.loads(cell_file(folder, name).read_text())["provenance"]
        made["machine"].pop("cpu_threads")  # of as many as there were jobs at that moment
        counts[json.dumps(made, sort_keys=True)] += 1
    return [{**json.loads(made), "cells": count} for made, count in counts.most_common()]


def _values(folder: Path, name: str, settings: Settings) -> Values:
    values = read_cell(folder, name, settings)
    assert values is not None, name
    return values


def _side_by_side(
    todo: dict[str, Settings],
    next_one: Callable[[], str | None],
    work: Work,
    folder: Path,
    jobs: int,
    keep: Callable[..., None],
    idle: list[Worker],
) -> None:
    """Hand cells to processes; one that dies loses the cell that it had, and another takes its place."""
    busy: dict[Connection, tuple[str, Worker]] = {}

    def start_next() -> None:
        """The next cell, if there is one; whoever died while idle is passed over."""
        if (name := next_one()) is None:
            return
        while True:
            worker = idle.pop() if idle else _spawn()
            try:
                worker.line.send((work, todo[name], folder, jobs))
            except OSError:
                continue
            busy[worker.line] = name, worker
            return

    try:
        for _ in range(jobs):
            start_next()
        while busy:
            for line in wait(list(busy)):
                assert isinstance(line, Connection)
                name, worker = busy.pop(line)
                try:
                    values, error = line.recv()
                except (EOFError, OSError):
                    worker.process.join()
                    keep(name, None, f"its process died with exit code {worker.process.exitcode}")
                else:
                    keep(name, values, error)
                    idle.append(worker)
                start_next()
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
    if parent is not None:  # whoever kills it must not leave us writing
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
        pass  # nobody listens any more
