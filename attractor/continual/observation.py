"""What a learner saw, what that teaches, and what it saw in all: records that are never changed in place."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from attractor.continual.allocate import Allocation, Outlook
from attractor.continual.gates import Surprise
from attractor.tokenizer import Tokenizer


def join(by: Callable[[Any, Any], Any], a: Mapping[Any, Any], b: Mapping[Any, Any]) -> dict[Any, Any]:
    """Both, in a's order and then b's; where a key is in both, `by` of the two values."""
    return {**a, **{key: by(a[key], value) if key in a else value for key, value in b.items()}}


def add(a: Any, b: Any) -> Any:
    return a + b


@dataclass(frozen=True)
class Observation:
    """What an observation was like, before learning from it, and what it changed."""

    tokens: int = 0
    loss_sum: float = 0.0
    scored: int = 0  # all tokens but the very first of a stream, which nothing predicts
    taught: int = 0
    held_back: dict[str, int] = field(default_factory=dict)  # by which gate
    updates: int = 0
    patches: dict[Any, int] = field(default_factory=dict)  # layer -> patches that learned, each update's
    largest_change: dict[Any, float] = field(default_factory=dict)  # layer -> length of a patch's change
    allocations: tuple[Allocation, ...] = ()
    source: str | None = None
    pending: int = 0  # tokens that wait for the next update

    @property
    def loss(self) -> float:
        """Mean nats per token, before learning; NaN if no token was predicted."""
        return self.loss_sum / self.scored if self.scored else math.nan

    def then(self, next: "Observation") -> "Observation":
        return Observation(
            tokens=self.tokens + next.tokens,
            loss_sum=self.loss_sum + next.loss_sum,
            scored=self.scored + next.scored,
            taught=self.taught + next.taught,
            held_back=join(add, self.held_back, next.held_back),
            updates=self.updates + next.updates,
            patches=join(add, self.patches, next.patches),
            largest_change=join(max, self.largest_change, next.largest_change),
            allocations=self.allocations + next.allocations,
            source=next.source,
            pending=next.pending,
        )


@dataclass(frozen=True)
class Gathered:
    """What the tokens since the last update teach: the next update learns it."""

    tokens: int = 0
    taught: int = 0
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the summed loss, by layer and parameter
    chosen: dict[Any, Tensor] = field(default_factory=dict)  # layer -> (K) bool: selected by admitted tokens
    counts: dict[Any, Tensor] = field(default_factory=dict)  # layer -> (K) selections by all tokens
    toward: dict[Any, Tensor] = field(default_factory=dict)  # layer -> (K, m) sum of w z of admitted tokens
    amount: dict[Any, Tensor] = field(default_factory=dict)  # layer -> (K) sum of w of admitted tokens
    outlook: dict[Any, Outlook] = field(default_factory=dict)  # layer -> what its router made of all tokens

    def plus(self, other: "Gathered") -> "Gathered":
        parts = ("gradients", "chosen", "counts", "toward", "amount", "outlook")
        sums = {part: join(add, getattr(self, part), getattr(other, part)) for part in parts}
        return Gathered(self.tokens + other.tokens, self.taught + other.taught, **sums)


@dataclass(frozen=True)
class Totals:
    """What a learner counts over its whole life."""

    tokens: int = 0
    scored: int = 0
    taught: int = 0
    updates: int = 0
    allocations: int = 0
    held_back: dict[str, int] = field(default_factory=dict)
    surprise: Surprise = field(default_factory=Surprise)

    def after(self, seen: Observation, surprise: Surprise) -> "Totals":
        return Totals(
            tokens=self.tokens + seen.tokens,
            scored=self.scored + seen.scored,
            taught=self.taught + seen.taught,
            updates=self.updates + seen.updates,
            allocations=self.allocations + len(seen.allocations),
            held_back=join(add, self.held_back, seen.held_back),
            surprise=surprise,
        )

    def counters(self) -> dict[str, float]:
        """The numbers for a log, by name."""
        counts = {name: getattr(self, name) for name in ("tokens", "taught", "updates", "allocations")}
        return counts | {f"held_back/{name}": count for name, count in self.held_back.items()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Read what `dataclasses.asdict` made from a file of unknown origin."""
        counts = ("tokens", "scored", "taught", "updates", "allocations")
        return cls(
            **{name: whole_number(fields[name]) for name in counts},
            held_back={str(name): whole_number(count) for name, count in fields["held_back"].items()},
            surprise=Surprise.from_list(fields["surprise"]),
        )


def whole_number(value: object, least: int = 0) -> int:
    """Return a count that was read from a file; a ValueError where it is none."""
    if type(value) is not int or not least <= value < 2**62:
        raise ValueError(f"{value!r} is not a count")
    return value


Text = str | Sequence[int] | np.ndarray | Tensor


def tokens_of(text: Text, tokenizer: Tokenizer | None, vocab_size: int, most: int) -> np.ndarray:
    """Return the tokens of a text or of an array; a ValueError says what is wrong with it."""
    if isinstance(text, bytes | bytearray | memoryview):
        raise ValueError(f"a {type(text).__name__} is neither text nor tokens: decode it, or give list(...)")
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError("this learner has no tokenizer: give tokens instead of text")
        tokens = tokenizer.encode(text)
    else:
        tokens = np.asarray(text.cpu() if isinstance(text, Tensor) else text)
        if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
            raise ValueError(
                f"tokens of shape {tokens.shape} and type {tokens.dtype}: expected a sequence of ids"
            )
        tokens = tokens.astype(np.int64)
    if not len(tokens):
        raise ValueError("the text is empty; there is nothing to observe")
    if len(tokens) > most:
        raise ValueError(
            f"{len(tokens):,} tokens at once exceed max_observation={most:,}; give the stream in pieces"
        )
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise ValueError(f"token {outside[0]} is outside the vocabulary, 0 to {vocab_size - 1}")
    return tokens


def contiguous_windows(
    history: np.ndarray, tokens: np.ndarray, context: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Windows (w, t) that predict each new token once, after as much of the past as fits.

    Returns inputs, targets and where the targets are new; None if nothing precedes a single first token.
    """
    stream = np.concatenate([history[-context:], tokens])
    first, end = max(1, len(stream) - len(tokens)), len(stream)
    inputs, targets, new = [], [], []
    for start in range(first, end, context):
        stop = min(start + context, end)
        begin = max(0, stop - 1 - context)
        inputs.append(stream[begin : stop - 1])
        targets.append(stream[begin + 1 : stop])
        new.append(np.arange(begin + 1, stop) >= start)
    if not inputs:
        return None
    return tuple(torch.from_numpy(np.stack(part)) for part in (inputs, targets, new))  # type: ignore[return-value]
