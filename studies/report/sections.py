"""The parts of a results page that show a benchmark: Pareto plots, trajectories, patch maps, streams."""

from collections.abc import Mapping
from html import escape
from typing import Any

from studies.report import accounts, plots
from studies.report.readings import (
    Bench,
    Result,
    bench_of,
    claim_tables,
    heat_table,
    hottest,
    overview,
    progressive_table,
    shift_table,
    stream_table,
)
from studies.report.tables import html
from studies.shifts import seeds_of

Rows = Mapping[str, Mapping[str, Any]]


def shifts(result: Result, place: str) -> str:
    recipe, bench = result.values["recipe"], bench_of(result.values)
    told = (
        f"Models were pretrained on one text (A) and adapted to another (B): {recipe['steps']} steps of "
        f"{recipe['batch_size']} sequences for every method. The learning rate is the best of "
        f"{', '.join(f'{rate:g}' for rate in recipe['rates'])} by the validation text of "
        f"{recipe['tuned_on']}, and then frozen; every run stops where B's validation text is predicted "
        "best. "
    )
    return f"<p>{escape(told)}{GUARD}</p>" + _bench(bench, place) + _streams(bench)


def forgetting(result: Result, place: str) -> str:
    bench, speed = bench_of(result.values), result.values["speed"]
    judged = "" if result.judged else (
        "<p>Promises are judged at the full size; here only the figures are shown.</p>"
    )  # fmt: skip
    facts = escape(
        f"Speed of guarded generation over that of the overlay alone: {speed['ratio']:.3f} once the text has "
        f"settled, {speed['all_paths_ratio']:.3f} while every path still runs."
    )
    return (
        f"<p>{GUARD} Every method has its best rate on each shift, by B's validation text.</p>{judged}"
        f"{html(accounts.promises(result))}<details><summary>Every figure behind these rows</summary>"
        f"{html(accounts.figures(result))}</details>{html(accounts.harm(result))}<p>{facts}</p>"
        + _bench(bench, place)
        + _streams(bench)
    )


GUARD = (
    "<b>Alone</b> is the adapted model; <b>guarded</b> is the same model beside the untouched base, mixed by "
    "how well each predicts the text at hand. <b>Gain</b> is how much of dense full fine-tuning's "
    "improvement on B a method reached, <b>forgetting</b> how much worse it predicts A; <b>area</b> combines "
    "both: 1 is as much gained, and nothing forgotten."
)


def _bench(bench: Bench, place: str) -> str:
    numbers = {method: number for number, method in enumerate(bench.methods)}
    parts = _picks(numbers, place)
    for source, several in bench.shifts.items():
        parts += f"<h3>Pretrained on {escape(source)}</h3>{html(overview(source, several))}"
        parts += "".join(_shift(source, shift, rows, numbers) for shift, rows in several.items())
    return parts


def _picks(numbers: Mapping[str, int], place: str) -> str:
    """Check boxes that CSS alone obeys: what is not picked is pale in one chart and gone in the other."""
    chosen = plots.important(numbers)
    boxes = "".join(
        f'<label class="{plots.family(method)}"><input type="checkbox" id="{place}-m{number}"'
        f"{' checked' if method in chosen else ''}> {escape(method)}</label>"
        for method, number in numbers.items()
    )
    rules = "".join(
        f"#{place}:has(#{place}-m{number}:not(:checked)) :is(.m{number} .picked, .m{number}.trace) "
        f"{{ display: none; }}\n"
        f"#{place}:has(#{place}-m{number}:not(:checked)) .m{number} {{ opacity: 0.3; }}\n"
        for number in numbers.values()
    )
    used = {plots.family(method) for method in numbers}
    families = "".join(
        f'<span class="{family}"><b>\u25a0</b> {text}</span>'
        for family, text in plots.FAMILIES.items() if family in used
    )  # fmt: skip
    return (
        f"<style>{rules}</style><fieldset><legend>Methods shown in the charts</legend>"
        f'<div class="picks">{boxes}</div></fieldset><div class="key">{families}</div>'
        f'<div class="key">{_dot("alone")}alone</span>{_dot("guarded")}behind the guard</span>'
        "<span>bars: 95 % intervals over blocks of text and seeds</span>"
        "<span>dotted: what no method alone gets beyond</span></div>"
    )


