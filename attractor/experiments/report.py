"""A result of `demo` as one HTML page: no scripts, nothing fetched, light and dark, screen and paper.

Text is HTML and stays readable at any width; only lines and bars are SVG, and stretch.
"""

import json
import math
from html import escape
from typing import Any

from attractor.experiments.charts import LOOK, Ticks, place, ticks

TITLES = {"dense": "Dense", "apn": "APN"}

Row = dict[str, Any]
Records = list[dict[str, Any]]

CSS = """.dense { --colour: var(--dense); } .apn { --colour: var(--apn); }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.55rem 0 0.55rem 1rem; border-bottom: 1px solid var(--rule); text-align: right; }
table + p, .columns + p { margin-top: 1.5rem; }
th:first-child { padding-left: 0; text-align: left; font-weight: 400; }
thead th.dense, thead th.apn, .samples h3 { color: var(--colour); }
.key { display: flex; flex-wrap: wrap; gap: 0.2rem 1.4rem; margin: 0 0 0.8rem; }
.key i { display: inline-block; width: 1.6rem; margin-right: 0.5rem; vertical-align: middle;
  border-top: 3px solid var(--colour); }
.key i.train { border-top-width: 1px; } .key i.uniform { border-top: 1px dashed var(--ink); }
.plot { position: relative; height: 20rem; margin: 0 0.6rem 1.8rem 2.4rem; }
.layer .plot { height: 9rem; margin: 1.2rem 0 0.5rem 2.4rem; }
.plot svg { position: absolute; width: 100%; height: 100%; overflow: visible; }
.plot path { fill: none; stroke: var(--colour); stroke-width: 2.5; stroke-linejoin: round;
  vector-effect: non-scaling-stroke; }
.plot path.train { stroke-width: 1; opacity: 0.6; }
.plot path.dot { stroke-width: 8; stroke-linecap: round; }
.plot path.grid { stroke: var(--rule); stroke-width: 1; }
.plot path.uniform { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 4 3; }
.plot rect { fill: var(--colour); }
.tick { position: absolute; font-size: 0.75rem; line-height: 1; font-variant-numeric: tabular-nums; }
.tick.y { right: 100%; margin-right: 0.5rem; transform: translateY(50%); }
.tick.x { top: 100%; margin-top: 0.5rem; transform: translateX(-50%); }
figure { margin: 0; } .y-title { margin: 0 0 0.7rem; } .y-title:empty { display: none; }
.x-title { margin: 0; max-width: none; text-align: right; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr));
  gap: 2.5rem 3rem; margin-top: 1.5rem; }
.layer p { margin: 0.2rem 0 0.8rem; }
.verdict { float: right; color: var(--verdict); font-weight: 600; font-size: 0.9rem; }
.layer dl { display: grid; grid-template-columns: auto 1fr; gap: 0.2rem 1rem; margin: 0.6rem 0 0;
  font-size: 0.9rem; font-variant-numeric: tabular-nums; }
.layer dd { text-align: right; } dt { color: var(--muted); white-space: nowrap; } dd { margin: 0; }
.samples pre { margin: 0.5rem 0 0; padding-left: 1rem; border-left: 1px solid var(--rule);
  font: 1rem/1.55 Georgia, "Liberation Serif", serif; white-space: pre-wrap; overflow-wrap: anywhere; }
footer { margin-top: 4rem; border-top: 1px solid var(--rule); padding-top: 1.2rem; }
footer dl { display: grid; grid-template-columns: auto 1fr; gap: 0.2rem 1.5rem; overflow-wrap: anywhere; }
footer pre { overflow-x: auto; font-size: 0.8rem; line-height: 1.4; }
@media print { :root { font-size: 11px; } body { padding: 0; } .plot { height: 14rem; }
  .columns { grid-template-columns: 1fr 1fr; }
  .layer, .samples > *, figure, tr { break-inside: avoid; } h2, h2 + p, .key { break-after: avoid; }
  details { display: none; } }
"""


