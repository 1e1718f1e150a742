"""Train a model and measure its best checkpoint: perplexity, parameters, arithmetic, speed and memory."""

import dataclasses
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from attractor import analysis, presets
from attractor.checkpoint import find_model
from attractor.config import RunConfig
from attractor.data import Batches, Dataset
from attractor.evaluate import evaluate
from attractor.files import read_jsonl
from attractor.layer import APN, SizeName
from attractor.model import GPT
from attractor.trainer import Trainer

Report = Callable[[dict[str, Any]], None]


def train_and_measure(
    config: RunConfig,
    dataset: Dataset,
    folder: Path,
    *,
    sampled_batches: int = 20,
    device: str | None = None,
    report: Report = print,
) -> dict[str, Any]:
    """Train a model (or finish it, or find it finished) and measure its best checkpoint."""
    shape = dataclasses.replace(config.model, vocab_size=dataset.tokenizer.vocab_size)
    config = dataclasses.replace(config, model=shape)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(config, dataset, folder, device=device, report=report)
    if trainer.resume():
        report({"step": trainer.step})
    summary = trainer.run()
    if summary["interrupted"]:
        raise KeyboardInterrupt
    best = GPT.from_pretrained(find_model(folder), device=trainer.device)
    val_loss = evaluate(best, dataset.val, autocast=trainer.autocast)
    sampled = random_batch_loss(best, dataset, config, batches=sampled_batches)
    counts = [analysis.parameter_counts(layer) for layer in best.apn_layers().values()]
    records = read_jsonl(folder / "metrics.jsonl", "step")  # also of earlier processes
    last = {name: value for record in records for name, value in record.items()}
    entropies = [value for name, value in last.items() if name.endswith("usage_entropy")]

    def typical(name: str) -> float | None:
        values = [record[name] for record in records if record.get(name) is not None]
        return statistics.median(values) if values else None

    return {
        "config": config.to_dict(),
        "seed": config.train.seed,
        "val_loss": val_loss,
        "val_ppl": math.exp(val_loss),
        "val_ppl_random_batches": math.exp(sampled),
        "best_step": summary["best_step"],
        "parameters": best.num_parameters(),
        "active_parameters": best.num_parameters()
        - sum(count["total"] - count["active"] for count in counts),
        "multiply_adds_per_token": analysis.model_multiply_adds(best),
        "training_seconds": summary["seconds"],
        "tokens_per_second": typical("train/tokens_per_second"),
        "mfu": typical("train/mfu"),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        "usage_entropy": sum(entropies) / len(entropies) if entropies else None,
    }


def one_of_several(report: Report, doing: str, *, before: int) -> Report:
    """A report of one training of several: what is done, and how many steps of all are."""
    return lambda record: report({**record, "doing": doing, "done": before + record["step"]})


def compare(
    dense: RunConfig,
    dataset: Dataset,
    folder: Path,
    *,
    by: SizeName = "parameters",
    steps: int = 300,
    device: str | None = None,
    report: Report = print,
) -> dict[str, dict[str, Any]]:
    """Train a dense model and the same one with APN layers that `APN.like_ffn` sizes; what came of both.

    Each is trained for so many steps, or found trained in the folder.
    """
    shorter = dataclasses.replace(
        dense.train,
        max_steps=steps,
        warmup_steps=min(dense.train.warmup_steps, steps // 10),
        eval_interval=max(1, steps // 4),
        checkpoint_interval=max(1, steps // 4),
    )
    dense = dataclasses.replace(dense, train=shorter)
    sized = APN.like_ffn(dense.model.dim, by=by, device="meta").config
    models = {"dense": dense, "APN": presets.with_apn(dense, sized)}
    results = {}
    for number, (name, config) in enumerate(models.items()):
        tell = one_of_several(report, name, before=number * steps)
        place = folder / (name if name == "dense" else f"{name}-{by}")
        measured = train_and_measure(config, dataset, place, sampled_batches=1, device=device, report=tell)
        speed = measured["tokens_per_second"]
        tokens = config.train.batch_size * config.model.context
        results[name] = {**measured, "step_milliseconds": None if not speed else 1000 * tokens / speed}
    return results


@torch.no_grad()
def random_batch_loss(model: GPT, dataset: Dataset, config: RunConfig, *, batches: int) -> float:
    """The paper's evaluator: the mean over random validation batches."""
    model.eval()
    device = model.device
    source = Batches(dataset.val, config.train.batch_size, config.model.context, seed=0)
    total = 0.0
    for _ in range(batches):
        inputs, targets = next(source)
        logits = model(inputs.to(device))
        total += float(F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten()))
    return total / batches
