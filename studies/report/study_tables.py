"""The tables and charts of single studies: promises, the paper's tables, options, matches, retrofits."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from studies.report import bench_tables, charts, lesson_tables, time_tables
from studies.report.readings import FACT_METHODS, Result, bench_of
from studies.report.tables import (
    MISSING,
    Cell,
    Column,
    Table,
    count,
    name,
    number,
    percent,
    size,
    spread,
    text,
)
from studies.table2 import verdict


def shown(result: Result) -> str:
    """What a terminal shows: tables, and sentences about them."""
    bench = bench_of(result.values)
    tables = [*TABLES[result.study](result), *(bench_tables.in_terminal(bench) if bench else ())]
    sentences = verdict(result.values) if result.study == "table2" else []
    return "\n\n".join(filter(None, [*map(text, tables), "\n".join(sentences)]))


def forgetting(result: Result) -> list[Table]:
    return [promises(result), harm(result)]


def promises(result: Result) -> Table:
    """What must hold, what was found, and whether that is enough."""
    columns = [
        Column("promise", words=True),
        Column("worst figure"),
        Column("must be"),
        Column("verdict", words=True),
        Column("worst case", words=True),
    ]
    lines = []
    for row in result.values["shows"]:
        worst, must = row["worst"], row["must"]
        case = next((case for case, figure in row["figures"].items() if figure == worst), "")
        if worst is None or not math.isfinite(worst):
            verdict = Cell("not measured", "not measured", kind="bad" if result.judged else "")
        elif not result.judged:
            verdict = Cell("not judged at this size", "not judged")
        else:
            verdict = (
                Cell("holds", "holds", kind="good") if row["holds"] else Cell("missed", "missed", kind="bad")
            )
        close = worst not in (None, must) and f"{worst:.4f}" == f"{must:.4f}"
        figure = number(worst, ".7f" if close else ".4f")  # rounding must not hide on which side it is
        sign = "\u2265" if row["at_least"] else "\u2264"
        lines.append([name(row["what"]), figure, Cell(f"{sign} {must:g}", must), verdict, name(case)])
    return Table("What the guard promises", columns, lines)


def figures(result: Result) -> Table:
    """Every figure behind the promises."""
    columns = [Column("promise", words=True), Column("case", words=True), Column("figure")]
    lines = [
        [name(row["what"]), name(case), number(figure, ".4f", row.get("intervals", {}).get(case))]
        for row in result.values["shows"]
        for case, figure in row["figures"].items()
    ]
    return Table("Every figure, with its 95 % interval where there is one", columns, lines)


def harm(result: Result) -> Table:
    found, group = result.values["harm"], "loss of A, nats"
    columns = [Column("overlay", words=True), Column("alone", group), Column("guarded", group)]
    columns.append(Column("rise of A's perplexity, guarded"))
    lines = [
        [
            name(overlay),
            number(part["alone"], ".4f"),
            number(part["guarded"], ".4f"),
            Cell(f"{part['rise']:.4%}", part["rise"]),
        ]
        for overlay, part in found["overlays"].items()
    ]
    caption = (
        f"Overlays made to ruin A, whose loss was {found['before']:.4f}; the bound allows a rise of "
        f"{found['bound']:.4%}"
    )
    return Table(caption, columns, lines)


def table1(result: Result) -> list[Table]:
    columns = [Column("model", words=True), Column("validation perplexity"), Column("random batches")]
    columns += map(Column, ("best step", "parameters", "active", "multiply-adds per token", "seconds"))
    columns += [Column(title, main=False) for title in ("tokens per second", "MFU", "peak memory")]
    columns.append(Column("usage entropy"))
    none, lines = number(None), []
    for model, row in result.values["rows"].items():
        line = [name(model), number(row["val_ppl"]), number(row["val_ppl_random_batches"])]
        line += [number(row["best_step"], "d"), count(row["parameters"]), count(row["active_parameters"])]
        line += [count(row["multiply_adds_per_token"]), number(row["training_seconds"], ".0f")]
        line += [number(row["tokens_per_second"], ",.0f"), number(row.get("mfu"), ".3f")]
        lines.append([*line, size(row.get("peak_memory_bytes")), number(row.get("usage_entropy"), ".2f")])
        if paper := (result.values.get("paper") or {}).get(model):
            line = [name(f"{model}, in the paper"), none, number(paper["val_ppl"], ".2f"), none]
            line += [count(paper["parameters"]), none, none, number(paper["minutes"] * 60, ".0f")]
            lines.append([*line, none, number(paper["mfu"], ".3f"), none, none])
    return [Table("Random batches are the paper's way to evaluate", columns, lines)]


def table2(result: Result) -> list[Table]:
    """One table for each protocol."""
    points = {"before": "before", "best": "best", "end": "after"}
    columns = [Column("what learns", words=True)]
    columns += [Column(title, f"perplexity of {domain}") for domain in "AB" for title in points]
    columns += [Column("best step"), Column("trained"), Column("changed")]
    columns += [Column("usage entropy", main=False), Column("seconds", main=False)]
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
        unknown = f" ({part['left_out']:,} characters left out)" if part.get("left_out") else ""
        caption = (
            f"The {protocol} protocol: {settings['steps']} steps of {settings['batch_size']} sequences, "
            f"learning rate {settings['learning_rate']:g}, {part['train_tokens']:,} tokens of B{unknown}; "
            f"best by B's {chosen}"
        )
        tables.append(Table(caption, columns, lines))
    return tables


def sensitivity(result: Result) -> list[Table]:
    values = result.values
    titles = ["validation perplexity", "usage entropy", "overlap of A and B", "forgetting of A, nats"]
    titles += ["B afterwards, nats", "parameters", "multiply-adds per token"]
    columns = [Column("what is changed", words=True), *map(Column, titles)]
    lines = []
    for changed, row in values["rows"].items():
        line = [name(changed), number(row["val_ppl"], ".3f", spread(row["val_ppl_seeds"]))]
        line += [number(row[key]) for key in ("usage_entropy", "overlap", "forgetting", "B")]
        lines.append([*line, count(row["parameters"]), count(row["multiply_adds_per_token"])])
    way = f"{' to '.join(values['shift'])} by {values['method']} at a rate of {values['rate']:g}"
    return [Table(f"One option changed at a time, then adapted from {way}", columns, lines)]


def sensitivity_charts(result: Result) -> dict[str, str]:
    """Does it forget less where domains share fewer patches? Or where it had learned less?"""
    against = {"overlap": "overlap of A's and B's patches", "val_ppl": "validation perplexity of A, before"}
    return {
        f"Forgetting against {title}": charts.scatter(
            {changed: (row[key], row["forgetting"]) for changed, row in result.values["rows"].items()},
            title,
            "forgetting of A, nats per byte",
            f"Forgetting against {title}",
        )
        for key, title in against.items()
    }


def knobs(result: Result) -> list[Table]:
    """Those of an online learner, and those of a guarded one."""
    titles = ("old domain", "new domain", "windows of both", "patches that moved", "patches added")
    columns = [Column("what is turned", words=True), *map(Column, titles)]
    paths = [Column("old domain", "its overlay alone"), Column("new domain", "its overlay alone")]
    lines: dict[bool, list[Any]] = {False: [], True: []}
    for turned, row in result.values["rows"].items():
        is_guarded = turned.startswith("guard")
        by_seed = row["by_seed"]
        line = [name(turned)]
        line += [number(row[text], "+.4f", spread(by_seed[text])) for text in ("old", "new", "mixed")]
        line += [number(row["moved"], ".2f"), number(row["allocated"], ".0f")]
        line += [number(row[path], "+.4f") for path in ("path_old", "path_new")] if is_guarded else []
        lines[is_guarded].append(line)
    values = result.values
    how = f"{values['tokens']:,} tokens, {' to '.join(values['shift'])}, at a rate of {values['rate']:g}"
    return [
        Table(
            f"One knob of a learner turned at a time: nats by which losses rose after {how}",
            columns,
            lines[False],
        ),
        Table(f"The same for a guarded learner: {how}", columns + paths, lines[True]),
    ]


def knobs_charts(result: Result) -> dict[str, str]:
    """What each knob costs the old domain and buys on the new one; settings of the guard are too close."""
    points = {
        re.sub(r"^(\w+)[:,= ]+", r"\1=", turned): (row["old"], -row["new"])
        for turned, row in result.values["rows"].items()
        if not turned.startswith("guard,")
    }
    titles = ("lost on the old domain, nats per byte", "gained on the new one, nats per byte")
    return {"knobs": charts.scatter(points, *titles, "Learning against forgetting, by knob")}


def anatomy(result: Result) -> list[Table]:
    """Of patches first, then of every FFN."""
    values = result.values
    columns = [Column("layer", words=True)]
    columns += [Column(title, "variance of the loss between") for title in ("patches", "answers")]
    columns += [Column(title, "loss of a patch, nats") for title in ("10 %", "median", "90 %")]
    columns += [Column(title, "active sets") for title in ("occur", "once", "as good as", "of")]
    columns += [
        Column(f"the {most} commonest", "share of the tokens") for most in values["layers"]["0"]["covered"]
    ]
    lines = []
    for layer, row in values["layers"].items():
        line = [name(layer), *(number(row[key], ".1%") for key in ("explained", "by the answer"))]
        line += [number(nats, ".3f") for nats in row["quantiles"]]
        line += [count(round(row[key])) for key in ("occur", "once", "effective", "possible")]
        lines.append(line + [number(share, ".1%") for share in row["covered"].values()])
    tokens = next(iter(values["layers"].values()))["tokens"]
    ranked = [Column("layer", words=True), Column("FFN", words=True), Column("k r"), Column("r")]
    ranked += [
        Column("updates of all tokens", "effective rank"),
        Column("the map of one token", "effective rank"),
    ]
    rows = [
        [name(layer), name(kind), count(row["bound"]), count(row["code"])]
        + [number(row[key], ".1f") for key in ("updates", "map")]
        for layer in values["ranks"]["dense"]
        for kind, row in ((kind, values["ranks"][kind][layer]) for kind in ("dense", "apn"))
    ]
    return [
        Table(f"Patches over {tokens:,} tokens of {values['text']}: means over seeds", columns, lines),
        Table("What an FFN does to a token, beside what k and r allow", ranked, rows),
    ]


def capacity(result: Result) -> list[Table]:
    """Models, then lessons: bits that are kept, beside what they are kept in."""
    columns = [
        Column("what learned", words=True),
        Column("exposures"),
        Column("people"),
        Column("values right"),
    ]
    columns += [Column("bits kept of a person"), Column("of all", "bits per parameter")]
    columns += [Column("of FFNs", "bits per parameter"), Column("bits per byte"), Column("bytes of a lesson")]
    columns += [Column("rate"), Column("seconds", main=False)]
    lines = []
    for title, row in result.values["rows"].items():
        line = [name(title.partition(",")[0]), count(row["exposures"]), count(row["people"])]
        line += [number(row["values right"], ".1%"), number(row["bits kept of a person"], ".2f")]
        keys = ("bits per parameter", "bits per parameter of FFNs", "bits per byte")
        line += [number(row.get(key), ".3f") for key in keys]
        line += [number(row.get("bytes of a lesson"), ",.0f"), number(row["rate"], "g")]
        lines.append([*line, number(row["seconds"], ".0f")])
    bits = next(iter(result.values["rows"].values()))["bits of a person"]
    return [Table(f"Biographies of {bits:.2f} bits beside a name", columns, lines)]


OLD_TEXT = {"none": "never", "before": "before", "always": "always"}


def locality(result: Result) -> list[Table]:
    """The stream, and then each domain of it."""
    values = result.values
    columns = [Column("what learns", words=True), Column("sees the old text", words=True)]
    columns += [Column(title, "worst rise of a domain, nats") for title in ("at the end", "ever")]
    columns += [Column("mean gain of new domains, nats"), Column("rise of a long text's beginning")]
    columns += [Column("patches touched"), Column("shared top patches"), Column("by chance"), Column("rate")]
    lines = []
    for learner, row in values["rows"].items():
        shared = row["overlap"] or {"shared": None, "chance": None}
        line = [name(learner), name(OLD_TEXT[row["old_text"]])]
        line += [number(row["worst"], ".4f", spread(row["worst_seeds"])), number(row["worst_ever"], ".4f")]
        line += [number(row["gain"], ".3f"), number(row["within"], ".4f", spread(row["within_seeds"]))]
        line += [count(row["touched"][-1][1] if row["touched"] else None)]
        line += [number(shared["shared"], ".2f"), number(shared["chance"], ".2f")]
        lines.append([*line, number(row["rate"]["rate"], "g")])
    home, *new = values["order"]
    each = [Column("what learns", words=True)]
    each += [Column(domain, "rise since it was learned") for domain in values["order"]]
    each += [Column(domain, "gain at the end") for domain in new]
    rows = [
        [name(learner)]
        + [number(row["rises"][domain], ".4f") for domain in values["order"]]
        + [number(row["gains"][domain], ".3f") for domain in new]
        for learner, row in values["rows"].items()
    ]
    way = f"{', '.join(new)}, {values['tokens']:,} bytes each, by models of {home}"
    return [
        Table(f"A stream without labels, seen once: {way}", columns, lines),
        Table(f"Domain by domain, nats per byte: {way}", each, rows),
    ]


def locality_charts(result: Result) -> dict[str, str]:
    """What each learner costs the domain that fares worst, and what it gains."""
    points = {learner: (row["worst"], row["gain"]) for learner, row in result.values["rows"].items()}
    titles = ("worst rise of a domain at the end, nats per byte", "mean gain of the new domains")
    return {"locality": charts.scatter(points, *titles, "A stream without labels, guard or replay")}


def gaps(result: Result) -> list[Table]:
    """Everything about the base's own text, and about windows that mix it with another."""
    values = result.values
    rows = values["models"].items()
    lengths = values["prompts"]
    columns = [Column("model", words=True)]
    columns += [Column(f"byte {at}", "rise of the old text's loss") for at in values["shown"]]
    columns += [Column("all others", "rise of the old text's loss")]
    columns += [
        Column("the same", "greedy answers"),
        Column("bytes until the first other one", "greedy answers"),
    ]
    columns += [Column(f"{length} bytes", "share written by an overlay, prompts of") for length in lengths]
    columns += [Column("windows that mix, rise")]
    lines = []
    for model, row in rows:
        line = [name(model), *(number(row["by_position"][at - 1], "+.4f") for at in values["shown"])]
        line += [number(row["later"], "+.4f"), percent(row["same"]), number(row["until"], ".1f")]
        line += [percent((row["written"] or {}).get(str(length))) for length in lengths]
        lines.append([*line, number(row["mixed"], "+.4f")])
    caption = f"What the bound does not cover: {values['order'][0]} after {values['order'][1]}"
    return [Table(caption, columns, lines)]


