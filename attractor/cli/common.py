"""What several verbs need: the text of a run, and a bar that follows one."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from attractor.checkpoint import find_model
from attractor.config import RunConfig
from attractor.data import Dataset, prepare

INTERRUPTED = 75
"""Exit code of a run that a signal stopped after saving: run it again with --resume auto."""


def dataset_of(config: RunConfig) -> Dataset:
    data = config.data
    folder = Path(data.source)
    if (folder / "meta.json").is_file():
        return Dataset.open(folder)
    return prepare(
        data.source, Path("data") / f"{folder.stem}-{Path(data.tokenizer).stem}", tokenizer=data.tokenizer,
        vocab_size=data.vocab_size, val_fraction=data.val_fraction,
    )  # fmt: skip


def validation_text(run: Path) -> np.ndarray | None:
    """The validation tokens of a run, if it tells which text it learned."""
    described = find_model(run) / "run.json"
    if not described.is_file():
        return None
    return np.asarray(dataset_of(RunConfig.from_json(described.read_text())).val).astype(np.int64)


class progress_bar:
    """A tqdm bar that follows the records of a run; evaluations stay on the screen as lines."""

    def __init__(self, steps: int, name: str, *, shown: bool = True) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=steps, desc=name, unit="step", mininterval=0.5, disable=not shown)

    def __enter__(self) -> Callable[[dict[str, Any]], None]:
        return self.show

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, record: dict[str, Any]) -> None:
        doing = record.get("doing", "")  # of several models, which one
        self.bar.n = record.get("done", record["step"])
        if doing:
            self.bar.set_description_str(doing, refresh=False)
        if "train/loss" in record:
            speed = record["train/tokens_per_second"]
            self.bar.set_postfix_str(f"loss {record['train/loss']:.3f}, {speed:,.0f} tokens/s", refresh=False)
        if record.get("val/ppl") is not None:
            line = f"{doing:14s} step {record['step']:6d}  validation perplexity {record['val/ppl']:.4f}"
            self.bar.write(line.lstrip(), file=sys.stderr)  # stdout is for the result
        self.bar.refresh()
