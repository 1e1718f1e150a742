"""Results as one HTML page, rendered from their JSON alone: nothing fetched, light and dark, wide and narrow.

    python -m studies report results/shifts-h200.json results/forgetting-h200.json --out report.html

The words are in page.html.jinja. A short script sorts tables by their headers; the rest works without it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attractor.demo.report import templates
from attractor.figures import data_uri
from studies.report import bench_tables, charts, study_tables
from studies.report.readings import Bench, Result, bench_of, provenance
from studies.shifts import seeds_of


def render(results: Sequence[Result]) -> str:
    """The page; ValueError names the file of a result that is not whole."""
    sections = []
    for result in results:
        with result.whole():
            sections.append(_section(result))
    page = templates(Path(__file__).parent).get_template("page.html.jinja")
    return page.render(sections=sections, smoke=any(result.smoke for result in results))


def _section(result: Result) -> dict[str, Any]:
    values, bench = result.values, bench_of(result.values)
    drawn = study_tables.CHARTS[result.study](result) if result.study in study_tables.CHARTS else {}
    return {
        "study": result.study,
        "title": result.title,
        "file": result.path.name,
        "smoke": result.smoke,
        "judged": result.judged,
        "facts": {"File": result.path.name} | provenance(values),
        "recipe": values["recipe"] if result.study == "shifts" else None,
        "speed": values["speed"] if result.study == "forgetting" else None,
        "figures": study_tables.figures(result) if result.study == "forgetting" else None,
        "tables": study_tables.TABLES[result.study](result),
        "charts": {title: data_uri(chart) for title, chart in drawn.items()},
        "sources": [_source(source, shifts) for source, shifts in bench.shifts.items()] if bench else [],
        "streams": _streams(bench) if bench else None,
        "config": values.get("config"),
    }


def _source(source: str, shifts: Mapping[str, charts.Rows]) -> dict[str, Any]:
    """Everything about what was pretrained on one text."""
    titles = {shift: f"{source} \u2192 {shift}" for shift in shifts}
    sheets = {titles[shift]: rows for shift, rows in shifts.items()}
    return {
        "name": source,
        "overview": bench_tables.overview(source, shifts),
        "pareto": data_uri(charts.pareto(sheets)),
        "trajectories": data_uri(charts.trajectories(sheets)),
        "shifts": [_shift(title, rows) for title, rows in sheets.items()],
    }


def _shift(title: str, rows: charts.Rows) -> dict[str, Any]:
    bound = max(row["bound"] for row in rows.values())
    caption = (
        f"{title}: {seeds_of(rows)}; behind the guard no text can lose more than "
        f"{bound:.5f} nats per byte over a whole window"
    )
    routed = {method: row["routing"] for method, row in rows.items() if row["routing"]}
    return {
        "title": title,
        "table": bench_tables.shift_table(caption, rows),
        "usage": data_uri(charts.usage(routed)) if routed else None,
        "overlap": bench_tables.overlap_table(title, routed) if routed else None,
    }


def _streams(bench: Bench) -> dict[str, Any]:
    streams = bench.streams
    return {
        "order": streams["order"],
        "tables": [bench_tables.stream_table(streams), bench_tables.progressive_table(streams)],
        "hottest": bench_tables.hottest(streams),
        "heat": bench_tables.heat_tables(streams),
        "claims": bench_tables.claim_tables(streams),
    }
