"""The paper's Table 1: a dense and an APN model of the same shape, trained alike on char Shakespeare.

python -m studies table1 --size smoke      about two minutes on two CPU cores
python -m studies table1 --size paper      the paper's settings, one GPU
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from attractor import presets
from attractor.config import RunConfig
from attractor.data import Dataset
from attractor.measure import Report, train_and_measure
from attractor.results import write_result

PAPER = {
    "dense": {"val_ppl": 4.32, "parameters": 10.65e6, "minutes": 7.4, "mfu": 0.067},
    "apn": {"val_ppl": 4.57, "parameters": 23.21e6, "minutes": 42.8, "mfu": 0.022},
}
Size = Literal["smoke", "paper"]


def run_config(model: str, size: Size) -> RunConfig:
    if size == "paper":
        return presets.NAMES[f"paper_{model}"]()
    config = presets.NAMES[f"tiny_{model}"]()
    train = dataclasses.replace(config.train, max_steps=300, eval_interval=100, checkpoint_interval=300)
    return dataclasses.replace(config, train=train)


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
    batches = 200 if size == "paper" else 20
    rows = {
        model: train_and_measure(
            run_config(model, size),
            dataset,
            folder / model,
            sampled_batches=batches,
            device=device,
            report=report,
        )
        for model in models
    }
    values = {"experiment": "table1", "size": size, "rows": rows, "paper": PAPER if size == "paper" else None}
    write_result(result, values)
    return values
