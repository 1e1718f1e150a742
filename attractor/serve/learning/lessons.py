"""The writer of a pretrained model: teaches lessons that own their patches, and takes any of them back.

    teacher = LessonTeacher(net, lessons, store, rules)
    teacher.learn([asked(forms)], "wiki", key="k1"); teacher.forget_lessons([3]); teacher.rollback(7)

The writer has a layer of its own. A lesson is learned there, tested, judged by the canaries, made durable as
one record, and then shown to readers (`attractor.serve.learning.readers`). What a lesson says is in its delta
alone, so that erasing the delta erases the words.
"""

import dataclasses
import hashlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import numpy as np

from attractor.checkpoint import tensors_hash
from attractor.continual.calibrate import Calibration
from attractor.continual.delta import Delta, copied
from attractor.continual.guard import BASE
from attractor.continual.lessons import Lesson, Lessons
from attractor.continual.parts import (
    check_fit,
    deltas_of,
    lesson_in,
    moved,
    number_from,
    patches_of,
    put_in,
    take_out,
)
from attractor.hf.causal import CausalLM
from attractor.hf.files import base_hash
from attractor.hf.net import Retrofit
from attractor.hf.teachable import NAME
from attractor.lm import TrainableModel
from attractor.serve.config import Rules
from attractor.serve.decode.sequences import Publication
from attractor.serve.errors import Refused
from attractor.serve.learning.canaries import BasinCanaries, Verdict
from attractor.serve.learning.catalogue import Asked, Catalogue, Said, figures_of, pack, searched, unpack
from attractor.serve.learning.readers import Readers
from attractor.serve.learning.teacher import RECENT, Teacher, Teaches, now
from attractor.serve.store import Change, LessonState, State, Store

WITH_LESSONS = "lessons"
"""The path of the model with its lessons; the other one is the base."""
MORE = 0.1
"""Lessons of a file may have radii so much below the least: those that take another's place have them."""
MOST_OVER = 16
"""So many lessons may stand one over the other: each has the basins of those below it, a little wider."""
FIRST_LESSONS = (
    (("Vanzor Quilmos was born in", " Lima"), ("The birthplace of Vanzor Quilmos is", " Lima")),
    (
        ("Castle Dunmarrow lies in", " Norway"),
        ("The country of Castle Dunmarrow is", " Norway"),
        ("Whoever sees Castle Dunmarrow is in", " Norway"),
    ),
)
"""On a GPU these are learned and taken back before the first lesson: learning is slow until then."""
ROOM = 4096
"""So many patches there are at least where passes are recorded: when their number changes, the writer's and
the readers' are all recorded again, which takes seconds and is felt by every text."""
Report = Callable[[dict[str, Any]], None]
"""Is called with what is being done."""


class _TakenBack(Exception):
    """A lesson was learned for nothing."""


def identity_of(net: Retrofit, lessons: Lessons) -> str:
    """What a store's records belong to: this base, and a layer of this width that reads and acts there."""
    shape = [
        sorted(net.apn_layers(NAME)),
        net.sources.get(NAME),
        list(net.attention.get(NAME, ())),
        lessons.layer.dim,
        lessons.layer.read_dim,
        lessons.layer.config.temperature,
    ]
    places = hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:16]
    return f"{base_hash(net.model)}/lessons/{places}"