def gaps_charts(result: Result) -> dict[str, str]:
    """Where in a window the old text loses."""
    series = {model: row["by_position"] for model, row in result.values["models"].items()}
    titles = ("byte of the window", "rise of the old text's loss, nats")
    return {"gaps": charts.lines(series, *titles, "The first bytes of a window")}


def match(result: Result) -> list[Table]:
    columns = [Column("text", words=True), Column("model", words=True), Column("validation loss, nats")]
    columns += map(Column, ("perplexity", "seeds", "parameters", "multiply-adds per token"))
    columns += [Column("trained with", words=True), Column("best step")]
    lines = []
    for dataset, models in result.values["datasets"].items():
        for model, row in models.items():
            losses = [math.inf if loss is None else loss for loss in row["val_loss"]]
            mean = sum(losses) / len(losses)
            perplexity = math.exp(mean) if mean < 700 else math.inf
            line = [name(dataset), name(model), number(mean, ".4f", spread(losses)), number(perplexity)]
            line += [number(len(losses), "d"), count(row.get("parameters"))]
            line += [count(row.get("multiply_adds_per_token")), name(row.get("way", MISSING))]
            lines.append([*line, _steps(row.get("best_step", []))])
    return [Table("Mean over seeds, and the smallest and largest", columns, lines)]


