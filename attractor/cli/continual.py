"""attractor adapt|overlays|monitor"""

import dataclasses
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union

import tyro

from attractor.cli.common import (
    INTERRUPTED,
    Device,
    JSONFile,
    ModelName,
    has_overlays,
    known_tokens,
    otherwise,
    progress_bar,
    run_folder,
    validation_text,
)
from attractor.config import RunConfig, check_size
from attractor.continual.config import AlsoName, AttentionName, GuardConfig, LearnConfig

if TYPE_CHECKING:
    import numpy as np

    from attractor.continual.guarded import GuardedLearner
    from attractor.continual.learner import OnlineLearner
    from attractor.tokenizer import Tokenizer

    Learner = Union[OnlineLearner, GuardedLearner]  # noqa: UP007 (names in quotes elsewhere)

CONTEXT = 512
"""Tokens that a Hugging Face model is given at most while it learns."""
WATCHED = 64
"""The same while routers are watched: 64 windows are read at a time, and the vocabulary is large."""


@dataclass(kw_only=True)
class Adapt:
    """Keep learning: teach a trained model new texts, patch by patch, and watch what it forgets."""

    model: ModelName
    """A run, a saved model, a retrofit, or the folder of an earlier adaptation."""
    data: tuple[str, ...]
    """Names of `attractor data list`, files, folders or quoted globs, learned one after the other."""
    out: Annotated[Path | None, otherwise("MODEL-adapted", "PATH")] = None
    """Gets learner/, log.jsonl and summary.json; every verb takes this folder as a MODEL."""
    resume: bool = False
    """Go on with an adaptation that was stopped."""
    guard: bool = False
    """Learn every text in an overlay of its own and mix it with the untouched base: bounded forgetting."""
    unlabelled: bool = False
    """With --guard, texts come without names: overlays open, and are found again, by what the texts are."""
    prior: float = GuardConfig.prior
    """With --guard, the weight of the base: a window costs at most log(1 / prior) nats more than the base."""
    attention: AttentionName = GuardConfig.attention
    """With --guard, what an overlay may change in attention: nothing, low-rank deltas, or whole matrices."""
    attention_rank: int = GuardConfig.attention_rank
    """The rank of what overlays learn of attention, with --attention low_rank."""
    also: Annotated[tuple[AlsoName, ...], otherwise("nothing", "{embedding,norms}")] = ()
    """With --guard, what else an overlay may change; tokens the base never saw need "embedding"."""
    switch_rate: float = GuardConfig.switch_rate
    """With --guard, for texts that change in between: the share of weights that each token moves back."""
    max_overlays: Annotated[int | None, otherwise("8, or as many as the learner has been given", "INT")] = (
        None
    )
    """With --guard, the most overlays."""
    learn: Annotated[LearnConfig, tyro.conf.arg(name="")] = field(default_factory=LearnConfig)
    canary: Annotated[str | None, otherwise("the run's own validation text", "TEXT")] = None
    """A text that must not be forgotten: a name of `attractor data list` or a file."""
    canary_tokens: int = 16_384
    """The tokens of the canary that are read each time."""
    max_tokens: Annotated[int | None, otherwise("all", "INT")] = None
    """The most tokens that are learned of each text, from its start."""
    context: Annotated[int | None, otherwise(f"{CONTEXT}, or that of its overlays", "INT")] = None
    """The longest sequence of a retrofit, in tokens."""
    every: int = 16_384
    """Tokens from one line of the log to the next."""
    device: Device = None

    def run(self) -> int:
        from attractor.continual.guarded import GuardedLearner
        from attractor.continual.stream import adapt
        from attractor.results import write_result
        from attractor.trainer import stop_on_signal

        run = Path(self.model).resolve()
        out = self.out or run.with_name(run.name + "-adapted")
        for name in ("every", "canary_tokens", *(["max_tokens"] if self.max_tokens is not None else [])):
            check_size(name, getattr(self, name))
        _check_different(self.data)
        learner = self._learner(out)
        assert learner.tokenizer is not None, "loading refuses a model without one"
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
        with (
            stop_on_signal() as stopped,
            _bar(sum(map(len, texts.values())), "adapt", unit="token", unit_scale=True) as report,
        ):
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
        print(_in_words(summary))
        if isinstance(learner, GuardedLearner):
            from attractor.cli.models import bound_of

            print(bound_of(learner.guard))
        print(f"written to {out}" + ("; --resume goes on" if summary["interrupted"] else ""))
        return INTERRUPTED if summary["interrupted"] else 0

    def _names(self, learner: "Learner") -> tuple[str, ...]:
        """What the texts are called: overlays after their files, without folders and endings."""
        from attractor.continual.guard import BASE
        from attractor.continual.guarded import GuardedLearner

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

    def _learner(self, out: Path) -> "Learner":
        """A new one, or the one that was stopped."""
        pause = 0.0 if self.switch_rate else GuardConfig.pause
        mix = GuardConfig(
            learn=self.learn,
            prior=self.prior,
            attention=self.attention,
            attention_rank=self.attention_rank,
            also=self.also,
            switch_rate=self.switch_rate,
            pause=pause,
        )
        given = self.unlabelled or self.max_overlays is not None or mix != GuardConfig(learn=self.learn)
        if not self.guard and given:
            raise ValueError("settings of the guard were given without --guard")
        if not self.resume and (out / "learner").exists():
            raise ValueError(f"{out} holds an adaptation already; --resume goes on, --out starts another")
        if self.resume and not (out / "learner").exists():
            raise ValueError(f"{out} holds no adaptation to go on with: leave --resume out")
        from attractor.continual.guarded import GuardedLearner
        from attractor.continual.learner import OnlineLearner
        from attractor.front import adapter_folder, load

        place = out / "learner" if self.resume else Path(self.model)
        is_retrofit = adapter_folder(place) is not None
        if self.context is not None and not is_retrofit and place.exists():  # otherwise `load` says so
            raise ValueError(f"--context is for retrofits: that of {place} is its own")
        context = self.context or CONTEXT if is_retrofit and not has_overlays(place) else self.context
        model = load(place if self.resume else self.model, device=self.device, context=context)
        if model.folder is None:
            raise ValueError(
                f"{self.model} has no APN layers that could learn a text: `attractor retrofit {self.model} "
                "--data TEXT` gives it some, and `attractor teach` teaches it facts"
            )
        was_guarded, was_plain = model.guarded is not None, (model.folder / "learner.json").is_file()
        if self.resume and was_guarded != self.guard:
            how = "with" if was_guarded else "without"
            raise ValueError(f"{out} was adapted {how} --guard; go on like that")
        if was_guarded and not self.guard:
            raise ValueError(f"{model.folder} holds overlays over a base; --guard learns on with them")
        has_settings = was_guarded or (was_plain and not self.guard)
        if has_settings and mix != GuardConfig():
            raise ValueError(f"{model.folder} is a learner with settings of its own; leave yours out")
        learner: Learner
        if model.guarded is not None:
            learner = model.guarded
        elif self.guard:
            learner = GuardedLearner(model.model, model.tokenizer, mix)
        elif was_plain:
            learner = OnlineLearner.load(model.folder, model=model.model, device=model.device)
            learner.tokenizer = model.tokenizer
        else:
            learner = OnlineLearner(model.model, model.tokenizer, self.learn)
        if isinstance(learner, GuardedLearner) and self.max_overlays is not None:
            learner.config = dataclasses.replace(learner.config, max_overlays=self.max_overlays)
        learner.notes = learner.notes if self.resume else {}
        return learner

    def _canary(self, tokenizer: "Tokenizer") -> "np.ndarray | None":
        if self.canary is not None:
            return known_tokens(self.canary, tokenizer)[: self.canary_tokens]
        found = validation_text(run_folder(self.model))
        if found is None:
            print(
                "no canary is watched: the model does not say which text it learned; --canary names one",
                file=sys.stderr,
            )
            return None
        return found[: self.canary_tokens]


