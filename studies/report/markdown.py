"""Results as a page of the documentation: Markdown tables, figures in SVG, and a place for conclusions.

    python -m studies report results/shifts-h200.json --out report.html --docs docs/results.md

Everything is rendered from JSON, byte for byte the same each time, but for the text between two comments:
they are not generated, and whoever wrote them finds them again.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from attractor.files import write_text
from studies.cells import slug
from studies.report import bench_tables, charts, study_tables
from studies.report.readings import Bench, Result, bench_of, provenance
from studies.report.tables import Table, markdown, plain

BEGIN = "<!-- conclusions: written by hand, and kept when this page is generated again -->"
END = "<!-- end of conclusions -->"
NOTHING_YET = "Nobody has drawn conclusions yet."
SMOKE = "**Size \u201csmoke\u201d: tiny models and a few steps. These numbers mean nothing.**"

LEGEND = (
    "Alone is the adapted model, guarded the same beside the untouched base. Gain is the share of dense full "
    "fine-tuning's improvement on B; forgetting is in nats per byte of A; area combines both, and is 1 where "
    "as much is gained and nothing forgotten. In brackets: 95 % intervals."
)

Files = dict[Path, str]


def render(results: Sequence[Result], docs: Path, out: Path) -> Files:
    """The page and its figures, by path; nothing is written yet."""
    stems = [slug(result.path.stem) for result in results]
    if twice := {stem for stem in stems if stems.count(stem) > 1}:
        raise ValueError(f"figures are named after results: several are called {sorted(twice)}; rename them")
    files: Files = {docs: ""}
    parts = [_head(results, docs, out), BEGIN, kept(docs), END]
    above: list[Bench] = []
    for result, stem in zip(results, stems, strict=True):
        with result.whole():
            figures = _Figures(docs.parent / "figures", stem)
            parts.append("\n\n".join(_section(result, docs, figures, above)))
        files |= figures.drawn
    files[docs] = "\n\n".join(parts) + "\n"
    return files


class _Figures:
    """The figures of one result, named after it."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.folder, self.stem = folder, stem
        self.drawn: Files = {}

    def add(self, name: str, title: str, drawing: str) -> str:
        """What the page says where the figure stands."""
        file = f"{self.stem}_{slug(name)}.svg"
        self.drawn[self.folder / file] = drawing
        return f"![{plain(title)}](figures/{file})"


def kept(docs: Path) -> str:
    """What stands between the two comments of a page that is already there."""
    if not docs.exists():
        return NOTHING_YET
    text = docs.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(
            f"{docs} is there, but without the two comments between which text is kept, once and in order:\n"
            f"{BEGIN}\n{END}\nPut them around what is to stay, or move the file away"
        )
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip("\n")


def write(files: Mapping[Path, str]) -> None:
    """Each file whole or not at all."""
    for path, text in files.items():
        write_text(path, text)


def shown(path: Path) -> str:
    """As it is typed at the root of the project; of a file elsewhere only the name."""
    try:
        return path.resolve().relative_to(Path.cwd().resolve()).as_posix()
    except ValueError:
        return path.name


def _head(results: Sequence[Result], docs: Path, out: Path) -> str:
    words = [*(shown(result.path) for result in results), "--out", shown(out), "--docs", shown(docs)]
    return (
        "# Results\n\n"
        f"This page is generated from the JSON of results by `python -m studies report {shlex.join(words)}`. "
        "Conclusions are written by hand, between two comments; the rest is replaced when it runs again."
    )


def _section(result: Result, docs: Path, figures: _Figures, above: list[Bench]) -> list[str]:
    facts = "; ".join(f"{name.lower()}: {plain(value)}" for name, value in provenance(result.values).items())
    source = f"`{result.path.name}`"
    if shown(result.path) != result.path.name or result.path.resolve().parent == Path.cwd().resolve():
        there = os.path.relpath(result.path.resolve(), docs.resolve().parent)
        source = f"[{plain(result.path.name)}]({quote(Path(there).as_posix())})"
    parts = [f"## {result.title}", f"{source}; {facts}."]
    if result.smoke:
        parts.append(SMOKE)
    parts += _tables(study_tables.TABLES[result.study](result))
    if result.study in study_tables.CHARTS:
        drawn = study_tables.CHARTS[result.study](result)
        parts += [figures.add(title, title, drawing) for title, drawing in drawn.items()]
    if bench := bench_of(result.values):
        parts += _bench(bench, figures, above)
        above.append(bench)
    return parts


def _tables(tables: Sequence[Table]) -> list[str]:
    return [part for table in tables for part in (f"{plain(table.caption)}:", markdown(table))]


def _bench(bench: Bench, figures: _Figures, above: Sequence[Bench]) -> list[str]:
    """Figures and means of everything; no table twice: several results may have cells in common."""
    parts = [LEGEND]
    for source, shifts in bench.shifts.items():
        titles = {shift: f"{source} \u2192 {shift}" for shift in shifts}
        sheet = {titles[shift]: rows for shift, rows in shifts.items()}
        title = f"Gain on B against forgetting of A, {source}"
        parts += [f"### Pretrained on {plain(source)}", *_tables([bench_tables.overview(source, shifts)])]
        parts.append(figures.add(f"pareto {source}", title, charts.pareto(sheet)))
        parts.append(
            "Hollow is alone, filled behind the guard; a few methods are large, with their intervals."
        )
        title = f"Loss of A against loss of B, {source}"
        parts.append(figures.add(f"trajectories {source}", title, charts.trajectories(sheet)))
        parts.append("The way of a few methods, alone, first seed; a large mark is where a run stopped.")
        known = [shift for shift, rows in shifts.items() if _is_above(source, shift, rows, above)]
        if known:
            parts.append(f"The same figures, in full, stand above: {plain(', '.join(known))}.")
        told = [bench_tables.shift_table(titles[s], rows) for s, rows in shifts.items() if s not in known]
        parts += _tables(told)
    if any(bench.streams == part.streams for part in above):
        return parts
    order = " \u2192 ".join(bench.streams["order"])
    parts.append(f"### A stream without labels: {plain(order)}")
    parts += _tables(
        [bench_tables.stream_table(bench.streams), bench_tables.progressive_table(bench.streams)]
    )
    drawing = charts.heat(bench_tables.heat_tables(bench.streams))
    parts.append(figures.add("stream", "What each visit did to every domain", drawing))
    parts.append(
        "Loss at the start, then what each visit made of it, in nats per byte; warm is worse, cool is better."
    )
    return parts + _tables(bench_tables.claim_tables(bench.streams))


def _is_above(source: str, shift: str, rows: Mapping[str, object], above: Sequence[Bench]) -> bool:
    return any(rows.items() <= bench.shifts.get(source, {}).get(shift, {}).items() for bench in above)
