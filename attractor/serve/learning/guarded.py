"""The writer of a guarded model: tries a text, lets the rules judge it, makes it durable, and then shows it.

teacher = GuardedTeacher(GuardedLearner(model, tokenizer, config), store, canaries, rules)
teacher.learn(["a text"], "kjv", key="k1"); teacher.rollback(7); teacher.forget("kjv")
"""

import hashlib
import json
import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from attractor import monitor
from attractor.continual.delta import Delta
from attractor.continual.guard import BASE, Guard
from attractor.continual.guarded import GuardedLearner, Source
from attractor.continual.observation import Observation
from attractor.continual.update import NotFiniteUpdate, Undo, delta_of
from attractor.serve.config import Rules
from attractor.serve.decode.sequences import Publication
from attractor.serve.errors import Busy, Refused
from attractor.serve.learning.canaries import Canaries
from attractor.serve.learning.readers import (
    WEIGHTS,
    Frames,
    fields_of,
    fill,
    patches_of,
    reading_copy,
    tensors_of,
)
from attractor.serve.learning.teacher import RECENT, Teacher, Teaches
from attractor.serve.store import Change, State, Store

log = logging.getLogger("attractor")


def identity(learner: GuardedLearner) -> str:
    """What a store's records belong to: this base, and sources that have these tensors."""
    config = learner.config
    shape = [
        sorted(config.learn.update.train),
        config.learn.update.rule,
        config.attention,
        config.attention_rank,
        sorted(config.also),
    ]
    return f"{learner.base_hash}/{hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:16]}"


class Built(NamedTuple):
    """Sources by name, and all that is known of them."""

    sources: dict[str, Source]
    frames: dict[str, Frames]
    learned: dict[str, Delta]  # of their weights, since the base
    changed: dict[str, int]  # the version that last changed it
    drifts: dict[str, float]


