"""Results as pages of the documentation: a first page of questions, and all tables and figures behind it.

    python -m studies report results/facts-h200.json results/match-h200.json --docs docs/results.md

The first page has one table for each question. Every result has a page of its own in the folder of the
same name, and figures are in figures/ beside the first page. Everything is rendered from JSON, byte for byte
the same each time, but for the text between two comments, which is written by hand and kept.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from attractor.files import write_text
from studies.cells import slug
from studies.report import bench_tables, charts, study_tables
from studies.report.questions import QUESTIONS, Question
from studies.report.readings import Bench, Result, bench_of, provenance
from studies.report.tables import Table, markdown, plain

BEGIN = "<!-- written by hand: {} -->"
END = "<!-- end of what is written by hand -->"
BY_HAND = re.compile(rf"{BEGIN.format('(.*?)')}\n(.*?)\n{END}", re.DOTALL)
CONCLUSIONS = "conclusions"
NOTHING_YET = "Nothing has been written here yet."
SMOKE = "**Size \u201csmoke\u201d: tiny models and a few steps. These numbers mean nothing.**"

LEGEND = (
    "Alone is the adapted model, guarded the same beside the untouched base. Gain is the share of dense full "
    "fine-tuning's improvement on B; forgetting is in nats per byte of A; area combines both, and is 1 where "
    "as much is gained and nothing forgotten. In brackets: 95 % intervals."
)

Files = dict[Path, str]


def render(results: Sequence[Result], docs: Path, out: Path) -> Files:
    """All pages and figures, by path; nothing is written yet."""
    stems = [slug(result.path.stem) for result in results]
    if twice := {stem for stem in stems if stems.count(stem) > 1}:
        raise ValueError(f"pages are named after results: several are called {sorted(twice)}; rename them")
    files: Files = {docs: ""}
    above: dict[str, Bench] = {}
    for result, stem in zip(results, stems, strict=True):
        page = _page(result, docs)
        with result.whole():
            figures = _Figures(docs.parent / "figures", page.parent, stem)
            head = [f"# {result.title}", _source(result, page), by_hand(page, [CONCLUSIONS])[CONCLUSIONS]]
            files[page] = "\n\n".join([*head, *_section(result, figures, above)]) + "\n"
        files |= figures.drawn
    files[docs] = "\n\n".join(_first_page(results, docs, out, files)) + "\n"
    return files


def _first_page(results: Sequence[Result], docs: Path, out: Path, files: Files) -> Iterator[str]:
    first = {result.study: result for result in reversed(results)}
    asked = [question for question in QUESTIONS if question.answered_by(first)]
    kept = by_hand(docs, [CONCLUSIONS, *(question.title for question in asked)])
    words = [*(shown(result.path) for result in results), "--out", shown(out), "--docs", shown(docs)]
    yield "# Results"
    yield kept[CONCLUSIONS]
    for question in asked:
        yield f"## {question.title}"
        yield kept[question.title]
        yield from _answer(
            question, [first[study] for study in question.studies if study in first], docs, files
        )
    yield "## All tables"
    yield "\n".join(
        f"- [{plain(result.path.stem)}]({_link(_page(result, docs), docs)}): {plain(result.title)}"
        for result in results
    )
    yield (
        "These pages are generated from the JSON of results by "
        f"`python -m studies report {shlex.join(words)}`. "
        "Text between two comments is written by hand and stays; the rest is replaced when it runs again."
    )


def _page(result: Result, docs: Path) -> Path:
    return docs.with_suffix("") / f"{result.path.stem}.md"


def _answer(question: Question, results: Sequence[Result], docs: Path, files: Files) -> Iterator[str]:
    with results[0].whole():
        yield from _tables([question.table({result.study: result for result in results})])
    drawn = docs.parent / "figures" / f"{slug(results[0].path.stem)}_{question.figure}.svg"
    if drawn in files:
        yield f"![{plain(question.title)}](figures/{drawn.name})"
    sources = (f"{_json(result, docs)}, [in full]({_link(_page(result, docs), docs)})" for result in results)
    yield f"From {'; '.join(sources)}."


class _Figures:
    """The figures of one result, named after it."""

    def __init__(self, folder: Path, page: Path, stem: str) -> None:
        self.folder, self.stem = folder, stem
        self.there = Path(os.path.relpath(folder, page)).as_posix()
        self.drawn: Files = {}

    def add(self, name: str, title: str, drawing: str) -> str:
        """What the page says where the figure stands."""
        file = f"{self.stem}_{slug(name)}.svg"
        self.drawn[self.folder / file] = drawing
        return f"![{plain(title)}]({self.there}/{file})"


def by_hand(page: Path, names: Sequence[str]) -> dict[str, str]:
    """The parts of a page that are written by hand, with their comments, as they stand there now."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    found = dict(BY_HAND.findall(text))
    whole = len(found) == text.count(END) == text.count(BEGIN.partition("{")[0])
    if page.exists() and not (found and whole and set(found) <= set(names)):
        raise ValueError(
            f"{page} is there, and what is written by hand in it would be lost: it must stand between the "
            f"comments\n{BEGIN.format('NAME')}\n{END}\nwhere NAME is one of {', '.join(map(repr, names))}. "
            "Put them around what is to stay, or move the file away"
        )
    return {name: f"{BEGIN.format(name)}\n{found.get(name, NOTHING_YET)}\n{END}" for name in names}


