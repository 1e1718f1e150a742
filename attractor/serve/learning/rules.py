"""Which lessons may be published: canaries, a budget of drift, quotas.

A canary is a text that must not suffer. After a lesson was tried on the weights, and before anybody else can
see it, every canary is predicted twice: by the mixture that readers get, and by the path that learned, alone.
The first may be no worse than under the base by more than the guard's bound and `canary_rise`; the second by
no more nats per token than the `drift` that a path may have in all. The base is the anchor: small steps add
up to the same limit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attractor.config import JSONConfig, check_number, check_size
from attractor.continual.guard import Guard
from attractor.evaluate import evaluate, perplexity
from attractor.generate import generate
from attractor.lm import LanguageModel
from attractor.serve.errors import Refused

SELF = "self"
"""The canary that is always there: a text that the base wrote."""


@dataclass(frozen=True, kw_only=True)
class Rules(JSONConfig):
    canary_rise: float = 0.01
    """Share by which a canary's perplexity may rise for readers, beyond what the guard's bound allows."""
    drift: float | None = 2.0
    """Nats per token that a path alone may lose on a canary, over all of its lessons."""
    canary_tokens: int = 512
    """Of each canary that every lesson is judged by; an audit takes all of it. Where lessons are taught, as
    much as this of the one that the base writes itself: of the others all is taken that fits."""
    audit_every: int = 64
    """Lessons after which whole canaries are read; where one fell, everything goes back to the last audit."""
    lesson_tokens: int = 65_536
    """The longest lesson."""
    source_tokens: int | None = None
    """The most that one source may teach, in all."""

    def __post_init__(self) -> None:
        check_number("canary_rise", self.canary_rise, "a share, 0 or more", lambda share: share >= 0)
        if self.drift is not None:
            check_number("drift", self.drift, "a number of nats, 0 or more", lambda nats: nats >= 0)
        for name in ("canary_tokens", "audit_every", "lesson_tokens"):
            check_size(name, getattr(self, name))
        if self.source_tokens is not None:
            check_size("source_tokens", self.source_tokens)


def self_canary(base: LanguageModel, tokens: int, seed: int = 0) -> np.ndarray:
    """What the base writes: whoever changes it beyond recognition predicts this badly."""
    start = torch.zeros(1, 1, dtype=torch.int64, device=base.device)
    written = [int(token) for token in generate(base, start, max_tokens=tokens, seed=seed)]
    return np.array([0, *written], dtype=np.int64)


class Canaries:
    """Texts that must not suffer, and what the base makes of them."""

    def __init__(self, base: LanguageModel, texts: Mapping[str, np.ndarray], rules: Rules) -> None:
        self.base, self.rules = base, rules
        self.whole = dict(texts)
        for name, tokens in self.whole.items():
            if len(tokens) < 2:
                raise ValueError(f"canary {name!r} has {len(tokens)} tokens; it needs two or more")
        self.part = {name: tokens[: rules.canary_tokens + 1] for name, tokens in texts.items()}
        self.anchor = {
            size: {name: evaluate(base, tokens) for name, tokens in kept.items()}
            for size, kept in (("part", self.part), ("whole", self.whole))
        }

    def measure(
        self, guard: Guard | None, path: LanguageModel | None, *, whole: bool = False
    ) -> dict[str, Any]:
        """For every canary: its perplexity under the guard and the most it may be, and the path's drift."""
        texts, anchor = (self.whole, self.anchor["whole"]) if whole else (self.part, self.anchor["part"])
        figures: dict[str, Any] = {}
        for name, tokens in texts.items():
            told: dict[str, float] = {"base": perplexity(anchor[name])}
            if guard is not None:
                costs = guard.bound(len(tokens) - 1) / (len(tokens) - 1)
                told["most"] = (1 + self.rules.canary_rise) * perplexity(anchor[name] + costs)
                told["perplexity"] = perplexity(evaluate(guard, tokens))
            if path is not None:
                told["drift"] = evaluate(path, tokens) - anchor[name]
            figures[name] = told
        return figures

    def judge(
        self, guard: Guard | None, path: LanguageModel | None, *, whole: bool = False
    ) -> dict[str, Any]:
        """The same; Refused if a canary is not kept."""
        figures = self.measure(guard, path, whole=whole)
        for name, told in figures.items():
            if not told.get("perplexity", 0.0) <= told.get("most", 0.0):  # NaN is refused too
                reached, most = told["perplexity"], told["most"]
                raise Refused(f"canary {name!r} would be at {reached:.5g}; {most:.5g} is the most", figures)
            if self.rules.drift is not None and not told.get("drift", 0.0) <= self.rules.drift:
                raise Refused(
                    f"the path would be {told['drift']:.3g} nats per token worse than the base on canary "
                    f"{name!r}; its budget of drift is {self.rules.drift:g}",
                    figures,
                )
        return figures
