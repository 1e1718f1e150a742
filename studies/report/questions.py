"""The questions that the first page of the results answers, each with one table from the JSON of results."""

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from studies.report import bench_tables
from studies.report.readings import FACT_METHODS, Result, bench_of
from studies.report.tables import MISSING, Cell, Column, Table, name, number
from studies.statistics import mean, transfer

Results = Mapping[str, Result]
"""Study -> the first of its results."""


class Question(NamedTuple):
    """A question, the studies that its answer is taken from, and its table; the first has the figure."""

    title: str
    studies: Sequence[str]
    table: Callable[[Results], Table]
    figure: str = ""  # how the name of its file ends
    any_study: bool = False  # answered by those of its studies that are there

    def answered_by(self, studies: Container[str]) -> bool:
        return (any if self.any_study else all)(study in studies for study in self.studies)


def percent(value: float | None) -> Cell:
    return Cell(MISSING) if value is None else Cell(f"{value:.1%}", value)


def rise(value: float | None) -> Cell:
    """By how much a perplexity rose; what is small has more digits."""
    if value is None:
        return Cell(MISSING)
    digits = 0 if abs(value) >= 1 else 1 if abs(value) >= 0.01 else 3
    return Cell(f"{value:+.{digits}%}" if value else "0%", value)


def facts_table(caption: str, figures: Mapping[str, str]) -> Callable[[Results], Table]:
    """A table of some figures of the study of facts: column -> what the figure is called there."""

    def table(results: Results) -> Table:
        columns = [Column("what learns", words=True), Column("seeds"), *map(Column, figures)]
        lines = []
        for method, row in results["facts"].values["methods"].items():
            means = {title: row.get(key, {}).get("mean") for title, key in figures.items()}
            cells = [(rise if "perplexity" in title else percent)(mean) for title, mean in means.items()]
            lines.append([name(FACT_METHODS.get(method, method)), number(len(row["seeds"]), "d"), *cells])
        return Table(caption, columns, lines)

    return table


SHOWN = (
    "dense, full",
    "dense, FFN only",
    "dense, LoRA on all",
    "dense, EWC 1",
    "dense, replay 5 %",
    "MoE, FFN only",
    "APN, full",
    "APN, paper rule",
    "APN, strictly local",
)
"""The methods of `shifts` that the first page shows; of unknown ones the first few."""


def domains(results: Results) -> Table:
    """The rise of the old text's perplexity, and the new text's, on the first two shifts of the means."""
    bench = bench_of(results["shifts"].values)
    assert bench is not None
    (source, shifts), *_ = bench.shifts.items()
    chosen = [shift for shift in shifts if shift not in bench_tables.OF_ANOTHER_KIND][:2]
    columns = [Column("what learns", words=True)]
    for shift in chosen:
        columns += [Column(f"{source} after {shift}, {way}") for way in ("alone", "guarded")]
        columns.append(Column(f"perplexity of {shift}"))
    known = list(shifts[chosen[0]])
    lines = []
    for method in [method for method in SHOWN if method in known] or known[: len(SHOWN)]:
        line = [name(method)]
        for shift in chosen:
            row = shifts[shift][method]
            line += [rise(row[way]["A"] / row["A_before"] - 1) for way in ("alone", "guarded")]
            line.append(number(row["alone"]["B"]))
        lines.append(line)
    return Table(
        f"Rise of the perplexity of {source}, and the perplexity of the text that was learned", columns, lines
    )


def streams(results: Results) -> Table:
    """What is left at the end of the stream, and what was predicted before it was learned."""
    found = results["shifts"].values["streams"]
    titles = ("loss at the end", "lost at the end, worst text", "loss before learning")
    columns = [Column("what learns", words=True), *(Column(title, "nats per byte") for title in titles)]
    lines = []
    for method, part in found["methods"].items():
        figures = [transfer(seed["matrix"], found["order"]) for seed in part["seeds"]]
        before = [mean(seed["progressive"]) for seed in part["seeds"] if None not in seed["progressive"]]
        line = [
            name(method),
            *(number(mean([f[key] for f in figures])) for key in ("final", "worst_forgetting")),
        ]
        lines.append([*line, number(mean(before) if len(before) == len(figures) else None)])
    lines.sort(key=lambda line: line[1].value if isinstance(line[1].value, float) else math.inf)
    return Table("The best first", columns, lines)


def quality(results: Results) -> Table:
    """Nats behind the best dense model on every text, beside what a model has and costs."""
    datasets = results["match"].values["datasets"]
    first, *_ = datasets
    dense = datasets[first].get("dense", {})
    costs = {"parameters": "parameters", "multiply-adds": "multiply_adds_per_token"}
    columns = [Column("model", words=True), *(Column(f"{title} / dense") for title in costs)]
    columns += [Column(f"nats behind dense, {dataset}") for dataset in datasets]
    lines = []
    for model, row in datasets[first].items():
        line = [name(model)]
        for key in costs.values():
            known = row.get(key) and dense.get(key)
            line.append(number(row[key] / dense[key] if known else None, ".2f"))
        lines.append([*line, *(number(behind(models, model), "+.3f") for models in datasets.values())])
    return Table(f"Parameters and multiply-adds are those on {first}", columns, lines)


def _loss(row: Mapping[str, Any]) -> float:
    return math.inf if None in row["val_loss"] else mean(row["val_loss"])


def behind(models: Mapping[str, Any], model: str) -> float | None:
    """By how many nats a model is behind the best dense one."""
    dense = [_loss(row) for other, row in models.items() if other.startswith("dense")]
    return _loss(models[model]) - min(dense) if model in models and dense else None