@dataclass(kw_only=True)
class OverlayList:
    """Name the overlays: their versions, sizes and patches."""

    def act(self, learner: "GuardedLearner") -> bool:
        for name, overlay in learner.overlays().items():
            version = f"version {overlay['version']} (kept: {overlay['kept']})"
            patches = sum(overlay["patches"].values())
            print(f"{name:20s} {version}, {overlay['bytes']:,} bytes, {patches} patches")
        if not learner.sources:
            print("no overlays: this is the base")
        return False


@dataclass(kw_only=True)
class OverlayDrop:
    """Forget an overlay and everything its source taught."""

    name: tyro.conf.Positional[str]
    """The name of the overlay, as `list` shows it."""

    def act(self, learner: "GuardedLearner") -> bool:
        print(learner.forget(self.name))
        return True


@dataclass(kw_only=True)
class OverlayRollback:
    """Go back to an earlier version of an overlay."""

    name: tyro.conf.Positional[str]
    """The name of the overlay, as `list` shows it."""
    version: int
    """One of those that `list` shows as kept."""

    def act(self, learner: "GuardedLearner") -> bool:
        learner.rollback(self.name, self.version)
        print(f"{self.name} is at version {self.version}")
        return True


@dataclass(kw_only=True)
class OverlayExport:
    """Write an overlay to a folder of its own: overlay.json and overlay.safetensors."""

    name: tyro.conf.Positional[str]
    """The name of the overlay, as `list` shows it."""
    folder: tyro.conf.Positional[Path]
    """The new folder."""

    def act(self, learner: "GuardedLearner") -> bool:
        if self.folder.exists():
            raise ValueError(f"{self.folder} exists; choose a new folder")
        learner.export(self.name, self.folder)
        print(f"written to {self.folder}")
        return False


