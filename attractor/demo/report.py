"""A result of the demo as one HTML page: no scripts, nothing fetched, light and dark, screen and paper.

The words are in report.html.jinja; here are the numbers and the charts that it shows.
"""

import json
import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from attractor.demo.story import is_right
from attractor.figures import data_uri, in_style, new_figure, svg

TITLES = {"dense": "Dense", "apn": "APN"}
COLOURS = {"dense": "#5672a8", "apn": "#cb4b12"}
MARKERS = {"dense": "o", "apn": "s"}

Row = dict[str, Any]
Records = list[dict[str, Any]]

HERE = Path(__file__).parent
"""Where this page's template is, and the look that other pages may share."""


def templates(*folders: Path) -> Environment:
    """Templates of these folders: what they are given is text, and a name that is not there is an error."""
    found = Environment(loader=FileSystemLoader([*folders, HERE]), autoescape=True, undefined=StrictUndefined)
    found.filters["pretty"] = lambda values: json.dumps(values, indent=2)
    return found


def render(result: dict[str, Any], metrics: dict[str, Records]) -> str:
    """The page, from the JSON of a result and the metrics.jsonl records of its runs."""
    rows = result["rows"]
    shape, train = rows["apn"]["config"]["model"], rows["apn"]["config"]["train"]
    top = max(max(layer["usage"]) for layer in result["routing"].values())
    return (
        templates()
        .get_template("report.html.jinja")
        .render(
            **result,
            shape=shape,
            apn=shape["apn"],
            titles=TITLES,
            finding=_finding(rows, result["steps"]),
            comparison=comparison(rows),
            warmup=train["warmup_steps"],
            guess=math.log(shape["vocab_size"]),
            losses=data_uri(loss_chart(metrics, train["warmup_steps"])),
            layers=[_layer(number, layer, top) for number, layer in result["routing"].items()],
            learned=learned(result["adaptation"]),
            facts=_facts(result),
            taught=_taught(result["story"]),
        )
    )


def _taught(story: dict[str, Any]) -> list[dict[str, Any]]:
    """For each fact what the page shows of it; nothing where there is no story."""
    if "unavailable" in story:
        return []
    columns = zip(story["facts"], story["lessons"], story["before"], story["answers"], strict=True)
    return [
        {
            **fact,
            "before": before,
            "now": now,
            "is_right": is_right(fact, now),
            "known": f"{lesson['known_before']:.0%} to {lesson['known']:.0%}",
            "bytes": lesson["bytes"],
            "seconds": lesson["seconds"],
        }
        for fact, lesson, before, now in columns
    ]


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


def verdict(layer: dict[str, Any]) -> tuple[str, str]:
    """A word and a sentence on how a layer shares its work. The page shows the same limits."""
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


@in_style
def loss_chart(metrics: dict[str, Records], first_step: int) -> str:
    """Validation and training loss of both models, from a step on."""
    figure = new_figure(8.6, 3.4)
    axes = figure.subplots()
    for kind, width in (("train", 0.8), ("val", 2.2)):  # validation last, above the noise
        for model, records in metrics.items():
            points = [
                (record["step"], record[f"{kind}/loss"])
                for record in records
                if record.get(f"{kind}/loss") is not None and record["step"] >= first_step
            ]
            label = f"{TITLES[model]}, {'validation' if kind == 'val' else 'training'}"
            marker = MARKERS[model] if kind == "val" else None
            steps, losses = zip(*points, strict=True)
            axes.plot(steps, losses, label=label, color=COLOURS[model], marker=marker, linewidth=width)
    axes.set(xlabel="training step", ylabel="loss, nats per token")
    axes.legend(ncols=2)
    return svg(figure)


@in_style
def usage_chart(usage: list[float], top: float) -> str:
    """The share of selections of each patch, busiest first."""
    figure = new_figure(4.4, 1.9)
    axes = figure.subplots()
    axes.bar(range(len(usage)), [100 * share for share in sorted(usage, reverse=True)], color=COLOURS["apn"])
    alike = 100 / len(usage)
    axes.axhline(alike, color="black", linewidth=1, linestyle="--", label=f"all alike, {alike:.1f}%")
    axes.set(xlabel="patches, busiest first", ylabel="selections, %", xticks=[], ylim=(0, 105 * top))
    axes.grid(visible=False, axis="x")
    axes.legend()
    return svg(figure)


def _layer(number: str, layer: dict[str, Any], top: float) -> dict[str, Any]:
    word, sentence = verdict(layer)
    patches = len(layer["usage"])
    numbers = {
        "Usage entropy": f"{layer['usage_entropy']:.2f} of {math.log(patches):.2f}",
        "Dead patches": f"{layer['dead_patches']} of {patches}",
        "Router confidence": f"{layer['confidence']:.2f}",
        "Update size": f"{layer['update_ratio']:.2f}",
        "Specialists": specialists(layer),
    }
    return {
        "number": number,
        "word": word,
        "sentence": sentence,
        "picture": data_uri(usage_chart(layer["usage"], top)),
        "numbers": numbers,
        "patches": [
            _patch(layer, patch) for patch in sorted(range(patches), key=lambda patch: -layer["usage"][patch])
        ],
    }


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
    return text


def _token(text: str) -> str:
    return {" ": "space", "\n": "newline"}.get(text, text if text.isprintable() else repr(text))


def _facts(result: dict[str, Any]) -> dict[str, str]:
    made, data = result["provenance"], result["data"]
    machine, train = made["machine"], result["rows"]["apn"]["config"]["train"]
    device = machine["gpu"] or f"CPU, {machine['cpu_threads']} threads"
    return {
        "Code": made["commit"][:12] + (" with uncommitted changes" if made["uncommitted_changes"] else ""),
        "Versions": ", ".join(f"{name} {version}" for name, version in made["versions"].items()),
        "Machine": f"{machine['system']} {machine['processor']}, {device}",
        "Text": f"{data['source']}, {data['tokenizer']} tokens, SHA-256 {data['sha256'][:16]}",
        "Training": f"seed {train['seed']}, {train['max_steps']} steps of {train['batch_size']} sequences, "
        f"learning rate {train['learning_rate']:g}",
    }
