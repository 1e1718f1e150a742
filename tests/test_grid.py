"""Cells: done once, lost one at a time, side by side or in turn."""

import gc
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from studies.grid import (
    CellsFailed,
    GridStopped,
    alone_in,
    ask,
    cell_file,
    origins,
    run_inquiries,
)

both_ways = pytest.mark.parametrize("jobs", [1, 2])
KEPT = []
"""Processes that wait for the next test: starting one takes seconds."""


def work(settings, folder):
    """Square a number; leave a mark, so that a test can count. Or fail, in one way or another."""
    with (folder / "marks").open("a") as marks:
        marks.write(f"{settings['number']}\n")
    if settings.get("mistake") == "raise":
        raise ValueError("no square today")
    if settings.get("mistake") == "die":
        os._exit(7)
    return {"square": settings["number"] ** 2}


def marks(folder):
    return sorted(int(line) for line in (folder / "marks").read_text().split())


def run_cells(cells, work, folder, **options):
    """What these cells come to, and nothing else."""
    return run_inquiries({"": ask(cells)}, work, folder, **options)[""]


def cells_of(*numbers, **changes):
    return {f"cell-{number}": {"number": number, **changes} for number in numbers}


@both_ways
def test_what_is_done_is_not_done_again(tmp_path, jobs):
    values = run_cells(cells_of(1, 2, 3), work, tmp_path, jobs=jobs, idle=KEPT)
    assert values == {"cell-1": {"square": 1}, "cell-2": {"square": 4}, "cell-3": {"square": 9}}
    seen = []
    again = run_cells(cells_of(1, 2, 3, 4), work, tmp_path, jobs=jobs, idle=KEPT, report=seen.append)
    assert again == values | {"cell-4": {"square": 16}}
    assert marks(tmp_path) == [1, 2, 3, 4]
    assert {record["cell"]: record["found"] for record in seen} == {
        "cell-1": True,
        "cell-2": True,
        "cell-3": True,
        "cell-4": False,
    }
    saved = json.loads(cell_file(tmp_path, "cell-4").read_text())
    assert saved["settings"] == {"number": 4}
    assert saved["provenance"]["versions"]


def test_cells_say_where_they_come_from(tmp_path, monkeypatch):
    from studies.report.readings import provenance  # not for the processes, which import this file

    for commit, numbers in {"one": (1, 2), "two": (1, 2, 3)}.items():
        monkeypatch.setenv("ATTRACTOR_COMMIT", commit)
        run_cells(cells_of(*numbers), work, tmp_path)
    told = origins(tmp_path, cells_of(1, 2, 3))
    assert [(part["commit"], part["cells"]) for part in told] == [("one", 2), ("two", 1)]
    assert provenance({"cells": told, "provenance": {"commit": "two"}})["Code"] == "one, two"
    assert provenance({"provenance": {"commit": "two"}})["Code"] == "two"
    older = {**told[0], "versions": {"torch": "1.0"}}
    shown = provenance({"cells": [older, *told], "provenance": {"versions": {"torch": "9.0"}}})["Versions"]
    assert shown == f"torch 1.0; {provenance({'cells': told})['Versions']}"  # not of who put it together


def test_cells_of_other_settings_are_not_overwritten(tmp_path):
    run_cells(cells_of(5), work, tmp_path)
    with pytest.raises(ValueError, match=r"cell-5.json was computed with other settings \(number, text\)"):
        run_cells({**cells_of(4), "cell-5": {"number": 6, "text": "b"}}, work, tmp_path)
    assert run_cells(cells_of(5), work, tmp_path) == {"cell-5": {"square": 25}}
    cell_file(tmp_path, "cell-5").unlink()
    run_cells({"cell-5": {"number": 6}}, work, tmp_path)
    assert marks(tmp_path) == [5, 6]  # and nothing was computed before the conflict was seen
    cell_file(tmp_path, "cell-5").write_text("{ not JSON")
    assert run_cells({"cell-5": {"number": 6}}, work, tmp_path) == {"cell-5": {"square": 36}}


