"""Results as one HTML page, rendered from their JSON alone: nothing fetched, light and dark, wide and narrow.

    python -m studies report results/shifts-full.json results/forgetting-full.json --out report.html

A short script sorts tables by their headers; everything else, picking methods included, works without it.
"""

import json
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from studies.report import accounts, sections
from studies.report.charts import INK, LOOK
from studies.report.readings import EXPERIMENTS, Result, provenance
from studies.report.tables import html

CSS = """
body { max-width: 78rem; overflow-wrap: break-word; }
h2 { margin-top: 4.5rem; padding-top: 1.4rem; border-top: 1px solid var(--rule); font-size: 1.6rem;
  line-height: 1.25; }
h3 { margin: 3rem 0 0.6rem; font-size: 1.25rem; } h4 { margin: 2.4rem 0 0.4rem; font-size: 1.05rem; }
a { color: inherit; text-decoration-color: var(--muted); text-underline-offset: 0.2em; }
nav ul { margin: 0 0 1.5rem; padding: 0; list-style: none; columns: 2 20rem; }
.facts { display: grid; grid-template-columns: auto 1fr; gap: 0.1rem 1.2rem; margin: 0 0 1.5rem;
  font-size: 0.9rem; }
.facts dt { color: var(--muted); } .facts dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
.notice { border-left: 3px solid var(--worse); padding-left: 1rem; font-weight: 600; }
.scroll { overflow-x: auto; margin: 0.8rem 0 1.6rem; } figure.scroll { margin: 0; }
figure.scroll svg { width: 100%; min-width: 30rem; height: auto; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr));
  gap: 1rem 2rem; align-items: start; }
.columns.close { grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
.close tbody th { min-width: 0; }
.columns > * { min-width: 0; } figcaption { font-size: 0.9rem; font-weight: 600; }
table { border-collapse: collapse; font-size: 0.88rem; line-height: 1.35;
  font-variant-numeric: tabular-nums; }
caption { padding: 0 0 0.4rem; text-align: left; color: var(--muted); }
caption span { position: sticky; left: 0; display: inline-block; max-width: min(44rem, 86vw); }
th, td { padding: 0.35rem 0.5rem; border-bottom: 1px solid var(--rule); text-align: right;
  vertical-align: top; white-space: nowrap; font-weight: 400; }
thead th { color: var(--muted); vertical-align: bottom; white-space: normal; }
.groups th { border-bottom: 1px solid var(--muted); text-align: center; } .groups td { border: 0; }
tr > :first-child { position: sticky; left: 0; z-index: 1; padding-left: 0; background: var(--paper); }
tbody th, th.words, td.words { text-align: left; white-space: normal; }
tbody th { min-width: min(11rem, 30vw); max-width: max(7rem, min(16rem, 36vw)); }
td.words { min-width: 8rem; }
td small { display: block; color: var(--muted); font-size: 0.76rem; } th small { color: var(--worse); }
.warm { background: color-mix(in srgb, var(--worse) var(--heat), var(--paper)); }
.cool { background: color-mix(in srgb, var(--better) var(--heat), var(--paper)); }
.warm, .cool { border: 1px solid var(--paper); }
.visited { outline: 1.5px solid var(--ink); outline-offset: -2px; }
td.good { color: var(--even); font-weight: 600; } td.good::before { content: "\\2713\\00a0"; }
td.bad { color: var(--worse); font-weight: 600; } td.bad::before { content: "\\2717\\00a0"; }
th button { all: unset; cursor: pointer; } th button:focus-visible, .scroll:focus-visible { outline: 2px solid
  var(--dense); outline-offset: 2px; }
th button:hover { color: var(--ink); text-decoration: underline; }
[aria-sort=ascending] button::after { content: " \\2191"; }
[aria-sort=descending] button::after { content: " \\2193"; }
fieldset { margin: 1rem 0; border: 1px solid var(--rule); padding: 0.6rem 1rem 0.8rem; font-size: 0.9rem; }
legend { padding: 0 0.4rem; color: var(--muted); }
.picks { display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; } .picks label { color: var(--colour); }
.picks input { accent-color: var(--colour); }
.key { display: flex; flex-wrap: wrap; gap: 0.2rem 1.4rem; margin: 0 0 0.8rem; }
.key svg { display: inline-block; width: 14px; height: 14px; margin-right: 0.4rem; vertical-align: -2px; }
.key b { color: var(--colour); } .maps td, .maps th { text-align: left; }
.maps small { display: block; color: var(--muted); } details { margin: 0 0 1.5rem; }
summary { cursor: pointer; } pre { overflow-x: auto; font-size: 0.8rem; line-height: 1.4; }
@media print { fieldset, pre { display: none; } .scroll { overflow: visible; }
  tr, figure { break-inside: avoid; } }
"""

SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  const body = table.tBodies[0];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      const words = head.dataset.sort === "words";
      const key = (row) => row.cells[column].dataset.value;
      const order = (a, b) => words ? a.localeCompare(b) : Number(a) - Number(b);
      const rows = [...body.rows];
      const known = rows.filter((row) => key(row) !== undefined);
      known.sort((a, b) => (down ? -1 : 1) * order(key(a), key(b)));
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      body.append(...known, ...rows.filter((row) => key(row) === undefined));
    });
  });
}
"""

SMOKE = (
    "Size \u201csmoke\u201d: tiny models and a few steps, to see that everything runs. "
    "These numbers mean nothing."
)

SECTIONS: dict[str, Callable[[Result, str], str]] = {
    "shifts": sections.shifts,
    "forgetting": sections.forgetting,
    "table1": lambda result, place: html(accounts.table1(result)),
    "table2": lambda result, place: "".join(html(table) for table in accounts.table2(result)),
    "sensitivity": lambda result, place: _charts(result) + html(accounts.sensitivity(result)),
    "match": lambda result, place: _charts(result) + html(accounts.match(result)),
    "retrofit": lambda result, place: "".join(html(table) for table in accounts.retrofit(result)),
}


def render(results: Sequence[Result]) -> str:
    """The page; ValueError names the file of a result that is not whole."""
    parts, places = "", {}
    for number, result in enumerate(results):
        place = f"r{number}"
        with result.whole():
            parts += _section(result, place)
        places[place] = result
    listed = "".join(
        f'<li><a href="#{place}">{EXPERIMENTS[result.experiment]}</a> '
        f'<span class="muted">{escape(result.path.name)}</span></li>'
        for place, result in places.items()
    )
    smoke = any(result.values.get("size") == "smoke" for result in results)
    notice = f'<p class="notice">{SMOKE}</p>' if smoke else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline';
 script-src 'unsafe-inline'">
<title>Attractor: results</title>
<style>{LOOK}{INK}{CSS}</style>
</head>
<body>
<main>
<h1>Attractor Patch Networks: what was measured</h1>
<p>Every number and every chart on this page comes from the JSON files named here, and from nothing else.
Perplexities and losses are over whole held-out texts. Click a header to sort a table by it; point at a mark
to read its numbers.</p>
{notice}
<nav aria-label="Results"><ul>{listed}</ul></nav>
{parts}
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _section(result: Result, place: str) -> str:
    values = result.values
    notice = f'<p class="notice">{SMOKE}</p>' if values.get("size") == "smoke" else ""
    return f"""<section id="{place}">
<h2>{EXPERIMENTS[result.experiment]}</h2>
{notice}{_facts(result)}
{SECTIONS[result.experiment](result, place)}
{_config(values.get("config"))}
</section>
"""


def _facts(result: Result) -> str:
    facts = {"File": result.path.name} | provenance(result.values)
    listed = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f'<dl class="facts">{listed}</dl>'


def _charts(result: Result) -> str:
    drawn = "".join(
        f'<figure class="scroll" tabindex="0"><figcaption>{escape(title)}</figcaption>{chart}</figure>'
        for title, chart in accounts.PLOTS[result.experiment](result).items()
    )
    return f'<div class="columns">{drawn}</div>'


def _config(config: Any) -> str:
    if not config:
        return ""
    text = escape(json.dumps(config, indent=2))
    return f"<details><summary>The whole configuration</summary><pre>{text}</pre></details>"
