"""GuardedLearner: learns every source in an overlay of its own, and never costs more than the bound.

    learner = GuardedLearner.load("runs/tiny_apn")
    learner.observe(text, source="kjv")             # the base is not touched
    learner.perplexity(held_out)                    # the mixture of base and overlays, by evidence
    learner.rollback("kjv", version=3); learner.drop("kjv"); learner.export("kjv", folder)

What is saved are the base and the overlays with their versions; moments of the optimizer and the context of a
stream are not, so a loaded learner predicts to the bit and learns on with fresh moments.
"""

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor

from attractor.checkpoint import load_model
from attractor.config import check_config
from attractor.continual import domains
from attractor.continual import guarded_files as files
from attractor.continual.config import GuardConfig
from attractor.continual.consolidate import Consolidation, consolidate
from attractor.continual.gates import Surprise
from attractor.continual.guard import BASE, Guard
from attractor.continual.learner import OnlineLearner
from attractor.continual.observation import Observation, Text, Totals, tokens_of, whole_number
from attractor.continual.overlay import Archive, Branch, Overlay, fingerprint
from attractor.continual.update import NO_PATCHES
from attractor.evaluate import autocast, evaluate, perplexity, token_losses
from attractor.files import check_hashes, write_folder
from attractor.generate import continued
from attractor.lm import LanguageModel, TrainableModel
from attractor.tokenizer import Tokenizer

log = logging.getLogger("attractor")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclasses.dataclass
class Source:
    """What one source taught: a branch, who teaches it, and where it can go back to."""

    branch: Branch
    learner: OnlineLearner
    last_used: int = 0  # when it last learned, in tokens of the learner's life
    version: int = 0
    versions: dict[int, Overlay] = dataclasses.field(default_factory=dict)
    recent: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    usual: tuple[domains.Usual, ...] = ()

    @property
    def model(self) -> TrainableModel:
        return self.branch.model

    @property
    def tokens(self) -> int:
        """How many tokens the source has shown so far."""
        return self.learner.totals.tokens


