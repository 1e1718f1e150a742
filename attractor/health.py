"""The paper's monitoring metrics of a model on one or two texts: numbers, a table and a picture."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from attractor import monitor
from attractor.evaluate import routing
from attractor.lm import TrainableModel

COLUMNS = {
    "patches": "num_patches",
    "entropy": "usage_entropy",
    "effective": "effective_patches",
    "dead": "dead_patches",
    "busiest": "max_usage",
    "overlap": "mean_overlap",
    "confidence": "confidence_mean",
    "least 5%": "confidence_p05",
    "|D|/|h|": "update_ratio_p50",
    "95%": "update_ratio_p95",
    "spike": "update_ratio_max",
}


def measure(model: TrainableModel, texts: dict[str, np.ndarray]) -> dict[str, Any]:
    """Measure the paper's metrics for every text and layer; for two texts also which patches they share."""
    if not model.apn_layers():
        raise ValueError("the model has no APN layers: there is no routing to look at")
    found = {name: routing(model, tokens) for name, tokens in texts.items()}
    layers = list(model.apn_layers())
    values: dict[str, Any] = {"texts": {}}
    for name, stats in found.items():
        values["texts"][name] = {
            str(layer): {
                **monitor.summary(stats[layer]),
                "num_patches": stats[layer].num_patches,
                "usage": monitor.usage(stats[layer].indices, stats[layer].num_patches).tolist(),
                "overlap_histogram": monitor.overlap_histogram(
                    stats[layer].indices, stats[layer].num_patches
                ).tolist(),
            }
            for layer in layers
        }
    if len(found) == 2:
        a, b = found.values()
        values["shared"] = {
            str(layer): {
                "omega": monitor.expected_overlap(a[layer].indices, b[layer].indices, a[layer].num_patches),
                "score": monitor.overlap_score(a[layer].indices, b[layer].indices, a[layer].num_patches),
                "usage": float(
                    np.minimum(
                        *(monitor.usage(s[layer].indices, s[layer].num_patches).numpy() for s in (a, b))
                    ).sum()
                ),
            }
            for layer in layers
        }
    return values


def table(values: dict[str, Any]) -> str:
    lines = []
    for name, layers in values["texts"].items():
        lines.append(f"{name}: {next(iter(layers.values()))['tokens']:,.0f} tokens")
        lines.append("layer " + " ".join(f"{column:>10s}" for column in COLUMNS))
        for layer, numbers in layers.items():
            cells = (numbers[key] for key in COLUMNS.values())
            lines.append(f"{layer:>5s} " + " ".join(f"{_short(cell):>10s}" for cell in cells))
    if "shared" in values:
        a, b = values["texts"]
        lines.append(f"A = {a}, B = {b}: patches that two tokens share, and what usage has in common")
        lines.append("layer   Omega(A,B)    Omega / k  usage shared")
        lines += [
            f"{layer:>5s} {own['omega']:12.4f} {own['score']:12.4f} {own['usage']:13.3f}"
            for layer, own in values["shared"].items()
        ]
    return "\n".join(lines)


def _short(number: float) -> str:
    if not math.isfinite(number):
        return "-"
    return f"{number:.0f}" if number == round(number) else f"{number:.3f}"


def plot(values: dict[str, Any], path: Path) -> None:
    """Usage of each layer's patches, busiest first, and how many patches two tokens share."""
    from attractor.figures import new_figure  # matplotlib is an extra

    texts = values["texts"]
    layers = list(next(iter(texts.values())))
    figure = new_figure(10, 1.9 * len(layers))
    axes = figure.subplots(len(layers), 2, squeeze=False)
    for row, layer in enumerate(layers):
        first = np.array(next(iter(texts.values()))[layer]["usage"])
        order = np.argsort(-first, kind="stable")
        left, right = axes[row]
        width = 0.8 / len(texts)
        for number, (name, own) in enumerate(texts.items()):
            numbers = own[layer]
            left.step(range(len(order)), np.array(numbers["usage"])[order], where="mid", label=name)
            shares = numbers["overlap_histogram"]
            places = np.arange(len(shares)) + (number - (len(texts) - 1) / 2) * width
            right.bar(places, shares, width, label=name)
        left.axhline(1 / len(order), color="grey", linewidth=0.6, linestyle=":")
        left.set_ylabel(f"layer {layer}")
        left.margins(x=0.01)
        right.set_ylim(0, 1)
        right.set_xticks(range(len(shares)))
    axes[0, 0].set_title("share of selections, patches busiest first")
    axes[0, 1].set_title("share of token pairs by patches in common")
    axes[0, 0].legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=110)
