"""What every study of facts stands on: a pretrained model, background text, and what is measured of both.

ground = Ground(given)
course = Course(ground, experiment="facts")
for number, lessons in course.pieces(all_lessons, "chunks"):
    course.learn(lessons, seed=number)
course.result | {"rise": ground.rises(course.learner, ground.background())}
"""

import argparse
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from attractor.hf.halves import likeliest
from attractor.hf.pretrained import load_pretrained
from attractor.hf.teachable import cut
from studies.facts_editors import ClosedForm, Grace
from studies.facts_methods import Basins, method
from studies.facts_world import Item, Lesson

WINDOW = 256
BACKGROUNDS = ("wikitext2_test", "austen", "python_stdlib", "german_law")
CHARACTERS = 1_200_000
"""So much of each text is read. The windows that are measured come first, then those to calibrate by; replay
and KL draw from all that are not measured. Few of them would be learned by heart."""

LADDER = 64
"""So many of the windows that replay may draw are read for every rate of a ladder."""
PLACES = ("result", "texts", "data", "verb")
"""What a cell does not say of its command line: where files are."""
Call = Callable[[Tensor], Tensor]
Piece = TypeVar("Piece")


class Reader:
    """Grades a model: answers to prompts, what follows them, and background text."""

    def __init__(self, tokenizer: Any, device: str, autocast: Callable[[], Any]) -> None:
        self.encode, self.decode = tokenizer.encode, tokenizer.decode
        self.device, self.autocast = device, autocast

    @torch.no_grad()
    def recall(self, call: Call, items: Sequence[Item]) -> float:
        """The share of answers that greedy decoding gives."""
        return sum(self.hits(call, items)) / len(items)

    @torch.no_grad()
    def hits(self, call: Call, items: Sequence[Item]) -> list[bool]:
        """For each answer, whether greedy decoding gives it."""
        found = {n: bool((logits.argmax(-1) == own).all()) for n, logits, own in self.ends(call, items)}
        return [found[n] for n in range(len(items))]

    @torch.no_grad()
    def loss(self, call: Call, items: Sequence[Item]) -> float:
        """Nats per token of the ends of texts."""
        parts = [F.cross_entropy(logits, own, reduction="none") for _, logits, own in self.ends(call, items)]
        return torch.cat(parts).mean().item()

    @torch.no_grad()
    def nats(self, call: Call, items: Sequence[Item]) -> list[float]:
        """Nats of each answer as a whole."""
        found = {
            n: F.cross_entropy(logits, own, reduction="sum").item()
            for n, logits, own in self.ends(call, items)
        }
        return [found[n] for n in range(len(items))]

    @torch.no_grad()
    def write(self, model: Any, prompts: Sequence[str], count: int = 12) -> list[str]:
        """What a Hugging Face model writes greedily after each prompt: so many tokens, as text."""
        read = [self._tokens(prompt) for prompt in prompts]
        written: list[str] = [""] * len(prompts)
        for part in batches([len(tokens) + count for tokens in read]):
            with self.autocast(), torch.compiler.set_stance("force_eager"):
                for n, tokens in zip(part, likeliest(model, [read[n] for n in part], count), strict=True):
                    written[n] = self.decode(tokens)
        return written

    @torch.no_grad()
    def ends(self, call: Call, items: Sequence[Item]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For each item, in any order, its number, and logits and tokens of its second part."""
        read = [(self._tokens(prompt), self._tokens(prompt + answer)) for prompt, answer in items]
        for part in batches([len(whole) for _, whole in read]):
            longest = max(len(read[n][1]) for n in part)
            padded = [read[n][1] + [0] * (longest - len(read[n][1])) for n in part]
            tokens = torch.tensor(padded, device=self.device)
            with self.autocast():
                logits = call(tokens)
            for row, n in enumerate(part):
                prompt, whole = read[n]
                span = slice(len(prompt), len(whole))
                yield n, logits[row, span.start - 1 : span.stop - 1].float(), tokens[row, span]

    def _tokens(self, text: str) -> list[int]:
        return [int(token) for token in self.encode(text)]

    @torch.no_grad()
    def background(self, call: Call, windows: Tensor, rows: int = 8) -> Iterator[tuple[float, Tensor]]:
        """The loss of each window in nats, and its logits as they are, to compare bits."""
        for part in windows.split(rows):
            tokens = part.to(self.device)
            with self.autocast():
                logits = call(tokens)
            targets = tokens[:, 1:].flatten()
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets, reduction="none")
            yield from zip(loss.view(len(part), -1).mean(1).tolist(), logits, strict=True)


class Ground:
    """A pretrained model and four background texts: some windows are measured, others are free to be read."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.device = given, given.device
        self.begun = time.perf_counter()
        if absent := [name for name in BACKGROUNDS if not (given.texts / f"{name}.txt").is_file()]:
            raise ValueError(f"--texts {given.texts} has no {absent[0]}.txt; it must hold {BACKGROUNDS}")
        torch.manual_seed(given.seed)
        self.model, tokenizer = load_pretrained(given.model, device=given.device)
        self.encode, self.decode = tokenizer.encode, tokenizer.decode
        self.reader = Reader(tokenizer, given.device, self.autocast)
        count = given.windows
        texts = {name: (given.texts / f"{name}.txt").read_text()[:CHARACTERS] for name in BACKGROUNDS}
        windows = {name: cut([text], self.encode, WINDOW) for name, text in texts.items()}
        if short := [name for name, rows in windows.items() if len(rows) < count + count // 2]:
            raise ValueError(
                f"{short[0]}.txt is too short for {count} windows and half as many to calibrate by"
            )
        self.sha256 = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
        self.measured = {name: rows[:count] for name, rows in windows.items()}
        self.free = shuffled([rows[count : count + count // 2] for rows in windows.values()])
        most = min(len(rows) for rows in windows.values())  # of every kind as many
        self.old = shuffled([rows[count:most] for rows in windows.values()])

    def autocast(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else nullcontext()

    def base(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits

    def background(self) -> dict[str, list[float]]:
        """The nats of each window that is measured, as the original model predicts it."""
        return {
            name: [nats for nats, _ in self.reader.background(self.base, rows)]
            for name, rows in self.measured.items()
        }

    def rises(self, call: Call, before: dict[str, list[float]]) -> dict[str, float]:
        """The share by which the perplexity of each background text rose."""
        return {
            name: rise([nats for nats, _ in self.reader.background(call, rows)], before[name])
            for name, rows in self.measured.items()
        }

    def untaught(self, learner: Any) -> Call:
        """The original model, also where the learner stands beside its blocks."""
        if not isinstance(learner, Basins):
            return self.base

        def base(tokens: Tensor) -> Tensor:
            with learner.net.using(None):
                return self.base(tokens)

        return base

    def identical(self, learner: Any) -> dict[str, Any]:
        """The share of background windows that are the base's to the bit, where any can be."""
        if not isinstance(learner, Basins | Grace):
            return {}
        found = {}
        for name, rows in self.measured.items():
            same = 0
            for part in rows.split(8):
                now, was = (
                    [logits for _, logits in self.reader.background(call, part)]
                    for call in (learner, self.untaught(learner))
                )
                same += sum(torch.equal(a, b) for a, b in zip(now, was, strict=True))
            found[name] = same / len(rows)
        return {"identical windows": found}


def said_of(given: argparse.Namespace) -> dict[str, Any]:
    """The settings of a cell."""
    return {name: value for name, value in vars(given).items() if name not in PLACES}


class Trial(NamedTuple):
    """Facts of one chunk that no cell is measured by: what a ladder of rates is climbed with."""

    lessons: Sequence[Lesson]
    subjects: Sequence[str] | None
    known: Callable[[Any], float]
    """The share of answers that a learner gives, as taught and in other words."""
    untaught: Sequence[Item]
    """Questions that nothing is taught about, with their right answers."""
    chunks: int
    """So many chunks the whole run has."""


def climb(ground: Ground, trial: Trial, **options: Any) -> list[dict[str, Any]]:
    """What every rate of `--ladder` makes of one chunk; the best score's becomes the rate of the run.

    The score was fixed before anything was run: what is known, less the harm if every chunk does as much. The
    harm of one is the share by which perplexity rises, of background windows that are not measured or of the
    right answers to questions that are not taught, whichever is worse.
    """
    given, rows = ground.given, []
    background = ground.old[:LADDER]

    def losses(call: Call) -> tuple[float, float]:
        own = [nats for nats, _ in ground.reader.background(call, background)]
        return sum(own) / len(own), ground.reader.loss(call, trial.untaught)

    before, found = losses(ground.base), None
    for rate in given.ladder:
        given.rate, started = rate, time.perf_counter()
        learner = method(
            given, ground.model, ground.encode, ground.free, ground.old, ground.autocast, **options
        )
        more = {"found": found} if isinstance(learner, ClosedForm) else {}
        learned = learner.learn(trial.lessons, given.seed, trial.subjects, **more)
        found = getattr(learner, "found", None)
        after = losses(learner)
        rises = [math.expm1(min(now - then, 50.0)) for now, then in zip(after, before, strict=True)]
        known = trial.known(learner)
        rows.append(
            {
                "rate": rate,
                "known": known,
                "rise of background": rises[0],
                "rise of other answers": rises[1],
                "score": known - trial.chunks * max(0.0, *rises),
                "seconds": time.perf_counter() - started,
                **{name: value for name, value in learned.items() if name != "curve"},
            }
        )
        print(rows[-1], flush=True)
    given.rate = max(rows, key=lambda row: row["score"])["rate"]
    print(f"{given.method}: --rate {given.rate}", flush=True)
    return rows


class Course:
    """A method that is taught piece by piece, a row for each, and how the result of it all begins."""

    def __init__(self, ground: Ground, experiment: str, **options: Any) -> None:
        """`options` are for `method`: what it is besides what the command line says."""
        self.ground, self.given = ground, ground.given
        started = time.perf_counter()
        own = ground.model, ground.encode, ground.free, ground.old, ground.autocast
        self.learner = method(self.given, *own, **options)
        self.prepared_in = time.perf_counter() - started
        self.rows: list[dict[str, Any]] = []
        self.result: dict[str, Any] = {
            "experiment": experiment,
            "settings": said_of(self.given),
            "sha256 of the texts": ground.sha256,
        }

    def pieces(self, pieces: Sequence[Piece], what: str) -> Iterator[tuple[int, Piece]]:
        """Pieces with their numbers, until the time is over; the first two are given in any case."""
        for number, piece in enumerate(pieces):
            if number > 1 and time.perf_counter() - self.ground.begun > 60 * self.given.minutes:
                print(f"the time is over after {number} {what}: they are measured now", flush=True)
                return
            yield number, piece

    def learn(
        self, lessons: Sequence[Lesson], seed: int, subjects: Sequence[str] | None = None, **about: Any
    ) -> dict[str, Any]:
        """Teach a piece; its row has what is said `about` it, too."""
        started = time.perf_counter()
        learned = self.learner.learn(lessons, seed, subjects)
        if self.given.device == "cuda":
            torch.cuda.synchronize()
        self.rows.append({**about, **learned, "seconds": time.perf_counter() - started})
        return self.rows[-1]


def batches(lengths: Sequence[int], most: int = 8192) -> Iterator[list[int]]:
    """Numbers of texts of similar lengths, together at most so many tokens with what fills them up."""
    part: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if part and lengths[number] * (len(part) + 1) > most:
            yield part
            part = []
        part.append(number)
    if part:
        yield part


def shuffled(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts in an order that is always the same."""
    rows = torch.cat(list(parts))
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def rise(after: Sequence[float], before: Sequence[float]) -> float:
    """The share by which perplexity rose."""
    return math.exp(sum(after) / len(after) - sum(before) / len(before)) - 1
