"""Bounded forgetting: keep the base, mix it with what was learned, and let the evidence of the text decide.

    guard = Guard({"base": base, "kjv": adapted})
    guard.bound(256)                  # nats: what 256 tokens can cost more than under the base, at most
    evaluate(guard, tokens); generate(guard, prompt); guard.posterior(tokens)

A path is a model. Each predicts the next token, and the prediction is their mixture, weighted by how well
each has predicted the text so far: p(x_t | x_<t) = sum_m w_m(x_<t) p_m(x_t | x_<t). By Bayes' rule the
product of these over a window is sum_m prior_m p_m(window), at least prior_m p_m(window) for every m. So a
window costs at most log(1 / prior_m) nats more than under path m alone, for any other paths. The
proof, and what it does not promise, is in docs/bounded-forgetting.md.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from attractor.config import check_number, check_probability, check_size
from attractor.continual.together import MOST_TOKENS, Together
from attractor.lm import Cache, LanguageModel, Sizes

BASE = "base"


class Guard(nn.Module):
    """A mixture of models that predicts like a model: its "logits" are log-probabilities.

    `prior` is that of the base; the other paths share the rest evenly. Weights start again from the prior
    every `window` tokens (default: the context, so with every sequence). With `switch_rate` each token moves
    this share of the weights back to the prior, for texts that change in the middle. `pause` lets paths rest
    while generating when they hardly count, at a cost of at most that many nats in a window.

    >>> import torch
    >>> from attractor import GPT, GPTConfig, Guard
    >>> config = GPTConfig(vocab_size=65, context=16, num_layers=1, num_heads=1, dim=16)
    >>> guard = Guard({"base": GPT(config), "other": GPT(config)}, prior=0.5)
    >>> tokens = torch.zeros(1, 16, dtype=torch.int64)
    >>> guard(tokens).shape  # log-probabilities
    torch.Size([1, 16, 65])
    >>> round(guard.bound(16), 4)  # nats that 16 tokens can cost more than with the base alone: log 2
    0.6931
    >>> guard.posterior(tokens).shape  # how much each path counts after each token
    torch.Size([1, 16, 2])

    The first path is called "base". Paths of other vocabularies or contexts, and settings outside their
    range, are a ValueError.
    """

    def __init__(
        self,
        paths: Mapping[str, LanguageModel],
        *,
        prior: float = 0.5,
        window: int | None = None,
        switch_rate: float = 0.0,
        pause: float = 0.0,
    ) -> None:
        super().__init__()
        if BASE not in paths:
            raise ValueError(f'one of the paths must be called "{BASE}"; there are {sorted(paths)}')
        base = paths[BASE]
        for name, path in paths.items():
            theirs, ours = ((m.config.vocab_size, m.config.context) for m in (path, base))
            if theirs != ours:
                raise ValueError(
                    f"path {name!r} has vocabulary and context {theirs}, the base {ours}: they do not mix"
                )
        check_number("prior", prior, "a probability, 0 < prior < 1", lambda p: 0 < p < 1)
        check_probability("switch_rate", switch_rate)
        check_number("pause", pause, "a number of nats, 0 or more", lambda nats: nats >= 0)
        if window is not None:
            check_size("window", window)
        if pause and switch_rate:
            raise ValueError("pause needs switch_rate=0: sharing never lets a path count so little")
        self.names = [BASE, *(name for name in paths if name != BASE)]
        self.paths: Sequence[LanguageModel]
        self.paths = nn.ModuleList(paths[name] for name in self.names)  # type: ignore[assignment, misc]
        self.window = base.config.context if window is None else window
        self.switch_rate, self.pause = switch_rate, pause
        if pause >= self.window:
            raise ValueError(f"pause={pause} nats in a window of {self.window} tokens is more than it costs")
        others = (1 - prior) / (len(self.names) - 1) if len(self.names) > 1 else 0.0
        shares = [prior if others else 1.0] + [others] * (len(self.names) - 1)
        self.log_prior: Tensor
        self.register_buffer("log_prior", torch.tensor(shares, dtype=torch.float64).log(), persistent=False)

    @property
    def config(self) -> Sizes:
        return self.paths[0].config

    @property
    def device(self) -> torch.device:
        return self.paths[0].device

    def bound(self, tokens: int, path: str = BASE) -> float:
        """Nats that predicting `tokens` tokens can cost more than with this path alone, at most.

        For every window log(1 / prior); for every token after a window's first what sharing takes away from
        a path that is right all along; and what `pause` allows. A text longer than the context is taken in
        sequences of that length, as `evaluate` does, and each of them starts a window.
        """
        check_size("tokens", tokens)
        log_prior = float(self.log_prior[self.names.index(path)])
        sequences, rest = divmod(tokens, self.config.context)
        windows = sequences * -(-self.config.context // self.window) + -(-rest // self.window)
        shared = -math.log1p(-self.switch_rate * (1 - math.exp(log_prior)))
        return windows * (self.pause - log_prior) + (tokens - windows) * shared

    def switching_bound(self, tokens: int, switches: int) -> float:
        """The same against the best sequence of paths that switches so often, within one window."""
        least = float(self.log_prior.min())
        if not self.switch_rate:
            return self.pause - least if switches == 0 else math.inf
        stay = -math.log1p(-self.switch_rate * (1 - math.exp(least)))
        move = -math.log(self.switch_rate) - least
        return self.pause - least + switches * move + (tokens - 1 - switches) * stay

    def new_cache(self, batch: int, after: "GuardCache | None" = None) -> "GuardCache":
        """Make a cache; what a full one, `after`, knows of the paths goes on to count."""
        return GuardCache(self, batch, after)

    def forward(self, tokens: Tensor, *, cache: "GuardCache | None" = None) -> Tensor:
        """Log-probabilities (B, T, V) of the mixture for tokens (B, T)."""
        if cache is not None:
            return cache.read(tokens)
        predictions = self._predictions(tokens)
        return mixed(self._evidence(predictions, tokens), predictions)

    @torch.no_grad()
    def posterior(self, tokens: Tensor) -> Tensor:
        """Return the weight of each path for the prediction after each token: (B, T, M)."""
        weights = self._evidence(self._predictions(tokens), tokens).log_softmax(0)
        return weights.exp().permute(1, 2, 0)

    def _predictions(self, tokens: Tensor) -> Tensor:
        """Predict (M, B, T, V) with every path; small batches as one."""
        if tokens.numel() * len(self.paths) <= MOST_TOKENS:
            together = Together(self.paths)
            if together.worthwhile:
                return log_probabilities(together(tokens))
        return torch.stack([log_probabilities(path(tokens)) for path in self.paths])

    def _evidence(self, predictions: Tensor, tokens: Tensor) -> Tensor:
        """Return the evidence (M, B, T) for the prediction after each token of a text that begins here."""
        start = self.log_prior[:, None].expand(-1, len(tokens))
        return self.evidence_after(start, given(predictions[:, :, :-1], tokens[:, 1:]), 0)

    def evidence_after(self, evidence: Tensor, gave: Tensor, predicted: int) -> Tensor:
        """Return the evidence before the first and after each of t tokens (M, B, t + 1); the paths `gave`
        (M, B, t) these log-probabilities. The window has so many predictions behind it.
        """
        if not self.switch_rate and predicted + gave.shape[2] < self.window:
            return torch.cat([evidence[..., None], gave], -1).cumsum(-1)  # `counted` of every token, at once
        found = [evidence]
        for number, one in enumerate(gave.unbind(-1), predicted + 1):
            found.append(self.counted(found[-1], one, number))
        return torch.stack(found, -1)

    def counted(self, evidence: Tensor, gave: Tensor, predicted: int) -> Tensor:
        """Count one token with the guard's own prior, window and switch rate, after so many predictions."""
        prior = self.log_prior[:, None]
        if predicted % self.window == 0:
            return prior.repeat(1, evidence.shape[1])
        return counted(evidence, gave, prior, self.switch_rate)


