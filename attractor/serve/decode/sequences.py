"""Texts written together: rows of different lengths, each under the publication that it began with.

    desk = Desk(publication.device)
    row = Row(publication, prompt, Draw(temperature=0.8, seed=0))
    for _ in read(row): ...           # piece by piece, so that others need not wait for a long prompt
    desk.join(row)
    written, failed = desk.step()     # a token for every row
    desk.leave([row])

A lane is a model and the rows that read with it, in one cache. Publications that share a path share its lane.
A row has a seat on each of its paths: in the lane, or at rest with a cache of its own.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from attractor.continual.guard import BASE, Guard, log_probabilities
from attractor.model import GPT, RaggedCache
from attractor.serve.decode.mixture import Evidence

PIECE = 256
"""Tokens of a prompt, on all paths, that are read before the others get their turn."""


@dataclasses.dataclass(frozen=True, eq=False)
class Publication:
    """A version of the weights that is never written again. Paths and settings are those of a `Guard`."""

    version: int
    paths: Mapping[str, GPT]
    prior: float = 0.5
    window: int | None = None
    pause: float = 0.0

    def __post_init__(self) -> None:
        self.guard.eval()  # and whatever a guard refuses is refused here

    @functools.cached_property
    def guard(self) -> Guard:
        guard = Guard(self.paths, prior=self.prior, window=self.window, pause=self.pause)
        guard.log_prior = guard.log_prior.to(next(self.paths[BASE].parameters()).device)  # the paths stay
        return guard

    @property
    def device(self) -> torch.device:
        return self.guard.log_prior.device

    @property
    def context(self) -> int:
        return int(self.guard.config.context)

    @property
    def vocab_size(self) -> int:
        return int(self.guard.config.vocab_size)


@dataclasses.dataclass(frozen=True)
class Draw:
    """How tokens are drawn: as in `attractor.generate`."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def generator(self, device: torch.device) -> torch.Generator:
        random = torch.Generator(device)
        random.seed() if self.seed is None else random.manual_seed(self.seed)
        return random


@dataclasses.dataclass(frozen=True)
class Written:
    """A token, its log-probability before temperature, and each path's part in it: these sum to one."""

    token: int
    logprob: float
    shares: dict[str, float]


class Row:
    """A text that is being written; `path` is the one to write with, None the mixture of all."""

    def __init__(
        self, publication: Publication, prompt: Sequence[int], draw: Draw, path: str | None = None
    ) -> None:
        guard = publication.guard
        numbers = range(len(guard.names)) if path is None else [guard.names.index(path)]
        self.publication, self.draw = publication, draw
        self.names = [guard.names[number] for number in numbers]
        self.text = list(prompt[-publication.context :])
        self.length = 0  # tokens in the caches
        self.column = -1  # where at the desk
        self.may_rest = True
        self.random = draw.generator(publication.device)
        prior = guard.log_prior if path is None else torch.zeros_like(guard.log_prior[:1])
        self.evidence = Evidence.start(prior, guard)  # as it was when we last sat at no desk
        self.seats = [Seat(publication.paths[name], publication.device) for name in self.names]

    @property
    def is_full(self) -> bool:
        return self.length + 1 > self.publication.context


class Seat:
    """A row's place on one of its paths."""

    def __init__(self, model: GPT, device: torch.device) -> None:
        self.model, self.device = model, device
        self.place = -1  # in the lane, or -1
        self.cache: RaggedCache | None = None  # own, while there is no place
        self.logits: Tensor | None = None  # (V) after the last token that it read on its own
        self.missed: list[int] = []  # tokens that came while it rested
        self.first = 0.0  # the log-probability it gave the first of them

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Logits (n, V) after each token."""
        assert self.cache is not None, "it reads with its lane"
        given = torch.tensor([tokens], device=self.device)
        logits: Tensor = self.model(given, cache=self.cache)[0]
        self.logits = logits[-1].clone()  # not a view that holds all of them
        return logits

    def rest(self, cache: RaggedCache, gave: float) -> None:
        self.cache, self.first, self.missed = cache, gave, []

    def catch_up(self, tokens: Sequence[int], *, also_last: bool) -> float:
        """Read what came meanwhile, the last token only if it is to; returns the log-probability it had."""
        reading = tokens if also_last else tokens[:-1]
        if not reading:
            return self.first
        return self.first + float(given(self.read(reading), tokens[1:]).sum())


def given(logits: Tensor, targets: Sequence[int]) -> Tensor:
    """(t) log-probabilities of the tokens that came, of the first t predictions."""
    index = torch.tensor(targets, dtype=torch.long, device=logits.device)[:, None]
    return log_probabilities(logits[: len(targets)]).gather(1, index)[:, 0].double()


class Lane:
    """The rows that read with one model."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.cache: RaggedCache | None = None
        self.seats: list[Seat] = []
        self.logits: Tensor | None = None  # (B, V) of this step

    def read(self, tokens: Tensor) -> None:
        self.logits = self.model(tokens[:, None], cache=self.cache)[:, -1]

    def join(self, seat: Seat) -> None:
        """With what it has read on its own."""
        assert seat.cache is not None, "it has not read anything"
        assert seat.logits is not None
        logits = seat.logits[None]
        if self.cache is None:
            self.cache, self.logits = seat.cache, logits
        else:
            assert self.logits is not None, "rows join within a step"
            self.cache.add(seat.cache)
            self.logits = torch.cat([self.logits, logits])
        seat.place, seat.cache, seat.logits = len(self.seats), None, None
        self.seats.append(seat)

    def leave(self, seat: Seat) -> None:
        """The last row takes its place."""
        assert self.cache is not None
        place, last = seat.place, self.seats.pop()
        self.cache.remove(place)
        if last is not seat:
            self.seats[place], last.place = last, place
        if self.logits is not None:
            if last is not seat:
                self.logits[place] = self.logits[-1]
            self.logits = self.logits[:-1]
        seat.place = -1

    def copy_of(self, seat: Seat) -> RaggedCache:
        assert self.cache is not None
        return self.cache.copy_of(seat.place)


@torch.no_grad()
def read(row: Row) -> Iterator[None]:
    """Read the prompt, or the end of the text again where the context was full; yields between pieces."""
    evidence = row.evidence
    is_again = bool(evidence.predicted > 0)  # then only the last token is new, and it was counted
    context = row.publication.context
    row.text = row.text[-context:]
    tokens = row.text[-max(1, context // 2) :] if is_again else row.text
    window_start = (len(tokens) - 1) // int(evidence.window) * int(evidence.window)
    unpaused = 0
    for path, seat in enumerate(row.seats):
        seat.cache = seat.model.new_row()
        for start in range(0, len(tokens), PIECE):
            if unpaused >= PIECE:
                yield
                unpaused = 0
            end = min(start + PIECE, len(tokens))
            unpaused += end - start
            logits = seat.read(tokens[start:end])
            if not is_again and len(row.seats) > 1:
                seen = given(logits, tokens[start + 1 : end + 1])
                evidence.sums[path] += seen[max(0, window_start - start) :].sum()
    evidence.predicted += 1 if is_again else len(tokens)
    row.length, row.may_rest = len(tokens), not is_again
