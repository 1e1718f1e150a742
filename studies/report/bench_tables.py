"""The tables of `shifts` and `forgetting`: every shift, means over them, and the stream."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from studies.plan import FOLIO, PAPER
from studies.report.readings import Bench
from studies.report.tables import MISSING, Cell, Column, Table, count, name, number, size, spread
from studies.shifts import WAYS, seeds_of
from studies.statistics import mean, or_nan, transfer

Rows = Mapping[str, Mapping[str, Any]]
Streams = Mapping[str, Any]
METHOD = Column("method", words=True)
OF_ANOTHER_KIND = (PAPER, FOLIO)
"""No part of means: the one has next to nothing to learn from, the other holds A's own plays."""


def in_terminal(bench: Bench) -> list[Table]:
    """Return the tables that a terminal shows."""
    found = [
        shift_table(f"{source} \u2192 {shift}, {seeds_of(rows)}", rows)
        for source, shifts in bench.shifts.items()
        for shift, rows in shifts.items()
    ]
    return [*found, stream_table(bench.streams)]


def shift_table(title: str, rows: Rows) -> Table:
    """Everything about one shift."""
    pairs = {"perplexity of A": "A", "perplexity of B": "B"}
    columns = [METHOD]
    columns += [Column(title, group) for group in pairs for title in ("before", *WAYS)]
    columns += [Column(way, group) for group in ("gain on B", "forgetting of A, nats") for way in WAYS]
    columns += [Column(way, group, main=False) for group in ("B / dense full", "area") for way in WAYS]
    costs = {"trained": False, "changed": True, "bytes": True, "memory": False, "seconds": False}
    columns += [Column(title, "cost", main) for title, main in costs.items()]
    columns += [Column(title, "learning", main=False) for title in ("rate", "best step")]
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
        lines.append([*line, Cell(", ".join(f"{step:d}" for step in steps), mean(steps))])
    return Table(title, columns, lines)


def overview(source: str, shifts: Mapping[str, Rows]) -> Table:
    """Every method, the mean over the shifts of one pretraining text but for those of another kind."""
    shifts = {name: rows for name, rows in shifts.items() if _has_gains(rows)} or shifts
    shifts = {name: rows for name, rows in shifts.items() if name not in OF_ANOTHER_KIND} or shifts
    first = next(iter(shifts.values()))
    kinds = {
        "gain on B": ("gain", ".3f"),
        "forgetting of A, nats": ("forgetting", ".4f"),
        "area": ("hypervolume", ".3f"),
    }
    columns = [METHOD, *(Column(way, group) for group in kinds for way in WAYS)]
    columns.append(Column("bytes", "most of any shift"))
    lines = []
    for method in first:
        rows = [part[method] for part in shifts.values()]
        line = [name(method)]
        for key, form in kinds.values():
            line += [number(_mean_known([row[way][key] for row in rows]), form) for way in WAYS]
        lines.append([*line, size(max(row["bytes"] for row in rows))])
    return Table(f"Pretrained on {source}, {seeds_of(first)}: mean over {', '.join(shifts)}", columns, lines)


def _has_gains(rows: Rows) -> bool:
    """Whether dense full gained anything: where it did not, there is no share of it to have."""
    return any(row["full_gained"] > 0 for row in rows.values())


def _mean_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return mean(known) if len(known) == len(values) else None


def overlap_table(title: str, routed: Mapping[str, Mapping[str, Any]]) -> Table:
    """How much of their patches A and B share in each layer, before and after, by those who have patches."""
    layers = list(next(iter(routed.values()))["before"])
    lines = []
    for method, routing in routed.items():
        pairs = [[routing[when][layer]["overlap"] for when in ("before", "after")] for layer in layers]
        lines.append([name(method), *(Cell(f"{old:.3f} \u2192 {new:.3f}", new) for old, new in pairs)])
    columns = [METHOD, *(Column(f"layer {layer}") for layer in layers)]
    return Table(f"{title}: overlap of A's and B's patches", columns, lines)