# The mathematics of the mixture. Evidence (M, B) of M paths for B texts are logarithms of weights, up to a
# number that all paths share: the prior, and what each path gave the tokens of this window so far.


def counted(evidence: Tensor, gave: Tensor, log_prior: Tensor, switch_rate: float = 0.0) -> Tensor:
    """The evidence after one more token that the paths `gave` these log-probabilities, by Bayes' rule.

    With a switch rate, this share of the weights goes back to the prior. Where a window begins, evidence is
    the prior again: that is the caller's to see.
    """
    evidence = evidence + gave
    if not switch_rate:
        return evidence
    stay, back = math.log1p(-switch_rate), math.log(switch_rate)
    return torch.logaddexp(evidence.log_softmax(0) + stay, log_prior + back)


def mixed(evidence: Tensor, predictions: Tensor) -> Tensor:
    """Mix predictions, log sum_m w_m p_m: evidence (M, B, T), predictions (M, B, T, V) -> (B, T, V)."""
    log_weights = evidence.log_softmax(0).to(predictions.dtype)
    return torch.logsumexp(log_weights[..., None] + predictions, 0)


LEAST = -1e4
"""No token is more impossible than this: a window in which every path met one must not end in NaN."""


def log_probabilities(logits: Tensor) -> Tensor:
    """Log-probabilities; a path that diverged predicts nothing in particular, and soon counts for nothing."""
    predictions = logits.float().log_softmax(-1).clamp(min=LEAST)
    return predictions.masked_fill(predictions.isnan().any(-1, keepdim=True), -math.log(logits.shape[-1]))


