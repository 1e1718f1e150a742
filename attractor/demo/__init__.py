"""What `make demo` shows: a model is taught, asked and made to forget; then a dense and an APN model learn.

attractor demo      a few minutes on two CPU cores; then open runs/demo/report.html
"""

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attractor import monitor, presets
from attractor.checkpoint import find_model
from attractor.config import RunConfig
from attractor.continual.baselines import FineTune
from attractor.continual.config import GuardConfig, LearnConfig, UpdateConfig
from attractor.continual.guarded import GuardedLearner
from attractor.data import Dataset, read_text, windows
from attractor.demo.report import TITLES, comparison, learned, render, specialists, verdict
from attractor.demo.story import is_right, tell
from attractor.evaluate import evaluate, routing
from attractor.files import read_jsonl
from attractor.generate import continued
from attractor.measure import one_of_several, train_and_measure
from attractor.model import GPT
from attractor.results import write_result
from attractor.tokenizer import Tokenizer

MODELS = ("dense", "apn")
PROMPT = "ROMEO:"
SAMPLING: dict[str, Any] = {"max_tokens": 400, "temperature": 0.8, "seed": 1337}
NEW_DOMAIN, RATE = "paper-shift", 5e-4
"""What both learn afterwards, as a stream, and at which rate."""
OTHER_TEXT = 10_000
"""Characters of each text that lessons should leave alone."""


