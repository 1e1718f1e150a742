"""The tables and the chart of the study of quality at equal time."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from studies.report import charts
from studies.report.readings import Result
from studies.report.tables import Cell, Column, Table, count, name, number, percent, spread
from studies.statistics import mean

WORDS = {
    "eager": "launched one by one",
    "pass": "forward + backward, graph",
    "compiled": "compiled",
    "graphs": "compiled, graphs",
}
"""The ways to time a step, in words."""


def tables(result: Result) -> list[Table]:
    values = result.values
    found = [_shapes(values)]
    if no_slower := values["no_slower"].get(values["by"]):
        found.append(_no_slower(values["rows"], no_slower))
    if values.get("equal_time"):
        found.append(_equal_time(values["equal_time"]))
    if any(row.get("patches") for row in values["rows"].values()):
        found.append(_patches(values))
    return found


def _mean(losses: Sequence[float | None]) -> float | None:
    """None without any; not finite where a seed diverged."""
    return mean([math.inf if loss is None else loss for loss in losses]) if losses else None


def _spread(losses: Sequence[float | None]) -> tuple[float, float] | None:
    return spread([math.inf if loss is None else loss for loss in losses])


def _milliseconds(seconds: float | None) -> Cell:
    return number(None if seconds is None else 1e3 * seconds, ".2f")


def _shapes(values: Mapping[str, Any]) -> Table:
    ways, by = values["ways"], values["by"]
    columns = [Column("shape", words=True), Column("validation loss, nats"), Column("seeds"), Column("rate")]
    columns += [Column("ahead of dense at its time, nats")]
    columns += [Column(WORDS[way], "a training step, ms") for way in ways]
    columns += [Column(f"{streams}, ms", "a token, streams") for streams in (1, 64)]
    columns += [Column("parameters"), Column("multiply-adds per token")]
    lines = []
    for shape, row in values["rows"].items():
        losses = row["val_loss"]
        line = [name(shape), number(_mean(losses), ".4f", _spread(losses)), number(len(losses), "d")]
        line += [number(row.get("rate"), "g"), _ahead(values["equal_steps"].get(by, {}).get(shape))]
        line += [_milliseconds(row["times"].get(way)) for way in ways]
        for streams in ("1", "64"):
            decoded = row["decode"].get(streams) or {}
            line.append(_milliseconds(decoded.get("graph", decoded.get("eager"))))
        lines.append([*line, count(row.get("parameters")), count(row.get("multiply_adds_per_token"))])
    caption = (
        f"After {values['steps']:,} steps: mean over seeds, and the smallest and largest; ahead is by steps "
        f"timed as {WORDS[by]!r}, and a star is where no dense model is as fast or as slow"
    )
    return Table(caption, columns, lines)


def _no_slower(rows: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = [Column("dense model", words=True), Column("loss, nats"), Column("APN", words=True)]
    columns += [Column("loss, nats", "the APN"), Column("ahead, nats", "the APN")]
    lines = []
    for dense, best in found.items():
        losses = [_mean(rows[shape]["val_loss"]) for shape in (dense, best["shape"])]
        line = [name(dense), number(losses[0], ".4f"), name(best["shape"]), number(losses[1], ".4f")]
        lines.append([*line, number(best["ahead"], "+.4f")])
    return Table("The best APN whose step takes no longer than that of a dense model", columns, lines)


def _ahead(told: Mapping[str, Any] | None) -> Cell:
    if told is None:
        return number(None)
    cell = number(told["ahead"], "+.4f", spread(told["seeds"]))
    return cell if told["inside"] else cell._replace(text=cell.text + " *")


def _equal_time(found: Mapping[str, Any]) -> Table:
    columns = [Column("shape", words=True), Column("steps"), Column("validation loss, nats"), Column("seeds")]
    lines = []
    for shape, row in found["rows"].items():
        steps = number(row["steps"], ",d")
        if row["capped"]:
            steps = steps._replace(note="the texts have no more")
        losses = row["val_loss"]
        lines.append(
            [name(shape), steps, number(_mean(losses), ".4f", _spread(losses)), number(len(losses), "d")]
        )
    caption = f"Trained for as long as {found['within']}, by steps timed as {WORDS[found['way']]!r}"
    return Table(caption, columns, lines)


def _patches(values: Mapping[str, Any]) -> Table:
    """Means over layers and seeds, and what local learning cost."""
    local = values["local"]
    lost = local.get("forgotten", {})
    columns = [Column("shape", words=True), Column("patches of a layer"), Column("used"), Column("dead")]
    columns += [Column(title, "first patch in common") for title in ("two texts", "halves of one")]
    columns += [Column("of A, nats", "forgotten at equal B")]
    lines = []
    for shape, row in values["rows"].items():
        layers = [layer for seed in row.get("patches", []) for layer in seed.values()]
        if layers:
            line = [name(shape), number(layers[0]["patches"], ",d")]
            line.append(percent(mean([layer["used"] for layer in layers])))
            line.append(number(mean([layer["dead"] for layer in layers]), ",.0f"))
            line += [number(mean([layer[key] for layer in layers])) for key in ("overlap", "overlap_self")]
            rises = [rise for rise in lost.get(shape, []) if rise is not None]
            lines.append([*line, number(mean(rises) if rises else None, "+.4f", spread(rises))])
    tokens = max(
        layer["tokens"]
        for row in values["rows"].values()
        for seed in row.get("patches", [])
        for layer in seed.values()
    )
    caption = f"Patches over {tokens:,} tokens"
    if "B" in local:
        caption += f"; forgotten by strictly local steps on {local['shift']} to a loss of {local['B']:.4f}"
    return Table(caption, columns, lines)


def drawn(result: Result) -> dict[str, str]:
    """Loss over the time of a step; dense models are joined. What diverged or has no time is not there."""
    values = result.values
    by = values["by"]

    def point(row: Mapping[str, Any]) -> tuple[float, float]:
        time, loss = row["times"].get(by), _mean(row["val_loss"])
        return (1e3 * time, loss) if time and loss is not None else (math.inf, math.inf)

    rows = {shape.replace(" ", "=", 1): row for shape, row in values["rows"].items()}
    points = {shape: point(row) for shape, row in rows.items()}
    if not any(map(math.isfinite, sum(points.values(), ()))):
        return {}
    return {
        "time": charts.scatter(
            points,
            f"a training step ({WORDS[by]}), ms",
            "validation loss, nats per byte",
            "Loss over the time of a step",
            {
                shape: ends
                for shape, row in rows.items()
                if math.isfinite(points[shape][0]) and (ends := _spread(row["val_loss"]))
            },
            joined="dense",
        )
    }