def stream_table(streams: Streams) -> Table:
    kinds = {
        "BWT": "backward transfer",
        "FWT": "forward transfer",
        "worst_on_the_way": "worst forgetting",
        "worst_forgetting": "worst forgetting at the end",
        "final": "loss at the end",
    }
    columns = [METHOD, *(Column(title, "nats per byte") for title in kinds.values())]
    columns += [Column("overlays, bytes"), Column("seconds", main=False), Column("rate", main=False)]
    lines = []
    for method, part in streams["methods"].items():
        seeds, line = part["seeds"], [name(method)]
        figures = [transfer(seed["matrix"], streams["order"]) for seed in seeds]
        for key in kinds:
            values = [figure[key] for figure in figures]
            line.append(number(mean(values), ".4f", spread(values)))
        kept = [seed["overlays"].values() for seed in seeds if "overlays" in seed]
        line.append(
            size(max(sum(overlay["bytes"] for overlay in own) for own in kept)) if kept else Cell(MISSING)
        )
        line += [number(mean([seed["seconds"] for seed in seeds]), ".1f"), number(part["rate"], "g")]
        lines.append(line)
    return Table("The stream: mean over seeds, and the smallest and largest", columns, lines)


def progressive_table(streams: Streams) -> Table:
    columns = [METHOD, *(Column(visit, "nats per byte") for visit in _visits(streams))]
    lines = []
    for method, part in streams["methods"].items():
        losses = zip(*(map(or_nan, seed["progressive"]) for seed in part["seeds"]), strict=True)
        lines.append([name(method), *(number(mean(loss), ".4f") for loss in losses)])
    return Table("Progressive loss: of every piece before it was learned, by visit", columns, lines)


def _visits(streams: Streams) -> list[str]:
    return [f"{at} {domain}" for at, domain in enumerate(streams["order"], 1)]


def _matrices(streams: Streams) -> dict[str, list[dict[str, float]]]:
    """Method -> its result matrix, mean over seeds: losses at the start, then how they rose by each visit."""
    found = {}
    for method, part in streams["methods"].items():
        several = [
            [{domain: or_nan(loss) for domain, loss in row.items()} for row in seed["matrix"]]
            for seed in part["seeds"]
        ]
        found[method] = [
            {
                domain: mean([matrix[at][domain] - (matrix[0][domain] if at else 0.0) for matrix in several])
                for domain in row
            }
            for at, row in enumerate(several[0])
        ]
    return found


def hottest(streams: Streams) -> float:
    """The largest change of any method: where the colours end."""
    changes = [abs(v) for matrix in _matrices(streams).values() for row in matrix[1:] for v in row.values()]
    return max((change for change in changes if math.isfinite(change)), default=0.0) or 1.0


def heat_tables(streams: Streams) -> list[Table]:
    """For every method what each visit did to every domain."""
    limit, tables = hottest(streams), []
    for method, matrix in _matrices(streams).items():
        lines = [[name("start"), *(number(value)._replace(value=None) for value in matrix[0].values())]]
        for visit, row in zip(_visits(streams), matrix[1:], strict=True):
            line = [name(visit)]
            for domain, value in row.items():
                here = "visited" if visit.partition(" ")[2] == domain else ""
                heat = value / limit if math.isfinite(value) else None
                line.append(number(value, "+.3f")._replace(kind=here, heat=heat))
            lines.append(line)
        tables.append(Table(method, [Column("after visit", words=True), *map(Column, matrix[0])], lines))
    return tables


def claim_tables(streams: Streams) -> list[Table]:
    """For learners with paths and for every seed: which path took the tokens of each visit."""
    tables = []
    for method, part in streams["methods"].items():
        for at, seed in enumerate(part["seeds"]):
            paths = list(dict.fromkeys(path for claimed in seed["claimed"] for path in claimed))
            if len(paths) < 2:
                continue
            lines = []
            for visit, claimed in zip(_visits(streams), seed["claimed"], strict=True):
                shares = [claimed.get(path, 0) / (sum(claimed.values()) or 1) for path in paths]
                cells = (Cell(f"{s:.1%}", s, heat=-s) if s else Cell(MISSING, s) for s in shares)
                lines.append([name(visit), *cells])
            columns = [Column("visit", words=True), *map(Column, paths)]
            tables.append(Table(f"{method}, seed {at}: share of tokens by path", columns, lines))
    return tables