@dataclass(kw_only=True)
class OverlayImport:
    """Take over an exported overlay; it must have been made over the same base."""

    folder: tyro.conf.Positional[Path]
    """What `export` wrote."""
    name: tyro.conf.Positional[str]
    """What the overlay is called here."""

    def act(self, learner: "GuardedLearner") -> bool:
        learner.import_overlay(self.folder, self.name)
        print(f"{self.name} is an overlay now")
        return True


@dataclass(kw_only=True)
class OverlayConsolidate:
    """Make an overlay the base, if no canary suffers; shows the figures, and does it with --confirm."""

    name: tyro.conf.Positional[str]
    """The name of the overlay, as `list` shows it."""
    canary: tuple[str, ...]
    """What must not suffer: names of `attractor data list` or files."""
    tolerance: float = 0.003
    """How much worse a canary may be predicted, as a share of its perplexity."""
    confirm: bool = False
    """Without it nothing is changed; with it there is no way back."""

    def act(self, learner: "GuardedLearner") -> bool:
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

    model: ModelName
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
        from attractor.front import load

        found = load(self.model, device="cpu")
        if found.guarded is None or found.folder is None:
            raise ValueError(f"{self.model} has no overlays: `attractor adapt --guard` makes them")
        if self.action.act(found.guarded):
            found.guarded.save(found.folder)


@dataclass(kw_only=True)
class Monitor:
    """Show what the routers do with a text, and how much of their patches two texts share."""

    model: ModelName
    """A run, a saved model or learner, or a retrofit: anything with APN layers."""
    data: Annotated[tuple[str, ...], otherwise("the run's own", "TEXT")] = ()
    """One text, or two to compare: names of `attractor data list`, files, folders or quoted globs."""
    max_tokens: int = 65_536
    """The most tokens that are read of each text."""
    plot: Annotated[Path | None, otherwise("MODEL/monitor.png", "PATH")] = None
    """The file that the picture is written to."""
    json: JSONFile = None
    device: Device = None

    def run(self) -> None:
        check_size("max_tokens", self.max_tokens)
        if len(self.data) > 2:
            raise ValueError(f"{len(self.data)} texts: one to look at, or two to compare")
        if self.data:
            _check_different(self.data)
        from attractor import health
        from attractor.front import load
        from attractor.results import write_result

        place = Path(self.model)
        found = load(self.model, device=self.device)
        model: Any = found.model if found.guarded is None else found.guarded.base
        if found.net is not None:
            from attractor.hf import CausalLM

            model = CausalLM(found.net, context=min(WATCHED, model.config.context))
        if not model.apn_layers():
            raise ValueError(f"{self.model} has no APN layers: there is no routing to look at")
        texts: dict[str, np.ndarray] = {}
        own = validation_text(found.folder) if len(self.data) < 2 else None
        if found.folder is not None and own is not None:
            config = RunConfig.from_json((found.folder / "run.json").read_text())
            texts[f"{config.data.source} (validation)"] = own
        for name in self.data:
            texts[name] = known_tokens(name, found.tokenizer)
        if not texts:
            raise ValueError(f"{self.model} does not say which text it learned: name one with --data")
        texts = {name: text[: self.max_tokens] for name, text in texts.items()}
        values = health.measure(model, texts)
        print(health.table(values))
        if found.guarded is not None:
            print(f"{self.model} has overlays; this is about the base alone", file=sys.stderr)
        picture = self.plot or (place.resolve() if place.is_dir() else Path()) / "monitor.png"
        health.plot(values, picture)
        print(f"picture: {picture}")
        if self.json is not None:
            settings = {"run": self.model, "max_tokens": self.max_tokens}
            write_result(self.json, {"experiment": "monitor", "config": settings, "seed": None, **values})


def _check_different(names: tuple[str, ...]) -> None:
    if not names or len(set(names)) < len(names):
        raise ValueError(f"--data {' '.join(names)}: give one text or more, each once")


def _in_words(summary: dict[str, Any]) -> str:
    import numpy as np

    lines = []
    if summary["canary_before"] is not None:
        before, after = summary["canary_before"], summary["canary_after"]
        lines.append(f"canary perplexity {before:.3f} -> {after:.3f} ({100 * (after / before - 1):+.1f} %)")
    for name, losses in summary["losses"].items():
        first, last = (float(np.exp(losses[part])) for part in ("first", "last"))
        lines.append(f"{name}: perplexity before learning, first piece {first:.3f}, last piece {last:.3f}")
    held = {key.removeprefix("held_back/"): n for key, n in summary.items() if key.startswith("held_back/")}
    lines.append(
        f"in its life the learner was taught {summary['taught']:,} of {summary['tokens']:,} tokens; "
        f"updates: {summary['updates']:,}; held back: {held or 'none'}; "
        f"patches allocated: {summary['allocations']}"
    )
    return "\n".join(lines)


class _bar(progress_bar):
    """Tokens done, the loss before learning, the canary, and what the gates hold back."""

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
                f"{100 * event['selected_by']:.1f} % of tokens",
                file=sys.stderr,
            )
        self.bar.refresh()
