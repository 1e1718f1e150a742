"""What results say, read from their JSON files and put into tables: the one source of every page."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from studies.plan import FOLIO, PAPER
from studies.report.tables import MISSING, Cell, Column, Table, count, name, number, size
from studies.shifts import BEST_FULL, WAYS, seeds_of, summary
from studies.statistics import or_nan, transfer
from studies.streams import GUARDED

EXPERIMENTS = {
    "shifts": "Adapting to new domains, alone and behind the guard",
    "forgetting": "Bounded forgetting",
    "table1": "Dense against APN: the paper's Table 1",
    "table2": "Adapting to a second domain: the paper's Table 2",
    "sensitivity": "What the options of a layer do",
    "match": "Models of like size on several texts",
    "retrofit": "A pretrained model learns a domain",
}


class Result(NamedTuple):
    path: Path
    values: dict[str, Any]

    @property
    def experiment(self) -> str:
        return self.values["experiment"]

    @property
    def judged(self) -> bool:
        """Promises are about the full size; smaller ones only show that everything runs."""
        return self.values.get("size") == "full"

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around whatever reads the values: where one is missing or of another kind, name the file."""
        try:
            yield
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise ValueError(
                f"{self.path} is no whole result of {self.experiment!r} ({type(error).__name__}: {error}); "
                f"run the experiment again, or leave the file out"
            ) from error


def read(path: Path) -> Result:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); give a file that an experiment wrote") from error
    experiment = values.get("experiment") if isinstance(values, dict) else None
    if not isinstance(experiment, str) or experiment not in EXPERIMENTS:
        raise ValueError(
            f'{path} is not a result that a report can show: its "experiment" is {experiment!r}; '
            f"there are {', '.join(EXPERIMENTS)}"
        )
    return Result(path, values)


class Bench(NamedTuple):
    """What `shifts` and `forgetting` have in common."""

    shifts: Mapping[str, Mapping[str, Mapping[str, dict[str, Any]]]]  # source -> shift -> method -> row
    streams: Mapping[str, Any]

    @property
    def methods(self) -> list[str]:
        rows = (rows for shifts in self.shifts.values() for rows in shifts.values())
        return list(dict.fromkeys(method for part in rows for method in part))


def bench_of(values: Mapping[str, Any]) -> Bench:
    if values["experiment"] == "shifts":
        rates = {method: tuned["rate"] for method, tuned in values["rates"].items()}
        shifts = {
            source: {
                shift: {method: row | {"rate": rates[method]} for method, row in rows.items()}
                for shift, rows in part.items()
            }
            for source, part in values["shifts"].items()
        }
        return Bench(shifts, values["streams"])
    found: dict[str, dict[str, Any]] = {}
    for shift, cells in values["shifts"].items():
        old = [domain for domain in cells[BEST_FULL]["before"] if domain != "B"]
        found.setdefault(" + ".join(old), {})[shift] = {
            method: summary([cell], [cells[BEST_FULL]], old) | {"rate": cell["rate"]}
            for method, cell in cells.items()
        }
    stream = values["stream"]
    told = {"rate": stream["rate"], "seeds": [stream]}
    return Bench(found, {"order": stream["order"], "methods": {GUARDED: told}})


def provenance(values: Mapping[str, Any]) -> dict[str, str]:
    """Size, seeds, code, versions and machine, in words."""
    made = values.get("provenance") or {}
    parts = values.get("cells") or [made]  # of a grid each cell says by itself where it comes from
    machine = made.get("machine") or {}
    threads = f"CPU, {machine['cpu_threads']} threads" if machine else "unknown"
    devices = dict.fromkeys((part.get("machine") or {}).get("gpu") or threads for part in parts)
    told = {
        "Size": str(values.get("size", "unknown")), "Seeds": _seeds(values),
        "Code": ", ".join(dict.fromkeys(map(_code, parts))),
        "Versions": "; ".join(dict.fromkeys(map(_versions, parts))),
        "Machine": ", ".join(devices),
    }  # fmt: skip
    if twice := values.get("pretrained_twice"):
        told["Pretrained twice"] = ", ".join(twice)
    return told


def _code(made: Mapping[str, Any]) -> str:
    changed = " with uncommitted changes" if made.get("uncommitted_changes") else ""
    return (made.get("commit") or "unknown")[:12] + changed


