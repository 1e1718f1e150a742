"""The questions that the first page of the results answers, each with one table from the JSON of results."""

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from studies.report import bench_tables, lesson_tables, study_tables, time_tables
from studies.report.readings import FACT_METHODS, Result, bench_of
from studies.report.tables import Cell, Column, Table, count, name, number, percent, rise, spread
from studies.shifts import WAYS
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


def trivia(results: Results) -> Table:
    caption = "Shares of questions whose answer is written, and shares of other exams that were lost"
    figures = {**lesson_tables.ANSWERED, **lesson_tables.LOST, **lesson_tables.WORST}
    return lesson_tables.overview(caption, lesson_tables.with_base(results["trivia"]), figures)


def edits(results: Results) -> Table:
    settings = results["edits"].values["cells"][0]["settings"]
    caption = f"After {settings['edits']:,} edits, {settings['at_once']} at once"
    figures = {**lesson_tables.LEFT, **lesson_tables.SAME, **lesson_tables.WORST}
    return lesson_tables.overview(caption, lesson_tables.learners(results["edits"]), figures)


def knobs(results: Results) -> Table:
    """One line for each knob, with and without the guard."""
    titles = {"the old text": "old", "the new text": "new", "windows of both": "mixed"}
    columns = [Column("what is turned", words=True), *(Column(title, "nats lost") for title in titles)]
    columns.append(Column("patches that moved"))
    lines = []
    for turned, row in results["knobs"].values["rows"].items():
        nats = [number(row[key], "+.3f") for key in titles.values()]
        lines.append([name(turned), *nats, percent(row["moved"])])
    values = results["knobs"].values
    how = f"{values['tokens']:,} tokens, {' to '.join(values['shift'])}, at a rate of {values['rate']:g}"
    return Table(f"After {how}; less than zero was gained", columns, lines)


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


def _first_shifts(result: Result) -> tuple[str, dict[str, Mapping[str, Any]]]:
    """The first pretraining text, and the first two of the shifts from it that have a part in means."""
    bench = bench_of(result.values)
    assert bench is not None
    (source, shifts), *_ = bench.shifts.items()
    chosen = [shift for shift in shifts if shift not in bench_tables.OF_ANOTHER_KIND][:2]
    return source, {shift: shifts[shift] for shift in chosen}


def _risen(row: Mapping[str, Any], way: str) -> Cell:
    return rise(row[way]["A"] / row["A_before"] - 1)


def domains(results: Results) -> Table:
    """The rise of the old text's perplexity, and the perplexity of the new text."""
    source, shifts = _first_shifts(results["shifts"])
    columns = [Column("what learns", words=True)]
    for shift in shifts:
        columns += [Column(f"{source} after {shift}, {way}") for way in WAYS]
        columns.append(Column(f"perplexity of {shift}"))
    first, *_ = shifts.values()
    lines = []
    for method in [method for method in SHOWN if method in first] or list(first)[: len(SHOWN)]:
        line = [name(method)]
        for rows in shifts.values():
            line += [_risen(rows[method], way) for way in WAYS]
            line.append(number(rows[method]["alone"]["B"]))
        lines.append(line)
    caption = f"Rise of the perplexity of {source}, and the perplexity of the text that was learned"
    return Table(caption, columns, lines)


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
        behind = [_loss(models[model]) - _best_dense(models) for models in datasets.values()]
        lines.append([*line, *(number(nats, "+.3f") for nats in behind)])
    return Table(f"Parameters and multiply-adds are those on {first}", columns, lines)


def in_time(results: Results) -> Table:
    """What a step of every shape takes, how well it predicts, and how far ahead of dense in that time."""
    values = results["time"].values
    by = values["by"]
    columns = [Column("model", words=True), Column("a training step, ms"), Column("loss, nats per byte")]
    columns += [Column("ahead of dense at its time"), Column("parameters")]
    lines = []
    for shape, row in values["rows"].items():
        ahead = values["equal_steps"][by].get(shape)
        line = [name(shape), number(1e3 * row["times"][by], ".2f"), number(_loss(row), ".4f")]
        line.append(number(ahead and ahead["ahead"], "+.4f", spread(ahead["seeds"]) if ahead else None))
        lines.append([*line, count(row["parameters"])])
    caption = f"After {values['steps']:,} steps, timed as {time_tables.WORDS[by]!r}; d = {values['dim']}"
    return Table(caption, columns, lines)


def locality(results: Results) -> Table:
    """What each learner cost the domain that fares worst, and what it gained."""
    values = results["locality"].values
    columns = [Column("what learns", words=True), Column("sees the old text", words=True)]
    columns += [Column("worst rise of a domain at the end"), Column("mean gain of the new domains")]
    lines = [
        [
            name(learner),
            name(study_tables.OLD_TEXT[row["old_text"]]),
            number(row["worst"], ".4f", spread(row["worst_seeds"])),
            number(row["gain"], ".3f"),
        ]
        for learner, row in sorted(values["rows"].items(), key=lambda item: item[1]["worst"])
    ]
    home, *new = values["order"]
    caption = f"Nats per byte; {', '.join(new)}, {values['tokens']:,} bytes each, by models of {home}"
    return Table(caption, columns, lines)