def _dot(way: str) -> str:
    return (
        '<span class="other"><svg class="chart" viewBox="0 0 14 14" aria-hidden="true">'
        f'<circle class="{way}" cx="7" cy="7" r="5"/></svg>'
    )


def _shift(source: str, shift: str, rows: Rows, numbers: Mapping[str, int]) -> str:
    title = f"{source} \u2192 {shift}"
    bound = max(row["bound"] for row in rows.values())
    caption = (
        f"{title}: {seeds_of(rows)}; behind the guard no text can lose more than "
        f"{bound:.5f} nats per byte over a whole window"
    )
    return f"""<h4>{escape(title)}</h4>
<div class="columns">
<figure class="scroll" tabindex="0"><figcaption>What is gained, what is lost</figcaption>
{plots.pareto(rows, numbers, title)}</figure>
<figure class="scroll" tabindex="0"><figcaption>The way there, alone, first seed; a large dot: stopped here
</figcaption>{plots.trajectories(rows, numbers, title)}</figure>
</div>
{html(shift_table(caption, rows))}
{_maps(title, rows)}"""


def _maps(title: str, rows: Rows) -> str:
    """Methods by layers: who selects which patch."""
    routed = {method: row["routing"] for method, row in rows.items() if row["routing"]}
    if not routed:
        return ""
    layers = list(next(iter(routed.values()))["before"])
    top = {
        layer: max(
            share
            for routing in routed.values() for when in ("before", "after")
            for shares in routing[when][layer]["usage"] for share in shares
        ) or 1.0
        for layer in layers
    }  # fmt: skip
    body = ""
    for method, routing in routed.items():
        body += f'<tr><th scope="row">{escape(method)}</th>'
        for layer in layers:
            before, after = (routing[when][layer]["overlap"] for when in ("before", "after"))
            text = f"overlap {before:.3f} \u2192 {after:.3f}"
            name = f"{title}, {method}, layer {layer}: usage of patches by A and B; {text}"
            chart = plots.usage(routing, layer, top[layer], name)
            body += f"<td>{chart}<small>{text}</small></td>"
        body += "</tr>\n"
    heads = "".join(f'<th scope="col">layer {escape(layer)}</th>' for layer in layers)
    return f"""<details><summary>Which patches A and B select, before and after</summary>
<p class="muted">Each chart is a layer: how often A (up) and B (down) select each of its patches, from those
that A prefers to those that B prefers. Filled: after adapting. Line: before. Heights share a scale within a
layer; overlap is the share of patches that two tokens, one of each text, have in common.</p>
<div class="scroll" tabindex="0"><table class="maps">
<thead><tr><th scope="col">method</th>{heads}</tr></thead>
<tbody>{body}</tbody></table></div></details>
"""


def _streams(bench: Bench) -> str:
    streams = bench.streams
    maps = "".join(f"<div>{html(heat_table(streams, method))}</div>" for method in streams["methods"])
    claims = claim_tables(streams)
    claimed = ""
    if claims:
        listed = "".join(f"<div>{html(table)}</div>" for table in claims)
        claimed = (
            "<h4>Who took what</h4><p>Nobody tells the guarded learner where the stream is. These are the "
            "paths that took the tokens of each visit: the base, or an overlay that it opened by itself.</p>"
            f'<div class="columns close">{listed}</div>'
        )
    order = " \u2192 ".join(escape(domain) for domain in streams["order"])
    return f"""<h3>A stream without labels: {order}</h3>
<p>One pass, no word about where a domain ends. Backward transfer is from the end of a domain's first visit to
when all have been visited once, forward transfer from the start of the stream to its first visit, positive is
good; worst forgetting is the rise from the best loss a domain ever had.</p>
{html(stream_table(streams))}
{html(progressive_table(streams))}
<h4>What each visit did to every domain</h4>
<p>The first row is the loss at the start, in nats per byte, the others are what each visit made of it, mean
over seeds; framed where the stream just was. Warm is worse than at the start, cool is better; colours end at
{hottest(streams):.3f}.</p>
<div class="columns close">{maps}</div>
{claimed}"""