def _versions(made: Mapping[str, Any]) -> str:
    return ", ".join(f"{part} {v}" for part, v in made.get("versions", {}).items()) or "unknown"


def _seeds(values: Mapping[str, Any]) -> str:
    if "seeds" in values:
        return str(values["seeds"])
    rows = values.get("rows") or {}
    used = [values["seed"]] if "seed" in values else [row["seed"] for row in rows.values() if "seed" in row]
    return ", ".join(f"number {seed}" for seed in dict.fromkeys(used)) or "see the table"


def shift_table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Everything about one shift."""
    pairs = {"perplexity of A": "A", "perplexity of B": "B"}
    columns = [Column("method", words=True)]
    for group in pairs:
        columns += [Column(title, group) for title in ("before", *WAYS)]
    for group, main in (("gain on B", True), ("forgetting of A, nats", True), ("B / dense full", False),
                        ("area", False)):  # fmt: skip
        columns += [Column(way, group, main) for way in WAYS]
    columns += [Column(title, "cost", title in ("changed", "bytes"))
                for title in ("trained", "changed", "bytes", "memory", "seconds")]  # fmt: skip
    columns += [Column(title, "learning", False) for title in ("rate", "best step")]
    lines = []
    for method, row in rows.items():
        ways = [row[way] for way in WAYS]
        line = [name(method, "" if row["base_unchanged"] else "the base changed!")]
        for domain in pairs.values():
            line += [number(row[f"{domain}_before"]), *(number(way[domain]) for way in ways)]
        line += [number(way["gain"]) for way in ways]
        line += [number(way["forgetting"], ".4f", way["forgetting_interval"]) for way in ways]
        line += [number(way["B_over_full"], ".3f", way["B_over_full_interval"]) for way in ways]
        line += [number(way["hypervolume"]) for way in ways]
        line += [count(row["trained"]), count(row["changed"]), size(row["bytes"]), size(row["extra_bytes"])]
        steps = row["best_steps"]
        line += [number(row["seconds"], ".1f"), number(row["rate"], "g")]
        line.append(Cell(", ".join(f"{step:d}" for step in steps), sum(steps) / len(steps)))
        lines.append(line)
    return Table(title, columns, lines)


OF_ANOTHER_KIND = (PAPER, FOLIO)
"""No part of means: the one has next to nothing to learn from, the other holds A's own plays."""


