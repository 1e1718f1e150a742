"""attractor adapt|monitor"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from attractor import distributed
from attractor.checkpoint import find_model
from attractor.cli.common import INTERRUPTED, dataset_of
from attractor.config import RunConfig, check_size
from attractor.continual.config import LearnConfig
from attractor.continual.learner import OnlineLearner
from attractor.continual.stream import adapt
from attractor.data import read_text
from attractor.experiments import health
from attractor.experiments.result import write_result
from attractor.model import GPT
from attractor.tokenizer import Tokenizer, describe
from attractor.tokenizer import load as load_tokenizer
from attractor.trainer import stop_on_signal


@dataclass(kw_only=True)
class Adapt:
    """Keep learning: teach a trained model new texts, patch by patch, and watch what it forgets."""

    run_folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(name="run")]
    """A run, a saved model, or the folder of an earlier adaptation."""
    data: tuple[str, ...]
    """Names of `attractor data list` or files, learned one after the other."""
    out: Path | None = None
    """Gets learner/, log.jsonl and summary.json (default: RUN-adapted)."""
    resume: bool = False
    """Go on with an adaptation that was stopped."""
    learn: Annotated[LearnConfig, tyro.conf.arg(name="")] = field(default_factory=LearnConfig)
    canary: str | None = None
    """What must not be forgotten: a name or a file (default: the run's own validation text)."""
    canary_tokens: int = 16_384
    """How much of it is read each time."""
    max_tokens: int | None = None
    """Of each text, from its start."""
    every: int = 16_384
    """Tokens from one line of the log to the next."""
    device: str | None = None
    """cpu, cuda, cuda:1, ... (default: the GPU if there is one)."""

    def run(self) -> int:
        run = self.run_folder.resolve()
        out = self.out or run.with_name(run.name + "-adapted")
        for name in ("every", "canary_tokens", *(["max_tokens"] if self.max_tokens is not None else [])):
            check_size(name, getattr(self, name))
        _check_different(self.data)
        if self.resume:
            learner = OnlineLearner.load(out / "learner", device=distributed.parse_device(self.device))
            if self.learn not in (LearnConfig(), learner.config):
                raise ValueError(f"{out} learns with settings of its own; leave yours out to go on")
        elif (out / "learner").exists():
            raise ValueError(f"{out} holds an adaptation already; --resume goes on, --out starts another")
        else:
            found = find_model(self.run_folder)
            if (found / "learner.json").is_file() and self.learn != LearnConfig():
                raise ValueError(f"{found} is a learner with settings of its own; leave yours out")
            config = None if (found / "learner.json").is_file() else self.learn
            learner = OnlineLearner.load(found, config, device=distributed.parse_device(self.device))
            learner.notes = {}
        if learner.tokenizer is None:
            raise ValueError(f"{self.run_folder} holds no tokenizer.json: its tokens are not known")
        texts = {name: _tokens(name, learner.tokenizer, self.max_tokens) for name in self.data}
        canary = self._canary(learner.tokenizer)
        with stop_on_signal() as stopped, _bar(sum(map(len, texts.values()))) as report:
            summary = adapt(learner, texts, out, canary=canary, every=self.every, stop=stopped, report=report)
        write_result(
            out / "summary.json",
            {"experiment": "adapt", "config": learner.config.to_dict(), "seed": None, **summary},
        )
        print(_told(summary))
        print(f"written to {out}" + ("; --resume goes on" if summary["interrupted"] else ""))
        return INTERRUPTED if summary["interrupted"] else 0

    def _canary(self, tokenizer: Tokenizer) -> np.ndarray | None:
        if self.canary is not None:
            return _tokens(self.canary, tokenizer)[: self.canary_tokens]
        described = find_model(self.run_folder) / "run.json"
        if not described.is_file():
            print("no canary: the run does not tell its text; --canary names one", file=sys.stderr)
            return None
        dataset = dataset_of(RunConfig.from_json(described.read_text()))
        return np.asarray(dataset.val[: self.canary_tokens]).astype(np.int64)


@dataclass(kw_only=True)
class Monitor:
    """Show what the routers do with a text, and how much of their patches two texts share."""

    run_folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(name="run")]
    """A run, a checkpoint or a saved model."""
    data: tuple[str, ...] = ()
    """One text, or two to compare: names of `attractor data list` or files (default: the run's own)."""
    max_tokens: int = 65_536
    """Of each text."""
    plot: Path | None = None
    """Where the picture goes (default: RUN/monitor.png)."""
    json: Path | None = None
    """Where the numbers go (default: nowhere)."""
    device: str | None = None

    def run(self) -> None:
        check_size("max_tokens", self.max_tokens)
        if len(self.data) > 2:
            raise ValueError(f"{len(self.data)} texts: one to look at, or two to compare")
        if self.data:
            _check_different(self.data)
        folder = find_model(self.run_folder)
        model = GPT.from_pretrained(folder, device=distributed.parse_device(self.device))
        texts: dict[str, np.ndarray] = {}
        if len(self.data) < 2 and (folder / "run.json").is_file():
            config = RunConfig.from_json((folder / "run.json").read_text())
            texts[f"{config.data.source} (validation)"] = np.asarray(dataset_of(config).val)
        for name in self.data:
            texts[name] = _tokens(name, load_tokenizer(folder / "tokenizer.json"))
        if not texts:
            raise ValueError(f"{folder} does not tell its text; name one with --data")
        values = health.measure(model, {name: text[: self.max_tokens] for name, text in texts.items()})
        print(health.table(values))
        picture = self.plot or self.run_folder.resolve() / "monitor.png"
        health.plot(values, picture)
        print(f"picture: {picture}")
        if self.json is not None:
            config_values = {"run": str(self.run_folder), "max_tokens": self.max_tokens}
            write_result(
                self.json, {"experiment": "monitor", "config": config_values, "seed": None, **values}
            )


