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
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from attractor.config import check_size
from attractor.experiments.result import write_result

log = logging.getLogger("attractor")

Settings = dict[str, Any]
Values = dict[str, Any]
Work = Callable[[Settings, Path], Values]
Report = Callable[[dict[str, Any]], None]


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
) -> dict[str, Values]:
    """Every cell that is not done yet, then the values of all. `report` gets "cell" after each one.

    When `stop` says so, no further cell is started, and GridStopped is raised when the others are done.
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
        _side_by_side(todo, next_one, work, folder, min(jobs, len(todo)), keep)
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
) -> None:
    """Hand cells to processes; one that dies loses the cell that it had, and another takes its place."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    busy: dict[Connection, tuple[str, Any]] = {}

    def give(line: Connection, process: Any, name: str | None) -> None:
        """A cell for an idle process; without one it ends. If it died meanwhile, another takes the cell."""
        try:
            line.send(None if name is None else todo[name])
        except OSError:
            if name is not None:
                start(name)
            return
        if name is None:
            process.join()
            line.close()
        else:
            busy[line] = name, process

    def start(name: str | None) -> None:
        if name is None:
            return
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, work, folder), daemon=True)
        process.start()
        theirs.close()
        give(ours, process, name)

    try:
        for _ in range(jobs):
            start(next_one())
        while busy:
            for line in wait(list(busy)):
                assert isinstance(line, Connection)
                name, process = busy.pop(line)
                try:
                    values, error = line.recv()
                except (EOFError, OSError):
                    process.join()
                    keep(name, None, f"its process died with exit code {process.exitcode}")
                    line.close()
                    start(next_one())
                    continue
                keep(name, values, error)
                give(line, process, next_one())
    finally:
        for _, process in busy.values():
            process.kill()


def _serve(line: Connection, work: Work, folder: Path) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:  # whoever kills it must not leave us writing
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    try:
        while (settings := line.recv()) is not None:
            try:
                answer: tuple[Values | None, str] = work(settings, folder), ""
            except Exception as error:
                answer = None, f"{type(error).__name__}: {error}"
            line.send(answer)
    except (EOFError, OSError, KeyboardInterrupt):
        pass  # nobody listens any more