def overview(source: str, shifts: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """Every method, the mean over the shifts of one pretraining text but for those of another kind."""
    shifts = {name: rows for name, rows in shifts.items() if _has_gains(rows)} or shifts
    shifts = {name: rows for name, rows in shifts.items() if name not in OF_ANOTHER_KIND} or shifts
    methods = list(next(iter(shifts.values())))
    kinds = {"gain on B": ("gain", ".3f"), "forgetting of A, nats": ("forgetting", ".4f"),
             "area": ("hypervolume", ".3f")}  # fmt: skip
    columns = [Column("method", words=True), *(Column(way, group) for group in kinds for way in WAYS)]
    columns.append(Column("bytes", "most of any shift"))
    lines = []
    for method in methods:
        rows = [part[method] for part in shifts.values()]
        line = [name(method)]
        for key, form in kinds.values():
            line += [number(_mean_known([row[way][key] for row in rows]), form) for way in WAYS]
        lines.append([*line, size(max(row["bytes"] for row in rows))])
    seeds = seeds_of(next(iter(shifts.values())))
    return Table(f"Pretrained on {source}, {seeds}: mean over {', '.join(shifts)}", columns, lines)


def _has_gains(rows: Mapping[str, Mapping[str, Any]]) -> bool:
    """Where dense full gained nothing, nobody has a share of it: such a shift has no part in means."""
    return any(row["full_gained"] > 0 for row in rows.values())


def _mean_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(values) if len(known) == len(values) else None


def stream_table(streams: Mapping[str, Any]) -> Table:
    kinds = {"BWT": "backward transfer", "FWT": "forward transfer", "worst_on_the_way": "worst forgetting",
             "worst_forgetting": "worst forgetting at the end", "final": "loss at the end"}  # fmt: skip
    columns = [Column("method", words=True), *(Column(title, "nats per byte") for title in kinds.values()),
               Column("overlays, bytes"), Column("seconds", main=False),
               Column("rate", main=False)]  # fmt: skip
    lines = []
    for method, part in streams["methods"].items():
        seeds, line = part["seeds"], [name(method)]
        told = [transfer(seed["matrix"], streams["order"]) for seed in seeds]
        for key in kinds:
            values = [figures[key] for figures in told]
            spread = (min(values), max(values)) if len(values) > 1 else None
            line.append(number(sum(values) / len(values), ".4f", spread))
        overlays = [
            sum(o["bytes"] for o in seed["overlays"].values()) for seed in seeds if "overlays" in seed
        ]
        line += [size(max(overlays)) if overlays else Cell(MISSING)]
        line += [number(_mean([seed["seconds"] for seed in seeds]), ".1f"), number(part["rate"], "g")]
        lines.append(line)
    return Table("The stream: mean over seeds, and the smallest and largest", columns, lines)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def progressive_table(streams: Mapping[str, Any]) -> Table:
    columns = [Column("method", words=True)]
    columns += [Column(visit, "nats per byte") for visit in visits(streams)[1:]]
    lines = []
    for method, part in streams["methods"].items():
        losses = zip(*(map(or_nan, seed["progressive"]) for seed in part["seeds"]), strict=True)
        lines.append([name(method), *(number(_mean(loss), ".4f") for loss in losses)])
    return Table("Progressive loss: of every piece before it was learned, by visit", columns, lines)


def visits(streams: Mapping[str, Any]) -> list[str]:
    return ["start", *(f"{at} {domain}" for at, domain in enumerate(streams["order"], 1))]


def matrices(streams: Mapping[str, Any]) -> dict[str, list[dict[str, float]]]:
    """Method -> its result matrix, mean over seeds: losses at the start, then how they rose by each visit."""
    found = {}
    for method, part in streams["methods"].items():
        several = [
            [{domain: or_nan(loss) for domain, loss in row.items()} for row in seed["matrix"]]
            for seed in part["seeds"]
        ]
        found[method] = [
            {
                domain: _mean([matrix[at][domain] - (matrix[0][domain] if at else 0.0) for matrix in several])
                for domain in row
            }
            for at, row in enumerate(several[0])
        ]
    return found


def hottest(streams: Mapping[str, Any]) -> float:
    """The largest change of any method: where the colours end."""
    changes = [abs(v) for matrix in matrices(streams).values() for row in matrix[1:] for v in row.values()]
    return max((change for change in changes if math.isfinite(change)), default=0.0) or 1.0


def heat_table(streams: Mapping[str, Any], method: str) -> Table:
    matrix, limit = matrices(streams)[method], hottest(streams)
    lines = [[name("start"), *(number(value)._replace(value=None) for value in matrix[0].values())]]
    for visit, row in zip(visits(streams)[1:], matrix[1:], strict=True):
        line = [name(visit)]
        for domain, value in row.items():
            here = "visited" if visit.partition(" ")[2] == domain else ""
            cell = number(value, "+.3f")
            line.append(cell._replace(kind=here, heat=value / limit if math.isfinite(value) else None))
        lines.append(line)
    return Table(method, [Column("after visit", words=True), *map(Column, matrix[0])], lines)


def claim_tables(streams: Mapping[str, Any]) -> list[Table]:
    """For learners with paths and for every seed: which path took the tokens of each visit."""
    tables = []
    for method, part in streams["methods"].items():
        for at, seed in enumerate(part["seeds"]):
            paths = list(dict.fromkeys(path for claimed in seed["claimed"] for path in claimed))
            lines = []
            for visit, claimed in zip(visits(streams)[1:], seed["claimed"], strict=True):
                total = sum(claimed.values()) or 1
                shares = [claimed.get(path, 0) / total for path in paths]
                lines.append(
                    [name(visit), *(Cell(f"{s:.1%}", s, heat=-s) if s else Cell(MISSING, s) for s in shares)]
                )
            if len(paths) > 1:
                columns = [Column("visit", words=True), *map(Column, paths)]
                tables.append(Table(f"{method}, seed {at}: share of tokens by path", columns, lines))
    return tables
