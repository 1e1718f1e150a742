"""attractor train|sample|info"""

import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from attractor import analysis, distributed, ops
from attractor.checkpoint import find_model
from attractor.cli.common import INTERRUPTED, dataset_of, progress_bar
from attractor.config import RunConfig
from attractor.continual.guarded import GuardedLearner
from attractor.files import read_jsonl
from attractor.generate import generate
from attractor.lm import LanguageModel
from attractor.model import GPT
from attractor.tokenizer import load as load_tokenizer
from attractor.trainer import Trainer
from attractor.version import __version__


@dataclass(kw_only=True)
class Train:
    """Train a model from a preset. Every number of the preset can be changed."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    out: Path | None = None
    """The run's folder (default: runs/PRESET)."""
    resume: Literal["never", "auto"] = "never"
    """"auto" goes on from the run's last checkpoint if there is one."""
    device: str | None = None
    """cpu, cuda, cuda:1, ... (default: the GPU if there is one)."""
    preset: tyro.conf.Suppress[str] = ""

    def run(self) -> int:
        with distributed.world(self.device) as (world, device):
            return self.run_in(world, device)

    def run_in(self, world: distributed.World, device: torch.device) -> int:
        out = self.out or Path("runs") / self.preset
        dataset = world.one_per_machine_first(lambda: dataset_of(self.config))
        model = dataclasses.replace(self.config.model, vocab_size=dataset.tokenizer.vocab_size)
        config = dataclasses.replace(self.config, model=model)
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
        return INTERRUPTED if summary["interrupted"] else 0


@dataclass(kw_only=True)
class Sample:
    """Write text with a trained model."""

    run_folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(name="run")]
    """A run, a checkpoint or a saved model; or what `adapt --guard` wrote, with its overlays."""
    prompt: str = "\n"
    max_tokens: int = 300
    temperature: float = 0.8
    """0 always takes the likeliest token."""
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    device: str = "cpu"

    def run(self) -> None:
        folder, device = find_model(self.run_folder), distributed.parse_device(self.device)
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        if (folder / "guard.json").is_file():  # what was learned lies beside the base
            model: LanguageModel = GuardedLearner.load(folder, device=device).guard
        else:
            model = GPT.from_pretrained(folder, device=device)
        tokens = torch.from_numpy(tokenizer.encode(self.prompt))[None].to(device)
        shown, written = tokenizer.decode(tokens[0].tolist()), tokens[0].tolist()
        print(shown, end="", flush=True)
        for token in generate(
            model, tokens, max_tokens=self.max_tokens, temperature=self.temperature, top_k=self.top_k,
            top_p=self.top_p, seed=self.seed,
        ):  # fmt: skip
            written.append(int(token))
            text = tokenizer.decode(written)  # a character may take several tokens: print what became whole
            if not text.endswith("\ufffd"):
                print(text[len(shown) :], end="", flush=True)
                shown = text
        print()


@dataclass(kw_only=True)
class Info:
    """Describe a trained model, or what this machine can run."""

    run_folder: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(name="run")] = None
    """A run, a checkpoint or a saved model."""
    backends: bool = False
    """Tell which backends this machine has."""

    def run(self) -> None:
        if self.backends or self.run_folder is None:
            print(describe_machine())
        if self.run_folder is not None:
            print(model_card(find_model(self.run_folder)))


def describe_machine() -> str:
    device = distributed.parse_device(None)
    name = (
        torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    )
    lines = [f"attractor {__version__}, torch {torch.__version__}, {name}"]
    for backend in ops.BACKENDS:
        reason = ops.why_not(backend, device, torch.float32)
        lines.append(f"  {backend:10s} " + (f"no: {reason}" if reason else "yes"))
    return "\n".join([*lines, f"  auto is {ops.choose_backend(device, torch.float32)}"])


def model_card(folder: Path) -> str:
    model = GPT.from_pretrained(folder)
    layers = model.apn_layers()
    lines = [f"model            {folder}", f"parameters       {model.num_parameters():,} without positions"]
    if layers:
        idle = sum(c["total"] - c["active"] for c in map(analysis.parameter_counts, layers.values()))
        lines += [
            f"  one token uses {model.num_parameters() - idle:,}",
            f"APN layers       {next(iter(layers.values()))}",
        ]
    if (folder / "guard.json").is_file():
        sources = json.loads((folder / "guard.json").read_text())["sources"]
        lines.append(f"overlays         {', '.join(sources) or 'none'}; the rest is about the base")
    lines.append(f"multiply-adds    {analysis.model_multiply_adds(model):,} per token, forward")
    run = folder.parent.parent
    if (folder / "run.json").is_file():
        data = RunConfig.from_json((folder / "run.json").read_text()).data
        lines.append(f"data             {data.source}, {data.tokenizer} tokens")
    records = read_jsonl(run / "metrics.jsonl", "step")
    if evaluations := [(r["val/loss"], r["step"]) for r in records if r.get("val/loss") is not None]:
        loss, step = min(evaluations)
        lines.append(f"best validation  {math.exp(loss):.4f} perplexity at step {step}")
    return "\n".join(lines)
