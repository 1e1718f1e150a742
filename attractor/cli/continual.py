"""attractor adapt|monitor"""

import dataclasses
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import tyro

from attractor import distributed, health
from attractor.checkpoint import find_model
from attractor.cli.common import INTERRUPTED, known_tokens, validation_text
from attractor.config import RunConfig, check_size
from attractor.continual.config import AlsoName, AttentionName, GuardConfig, LearnConfig
from attractor.continual.guard import BASE
from attractor.continual.guarded import GuardedLearner
from attractor.continual.learner import OnlineLearner
from attractor.continual.stream import adapt
from attractor.model import GPT
from attractor.results import write_result
from attractor.tokenizer import Tokenizer
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
    guard: bool = False
    """Learn every text in an overlay of its own and mix it with the untouched base: bounded forgetting."""
    unlabelled: bool = False
    """With --guard, do not tell where a text is from: overlays open, and are found again, by themselves."""
    prior: float = GuardConfig.prior
    """With --guard, the weight of the base: a window costs at most log(1 / prior) nats more than the base."""
    attention: AttentionName = GuardConfig.attention
    """With --guard, what an overlay may change in attention: nothing, low-rank deltas, or whole matrices."""
    attention_rank: int = GuardConfig.attention_rank
    """Rank of those deltas."""
    also: tuple[AlsoName, ...] = ()
    """With --guard, what else an overlay may change; tokens the base never saw need "embedding"."""
    switch_rate: float = GuardConfig.switch_rate
    """With --guard, for texts that change in between; instead of pausing paths that hardly count."""
    max_overlays: int | None = None
    """With --guard, how many there may be (default: 8, or as many as the learner has been given)."""
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
        learner = self._learner(out)
        if learner.tokenizer is None:
            raise ValueError(f"{self.run_folder} holds no tokenizer.json: its tokens are not known")
        names = self._names(learner)
        texts = {
            name: known_tokens(source, learner.tokenizer, self.max_tokens)
            for name, source in zip(names, self.data, strict=True)
        }
        canary = self._canary(learner.tokenizer)
        if self.unlabelled:
            if not isinstance(learner, GuardedLearner) or canary is None:
                raise ValueError("--unlabelled needs --guard, and a canary to know what the base is used to")
            learner.calibrate(canary)
        with stop_on_signal() as stopped, _bar(sum(map(len, texts.values()))) as report:
            summary = adapt(
                learner,
                texts,
                out,
                canary=canary,
                every=self.every,
                stop=stopped,
                report=report,
                labelled=not self.unlabelled,
            )
        write_result(
            out / "summary.json",
            {"experiment": "adapt", "config": learner.config.to_dict(), "seed": None, **summary},
        )
        print(_told(summary))
        print(f"written to {out}" + ("; --resume goes on" if summary["interrupted"] else ""))
        return INTERRUPTED if summary["interrupted"] else 0

    def _names(self, learner: OnlineLearner | GuardedLearner) -> tuple[str, ...]:
        """What the texts are called: overlays after their files, without folders and endings."""
        if not isinstance(learner, GuardedLearner):
            return self.data
        plain = (re.sub(r"[^A-Za-z0-9._-]+", "-", Path(source).stem) for source in self.data)
        stems = (name.strip("._-")[:60] for name in plain)
        names = tuple("base-text" if stem == BASE else stem for stem in stems)
        if not all(names) or len(set(names)) < len(names):
            raise ValueError(f"overlays would be called {', '.join(names)}: each needs a name of its own")
        if not self.unlabelled and len({*names, *learner.sources}) > learner.config.max_overlays:
            raise ValueError(
                f"{len(names)} texts need more than {learner.config.max_overlays} overlays; "
                "--max-overlays allows more"
            )
        return names

    def _learner(self, out: Path) -> OnlineLearner | GuardedLearner:
        """A new one, or the one that was stopped."""
        device = distributed.parse_device(self.device)
        pause = 0.0 if self.switch_rate else GuardConfig.pause
        mix = GuardConfig(
            learn=self.learn, prior=self.prior, attention=self.attention, attention_rank=self.attention_rank,
            also=self.also, switch_rate=self.switch_rate, pause=pause,
        )  # fmt: skip
        given = self.unlabelled or self.max_overlays is not None or mix != GuardConfig(learn=self.learn)
        if not self.guard and given:
            raise ValueError("settings of the guard were given without --guard")
        found = find_model(out / "learner" if self.resume else self.run_folder)
        if not self.resume and (out / "learner").exists():
            raise ValueError(f"{out} holds an adaptation already; --resume goes on, --out starts another")
        was_guarded, was_plain = ((found / name).is_file() for name in ("guard.json", "learner.json"))
        if self.resume and was_guarded != self.guard:
            how = "with" if was_guarded else "without"
            raise ValueError(f"{out} was adapted {how} --guard; go on like that")
        if was_guarded and not self.guard:
            raise ValueError(f"{found} holds overlays over a base; --guard learns on with them")
        has_settings = was_guarded or (was_plain and not self.guard)
        if has_settings and mix != GuardConfig():
            raise ValueError(f"{found} is a learner with settings of its own; leave yours out")
        learner: OnlineLearner | GuardedLearner
        if self.guard:
            learner = GuardedLearner.load(found, None if has_settings else mix, device=device)
            if self.max_overlays is not None:
                learner.config = dataclasses.replace(learner.config, max_overlays=self.max_overlays)
        else:
            learner = OnlineLearner.load(found, None if has_settings else self.learn, device=device)
        learner.notes = learner.notes if self.resume else {}
        return learner

    def _canary(self, tokenizer: Tokenizer) -> np.ndarray | None:
        if self.canary is not None:
            return known_tokens(self.canary, tokenizer)[: self.canary_tokens]
        found = validation_text(self.run_folder)
        if found is None:
            print("no canary: the run does not tell its text; --canary names one", file=sys.stderr)
            return None
        return found[: self.canary_tokens]