def test_a_folder_has_one_grid_at_a_time(tmp_path):
    with alone_in(tmp_path), pytest.raises(ValueError, match="another process works in"):
        run_cells(cells_of(1), work, tmp_path)
    assert run_cells(cells_of(1), work, tmp_path) == {"cell-1": {"square": 1}}


@both_ways
def test_a_mistake_loses_one_cell(tmp_path, jobs):
    cells = cells_of(1, 2, 3) | cells_of(4, mistake="raise")
    with pytest.raises(CellsFailed, match=r"1 of 4 cells failed.*cell-4: ValueError: no square today"):
        run_cells(cells, work, tmp_path, jobs=jobs, idle=KEPT)
    assert run_cells(cells_of(1, 2, 3), work, tmp_path) == run_cells(cells_of(1, 2, 3), work, tmp_path)
    assert marks(tmp_path) == [1, 2, 3, 4]


def test_a_process_that_dies_loses_one_cell(tmp_path):
    cells = cells_of(0, mistake="die") | cells_of(1, 2, 3)
    with pytest.raises(CellsFailed, match="its process died with exit code 7"):
        run_cells(cells, work, tmp_path, jobs=2, idle=KEPT)
    assert marks(tmp_path) == [0, 1, 2, 3]


def counted(*numbers):
    """Asks for one cell after the other; returns the sum of their squares."""
    total = 0
    for number in numbers:
        done = yield cells_of(number)
        total += done[f"cell-{number}"]["square"]
    return total


@both_ways
def test_inquiries_share_cells(tmp_path, jobs):
    inquiries = {"odd": counted(1, 3, 5), "all": counted(1, 2, 3), "none": counted()}
    assert run_inquiries(inquiries, work, tmp_path, jobs=jobs, idle=KEPT) == {"odd": 35, "all": 14, "none": 0}
    assert marks(tmp_path) == [1, 2, 3, 5]  # whoever asked for them
    inquiries = {"more": counted(5, 6), "known": counted(1, 2)}
    assert run_inquiries(inquiries, work, tmp_path, jobs=jobs, idle=KEPT) == {"more": 61, "known": 5}
    assert marks(tmp_path) == [1, 2, 3, 5, 6]


@both_ways
def test_a_failed_cell_ends_only_who_asked_for_it(tmp_path, jobs):
    def unlucky():
        yield cells_of(0, mistake="raise")
        yield cells_of(9)

    with pytest.raises(CellsFailed, match=r"1 of 4 cells failed.*cell-0: ValueError"):
        run_inquiries({"bad": unlucky(), "good": counted(1, 2, 3)}, work, tmp_path, jobs=jobs, idle=KEPT)
    assert marks(tmp_path) == [0, 1, 2, 3]


@both_ways
def test_a_mistake_in_an_inquiry_ends_only_that_one(tmp_path, jobs):
    def mistaken():
        yield cells_of(1)
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"):
        run_inquiries({"bad": mistaken(), "good": counted(2, 3)}, work, tmp_path, jobs=jobs, idle=KEPT)
    assert marks(tmp_path) == [1, 2, 3]


@both_ways
def test_out_of_time_before_everything_was_asked_for(tmp_path, jobs):
    inquiries = {"long": counted(1, 2), "bad": ask(cells_of(0, mistake="raise"))}
    asked = itertools.count()
    with pytest.raises(GridStopped, match=r"1 of 3 cells known so far wait.* 1 failed: cell-0"):
        run_inquiries(
            inquiries,
            work,
            tmp_path,
            jobs=jobs,
            idle=KEPT,
            stop=lambda: next(asked) >= 2,  # before a third one is started, however quick the first was
        )
    assert marks(tmp_path) == [0, 1]


def test_first_asked_first_served(tmp_path):
    served = []

    def note(settings, folder):
        served.append(settings["number"])
        return {"square": 1}

    run_inquiries({"a": counted(1, 5), "b": counted(2, 3), "c": ask(cells_of(4))}, note, tmp_path)
    assert served == [1, 2, 4, 5, 3]


def wait_for_another(settings, folder):
    if settings["number"] == 1:
        _until(lambda: (folder / "came").exists())
    if settings["number"] == 3:
        (folder / "came").touch()
    return {"square": settings["number"] ** 2}


