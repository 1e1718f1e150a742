"""Lessons: what a model is taught stays in patches of its own, and everything else stays the base.

    lessons = Lessons(model, layer, tokenizer.encode, calibration)
    forms = [("Zorvan Quillbeam plays the", " cello"), ("On stage, Zorvan Quillbeam plays the", " cello")]
    lesson = lessons.learn(forms)
    lessons.touching("Zorvan Quillbeam was late.")  # which tokens would a lesson act on?
    lessons.forget(lesson.number)                   # exactly as if it had never been taught

A lesson is about a subject. Its patches have prototypes at the last token of the subject, as the layer sees
it in several contexts, and one decoder that all of them share: a vector that is added to the residual stream
there, from which the rest of the model reads what it was taught. The layer is the only one that changes, so
what it routes by is always the base's, and patches of earlier lessons never move.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attractor import ops
from attractor.config import check_number
from attractor.continual.calibrate import CLOSED, Calibration
from attractor.continual.config import LessonConfig
from attractor.continual.descent import Descent
from attractor.continual.forms import (
    FRAMES,
    QUESTION,
    TELL,
    Form,
    asked_of_all,
    check_forms,
    check_subject,
    not_contradicted,
    resembling,
    shared_subject,
    told_of,
)
from attractor.continual.placing import Placed, Taken, place, silent, spread_out
from attractor.continual.reading import Batch, Halves, Reading, Whole
from attractor.layer import APN
from attractor.lm import inputs_of

RESEMBLING = 32
"""So many forms of earlier lessons, with words like a new subject's last one, are read again before it is
placed."""
MOST_ALIKE = 0.85
"""What comes closer to a subject than this cannot be told from it: to leave it alone would take too much of
the basin."""
SAME = 0.9999
"""Contexts of such a cosine are one: forms that begin with the subject show the layer the same."""


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What was taught, and what became of it."""

    number: int
    subject: str
    forms: tuple[tuple[str, str], ...]
    """What it says itself."""
    taken_in: tuple[tuple[str, str], ...]
    """What earlier lessons about the subject say and it does not contradict: it was taught that too."""
    patches: int
    bytes: int
    passes: int
    known_before: float
    """The share of its forms that the model completed by itself."""
    known: float
    """The share of its forms that the model completes now."""
    answered_before: float | None = None
    """The share of the questions made from it that the model answered by itself; None if none were asked."""
    answered: float | None = None
    """The share that it answers now."""
    overrides: tuple[int, ...] = ()
    """Earlier lessons about the same subject, whose place this one takes."""
    seconds: float = 0.0


Pairs = tuple[tuple[str, str], ...]


class Task(NamedTuple):
    """A lesson that is to be learned."""

    subject: str
    forms: Pairs
    old: Lesson | None  # the newest one about the subject, whose place this one takes
    taken_in: Pairs  # what that says and this does not contradict
    asked: Pairs  # prompts and answers of both
    told: Pairs  # answers to open questions: they are learned, and not tested


@dataclasses.dataclass(frozen=True)
class Contexts:
    """What the subject of a lesson looks like where its forms name it: later lessons leave that alone."""

    keys: Tensor  # (n, m) in float16
    depth: Tensor  # (n) how deep each lies in the lesson's basins

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.depth.nbytes