def given(predictions: Tensor, targets: Tensor) -> Tensor:
    """Return what predictions (..., t, V) gave the targets (t), (B, t): log-probabilities, in float64."""
    index = targets.expand(predictions.shape[:-1])[..., None]
    return predictions.gather(-1, index)[..., 0].double()


class Resting:
    """The rule by which paths may rest, so that a window costs less than `pause` nats more.

    A path that rests could at best predict every token with certainty, so the odds that it is right are at
    most its evidence, when it went to rest, over that of the others now. While a path rests, the mixture of
    the others gets `floor` of the uniform distribution, so that no token is given less than floor / V. Then
    leaving out a path with odds o costs at most log(1 / (1 - floor) + o V / floor) nats on any token; a path
    rests only while o <= floor^2 / V, which makes that less than 3 floor. With floor = pause / (4 window) a
    window costs less than `pause`. Before its odds are larger, the path reads what it missed, in one pass.
    """

    def __init__(self, pause: float, window: int, vocabulary: int) -> None:
        self.floor = pause / (4 * window)
        self.most_odds = -math.inf  # log; without a floor no path rests
        if self.floor:
            self.most_odds = 2 * math.log(self.floor) - math.log(vocabulary)

    def quiet(self, paths: int) -> float:
        """The log-share below which one of so many paths may rest: it will be able to for about 14 nats."""
        return self.most_odds - math.log(1e6 * paths)


def log_odds(evidence: Tensor, at_rest: Tensor, awake: Tensor) -> Tensor:
    """Return the log of the evidence of paths at rest over that of those awake (B); both are masks (M, B)."""
    resting, reading = (evidence.masked_fill(~some, -math.inf).logsumexp(0) for some in (at_rest, awake))
    return resting - reading


def is_quiet(evidence: Tensor, quiet: Tensor | float) -> Tensor:
    """Mark the paths that count so little that they may rest (M, B)."""
    return evidence.log_softmax(0) < quiet


def floored(log_p: Tensor, floor: Tensor) -> Tensor:
    """Log-probabilities (..., V) with the `floor` (..., 1) of `Resting`; 0 changes nothing."""
    return torch.logaddexp(log_p + torch.log1p(-floor), torch.log(floor / log_p.shape[-1]))


@dataclasses.dataclass
class Reader:
    """One path's place in a text."""

    path: LanguageModel
    cache: Cache
    unread: list[Tensor]  # (B, 1) tokens that came while it rested
    next: Tensor | None = None  # (B, V) its prediction after the last token it read

    def prediction(self) -> Tensor:
        assert self.next is not None, "nothing was read yet"
        return self.next

    def gave(self, token: Tensor) -> Tensor:
        """Return the log-probability that the next token (B, 1) had: (B)."""
        return given(self.prediction(), token[:, 0])

    def read(self, tokens: Tensor) -> Tensor:
        """Predictions (B, n, V) after each of `tokens`."""
        return self.took(log_probabilities(self.path(tokens, cache=self.cache)))

    def took(self, predictions: Tensor) -> Tensor:
        self.next = predictions[:, -1]
        return predictions

    def catch_up(self) -> Tensor:
        """Read what came meanwhile; returns the log-probability (B) it had."""
        missed, self.unread = torch.cat(self.unread, 1), []
        first = self.prediction()[:, None]
        return given(torch.cat([first, self.read(missed)[:, :-1]], 1), missed).sum(1)