def run_config(model: str, steps: int, vocab_size: int) -> RunConfig:
    """The tiny preset, evaluated often enough to draw a curve and saved as often."""
    config = presets.NAMES[f"tiny_{model}"]()
    train = dataclasses.replace(
        config.train,
        max_steps=steps,
        warmup_steps=steps // 20,
        log_interval=max(1, steps // 60),
        eval_interval=math.ceil(steps / 6),
        checkpoint_interval=math.ceil(steps / 6),
    )
    shape = dataclasses.replace(config.model, vocab_size=vocab_size)
    return dataclasses.replace(config, model=shape, train=train)


def run(
    out: Path,
    dataset: Dataset,
    *,
    steps: int,
    prompt: str = PROMPT,
    device: str | None = None,
    report: Callable[[dict[str, Any]], None] = lambda record: None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Tell the story of the lessons, train both models, measure them, write `out`/demo.json and /report.html.

    What was done before an interruption is not done again. `say` receives the lines of the story, and
    `report` the trainers' records with two additions: what we are "doing", and how many of the steps of both
    models are "done".
    """
    dataset.tokenizer.encode(prompt)  # a prompt that cannot be written is no news after minutes of training
    configs = {model: run_config(model, steps, dataset.tokenizer.vocab_size) for model in MODELS}
    for model, config in configs.items():
        check_unchanged(out / model, config)
    story = tell(out, other_texts(dataset), device=device, say=say)
    rows: dict[str, Any] = {}
    for model, config in configs.items():
        report_one = one_of_several(report, f"training {TITLES[model]}", before=len(rows) * steps)
        rows[model] = train_and_measure(config, dataset, out / model, device=device, report=report_one)
    models = {name: GPT.from_pretrained(find_model(out / name)) for name in MODELS}
    report({"step": steps, "doing": "learning something new", "done": len(rows) * steps})
    adapted = adaptation(models, dataset, tokens=100 * steps)
    report({"step": steps, "doing": "reading and writing", "done": len(rows) * steps})
    described = ("source", "sha256", "tokenizer", "train_tokens", "val_tokens")
    values = {
        "experiment": "demo",
        "story": story,
        "steps": steps,
        "data": {name: dataset.meta[name] for name in described},
        "rows": rows,
        "routing": routing_health(models["apn"], dataset),
        "adaptation": adapted,
        "sampling": {"prompt": prompt, **SAMPLING},
        "samples": {
            name: continued(model, dataset.tokenizer, dataset.tokenizer.encode(prompt), **SAMPLING)
            for name, model in models.items()
        },
    }
    write_result(out / "demo.json", values)
    result = json.loads((out / "demo.json").read_text())
    page = render(result, {model: read_jsonl(out / model / "metrics.jsonl", "step") for model in MODELS})
    (out / "report.html").write_text(page, encoding="utf-8")
    return result


def other_texts(dataset: Dataset) -> dict[str, str]:
    """Texts that no lesson is about. The end of the manual is not among what calibrates the model."""
    manual = "\n".join(topics.topics.values())
    learned = dataset.tokenizer.decode(dataset.train[:OTHER_TEXT])
    return {"The end of Python's manual": manual[-OTHER_TEXT:], str(dataset.meta["source"]): learned}


def adaptation(models: dict[str, GPT], dataset: Dataset, tokens: int) -> dict[str, Any]:
    """Both learn a second domain from one pass over a stream; how well do they predict the old and the new?

    The dense model is fine-tuned, all of it. The APN model learns in an overlay: measured alone, and guarded.
    """
    text, _ = dataset.tokenizer.encode_known(read_text(NEW_DOMAIN))
    held_out = len(text) // 10
    stream, new = text[: min(tokens, len(text) - held_out)], text[-held_out:]
    dense = FineTune(copy.deepcopy(models["dense"]), learning_rate=RATE)
    for inputs, targets, _ in windows(stream, dense.model.config.context, 16):
        dense.step(inputs, targets)
    update = UpdateConfig(train=("decoders", "gates", "encoder"), learning_rate=RATE)
    learner = GuardedLearner(models["apn"], config=GuardConfig(learn=LearnConfig(update=update)))
    learner.observe(stream, source="new")
    learner.flush()
    ways = {
        "Dense, fine-tuned": (models["dense"], dense.model),
        "APN, overlay alone": (models["apn"], learner.sources["new"].branch.model),
        "APN, guarded": (models["apn"], learner.guard),
    }
    domains = {"old": np.asarray(dataset.val), "new": new}
    rows = {
        name: {
            domain: [math.exp(evaluate(model, tokens)) for model in (before, after)]
            for domain, tokens in domains.items()
        }
        for name, (before, after) in ways.items()
    }
    context = models["apn"].config.context
    return {
        "source": NEW_DOMAIN,
        "tokens": len(stream),
        "learning_rate": RATE,
        "rows": rows,
        "bound": math.exp(learner.guard.bound(context) / context),
        "overlay": learner.overlays()["new"],
    }


def check_unchanged(folder: Path, config: RunConfig) -> None:
    """A run trained with other settings must not be shown as one with these."""
    saved = folder / "config.json"
    if saved.is_file() and RunConfig.from_json(saved.read_text()) != config:
        raise ValueError(
            f"{folder} was trained with other settings; remove {folder.parent} or choose another folder"
        )


def routing_health(model: GPT, dataset: Dataset) -> dict[str, dict[str, Any]]:
    """What the router of each APN layer does with the whole validation text."""
    tokens = torch.from_numpy(dataset.val[:-1].astype(np.int64))
    found = routing(model, dataset.val)
    health = {}
    for layer, apn in model.apn_layers().items():
        stats = found[layer]
        usage = monitor.usage(stats.indices, apn.num_patches)
        entropy = monitor.usage_entropy(usage)
        health[str(layer)] = {
            "num_patches": apn.num_patches,
            "top_k": apn.config.top_k,
            "usage": usage.tolist(),
            "usage_entropy": entropy,
            "effective_patches": math.exp(entropy),
            "dead_patches": len(monitor.dead_patches(usage)),
            "confidence": float(stats.confidence.mean()),
            "update_ratio": float((stats.update_norm / stats.input_norm).mean()),
            "favourites": favourites(stats.indices, tokens, apn.num_patches, dataset.tokenizer),
        }
    return health


def favourites(
    indices: Tensor, tokens: Tensor, num_patches: int, tokenizer: Tokenizer
) -> list[tuple[str, float] | None]:
    """For each patch the token that selects it most often, and that token's share; None for a dead patch."""
    pairs = indices * tokenizer.vocab_size + tokens[:, None]
    counts = torch.bincount(pairs.flatten(), minlength=num_patches * tokenizer.vocab_size)
    most, token = counts.view(num_patches, -1).max(1)
    shares = most / counts.view(num_patches, -1).sum(1)
    return [
        (tokenizer.decode([int(token[patch])]), float(shares[patch])) if most[patch] else None
        for patch in range(num_patches)
    ]


def story_lines(result: dict[str, Any]) -> str:
    """Every question, what the base said and what the model says now; other text; and what was forgotten."""
    story = result["story"]
    if "unavailable" in story:
        return f"Lessons are not shown, because their model cannot be had: {story['unavailable']}"
    facts, lines = story["facts"], []
    for fact, lesson, before, now in zip(
        facts, story["lessons"], story["before"], story["answers"], strict=True
    ):
        right = "as taught" if is_right(fact, now) else "NOT as taught"
        lines += [
            f"{fact['question']}",
            f"    before:  {before}",
            f"    now:     {now}  [{right}; known {lesson['known_before']:.0%} -> {lesson['known']:.0%}]",
        ]
    lines.append(f"\n{story['right']} of {len(facts)} answers are what was taught.")
    for name, text in story["others"].items():
        lines.append(
            f"{name}: {text['same']} of {text['windows']} windows are the base's to the bit, "
            f"perplexity {text['before']:.3f} before, {text['after']:.3f} now"
        )
    forgotten = story["forgotten"]
    lines.append(f"After forgetting: {facts[forgotten['fact']]['question']} {forgotten['answer']}")
    return "\n".join(lines)


def table(result: dict[str, Any]) -> str:
    lines = [f"{'':34s} {'dense':>12s} {'APN':>12s} {'APN/dense':>12s}"]
    lines += [
        f"{name:34s} {dense:>12s} {apn:>12s} {ratio:>12s}"
        for name, dense, apn, ratio in comparison(result["rows"])
    ]
    return "\n".join(lines)


def adaptation_table(result: dict[str, Any]) -> str:
    head = ("perplexity", ["old: before", "after"], "", ["new: before", "after"])
    lines = [
        f"{name:22s} {old[0]:>12s} {old[1]:>8s} {rise:>9s} {new[0]:>12s} {new[1]:>8s}"
        for name, old, rise, new in [head, *learned(result["adaptation"])]
    ]
    return "\n".join([*lines, f"(the guard's bound: {100 * (result['adaptation']['bound'] - 1):+.2f} %)"])


def routing_table(result: dict[str, Any]) -> str:
    """Two lines for each APN layer: its patches from the busiest to the idlest, and the numbers."""
    lines = []
    for number, layer in result["routing"].items():
        usage = sorted(layer["usage"], reverse=True)
        # eight block characters from U+2581; a patch that nothing selected is a space
        bars = "".join(chr(0x2580 + math.ceil(8 * share / usage[0])) if share else " " for share in usage)
        entropy = f"entropy {layer['usage_entropy']:.2f} of {math.log(len(usage)):.2f}"
        sizes = f"confidence {layer['confidence']:.2f}, update {layer['update_ratio']:.2f}"
        lines += [
            f"layer {number}  {bars}  {verdict(layer)[0]}: {entropy}, {layer['dead_patches']} dead",
            f"         {sizes}, specialists {specialists(layer)}",
        ]
    return "\n".join(lines)


def samples(result: dict[str, Any]) -> str:
    return "\n\n".join(f"{TITLES[model]} writes\n{text}" for model, text in result["samples"].items())
