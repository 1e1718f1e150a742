"""What the studies of facts have in common on the command line, and how their cells are chosen and summed up.

A cell is the result of one method with one seed, as a JSON file.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attractor.results import write_result
from studies.facts_editors import LONGEST
from studies.facts_methods import ALSO, KEEPS, RATES, STRENGTHS

USUAL = "rare"
"""How subjects of questions are found where nobody says otherwise."""
Cell = dict[str, Any]
Figures = Mapping[str, Sequence[str]]
"""Where each figure stands in a cell."""


def parser_of(study: str, about: str | None) -> tuple[argparse.ArgumentParser, Any, argparse.ArgumentParser]:
    """The parser of a study, whose help is the study's own text; its verbs, and the parser of `run`.

    The verbs are `run`, `rates` and `sum`, which are alike in every study.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m studies {study}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("run", help="teach one method and measure it")
    add_options(one)
    best = verbs.add_parser("rates", help="choose each method's rate")
    best.add_argument("cells", type=Path, nargs="+")
    total = verbs.add_parser("sum", help="sum up the cells of several seeds and methods")
    total.add_argument("cells", type=Path, nargs="+")
    total.add_argument("--result", type=Path, required=True)
    return parser, verbs, one


def carry_out(
    given: argparse.Namespace,
    experiment: str,
    run: Callable[[argparse.Namespace], None],
    score: Callable[[Cell], float],
    figures: Figures,
    small: Mapping[str, Any] | None = None,
) -> None:
    """Do what was asked for; `small` is what the option of this name makes of others."""
    if given.verb == "rates":
        return rates(given, score)
    if given.verb == "sum":
        return sum_up(given, experiment, figures)
    if small is not None and given.small:
        vars(given).update(small)
    if given.ladder and given.method in ("basins", "retrieval"):
        raise ValueError(f"--ladder is for methods that work on a copy of the model, not for {given.method}")
    complete(given)
    run(given)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `run` of every study takes."""
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--texts", type=Path, required=True, help="the folder of background texts")
    parser.add_argument("--method", choices=[*RATES, "retrieval"], default="basins")
    parser.add_argument("--keep", choices=KEEPS, default="nothing", help="what is done for what was known")
    parser.add_argument("--rate", type=float, help="default: the one that the ladder of rates chose")
    parser.add_argument(
        "--ladder",
        type=float,
        nargs="+",
        default=[],
        help="try these rates on other facts, and take the best",
    )
    parser.add_argument("--only-ladder", action="store_true", help="and end then")
    parser.add_argument(
        "--clamp", type=float, default=LONGEST, help="how long targets of closed-form editors may be"
    )
    parser.add_argument("--strength", type=float, help="what --keep counts beside what is learned")
    parser.add_argument("--rank", type=int, default=16, help="of LoRA")
    parser.add_argument("--also", choices=ALSO, nargs="*", default=[], help="what LoRA changes besides")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lesson", type=json.loads, default={}, help="settings of LessonConfig, as JSON")
    parser.add_argument("--windows", type=int, default=128, help="of each background text that are measured")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=math.inf, help="teach no new chunk after so long")
    parser.add_argument("--result", type=Path, required=True)


def complete(given: argparse.Namespace) -> None:
    """Fill in what was not given, so that a cell says what it was made with."""
    if given.rate is None:
        given.rate = RATES.get(given.method, 0.0)
    if given.strength is None:
        given.strength = STRENGTHS.get(given.keep, 0.0)


def label(cell: Cell) -> str:
    """What is compared: everything but seed, rate and strength."""
    settings = cell["settings"]
    parts = [settings["method"]]
    if settings["keep"] != "nothing":
        parts.append(settings["keep"])
    if settings["method"].startswith("lora") and settings.get("rank", 16) != 16:
        parts.append(f"rank {settings['rank']}")
    if settings["method"] == "basins":  # what else fine-tunes only grades other words by its subjects
        if (how := settings.get("subjects", USUAL)) != USUAL:
            parts.append(f"subjects {how}")
        if small := settings.get("lesson", {}).get("lower_case"):
            parts.append(f"lower case {small}")
    return ", ".join([*parts, *settings.get("also", [])])


def read_cells(paths: Sequence[Path]) -> dict[str, list[Cell]]:
    cells: dict[str, list[Cell]] = {}
    for path in sorted(paths):
        cell = json.loads(path.read_text())
        cells.setdefault(label(cell), []).append(cell)
    return cells


def rates(given: argparse.Namespace, score: Callable[[Cell], float]) -> None:
    """The rate and strength of each method that scored best, one a line, as `run` takes them."""
    for name, found in read_cells(given.cells).items():
        best = max(found, key=score)["settings"]
        strength = f" --strength {best['strength']}" if best.get("strength") else ""
        print(f"{name}: --rate {best['rate']}{strength}")


def figure(cell: Cell, path: Sequence[str]) -> float | None:
    """A figure of a cell, if it has that; of several texts the worst counts."""
    found: Any = cell
    for name in path:
        if name not in found:
            return None
        found = found[name]
    return max(found.values()) if isinstance(found, dict) else found


def sum_up(given: argparse.Namespace, experiment: str, figures: Figures) -> None:
    """Mean, least and most over seeds of each method's figures, and the cells themselves."""
    rows: dict[str, dict[str, Any]] = {}
    cells = []
    for name, found in read_cells(given.cells).items():
        rows[name] = {"seeds": [cell["settings"]["seed"] for cell in found]}
        for title, path in figures.items():
            own = [value for cell in found if (value := figure(cell, path)) is not None]
            if own:
                rows[name][title] = {"mean": sum(own) / len(own), "least": min(own), "most": max(own)}
        for cell in found:
            nats = cell["original"]["background"]
            cell["original"]["background"] = {text: sum(own) / len(own) for text, own in nats.items()}
            cells.append(cell)
        print(f"{name} ({len(found)} seeds)")
        for title, row in rows[name].items():
            if title != "seeds":
                print(f"  {title:42s} {row['mean']:.4f}  ({row['least']:.4f} to {row['most']:.4f})")
    made = {json.dumps(cell["provenance"], sort_keys=True): cell["provenance"] for cell in cells}
    write_result(
        given.result,
        {"experiment": experiment, "methods": rows, "cells": cells, "cells_made_by": list(made.values())},
    )
