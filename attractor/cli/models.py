"""attractor sample|info"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from attractor.cli.common import AnyModel, Device, otherwise
from attractor.config import RunConfig

if TYPE_CHECKING:
    from attractor.front import Model


@dataclass(kw_only=True)
class Sample:
    """Write text with a model: a run, a learner, a retrofit, lessons, or a model of Hugging Face."""

    model: AnyModel
    prompt: Annotated[str, tyro.conf.arg(help_behavior_hint="(default: a line break)")] = "\n"
    """The beginning of the text."""
    max_tokens: int = 300
    """The most tokens that are written."""
    temperature: float = 0.8
    """0 always takes the likeliest token."""
    top_k: Annotated[int | None, otherwise("all tokens", "INT")] = None
    """Only so many of the likeliest tokens are drawn from."""
    top_p: Annotated[float | None, otherwise("all tokens", "FLOAT")] = None
    """Only the likeliest tokens that make up this probability are drawn from."""
    seed: Annotated[int | None, otherwise("another one each time", "INT")] = None
    """The same seed writes the same text."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, ..."""

    def run(self) -> None:
        from attractor.front import load

        model = load(self.model, device=self.device)
        pieces = model.stream(
            self.prompt,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
        )
        first = next(pieces, "")  # a wrong option is refused before the prompt is shown
        print(self.prompt, first, sep="", end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()


@dataclass(kw_only=True)
class Info:
    """Describe a model, or what this machine can run."""

    model: Annotated[
        tyro.conf.Positional[str | None],
        tyro.conf.arg(metavar="[MODEL]", help_behavior_hint="(default: this machine)"),
    ] = None
    """A run, a saved model or learner, a retrofit, saved lessons, a Hugging Face model, or smollm2-135m."""
    backends: bool = False
    """Say which backends this machine has, too."""
    device: Device = None

    def run(self) -> None:
        if self.backends or self.model is None:
            print(describe_machine())
        if self.model is not None:
            from attractor.front import load

            print(model_card(self.model, load(self.model, device=self.device)))


def describe_machine() -> str:
    import torch

    from attractor import distributed, ops
    from attractor.version import __version__

    device = distributed.parse_device(None)
    name = (
        torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    )
    lines = [f"attractor {__version__}, torch {torch.__version__}, {name}"]
    for backend in ops.BACKENDS:
        reason = ops.why_not(backend, device, torch.float32)
        if reason is not None:
            reason = "no: " + reason.split(", and the input is on")[0]  # there is no input
        lines.append(f"  {backend:10s} {reason or 'yes'}")
    return "\n".join([*lines, f"  auto is {ops.choose_backend(device, torch.float32)}"])


def model_card(name: str, found: "Model") -> str:
    """What there is to say about a model, a line for each."""
    from attractor import analysis
    from attractor.model import GPT

    lines = [f"model            {found.folder or name}"]
    model: Any = found.model
    if found.guarded is not None:
        model = found.guarded.base
        overlays = ", ".join(found.guarded.sources) or "none"
        lines += [
            f"overlays         {overlays}; what follows is about the base",
            f"bound            {bound_of(found.model)}",
        ]
    if found.source is not None:
        lines.append(f"pretrained       {found.source}, context {model.config.context}")
    elif found.net is not None:
        lines.append(f"retrofit of      {found.net.model.name_or_path}, context {model.config.context}")
    if isinstance(model, GPT):
        lines.append(f"parameters       {model.num_parameters():,} without positions")
    else:
        lines.append(f"parameters       {model.num_parameters():,}")
    layers = model.apn_layers()
    if layers and found.school is None:
        idle = sum(c["total"] - c["active"] for c in map(analysis.parameter_counts, layers.values()))
        lines += [
            f"  one token uses {model.num_parameters() - idle:,}",
            f"APN layers       {len(layers)} x {next(iter(layers.values()))}",
        ]
    if found.school is not None:
        lessons = found.lessons()
        size = sum(lesson.bytes for lesson in lessons)
        lines.append(
            f"lessons          {len(lessons)}, with {sum(lesson.patches for lesson in lessons)} patches, "
            f"{size:,} bytes"
        )
    if isinstance(model, GPT):
        lines.append(f"multiply-adds    {analysis.model_multiply_adds(model):,} per token, forward")
    return "\n".join(lines + ([] if found.folder is None else run_lines(found.folder)))


def bound_of(guard: Any) -> str:
    """What the guard promises for one window of this model: in nats, and as a share of perplexity."""
    window = guard.config.context
    nats = guard.bound(window)
    share = math.expm1(nats / window)
    return (
        f"text of the base costs at most {nats:.3f} nats more in {window} tokens: its perplexity rises by at "
        f"most {100 * share:.2f} %"
    )


def run_lines(folder: Path) -> list[str]:
    """What a run says about its text and its best evaluation."""
    from attractor.files import read_jsonl

    lines = []
    if (folder / "run.json").is_file():
        data = RunConfig.from_json((folder / "run.json").read_text()).data
        lines.append(f"data             {data.source}, {data.tokenizer} tokens")
    records = read_jsonl(folder.parent.parent / "metrics.jsonl", "step")
    if evaluations := [(r["val/loss"], r["step"]) for r in records if r.get("val/loss") is not None]:
        loss, step = min(evaluations)
        lines.append(f"best validation  {math.exp(loss):.4f} perplexity at step {step}")
    return lines
