"""The paper's Table 1: a dense and an APN model of the same shape, trained alike on char Shakespeare.

attractor experiment table1 --size smoke      about two minutes on two CPU cores
attractor experiment table1 --size paper      the paper's settings, one GPU
"""

import dataclasses
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import functional as F

from attractor import analysis, presets
from attractor.checkpoint import find_model, read_metrics
from attractor.config import RunConfig
from attractor.data import Batches, Dataset
from attractor.evaluate import evaluate
from attractor.experiments.result import write_result
from attractor.model import GPT
from attractor.trainer import Trainer

PAPER = {
    "dense": {"val_ppl": 4.32, "parameters": 10.65e6, "minutes": 7.4, "mfu": 0.067},
    "apn": {"val_ppl": 4.57, "parameters": 23.21e6, "minutes": 42.8, "mfu": 0.022},
}
Size = Literal["smoke", "paper"]
Report = Callable[[dict[str, Any]], None]


def run_config(model: str, size: Size) -> RunConfig:
    if size == "paper":
        return presets.NAMES[f"paper_{model}"]()
    config = presets.NAMES[f"tiny_{model}"]()
    train = dataclasses.replace(config.train, max_steps=300, eval_interval=100, checkpoint_interval=300)
    return dataclasses.replace(config, train=train)


def run_one(
    model: str,
    size: Size,
    dataset: Dataset,
    folder: Path,
    *,
    device: str | None = None,
    report: Report = print,
) -> dict[str, Any]:
    """One row of the table."""
    return train_and_measure(
        run_config(model, size), dataset, folder, sampled_batches=200 if size == "paper" else 20,
        device=device, report=report,
    )  # fmt: skip


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
    records = read_metrics(folder / "metrics.jsonl")  # of the whole run, whichever process trained it
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


@torch.no_grad()
def random_batch_loss(model: GPT, dataset: Dataset, config: RunConfig, *, batches: int) -> float:
    """The paper's evaluator: the mean over random validation batches."""
    model.eval()
    device = model.embedding.weight.device
    source = Batches(dataset.val, config.train.batch_size, config.model.context, seed=0)
    total = 0.0
    for _ in range(batches):
        inputs, targets = next(source)
        logits = model(inputs.to(device))
        total += float(F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten()))
    return total / batches


def table(rows: dict[str, dict[str, Any]], size: Size) -> str:
    """The paper's table with ours beside it, from the JSON of a result."""
    columns = ("model", "val PPL", "random batches", "best step", "parameters", "active", "time")
    lines = [" ".join(f"{column:>14s}" for column in columns)]

    def line(*cells: str) -> None:
        lines.append(" ".join(f"{cell:>14s}" for cell in cells))

    for name, row in rows.items():
        line(
            name,
            f"{row['val_ppl']:.3f}",
            f"{row['val_ppl_random_batches']:.3f}",
            f"{row['best_step']}",
            f"{row['parameters'] / 1e6:.2f}M",
            f"{row['active_parameters'] / 1e6:.2f}M",
            f"{row['training_seconds']:.0f} s",
        )
        if size == "paper":
            paper = PAPER[name]
            parameters, seconds = f"{paper['parameters'] / 1e6:.2f}M", f"{paper['minutes'] * 60:.0f} s"
            line(f"{name} (paper)", "", f"{paper['val_ppl']:.2f}", "", parameters, "", seconds)
    return "\n".join(lines)


def run(
    size: Size,
    dataset: Dataset,
    folder: Path,
    result: Path,
    *,
    device: str | None = None,
    models: tuple[str, ...] = ("dense", "apn"),
    report: Report = print,
) -> dict[str, Any]:
    """Both rows, then the result file. Finished rows are not trained again."""
    rows = {
        model: run_one(model, size, dataset, folder / model, device=device, report=report) for model in models
    }
    values = {"experiment": "table1", "size": size, "rows": rows, "paper": PAPER if size == "paper" else None}
    write_result(result, values)
    return values