def test_no_inquiry_waits_for_another(tmp_path):
    """The first cell ends when the third one has run, which another inquiry asks for after the second."""
    inquiries = {"slow": counted(1), "quick": counted(2, 3)}
    assert run_inquiries(inquiries, wait_for_another, tmp_path, jobs=2, idle=KEPT) == {"slow": 1, "quick": 13}


def test_one_name_is_one_cell(tmp_path):
    def other():
        yield {"cell-1": {"number": 2}}

    with pytest.raises(ValueError, match="cell-1 is asked for with two settings"):
        run_inquiries({"one": counted(1), "other": other()}, work, tmp_path)
    assert marks(tmp_path) == [1]


@both_ways
def test_out_of_time(tmp_path, jobs):
    with pytest.raises(GridStopped, match="cells known so far wait"):
        run_cells(
            cells_of(1, 2, 3, 4),
            work,
            tmp_path,
            jobs=jobs,
            idle=KEPT,
            stop=lambda: (tmp_path / "marks").exists(),
        )
    done = len(marks(tmp_path))
    assert 1 <= done <= jobs
    assert len(run_cells(cells_of(1, 2, 3, 4), work, tmp_path, jobs=jobs, idle=KEPT)) == 4
    assert marks(tmp_path) == [1, 2, 3, 4]


def linger(settings, folder):
    (folder / f"pid-{settings['number']}").write_text(str(os.getpid()))
    time.sleep(600)
    return {}


def test_workers_end_when_the_parent_is_killed(tmp_path):
    """SIGTERM to the one who asked: its processes end too, whatever they are doing."""
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; import test_grid\n"
        "if __name__ == '__main__':\n"
        "    test_grid.run_cells(test_grid.cells_of(1, 2), test_grid.linger, Path(sys.argv[1]), jobs=2)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    tests = Path(__file__).parent
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path), str(tests), str(tests.parent)])
    files = [tmp_path / "pid-1", tmp_path / "pid-2"]
    begun = lambda: all(file.exists() and file.read_text() for file in files)  # noqa: E731
    _until(lambda: begun() or parent.poll() is not None)
    assert parent.poll() is None, "the one who asks ended before its processes began"
    parent.terminate()
    parent.wait(300)
    for file in files:
        _until(lambda file=file: not Path(f"/proc/{file.read_text()}").exists())


def _until(happened, seconds=300):
    for _ in range(seconds * 20):
        if happened():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def test_jobs_are_a_number(tmp_path):
    with pytest.raises(ValueError, match="jobs=0"):
        run_cells({}, work, tmp_path, jobs=0)


def where(settings, folder):
    return {"pid": os.getpid(), "threads": torch.get_num_threads()}


def test_processes_are_kept_for_the_next_request(tmp_path):
    """The last of these tests: it uses up the processes that the others have kept."""
    idle = KEPT
    (tmp_path / "b").mkdir()
    ran = []
    for numbers in ((1, 2, 3), (4, 5, 6)):
        done = run_cells(cells_of(*numbers), where, tmp_path, jobs=2, idle=idle)
        ran.append({values["pid"] for values in done.values()})
    assert ran[1] <= {worker.process.pid for worker in idle}
    assert ran[1] & ran[0]
    processes = [worker.process for worker in idle]
    assert len(processes) == 2
    processes[-1].kill()
    processes[-1].join()
    (last,) = run_cells(cells_of(7), where, tmp_path, jobs=2, idle=idle).values()  # by the other one
    assert last["pid"] == processes[0].pid
    beside = {values["threads"] for values in done.values()}
    assert beside == {max(1, last["threads"] // 2)}  # now it has all of them
    (elsewhere,) = run_cells(cells_of(7), work, tmp_path / "b", jobs=2, idle=idle).values()
    assert elsewhere == {"square": 49}  # other work, in another folder
    idle.clear()  # nobody has a line to it any more
    gc.collect()  # nor has a traceback of another test
    processes[0].join(60)
    assert processes[0].exitcode == 0
