"""What is read while lessons are learned: every form in its frames, and what the base itself would write.

    reading = Reading(tokenizer.encode, halves, config)
    turns = reading.texts(lessons, subjects)  # for each turn, every form in a frame
    for batch in reading.batches(turns[0]):
        logits = reading.predict(batch)       # of the tokens that are graded

Lessons and the controls of the study of facts read by it, so that both are taught the same.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from attractor.continual.config import LessonConfig
from attractor.continual.forms import FRAMES, MENTIONS, STRANGERS, framed

FEW = 64
"""So many tokens of padding cost less than a batch of its own."""


class Halves(Protocol):
    """A model in two halves, of which the lower one no lesson changes: see `attractor.hf.halves`."""

    def below(self, tokens: Tensor) -> Any:
        """What the lower half makes of tokens (B, T)."""

    def above(self, state: Any, rows: Tensor, positions: Tensor) -> Tensor:
        """The logits (n, vocabulary) after the tokens at these places."""

    def write(self, texts: Sequence[list[int]], count: int) -> list[list[int]]:
        """The likeliest `count` tokens that the model would write after each of these texts."""

    def similar(self, token: int, count: int) -> list[int]:
        """The tokens that the model takes for most alike with one; none if that is not known."""


class Whole:
    """A model that is not cut in two: everything is computed in every pass."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def below(self, tokens: Tensor) -> Tensor:
        return tokens

    def above(self, state: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        return self.model(state)[rows, positions]

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


class Batch(NamedTuple):
    """Texts that are read at once, and what is graded in them."""

    texts: Sequence[Text]
    state: Any  # what the lower half of the model makes of them
    row_n: Tensor
    position_n: Tensor  # of the token before the one that is graded
    target_n: Tensor
    is_answer_n: Tensor  # otherwise it is one of the base's own
    lesson_n: Tensor


def graded(texts: Sequence[Text]) -> list[tuple[int, int, int, bool, int]]:
    """Row, position before, token, whether it is of the answer, and lesson, of each token that is graded."""
    return [
        (row, place - 1, text.tokens[place], place in text.answer, text.lesson)
        for row, text in enumerate(texts)
        for place in range(text.answer.start - text.repeated, len(text.tokens))
    ]


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
        self, lessons: Sequence[Sequence[tuple[str, str]]], subjects: Sequence[str]
    ) -> list[list[Text]]:
        """What is read when these prompts and answers are learned: for each turn, every form in a frame.

        After its answer stands what the base would write there. Each turn also mentions every subject once.
        """
        turns = [
            [
                text
                for number, (forms, name) in enumerate(zip(lessons, subjects, strict=True))
                for text in self._framed(number, forms, name, turn)
            ]
            for turn in range(self.config.contexts)
        ]
        follows = self._continued(turns[0], self.config.after)  # hardly depends on the frame: found once
        mentions = self._mentions(subjects)
        for turn, texts in enumerate(turns):
            for text, more in zip(texts, follows, strict=True):
                text.tokens += more
            texts += mentions[turn * len(subjects) : (turn + 1) * len(subjects)]
        return turns

    @torch.no_grad()
    def batches(self, texts: Sequence[Text]) -> Iterator[Batch]:
        """The texts, so many at once as the configuration says, with what the lower half makes of them."""
        for part in self._alike(texts):
            tokens = padded([text.tokens for text in part]).to(self.device)
            with self.autocast():
                state = self.halves.below(tokens)
            places = zip(*graded(part), strict=True)
            columns = (torch.tensor(column, device=self.device) for column in places)
            yield Batch(part, state, *columns)

    def predict(self, batch: Batch) -> Tensor:
        """Logits (n, vocabulary) of the tokens that are graded."""
        with self.autocast():
            return self.halves.above(batch.state, batch.row_n, batch.position_n).float()

    def weights(self, batch: Batch) -> Tensor:
        """(n) what each graded token counts: 1 in an answer, less where it is the base's own."""
        return torch.where(batch.is_answer_n, 1.0, self.config.after_weight)

    def _framed(
        self, lesson: int, forms: Sequence[tuple[str, str]], subject: str, turn: int
    ) -> Iterator[Text]:
        for place, (prompt, answer) in enumerate(forms):
            asked, again = framed(prompt, turn, place, self.frames)
            text = asked + answer
            tokens = self._tokens(text)
            if len(tokens) + self.config.after > self.context:
                raise ValueError(
                    f"a form of {len(tokens)} tokens does not fit into the model's context of "
                    f"{self.context}: teach it in pieces"
                )
            first = len(self.encode(asked)) if prompt else 1
            repeated = first - len(self.encode(asked[:again])) if again < len(asked) else 0
            keys = []
            start = text.find(subject)
            while start >= 0:
                end = start + len(subject)
                position = len(self.encode(text[:end])) - 1
                if 0 < position < len(tokens) - 1:
                    keys.append(position)
                start = text.find(subject, end)
            if not prompt and keys:
                first = keys[0] + 1  # what stands before the subject cannot be learned at the subject
            yield Text(lesson, tokens, range(max(1, first), len(tokens)), keys, repeated)

    def _mentions(self, subjects: Sequence[str]) -> list[Text]:
        """For each turn, a sentence that names each subject, and what the base would write after it."""
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
        for text, more in zip(texts, self._continued(texts, self.config.mention), strict=True):
            text.tokens += more
        return texts

    def strangers(self, lessons: Sequence[Sequence[tuple[str, str]]], subjects: Sequence[str]) -> list[Text]:
        """The forms up to their subjects, with something else in the subject's place that resembles it."""
        texts = []
        for number, (forms, name) in enumerate(zip(lessons, subjects, strict=True)):
            each = -(-self.config.strangers // len(forms))
            for place, (prompt, answer) in enumerate(forms):
                for count in range(each):
                    turn = (place + count * self.config.contexts // each) % self.config.contexts
                    text = framed(prompt, turn, place, self.frames)[0] + answer
                    start = text.find(name)
                    other = place * each + count
                    tokens = self._other(text[:start], name, other) if start >= 0 else []
                    if len(tokens) > 1:
                        last = len(tokens) - 1
                        texts.append(Text(number, tokens, range(last, last + 1), [last]))
        return texts

    def _other(self, before: str, name: str, number: int) -> list[int]:
        """Tokens up to another name: with another first word, or if it has but one, another first token."""
        first, *rest = name.split(" ")
        if rest:
            others = [word for word in STRANGERS if word != first]
            return self._tokens(" ".join([before + others[number % len(others)], *rest]))
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
    def _continued(self, texts: Sequence[Text], count: int) -> list[list[int]]:
        """The tokens that the base would write after each of these texts."""
        written: list[list[int]] = []
        with self.as_base(), self.autocast():
            for start in range(0, len(texts) if count else 0, self.config.rows):
                part = texts[start : start + self.config.rows]
                written += self.halves.write([text.tokens for text in part], count)
        return written or [[] for _ in texts]

    def _alike(self, texts: Sequence[Text]) -> Iterator[Sequence[Text]]:
        """Texts of similar lengths, so many at once as may be: little of a batch is padding."""
        part: list[Text] = []
        for text in sorted(texts, key=lambda text: len(text.tokens)):
            length = len(text.tokens)
            padding = sum(length - len(other.tokens) for other in part)
            uneven = part and length > 1.5 * len(part[0].tokens) and padding > FEW
            if uneven or len(part) == self.config.rows:
                yield part
                part = []
            part.append(text)
        if part:
            yield part

    def _tokens(self, text: str) -> list[int]:
        return [int(token) for token in self.encode(text)]
