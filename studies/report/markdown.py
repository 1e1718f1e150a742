"""Results as a page of the documentation: Markdown tables, figures in SVG, and a place for conclusions.

    python -m studies report results/shifts-full.json --out report.html --docs docs/results.md

Everything is rendered from JSON, byte for byte the same each time, but for the text between two comments:
they are not generated, and whoever wrote them finds them again.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from studies.cells import slug
from studies.report import accounts, plots
from studies.report.charts import sheet
from studies.report.readings import (
    EXPERIMENTS,
    Bench,
    Result,
    bench_of,
    claim_tables,
    heat_table,
    overview,
    progressive_table,
    provenance,
    shift_table,
    stream_table,
)
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
    figures: Files = {}
    parts = [_head(results, docs, out), BEGIN, kept(docs), END]
    above: list[Bench] = []
    for result, stem in zip(results, stems, strict=True):
        with result.whole():
            text, drawn = _section(result, docs, stem, above)
        parts.append(text)
        figures |= {docs.parent / "figures" / name: svg for name, svg in drawn.items()}
    return {docs: "\n\n".join(parts) + "\n"} | figures


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
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".partial-{path.name}")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)


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


def _section(result: Result, docs: Path, stem: str, above: list[Bench]) -> tuple[str, dict[str, str]]:
    facts = "; ".join(f"{name.lower()}: {plain(value)}" for name, value in provenance(result.values).items())
    source = f"`{result.path.name}`"
    if shown(result.path) != result.path.name or result.path.resolve().parent == Path.cwd().resolve():
        there = os.path.relpath(result.path.resolve(), docs.resolve().parent)
        source = f"[{plain(result.path.name)}]({quote(Path(there).as_posix())})"
    parts = [f"## {EXPERIMENTS[result.experiment]}", f"{source}; {facts}."]
    if result.values.get("size") == "smoke":
        parts.append(SMOKE)
    figures: dict[str, str] = {}
    if result.experiment in ("shifts", "forgetting"):
        if result.experiment == "forgetting":
            parts += _tables([accounts.promises(result), accounts.harm(result)])
        bench = bench_of(result.values)
        text, figures = _bench(bench, stem, above)
        parts += text
        above.append(bench)
    else:
        told = getattr(accounts, result.experiment)(result)
        parts += _tables([told] if isinstance(told, Table) else told)
        if result.experiment in accounts.PLOTS:
            figures[f"{stem}.svg"] = sheet(accounts.PLOTS[result.experiment](result), 2)
            parts.append(f"![{plain(EXPERIMENTS[result.experiment])}](figures/{stem}.svg)")
    return "\n\n".join(parts), figures


def _tables(tables: Sequence[Table]) -> list[str]:
    return [part for table in tables for part in (f"{plain(table.caption)}:", markdown(table))]


def _bench(bench: Bench, stem: str, above: Sequence[Bench]) -> tuple[list[str], dict[str, str]]:
    """Figures and means of everything; no table twice: several results may have cells in common."""
    numbers = {method: number for number, method in enumerate(bench.methods)}
    parts = [LEGEND]
    figures: dict[str, str] = {}

    def figure(name: str, title: str, drawn: str) -> str:
        file = f"{stem}_{slug(name)}.svg"
        figures[file] = drawn
        return f"![{plain(title)}](figures/{file})"

    for source, shifts in bench.shifts.items():
        titles = {shift: f"{source} \u2192 {shift}" for shift in shifts}
        spots = {titles[s]: plots.pareto(rows, numbers, titles[s], faint=True) for s, rows in shifts.items()}
        ways = {titles[s]: plots.trajectories(rows, numbers, titles[s], faint=True)
                for s, rows in shifts.items()}  # fmt: skip
        parts += [f"### Pretrained on {plain(source)}", *_tables([overview(source, shifts)])]
        parts.append(
            figure(f"pareto {source}", f"Gain on B against forgetting of A, {source}", sheet(spots, 2))
        )
        parts.append("Hollow is alone, filled behind the guard; what is not labelled is named in the table.")
        parts.append(
            figure(f"trajectories {source}", f"Loss of A against loss of B, {source}", sheet(ways, 2))
        )
        parts.append("The way of a few methods, alone, first seed; a large dot is where a run stopped.")
        known = [shift for shift, rows in shifts.items() if _is_above(source, shift, rows, above)]
        if known:
            parts.append(f"The same figures, in full, stand above: {plain(', '.join(known))}.")
        parts += _tables([shift_table(titles[s], rows) for s, rows in shifts.items() if s not in known])
    streams = bench.streams
    if any(streams == part.streams for part in above):
        return parts, figures
    heats = [heat_table(streams, method) for method in streams["methods"]]
    drawn = {table.caption: plots.heat(table) for table in heats}
    width = 92 + 74 * max(len(table.columns) - 1 for table in heats)
    order = plain(" \u2192 ".join(streams["order"]))
    parts.append(f"### A stream without labels: {order}")
    parts += _tables([stream_table(streams), progressive_table(streams)])
    height = 22 + 24 * len(heats[0].rows)
    parts.append(figure("stream", "What each visit did to every domain", sheet(drawn, 3, width, height)))
    parts.append(
        "Loss at the start, then what each visit made of it, in nats per byte; warm is worse, cool is better."
    )
    return [*parts, *_tables(claim_tables(streams))], figures


def _is_above(source: str, shift: str, rows: Mapping[str, object], above: Sequence[Bench]) -> bool:
    return any(rows.items() <= bench.shifts.get(source, {}).get(shift, {}).items() for bench in above)