def write(files: Mapping[Path, str]) -> None:
    """Write each file whole or not at all."""
    for path, text in files.items():
        write_text(path, text)


def shown(path: Path) -> str:
    """A path as it is typed at the root of the project; of a file elsewhere only the name."""
    try:
        return path.resolve().relative_to(Path.cwd().resolve()).as_posix()
    except ValueError:
        return path.name


def _link(target: Path, page: Path) -> str:
    return quote(Path(os.path.relpath(target.resolve(), page.resolve().parent)).as_posix())


def _json(result: Result, page: Path) -> str:
    """The file of a result, as a link where it lies in the project."""
    if shown(result.path) == result.path.name and result.path.resolve().parent != Path.cwd().resolve():
        return f"`{result.path.name}`"
    return f"[{plain(result.path.name)}]({_link(result.path, page)})"


def _source(result: Result, page: Path) -> str:
    facts = "; ".join(f"{name.lower()}: {plain(value)}" for name, value in provenance(result.values).items())
    return f"{_json(result, page)}; {facts}."


def _section(result: Result, figures: _Figures, above: dict[str, Bench]) -> list[str]:
    parts = [SMOKE] if result.smoke else []
    parts += _tables(study_tables.TABLES[result.study](result))
    if result.study in study_tables.CHARTS:
        drawn = study_tables.CHARTS[result.study](result)
        parts += [figures.add(title, title, drawing) for title, drawing in drawn.items()]
    if bench := bench_of(result.values):
        parts += _bench(bench, figures, above)
        above[result.path.stem] = bench
    return parts


def _tables(tables: Sequence[Table]) -> list[str]:
    return [part for table in tables for part in (f"{plain(table.caption)}:", markdown(table))]


def _bench(bench: Bench, figures: _Figures, above: Mapping[str, Bench]) -> list[str]:
    """Figures and means of everything; no table twice: several results may have cells in common."""
    parts = [LEGEND]
    for source, shifts in bench.shifts.items():
        titles = {shift: f"{source} \u2192 {shift}" for shift in shifts}
        sheet = {titles[shift]: rows for shift, rows in shifts.items()}
        title = f"Gain on B against forgetting of A, {source}"
        parts += [f"## Pretrained on {plain(source)}", *_tables([bench_tables.overview(source, shifts)])]
        parts.append(figures.add(f"pareto {source}", title, charts.pareto(sheet)))
        parts.append(
            "Hollow is alone, filled behind the guard; a few methods are large, with their intervals."
        )
        title = f"Loss of A against loss of B, {source}"
        parts.append(figures.add(f"trajectories {source}", title, charts.trajectories(sheet)))
        parts.append("The way of a few methods, alone, first seed; a large mark is where a run stopped.")
        rest = []
        for shift, rows in shifts.items():
            if there := _is_above(source, shift, rows, above):
                parts.append(f"{plain(titles[shift])} stands on [another page]({quote(there)}.md).")
            else:
                rest.append(bench_tables.shift_table(titles[shift], rows))
        parts += _tables(rest)
    if any(bench.streams == part.streams for part in above.values()):
        return parts
    order = " \u2192 ".join(bench.streams["order"])
    parts.append(f"## A stream without labels: {plain(order)}")
    parts += _tables(
        [bench_tables.stream_table(bench.streams), bench_tables.progressive_table(bench.streams)]
    )
    drawing = charts.heat(bench_tables.heat_tables(bench.streams))
    parts.append(figures.add("stream", "What each visit did to every domain", drawing))
    parts.append(
        "Loss at the start, then what each visit made of it, in nats per byte; warm is worse, cool is better."
    )
    return parts + _tables(bench_tables.claim_tables(bench.streams))


def _is_above(source: str, shift: str, rows: Mapping[str, object], above: Mapping[str, Bench]) -> str | None:
    """The result that has all of these rows already."""
    return next(
        (
            stem
            for stem, bench in above.items()
            if rows.items() <= bench.shifts.get(source, {}).get(shift, {}).items()
        ),
        None,
    )