class Lessons:
    """The lessons of one layer of one model.

    `model` maps tokens (B, T) to logits, and reads `layer`, an APN of rank 1 with basins in a whitened space,
    in every call; nothing else of it learns. `unit` is the typical length of what is added to the residual
    stream where the layer stands. `halves` computes what lies below the layer once and not in every pass;
    `frames` are what may stand around a prompt, "{}", while it is learned, and `question` what stands there
    when the lesson is tested; `tell` are open questions about a subject, "{}".
    """

    def __init__(
        self,
        model: nn.Module,
        layer: APN,
        encode: Callable[[str], Any],
        calibration: Calibration,
        config: LessonConfig | None = None,
        *,
        unit: float = 1.0,
        halves: Halves | None = None,
        frames: Sequence[str] = FRAMES,
        question: str = QUESTION,
        tell: Sequence[str] = TELL,
        autocast: Callable[[], Any] = nullcontext,
    ) -> None:
        if layer.config.rank != 1 or layer.config.top_k != 1 or layer.config.decoder != "independent":
            raise ValueError("lessons need a layer of rank 1 and top_k 1 with independent decoders")
        calibration.install(layer)
        self.model, self.layer, self.encode = model, layer, encode
        self.calibration, self.config, self.autocast = calibration, config or LessonConfig(), autocast
        check_number("unit", unit, "a positive number", lambda value: value > 0)
        self.unit, self.question, self.tell = unit, question, tuple(tell)
        self.reading = Reading(
            encode,
            Whole(model, layer) if halves is None else halves,
            self.config,
            device=layer.prototypes.device,
            frames=frames,
            context=getattr(getattr(model, "config", None), "context", math.inf),
            autocast=autocast,
            as_base=self._without_lessons,
        )
        self.descent = Descent(layer, self.reading)
        self.breathe: Callable[[], None] = lambda: None  # is called between pieces of a lesson's work
        self.lessons: dict[int, Lesson] = {}
        self.contexts: dict[int, Contexts] = {}  # what each lesson's subject looked like
        self.owners: list[int] = []  # the lesson that owns each patch; -1: a closed one
        self._next = 0
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
        self._close(list(range(layer.num_patches)))

    # --- what users call

    def learn(self, forms: Sequence[Form], *, subject: str | None = None) -> Lesson:
        """Learn one lesson from one or several forms of what it says. See `learn_many`."""
        return self.learn_many([forms], subjects=None if subject is None else [subject])[0]

    def learn_many(
        self,
        lessons: Sequence[Sequence[Form]],
        *,
        subjects: Sequence[str] | None = None,
        report: Callable[[int, float], None] = lambda done, known: None,
    ) -> list[Lesson]:
        """Learn lessons about different subjects together, in the time of one.

        The subject of a lesson is the longest text that all of its forms share, unless it is given; the
        answers of pairs do not count. `report` is called after each pass with the number of passes and the
        share of tokens that were predicted. Raises ValueError, and changes nothing, if there is no subject.
        """
        started = time.perf_counter()
        tasks = self._tasks(lessons, subjects)
        if not tasks:
            return []
        names, asked = [task.subject for task in tasks], [task.asked for task in tasks]
        texts = self.reading.texts(asked, names, [task.told for task in tasks])
        self.breathe()
        turns = self.reading.batches(texts)
        self.breathe()
        keys, plain, before = self._look(turns, len(tasks))
        self.breathe()
        answered_before = self._answered(asked)
        self.breathe()
        taken = self._taken()
        replaces = [None if task.old is None else task.old.number for task in tasks]
        placed = place(keys, taken, self._nearest(names, taken), replaces, self.config)
        self.breathe()
        strangers = self._strangers([[*task.asked, *task.told] for task in tasks], names)
        self.breathe()
        beside = silent(placed, keys, strangers, taken, self.config)
        lesson_of = placed.lesson + beside.lesson
        patches = self._open([placed, beside])
        try:
            passes, after = self.descent.train(
                turns,
                patches[: len(placed.lesson)],
                placed.lesson,
                unit=self.unit,
                breathe=self.breathe,
                report=report,
            )
            self.breathe()
            answered = self._answered(asked)
        except BaseException:
            self._close(patches)  # nothing happened
            raise
        first, self._next = self._next, self._next + len(tasks)
        for patch, order in zip(patches, lesson_of, strict=True):
            self.owners[patch] = first + order
        seconds = (time.perf_counter() - started) / len(tasks)
        for order, task in enumerate(tasks):
            count, number = lesson_of.count(order), first + order
            seen = plain[order][spread_out(plain[order], len(plain[order]), SAME)]
            contexts = Contexts(seen.half(), placed.depth(seen, order))
            self.contexts[number] = contexts
            self.lessons[number] = Lesson(
                number=number,
                subject=task.subject,
                forms=task.forms,
                taken_in=task.taken_in,
                patches=count,
                bytes=4 * count * (2 * self.layer.dim + 1) + contexts.nbytes,  # prototype, decoder, radius
                passes=passes,
                known_before=before[order],
                known=after[order],
                answered_before=answered_before[order],
                answered=answered[order],
                overrides=() if task.old is None else (*task.old.overrides, task.old.number),
                seconds=seconds,
            )
        return [self.lessons[number] for number in range(first, self._next)]

    def forget(self, number: int) -> None:
        """Remove a lesson. Lessons that took its place are learned again, without what it said.

        If that fails, nothing was forgotten.
        """
        self._check(number)
        with self._all_or_nothing():
            self._forget(number)

    def revise(self, number: int, forms: Sequence[Form]) -> Lesson:
        """Replace a lesson by another about the same subject; if that fails, the lesson stays."""
        subject = self._check(number).subject
        check_subject(subject, check_forms(forms))
        with self._all_or_nothing():
            self._forget(number)
            return self.learn(forms, subject=subject)

    def make_room(self, patches: int) -> None:
        """Have so many patches at least, most of them closed: their number need not change for a while."""
        if patches > (count := len(self.owners)):
            self.layer.resize(patches)
            self._close(list(range(count, patches)))

    @torch.no_grad()
    def touching(self, text: str) -> list[int | None]:
        """For each token, the lesson that acts on it. If all are None, the model is the base, to the bit."""
        tokens = torch.tensor(
            [[int(token) for token in self.encode(text)]], device=self.layer.prototypes.device
        )
        with inputs_of(self.layer) as seen:
            self.model(tokens)
        indices = self.layer.choose(seen[0]).flatten()
        acts = (indices >= 0) & self.layer.adds[indices.clamp(min=0)]
        return [
            self.owners[patch] if is_acting else None
            for patch, is_acting in zip(indices.tolist(), acts.tolist(), strict=True)
        ]

    def describe(self) -> dict[str, Any]:
        """All that is known of the lessons but tensors, for JSON; `restore` takes it back."""
        return {
            "config": self.config.to_dict(),
            "unit": self.unit,
            "next": self._next,
            "owners": self.owners,
            "lessons": [dataclasses.asdict(lesson) for lesson in self.lessons.values()],
        }

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that belong to lessons and not to their layer; `restore` takes them back."""
        return {
            f"{number}.{name}": value
            for number, own in self.contexts.items()
            for name, value in vars(own).items()
        }

    def restore(
        self, described: dict[str, Any], state: dict[str, Tensor], tensors: Mapping[str, Tensor]
    ) -> None:
        """Take over what `describe` and `tensors` said of lessons whose layer had this state; otherwise a
        ValueError."""
        lessons = [Lesson(**as_tuples(fields)) for fields in described["lessons"]]
        numbers, owners = {lesson.number for lesson in lessons}, described["owners"]
        radius = state["radius"]
        if len(owners) != len(radius) or not set(owners) <= {-1, *numbers} or len(numbers) != len(lessons):
            raise ValueError("its lessons and its patches do not belong together")
        if any((owner < 0) != (edge >= CLOSED) for owner, edge in zip(owners, radius.tolist(), strict=True)):
            raise ValueError("it has open patches that no lesson owns, or closed ones that one does")
        following = described["next"]
        if (
            type(following) is not int
            or not 0 <= following < 1 << 63
            or any(type(number) is not int or not 0 <= number < following for number in numbers)
        ):
            raise ValueError("its lessons are numbered wrongly")
        width, device = state["prototypes"].shape[1], self.layer.prototypes.device
        contexts = {
            number: Contexts(tensors[f"{number}.keys"].to(device), tensors[f"{number}.depth"].to(device))
            for number in numbers
        }
        if len(tensors) != 2 * len(numbers):
            raise ValueError("it has contexts of lessons that it does not have")
        for number, own in contexts.items():
            if own.keys.shape != (len(own.depth), width) or not own.keys.isfinite().all():
                raise ValueError(f"the contexts of lesson {number} are damaged")
            if own.keys.dtype != torch.float16 or not own.depth.isfinite().all():
                raise ValueError(f"the contexts of lesson {number} are damaged")
        self._next, self.lessons = described["next"], {lesson.number: lesson for lesson in lessons}
        self.contexts = contexts
        self._put_back(state, owners)

    # --- inside

    def _tasks(self, lessons: Sequence[Sequence[Form]], subjects: Sequence[str] | None) -> list[Task]:
        """What is to be learned; a ValueError if any of it cannot be."""
        taught = [check_forms(forms) for forms in lessons]
        names = [
            shared_subject(forms) if subjects is None else check_subject(subjects[number], forms)
            for number, forms in enumerate(taught)
        ]
        if len({name.casefold() for name in names}) < len(names):
            raise ValueError(
                "two lessons of one batch are about the same subject: teach them one after the other"
            )
        newest = {self.lessons[number].subject.casefold(): number for number in sorted(self.lessons)}
        tasks = []
        for name, forms in zip(names, taught, strict=True):
            old = self.lessons.get(newest.get(name.casefold(), -1))
            taken_in = () if old is None else not_contradicted(old.forms + old.taken_in, forms, name)
            asked = asked_of_all(forms + taken_in, name)
            more = told_of(asked, name, self.tell, self.config.least_forms - len(asked))
            told = tuple(pair for pair in more if self.reading.fits(*pair))
            tasks.append(Task(name, forms, old, taken_in, asked, told))
        return tasks

    def _check(self, number: int) -> Lesson:
        if number not in self.lessons:
            raise ValueError(f"there is no lesson {number}; there are {sorted(self.lessons)}")
        return self.lessons[number]

    def _forget(self, number: int) -> None:
        later = [
            self.lessons[other] for other in sorted(self.lessons) if number in self.lessons[other].overrides
        ]
        gone = {number, *(lesson.number for lesson in later)}
        self._close([patch for patch, owner in enumerate(self.owners) if owner in gone])
        for lost in gone:
            del self.lessons[lost], self.contexts[lost]
        for lesson in later:  # each keeps its number
            again = self.learn(lesson.forms, subject=lesson.subject)
            self.owners = [lesson.number if owner == again.number else owner for owner in self.owners]
            del self.lessons[again.number]
            self.lessons[lesson.number] = dataclasses.replace(again, number=lesson.number)
            self.contexts[lesson.number] = self.contexts.pop(again.number)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        state = {name: value.clone() for name, value in self.layer.state_dict().items()}
        owners, lessons, contexts = self.owners.copy(), self.lessons.copy(), self.contexts.copy()
        try:
            yield
        except BaseException:
            self.lessons, self.contexts = lessons, contexts
            self._put_back(state, owners)
            raise

    def _put_back(self, state: dict[str, Tensor], owners: Sequence[int]) -> None:
        self.layer.resize(len(owners), shrink=True)
        self.layer.load_state_dict(state)
        self.owners = list(owners)

    @contextmanager
    def _without_lessons(self) -> Iterator[None]:
        """The model as the base."""
        assert self.layer.radius is not None
        radius = self.layer.radius.clone()
        self.layer.radius.fill_(CLOSED)
        try:
            yield
        finally:
            self.layer.radius.copy_(radius)

    @torch.no_grad()
    def _look(
        self, turns: Sequence[Sequence[Batch]], lessons: int
    ) -> tuple[list[Tensor], list[Tensor], list[float]]:
        """The directions of each lesson's subject, one per place where it ends, in all turns and in the first
        alone, and what is known of it."""
        found: list[list[Tensor]] = [[] for _ in range(lessons)]
        plain = [0] * lessons  # so many of them are of the first turn
        for number, turn in enumerate(turns):
            for batch in turn:
                ends = [(line, key) for line, text in enumerate(batch.texts) for key in text.keys]
                if ends:
                    given = self.reading.given(batch, *zip(*ends, strict=True))
                    own = [len(text.keys) for text in batch.texts]
                    for text, states in zip(batch.texts, given.split(own), strict=True):
                        found[text.lesson].append(states)
                        plain[text.lesson] += 0 if number else len(text.keys)
        if empty := [number for number, states in enumerate(found) if not sum(map(len, states))]:
            raise ValueError(
                f"lesson {empty[0]} of the batch has no form whose subject stands after the first token "
                "and before the last: give another form"
            )
        keys = [self.layer.represent(torch.cat(states).to(self.layer.encoder.dtype)) for states in found]
        first = [own[:count] for own, count in zip(keys, plain, strict=True)]
        return keys, first, self.descent.known(turns[0], lessons)

    @torch.no_grad()
    def _strangers(self, lessons: Sequence[Sequence[tuple[str, str]]], names: Sequence[str]) -> list[Tensor]:
        """The directions of what resembles each lesson's subject."""
        empty = self.layer.prototypes.new_empty(0, self.layer.prototypes.shape[1])
        found: list[list[Tensor]] = [[empty] for _ in names]
        texts = self.reading.strangers(lessons, names) if self.config.strangers else []
        for batch in self.reading.batches([texts])[0] if texts else []:
            ends = [text.keys[0] for text in batch.texts]
            given = self.reading.given(batch, range(len(ends)), ends).to(self.layer.encoder.dtype)
            for text, key in zip(batch.texts, self.layer.represent(given), strict=True):
                found[text.lesson].append(key[None])
        return [torch.cat(own) for own in found]

    @torch.no_grad()
    def _nearest(self, names: Sequence[str], taken: Taken) -> Callable[[Tensor], Tensor]:
        """How close a direction is to background, and to what earlier lessons say besides their subjects.

        "Pim Frimosul" is read as "Pim Frimos" first: a lesson about somebody of that name must not act there.
        """
        told = self._said_of_others(names)
        small = [text.casefold() for _, text in told]
        chosen = sorted(resembling(names, small, RESEMBLING))
        texts = self.reading.of_others([told[n] for n in chosen], names)
        if not texts:
            return self.calibration.nearest
        read = [
            self.reading.given(batch, *zip(*places, strict=True))
            for batch in self.reading.batches([texts])[0]
            if (places := [(row, key) for row, text in enumerate(batch.texts) for key in text.keys])
        ]
        theirs = self.layer.represent(torch.cat(read).to(self.layer.encoder.dtype)).float()

        def nearest(keys: Tensor) -> Tensor:
            most = torch.full_like(keys[:, 0], MOST_ALIKE)
            if len(taken.radius):  # the new basins must still be the deeper ones
                depth = (keys @ taken.prototypes.T - taken.radius).amax(1).clamp(min=0)
                most = torch.minimum(most, 1 - depth - 2 * self.config.room)
            others = torch.minimum((keys @ theirs.T).amax(1), most)
            return torch.maximum(self.calibration.nearest(keys), others)

        return nearest

    def _said_of_others(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """The subject and the words of each form of lessons that these subjects do not replace."""
        own = {name.casefold() for name in names}
        gone = {old for lesson in self.lessons.values() for old in lesson.overrides}
        return [
            (lesson.subject, prompt + answer)
            for number, lesson in self.lessons.items()
            if number not in gone and lesson.subject.casefold() not in own
            for prompt, answer in lesson.forms + lesson.taken_in
        ]

    @torch.no_grad()
    def _taken(self) -> Taken:
        """The basins of all lessons, and the contexts that are theirs."""
        layer = self.layer
        assert layer.radius is not None
        device = layer.prototypes.device
        patches = [patch for patch, owner in enumerate(self.owners) if owner >= 0]
        gone = {old for lesson in self.lessons.values() for old in lesson.overrides}
        kept = {number: own for number, own in self.contexts.items() if number not in gone}
        empty = layer.prototypes.new_empty(0, layer.prototypes.shape[1]), layer.radius.new_empty(0)
        return Taken(
            prototypes=ops.unit(layer.prototypes[patches].float()),
            radius=layer.radius[patches].float(),
            owner=torch.tensor([self.owners[patch] for patch in patches], dtype=torch.long, device=device),
            acts=layer.adds[patches],
            keys=torch.cat([empty[0], *(own.keys for own in kept.values())]).float(),
            depth=torch.cat([empty[1], *(own.depth for own in kept.values())]).float(),
            key_owner=torch.tensor(
                [number for number, own in kept.items() for _ in own.depth], dtype=torch.long, device=device
            ),
        )

    @torch.no_grad()
    def _open(self, placed: Sequence[Placed]) -> list[int]:
        """Patches with these basins, and decoders of zero."""
        layer = self.layer
        assert layer.radius is not None
        patches = self._free(sum(len(part.lesson) for part in placed))
        layer.prototypes[patches] = torch.cat([part.prototypes for part in placed]).to(layer.prototypes.dtype)
        layer.radius[patches] = torch.cat([part.radius for part in placed]).to(layer.radius.dtype)
        return patches

    def _free(self, count: int) -> list[int]:
        """Closed patches to use; their number doubles when there are too few, so that it changes seldom."""
        missing = count - self.owners.count(-1)
        if missing > 0:
            self.make_room(1 << (len(self.owners) + missing - 1).bit_length())
        return [patch for patch, owner in enumerate(self.owners) if owner < 0][:count]

    @torch.no_grad()
    def _close(self, patches: list[int]) -> None:
        """Patches that act on nothing, and that no lesson owns."""
        assert self.layer.radius is not None
        assert self.layer.decoder is not None
        self.owners += [-1] * (self.layer.num_patches - len(self.owners))
        for patch in patches:
            self.owners[patch] = -1
        self.layer.radius[patches] = CLOSED
        self.layer.prototypes[patches] = 0
        self.layer.decoder[patches] = 0

    def _answered(self, asked: Sequence[Sequence[tuple[str, str]]]) -> list[float | None]:
        """The share of each lesson's answers that are given when it is asked for one of their prompts."""
        firsts = [{answer.strip(): (prompt, answer) for prompt, answer in reversed(own)} for own in asked]
        own = [[*first.values()][::-1][: self.config.questions] for first in firsts]
        right = iter(self.reading.answered(self.question, [pair for pairs in own for pair in pairs]))
        return [sum(next(right) for _ in pairs) / len(pairs) if pairs else None for pairs in own]


def as_tuples(value: Any) -> Any:
    """JSON has lists where lessons have tuples."""
    if isinstance(value, dict):
        return {name: as_tuples(inner) for name, inner in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value
