"""Tables of single experiments: promises of `forgetting`, the paper's tables, options, matches, retrofits."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from studies.report import plots
from studies.report.readings import Result
from studies.report.tables import MISSING, Cell, Column, Table, count, name, number, size


def promises(result: Result) -> Table:
    """What must hold, what was found, and whether that is enough."""
    columns = [Column("promise", words=True), Column("worst figure"), Column("must be"),
               Column("verdict", words=True), Column("worst case", words=True)]  # fmt: skip
    lines = []
    for row in result.values["shows"]:
        sign = "\u2265" if row["at_least"] else "\u2264"
        worst = next((case for case, figure in row["figures"].items() if figure == row["worst"]), "")
        if row["worst"] is None or not math.isfinite(row["worst"]):
            verdict = Cell("not measured", "not measured", kind="bad" if result.judged else "")
        elif not result.judged:
            verdict = Cell("not judged at this size", "not judged")
        else:
            verdict = (
                Cell("holds", "holds", kind="good") if row["holds"] else Cell("missed", "missed", kind="bad")
            )
        must = Cell(f"{sign} {row['must']:g}", row["must"])
        close = row["worst"] not in (None, row["must"]) and f"{row['worst']:.4f}" == f"{row['must']:.4f}"
        figure = number(row["worst"], ".7f" if close else ".4f")  # rounding must not hide on which side it is
        lines.append([name(row["what"]), figure, must, verdict, name(worst)])
    return Table("What the guard promises", columns, lines)


def figures(result: Result) -> Table:
    """Every figure behind the promises."""
    columns = [Column("promise", words=True), Column("case", words=True), Column("figure")]
    lines = [
        [name(row["what"]), name(case), number(figure, ".4f", row.get("intervals", {}).get(case))]
        for row in result.values["shows"] for case, figure in row["figures"].items()
    ]  # fmt: skip
    return Table("Every figure, with its 95 % interval where there is one", columns, lines)


def harm(result: Result) -> Table:
    found = result.values["harm"]
    columns = [Column("overlay", words=True), Column("alone", "loss of A, nats"),
               Column("guarded", "loss of A, nats"), Column("rise of A's perplexity, guarded")]  # fmt: skip
    lines = [
        [name(overlay), number(part["alone"], ".4f"), number(part["guarded"], ".4f"),
         Cell(f"{part['rise']:.4%}", part["rise"])]
        for overlay, part in found["overlays"].items()
    ]  # fmt: skip
    caption = (
        f"Overlays made to ruin A, whose loss was {found['before']:.4f}; the bound allows a rise of "
        f"{found['bound']:.4%}"
    )
    return Table(caption, columns, lines)


def table1(result: Result) -> Table:
    columns = [Column("model", words=True), Column("validation perplexity"), Column("random batches"),
               Column("best step"), Column("parameters"), Column("active"), Column("multiply-adds per token"),
               Column("seconds"), Column("tokens per second", main=False), Column("MFU", main=False),
               Column("peak memory", main=False), Column("usage entropy")]  # fmt: skip
    lines = []
    for model, row in result.values["rows"].items():
        lines.append([
            name(model), number(row["val_ppl"]), number(row["val_ppl_random_batches"]),
            number(row["best_step"], "d"), count(row["parameters"]), count(row["active_parameters"]),
            count(row["multiply_adds_per_token"]), number(row["training_seconds"], ".0f"),
            number(row["tokens_per_second"], ",.0f"), number(row.get("mfu"), ".3f"),
            size(row.get("peak_memory_bytes")), number(row.get("usage_entropy"), ".2f"),
        ])  # fmt: skip
        if paper := (result.values.get("paper") or {}).get(model):
            none = number(None)
            lines.append([
                name(f"{model}, in the paper"), none, number(paper["val_ppl"], ".2f"), none,
                count(paper["parameters"]), none, none, number(paper["minutes"] * 60, ".0f"), none,
                number(paper["mfu"], ".3f"), none, none,
            ])  # fmt: skip
    return Table("Random batches are the paper's way to evaluate", columns, lines)


def table2(result: Result) -> list[Table]:
    """One table for each protocol."""
    points = {"before": "before", "best": "best", "end": "after"}
    columns = [Column("what learns", words=True)]
    columns += [Column(title, f"perplexity of {domain}") for domain in "AB" for title in points]
    columns += [Column("best step"), Column("trained"), Column("changed"),
                Column("usage entropy", main=False), Column("seconds", main=False)]  # fmt: skip
    tables = []
    for protocol, part in result.values["protocols"].items():
        lines = []
        for method, row in part["rows"].items():
            line = [name(method), *(number(row[key][x], ".2f") for x in "AB" for key in points.values())]
            line += [number(row["best"]["step"], "d"), count(row["trainable"]), count(row["changed"])]
            lines.append([*line, number(row.get("usage_entropy"), ".2f"), number(row["seconds"], ".0f")])
            if protocol == "paper" and (paper := (result.values.get("paper") or {}).get(method)):
                known = [number(paper.get(f"{x}_{key}"), ".2f") for x in "AB" for key in points.values()]
                lines.append([name(f"{method}, in the paper"), *known, *[number(None)] * 5])
        settings = part["settings"]
        chosen = "validation text" if settings["stops_early"] else "held-out text itself"
        tables.append(Table(
            f"The {protocol} protocol: {settings['steps']} steps of {settings['batch_size']} sequences, "
            f"learning rate {settings['learning_rate']:g}, {part['train_tokens']:,} tokens of B; "
            f"best by B's {chosen}",
            columns, lines,
        ))  # fmt: skip
    return tables


def sensitivity(result: Result) -> Table:
    figures = ("validation perplexity", "usage entropy", "overlap of A and B", "forgetting of A, nats",
               "B afterwards, nats", "parameters", "multiply-adds per token")  # fmt: skip
    columns = [Column("what is changed", words=True), *map(Column, figures)]
    lines = [
        [name(changed), number(row["val_ppl"], ".3f", _spread(row["val_ppl_seeds"])),
         number(row["usage_entropy"]), number(row["overlap"]), number(row["forgetting"]), number(row["B"]),
         count(row["parameters"]), count(row["multiply_adds_per_token"])]
        for changed, row in result.values["rows"].items()
    ]  # fmt: skip
    values = result.values
    way = f"{' to '.join(values['shift'])} by {values['method']} at a rate of {values['rate']:g}"
    return Table(f"One option changed at a time, then adapted from {way}", columns, lines)


def _spread(seeds: Sequence[float]) -> tuple[float, float] | None:
    return (min(seeds), max(seeds)) if len(seeds) > 1 else None


def sensitivity_plots(result: Result) -> dict[str, str]:
    """Does it forget less where domains share fewer patches? Or where it had learned less?"""
    rows, lost = result.values["rows"], "forgetting of A, nats per byte"
    against = {"overlap": "overlap of A's and B's patches", "val_ppl": "validation perplexity of A, before"}
    return {
        f"Forgetting against {title}": plots.scatter(
            {changed: (row[key], row["forgetting"]) for changed, row in rows.items()}, title, lost,
            f"forgetting against {title} for {len(rows)} models",
        )
        for key, title in against.items()
    }  # fmt: skip


def match(result: Result) -> Table:
    columns = [Column("text", words=True), Column("model", words=True),
               Column("validation loss, nats"), Column("perplexity"), Column("seeds"), Column("parameters"),
               Column("multiply-adds per token"), Column("trained with", words=True),
               Column("best step")]  # fmt: skip
    lines = []
    for dataset, models in result.values["datasets"].items():
        for model, row in models.items():
            losses = [math.inf if loss is None else loss for loss in row["val_loss"]]
            mean = sum(losses) / len(losses)
            perplexity = math.exp(mean) if mean < 700 else math.inf
            lines.append([
                name(dataset), name(model), number(mean, ".4f", _spread(losses)), number(perplexity),
                number(len(losses), "d"), count(row.get("parameters")),
                count(row.get("multiply_adds_per_token")), name(row.get("way", MISSING)),
                _steps(row.get("best_step", [])),
            ])  # fmt: skip
    return Table("Mean over seeds, and the smallest and largest", columns, lines)


def _steps(seeds: Sequence[int | None]) -> Cell:
    known = [step for step in seeds if step is not None]
    return Cell(", ".join(map(str, known)) or MISSING, sum(known) / len(known) if known else None)


def match_plots(result: Result) -> dict[str, str]:
    """One for each text. What diverged is not there."""
    work, loss = "multiply-adds per token, millions", "validation loss, nats per token"

    def point(row: Mapping[str, Any]) -> tuple[float, float]:
        losses, cost = row["val_loss"], row["multiply_adds_per_token"]
        known = cost is not None and None not in losses
        return (cost / 1e6, sum(losses) / len(losses)) if known else (math.inf, math.inf)

    return {
        dataset: plots.scatter(
            {model: point(row) for model, row in rows.items()}, work, loss,
            f"{dataset}: validation loss against multiply-adds for {len(rows)} models",
            {model: spread for model, row in rows.items()
             if None not in row["val_loss"] and (spread := _spread(row["val_loss"]))},
        )
        for dataset, rows in result.values["datasets"].items()
    }  # fmt: skip


def retrofit(result: Result) -> list[Table]:
    """One table for each domain."""
    columns = [Column("method", words=True)]
    columns += [Column(way, group) for group in ("perplexity of the domain", "over LoRA alone",
                "worst rise of a retained text") for way in ("alone", "guarded")]  # fmt: skip
    columns += [
        Column("rate"),
        Column("trained"),
        Column("best step", main=False),
        Column("seconds", main=False),
    ]
    tables = []
    for domain, rows in result.values["domains"].items():
        lines = []
        for method, row in rows.items():
            ways = [row[way] for way in ("alone", "guarded")]
            line = [name(method), *(number(way["B"]) for way in ways)]
            line += [number(way["B_over_lora"], ".4f", tuple(way["B_over_lora_interval"])) for way in ways]
            line += [Cell(f"{way['worst_rise']:+.2%}", way["worst_rise"]) for way in ways]
            line += [number(result.values["rates"][method], "g"), count(row["trained"])]
            lines.append([*line, number(row["best_step"], "d"), number(row["seconds"], ".0f")])
        before = next(iter(rows.values()))["before"]
        kept = ", ".join(f"{text} {ppl:.3f}" for text, ppl in before.items() if text != "B")
        caption = (
            f"{result.values['model']} learns {domain}: perplexity before {before['B']:.3f}; retained {kept}"
        )
        tables.append(Table(caption, columns, lines))
    return tables


PLOTS = {"sensitivity": sensitivity_plots, "match": match_plots}
"""Experiment -> the charts that go with its table."""