def render(result: dict[str, Any], metrics: dict[str, Records]) -> str:
    """The page, from the JSON of a result and the metrics.jsonl records of its runs."""
    rows = result["rows"]
    shape = rows["apn"]["config"]["model"]
    apn = shape["apn"]
    data, warmup = result["data"], rows["apn"]["config"]["train"]["warmup_steps"]
    samples = "".join(
        f'<section class="{model}"><h3>{TITLES[model]}</h3>'
        f"<pre>{_sample(text, result['sampling']['prompt'])}</pre></section>"
        for model, text in result["samples"].items()
    )
    top = 100 * max(max(layer["usage"]) for layer in result["routing"].values())
    layers = "".join(_layer(number, layer, top) for number, layer in result["routing"].items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Attractor: dense against APN</title>
<style>
{LOOK}{CSS}</style>
</head>
<body>
<h1>A dense model and an Attractor Patch Network, side by side</h1>
<p>Two language models of {shape["num_layers"]} layers and width {shape["dim"]} learned the same text
({escape(data["source"])}, {data["train_tokens"]:,} tokens) from the same batches. They differ in one part.
The feed-forward layers of the <b>dense</b> model push every token through all of their weights. In the
<b>APN</b> model a router compares each token with {apn["num_patches"]} prototypes, and only the best
{apn["top_k"]} of {apn["num_patches"]} small patches work on it.</p>
<p class="finding">{_finding(rows, result["steps"])}</p>

<h2>The two models</h2>
{_table(rows)}
<p class="muted">Perplexity is over the whole held-out text ({data["val_tokens"]:,} tokens) at each model's
best evaluation; lower is better. Time and speed are medians of this one run on this machine, evaluations left
out: the ratio means more than the numbers. One seed and few steps: this shows how the models work, and is no
benchmark.</p>

<h2>How they learned</h2>
<p>Validation loss is over the whole held-out text, training loss over single batches. The curves begin after
the warm-up of {warmup} steps, in which they fall from {math.log(shape["vocab_size"]):.1f}, the loss of a
guess.</p>
<div class="key">{"".join(_key(model) for model in metrics)}</div>
{_loss_chart(metrics, warmup)}

<h2>Where the work goes</h2>
<p>How often each patch of each APN layer was selected over the held-out text, from the busiest patch to the
idlest. Text is uneven itself, so a slope is expected; when a few patches take everything, the others are
wasted.</p>
<div class="key apn"><span><i></i>share of all selections</span>
<span><i class="uniform"></i>all patches alike ({100 / apn["num_patches"]:.1f}%)</span></div>
<div class="columns">{layers}</div>
<p class="muted">A layer is called <b>even</b> when its work is spread as if at least half of its patches
shared it equally, <b>collapsed</b> when as if fewer than {2 * apn["top_k"]} did or when most are dead, and
<b>uneven</b> in between; the option <code>train.balance_weight</code> spreads the work. A patch is dead when
nothing selected it. Router confidence is the mean score of the best patch, cosine over temperature, so at
most {1 / apn["temperature"]:.1f}. Update size is the mean length of what the layer adds, relative to that of
the stream it is added to. Specialists are the three patches most devoted to a single token, among those with
1% of the selections or more.</p>

{_adaptation(result["adaptation"])}
<h2>What they write</h2>
<p>Both models continue <b>{escape(result["sampling"]["prompt"])}</b> with the same random numbers
(temperature {result["sampling"]["temperature"]}, seed {result["sampling"]["seed"]}).</p>
<div class="columns samples">{samples}</div>
{_footer(result)}
</body>
</html>
"""


def comparison(rows: dict[str, Row]) -> list[tuple[str, str, str, str]]:
    """Name, dense, APN and their ratio: the lines of the table, for the page and for the terminal."""
    dense, apn = rows["dense"], rows["apn"]

    def line(name: str, key: str, form: str = ",.0f") -> tuple[str, str, str, str]:
        return name, format(dense[key], form), format(apn[key], form), f"{apn[key] / dense[key]:.2f}"

    time = f"{dense['tokens_per_second'] / apn['tokens_per_second']:.2f}"  # both saw the same tokens
    return [
        line("Parameters", "parameters"),
        line("Parameters one token uses", "active_parameters"),
        line("Multiply-adds per token", "multiply_adds_per_token"),
        line("Best validation perplexity", "val_ppl", ".2f"),
        ("Training time, dense = 1", "1.00", time, time),
        line("Tokens per second in training", "tokens_per_second"),
    ]


def learned(adaptation: dict[str, Any]) -> list[tuple[str, list[str], str, list[str]]]:
    """Way, the old text's perplexity before and after, how much it rose, and the new text's."""
    lines = []
    for name, row in adaptation["rows"].items():
        rise = f"{100 * (row['old'][1] / row['old'][0] - 1):+.1f} %"
        lines.append((name, [f"{v:.2f}" for v in row["old"]], rise, [f"{v:.2f}" for v in row["new"]]))
    return lines


def _adaptation(adaptation: dict[str, Any]) -> str:
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{old[0]}</td><td>{old[1]}</td>'
        f'<td class="muted">{rise}</td><td>{new[0]}</td><td>{new[1]}</td></tr>\n'
        for name, old, rise, new in learned(adaptation)
    )
    overlay = adaptation["overlay"]
    return f"""<h2>Learning something new while running</h2>
<p>Then both read {adaptation["tokens"]:,} tokens of another domain ({escape(adaptation["source"])}),
once, and learned from them as they came. The dense model changes all of its weights. The APN model leaves its
own as they are and learns in an <b>overlay</b> of {sum(overlay["patches"].values())} patches
({overlay["bytes"]:,} bytes); the <b>guard</b> mixes both by how well each predicts the text at hand.</p>
<table>
<thead><tr><th>Perplexity</th><th>old text, before</th><th>after</th><th></th><th>new text, before</th>
<th>after</th></tr></thead>
<tbody>
{body}</tbody>
</table>
<p class="muted">Whatever was learned, the guard cannot raise the perplexity of any text by more than
{100 * (adaptation["bound"] - 1):.2f} % over the untouched model: one bit in a window. Both learn at the same
rate ({adaptation["learning_rate"]:g}), which is not tuned.</p>
"""


def verdict(layer: dict[str, Any]) -> tuple[str, str]:
    """A word and a sentence on how a layer shares its work. `render` tells the reader the same limits."""
    patches, dead, effective = layer["num_patches"], layer["dead_patches"], layer["effective_patches"]
    if effective < 2 * layer["top_k"] or dead > patches / 2:
        word = "collapsed"
    else:
        word = "even" if effective >= patches / 2 else "uneven"
    working = f"{patches - dead} of {patches}" if dead else f"All {patches}"
    return word, f"{working} patches work, as if {effective:.0f} shared the work equally."


def _finding(rows: dict[str, Row], steps: int) -> str:
    values = {name: (dense, apn, ratio) for name, dense, apn, ratio in comparison(rows)}
    dense, apn, _ = values["Best validation perplexity"]
    arithmetic, time = values["Multiply-adds per token"][2], values["Training time, dense = 1"][2]
    return (
        f"After {steps} steps the dense model reached a validation perplexity of {dense}, the APN model "
        f"{apn}: with {arithmetic} times the arithmetic per token, and {time} times the training time."
    )


def _table(rows: dict[str, Row]) -> str:
    body = "".join(
        f'<tr><th scope="row">{name}</th><td>{dense}</td><td>{apn}</td><td class="muted">{ratio}</td></tr>\n'
        for name, dense, apn, ratio in comparison(rows)
    )
    return f"""<table>
<thead><tr><th></th><th class="dense">Dense</th><th class="apn">APN</th>
<th class="muted">APN / dense</th></tr></thead>
<tbody>
{body}</tbody>
</table>"""


def _key(model: str) -> str:
    return (
        f'<span class="{model}"><i></i>{TITLES[model]}, validation</span>'
        f'<span class="{model}"><i class="train"></i>{TITLES[model]}, training</span>'
    )


def _loss_chart(metrics: dict[str, Records], first_step: int) -> str:
    curves = {
        (model, kind): [
            (r["step"], r[f"{kind}/loss"])
            for r in records
            if r.get(f"{kind}/loss") is not None and r["step"] >= first_step
        ]
        for kind in ("train", "val")  # validation is drawn last, above the noise
        for model, records in metrics.items()
    }
    steps = [step for points in curves.values() for step, _ in points]
    losses = [loss for points in curves.values() for _, loss in points]
    x, y = ticks(0, max(steps), 6), ticks(min(losses), max(losses), 7)
    marks = ""
    for (model, kind), points in curves.items():
        placed = [(place(step, x), 100 - place(loss, y)) for step, loss in points]
        marks += f'<path class="{model} {kind}" d="M{" L".join(f"{px:.2f} {py:.2f}" for px, py in placed)}"/>'
        if kind == "val":
            marks += "".join(
                f'<path class="{model} dot" d="M{px:.2f} {py:.2f}h0">'
                f"<title>{TITLES[model]}, step {step}: validation loss {loss:.3f}</title></path>"
                for (px, py), (step, loss) in zip(placed, points, strict=True)
            )
    return _chart(marks, x, y, "training step", "loss, nats per token", "Loss of both models over the steps")


def _layer(number: str, layer: dict[str, Any], top: float) -> str:
    word, sentence = verdict(layer)
    shares = {patch: 100 * share for patch, share in enumerate(layer["usage"])}
    y, width = ticks(0, top, 3, "%"), 100 / len(shares)
    marks = "".join(
        f'<rect x="{column * width:.2f}" width="{0.75 * width:.2f}" y="{100 - place(shares[patch], y):.2f}" '
        f'height="{place(shares[patch], y):.2f}"><title>{_patch(layer, patch)}</title></rect>'
        for column, patch in enumerate(sorted(shares, key=lambda patch: -shares[patch]))
    )
    marks += f'<path class="uniform" d="M0 {100 - place(width, y):.2f}H100"/>'  # 100% over all patches
    numbers = {
        "Usage entropy": f"{layer['usage_entropy']:.2f} of {math.log(len(shares)):.2f}",
        "Dead patches": f"{layer['dead_patches']} of {len(shares)}",
        "Router confidence": f"{layer['confidence']:.2f}",
        "Update size": f"{layer['update_ratio']:.2f}",
        "Specialists": specialists(layer),
    }
    listed = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in numbers.items())
    chart = _chart(marks, {}, y, "patches, busiest first", "", f"Share of selections, layer {number}")
    return (
        f'<section class="layer apn"><span class="verdict" style="--verdict: var(--{word})">{word}</span>'
        f'<h3>Layer {number}</h3><p class="muted">{sentence}</p>{chart}<dl>{listed}</dl></section>'
    )


def specialists(layer: dict[str, Any]) -> str:
    """The favourite tokens of the most devoted patches; hardly used ones are devoted by chance."""
    busy = [layer["favourites"][patch] for patch, share in enumerate(layer["usage"]) if share >= 0.01]
    busy.sort(key=lambda favourite: -favourite[1])
    return ", ".join(f"{_token(text)} {part:.0%}" for text, part in busy[:3])


def _patch(layer: dict[str, Any], patch: int) -> str:
    text = f"patch {patch}: {layer['usage'][patch]:.2%} of all selections"
    if layer["favourites"][patch]:
        token, part = layer["favourites"][patch]
        text += f", {part:.0%} of them {_token(token)}"
    return escape(text)


def _token(text: str) -> str:
    return {" ": "space", "\n": "newline"}.get(text, text if text.isprintable() else repr(text))


def _chart(marks: str, x: Ticks, y: Ticks, x_title: str, y_title: str, description: str) -> str:
    grid = "".join(f'<path class="grid" d="M0 {100 - place(value, y):.2f}H100"/>' for value in y)
    labels = "".join(
        f'<span class="tick y" style="bottom: {place(value, y):.2f}%">{text}</span>'
        for value, text in y.items()
    ) + "".join(
        f'<span class="tick x" style="left: {place(value, x):.2f}%">{text}</span>'
        for value, text in x.items()
    )
    return (
        f'<figure><p class="y-title">{y_title}</p><div class="plot">'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{description}">'
        f'{grid}{marks}</svg>{labels}</div><p class="x-title">{x_title}</p></figure>'
    )


def _sample(text: str, prompt: str) -> str:
    rest = text.removeprefix(prompt)
    start = f"<b>{escape(prompt)}</b>" if rest != text else ""
    return start + escape(rest)


def _footer(result: dict[str, Any]) -> str:
    made = result["provenance"]
    machine, data = made["machine"], result["data"]
    train = result["rows"]["apn"]["config"]["train"]
    device = machine["gpu"] or f"CPU, {machine['cpu_threads']} threads"
    facts = {
        "Code": made["commit"][:12] + (" with uncommitted changes" if made["uncommitted_changes"] else ""),
        "Versions": ", ".join(f"{name} {version}" for name, version in made["versions"].items()),
        "Machine": f"{machine['system']} {machine['processor']}, {device}",
        "Text": f"{data['source']}, {data['tokenizer']} tokens, SHA-256 {data['sha256'][:16]}",
        "Training": f"seed {train['seed']}, {train['max_steps']} steps of {train['batch_size']} sequences, "
        f"learning rate {train['learning_rate']:g}",
    }
    listed = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    configs = "".join(
        f"<details><summary>{TITLES[model]}: the whole configuration</summary>"
        f"<pre>{escape(json.dumps(row['config'], indent=2))}</pre></details>"
        for model, row in result["rows"].items()
    )
    return f"<footer><dl>{listed}</dl>{configs}</footer>"