def _check_different(names: tuple[str, ...]) -> None:
    if not names or len(set(names)) < len(names):
        raise ValueError(f"--data {' '.join(names)}: give one text or more, each once")


def _tokens(source: str, tokenizer: Tokenizer, most: int | None = None) -> np.ndarray:
    """The text in a vocabulary that may not know all of its characters; those are left out, and told."""
    tokens, dropped = tokenizer.encode_known(read_text(source))
    if dropped:
        print(f"{source}: left out {describe(dropped)}, which the model does not know", file=sys.stderr)
    if len(tokens) < 2:
        raise ValueError(f"{source!r} holds nothing the model knows")
    return tokens[:most]


def _told(summary: dict[str, Any]) -> str:
    lines = []
    if summary["canary_before"] is not None:
        before, after = summary["canary_before"], summary["canary_after"]
        lines.append(f"canary perplexity {before:.3f} -> {after:.3f} ({100 * (after / before - 1):+.1f} %)")
    for name, losses in summary["losses"].items():
        first, last = (float(np.exp(losses[part])) for part in ("first", "last"))
        lines.append(f"{name}: perplexity before learning, first piece {first:.3f}, last piece {last:.3f}")
    held = {key.removeprefix("held_back/"): n for key, n in summary.items() if key.startswith("held_back/")}
    lines.append(
        f"{summary['taught']:,} of {summary['tokens']:,} tokens taught, in {summary['updates']:,} updates; "
        f"held back: {held or 'none'}; patches allocated: {summary['allocations']}"
    )
    return "\n".join(lines)


class _bar:
    """Tokens done, the loss before learning, the canary, and what the gates hold back."""

    def __init__(self, tokens: int) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=tokens, desc="adapt", unit="token", unit_scale=True, mininterval=0.5)

    def __enter__(self) -> Any:
        return self.show

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, record: dict[str, Any]) -> None:
        self.bar.n = record["tokens"]
        held = sum(record["held_back"].values())
        loss = "-" if record["loss"] is None else f"{record['loss']:.3f}"  # a text's first token has none
        parts = [f"{record['source']} loss {loss}"]
        parts += [] if record["canary"] is None else [f"canary {record['canary']:.3f}"]
        parts += [f"entropy {record['usage_entropy']:.2f}"] + ([f"held back {held:,}"] if held else [])
        self.bar.set_postfix_str(", ".join(parts), refresh=False)
        for event in record["allocations"]:
            self.bar.write(
                f"layer {event['layer']}: {event['mode']} gives patch {event['patch']}, chosen by "
                f"{100 * event['selected_by']:.1f} % of tokens", file=sys.stderr,
            )  # fmt: skip
        self.bar.refresh()
