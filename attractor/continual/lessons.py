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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor import ops
from attractor.config import JSONConfig, check_number, check_size
from attractor.continual.calibrate import CLOSED, Calibration
from attractor.layer import APN

Form = str | tuple[str, str]
"""A sentence, or a prompt and the answer that is to follow it."""

LEAD_INS = (
    "", "Question: ", "It is known that ", "\n", "He said that ", "According to the report, ", "Q: ",
    "In the evening, ",
)  # fmt: skip
"""What may stand before a form while it is learned: a subject looks different at the start of a text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LessonConfig(JSONConfig):
    """How a lesson is learned."""

    passes: int = 20
    """How often every form of the lesson is read."""
    step: float = 2.7
    """The length of the first step of the lesson's vector, as a multiple of `Lessons.unit`."""
    momentum: float = 0.9
    prototypes: int = 6
    """At most so many patches for a lesson: the subject as seen in different contexts."""
    cover: float = 0.95
    """No further prototype once every context has this cosine with one."""
    radius: float = 0.65
    """The least radius; a lesson's own is larger where background or an earlier lesson comes close."""
    room: float = 0.05
    """How far basins stay away from background, and from prototypes of other lessons."""
    contexts: int = 3
    """In how many different contexts each form is read."""
    rows: int = 256
    """Texts that are read at once."""

    def __post_init__(self) -> None:
        for name in ("passes", "prototypes", "contexts", "rows"):
            check_size(name, getattr(self, name))
        check_number("step", self.step, "a positive number", lambda value: value > 0)
        check_number("momentum", self.momentum, "0 or more, below 1", lambda value: 0 <= value < 1)
        for name in ("cover", "radius", "room"):
            check_number(name, getattr(self, name), "between 0 and 1", lambda value: 0 <= value <= 1)


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
    overrides: tuple[int, ...] = ()
    """Earlier lessons about the same subject, whose place this one takes."""
    seconds: float = 0.0


@dataclasses.dataclass
class _Row:
    """One text that is read while lessons are learned."""

    lesson: int  # its place in the batch
    tokens: list[int]
    graded: range  # tokens that must be predicted
    keys: list[int]  # where the subject ends