class GuardedTeacher(Teacher):
    teaches: Teaches = "texts"
    keeps_snapshots = True

    def __init__(
        self,
        learner: GuardedLearner,
        store: Store,
        canaries: Canaries,
        rules: Rules,
    ) -> None:
        super().__init__(store, rules)
        if learner.config.learn.allocation.mode == "grow":
            raise ValueError('a server keeps the size of its layers: allocation.mode must not be "grow"')
        if learner.sources:
            raise ValueError("a server keeps its own sources: start from a model without overlays")
        self.learner, self.canaries = learner, canaries
        self.sources: dict[str, Source] = {}
        self.frames: dict[str, Frames] = {}
        self.learned: dict[str, Delta] = {}  # of weights, since the base
        self.base = reading_copy(learner.base)
        self.drifts: dict[str, float] = {}
        self.changed: dict[str, int] = {}  # source -> the version that last changed it
        self.progressive: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self.watched: dict[str, deque[dict[str, Any]]] = {
            name: deque(maxlen=RECENT) for name in canaries.whole
        }
        self._take(self._built(store.state_at()))
        # where an audit goes back to; never before what somebody took back: it would be there again
        self.audited = max(store.oldest, store.taken_back)
        self.since_audit = 0
        self._recall()
        self._publish(store.last)
        self._audit_what_was_there()

    # --- what changes

    def learn(
        self, what: Sequence[str], source: str, key: str | None = None, sender: str | None = None, **_: Any
    ) -> dict[str, Any]:
        """Learn from texts, each without the context of the others, all of them or none."""
        texts = list(what)
        asked = self._asked(key, sender, "lesson", source, texts)
        if (known := self._known(**asked)) is not None:
            return known
        tokens = self._tokens(texts)
        taught = self.sources[source].tokens if source in self.sources else 0
        self._check_quota(source, taught, sum(map(len, tokens)))
        if source in self.frames and self.frames[source].crowded:
            raise Busy("texts under way still read too many earlier versions of this source", 1.0)
        held = self.sources.get(source)
        if held is None:
            self.learner.check_name(source)
            if len(self.sources) >= (most := self.learner.config.max_overlays):
                raise Refused(f"there are {most} overlays, as many as this server keeps: drop one first")
            held = self.learner.new_source()
        try:
            with held.learner.attempt() as undo:
                answer, weights = self._attempt(held, source, tokens, asked, undo)
        except NotFiniteUpdate as error:
            raise Refused(f"what was learned would not be finite numbers: {error}") from error
        held.version += 1
        version = answer["version"]
        self.sources[source], self.changed[source] = held, version
        self.learned[source] = self.learned.get(source, Delta()).merge(weights)
        self.progressive.append({"version": version, "loss": answer["loss"], "source": source})
        self._show(source, weights, version)
        self.since_audit += 1
        if self.since_audit >= self.rules.audit_every:
            self.audit()
        return {**answer, "repeated": False, "now": self.version}

    def _attempt(
        self, held: Source, source: str, texts: list[np.ndarray], asked: dict[str, Any], undo: Undo
    ) -> tuple[dict[str, Any], Delta]:
        before = tensors_of(held)
        learner = held.learner
        seen = Observation()
        for tokens in texts:
            learner.history = learner.history[:0]
            seen = seen.then(learner.observe(tokens))
        learner.history = learner.history[:0]
        seen = seen.then(learner.flush())
        delta = delta_of(before, tensors_of(held), undo)
        weights = delta.under(WEIGHTS)
        figures = self.canaries.judge(self._guard(source, held), held.branch.model)
        answer: dict[str, Any] = {
            "version": self.store.last + 1,
            "source": source,
            "loss": seen.loss,
            "tokens": seen.tokens,
            "taught": seen.taught,
            "held_back": seen.held_back,
            "patches": {str(layer): patches_of(weights, layer) for layer in learner.layers},
            "bytes": delta.nbytes,
            "canaries": figures,
        }
        fields = {**fields_of(held), "lessons": held.version + 1}
        self._commit(Change(kind="lesson", answer=answer, source=source, fields=fields, delta=delta, **asked))
        self._watch(answer["version"], figures)
        self.drifts[source] = worst_drift(figures)
        return answer, weights

    def rollback(self, version: int, key: str | None = None, sender: str | None = None) -> dict[str, Any]:
        """Everything as it was at a version, to the bit, but for what was erased since."""
        asked = self._asked(key, sender, "rollback", version)
        if (known := self._known(**asked)) is not None:
            return known
        built = self._built(self._state_at(version))
        answer = {"version": self.store.last + 1, "to": version}
        self._commit(Change(kind="rollback", answer=answer, target=version, **asked))
        self._take(built)
        self.audited = answer["version"]
        self._publish(answer["version"])
        return {**answer, "repeated": False}

    def forget(
        self, source: str, key: str | None = None, sender: str | None = None, erase: bool = False
    ) -> dict[str, Any]:
        """Take away all that a source taught; exact, because nothing else wrote there.

        A rollback to an earlier version brings it back, unless it is erased: then what it changed is
        removed from the database, also where the source was forgotten before.
        """
        asked = self._asked(key, sender, "erase" if erase else "drop", source)
        if (known := self._known(**asked)) is not None:
            return known
        held = self.sources.get(source)
        if held is None and not (erase and self.store.holds(source)):
            raise LookupError(f"nothing is kept for {source!r}; sources: {sorted(self.sources)}")
        answer: dict[str, Any] = {
            "version": self.store.last + 1,
            "source": source,
            "tokens": held.tokens if held else 0,
            "lessons": held.version if held else 0,
            "erased": erase,
        }
        self._commit(Change(kind="erase" if erase else "drop", answer=answer, source=source, **asked))
        for kept in (self.sources, self.frames, self.learned, self.changed, self.drifts):
            kept.pop(source, None)
        self.audited = answer["version"]
        self._publish(answer["version"])
        return {**answer, "repeated": False}

    def audit(self) -> bool:
        """Read whole canaries; where one fell, go back to the last version that was well.

        Whatever fails here has to wait: the text before is durable, and its client got that answer.
        """
        self.since_audit = 0
        try:
            refused = self._refusal()
            if refused is None:
                self.audited = self.version
                return True
            good = max(self.audited, self.store.oldest)
            log.warning("version %d fails its audit (%s): back to %d", self.version, refused, good)
            self.rollback(good)
        except Exception as error:
            log.warning("an audit has to wait: %s", error)
            self.since_audit = self.rules.audit_every
        return False

    def _refusal(self) -> Refused | None:
        """Why the whole canaries are not well, if they are not."""
        try:
            self.canaries.judge(self._guard(), None, whole=True)
        except Refused as refused:
            return refused
        return None

    def _audit_what_was_there(self) -> None:
        """A start does not know how many texts came since the last audit."""
        if self.sources and (refused := self._refusal()) is not None:
            log.warning("version %d fails its audit (%s): the next text ends that", self.version, refused)
            self.since_audit = self.rules.audit_every
        else:
            self.audited = self.version

    # --- what is

    def _renew_figures(self) -> None:
        """Renew the figures, which any thread may read: they are replaced, never changed."""
        self.figures: dict[str, Any] = {
            "progressive": list(self.progressive),
            "canaries": {name: list(seen) for name, seen in self.watched.items()},
            "usage": self._usage(),
            "drift": dict(self.drifts),
            "overlays": {
                name: {
                    "version": self.changed[name],
                    "lessons": held.version,
                    "tokens": held.tokens,
                    **self._size(name, held),
                }
                for name, held in self.sources.items()
            },
        }

    def _size(self, name: str, held: Source) -> dict[str, Any]:
        """Bytes of weights that a source changed, and how many patches of each layer."""
        weights = self.learned[name]
        patches = {str(layer): len(patches_of(weights, layer)) for layer in held.learner.layers}
        return {"bytes": sum(value.nbytes for value in weights.values()), "patches": patches}

    def _usage(self) -> dict[str, dict[str, Any]]:
        """For each layer, how evenly patches are used by what is taught, and how much each is."""
        usage: dict[str, dict[str, Any]] = {}
        for number, layer in self.learner.base.apn_layers().items():
            habits = [held.learner.allocator.habits[number].usage.cpu() for held in self.sources.values()]
            if not habits:
                even = [1 / layer.num_patches] * layer.num_patches
                usage[str(number)] = {"entropy": math.log(layer.num_patches), "counts": even}
                continue
            mean = sum(habits[1:], habits[0]) / len(habits)
            usage[str(number)] = {"entropy": monitor.usage_entropy(mean), "counts": mean.tolist()}
        return usage

    # --- inside

    def _tokens(self, texts: list[str]) -> list[np.ndarray]:
        if not texts:
            raise ValueError("there is no text; give one or more")
        found = [self.learner.tokens_in(text) for text in texts]
        for number, tokens in enumerate(found):
            if len(tokens) < 2:
                raise ValueError(f"text {number} has 1 token, and the first is not predicted: give more")
        if (count := sum(map(len, found))) > self.rules.text_tokens:
            raise ValueError(f"{count:,} tokens; at most {self.rules.text_tokens:,} are learned at once")
        return found

    def _guard(self, source: str | None = None, held: Source | None = None) -> Guard:
        """What readers would get, with this source as it is now."""
        paths = {name: own.branch.model for name, own in self.sources.items()}
        if source is not None and held is not None:
            paths[source] = held.branch.model
        config = self.learner.config
        guard = Guard(
            {"base": self.learner.base, **paths},
            prior=config.prior,
            window=config.window,
            switch_rate=config.switch_rate,
        )
        return guard.to(self.learner.device).eval()

    def _built(self, state: State) -> Built:
        """What lives here of a state of the store; nothing of ours changes yet."""
        sources, learned = {}, {}
        for name, kept in state.sources.items():
            sources[name], delta = self.learner.new_source(), kept.delta
            fill(sources[name], delta, kept.fields)
            learned[name] = delta.under(WEIGHTS)
        return Built(
            sources,
            {name: Frames(held) for name, held in sources.items()},
            learned,
            {name: kept.version for name, kept in state.sources.items()},
            {
                name: worst_drift(self.canaries.measure(None, held.branch.model))
                for name, held in sources.items()
            },
        )

    def _take(self, built: Built) -> None:
        """Become what was built."""
        self.sources, self.frames, self.learned, self.changed, self.drifts = built

    def _recall(self) -> None:
        """What watchers saw before the server was stopped, as far as the store knows it."""
        for line in reversed(self.store.history(RECENT)):
            if line["kind"] == "lesson":
                self.progressive.append({name: line.get(name) for name in ("version", "loss", "source")})
        self._watch(self.store.last, self.canaries.measure(self._guard(), None))

    def _watch(self, version: int, figures: dict[str, Any]) -> None:
        for name, found in figures.items():
            self.watched[name].append({"version": version, "perplexity": found["perplexity"]})

    def _show(self, source: str, weights: Delta, version: int) -> None:
        if source in self.frames:
            self.frames[source].after(weights)
        else:
            self.frames[source] = Frames(self.sources[source])
        self._publish(version)

    def _publish(self, version: int) -> None:
        config = self.learner.config
        paths = {BASE: self.base, **{name: own.newest.model for name, own in self.frames.items()}}
        self.publication = Publication(version, paths, config.prior, config.window, config.pause)
        for own in self.frames.values():
            own.newest.users.add(self.publication)
        self._renew_figures()
        self.publish(self.publication)


def worst_drift(figures: dict[str, Any]) -> float:
    return max(found["drift"] for found in figures.values())
