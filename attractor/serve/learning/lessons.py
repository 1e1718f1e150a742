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
from collections import defaultdict, deque
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
from attractor.serve.learning.catalogue import (
    Asked,
    Catalogue,
    Said,
    figures_of,
    figures_of_none,
    pack,
    searched,
    unpack,
)
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


NOT_HERE = -1
"""The number of a lesson that was not taken over."""


class _TakenBack(Exception):
    """A lesson was learned for nothing."""

    def __init__(self, lesson: Lesson) -> None:
        super().__init__(lesson)
        self.lesson = lesson


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
            raise _TakenBack(self.lessons.learn(forms))

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
        require_known: bool = True,
        report: Report = lambda about: None,
        **_: Any,
    ) -> dict[str, Any]:
        """Learn lessons. Those about one subject are learned one after the other.

        What is not known afterwards is taken back, unless that may be. After an error there are none of them.
        """
        subjects = [each.subject for each in what]
        # a request that does not say it was always bound to its key like this
        may_be_unknown = False if require_known else "known or not"
        asked = self._asked(key, sender, "lesson", source, [list(each) for each in what], may_be_unknown)
        if (known := self._known(**asked)) is not None:
            return self._with_words(known, subjects)
        tokens = self._count_tokens(what, source)
        self._finish_preparing(report)
        with self._all_or_nothing(in_order=True) as new:
            learned = self._teach(what, report, new, require_known)
            kept = [place for place, lesson in enumerate(learned) if lesson.number in new]
            verdict = self._judge(new, kept)
            fields = [
                {"tokens": count, "left_out": each.left_out} for each, count in zip(what, tokens, strict=True)
            ]
            changes, told = self._told(learned, source, fields)
            more = {"source": source, "canaries": verdict.figures}
            answer = self._commit_lessons(changes, asked, more, told)
        return self._learned(changes, verdict, answer, subjects)

    def revise(
        self,
        number: int,
        said: Said,
        key: str | None = None,
        sender: str | None = None,
        *,
        require_known: bool = True,
        report: Report = lambda about: None,
    ) -> dict[str, Any]:
        """Another lesson about the same subject in the place of one.

        If that fails, or it is not known afterwards and has to be, the lesson stays.
        """
        may_be_unknown = [] if require_known else ["known or not"]
        asked = self._asked(key, sender, "revise", number, said, *may_be_unknown)
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
        fields = {"tokens": tokens, "revises": number}
        self._finish_preparing(report)
        later = self._later([number])
        try:
            with self._all_or_nothing([number, *later]) as new:
                lesson = self.lessons.revise(number, what.forms)
                if require_known and lesson.known < 1:
                    raise _TakenBack(lesson)
                new += [*later, lesson.number]
                verdict = self._judge(new)
                again = self._again(later, deltas_of(self.lessons, later))
                (change,), told = self._told([lesson], source, [fields])
                drop = Change(kind="drop", answer={}, source=source, target=number)
                more = {"source": source, "canaries": verdict.figures}
                changes, told = [*again, change], [*(other.answer for other in again), *told]
                answer = self._commit_lessons(changes, asked, more, told, before=[drop])
        except _TakenBack as unknown:
            verdict = self._judge([])
            _, told = self._told([unknown.lesson], source, [fields])
            answer = self._commit_lessons([], asked, {"source": source, "canaries": verdict.figures}, told)
            return self._learned([], verdict, answer)
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
        require_known: bool = True,
        report: Report = lambda about: None,
    ) -> dict[str, Any]:
        """Take over the lessons of a file, as they are where nothing is known of their subjects here.

        The others are learned again, from what they say, and so are all of them where background was measured
        on other text or another machine. What is not known is left out, unless that may be, and so is what a
        lesson here says already.
        """
        calibration, deltas = unpack(data, self._base_hash)
        may_be_unknown = [] if require_known else ["known or not"]
        asked = self._asked(key, sender, "import", source, hashlib.sha256(data).hexdigest(), *may_be_unknown)
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
        said = self._said()
        already = {n for n, each in what.items() if said[each.subject.casefold()].issuperset(each.forms)}
        what = {number: each for number, each in what.items() if number not in already}
        if what or not already:
            self._count_tokens(list(what.values()), source)
        is_same = calibration == self.calibration_hash
        as_they_are = {n for n, each in what.items() if is_same and each.subject.casefold() not in here}
        again = [each for number, each in what.items() if number not in as_they_are]
        unknown = {number for number in as_they_are if require_known and lessons[number].known < 1}
        self._finish_preparing(report)
        with self._all_or_nothing() as new:
            put_in = as_they_are - unknown
            self._put_in_anew([delta for delta in deltas if lesson_in(delta).number in put_in], new)
            learned = [
                *(self.lessons.lessons[number] for number in new),
                *(dataclasses.replace(lessons[number], number=NOT_HERE) for number in sorted(unknown)),
                *self._teach(again, report, new, require_known),
            ]
            verdict = self._judge(new)
            fields = [{"tokens": self._tokens_in(lesson)} for lesson in learned]
            changes, told = self._told(learned, source, fields)
            more = {
                "source": source,
                "canaries": verdict.figures,
                "learned_again": len(again),
                "already_taught": len(already),
            }
            answer = self._commit_lessons(changes, asked, more, told)
        return self._learned(changes, verdict, answer, [lesson.subject for lesson in learned])

    def _said(self) -> defaultdict[str, set[tuple[str, str]]]:
        """What the lessons say that stand here, by their subjects; of any other subject nothing is said."""
        entries = self.catalogue.entries
        replaced = {old for entry in entries.values() for old in entry["overrides"]}
        found: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
        for number in entries.keys() - replaced:
            lesson = self.lessons.lessons[number]
            found[lesson.subject.casefold()].update(lesson.forms + lesson.taken_in)
        return found

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
        refusal names lessons by their places, which mean something if they are learned `in_order` of what was
        asked.
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

    def _teach(
        self, what: Sequence[Asked], report: Report, new: list[int], require_known: bool
    ) -> list[Lesson]:
        """Learn lessons in batches of different subjects, in the order in which they were given.

        Those that stay are `new`. One that is not known has gone before the next batch is learned, where it
        has to be known.
        """
        found: list[Lesson] = []
        for batch in in_batches(what):
            before = len(found)
            about = {"state": "learning", "lessons": len(what), "learned": before, "together": len(batch)}

            def after_pass(passes: int, right: float, about: dict[str, Any] = about) -> None:
                report({**about, "passes": passes, "share_predicted": right})
                self.breathe()

            learned = self.lessons.learn_many(
                [each.forms for each in batch], subjects=[each.subject for each in batch], report=after_pass
            )
            found += learned
            unknown = [lesson.number for lesson in learned if require_known and lesson.known < 1]
            take_out(self.lessons, unknown)
            new += [lesson.number for lesson in learned if lesson.number not in unknown]
            for place, lesson in enumerate(learned, before):
                if lesson.number not in unknown and len(lesson.overrides) >= MOST_OVER:
                    raise Refused(
                        f"{MOST_OVER} lessons about {lesson.subject[:80]!r} stand one over the other: revise "
                        f"lesson {lesson.overrides[-1]}, or forget some of them",
                        at_fault=[place],
                    )
        return found

    def _judge(self, new: Sequence[int], places: Sequence[int] = ()) -> Verdict:
        """What new lessons do to the canaries; a refusal names them by their places in what was asked."""
        assert self.lessons.layer.decoder is not None
        if not new:
            return Verdict(self.canaries.figures(), {})
        if not bool(self.lessons.layer.decoder[self._patches_of(new)].isfinite().all()):
            raise Refused("the lesson would not leave finite numbers")
        own = patches_of(self.lessons, new)
        try:
            return self.canaries.judge([own[number] for number in new])
        except Refused as error:
            error.at_fault = [places[n] for n in error.at_fault] if places else []
            raise

    def _patches_of(self, numbers: Iterable[int]) -> list[int]:
        return [patch for own in patches_of(self.lessons, numbers).values() for patch in own]

    def _told(
        self, learned: Sequence[Lesson], source: str, fields: Sequence[Mapping[str, int]]
    ) -> tuple[list[Change], list[Mapping[str, Any]]]:
        """The records of those lessons that stay, and what is told of each: no word of it."""
        deltas = deltas_of(
            self.lessons, [each.number for each in learned if each.number in self.lessons.lessons]
        )
        changes, told = list[Change](), list[Mapping[str, Any]]()
        for lesson, more in zip(learned, fields, strict=True):
            if lesson.number in deltas:
                changes.append(self._change(deltas[lesson.number], source, **more))
                told.append(changes[-1].answer)
            else:
                told.append(figures_of_none(lesson, fields_of(lesson, 0, **more)))
        return changes, told

    def _change(self, delta: Delta, source: str, **more: int) -> Change:
        """The record of a lesson; its words are in the delta alone."""
        lesson, package = lesson_in(delta), delta.to_bytes()
        fields = fields_of(lesson, len(package), **more)
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
        told: Sequence[Mapping[str, Any]],
        before: Sequence[Change] = (),
    ) -> dict[str, Any]:
        """Make lessons durable; the last record has the answer to the whole request, for its key.

        Where nothing was kept there is a record for a key alone, and otherwise none.
        """
        records = [*before, *changes]
        if not records and asked["key"] is not None:
            records = [Change(kind="nothing", answer={}, source=more["source"])]
        answer = {"version": self.store.last + len(records), **more, "lessons": list(told)}
        if records:
            self._commit(*answered(records, answer, asked))
        return answer

    def _learned(
        self,
        changes: Sequence[Change],
        verdict: Verdict,
        answer: dict[str, Any],
        subjects: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Show readers lessons that are durable. Returns what the request is answered."""
        number_from(self.lessons, self.store.next_lesson)  # one that was taken back had none
        self.canaries.accept(verdict)
        self._add_to_catalogue(changes, answer["version"] - len(changes))
        for change in changes:
            self.progressive.append({"version": answer["version"], "loss": None, "source": change.source})
        if not self.is_current:
            self._publish([change.target for change in changes if change.target is not None])
        return self._with_words({**answer, "repeated": False, "now": self.version}, subjects)

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

    def _with_words(self, answer: dict[str, Any], subjects: Sequence[str] | None = None) -> dict[str, Any]:
        """An answer with the subjects of its lessons: as they were asked for, or of those that are there.

        An answer that is given again also has to say which of its lessons are still there.
        """
        described = []
        for place, one in enumerate(answer["lessons"]):
            entry = self.catalogue.entries.get(one.get("revises") if one["lesson"] is None else one["lesson"])
            subject = subjects[place] if subjects else entry and entry["subject"]
            told = {"kept": one["lesson"] is not None, "stands": one["lesson"] in self.catalogue.entries}
            described.append({**one, **told, **({"subject": subject} if subject else {})})
        said = {name: all(one[name] for one in described) for name in ("known", "kept")}
        return {**answer, "lessons": described, **said}

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


def fields_of(lesson: Lesson, size: int, **more: int) -> dict[str, Any]:
    """What the record of a lesson adds to its figures; `size` is that of its delta."""
    fields = {"tokens": 0, "bytes": size, "at": now(), "forms_taught": len(lesson.forms)}
    return fields | {name: value for name, value in more.items() if value or name in ("tokens", "revises")}


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