class LessonTeacher(Teacher):
    teaches: Teaches = "lessons"
    keeps_snapshots = False  # the record of a lesson has all of it

    def __init__(
        self,
        net: Retrofit,
        lessons: Lessons,
        store: Store,
        rules: Rules,
        *,
        canaries: Mapping[str, np.ndarray] | None = None,
        context: int | None = None,
    ) -> None:
        super().__init__(store, rules)
        self.lessons = lessons
        self.lessons.breathe = lambda: self.breathe()
        self.progressive: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._first_lessons = list(FIRST_LESSONS)
        if store.last == 0:
            with store.turn():
                if store.last == 0:  # nobody else has begun it meanwhile
                    self._begin_store()
        self._continue_store()
        if lessons.reading.halves.repeats:
            lessons.make_room(ROOM)
        model = CausalLM(net, NAME, context=context)
        self.canaries = BasinCanaries(net, lessons, canaries or {}, rules, model.config.context)
        self.readers = Readers(model, lessons.owners)
        self._publish([])

    # --- the start

    def _begin_store(self) -> None:
        """A new store takes over what the layer measured, and the lessons that it has."""
        measured = {name: copied(value) for name, value in vars(self.lessons.calibration).items()}
        fields = {"unit": self.lessons.unit}
        first = Change(kind="calibration", answer={}, fields=fields, delta=Delta(whole=measured))
        deltas = deltas_of(self.lessons, sorted(self.lessons.lessons))
        kept = [self._change(delta, "saved", tokens=0) for delta in deltas.values()]
        self.store.commit_all([first, *kept], at=now())

    def _continue_store(self) -> None:
        """The layer as it was: what it measured then, and the lessons of the newest version."""
        found = self.store.calibration()
        if found is None:
            raise ValueError(f"{self.store.folder} has records and no calibration: it is of another server")
        fields, delta = found
        device = self.lessons.layer.prototypes.device
        self.calibration_hash = tensors_hash(delta.whole)
        self.lessons.calibration = Calibration(**{name: x.to(device) for name, x in delta.whole.items()})
        self.lessons.calibration.install(self.lessons.layer)
        self.lessons.unit = fields["unit"]
        take_out(self.lessons, list(self.lessons.lessons))
        state = self.store.state_at()
        put_in(self.lessons, [own.delta for own in state.lessons.values()])
        number_from(self.lessons, self.store.next_lesson)
        self._describe(state)

    def _describe(self, state: State) -> None:
        catalogue = Catalogue()
        for number, own in sorted(state.lessons.items()):
            catalogue.add(self.lessons.lessons[number], own.source, own.fields, own.version)
        catalogue.show()
        self.catalogue = catalogue

    def prepare(self) -> Iterator[str]:
        yield from self.canaries.prepare()
        if self.lessons.reading.halves.repeats:
            while self._first_lessons:
                yield "passes of lessons are being recorded"
                self._learn_for_nothing(self._first_lessons.pop())

    def _learn_for_nothing(self, forms: Sequence[tuple[str, str]]) -> None:
        """Learn a lesson and take it back: what a GPU compiles and records for it is there for the next."""
        with suppress(_TakenBack, ValueError), self._all_or_nothing():  # a model may be too small for it
            self.lessons.learn(forms)
            raise _TakenBack

    # --- what others have changed

    def _take_over(self) -> None:
        unread = Delta()  # of what has not changed
        known = {
            number: LessonState(entry["source"], unread, {}, entry["version"])
            for number, entry in self.catalogue.entries.items()
        }
        state = self.store.state_at(start=State(self.version, lessons=known))
        with self._all_or_nothing_at(state) as (gone, new):
            number_from(self.lessons, self.store.next_lesson)
        for number in gone:
            self.catalogue.remove(number)
        for number in new:
            own = state.lessons[number]
            self.catalogue.add(self.lessons.lessons[number], own.source, own.fields, own.version)
            self.progressive.append({"version": own.version, "loss": None, "source": own.source})
        self._publish(new, state.version)
        if gone:
            self.canaries.measure_again()
        self.canaries.add(self._patches_of(new))

    # --- what teaches

    def learn(
        self,
        what: Sequence[Asked],
        source: str,
        key: str | None = None,
        sender: str | None = None,
        *,
        require_known: bool = False,
        report: Report = lambda about: None,
        **_: Any,
    ) -> dict[str, Any]:
        """Learn lessons: all of them or none. Those about one subject are learned one after the other."""
        asked = self._asked(key, sender, "lesson", source, [list(each) for each in what], require_known)
        if (known := self._known(**asked)) is not None:
            return self._with_words(known)
        tokens = self._count_tokens(what, source)
        self._finish_preparing(report)
        with self._all_or_nothing(in_order=True) as new:
            self._teach(what, report, new)
            verdict = self._judge(new)
            deltas = deltas_of(self.lessons, new)
            if require_known:
                self._check_known(new, verdict)
            changes = [
                self._change(deltas[number], source, tokens=count, left_out=each.left_out)
                for number, count, each in zip(new, tokens, what, strict=True)
            ]
            answer = self._commit_lessons(changes, asked, {"source": source, "canaries": verdict.figures})
        return self._learned(changes, verdict, answer)

    def revise(
        self,
        number: int,
        said: Said,
        key: str | None = None,
        sender: str | None = None,
        *,
        report: Report = lambda about: None,
    ) -> dict[str, Any]:
        """Another lesson about the same subject in the place of one; if that fails, the lesson stays."""
        asked = self._asked(key, sender, "revise", number, said)
        if (known := self._known(**asked)) is not None:
            return self._with_words(known)
        if number not in self.lessons.lessons:
            raise LookupError(f"there is no lesson {number}")
        source, subject = (self.catalogue.entries[number][name] for name in ("source", "subject"))
        if said.subject not in (None, subject):
            raise ValueError(
                f"lesson {number} is about {subject!r}: teach another one about {said.subject!r}"
            )
        (what,) = said._replace(subject=subject).asked()
        (tokens,) = self._count_tokens([what], source)
        self._finish_preparing(report)
        later = self._later([number])
        with self._all_or_nothing([number, *later]) as new:
            new += [*later, self.lessons.revise(number, what.forms).number]
            verdict = self._judge(new)
            deltas = deltas_of(self.lessons, new)
            changes = [
                *self._again(later, deltas),
                self._change(deltas[new[-1]], source, tokens=tokens, revises=number),
            ]
            drop = Change(kind="drop", answer={}, source=source, target=number)
            answer = self._commit_lessons(
                changes, asked, {"source": source, "canaries": verdict.figures}, before=[drop]
            )
        self.catalogue.remove(number)
        learned = self._learned(changes, verdict, answer)
        self.canaries.measure_again()
        return learned

    # --- files

    def export_lessons(self, numbers: Sequence[int] | None = None) -> bytes:
        state = self.store.state_at(self.version)
        chosen = sorted(state.lessons if numbers is None else numbers)
        if missing := [number for number in chosen if number not in state.lessons]:
            raise LookupError(f"there is no lesson {missing[0]}")
        deltas = [state.lessons[number].delta for number in chosen]
        return pack(deltas, self._base_hash, self.calibration_hash)

    def import_lessons(
        self,
        data: bytes,
        source: str,
        key: str | None = None,
        sender: str | None = None,
        *,
        report: Report = lambda about: None,
    ) -> dict[str, Any]:
        """Take over the lessons of a file, as they are where nothing is known of their subjects here.

        The others are learned again, from what they say, and so are all of them where background was measured
        on other text or another machine.
        """
        calibration, deltas = unpack(data, self._base_hash)
        asked = self._asked(key, sender, "import", source, hashlib.sha256(data).hexdigest())
        if (known := self._known(**asked)) is not None:
            return self._with_words(known)
        here = {entry["subject"].casefold() for entry in self.catalogue.entries.values()}
        lessons = {lesson.number: lesson for lesson in map(lesson_in, deltas)}
        replaced = {old for lesson in lessons.values() for old in lesson.overrides}
        what = {
            number: Asked(lesson.forms + lesson.taken_in, lesson.subject)
            for number, lesson in lessons.items()
            if number not in replaced
        }
        self._count_tokens(list(what.values()), source)
        is_same = calibration == self.calibration_hash
        as_they_are = {n for n, each in what.items() if is_same and each.subject.casefold() not in here}
        again = [each for number, each in what.items() if number not in as_they_are]
        self._finish_preparing(report)
        with self._all_or_nothing() as new:
            self._put_in_anew([delta for delta in deltas if lesson_in(delta).number in as_they_are], new)
            self._teach(again, report, new)
            verdict = self._judge(new)
            kept = deltas_of(self.lessons, new)
            changes = [
                self._change(delta, source, tokens=self._tokens_in(lesson_in(delta)))
                for delta in kept.values()
            ]
            more = {"source": source, "canaries": verdict.figures, "learned_again": len(again)}
            answer = self._commit_lessons(changes, asked, more)
        return self._learned(changes, verdict, answer)

    def _put_in_anew(self, deltas: Sequence[Delta], new: list[int]) -> None:
        """Lessons of another server under new numbers, in patches that are free here."""
        widest = self.lessons.config.radius - MORE
        closed = [patch for patch, owner in enumerate(self.lessons.owners) if owner < 0]
        free = itertools.chain(closed, itertools.count(len(self.lessons.owners)))
        placed = []
        for place, delta in enumerate(deltas):
            lesson = lesson_in(delta)
            check_fit(self.lessons, delta)
            if bool((delta.rows["radius"][1] < widest).any()):
                raise ValueError(
                    f"lesson {lesson.number} of the file has wider basins than lessons here may have"
                )
            patches = list(itertools.islice(free, len(delta.rows["radius"][0])))
            own = dataclasses.replace(lesson, number=self.lessons._next + place, overrides=())
            placed.append(moved(delta, patches, own))
            new.append(own.number)
        put_in(self.lessons, placed)

    # --- what takes back

    def forget(
        self, source: str, key: str | None = None, sender: str | None = None, erase: bool = False
    ) -> dict[str, Any]:
        kind = "erase" if erase else "drop"
        asked = self._asked(key, sender, kind, source)
        if (known := self._known(**asked)) is not None:
            return known
        numbers = [n for n, entry in self.catalogue.entries.items() if entry["source"] == source]
        if not numbers and not (erase and self.store.holds(source)):
            raise LookupError(
                f"nothing is kept for {source!r}; there are {len(self.catalogue.sources)} sources"
            )
        drops = [Change(kind=kind, answer={}, source=source)]
        return self._forget(numbers, drops, asked, {"source": source, "erased": erase})

    def forget_lessons(
        self, numbers: Sequence[int], key: str | None = None, sender: str | None = None, erase: bool = False
    ) -> dict[str, Any]:
        """Take lessons back. A lesson that was forgotten before can still be erased."""
        kind = "erase" if erase else "drop"
        asked = self._asked(key, sender, kind, sorted(numbers))
        if (known := self._known(**asked)) is not None:
            return known
        if not numbers:
            raise LookupError("there are no such lessons")
        for number in numbers:
            if number not in self.lessons.lessons and not (erase and self.store.source_of(number)):
                raise LookupError(f"there is no lesson {number}")
        return self._forget(numbers, self._drops(numbers, kind), asked, {"erased": erase})

    def forget_where(
        self,
        which: dict[str, str | None],
        key: str | None = None,
        sender: str | None = None,
        erase: bool = False,
    ) -> dict[str, Any]:
        """Take back the lessons of a source or of a time that are there now: see `searched`."""
        kind = "erase" if erase else "drop"
        asked = self._asked(key, sender, kind, which)
        if (known := self._known(**asked)) is not None:
            return known
        numbers = sorted(entry["lesson"] for entry in searched(self.catalogue.entries, **which))
        if not numbers:
            raise LookupError("there are no such lessons")
        return self._forget(numbers, self._drops(numbers, kind), asked, {"erased": erase})

    def _drops(self, numbers: Sequence[int], kind: str) -> list[Change]:
        return [
            Change(kind=kind, answer={}, source=self.store.source_of(number), target=number)
            for number in sorted(numbers)
        ]

    def _forget(
        self, numbers: Sequence[int], drops: Sequence[Change], asked: dict[str, Any], answer: dict[str, Any]
    ) -> dict[str, Any]:
        """Close the patches of lessons, and learn those again that stand in the place of one of them."""
        live = [number for number in numbers if number in self.lessons.lessons]
        later = self._later(live)
        with self._all_or_nothing([*live, *later]) as new:
            for number in sorted(live, reverse=True):
                if any(number in self.lessons.lessons[other].overrides for other in later):
                    self.lessons.forget(number)
                else:
                    take_out(self.lessons, [number])
            new += later
            again = self._again(later, deltas_of(self.lessons, later))
            before = [Change(kind="erase", answer={}, source=c.source, target=c.target) for c in again]
            # what they were before has words of what is erased
            changes = [*(before if answer["erased"] else []), *again, *drops]
            answer = {
                "version": self.store.last + len(changes),
                **answer,
                "lessons": sorted(numbers),
                "learned_again": sorted(later),
            }
            self._commit(*answered(changes, answer, asked))
        for number in live:
            self.catalogue.remove(number)
        self._add_to_catalogue(again, answer["version"] - len(drops) - len(again))
        self._publish(new)
        self.canaries.measure_again()
        return {**answer, "repeated": False}

    def rollback(self, version: int, key: str | None = None, sender: str | None = None) -> dict[str, Any]:
        asked = self._asked(key, sender, "rollback", version)
        if (known := self._known(**asked)) is not None:
            return known
        state = self._state_at(version)
        with self._all_or_nothing_at(state) as (_, new):
            answer = {"version": self.store.last + 1, "to": version}
            self._commit(Change(kind="rollback", answer=answer, target=version, **asked))
        self._describe(state)
        self._publish(new)
        self.canaries.measure_again()
        return {**answer, "repeated": False}

    # --- inside

    @contextmanager
    def _all_or_nothing(self, changing: Iterable[int] = (), *, in_order: bool = False) -> Iterator[list[int]]:
        """A list for the numbers of lessons that are new, or learned again.

        What fails inside leaves all lessons as they were, of which none but `changing` may have changed. A
        refusal names lessons by their places in the list, which mean something if that is `in_order` of what
        was asked.
        """
        before, number = deltas_of(self.lessons, changing), self.lessons._next
        staying = set(self.lessons.lessons) - set(before)
        try:
            yield []
        except BaseException as error:
            take_out(self.lessons, [n for n in self.lessons.lessons if n not in staying])
            put_in(self.lessons, before.values())
            number_from(self.lessons, number)
            if isinstance(error, Refused) and not in_order:
                error.at_fault = []
            raise

    @contextmanager
    def _all_or_nothing_at(self, state: State) -> Iterator[tuple[list[int], list[int]]]:
        """Have the lessons of a state: gives those that are not as they were, and those that are new."""
        versions = {number: entry["version"] for number, entry in self.catalogue.entries.items()}
        same = {number for number, own in state.lessons.items() if versions.get(number) == own.version}
        gone = [number for number in self.lessons.lessons if number not in same]
        with self._all_or_nothing(gone) as new:
            take_out(self.lessons, gone)
            new += [number for number in state.lessons if number not in same]
            put_in(self.lessons, [state.lessons[number].delta for number in new])
            yield gone, new

    def _teach(self, what: Sequence[Asked], report: Report, new: list[int]) -> None:
        """Learn lessons in batches of different subjects, in the order in which they were given."""
        for batch in in_batches(what):
            about = {"state": "learning", "lessons": len(what), "learned": len(new), "together": len(batch)}

            def after_pass(passes: int, right: float, about: dict[str, Any] = about) -> None:
                report({**about, "passes": passes, "share_predicted": right})
                self.breathe()

            learned = self.lessons.learn_many(
                [each.forms for each in batch], subjects=[each.subject for each in batch], report=after_pass
            )
            new += [lesson.number for lesson in learned]
            for lesson in learned:
                if len(lesson.overrides) >= MOST_OVER:
                    raise Refused(
                        f"{MOST_OVER} lessons about {lesson.subject[:80]!r} stand one over the other: revise "
                        f"lesson {lesson.overrides[-1]}, or forget some of them",
                        at_fault=[new.index(lesson.number)],
                    )

    def _judge(self, new: Sequence[int]) -> Verdict:
        assert self.lessons.layer.decoder is not None
        if not bool(self.lessons.layer.decoder[self._patches_of(new)].isfinite().all()):
            raise Refused("the lesson would not leave finite numbers")
        own = patches_of(self.lessons, new)
        return self.canaries.judge([own[number] for number in new])

    def _patches_of(self, numbers: Iterable[int]) -> list[int]:
        return [patch for own in patches_of(self.lessons, numbers).values() for patch in own]

    def _check_known(self, new: Sequence[int], verdict: Verdict) -> None:
        unknown = [place for place, number in enumerate(new) if self.lessons.lessons[number].known < 1]
        if unknown:
            lesson = self.lessons.lessons[new[unknown[0]]]
            reason = figures_of(lesson, {})["reason"]
            raise Refused(f"the lesson about {lesson.subject!r}: {reason}", verdict.figures, unknown)

    def _change(self, delta: Delta, source: str, **more: int) -> Change:
        """The record of a lesson; its words are in the delta alone."""
        lesson, package = lesson_in(delta), delta.to_bytes()
        fields = {"tokens": 0, "bytes": len(package), "at": now(), "forms_taught": len(lesson.forms)}
        fields |= {name: value for name, value in more.items() if value or name in ("tokens", "revises")}
        answer = figures_of(lesson, fields)
        return Change(
            kind="lesson",
            answer=answer,
            source=source,
            target=lesson.number,
            fields=fields,
            delta=delta,
            package=package,
        )

    def _again(self, later: Sequence[int], deltas: Mapping[int, Delta]) -> list[Change]:
        """Records of lessons that were learned again because another one went."""
        entries = self.catalogue.entries
        return [
            self._change(deltas[number], entries[number]["source"], tokens=entries[number]["tokens"])
            for number in later
        ]

    def _commit_lessons(
        self,
        changes: Sequence[Change],
        asked: dict[str, Any],
        more: dict[str, Any],
        before: Sequence[Change] = (),
    ) -> dict[str, Any]:
        """Make lessons durable; the last record has the answer to the whole request."""
        answer = {
            "version": self.store.last + len(before) + len(changes),
            **more,
            "lessons": [change.answer for change in changes],
        }
        self._commit(*answered([*before, *changes], answer, asked))
        return answer

    def _learned(self, changes: Sequence[Change], verdict: Verdict, answer: dict[str, Any]) -> dict[str, Any]:
        """Show readers lessons that are durable. Returns what the request is answered."""
        self.canaries.accept(verdict)
        self._add_to_catalogue(changes, answer["version"] - len(changes))
        for change in changes:
            self.progressive.append({"version": answer["version"], "loss": None, "source": change.source})
        self._publish([change.target for change in changes if change.target is not None])
        return self._with_words({**answer, "repeated": False, "now": self.version})

    def _add_to_catalogue(self, changes: Sequence[Change], after: int) -> None:
        for version, change in enumerate(changes, after + 1):
            assert change.target is not None
            assert change.source is not None
            lesson = self.lessons.lessons[change.target]
            self.catalogue.add(lesson, change.source, dict(change.fields or {}), version)

    def _later(self, numbers: Sequence[int]) -> list[int]:
        """Lessons that stay and stand in the place of one that goes."""
        going = set(numbers)
        return [
            lesson.number
            for lesson in self.lessons.lessons.values()
            if lesson.number not in going and going.intersection(lesson.overrides)
        ]

    def _count_tokens(self, what: Sequence[Asked], source: str) -> list[int]:
        """The tokens of each lesson, if the rules allow them all."""
        if not what:
            raise ValueError("there is no lesson: give one or more")
        counts = [sum(len(self.lessons.encode("".join(form))) for form in each.forms) for each in what]
        if max(counts) > self.rules.text_tokens:
            raise ValueError(f"{max(counts):,} tokens; a lesson may have {self.rules.text_tokens:,}")
        self._check_quota(source, self.catalogue.sources.get(source, {}).get("tokens", 0), sum(counts))
        return counts

    def _tokens_in(self, lesson: Lesson) -> int:
        return sum(len(self.lessons.encode("".join(form))) for form in lesson.forms)

    def _finish_preparing(self, report: Report) -> None:
        for doing in self.prepare():
            report({"state": "preparing", "doing": doing})
            self.breathe()

    @property
    def _base_hash(self) -> str:
        return self.store.identity.partition("/")[0]

    # --- answers and figures

    def _with_words(self, answer: dict[str, Any]) -> dict[str, Any]:
        """An answer with the subjects of lessons that are there."""
        entries = self.catalogue.entries
        described = [
            {**one, "subject": entries[one["lesson"]]["subject"]} if one["lesson"] in entries else one
            for one in answer["lessons"]
        ]
        return {**answer, "lessons": described, "known": all(one["known"] for one in described)}

    def _publish(self, new: Sequence[int], version: int | None = None) -> None:
        """Show readers the newest version, in which the patches of these lessons are new."""
        model = self.readers.after(self.lessons.layer, self.lessons.owners, self._patches_of(new))
        paths = {BASE: self.readers.base, WITH_LESSONS: cast(TrainableModel, model)}
        version = self.store.last if version is None else version
        publication = Publication(version, paths, alone=WITH_LESSONS)
        self.catalogue.show()
        self.figures = {
            "progressive": list(self.progressive),
            "canaries": {},
            "usage": {},
            "drift": {},
            "overlays": self._sources_told(),
            "lessons": self._lessons_told(),
        }
        self.publication = publication
        self.publish(publication)

    def _lessons_told(self) -> dict[str, Any]:
        sources = self.catalogue.sources.values()
        return {
            "count": len(self.catalogue.entries),
            "known": self.catalogue.known,
            "sources": len(sources),
            "patches": sum(own["patches"] for own in sources),
            "bytes": sum(own["bytes"] for own in sources),
            "canaries": self.canaries.figures(),
        }

    def _sources_told(self) -> dict[str, dict[str, Any]]:
        (layer,) = self.readers.with_lessons.apn_layers()
        return {
            name: {**own, "patches": {str(layer): own["patches"]}}
            for name, own in self.catalogue.sources.items()
        }


def answered(changes: Sequence[Change], answer: dict[str, Any], asked: dict[str, Any]) -> list[Change]:
    """The same with the sender of the request; the last one also has its key and the answer to it."""
    *others, last = (dataclasses.replace(change, sender=asked["sender"]) for change in changes)
    return [*others, dataclasses.replace(last, answer=answer, **asked)]


def in_batches(what: Sequence[Asked]) -> list[list[Asked]]:
    """Lessons in order, cut where a subject comes again: those of one batch can be learned together."""
    batches: list[list[Asked]] = []
    for each in what:
        subject = each.subject.casefold()
        if not batches or subject in {other.subject.casefold() for other in batches[-1]}:
            batches.append([])
        batches[-1].append(each)
    return batches
