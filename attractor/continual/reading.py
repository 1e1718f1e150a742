"""What is read while lessons are learned: every form in its frames, and what the base itself would write.

    reading = Reading(tokenizer.encode, halves, config)
    turns = reading.texts(lessons, subjects)  # for each turn, every form in a frame
    for batch in reading.batches(turns)[0]:
        logits = reading.predict(batch)       # of the tokens that are graded

Lessons and the controls of the study of facts read by it, so that both are taught the same.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor.continual.config import LessonConfig
from attractor.continual.forms import FRAMES, MENTIONS, STRANGERS, framed, places_of
from attractor.layer import APN
from attractor.lm import inputs_of

ROOM = 4
"""So many tokens longer than a prompt and its answer may a reply be that has to hold the answer."""
FEW = 64
"""So many tokens of padding cost less than a batch of its own."""


class Below(Protocol):
    """What the lower half of a model made of texts."""

    @property
    def are_woven(self) -> bool:
        """Whether texts of different lengths can be read at once at no cost: nothing is filled up."""


class Halves(Protocol):
    """A model in two halves, of which the lower one no lesson changes: see `attractor.hf.halves`."""

    repeats: bool
    """Whether passes have few sizes, so that a GPU can record them."""

    def below(self, texts: Sequence[list[int]]) -> Below:
        """What the lower half makes of texts."""

    def given(self, below: Any, texts: Tensor, positions: Tensor) -> Tensor:
        """What the layer is given at these places of the texts: (n, width)."""

    def after(self, below: Any, parts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Sequence[Any]:
        """For each part some of the texts, none of which changes before its token `first`."""

    def above(self, state: Any, texts: Tensor, positions: Tensor) -> Tensor:
        """The logits (n, vocabulary) after the tokens at these places, from what `after` returned."""

    def descent(
        self, state: Any, texts: Tensor, positions: Tensor, target_n: Tensor, weight_n: Tensor
    ) -> "Graded":
        """What one pass over these places says, and the gradient of the layer's decoder: see `descent`."""

    def write(self, texts: Sequence[list[int]], count: int) -> list[list[int]]:
        """The likeliest `count` tokens that the base would write after each of these texts."""

    def answer(self, texts: Sequence[list[int]], count: int) -> list[list[int]]:
        """The same with everything that the model was taught."""

    def similar(self, token: int, count: int) -> list[int]:
        """The tokens that the model takes for most alike with one; none if that is not known."""


class Graded(NamedTuple):
    """What a pass says of the tokens that are graded."""

    loss: Tensor  # (n)
    choice: Tensor  # (n) the likeliest token
    gradient: Tensor


def descent(predict: Callable[[], Tensor], target_n: Tensor, weight_n: Tensor, parameter: Tensor) -> Graded:
    """The loss of each token, the likeliest one, and the gradient of the sum of losses by a parameter."""
    with torch.enable_grad():
        predicted = predict().float()
        loss = F.cross_entropy(predicted, target_n, reduction="none")
        (gradient,) = torch.autograd.grad((loss * weight_n).sum(), parameter)
    return Graded(loss.detach(), predicted.detach().argmax(-1), gradient)


class Read(NamedTuple):
    """Texts of a model that is not cut in two."""

    texts: Sequence[list[int]]
    given: Tensor | None  # (texts, longest, width) to the layer
    are_woven: bool = False