RATIOS = {
    "forward": "forward_over_dense",
    "forward + backward": "forward_backward_over_dense",
    "memory": "extra_memory_over_dense",
    "forward + backward, launched one by one": "eager_forward_backward_over_dense",
}


def _layers(result: Result) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The sizes that were measured but for extreme ones, and the figures of our fastest backend there."""
    for part in result.values["results"]:
        ours = [row for row in part["rows"] if row["name"] in ("triton", "grouped")]
        size = part["size"]
        if size["tokens"] < 256 or size["num_patches"] > 4096:
            continue
        shape = f"d = {size['dim']}, {size['tokens']} tokens, {size['top_k']} of {size['num_patches']}"
        yield f"{shape}, rank {size['rank']}", ours[0]


def speed(results: Results) -> Table:
    columns = [Column("layer", words=True), *(Column(f"{title} / dense") for title in RATIOS)]
    lines = [
        [name(size), *(number(row.get(key), ".2f") for key in RATIOS.values())]
        for size, row in _layers(results["bench layer"])
    ]
    return Table("Time and memory of one layer over those of a dense FFN of width 4 d", columns, lines)


def losses(results: Results) -> Table:
    """Where something else is better: one line for each figure."""
    columns = [
        Column("where", words=True),
        Column("APN"),
        Column("beside it"),
        Column("which is", words=True),
    ]
    lines = [line for study, found in LOSSES.items() if study in results for line in found(results[study])]
    return Table("Figures of an APN beside something that is better there", columns, lines)


def _lost_facts(result: Result) -> list[list[Cell]]:
    own = result.values["methods"]["basins"]
    cells = [cell for cell in result.values["cells"] if cell["settings"]["method"] == "basins"]
    before = mean([cell["original"]["capitals"]["kept, question 0"] for cell in cells])
    kept, never = own["other capitals, question"]["mean"], own["second sentence never taught"]["mean"]
    return [
        [
            name("capitals of other countries, after 15 wrong ones were taught"),
            percent(kept),
            percent(before),
            name("the base"),
        ],
        [
            name("a form never taught (the second sentence)"),
            percent(never),
            percent(own["taught form"]["mean"]),
            name("the taught form"),
        ],
    ]


def _lost_shifts(result: Result) -> list[list[Cell]]:
    bench = bench_of(result.values)
    assert bench is not None
    lines = []
    (source, shifts), *_ = bench.shifts.items()
    for shift in [shift for shift in shifts if shift not in bench_tables.OF_ANOTHER_KIND][:2]:
        row = shifts[shift]
        if {"APN, paper rule", "MoE, FFN only"} <= set(row):
            ours, experts = (
                row[method]["alone"]["A"] / row[method]["A_before"] - 1
                for method in ("APN, paper rule", "MoE, FFN only")
            )
            where = name(f"rise of {source}'s perplexity after {shift}, without a guard")
            lines.append([where, rise(ours), rise(experts), name("a mixture of experts")])
    ends = {
        method: mean([transfer(seed["matrix"], bench.streams["order"])["final"] for seed in part["seeds"]])
        for method, part in bench.streams["methods"].items()
    }
    ours, other = "APN, guarded, no labels", "dense, guarded, no labels"
    if {ours, other} <= set(ends):
        where = name("the stream without labels, nats per byte at the end")
        lines.append(
            [where, number(ends[ours]), number(ends[other]), name("copies of a dense model, guarded")]
        )
    return lines


def _lost_match(result: Result) -> list[list[Cell]]:
    lines = []
    for dataset, models in result.values["datasets"].items():
        dense = min((_loss(row) for other, row in models.items() if other.startswith("dense")), default=None)
        for model in ("APN, equal parameters", "APN, the paper's"):
            if model in models and dense is not None and _loss(models[model]) > dense:
                ours = number(_loss(models[model]))
                lines.append(
                    [name(f"{dataset}, nats: {model}"), ours, number(dense), name("the best dense model")]
                )
    return lines


def _lost_time(result: Result) -> list[list[Cell]]:
    return [
        [
            name(f"time, forward + backward: {size}"),
            number(ratio, ".2f"),
            number(1.0, ".2f"),
            name("a dense FFN"),
        ]
        for size, row in _layers(result)
        if (ratio := row["forward_backward_over_dense"]) > 1
    ]


LOSSES: dict[str, Callable[[Result], list[list[Cell]]]] = {
    "facts": _lost_facts,
    "shifts": _lost_shifts,
    "match": _lost_match,
    "bench layer --sweep": _lost_time,
}

QUESTIONS = (
    Question(
        "What does it forget when it is taught facts?",
        ["facts"],
        facts_table(
            "After all chunks of facts were taught",
            {
                "first chunk still known": "first chunk",
                "last chunk known": "last chunk",
                "perplexity of the worst of four texts": "worst background text",
            },
        ),
    ),
    Question(
        "What does it know after lessons?",
        ["facts"],
        facts_table(
            "Right answers, over all facts",
            {
                "taught form": "taught form",
                "first question never taught": "first question never taught",
                "second question": "second question never taught",
                "first sentence never taught": "first sentence never taught",
                "second sentence": "second sentence never taught",
                "revised facts": "revised",
            },
        ),
    ),
    Question("What does it forget when it learns a whole text?", ["shifts"], domains, "pareto_shakespeare"),
    Question("What is left after a stream of texts without labels?", ["shifts"], streams, "stream"),
    Question("Is it as good as a dense FFN?", ["match"], quality, "mixture_bytes"),
    Question("Is it fast?", ["bench layer"], speed),
    Question("Where does it lose?", list(LOSSES), losses, any_study=True),
)
