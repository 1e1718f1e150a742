"""The one writer: tries a lesson, lets the rules judge it, makes it durable, and then shows it to readers.

    teacher = Teacher(GuardedLearner(model, tokenizer, config), store, canaries, rules)
    teacher.publication                       # what readers read, never written again
    teacher.learn(["a text"], "kjv", key="k1"); teacher.rollback(7); teacher.forget("kjv")

Not for several threads: whoever serves calls it from one. A lesson that fails, is refused or cannot be made
durable leaves every byte as it was.
"""

import hashlib
import json
import logging
import math
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from attractor import monitor
from attractor.continual.guard import BASE, Guard
from attractor.continual.guarded import GuardedLearner, Source
from attractor.continual.observation import Observation
from attractor.continual.update import NotFiniteUpdate
from attractor.serve.decode.sequences import Publication
from attractor.serve.effects import (
    Change,
    Frames,
    Touched,
    change_of,
    fields_of,
    fill,
    reading_copy,
    tensors_of,
)
from attractor.serve.errors import Busy, Refused, Unavailable
from attractor.serve.rules import Canaries, Rules
from attractor.serve.segments import JournalDamaged, Record
from attractor.serve.state import SourceState, State, note
from attractor.serve.store import Store

log = logging.getLogger("attractor")

RECENT = 512
"""Lessons of which the course is kept for charts."""


def identity(learner: GuardedLearner) -> str:
    """What a store's records belong to: this base, and sources that have these tensors."""
    config = learner.config
    shape = [
        sorted(config.learn.update.train), config.learn.update.rule, config.attention,
        config.attention_rank, sorted(config.also),
    ]  # fmt: skip
    return f"{learner.base_hash}/{hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:16]}"


def blank(learner: GuardedLearner) -> dict[str, Any]:
    """What a source is before its first lesson, for the store."""
    return {name: value.detach().cpu() for name, value in tensors_of(learner.new_source()).items()}


class Built(NamedTuple):
    """Sources by name, and all that is known of them."""

    sources: dict[str, Source]
    frames: dict[str, Frames]
    touched: dict[str, Touched]
    changed: dict[str, int]  # the version that last changed it
    drifts: dict[str, float]


