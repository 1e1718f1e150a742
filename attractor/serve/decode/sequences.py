"""A sequence is a text that is being written, under the publication that it began with.

    sequence = Sequence(publication, prompt, Sampling(temperature=0.8, seed=0))
    for _ in read_prompt(sequence): ...  # piece by piece, so that other texts need not wait for a long prompt
    batch.add(sequence)                  # see `attractor.serve.decode.batch`

Two things are known of each text besides its tokens. `Evidence` is the mixture of its paths: what
`GuardCache` computes for one text, for texts that come and go. A `Touch` says which lesson acted on which of
its tokens: a model that learned lessons says so in every pass, and a text that none touched was computed from
the base's numbers alone.

    logits, found = read_together(models, tokens, cache)
    found[row]                           # (column, lesson, weight) of each token that a lesson acted on
"""

import dataclasses
import functools
from collections import abc
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attractor.continual.guard import (
    BASE,
    LEAST,
    Guard,
    Resting,
    counted,
    is_quiet,
    log_odds,
    log_probabilities,
)
from attractor.lm import TrainableModel
from attractor.model import RaggedCache

PIECE = 256
"""The number of tokens of a prompt, on all paths, that are read before other texts get their turn."""
SMALLEST = 1e-30
"""Log-probabilities divided by this are finite in float32, and this times a probability is not 0."""


