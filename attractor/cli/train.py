"""attractor train|compare"""

import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from attractor import presets
from attractor.cli.common import INTERRUPTED, Device, JSONFile, dataset_of, otherwise, progress_bar
from attractor.config import DataConfig, GPTConfig, RunConfig, TrainConfig, check_choice, check_size

if TYPE_CHECKING:
    import torch

    from attractor.data import Dataset
    from attractor.distributed import World


@dataclass(kw_only=True)
class Train:
    """Train a model from a preset, on a text of your own: `attractor train tiny_apn --data my.txt`.

    Every number of the preset can be changed.
    """

    model: GPTConfig
    """What the model is: its size, and what stands in the place of its FFNs."""
    train: TrainConfig
    """How the model is trained."""
    data: str
    """The text: a name of `attractor data list`, a file, a folder, a quoted glob, or a prepared dataset."""
    tokenizer: str
    """"char", "byte", "bpe", or the tokenizer.json of another dataset."""
    vocab_size: Annotated[int | None, otherwise("4096 for bpe, else as many as there are", "INT")]
    """Size of a BPE vocabulary."""
    val_fraction: float
    """The share of the text, from its end, that is held out for validation."""
    out: Annotated[Path | None, otherwise("runs/PRESET", "PATH")] = None
    """The run's folder."""
    resume: Literal["never", "auto"] = "never"
    """"auto" goes on from the run's last checkpoint if there is one."""
    device: Device = None
    preset: tyro.conf.Suppress[str] = ""

    @classmethod
    def of(cls, name: str) -> "Train":
        """A preset, ready to be changed."""
        preset = presets.NAMES[name]
        run = preset()
        data = run.data
        made = cls(
            model=run.model,
            train=run.train,
            data=data.source,
            tokenizer=data.tokenizer,
            vocab_size=data.vocab_size,
            val_fraction=data.val_fraction,
            preset=name,
        )
        made.__doc__ = (preset.__doc__ or "").split("\n\n")[0]
        return made

    def run(self) -> int:
        from attractor import distributed

        with distributed.world(self.device) as (world, device):
            return self.run_in(world, device)

    def run_in(self, world: "World", device: "torch.device") -> int:
        from attractor.trainer import Trainer

        out = self.out or Path("runs") / self.preset
        data = DataConfig(
            source=self.data,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            val_fraction=self.val_fraction,
        )
        config = RunConfig(model=self.model, train=self.train, data=data)
        dataset = world.one_per_machine_first(lambda: dataset_of(config))
        check_length(dataset, config)
        model = dataclasses.replace(config.model, vocab_size=dataset.tokenizer.vocab_size)
        config = dataclasses.replace(config, model=model)
        if self.resume == "never" and world.from_leader((out / "checkpoints").exists):
            raise ValueError(
                f"{out} holds a run already; --resume auto goes on with it, --out starts another"
            )
        with progress_bar(config.train.max_steps, self.preset, shown=world.is_leader) as report:
            trainer = Trainer(config, dataset, out, device=device, world=world, report=report)
            if self.resume == "auto" and trainer.resume():
                report({"step": trainer.step})
            summary = trainer.run()
        if world.is_leader:
            print(json.dumps(summary, indent=2))
            if summary["interrupted"]:
                print(f"stopped at step {summary['step']}; --resume auto goes on", file=sys.stderr)
            else:
                print(f"`attractor sample {out}` writes with it", file=sys.stderr)
        return INTERRUPTED if summary["interrupted"] else 0


def check_length(dataset: "Dataset", config: RunConfig) -> None:
    """A text that a model of this context can learn from, or a ValueError before any work."""
    context = config.model.context
    if len(dataset.train) <= context:
        raise ValueError(
            f"{config.data.source!r} has {len(dataset.train):,} tokens to learn from, and the model reads "
            f"{context} and the next one: give a longer text, or a preset with a smaller context"
        )


TRAIN = {name: Train.of(name) for name in presets.NAMES}


@dataclass(kw_only=True)
class Compare:
    """Train a dense and an APN model of equal parameters on a text, and print them side by side."""

    text: Annotated[
        tyro.conf.Positional[str | None], tyro.conf.arg(metavar="TEXT", help_behavior_hint="")
    ] = None
    """The same as --data."""
    data: Annotated[str | None, otherwise("the text that is named first", "TEXT")] = None
    """The text: a name of `attractor data list`, a file, a folder, a quoted glob, or a prepared dataset."""
    preset: str = "tiny_dense"
    """The dense model; the other one has APN layers in the place of its FFNs."""
    by: Literal["parameters", "time"] = "parameters"
    """Size of the APN layers: as many parameters as the FFN, or a shape that takes no longer on a GPU."""
    steps: int = 300
    """Training steps of each model."""
    tokenizer: str = "char"
    """"char", "byte", "bpe", or the tokenizer.json of another dataset."""
    out: Annotated[Path | None, otherwise("runs/compare-TEXT", "PATH")] = None
    """Gets both runs; a comparison that was stopped goes on from there."""
    json: JSONFile = None
    device: Device = None

    def run(self) -> int:
        source = self.data if self.text is None else self.text
        if source is None or (self.text is not None and self.data is not None):
            raise ValueError("name one text to compare on: `attractor compare my.txt`")
        check_size("steps", self.steps)
        dense_presets = tuple(name for name, make in presets.NAMES.items() if make().model.ffn == "mlp")
        check_choice("preset", self.preset, dense_presets)
        from attractor.measure import compare
        from attractor.results import write_result

        run = presets.NAMES[self.preset]()
        data = dataclasses.replace(run.data, source=source, tokenizer=self.tokenizer)
        dense = dataclasses.replace(run, data=data)
        dataset = dataset_of(dense)
        check_length(dataset, dense)
        out = self.out or Path("runs") / f"compare-{Path(source).stem}"
        with progress_bar(2 * self.steps, "compare") as report:
            result = compare(
                dense, dataset, out, by=self.by, steps=self.steps, device=self.device, report=report
            )
        print(table(result))
        if self.json is not None:
            config = {"data": source, "preset": self.preset, "by": self.by, "steps": self.steps}
            write_result(self.json, {"experiment": "compare", "config": config, "models": result})
        return 0


def table(result: dict[str, dict[str, Any]]) -> str:
    """The models side by side, and what the second is of the first."""
    rows: dict[str, tuple[str, str]] = {
        "parameters": ("parameters", ",.0f"),
        "of them, used by a token": ("active_parameters", ",.0f"),
        "multiply-adds for a token": ("multiply_adds_per_token", ",.0f"),
        "validation loss, nats": ("val_loss", ".4f"),
        "validation perplexity": ("val_ppl", ".3f"),
        "milliseconds per step": ("step_milliseconds", ",.1f"),
        "training, seconds": ("training_seconds", ",.1f"),
    }
    names = list(result)
    lines = [f"{'':27s}" + "".join(f"{name:>14s}" for name in names) + f"{'ratio':>10s}"]
    for title, (key, form) in rows.items():
        values = [result[name][key] for name in names]
        if any(value is None for value in values):
            continue
        cells = "".join(f"{value:>14{form}}" for value in values)
        ratio = values[1] / values[0] if values[0] else math.nan
        lines.append(f"{title:27s}{cells}{ratio:>10.3f}")
    return "\n".join(lines)