class GuardedLearner:
    """Learn from every source in an overlay of its own, and predict with the guarded mixture of all.

    `model` is the base, which never changes; `tokenizer` is needed for texts given as strings. `config` says
    how overlays learn and what the guard may cost. `archive` is a folder for overlays that have to make room
    for new ones.

    >>> from attractor import GPT, GPTConfig, GuardedLearner
    >>> base = GPT(GPTConfig(vocab_size=256, context=16, num_layers=1, num_heads=1, dim=16, ffn="apn"))
    >>> learner = GuardedLearner(base)
    >>> text = list(b"Enter CELESTINE, with a letter. ")
    >>> before = learner.perplexity(text)
    >>> seen = learner.observe(text * 80, source="play")
    >>> list(learner.overlays()), seen.updates
    (['play'], 2)
    >>> learner.perplexity(text) < before
    True
    >>> learner.forget("play")
    "removed everything that 2,560 tokens of 'play' taught"
    >>> learner.perplexity(text) == before
    True

    A model without APN layers, and a name that no overlay can have, are a ValueError. An update that would
    not be finite is a NotFiniteUpdate, and changes nothing.
    """

    def __init__(
        self,
        model: TrainableModel,
        tokenizer: Tokenizer | None = None,
        config: GuardConfig | None = None,
        *,
        archive: str | Path | None = None,
        precision: str = "auto",
    ) -> None:
        if not model.apn_layers():
            raise ValueError(NO_PATCHES)
        self.base, self.tokenizer, self.config = model, tokenizer, config or GuardConfig()
        check_config("config", self.config, GuardConfig, ": GuardConfig(learn=...) takes a LearnConfig")
        self.precision = precision
        self.base.requires_grad_(False).eval()
        self.base_hash = fingerprint(model)
        self.sources: dict[str, Source] = {}
        self.totals = Totals()
        self.notes: dict[str, Any] = {}  # the caller may keep its place in the stream here
        self.archive = None if archive is None else Archive(archive)
        self.usual = Surprise()  # what the base is used to, for texts without labels
        self.unclaimed: list[np.ndarray] = []  # pieces in a row that no path explains
        self.consolidated: list[str] = []  # sources whose overlays became part of the base
        self.consolidation: Consolidation | None = None  # that waits to be confirmed or reverted

    @property
    def budget(self) -> int:
        return self.config.learn.budget

    # --- learning

    def observe(self, text: Text, source: str | None = "default") -> Observation:
        """Teach the overlay of this source, which is made on first use. The loss is that of its own path.

        With source=None the text decides, piece by piece: the path that explains a piece learns it (the base
        learns nothing), and when none does for a while, a new overlay is opened for those pieces. What a path
        explains is what it predicts no worse than usual; `calibrate` measures what is usual for the base.
        """
        self._check_no_consolidation()
        tokens = self.tokens_in(text)
        if source is None:
            return domains.observe(self, tokens)
        is_new = source not in self.sources
        held = self._open(source) if is_new else self.sources[source]
        try:
            seen = held.learner.observe(tokens, source=source)
        except Exception as error:
            if is_new:  # nothing of it is kept
                error.observed = Observation()  # type: ignore[attr-defined]
            else:
                self._account(source, held, tokens, getattr(error, "observed", Observation()))
            raise
        if is_new:
            self._make_room()
            self.sources[source] = held  # its copy in the archive stays: ours is not saved yet
        self._account(source, held, tokens, seen)
        return seen

    def _account(self, source: str, held: Source, tokens: np.ndarray, seen: Observation) -> None:
        self.totals = self.totals.after(seen, held.learner.totals.surprise)
        held.last_used = self.totals.tokens
        size = self.config.piece
        learned = tokens[: seen.tokens][-size * domains.REMEMBERED :]
        for piece in np.array_split(learned, max(1, -(-len(learned) // size))):
            held.recent = np.concatenate([held.recent, piece])[-size:]
            self.measure(held)
        if seen.updates:
            self._keep_version(held, source=source)

    def _check_no_consolidation(self) -> None:
        if self.consolidation is not None:
            raise ValueError("a consolidation waits: confirm or revert it first")

    def explained_by(self, text: Text) -> str | None:
        """Return the path that a text belongs to, by `domains.owner`; None if no path explains it."""
        return domains.owner(self, self.tokens_in(text))

    def calibrate(self, text: Text) -> float:
        """Measure what is usual for the base: its losses on a text of its own domain. Returns their mean."""
        self.usual = Surprise().after(self.losses(self.base, self.tokens_in(text)))
        for held in self.sources.values():
            if not held.usual:
                self.measure(held)
        return self.usual.mean

    def measure(self, held: Source) -> None:
        """Measure how well the last piece is predicted now, once the base is calibrated."""
        if self.usual.tokens and len(held.recent) > 1:
            held.usual = domains.after_learning(self, held, held.recent)

    def taken(self) -> set[str]:
        """Return the names of overlays that are here, in the archive, or part of the base."""
        return {*self.sources, *self.consolidated, *(self.archive.names() if self.archive else ())}

    def archived(self) -> Iterator[tuple[str, Source]]:
        """Yield the overlays that are in the archive alone, and can be read."""
        if self.archive is None:
            return
        for name in (name for name in self.archive.names() if name not in self.sources):
            try:
                self.check_name(name)
                held = self._from_folder(self.archive.folder / name)
            except ValueError as error:
                log.warning("overlay %r stays in the archive: %s", name, error)
            else:
                yield name, held

    def losses(self, path: LanguageModel, tokens: np.ndarray) -> Tensor:
        return token_losses(path, tokens, autocast=self._autocast)

    def _autocast(self) -> AbstractContextManager:
        return autocast(self.device, self.precision)

    @property
    def device(self) -> torch.device:
        return self.base.device

    def _open(self, source: str) -> Source:
        """A new source, or one out of the archive; not yet one of ours."""
        self.check_name(source)
        self._check_room()
        if self.archive is not None and self.archive.has(source):
            return self._from_folder(self.archive.folder / source)
        return self.new_source()

    def _from_folder(self, folder: str | Path) -> Source:
        overlay = Overlay.load(folder)
        notes = overlay.notes
        held = self.new_source(overlay, whole_number(notes.get("tokens", 0)))
        held.last_used = self.totals.tokens
        held.usual = domains.usual_in(notes.get("usual", []))
        if version := whole_number(notes.get("version", 0)):  # it goes on to count
            held.version, held.versions = version, {version: held.branch.overlay(**notes)}
        return held

    def _check_room(self) -> None:
        if len(self.sources) >= self.config.max_overlays and self.archive is None:
            raise ValueError(
                f"there are {len(self.sources)} overlays, as many as max_overlays allows: drop one first, or "
                "give an archive"
            )

    def _make_room(self) -> None:
        """The overlay that was not used for longest goes to the archive; earlier versions are lost."""
        if len(self.sources) < self.config.max_overlays:
            return
        assert self.archive is not None, "checked when the overlay was opened"
        oldest = min(self.sources, key=lambda name: self.sources[name].last_used)
        self.export(oldest, self.archive.folder / oldest)
        del self.sources[oldest]
        log.info("overlay %r went to %s to make room", oldest, self.archive.folder)

    def flush(self) -> Observation:
        """Learn from the tokens of every source that wait for the next update."""
        done = Observation()
        for name in self.sources:
            done = done.then(self._flush(name))
        return done

    def _flush(self, name: str) -> Observation:
        held = self.sources[name]
        seen = held.learner.flush()
        if seen.updates:
            self._keep_version(held, source=name)
        self.totals = self.totals.after(seen, self.totals.surprise)
        return seen

    def new_source(self, overlay: Overlay | None = None, tokens: int = 0) -> Source:
        """Make a path that starts as the base, or as this overlay of so many tokens."""
        branch = self._branch(self.base, self.base_hash)
        if overlay is not None:
            branch.apply(overlay)
        return Source(branch, self._teacher(branch, tokens))

    def _branch(self, base: TrainableModel, base_hash: str) -> Branch:
        config = self.config
        return Branch(
            base,
            roles=config.learn.update.train,
            attention=config.attention,
            rank=config.attention_rank,
            also=config.also,
            base_hash=base_hash,
        )

    def _teacher(self, branch: Branch, tokens: int) -> OnlineLearner:
        others = cast(dict[str, Tensor], branch.others)
        learner = OnlineLearner(
            branch.model, self.tokenizer, self.config.learn, others=others, precision=self.precision
        )
        if self.config.learn.allocation.most_patches is None:  # twice the base's, however grown we are
            most = {number: 2 * layer.num_patches for number, layer in self.base.apn_layers().items()}
            learner.allocator.most = most
        learner.totals = Totals(tokens=tokens)
        return learner

    def _keep_version(self, held: Source, **notes: Any) -> None:
        held.version += 1
        tokens = held.tokens - held.learner.gathered.tokens  # those that wait are in no weights yet
        held.versions[held.version] = held.branch.overlay(version=held.version, tokens=tokens, **notes)
        for old in sorted(held.versions)[: -self.config.keep_versions]:
            del held.versions[old]

    # --- predicting

    @property
    def guard(self) -> Guard:
        """Return the base and all overlays as one model."""
        config = self.config
        paths = {BASE: self.base} | {name: held.branch.model for name, held in self.sources.items()}
        guard = Guard(
            paths,
            prior=config.prior,
            window=config.window,
            switch_rate=config.switch_rate,
            pause=config.pause,
        )
        return guard.to(self.device).eval()

    def perplexity(self, text: Text) -> float:
        tokens = self.tokens_in(text)
        return perplexity(evaluate(self.guard, tokens, autocast=self._autocast))

    def generate(self, prompt: str, **options: Any) -> str:
        tokens = self.tokens_in(prompt)
        return continued(self.guard, cast(Tokenizer, self.tokenizer), tokens, **options)

    def posterior(self, text: Text) -> dict[str, float]:
        """Return how much each path counts after the last tokens of a text, as many as the context holds."""
        tokens = torch.from_numpy(self.tokens_in(text)[-self.base.config.context :])[None]
        guard = self.guard
        weights = guard.posterior(tokens.to(self.device))[0, -1]
        return dict(zip(guard.names, weights.tolist(), strict=True))

    def usage_entropy(self) -> float:
        """Return the entropy of the newest overlay's usage, and of an even usage before there is one."""
        if not self.sources:
            counts = [layer.num_patches for layer in self.base.apn_layers().values()]
            return sum(math.log(count) for count in counts) / len(counts)
        return list(self.sources.values())[-1].learner.usage_entropy()

    def monitor(self) -> dict[str, float]:
        """Return numbers for a log: counters, and the size of every overlay."""
        values = self.totals.counters()
        for name, described in self.overlays().items():
            values |= {
                f"overlay/{name}/bytes": described["bytes"],
                f"overlay/{name}/version": described["version"],
            }
        return values

    # --- overlays

    def overlays(self) -> dict[str, dict[str, Any]]:
        """Describe the overlays by name: version, versions kept, bytes, patches by layer, tokens seen."""
        described = {}
        for name, held in self.sources.items():
            overlay = held.versions[held.version] if held.versions else held.branch.overlay()
            described[name] = {
                "version": held.version,
                "kept": sorted(held.versions),
                "bytes": overlay.nbytes,
                "patches": {layer: len(numbers) for layer, numbers in overlay.patches().items()},
                "tokens": held.tokens,
            }
        return described

    def drop(self, name: str) -> None:
        """Forget an overlay altogether. Without any overlay the predictions are the base's, to the bit."""
        self._check_no_consolidation()
        del self.sources[self._known(name)]
        if self.archive is not None:  # an earlier state of it, should it have been there
            self.archive.remove(name)

    def rollback(self, name: str, version: int) -> None:
        """Go back to an earlier version of an overlay, to the bit; later ones and moments are gone."""
        self._check_no_consolidation()
        held = self.sources[self._known(name)]
        if version not in held.versions:
            raise ValueError(f"version {version} of {name!r} is not kept; there are {sorted(held.versions)}")
        tokens = whole_number(held.versions[version].notes.get("tokens"))
        held.branch.apply(held.versions[version])
        held.learner = self._teacher(held.branch, tokens)
        held.version, held.usual = version, ()
        self.measure(held)
        held.versions = {number: kept for number, kept in held.versions.items() if number <= version}

    def consolidate(self, name: str, canaries: Mapping[str, Text], tolerance: float = 0.003) -> Consolidation:
        """Make the path of an overlay the base, if no canary suffers; to be confirmed or reverted."""
        return consolidate(self, name, canaries, tolerance)

    def forget(self, source: str) -> str:
        """Remove what a source taught; says what was removed. Exact, because nothing else wrote there."""
        self._check_no_consolidation()
        if source in self.consolidated:
            raise ValueError(f"what {source!r} taught is part of the base since it was consolidated")
        if source in self.sources:
            tokens = self.sources[source].tokens
            self.drop(source)
        elif self.archive is not None and self.archive.has(source):
            tokens = self._from_folder(self.archive.folder / source).tokens
            self.archive.remove(source)
        else:
            raise ValueError(f"nothing is kept apart for {source!r}; overlays: {sorted(self.sources)}")
        return f"removed everything that {tokens:,} tokens of {source!r} taught"

    def export(self, name: str, folder: str | Path) -> None:
        """Write an overlay to a folder of its own, with what still waited for an update."""
        self._flush(self._known(name))
        held = self.sources[name]
        notes = {
            "source": name,
            "version": held.version,
            "tokens": held.tokens,
            "usual": list(held.usual),
            "config": self.config.to_dict(),
        }
        held.branch.overlay(**notes).save(folder)

    def import_overlay(self, folder: str | Path, name: str) -> None:
        """Take over an exported overlay; it must have been made over this base."""
        self.check_name(name)
        if name in self.sources:
            raise ValueError(f"there is an overlay {name!r} already; drop it first, or choose another name")
        self._check_no_consolidation()
        self._check_room()
        held = self._from_folder(folder)
        self._make_room()
        held.version, held.versions = 0, {}  # a count of its own
        self._keep_version(held, source=name, imported=True)
        self.sources[name] = held

    def _known(self, name: str) -> str:
        if name not in self.sources:
            raise ValueError(f"there is no overlay {name!r}; there are {sorted(self.sources)}")
        return name

    def check_name(self, name: str) -> None:
        if not NAME.fullmatch(name) or name == BASE:
            raise ValueError(
                f"{name!r} cannot name an overlay: up to 64 letters, digits, '.', '_' or '-', not {BASE!r}"
            )

    # --- files

    def save(self, folder: str | Path) -> None:
        """Write the base, and for every overlay its versions; loading gives the same predictions to the bit.

        What came back from the archive is no longer there afterwards.
        """
        if self.consolidation is not None:
            raise ValueError("a consolidation waits: confirm or revert it before saving")
        if self.archive is not None and self.archive.folder.resolve().is_relative_to(Path(folder).resolve()):
            raise ValueError(f"the archive lies in {folder}, which saving replaces; move it")
        self.flush()
        write_folder(Path(folder), lambda partial: files.write(self, partial))
        if self.archive is not None:
            for name in (*self.sources, *self.consolidated):
                self.archive.remove(name)  # an earlier state: this one is safe now

    @classmethod
    def load(
        cls,
        folder: str | Path,
        config: GuardConfig | None = None,
        *,
        archive: str | Path | None = None,
        model: TrainableModel | None = None,
        device: torch.device | str = "cpu",
        precision: str = "auto",
    ) -> Self:
        """Load a saved learner with its overlays, or a run or a model to start from.

        A learner over another base than a GPT is given that `model`: the very one, or it is refused.
        """
        found, model, tokenizer = load_model(folder, device=device, model=model)
        make = functools.partial(cls, model, tokenizer, archive=archive, precision=precision)
        if not (found / files.STATE).is_file():
            check_hashes(found, files.STATE)  # one that was lost is not one that never was
            return make(config)
        return files.read(found, lambda saved: make(config or GuardConfig.from_dict(saved)))

    def tokens_in(self, text: Text) -> np.ndarray:
        """Return the tokens of a text, checked."""
        most = self.config.learn.max_observation
        return tokens_of(text, self.tokenizer, self.base.config.vocab_size, most)