def _loss(row: Mapping[str, Any]) -> float:
    return math.inf if None in row["val_loss"] else mean(row["val_loss"])


def _best_dense(models: Mapping[str, Any]) -> float:
    losses = (_loss(row) for model, row in models.items() if model.startswith("dense"))
    return min(losses, default=math.nan)


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


Loss = tuple[str, Cell, Cell, str]
"""Where something else is better: what is compared, an APN's figure, the other figure, and whose it is."""


def losses(results: Results) -> Table:
    columns = [
        Column("where", words=True),
        Column("APN"),
        Column("beside it"),
        Column("which is", words=True),
    ]
    found = [loss for study, lost in LOSSES.items() if study in results for loss in lost(results[study])]
    lines = [[name(where), ours, other, name(whose)] for where, ours, other, whose in found]
    return Table("Figures of an APN beside something that is better there", columns, lines)


STRANGER = "a namesake's question, answered with the fact"


def _lost_facts(result: Result) -> Iterator[Loss]:
    methods = result.values["methods"]
    own = methods["basins"]
    cells = [cell for cell in result.values["cells"] if cell["settings"]["method"] == "basins"]
    before = mean([cell["original"]["capitals"]["kept, question 0"] for cell in cells])
    if (kept := own["other capitals, question"]["mean"]) < before:
        where = "capitals of other countries, after 15 wrong ones were taught"
        yield where, percent(kept), percent(before), "the base"
    named = {method: row[STRANGER]["mean"] for method, row in methods.items() if STRANGER in row}
    best = min(named, key=named.__getitem__, default="basins")
    if best != "basins" and "basins" in named:
        yield STRANGER, percent(named["basins"]), percent(named[best]), FACT_METHODS.get(best, best)
    taught, never = (percent(own[form]["mean"]) for form in ("taught form", "second sentence never taught"))
    yield "a form never taught (the second sentence)", never, taught, "the taught form"


def _lost_trivia(result: Result) -> Iterator[Loss]:
    path = lesson_tables.ANSWERED["as typed"]
    answered = {
        who: mean(lesson_tables.over_seeds(cells, path))
        for who, cells in lesson_tables.learners(result).items()
    }
    ours = answered[FACT_METHODS["basins"]]
    others = {who: share for who, share in answered.items() if not who.startswith(FACT_METHODS["basins"])}
    best = max(others, key=others.__getitem__, default=None)
    if best is not None and others[best] > ours:
        where = "a question of TriviaQA, in lower case and without a question mark"
        yield where, percent(ours), percent(others[best]), best


def _lost_shifts(result: Result) -> Iterator[Loss]:
    source, shifts = _first_shifts(result)
    for shift, rows in shifts.items():
        if {"APN, paper rule", "MoE, FFN only"} <= set(rows):
            ours, experts = (_risen(rows[method], "alone") for method in ("APN, paper rule", "MoE, FFN only"))
            where = f"rise of {source}'s perplexity after {shift}, without a guard"
            yield where, ours, experts, "a mixture of experts"
    ends = {line[0].text: line[1] for line in streams({"shifts": result}).rows}
    apn, dense = (ends.get(f"{model}, guarded, no labels") for model in ("APN", "dense"))
    if apn and dense:
        where = "the stream without labels, nats per byte at the end"
        yield where, apn, dense, "copies of a dense model, guarded"


def _lost_match(result: Result) -> Iterator[Loss]:
    for dataset, models in result.values["datasets"].items():
        for model in ("APN, equal parameters", "APN, the paper's"):
            if model in models and _loss(models[model]) > _best_dense(models):
                ours, dense = number(_loss(models[model])), number(_best_dense(models))
                yield f"{dataset}, nats: {model}", ours, dense, "the best dense model"


def _lost_time(result: Result) -> Iterator[Loss]:
    for size, row in _layers(result):
        if (ratio := row["forward_backward_over_dense"]) > 1:
            ours, dense = number(ratio, ".2f"), number(1.0, ".2f")
            yield f"time, forward + backward: {size}", ours, dense, "a dense FFN"


LOSSES: dict[str, Callable[[Result], Iterator[Loss]]] = {
    "facts": _lost_facts,
    "trivia": _lost_trivia,
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
    Question("What does it know of a thousand real questions, and what did that cost?", ["trivia"], trivia),
    Question("What is left after a thousand edits one batch after the other?", ["edits"], edits),
    Question("What does it forget when it learns a whole text?", ["shifts"], domains, "pareto_shakespeare"),
    Question("What is left after a stream of texts without labels?", ["shifts"], streams, "stream"),
    Question("Do patches that touch little keep the other texts?", ["locality"], locality, "locality"),
    Question("What does each knob of learning from a stream do?", ["knobs"], knobs, "knobs"),
    Question("Is it as good as a dense FFN?", ["match"], quality, "mixture_bytes"),
    Question("Is it as good as a dense FFN in the same time?", ["time"], in_time, "time"),
    Question("Is it fast?", ["bench layer"], speed),
    Question("Where does it lose?", list(LOSSES), losses, any_study=True),
)