@dataclasses.dataclass(frozen=True, eq=False)
class Publication:
    """A version of the weights that is never changed again. Paths and settings are those of a `Guard`."""

    version: int
    paths: abc.Mapping[str, TrainableModel]
    prior: float = 0.5
    window: int | None = None
    pause: float = 0.0
    alone: str | None = None
    """The path of texts that name none; None stands for the mixture of all paths."""

    def __post_init__(self) -> None:
        self.guard.training = False  # this also raises the errors of a guard here
        for path in self.paths.values():
            if next(iter(path.modules())).training:  # to ask or to tell all of them takes milliseconds
                path.eval()

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
class Sampling:
    """How tokens are drawn. The settings mean what they mean in `attractor.generate`.

    Numbers that float32 does not hold are replaced by their limits: temperature 0, or the likeliest token
    alone, which every smaller `top_p` selects as well.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature < SMALLEST:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_p is not None:
            object.__setattr__(self, "top_p", max(self.top_p, SMALLEST))

    def generator(self, device: torch.device) -> torch.Generator:
        random = torch.Generator(device)
        random.seed() if self.seed is None else random.manual_seed(self.seed)
        return random


@dataclasses.dataclass(frozen=True, slots=True)
class Touch:
    """A lesson acted on a token, with a weight between 0 and 1."""

    index: int  # of the token, counted from the start of the prompt
    lesson: int
    weight: float


Found = list[list[tuple[int, int, float]]]
"""For every row: the column of a token, the lesson, and its weight."""


@dataclasses.dataclass(frozen=True)
class GeneratedToken:
    """A token, its log-probability before temperature, and the share of each path in it.

    The shares sum to one. `touched` are the tokens read since the one before, on which a lesson acted.
    """

    token: int
    logprob: float
    shares: dict[str, float]
    touched: tuple[Touch, ...] = ()


@dataclasses.dataclass
class Evidence:
    """How well each path predicted each text: a column per text, and a row of the tensors per path.

    A path that a text does not have has no prior in its column, and is never awake.
    """

    prior: Tensor  # (M, B) float64
    sums: Tensor  # (M, B) float64: the prior, and what the paths gave the tokens of this window
    awake: Tensor  # (M, B)
    predicted: Tensor  # (B) predictions made: the position in the window
    window: Tensor  # (B)
    floor: Tensor  # (B), and the other numbers of `Resting`
    most_odds: Tensor  # (B)
    quiet: Tensor  # (B)

    @classmethod
    def start(cls, log_prior: Tensor, guard: Guard) -> "Evidence":
        """The evidence of one text before its first token."""
        rule = Resting(guard.pause, guard.window, guard.config.vocab_size)
        numbers = log_prior.new_tensor([[rule.floor], [rule.most_odds], [rule.quiet(len(log_prior))]])
        counts = torch.tensor([[0], [guard.window]], device=log_prior.device)
        prior = log_prior[:, None]
        return cls(prior, prior.clone(), torch.ones_like(prior, dtype=torch.bool), *counts, *numbers)

    @classmethod
    def empty(cls, device: torch.device) -> "Evidence":
        """The evidence of a batch without texts."""
        prior = torch.zeros(0, 1, dtype=torch.float64, device=device)
        counts = torch.ones(1, dtype=torch.long, device=device)
        numbers = prior.new_zeros(1)
        return cls(prior, prior, prior.bool(), counts, counts, numbers, numbers, numbers).keep([])

    def keep(self, columns: list[int]) -> "Evidence":
        index = torch.tensor(columns, dtype=torch.long, device=self.prior.device)
        return Evidence(*(getattr(self, field.name)[..., index] for field in dataclasses.fields(self)))

    def beside(self, other: "Evidence") -> "Evidence":
        """The columns of both, one after the other."""
        most = max(len(self.prior), len(other.prior))

        def padded(x: Tensor) -> Tensor:
            missing = most - len(x)
            nothing = False if x.dtype == torch.bool else -torch.inf
            return F.pad(x, (0, 0, 0, missing), value=nothing) if x.dim() == 2 and missing else x

        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))
        return Evidence(*(torch.cat([padded(ours), padded(theirs)], -1) for ours, theirs in pairs))

    @property
    def at_rest(self) -> Tensor:
        return ~self.awake & self.prior.isfinite()

    def count(self, logprobs: Tensor) -> Tensor:
        """Add what the paths gave the last token (M, B), 0 at rest; return where (B) a new window starts."""
        begins = self.predicted % self.window == 0
        self.sums = torch.where(begins, self.prior, counted(self.sums, logprobs, self.prior))
        return begins

    def log_weights(self) -> Tensor:
        return self.sums.masked_fill(~self.awake, -torch.inf).log_softmax(0)

    def to_wake(self, begins: Tensor) -> Tensor:
        """(B) texts whose paths at rest are to read what they missed."""
        odds = log_odds(self.sums, self.at_rest, self.awake)
        return self.at_rest.any(0) & (begins | (odds > self.most_odds))

    def to_rest(self) -> Tensor:
        """(M, B) paths that may rest from now on."""
        return self.awake & ~self.at_rest.any(0) & is_quiet(self.sums, self.quiet)

    def mixed(self, predictions: Tensor, log_weights: Tensor, columns: Tensor, *, some_rest: bool) -> Tensor:
        """Log-probabilities (B, V) of the mixtures of (N, V) predictions, with their weights and columns (N).

        This is `attractor.continual.guard.mixed` for predictions that are not a full grid of paths and texts.
        """
        count, vocabulary = self.prior.shape[1], predictions.shape[1]
        if len(columns) == count and not some_rest:  # one path for each text
            return predictions[columns.argsort()]
        parts = predictions.exp().mul_(log_weights.exp().to(predictions.dtype)[:, None])
        sums = parts.new_zeros(count, vocabulary).index_add_(0, columns, parts)
        if some_rest:
            floor = (self.floor * self.at_rest.any(0)).to(sums.dtype)[:, None]
            sums = sums * (1 - floor) + floor / vocabulary
        return sums.log_().clamp_(min=LEAST)


class Sequence:
    """A text that is being written with one path, or where `path` is None as its publication says."""

    def __init__(
        self, publication: Publication, prompt: abc.Sequence[int], sampling: Sampling, path: str | None = None
    ) -> None:
        guard = publication.guard
        path = publication.alone if path is None else path
        numbers = range(len(guard.names)) if path is None else [guard.names.index(path)]
        self.publication, self.sampling = publication, sampling
        self.names = [guard.names[number] for number in numbers]
        self.text = list(prompt[-publication.context :])
        self.first = len(prompt) - len(self.text)  # the index of the first token of `text`
        self.touched: list[Touch] = []  # since the last token was drawn
        self.length = 0  # tokens in the caches
        self.column = -1  # in the tensors of the batch
        self.may_rest = True
        self.random = sampling.generator(publication.device)
        prior = guard.log_prior if path is None else torch.zeros_like(guard.log_prior[:1])
        self.evidence = Evidence.start(prior, guard)  # as it was outside the batch
        self.caches = [PathCache(publication.paths[name], publication.device) for name in self.names]

    @property
    def is_full(self) -> bool:
        return self.length + 1 > self.publication.context

    def keep(self, tokens: int) -> None:
        """Let go of all but the last tokens."""
        self.first += max(0, len(self.text) - tokens)
        self.text = self.text[-tokens:]


class PathCache:
    """What one path has read of one sequence: a row of a shared cache, or a cache of its own."""

    def __init__(self, model: TrainableModel, device: torch.device) -> None:
        self.model, self.device = model, device
        self.group = group_of(model)
        self.found: list[tuple[int, int, float]] = []  # where lessons acted in what it read last on its own
        self.row = -1  # of the cache that the sequences of this model share, or -1
        self.own: RaggedCache | None = None  # while it has no row
        self.logits: Tensor | None = None  # (V) after the last token that it read on its own
        self.missed: list[int] = []  # tokens that came while it rested
        self.first_logprob = 0.0  # the log-probability that it gave the first of them

    def read(self, tokens: abc.Sequence[int]) -> Tensor:
        """Read tokens into the own cache, and return the logits (n, V) after each of them."""
        assert self.own is not None, "it reads with the sequences of its model"
        given = torch.tensor([tokens], device=self.device)
        logits, (self.found,) = read_together([self.model], given, self.own)
        self.logits = logits[0, -1].clone()  # not a view that holds all of them
        return logits[0]

    def rest(self, own: RaggedCache, logprob: float) -> None:
        """Stop reading; `logprob` is what the path gave the newest token."""
        self.own, self.first_logprob, self.missed = own, logprob, []

    def catch_up(self, tokens: abc.Sequence[int], *, also_last: bool) -> float:
        """Read the missed tokens, the last of them only where asked; return their log-probability."""
        reading = tokens if also_last else tokens[:-1]
        if not reading:
            return self.first_logprob
        return self.first_logprob + float(logprobs_of(self.read(reading), tokens[1:]).sum())


def logprobs_of(logits: Tensor, targets: abc.Sequence[int]) -> Tensor:
    """(t) log-probabilities that the first t predictions gave the t tokens that came."""
    index = torch.tensor(targets, dtype=torch.long, device=logits.device)[:, None]
    return log_probabilities(logits[: len(targets)]).gather(1, index)[:, 0].double()


@torch.no_grad()
def read_prompt(sequence: Sequence) -> abc.Iterator[None]:
    """Read the prompt, or the end of the text again where the context was full; yield between pieces."""
    evidence = sequence.evidence
    is_again = bool(evidence.predicted > 0)  # then only the last token is new, and it was counted
    context = sequence.publication.context
    sequence.keep(context)
    tokens = sequence.text[-max(1, context // 2) :] if is_again else sequence.text
    window_start = (len(tokens) - 1) // int(evidence.window) * int(evidence.window)
    unpaused, index = 0, sequence.first + len(sequence.text) - len(tokens)
    for path, cache in enumerate(sequence.caches):
        cache.own = cache.model.new_row()
        for start in range(0, len(tokens), PIECE):
            if unpaused >= PIECE:
                yield
                unpaused = 0
            end = min(start + PIECE, len(tokens))
            unpaused += end - start
            logits = cache.read(tokens[start:end])
            sequence.touched += [
                Touch(index + start + at, lesson, weight) for at, lesson, weight in cache.found
            ]
            if not is_again and len(sequence.caches) > 1:
                seen = logprobs_of(logits, tokens[start + 1 : end + 1])
                evidence.sums[path] += seen[max(0, window_start - start) :].sum()
    evidence.predicted += 1 if is_again else len(tokens)
    sequence.length, sequence.may_rest = len(tokens), not is_again


def group_of(model: TrainableModel) -> object:
    """What models have in common that can read their texts in one pass; otherwise the model itself."""
    return getattr(model, "bank", model)


def rows_for(model: TrainableModel) -> Any:
    """Memory of a fixed shape for texts that are read together; None where they share that of the first."""
    make = getattr(model, "rows_for", None)
    return None if make is None else make()


def read_together(models: abc.Sequence[TrainableModel], tokens: Tensor, cache: Any) -> tuple[Tensor, Found]:
    """Logits (B, T, V) for tokens (B, T), a model for each row, and where lessons acted.

    The models belong to one group.
    """
    together = getattr(models[0], "read_together", None)
    if together is not None:
        return together(models, tokens, cache)
    return models[0](tokens, cache=cache), [[] for _ in models]