@dataclass(kw_only=True)
class OverlayList:
    """Name the overlays: their versions, sizes and patches."""

    def act(self, learner: GuardedLearner) -> bool:
        for name, told in learner.overlays().items():
            patches = sum(told["patches"].values())
            print(f"{name:20s} version {told['version']} (kept: {told['kept']}), {told['bytes']:,} bytes, "
                  f"{patches} patches")  # fmt: skip
        if not learner.sources:
            print("no overlays: this is the base")
        return False


@dataclass(kw_only=True)
class OverlayDrop:
    """Forget an overlay and everything its source taught."""

    name: tyro.conf.Positional[str]

    def act(self, learner: GuardedLearner) -> bool:
        print(learner.forget(self.name))
        return True


@dataclass(kw_only=True)
class OverlayRollback:
    """Go back to an earlier version of an overlay."""

    name: tyro.conf.Positional[str]
    version: int
    """One of those that `list` shows as kept."""

    def act(self, learner: GuardedLearner) -> bool:
        learner.rollback(self.name, self.version)
        print(f"{self.name} is at version {self.version}")
        return True


@dataclass(kw_only=True)
class OverlayExport:
    """Write an overlay to a folder of its own: overlay.json and overlay.safetensors."""

    name: tyro.conf.Positional[str]
    folder: tyro.conf.Positional[Path]

    def act(self, learner: GuardedLearner) -> bool:
        if self.folder.exists():
            raise ValueError(f"{self.folder} exists; choose a new folder")
        learner.export(self.name, self.folder)
        print(f"written to {self.folder}")
        return False


@dataclass(kw_only=True)
class OverlayImport:
    """Take over an exported overlay; it must have been made over the same base."""

    folder: tyro.conf.Positional[Path]
    name: tyro.conf.Positional[str]

    def act(self, learner: GuardedLearner) -> bool:
        learner.import_overlay(self.folder, self.name)
        print(f"{self.name} is an overlay now")
        return True


@dataclass(kw_only=True)
class OverlayConsolidate:
    """Make an overlay the base, if no canary suffers; shows the figures, and does it with --confirm."""

    name: tyro.conf.Positional[str]
    canary: tuple[str, ...]
    """What must not suffer: names of `attractor data list` or files."""
    tolerance: float = 0.003
    """How much worse a canary may be predicted, as a share of its perplexity."""
    confirm: bool = False
    """Without it nothing is changed; with it there is no way back."""

    def act(self, learner: GuardedLearner) -> bool:
        if learner.tokenizer is None:
            raise ValueError("there is no tokenizer.json: the canaries cannot be read")
        canaries = {source: known_tokens(source, learner.tokenizer) for source in self.canary}
        pending = learner.consolidate(self.name, canaries, self.tolerance)
        for source, (before, after) in pending.figures.items():
            print(f"{source}: perplexity {before:.3f} -> {after:.3f} without a guard")
        if not self.confirm:
            pending.revert()
            print("nothing was changed; --confirm makes it the base")
            return False
        pending.confirm()
        print(f"{self.name} is part of the base now")
        return True


@dataclass(kw_only=True)
class Overlays:
    """Look after what a guarded model has learned beside its base."""

    run_folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(name="run")]
    """What `attractor adapt --guard` wrote."""
    action: Annotated[
        Annotated[OverlayList, tyro.conf.subcommand("list")]
        | Annotated[OverlayDrop, tyro.conf.subcommand("drop")]
        | Annotated[OverlayRollback, tyro.conf.subcommand("rollback")]
        | Annotated[OverlayExport, tyro.conf.subcommand("export")]
        | Annotated[OverlayImport, tyro.conf.subcommand("import")]
        | Annotated[OverlayConsolidate, tyro.conf.subcommand("consolidate")],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> None:
        folder = find_model(self.run_folder)
        if not (folder / "guard.json").is_file():
            raise ValueError(f"{self.run_folder} has no overlays: `attractor adapt --guard` makes them")
        learner = GuardedLearner.load(folder)
        if self.action.act(learner):
            learner.save(folder)


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
            texts[f"{config.data.source} (validation)"] = cast(np.ndarray, validation_text(self.run_folder))
        for name in self.data:
            texts[name] = known_tokens(name, load_tokenizer(folder / "tokenizer.json"))
        if not texts:
            raise ValueError(f"{folder} does not tell its text; name one with --data")
        values = health.measure(model, {name: text[: self.max_tokens] for name, text in texts.items()})
        print(health.table(values))
        if (folder / "guard.json").is_file():
            print(f"{self.run_folder} has overlays; this is about the base alone", file=sys.stderr)
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