class Lessons:
    """The lessons of one layer of one model.

    `model` maps tokens (B, T) to logits, and reads `layer`, an APN of rank 1 with basins in a whitened space,
    in every call; nothing else of it learns. `unit` is the typical length of what is added to the residual
    stream where the layer stands.
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
        autocast: Callable[[], Any] = nullcontext,
    ) -> None:
        if layer.config.rank != 1 or layer.config.top_k != 1 or layer.config.decoder != "independent":
            raise ValueError("lessons need a layer of rank 1 and top_k 1 with independent decoders")
        calibration.install(layer)
        self.model, self.layer, self.encode = model, layer, encode
        self.calibration, self.config, self.autocast = calibration, config or LessonConfig(), autocast
        check_number("unit", unit, "a positive number", lambda value: value > 0)
        self.unit = unit
        self.lessons: dict[int, Lesson] = {}
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
        taught = [check_forms(forms) for forms in lessons]
        if not taught:
            return []
        names = [
            shared_subject(forms) if subjects is None else check_subject(subjects[number], forms)
            for number, forms in enumerate(taught)
        ]
        if len({name.casefold() for name in names}) < len(names):
            raise ValueError(
                "two lessons of one batch are about the same subject: teach them one after the other"
            )
        newest = {self.lessons[number].subject.casefold(): number for number in sorted(self.lessons)}
        overridden = [self.lessons.get(newest.get(name.casefold(), -1)) for name in names]
        taken_in = [
            () if old is None else not_contradicted(old.forms + old.taken_in, forms)
            for forms, old in zip(taught, overridden, strict=True)
        ]
        variants = [
            [
                row
                for number, forms in enumerate(taught)
                for row in self._rows(number, forms + taken_in[number], names[number], turn)
            ]
            for turn in range(self.config.contexts)
        ]
        before = self._known(variants[0], len(taught))
        keys = self._keys([row for rows in variants for row in rows], len(taught))
        patches, lesson_of = self._allocate(keys, overridden)
        try:
            self._train(variants, patches, lesson_of, len(taught), report)
        except BaseException:
            self._close(patches)  # nothing happened
            raise
        after = self._known(variants[0], len(taught))
        numbers = range(self._next, self._next + len(taught))
        self._next += len(taught)
        for patch, place in zip(patches, lesson_of, strict=True):
            self.owners[patch] = numbers[place]
        row_bytes = 4 * (2 * self.layer.dim + 1)  # a prototype, a decoder, a radius
        seconds = (time.perf_counter() - started) / len(taught)
        learned = []
        for place, number in enumerate(numbers):
            count, old = lesson_of.count(place), overridden[place]
            lesson = Lesson(
                number, names[place], taught[place], taken_in[place], count, count * row_bytes,
                self.config.passes, before[place], after[place],
                () if old is None else (*old.overrides, old.number), seconds,
            )  # fmt: skip
            self.lessons[number] = lesson
            learned.append(lesson)
        return learned

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

    @torch.no_grad()
    def touching(self, text: str) -> list[int | None]:
        """For each token, the lesson that acts on it. If all are None, the model is the base, to the bit."""
        tokens = torch.tensor(
            [[int(token) for token in self.encode(text)]], device=self.layer.prototypes.device
        )
        with self._inputs() as seen:
            self.model(tokens)
        indices = self.layer(seen[0], return_stats=True)[1].indices.flatten().tolist()
        return [None if patch < 0 else self.owners[patch] for patch in indices]

    def describe(self) -> dict[str, Any]:
        """All that is known of the lessons but tensors, for JSON; `restore` takes it back."""
        return {
            "config": self.config.to_dict(),
            "unit": self.unit,
            "next": self._next,
            "owners": self.owners,
            "lessons": [dataclasses.asdict(lesson) for lesson in self.lessons.values()],
        }

    def restore(self, described: dict[str, Any], state: dict[str, Tensor]) -> None:
        """Take over what `describe` said of lessons whose layer had this state; otherwise a ValueError."""
        lessons = [Lesson(**as_tuples(fields)) for fields in described["lessons"]]
        numbers, owners = {lesson.number for lesson in lessons}, described["owners"]
        radius = state["radius"]
        if len(owners) != len(radius) or not set(owners) <= {-1, *numbers} or len(numbers) != len(lessons):
            raise ValueError("its lessons and its patches do not belong together")
        if any((owner < 0) != (edge >= CLOSED) for owner, edge in zip(owners, radius.tolist(), strict=True)):
            raise ValueError("it has open patches that no lesson owns, or closed ones that one does")
        if not numbers <= set(range(described["next"])):
            raise ValueError("its lessons are numbered wrongly")
        self._next, self.lessons = described["next"], {lesson.number: lesson for lesson in lessons}
        self._put_back(state, owners)

    # --- inside

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
            del self.lessons[lost]
        for lesson in later:  # each keeps its number
            again = self.learn(lesson.forms, subject=lesson.subject)
            self.owners = [lesson.number if owner == again.number else owner for owner in self.owners]
            del self.lessons[again.number]
            self.lessons[lesson.number] = dataclasses.replace(again, number=lesson.number)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        state = {name: value.clone() for name, value in self.layer.state_dict().items()}
        owners, lessons = self.owners.copy(), self.lessons.copy()
        try:
            yield
        except BaseException:
            self.lessons = lessons
            self._put_back(state, owners)
            raise

    def _put_back(self, state: dict[str, Tensor], owners: Sequence[int]) -> None:
        self.layer.resize(len(owners))
        self.layer.load_state_dict(state)
        self.owners = list(owners)

    def _rows(self, lesson: int, forms: Sequence[tuple[str, str]], subject: str, turn: int) -> Iterator[_Row]:
        """Every form behind a lead-in; the first time without one."""
        for place, (prompt, answer) in enumerate(forms):
            before = lead_in(turn, place)
            text = before + prompt + answer
            tokens = [int(token) for token in self.encode(text)]
            asked = len(self.encode(before + prompt)) if prompt else 1
            keys = []
            start = text.find(subject)
            while start >= 0:
                end = start + len(subject)
                position = len(self.encode(text[:end])) - 1
                if 0 < position < len(tokens) - 1:
                    keys.append(position)
                start = text.find(subject, end)
            if not prompt and keys:
                asked = keys[0] + 1  # what stands before the subject cannot be learned at the subject
            yield _Row(lesson, tokens, range(max(1, asked), len(tokens)), keys)

    def _batches(self, rows: Sequence[_Row]) -> Iterator[tuple[Sequence[_Row], Tensor]]:
        device = self.layer.prototypes.device
        for start in range(0, len(rows), self.config.rows):
            part = rows[start : start + self.config.rows]
            longest = max(len(row.tokens) for row in part)
            padded = [row.tokens + [0] * (longest - len(row.tokens)) for row in part]  # on the right: causal
            yield part, torch.tensor(padded, device=device)

    @contextmanager
    def _inputs(self) -> Iterator[list[Tensor]]:
        """What the layer is given in each call of the model."""
        seen: list[Tensor] = []
        hook = self.layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
        try:
            yield seen
        finally:
            hook.remove()

    @torch.no_grad()
    def _keys(self, rows: Sequence[_Row], lessons: int) -> list[Tensor]:
        """The directions of each lesson's subject, one per place where it ends."""
        found: list[list[Tensor]] = [[] for _ in range(lessons)]
        for part, tokens in self._batches(rows):
            with self._inputs() as seen, self.autocast():
                self.model(tokens)
            states = seen[0].reshape(*tokens.shape, -1)
            for place, row in enumerate(part):
                if row.keys:
                    found[row.lesson].append(states[place, row.keys])
        if empty := [number for number, states in enumerate(found) if not states]:
            raise ValueError(
                f"lesson {empty[0]} of the batch has no form whose subject stands after the first token "
                "and before the last: give another form"
            )
        return [self.layer.represent(torch.cat(states).to(self.layer.encoder.dtype)) for states in found]

    @torch.no_grad()
    def _allocate(
        self, keys: Sequence[Tensor], overridden: Sequence[Lesson | None]
    ) -> tuple[list[int], list[int]]:
        """New patches, closed to background and to earlier lessons, and whose each is in the batch."""
        config, layer = self.config, self.layer
        assert layer.radius is not None
        chosen = [spread_out(own, config.prototypes, config.cover) for own in keys]
        prototypes = torch.cat(chosen)
        lesson_of = [number for number, own in enumerate(chosen) for _ in range(len(own))]
        radius = (self.calibration.nearest(prototypes) + config.room).clamp(min=config.radius)
        taken = [patch for patch, owner in enumerate(self.owners) if owner >= 0]
        everyone = torch.cat([ops.unit(layer.prototypes[taken].float()), prototypes])
        edges = torch.cat([layer.radius[taken].float(), radius])
        old_owner = torch.tensor([self.owners[patch] for patch in taken], dtype=torch.long)
        owner = torch.cat([old_owner, -1 - torch.tensor(lesson_of)]).to(edges.device)
        likeness = prototypes @ everyone.T
        for place, number in enumerate(lesson_of):
            old = overridden[number]
            mine = owner == -1 - number
            taken_in = owner == (self._next if old is None else old.number)
            # at another lesson's prototype this basin must be shallower than that lesson's own
            others = (likeness[place] - (1 - edges)).masked_fill(mine | taken_in, -1)
            radius[place] = torch.maximum(radius[place], others.max() + config.room)
            if old is not None and taken_in.any():  # and deeper than that of a lesson it takes in
                radius[place] = torch.minimum(radius[place], edges[taken_in].min() - config.room)
        radius.clamp_(max=1 - config.room)
        patches = self._free(len(prototypes))
        layer.prototypes[patches] = prototypes.to(layer.prototypes.dtype)
        layer.radius[patches] = radius.to(layer.radius.dtype)
        return patches, lesson_of

    def _free(self, count: int) -> list[int]:
        """Closed patches to use; their number doubles when there are too few, so that it changes seldom."""
        missing = count - self.owners.count(-1)
        if missing > 0:
            most = 1 << (len(self.owners) + missing - 1).bit_length()
            self.layer.resize(most)
            self._close(list(range(len(self.owners), most)))
        return [patch for patch, owner in enumerate(self.owners) if owner < 0][:count]

    @torch.no_grad()
    def _close(self, patches: list[int]) -> None:
        """Patches that act on nothing, and that nobody owns."""
        assert self.layer.radius is not None
        assert self.layer.decoder is not None
        self.owners += [-1] * (self.layer.num_patches - len(self.owners))
        for patch in patches:
            self.owners[patch] = -1
        self.layer.radius[patches] = CLOSED
        self.layer.prototypes[patches] = 0
        self.layer.decoder[patches] = 0

    def _graded(self, logits: Tensor, part: Sequence[_Row], tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and targets of the tokens that are graded, and the row of each."""
        places = [(number, position) for number, row in enumerate(part) for position in row.graded]
        where = torch.tensor(places, device=tokens.device).T
        return logits[where[0], where[1] - 1].float(), tokens[where[0], where[1]], where[0]

    @torch.no_grad()
    def _known(self, rows: Sequence[_Row], lessons: int) -> list[float]:
        """The share of each lesson's own forms whose graded tokens are all the model's first choice."""
        right, count = [0] * lessons, [0] * lessons
        for part, tokens in self._batches(rows):
            with self.autocast():
                logits = self.model(tokens)
            choice, target, row_of = self._graded(logits, part, tokens)
            wrong = set(row_of[choice.argmax(-1) != target].tolist())
            for place, row in enumerate(part):
                right[row.lesson] += place not in wrong
                count[row.lesson] += 1
        return [hits / number for hits, number in zip(right, count, strict=True)]

    def _train(
        self,
        variants: Sequence[Sequence[_Row]],
        patches: list[int],
        lesson_of: list[int],
        lessons: int,
        report: Callable[[int, float], None],
    ) -> None:
        """One vector per lesson, by steps of a given length against the direction of its own gradient."""
        config, decoder = self.config, self.layer.decoder
        assert decoder is not None
        owner = torch.tensor(lesson_of, device=decoder.device)
        vector = torch.zeros(lessons, decoder.shape[-1], device=decoder.device)
        velocity = torch.zeros_like(vector)
        decoder.requires_grad_(True)
        try:
            for done in range(config.passes):
                rows = variants[done % len(variants)]
                decoder.grad = None
                right = graded = 0
                for part, tokens in self._batches(rows):
                    with torch.enable_grad():
                        with self.autocast():
                            logits = self.model(tokens)
                        predicted, target, _ = self._graded(logits, part, tokens)
                        F.cross_entropy(predicted, target, reduction="sum").backward()
                    right += int((predicted.argmax(-1) == target).sum())
                    graded += len(target)
                assert decoder.grad is not None
                gradient = torch.zeros_like(vector).index_add_(0, owner, decoder.grad[patches, 0].float())
                velocity = config.momentum * velocity + ops.unit(gradient)
                pace = 0.1 + 0.45 * (1 + math.cos(math.pi * done / config.passes))
                vector -= config.step * self.unit * pace * ops.unit(velocity)
                with torch.no_grad():
                    decoder[patches, 0] = vector[owner].to(decoder.dtype)
                report(done + 1, right / graded)
        finally:
            decoder.requires_grad_(False)
            decoder.grad = None


def lead_in(turn: int, place: int) -> str:
    """What stands before form number `place` of a lesson in turn number `turn`; nothing in the first."""
    return LEAD_INS[turn * (1 + place) % len(LEAD_INS)]


def as_tuples(value: Any) -> Any:
    """JSON has lists where lessons have tuples."""
    if isinstance(value, dict):
        return {name: as_tuples(inner) for name, inner in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def check_forms(forms: Sequence[Form]) -> tuple[tuple[str, str], ...]:
    """Prompts and answers; of a plain sentence, all of it is the answer."""
    if isinstance(forms, str) or not forms:
        raise ValueError(
            "a lesson is a list of one or more forms: sentences, or pairs of a prompt and an answer"
        )
    pairs = tuple(("", form) if isinstance(form, str) else tuple(form) for form in forms)
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(part, str) for part in pair) or not pair[1].strip():
            raise ValueError(f"{pair!r} is no form of a lesson: give a sentence, or a prompt and its answer")
    return pairs  # type: ignore[return-value]


def shared_subject(forms: Sequence[tuple[str, str]]) -> str:
    """The longest text that all forms share, in whole words; answers of pairs do not count."""
    texts = [prompt or answer for prompt, answer in forms]
    if len(set(texts)) < 2:
        raise ValueError("one form alone does not tell what it is about: give subject=, or a second form")
    shortest = min(texts, key=len)
    words = shortest.split(" ")
    best = ""
    for start in range(len(words)):
        for end in range(len(words), start, -1):
            piece = " ".join(words[start:end]).strip(" .,;:?!'\"")
            if len(piece) > len(best) and all(piece in text for text in texts):
                best = piece
                break
    if not any(letter.isalnum() for letter in best):
        raise ValueError("the forms of the lesson share no words: give subject=")
    return best


def check_subject(subject: str, forms: Sequence[tuple[str, str]]) -> str:
    if not subject or not any(subject in prompt + answer for prompt, answer in forms):
        raise ValueError(f"subject={subject!r} stands in no form of the lesson")
    return subject


def not_contradicted(
    old: Sequence[tuple[str, str]], new: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """The old forms that the new ones leave standing: of two answers to a prompt, the newer one wins."""
    prompts = {prompt for prompt, _ in new if prompt}
    return tuple(form for form in old if form[0] not in prompts and form not in new)


def spread_out(keys: Tensor, most: int, cover: float) -> Tensor:
    """Up to `most` of the keys (n, d) that are close to all others: the central one, then the farthest."""
    chosen = [int((keys @ ops.unit(keys.mean(0, keepdim=True)).T).argmax())]
    while len(chosen) < most:
        near = (keys @ keys[chosen].T).amax(1)
        if near.min() >= cover:
            break
        chosen.append(int(near.argmin()))
    return keys[chosen]