class Whole:
    """A model that is not cut in two: everything is computed in every pass."""

    repeats = False

    def __init__(self, model: nn.Module, layer: nn.Module | None = None) -> None:
        self.model, self.layer = model, layer

    @torch.no_grad()
    def below(self, texts: Sequence[list[int]]) -> Read:
        if self.layer is None:
            return Read(texts, None)
        tokens = self._padded(texts)
        with inputs_of(self.layer) as seen:
            self.model(tokens)
        return Read(texts, seen[0].reshape(*tokens.shape, -1))

    def given(self, below: Read, texts: Tensor, positions: Tensor) -> Tensor:
        assert below.given is not None
        return below.given[texts, positions]

    def after(self, below: Read, parts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        return [self._padded([below.texts[n] for n in chosen]) for chosen, _ in parts]

    def above(self, state: Tensor, texts: Tensor, positions: Tensor) -> Tensor:
        return self.model(state)[texts, positions]

    def descent(
        self, state: Tensor, texts: Tensor, positions: Tensor, target_n: Tensor, weight_n: Tensor
    ) -> Graded:
        assert isinstance(self.layer, APN)
        assert self.layer.decoder is not None
        return descent(lambda: self.above(state, texts, positions), target_n, weight_n, self.layer.decoder)

    def _padded(self, texts: Sequence[list[int]]) -> Tensor:
        return padded(texts).to(next(self.model.parameters()).device)

    def write(self, texts: Sequence[list[int]], count: int) -> list[list[int]]:
        device = next(self.model.parameters()).device
        row = torch.arange(len(texts), device=device)
        written: list[list[int]] = [[] for _ in texts]
        for _ in range(count):
            longer = [text + more for text, more in zip(texts, written, strict=True)]
            last = torch.tensor([len(text) - 1 for text in longer], device=device)
            chosen = self.model(padded(longer).to(device))[row, last].argmax(-1)
            for more, token in zip(written, chosen.tolist(), strict=True):
                more.append(token)
        return written

    answer = write

    def similar(self, token: int, count: int) -> list[int]:
        return []


@dataclasses.dataclass
class Text:
    """One text that is read while lessons are learned."""

    lesson: int  # its place in the batch
    tokens: list[int]
    answer: range  # tokens that must be predicted; those after it are the base's own
    keys: list[int]  # where the subject ends
    repeated: int = 0  # so many tokens before the answer say the prompt again, and count as those after it
    is_test: bool = True  # whether completing it tells that the lesson is known


class Batch(NamedTuple):
    """Texts that are read at once, and what is graded in them."""

    texts: Sequence[Text]
    below: Any  # what the lower half of the model made of all texts, and
    numbers: list[int]  # which of them these are
    row_n: Tensor
    position_n: Tensor  # of the token before the one that is graded
    target_n: Tensor
    is_answer_n: Tensor  # otherwise it is one of the base's own
    lesson_n: Tensor
    state: Any = None  # what passes go on from, if that is computed already


def graded(texts: Sequence[Text]) -> list[tuple[int, int, int, bool, int]]:
    """Row, position before, token, whether it is of the answer, and lesson, of each token that is graded."""
    return [
        (row, place - 1, text.tokens[place], place in text.answer, text.lesson)
        for row, text in enumerate(texts)
        for place in range(text.answer.start - text.repeated, len(text.tokens))
    ]


def contains(tokens: Sequence[int], part: Sequence[int]) -> bool:
    """Whether some tokens stand in others, side by side."""
    return any(tokens[start : start + len(part)] == part for start in range(len(tokens) - len(part) + 1))


def variants(name: str) -> set[str]:
    """The same name, written in other ways."""
    return {name, name.lower(), name.upper(), name.capitalize()}


def padded(texts: Sequence[list[int]]) -> Tensor:
    """Tokens (texts, time), filled up on the right: what is read is causal."""
    longest = max(map(len, texts))
    return torch.tensor([text + [0] * (longest - len(text)) for text in texts])


class Reading:
    """Turns lessons into texts, texts into batches, and batches into predictions of what is graded.

    `frames` are what may stand around a prompt, "{}"; `context` is the longest text that the model reads;
    inside of `as_base` the model is the base, without what it was taught.
    """

    def __init__(
        self,
        encode: Callable[[str], Any],
        halves: Halves,
        config: LessonConfig,
        *,
        device: torch.device | str = "cpu",
        frames: Sequence[str] = FRAMES,
        context: float = math.inf,
        autocast: Callable[[], Any] = nullcontext,
        as_base: Callable[[], Any] = nullcontext,
    ) -> None:
        if not frames or frames[0] != "{}":
            raise ValueError('the first frame must be "{}": what is taught is tested as it was said')
        self.encode, self.halves, self.config, self.device = encode, halves, config, device
        self.frames, self.context = tuple(frames), context
        self.autocast, self.as_base = autocast, as_base

    def texts(
        self,
        lessons: Sequence[Sequence[tuple[str, str]]],
        subjects: Sequence[str],
        told: Sequence[Sequence[tuple[str, str]]] | None = None,
    ) -> list[list[Text]]:
        """What is read when these prompts and answers are learned: for each turn, every form in a frame.

        After its answer stands what the base would write there. Each turn also mentions every subject once.
        `told` are more prompts and answers of each lesson, which are learned and not tested.
        """
        tests = [len(forms) for forms in lessons]
        if told is not None:
            lessons = [(*forms, *more) for forms, more in zip(lessons, told, strict=True)]
        turns = [
            [
                text
                for number, (forms, name) in enumerate(zip(lessons, subjects, strict=True))
                for text in self._framed(number, forms, name, turn, tests[number])
            ]
            for turn in range(self.config.contexts)
        ]
        mentions = self._mentions(subjects)
        after, mention = self.config.after, self.config.mention
        more = self._continued(turns[0] + mentions, max(after, mention))
        for texts in turns:
            for text, own in zip(
                texts, more, strict=False
            ):  # hardly depends on the frame: found in the first
                text.tokens += own[:after]
        for text, own in zip(mentions, more[len(turns[0]) :], strict=True):
            text.tokens += own[:mention]
        for turn, texts in enumerate(turns):
            texts += mentions[turn * len(subjects) : (turn + 1) * len(subjects)]
        return turns

    @torch.no_grad()
    def batches(self, turns: Sequence[Sequence[Text]]) -> list[list[Batch]]:
        """The texts of each turn, so many at once as the configuration says; the lower half reads all now."""
        texts = [text for turn in turns for text in turn]
        with self.autocast():
            below = self.halves.below([text.tokens for text in texts])
        turns_of, start = [], 0
        for turn in turns:
            numbers = range(start, start := start + len(turn))
            turns_of.append([self._batch(texts, part, below) for part in self._parts(texts, numbers, below)])
        return turns_of

    def given(self, batch: Batch, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
        """What the layer that learns is given at these places of a batch: (n, width)."""
        texts = torch.tensor([batch.numbers[row] for row in rows], device=self.device)
        return self.halves.given(batch.below, texts, torch.tensor(positions, device=self.device))

    @torch.no_grad()
    def after(self, batches: Sequence[Batch], first: Sequence[Sequence[int]]) -> list[Batch]:
        """The batches for many passes, in none of which a text changes before its token `first`."""
        parts = [(batch.numbers, begin) for batch, begin in zip(batches, first, strict=True)]
        with self.autocast():
            states = self.halves.after(batches[0].below, parts)
        return [batch._replace(state=state) for batch, state in zip(batches, states, strict=True)]

    def predict(self, batch: Batch) -> Tensor:
        """Logits (n, vocabulary) of the tokens that are graded."""
        if batch.state is None:
            (batch,) = self.after([batch], [[0] * len(batch.texts)])
        with self.autocast():
            return self.halves.above(batch.state, batch.row_n, batch.position_n).float()

    def descent(self, batch: Batch) -> Graded:
        """What one pass over a batch says, and the gradient of the layer's decoder."""
        assert batch.state is not None
        with self.autocast():
            places = batch.row_n, batch.position_n
            return self.halves.descent(batch.state, *places, batch.target_n, self.weights(batch))

    def weights(self, batch: Batch) -> Tensor:
        """(n) what each graded token counts: 1 in an answer, less where it is the base's own."""
        return torch.where(batch.is_answer_n, 1.0, self.config.after_weight)

    def fits(self, prompt: str, answer: str) -> bool:
        """Whether the model's context holds this form in every frame."""
        longest = max(
            len(self._tokens(framed(prompt, turn, 0, self.frames)[0] + answer))
            for turn in range(len(self.frames))
        )
        return longest + self.config.after <= self.context

    def _framed(
        self, lesson: int, forms: Sequence[tuple[str, str]], subject: str, turn: int, tests: int
    ) -> Iterator[Text]:
        for place, (prompt, answer) in enumerate(forms):
            asked, again = self._asked(prompt, turn, place)
            text = asked + answer
            tokens = self._tokens(text)
            if len(tokens) + self.config.after > self.context:
                raise ValueError(
                    f"a form of {len(tokens)} tokens does not fit into the model's context of "
                    f"{self.context}: teach it in pieces"
                )
            first = len(self.encode(asked))
            repeated = first - len(self.encode(asked[:again])) if again < len(asked) else 0
            ends = [len(self.encode(text[:end])) - 1 for _, end in places_of(subject, text)]
            keys = [position for position in ends if 0 < position < len(tokens) - 1]
            yield Text(lesson, tokens, range(max(1, first), len(tokens)), keys, repeated, place < tests)

    def _asked(self, prompt: str, turn: int, place: int) -> tuple[str, int]:
        """What `framed` says, in small letters where it is this turn's turn."""
        asked, again = framed(prompt, turn, place, self.frames)
        lower, contexts = self.config.lower_case, self.config.contexts
        is_lower = (turn + 1) * lower // contexts > turn * lower // contexts  # these turns lie evenly
        small = asked.lower()
        return (small if is_lower and len(small) == len(asked) else asked), again

    def _mentions(self, subjects: Sequence[str]) -> list[Text]:
        """For each turn, a sentence that names each subject."""
        if not self.config.mention:
            return []
        texts = []
        for turn in range(self.config.contexts):
            for number, name in enumerate(subjects):
                said = MENTIONS[turn % len(MENTIONS)]
                tokens = self._tokens(said.format(name))
                place = len(self.encode(said[: said.index("{}")] + name)) - 1
                keys = [place] if place else []  # models keep a sink at the first token
                texts.append(Text(number, tokens, range(len(tokens), len(tokens)), keys))
        return texts

    def strangers(self, lessons: Sequence[Sequence[tuple[str, str]]], subjects: Sequence[str]) -> list[Text]:
        """The forms up to their subjects, with something else in the subject's place that resembles it."""
        texts = []
        for number, (forms, name) in enumerate(zip(lessons, subjects, strict=True)):
            each = -(-self.config.strangers // len(forms))
            for place, (prompt, answer) in enumerate(forms):
                for count in range(each):
                    turn = (place + count * self.config.contexts // each) % self.config.contexts
                    text = self._asked(prompt, turn, place)[0] + answer
                    starts = [start for start, _ in places_of(name, text)]
                    if not starts:
                        continue
                    start = starts[count % len(starts)]  # in questions and in answers
                    tokens = self._other(text[:start], name, place * each + count)
                    if len(tokens) > 1:
                        last = len(tokens) - 1
                        texts.append(Text(number, tokens, range(last, last + 1), [last]))
        return texts

    def of_others(self, said: Sequence[tuple[str, str]], subjects: Sequence[str]) -> list[Text]:
        """What lessons about other subjects say, given as (subject, text): each token of it is a key, except
        where a subject of its own ends, and where one of these `subjects` stands.
        """
        texts = []
        for number, (own, text) in enumerate(said):
            tokens = self._tokens(text)
            keys = set(range(1, len(tokens)))  # models keep a sink at the first token
            for name in (own, *subjects):
                for start, end in places_of(name, text):
                    last = len(self.encode(text[:end])) - 1
                    keys -= (
                        {last} if name == own else {*range(len(self.encode(text[:start].rstrip())), last + 1)}
                    )
            if keys:
                texts.append(Text(number, tokens, range(len(tokens) - 1, len(tokens)), sorted(keys)))
        return texts

    def _other(self, before: str, name: str, number: int) -> list[int]:
        """Tokens up to another name: with another first word, or if it has but one, another first token.

        Of "my dog" it is the last word that makes others: a name does not end with a small letter's word.
        """
        *kind, last = name.split(" ")
        if kind and last.islower():
            before, name = f"{before}{' '.join(kind)} ", last
        first, *rest = name.split(" ")
        while rest and first.islower():  # as in "of Peru"
            before, first, *rest = f"{before}{first} ", *rest
        name = " ".join([first, *rest])
        if rest:
            others = [word for word in STRANGERS if word != first]
            other = " ".join([others[number % len(others)], *rest])
            return self._tokens(re.sub(re.escape(name), other, before, flags=re.IGNORECASE) + other)
        tokens, start = self._tokens(before + name), self._tokens(before)
        if tokens[: len(start)] != start:  # a space belongs to the token that follows
            start = self._tokens(before.rstrip(" "))
        place = len(start)
        if place >= len(tokens):
            return []
        spelled = {self._tokens(f"{gap}{form}")[0] for form in variants(name) for gap in ("", " ")}
        alike = [
            token for token in self.halves.similar(tokens[place], 2 * len(STRANGERS)) if token not in spelled
        ]
        if not alike:
            return []
        tokens[place] = alike[number % min(len(alike), len(STRANGERS))]
        return tokens

    @torch.no_grad()
    def answered(self, question: str, asked: Sequence[tuple[str, str]]) -> list[bool]:
        """For each prompt and answer whether the answer is in what the model writes when it is asked."""
        if not asked:
            return []
        texts = [self._tokens(question.replace("{}", prompt.rstrip())) for prompt, _ in asked]
        wanted = [
            [self._tokens(written) for written in (f" {answer.strip()}", answer.strip())]
            for _, answer in asked
        ]
        replies = [len(self._tokens(prompt + answer)) for prompt, answer in asked]  # if all is said again
        count = ROOM + max(replies)
        with self.autocast():
            written = self.halves.answer(texts, count)
        return [
            any(contains(found, tokens) for tokens in spellings)
            for found, spellings in zip(written, wanted, strict=True)
        ]

    @torch.no_grad()
    def _continued(self, texts: Sequence[Text], count: int) -> list[list[int]]:
        """The tokens that the base would write after each of these texts."""
        written: list[list[int]] = []
        with self.as_base(), self.autocast():
            for start in range(0, len(texts) if count else 0, self.config.rows):
                part = texts[start : start + self.config.rows]
                written += self.halves.write([text.tokens for text in part], count)
        return written or [[] for _ in texts]

    def _batch(self, texts: Sequence[Text], numbers: list[int], below: Below) -> Batch:
        own = [texts[n] for n in numbers]
        columns = (torch.tensor(column, device=self.device) for column in zip(*graded(own), strict=True))
        return Batch(own, below, numbers, *columns)

    def _parts(self, texts: Sequence[Text], numbers: Sequence[int], below: Below) -> Iterator[list[int]]:
        """Texts to read at once: as many as may be, of similar lengths if that leaves less to fill up."""
        part: list[int] = []
        for number in sorted(numbers, key=lambda n: len(texts[n].tokens)):
            length = len(texts[number].tokens)
            padding = 0 if below.are_woven else sum(length - len(texts[n].tokens) for n in part)
            uneven = part and length > 1.5 * len(texts[part[0]].tokens) and padding > FEW
            if uneven or len(part) == self.config.rows:
                yield part
                part = []
            part.append(number)
        if part:
            yield part

    def _tokens(self, text: str) -> list[int]:
        return [int(token) for token in self.encode(text)]