def _steps(seeds: Sequence[int | None]) -> Cell:
    known = [step for step in seeds if step is not None]
    return Cell(", ".join(map(str, known)) or MISSING, sum(known) / len(known) if known else None)


def match_charts(result: Result) -> dict[str, str]:
    """One for each text. What diverged is not there."""

    def point(row: Mapping[str, Any]) -> tuple[float, float]:
        losses, cost = row["val_loss"], row["multiply_adds_per_token"]
        known = cost is not None and None not in losses
        return (cost / 1e6, sum(losses) / len(losses)) if known else (math.inf, math.inf)

    return {
        dataset: charts.scatter(
            {model: point(row) for model, row in rows.items()},
            "multiply-adds per token, millions",
            "validation loss, nats per token",
            dataset,
            {
                model: ends
                for model, row in rows.items()
                if None not in row["val_loss"] and (ends := spread(row["val_loss"]))
            },
        )
        for dataset, rows in result.values["datasets"].items()
    }


def retrofit(result: Result) -> list[Table]:
    """One table for each domain."""
    groups = ("perplexity of the domain", "over LoRA alone", "worst rise of a retained text")
    columns = [Column("method", words=True)]
    columns += [Column(way, group) for group in groups for way in ("alone", "guarded")]
    columns += [Column("rate"), Column("trained")]
    columns += [Column("best step", main=False), Column("seconds", main=False)]
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
        kept = ", ".join(f"{kind} {ppl:.3f}" for kind, ppl in before.items() if kind != "B")
        caption = (
            f"{result.values['model']} learns {domain}: perplexity before {before['B']:.3f}; retained {kept}"
        )
        tables.append(Table(caption, columns, lines))
    return tables


