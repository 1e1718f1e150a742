"""The tables of `trivia` and `edits`: figures of all that learned, in full and as the first page has them."""

from collections.abc import Mapping, Sequence
from typing import Any

from studies.facts_cells import label
from studies.report.readings import FACT_METHODS, Result
from studies.report.tables import MISSING, Cell, Column, Table, name, number, percent, rise, spread
from studies.statistics import mean
from studies.trivia_data import REWORDED

Learners = Mapping[str, Sequence[Mapping[str, Any]]]
"""What learned, and the cell of each of its seeds."""
Figures = Mapping[str, tuple[str, ...]]
"""What a figure is called, and where it stands in a cell; of several texts the worst counts."""
ANSWERED: Figures = {way: ("after", "trivia", way, "contains") for way in ("as taught", *REWORDED)}
LOST: Figures = {
    "NQ-open, share of F1 lost": ("lost", "nq f1"),
    "LAMBADA, share lost": ("lost", "lambada"),
    "HellaSwag, share lost": ("lost", "hellaswag"),
}
WORST: Figures = {"perplexity of the worst of four texts": ("rise",)}
LEFT: Figures = {title: ("after", title) for title in ("reliability", "paraphrase")}
SAME: Figures = {
    f"locality, {prompts}": ("after", "by prompts", prompts)
    for prompts in ("background", "capitals", "namesakes")
}
EXAMS = ("nq", "lambada", "hellaswag")


def learners(result: Result) -> dict[str, list[Mapping[str, Any]]]:
    """Every method, and after full fine-tuning what lies between it and the base."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for cell in result.values["cells"]:
        method = FACT_METHODS.get(label(cell), label(cell))
        found.setdefault(method, []).append(cell)
        for share, part in cell.get("interpolated", {}).items():
            found.setdefault(f"{method}, WiSE-FT at {share}", []).append(part)
    return found


def with_base(result: Result) -> Learners:
    """The same after the model that nothing was taught, as the cells of one method have it."""
    learned = learners(result)
    first, *_ = learned.values()
    return {"the base": [{"after": cell["original"]} for cell in first], **learned}


def over_seeds(cells: Sequence[Mapping[str, Any]], path: Sequence[str]) -> list[float]:
    """A figure of each cell; only what was measured after teaching must be there."""
    found = []
    for cell in cells:
        if path[0] in cell or path[0] == "after":
            value: Any = cell
            for key in path:
                value = value[key]
            found.append(max(value.values()) if isinstance(value, Mapping) else value)
    return found


def overview(caption: str, learned: Learners, figures: Figures) -> Table:
    """One line for what learned, as the first page has it."""
    columns = [Column("what learns", words=True), Column("seeds"), *map(Column, figures)]
    lines = []
    for who, cells in learned.items():
        line = [name(who), number(len(cells), "d")]
        for title, path in figures.items():
            known = over_seeds(cells, path)
            line.append((rise if "perplexity" in title else percent)(mean(known) if known else None))
        lines.append(line)
    return Table(caption, columns, lines)


def _in_full(caption: str, learned: Learners, figures: Figures) -> Table:
    """One line for each figure, one column for what learned."""
    columns = [Column("figure", words=True), *map(Column, learned)]
    lines = [
        [name(title), *(_mean(over_seeds(cells, path), path[0]) for cells in learned.values())]
        for title, path in figures.items()
    ]
    return Table(caption, columns, lines)


def _mean(seeds: Sequence[float], kind: str) -> Cell:
    form = ",.0f" if "bytes" in kind else ".5f" if kind == "rise" else ",.4f"
    return number(mean(seeds), form, spread(seeds)) if seeds else Cell(MISSING)


def _texts(result: Result) -> Figures:
    """Of each background text its perplexity and its windows, where these were counted."""
    texts = result.values["cells"][0]["rise"]
    kinds = {"rise of perplexity": "rise", "windows the same to the bit": "identical windows"}
    return {f"{text}, {title}": (kind, text) for title, kind in kinds.items() for text in texts}


def trivia(result: Result) -> list[Table]:
    marks = {"contains the answer": "contains", "is the answer": "exact", "F1": "f1"}
    figures = {
        f"{way}, {title}": (*path[:-1], mark)
        for title, mark in marks.items()
        for way, path in ANSWERED.items()
    }
    figures |= {"NQ-open, F1": ("after", "nq", "f1"), "NQ-open, nats per token": ("after", "nq", "nats")}
    figures |= {"LAMBADA": ("after", "lambada"), "HellaSwag": ("after", "hellaswag")}
    figures |= {**LOST, "NQ-open, nats per token more": ("lost", "nq nats"), **_texts(result)}
    figures |= {f"{exam}, prompts a lesson acts on": ("touched", exam) for exam in EXAMS}
    figures |= {title: (title,) for title in ("bytes per fact", "facts per second")}
    return [_in_full("Shares, and rises of perplexity as shares", with_base(result), figures)]


def edits(result: Result) -> list[Table]:
    """All figures, and what is left of each tenth."""
    forms = [f"{kind} {at}" for kind in ("sentence", "question") for at in (0, 1)]
    figures = {**LEFT, **{f"paraphrase, {form}": ("after", "by paraphrase", form) for form in forms}}
    figures |= {"locality": ("after", "locality"), **SAME, **_texts(result)}
    figures |= {title: (title,) for title in ("bytes per edit", "edits per second")}
    learned = learners(result)
    tenths = []
    for who, cells in learned.items():
        seeds = zip(*(cell["after"]["by tenth"] for cell in cells), strict=True)
        tenths.append([name(who), *(number(mean(own), ".3f") for own in seeds)])
    columns = [Column("what learns", words=True), *(Column(f"{at}") for at in range(1, len(tenths[0])))]
    caption = "Reliability of each tenth of the edits, in the order in which they were taught"
    full = _in_full("Shares, and rises of perplexity as shares", learned, figures)
    return [full, Table(caption, columns, tenths)]