class GuardCache:
    """KV caches of all paths, their evidence, and which of them rest: as `Resting` says."""

    def __init__(self, guard: Guard, batch: int, after: "GuardCache | None" = None) -> None:
        self.guard, self.after = guard, after
        self.length = 0  # tokens in the KV caches
        self.predicted = 0  # predictions made, also by the caches before: where we are in the window
        self.together = Together(guard.paths)
        if self.together.worthwhile:
            self.joint = self.together.new_cache(batch)
            self.parts = self.joint.split(len(guard.paths))
            caches: Sequence[Cache] = self.parts
        else:
            caches = [path.new_cache(batch) for path in guard.paths]
        self.readers = [Reader(path, cache, []) for path, cache in zip(guard.paths, caches, strict=True)]
        self.evidence = guard.log_prior[:, None].repeat(1, batch)  # (M, B) of this window
        self.at_rest: set[int] = set()
        self.resting = Resting(guard.pause, guard.window, guard.config.vocab_size)
        self.passes = 0  # forward passes of paths: what resting saves

    def read(self, tokens: Tensor) -> Tensor:
        """Log-probabilities (B, n, V) after each of `tokens` (B, n)."""
        if self.after is not None:
            return self._read_again(tokens, self.after)
        if not self.at_rest and tokens.shape[1] > 1:
            return self._read_all(tokens)
        return torch.cat([self._read_one(token) for token in tokens.split(1, 1)], 1)

    def _read_again(self, tokens: Tensor, before: "GuardCache") -> Tensor:
        """The end of a text in place of all of it. Only its last token is new: the others were counted."""
        before._wake()
        self.after, self.predicted, self.evidence = None, before.predicted, before.evidence
        for reader, old in zip(self.readers, before.readers, strict=True):
            reader.next = old.next
        self._count(tokens[:, -1:])
        predictions = self._read_paths(tokens)
        self.length, self.predicted = tokens.shape[1], self.predicted + 1
        return mixed(self.evidence[..., None], predictions)

    def _count(self, token: Tensor) -> None:
        """The evidence of one more token (B, 1)."""
        if self.predicted % self.guard.window == 0:  # a new window: every path counts again
            self._wake()
        nothing = torch.zeros_like(self.evidence[0])
        gave = [
            nothing if number in self.at_rest else reader.gave(token)
            for number, reader in enumerate(self.readers)
        ]
        self.evidence = self.guard.counted(self.evidence, torch.stack(gave), self.predicted)

    def _read_paths(self, tokens: Tensor) -> Tensor:
        """Predictions (M, B, n, V) of all paths, as one batch where they share memory."""
        self.passes += len(self.readers)
        if not self.together.worthwhile or tokens.numel() * len(self.readers) > MOST_TOKENS:
            return torch.stack([reader.read(tokens) for reader in self.readers])
        self.joint.length = self.parts[0].length
        predictions = log_probabilities(self.together(tokens, self.joint, self.parts))
        for reader, prediction in zip(self.readers, predictions, strict=True):
            reader.took(prediction)
        return predictions

    def _read_all(self, tokens: Tensor) -> Tensor:
        """Several tokens at once, as in a prompt: every path reads them."""
        before = [reader.next for reader in self.readers if reader.next is not None]
        predictions, targets = self._read_paths(tokens), tokens[:, 1:]
        gave = predictions[:, :, :-1]
        if before:  # they also predicted the first of these tokens
            gave, targets = torch.cat([torch.stack(before)[:, :, None], gave], 2), tokens
        position = max(self.predicted - 1, 0) % self.guard.window
        evidence = self.guard.evidence_after(self.evidence, given(gave, targets), position)
        self.evidence = evidence[..., -1].clone()
        self.length, self.predicted = self.length + tokens.shape[1], self.predicted + tokens.shape[1]
        self._let_rest()
        return mixed(evidence[..., -tokens.shape[1] :], predictions)

    def _read_one(self, token: Tensor) -> Tensor:
        if self.predicted:
            self._count(token)
        if self.at_rest:
            for number, reader in enumerate(self.readers):
                if number in self.at_rest:
                    reader.unread.append(token)
                else:
                    reader.read(token)
                    self.passes += 1
        else:
            self._read_paths(token)
        self.length, self.predicted = self.length + 1, self.predicted + 1
        if self.at_rest:
            odds = log_odds(self.evidence, self.rests, ~self.rests)
            if bool((odds > self.resting.most_odds).any()):
                self._wake()
        awake = [number for number in range(len(self.readers)) if number not in self.at_rest]
        out = self.readers[awake[0]].prediction()[:, None]
        if len(awake) > 1:  # no list is an index here: that would copy to the GPU and wait
            predictions = torch.stack([self.readers[number].prediction() for number in awake])
            evidence = torch.stack([self.evidence[number] for number in awake])
            out = mixed(evidence[..., None], predictions[:, :, None])
        if self.at_rest:
            out = floored(out, out.new_full((), self.resting.floor))
        self._let_rest()
        return out

    def _let_rest(self) -> None:
        if self.at_rest or not self.resting.floor:
            return
        best = int(self.evidence.sum(1).argmax())
        quiet = is_quiet(self.evidence, self.resting.quiet(len(self.readers))).all(1)
        quiet[best] = False
        self.rests = quiet[:, None]  # (M, 1) `at_rest` as a mask
        self.at_rest = set(quiet.nonzero().flatten().tolist())

    def _wake(self) -> None:
        """Let paths at rest read what they missed; their evidence is then exact again."""
        for number in sorted(self.at_rest):
            reader = self.readers[number]
            if reader.unread:
                self.evidence[number] += reader.catch_up()
                self.passes += 1
        self.at_rest = set()