def facts(result: Result) -> list[Table]:
    """One line for each figure, one column for each method."""
    methods = result.values["methods"]
    columns = [Column("figure", words=True), *(Column(FACT_METHODS.get(m, m)) for m in methods)]
    chunks = [[len(_chunks(cell)) for cell in _cells(result, method)] for method in methods]
    lines = [[name("chunks taught"), *(number(min(taught, default=None), "d") for taught in chunks)]]
    titles = dict.fromkeys(title for row in methods.values() for title in row if title != "seeds")
    for title in titles:
        line = [name(title)]
        for row in methods.values():
            known = row.get(title, {})
            ends = (known["least"], known["most"]) if len(row["seeds"]) > 1 and known else None
            form = ",.0f" if "bytes" in title else ".5f" if "background" in title else ".4f"
            line.append(number(known.get("mean"), form, ends))
        lines.append(line)
    return [
        Table("Shares of right answers, and rises of perplexity as shares; seeds in brackets", columns, lines)
    ]


def _cells(result: Result, method: str) -> list[Mapping[str, Any]]:
    first, _, keep = method.partition(", ")
    return [
        cell
        for cell in result.values["cells"]
        if (cell["settings"]["method"], cell["settings"]["keep"]) == (first, keep or "nothing")
    ]


def _chunks(cell: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The chunks alone, without the revisions and the capitals, which are taught after all of them."""
    return [chunk for chunk in cell["chunks"] if chunk["name"].startswith("chunk ")]


def stream_rates(result: Result) -> list[Table]:
    columns = [Column("method", words=True), Column("rate"), Column("horizon, bytes"), Column("seeds")]
    titles = {
        "final": "loss at the end",
        "progressive": "before learning",
        "new_texts": "before learning, new texts",
    }
    columns += [Column(title, "nats per byte") for title in titles.values()]
    lines = []
    for row in result.values["summary"]:
        line = [name(row["method"]), number(row["rate"], "g"), number(row["horizon_tokens"], ",d")]
        line += [number(row["seeds"], "d"), number(row["final"], ".4f", spread(row["final_seeds"]))]
        lines.append([*line, number(row["progressive"], ".4f"), number(row["new_texts"], ".4f")])
    return [Table("Mean over seeds, and the smallest and largest", columns, lines)]


def bench_layer(result: Result) -> list[Table]:
    """Every backend and every peer at every size."""
    ratios = {"forward": "forward", "forward + backward": "forward_backward", "memory": "extra_memory"}
    columns = [Column("d, tokens, K, r, k", words=True), Column("layer", words=True), Column("parameters")]
    columns += [Column(title, "over dense") for title in ratios]
    columns += [Column("forward + backward, \u00b5s"), Column("launched one by one, \u00b5s")]
    lines = []
    for part in result.values["results"]:
        shape = ", ".join(str(part["size"][key]) for key in ("dim", "tokens", "num_patches", "rank", "top_k"))
        for row in part["rows"]:
            line = [name(shape), name(row["name"]), count(row["parameters"])]
            line += [number(row.get(f"{key}_over_dense"), ".2f") for key in ratios.values()]
            times = (row.get("forward_backward"), row.get("eager_forward_backward"))
            lines.append([*line, *(number(None if t is None else 1e6 * t, ",.0f") for t in times)])
    return [
        Table(f"{result.values['config']['dtype']}, replayed CUDA graphs where there are any", columns, lines)
    ]


TABLES: dict[str, Callable[[Result], list[Table]]] = {
    "shifts": lambda result: [],
    "forgetting": forgetting,
    "table1": table1,
    "table2": table2,
    "sensitivity": sensitivity,
    "knobs": knobs,
    "anatomy": anatomy,
    "capacity": capacity,
    "locality": locality,
    "gaps": gaps,
    "match": match,
    "time": time_tables.tables,
    "retrofit": retrofit,
    "facts": facts,
    "trivia": lesson_tables.trivia,
    "edits": lesson_tables.edits,
    "guarded streams at a rate that falls": stream_rates,
    "bench layer": bench_layer,
    "bench layer --sweep": bench_layer,
}
"""Study -> its own tables, beside those of the benchmark."""
CHARTS: dict[str, Callable[[Result], dict[str, str]]] = {
    "sensitivity": sensitivity_charts,
    "knobs": knobs_charts,
    "locality": locality_charts,
    "gaps": gaps_charts,
    "match": match_charts,
    "time": time_tables.drawn,
}
"""Study -> the charts that go with its table, by their titles."""