class Teacher:
    def __init__(
        self,
        learner: GuardedLearner,
        store: Store,
        canaries: Canaries,
        rules: Rules,
        publish: Callable[[Publication], None] = lambda publication: None,
    ) -> None:
        if learner.config.learn.allocation.mode == "grow":
            raise ValueError('a server keeps the size of its layers: allocation.mode must not be "grow"')
        if learner.sources:
            raise ValueError("a server keeps its own sources: start from a model without overlays")
        self.learner, self.store, self.canaries, self.rules = learner, store, canaries, rules
        self.publish = publish
        self.sources: dict[str, Source] = {}
        self.frames: dict[str, Frames] = {}
        self.touched: dict[str, Touched] = {}
        self.base = reading_copy(learner.base)
        self.drifts: dict[str, float] = {}
        self.changed: dict[str, int] = {}  # source -> the version that last changed it
        self.progressive: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self.watched: dict[str, deque[dict[str, Any]]] = {
            name: deque(maxlen=RECENT) for name in canaries.whole
        }
        state = store.state_at()
        self._take(self._built(state))
        self.kept = state
        state.sources = {}  # they live here now
        # where an audit goes back to; never before what somebody took back: it would be there again
        taken_back = (line["version"] for line in self.kept.history if line["kind"] != "lesson")
        self.audited = max(store.oldest, *taken_back, 0)
        self.since_audit = 0
        self._recall()
        self._publish(store.last)
        self._audit_what_was_there()

    @property
    def version(self) -> int:
        return self.publication.version

    @property
    def is_current(self) -> bool:
        """Readers have the newest version; if not, showing it failed after it was durable."""
        return self.version == self.store.last

    # --- what changes

    def learn(self, texts: list[str], source: str, key: str | None = None) -> dict[str, Any]:
        """Learn from texts, each without the context of the others: one lesson, whole or not at all."""
        if (known := self._known(key, "taught")) is not None:
            return known
        tokens = self._tokens(texts)
        self._check_quota(source, sum(map(len, tokens)))
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
                answer, change, version = self._attempt(held, source, tokens, key, undo)
        except NotFiniteUpdate as error:
            raise Refused(f"the lesson would not leave finite numbers: {error}") from error
        held.version += 1
        self.sources[source], self.changed[source] = held, version
        self.touched.setdefault(source, Touched()).add(change)
        self.progressive.append({"version": version, "loss": answer["loss"], "source": source})
        self._show(source, change, version)
        self.since_audit += 1
        if self.since_audit >= self.rules.audit_every:
            self.audit()
        return {**answer, "repeated": False, "now": self.version}

    def _attempt(
        self, held: Source, source: str, texts: list[np.ndarray], key: str | None, undo: Any
    ) -> tuple[dict[str, Any], Change, int]:
        before = tensors_of(held)
        learner = held.learner
        seen = Observation()
        for tokens in texts:
            learner.history = learner.history[:0]
            seen = seen.then(learner.observe(tokens))
        learner.history = learner.history[:0]
        seen = seen.then(learner.flush())
        live = tensors_of(held)
        change = change_of(before, live, undo)
        figures = self.canaries.judge(self._guard(source, held), held.branch.model)
        version = self.store.last + 1
        touched = {str(n): change.patches(f"weights/blocks.{n}.ffn.") for n in learner.layers}
        tensors = change.tensors()
        answer = {
            "version": version, "source": source, "loss": seen.loss,
            "tokens": seen.tokens, "taught": seen.taught, "held_back": seen.held_back, "patches": touched,
            "bytes": sum(tensor.nbytes for tensor in tensors.values()), "canaries": figures,
        }  # fmt: skip
        fields = {**fields_of(held), "lessons": held.version + 1}
        told = {"source": source, "key": key, "answer": answer, "fields": fields, "at": now()}
        self._commit("lesson", told, tensors)
        self._watch(version, figures)
        self.drifts[source] = worst_drift(figures)
        return answer, change, version

    def rollback(self, version: int, key: str | None = None) -> dict[str, Any]:
        """Everything as it was at a version, to the bit. What came after it stays in the journal."""
        if (known := self._known(key, "to", to=version)) is not None:
            return known
        if not self.store.oldest <= version <= self.store.last:
            raise ValueError(
                f"version {version} is not kept: there are {self.store.oldest} to {self.store.last}"
            )
        try:
            built = self._built(self.store.state_at(version))
        except (OSError, JournalDamaged) as error:
            log.error("version %d cannot be read: %s", version, error)
            raise Unavailable(f"nothing was changed, because version {version} cannot be read") from error
        answer = {"version": self.store.last + 1, "to": version}
        self._commit("rollback", {"to": version, "key": key, "answer": answer, "at": now()})
        self._take(built)
        self.audited = answer["version"]
        self._publish(answer["version"])
        return {**answer, "repeated": False}

    def forget(self, source: str, key: str | None = None) -> dict[str, Any]:
        """Take away all that a source taught; exact, because nothing else wrote there."""
        if (known := self._known(key, "lessons", source=source)) is not None:
            return known
        if source not in self.sources:
            raise LookupError(f"nothing is kept for {source!r}; sources: {sorted(self.sources)}")
        answer: dict[str, Any] = {
            "version": self.store.last + 1, "source": source, "tokens": self.sources[source].tokens,
            "lessons": self.sources[source].version,
        }  # fmt: skip
        self._commit("drop", {"source": source, "key": key, "answer": answer, "at": now()})
        for kept in (self.sources, self.frames, self.touched, self.changed):
            del kept[source]
        self.drifts.pop(source, None)
        self.audited = answer["version"]
        self._publish(answer["version"])
        return {**answer, "repeated": False}

    def audit(self) -> bool:
        """Read whole canaries; where one fell, go back to the last version that was well.

        Whatever fails here has to wait: the lesson before is durable, and its teacher is not told otherwise.
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
        """At a start nobody knows how many lessons came since the last audit."""
        if self.sources and (refused := self._refusal()) is not None:
            log.warning("version %d fails its audit (%s): the next lesson ends that", self.version, refused)
            self.since_audit = self.rules.audit_every
        else:
            self.audited = self.version

    # --- what is

    def state(self) -> State:
        """A copy of everything that is durable, for a snapshot."""
        sources = {
            name: SourceState({key: value.detach().cpu().clone() for key, value in tensors_of(held).items()},
                              fields_of(held))
            for name, held in self.sources.items()
        }  # fmt: skip
        return State(self.version, sources, dict(self.kept.answers), list(self.kept.history))

    def _tell(self) -> None:
        """Figures for whoever watches, from any thread: they are replaced, never changed."""
        self.told: dict[str, Any] = {
            "progressive": list(self.progressive),
            "canaries": {name: list(seen) for name, seen in self.watched.items()},
            "usage": self._usage(), "drift": dict(self.drifts), "history": list(self.kept.history),
            "overlays": {
                name: {"version": self.changed[name], "lessons": held.version, "tokens": held.tokens,
                       **self.touched[name].figures(held)}
                for name, held in self.sources.items()
            },
        }  # fmt: skip

    def _usage(self) -> dict[str, dict[str, Any]]:
        """By layer: how evenly patches are used by what is taught, and how much each is."""
        told: dict[str, dict[str, Any]] = {}
        for number, layer in self.learner.base.apn_layers().items():
            habits = [held.learner.allocator.habits[number].usage.cpu() for held in self.sources.values()]
            if not habits:
                even = [1 / layer.num_patches] * layer.num_patches
                told[str(number)] = {"entropy": math.log(layer.num_patches), "counts": even}
                continue
            mean = sum(habits[1:], habits[0]) / len(habits)
            told[str(number)] = {"entropy": monitor.usage_entropy(mean), "counts": mean.tolist()}
        return told

    # --- inside

    def _known(self, key: str | None, part: str, **same: Any) -> dict[str, Any] | None:
        """The answer that was given to this key before; only answers of its kind have this part."""
        if key is None or key not in self.kept.answers:
            return None
        answer = self.kept.answers[key]
        if part not in answer or not same.items() <= answer.items():
            raise ValueError(f"the key {key!r} was given with something else before: take a new one")
        return {**answer, "repeated": True}

    def _tokens(self, texts: list[str]) -> list[np.ndarray]:
        if not texts:
            raise ValueError("there is no text; give one or more")
        found = [self.learner.tokens_in(text) for text in texts]
        for number, tokens in enumerate(found):
            if len(tokens) < 2:
                raise ValueError(f"text {number} has 1 token, and the first is not predicted: give more")
        return found

    def _check_quota(self, source: str, tokens: int) -> None:
        if tokens > self.rules.lesson_tokens:
            raise ValueError(f"{tokens:,} tokens; a lesson may have {self.rules.lesson_tokens:,}")
        taught = self.sources[source].tokens if source in self.sources else 0
        most = self.rules.source_tokens
        if most is not None and taught + tokens > most:
            raise Refused(
                f"{source!r} taught {taught:,} tokens and may teach {most:,} in all; these are {tokens:,}"
            )

    def _guard(self, source: str | None = None, held: Source | None = None) -> Guard:
        """What readers would get, with this source as it is now."""
        paths = {name: own.branch.model for name, own in self.sources.items()}
        if source is not None and held is not None:
            paths[source] = held.branch.model
        config = self.learner.config
        guard = Guard(
            {"base": self.learner.base, **paths}, prior=config.prior, window=config.window,
            switch_rate=config.switch_rate,
        )  # fmt: skip
        return guard.to(self.learner.device).eval()

    def _commit(self, kind: str, fields: dict[str, Any], tensors: dict[str, Any] | None = None) -> None:
        if not self.is_current:
            raise Unavailable("a version is durable and could not be shown: start the server again")
        try:
            version = self.store.commit(kind, fields, tensors)
        except OSError as error:
            raise Unavailable(
                f"nothing was changed, because it could not be made durable: {error.strerror or error}"
            ) from error
        note(self.kept, Record(version, kind, fields, {}))

    def _built(self, state: State) -> Built:
        """What lives here of a state of the store; nothing of ours changes yet."""
        sources = {}
        for name, kept in state.sources.items():
            sources[name] = self.learner.new_source()
            fill(sources[name], kept.tensors, kept.fields)
        changed = last_changes(state.history)
        return Built(
            sources,
            {name: Frames(held) for name, held in sources.items()},
            {name: Touched.of(held) for name, held in sources.items()},
            {name: changed.get(name, 0) for name in sources},
            {
                name: worst_drift(self.canaries.measure(None, held.branch.model))
                for name, held in sources.items()
            },
        )

    def _take(self, built: Built) -> None:
        """Become what was built. Answers and history only ever grow: a rollback keeps them."""
        self.sources, self.frames, self.touched, self.changed, self.drifts = built

    def _recall(self) -> None:
        """What watchers saw before the server was stopped, as far as the store knows it."""
        for line in self.kept.history:
            if line["kind"] == "lesson":
                self.progressive.append({name: line.get(name) for name in ("version", "loss", "source")})
        self._watch(self.store.last, self.canaries.measure(self._guard(), None))

    def _watch(self, version: int, figures: dict[str, Any]) -> None:
        for name, told in figures.items():
            self.watched[name].append({"version": version, "perplexity": told["perplexity"]})

    def _show(self, source: str, change: Change, version: int) -> None:
        if source in self.frames:
            self.frames[source].after(change)
        else:
            self.frames[source] = Frames(self.sources[source])
        self._publish(version)

    def _publish(self, version: int) -> None:
        config = self.learner.config
        paths = {BASE: self.base, **{name: own.newest.model for name, own in self.frames.items()}}
        self.publication = Publication(version, paths, config.prior, config.window, config.pause)
        for own in self.frames.values():
            own.newest.users.add(self.publication)
        self._tell()
        self.publish(self.publication)


def last_changes(history: list[dict[str, Any]]) -> dict[str, int]:
    """Source -> the version that last changed what is there of it."""
    found: dict[str, int] = {}
    at = {0: found}
    for line in history:
        if line["kind"] == "rollback":
            found = at.get(line["to"], {})
        else:
            found = {name: version for name, version in found.items() if name != line["source"]}
            found |= {line["source"]: line["version"]} if line["kind"] == "lesson" else {}
        at[line["version"]] = found
    return found


def worst_drift(figures: dict[str, Any]) -> float:
    return max(told["drift"] for told in figures.values())


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
