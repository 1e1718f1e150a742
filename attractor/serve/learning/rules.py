"""Which changes may be published: canaries, a budget of drift, quotas.

A canary is a text that must not suffer. After a text was tried on the weights, and before anybody else can
see it, every canary is predicted twice: by the mixture that readers get, and by the path that learned, alone.
The first may be no worse than under the base by more than the guard's bound and `canary_rise`; the second by
no more nats per token than the `drift` that a path may have in all. The base is the anchor: small steps add
up to the same limit.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from attractor.continual.guard import Guard
from attractor.evaluate import evaluate, perplexity
from attractor.generate import generate
from attractor.lm import LanguageModel
from attractor.serve.config import Rules
from attractor.serve.errors import Refused

SELF = "self"
"""The canary that is always there: a text that the base wrote."""


def self_canary(base: LanguageModel, tokens: int, seed: int = 0) -> np.ndarray:
    """What the base writes: a model that is changed beyond recognition predicts this badly."""
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
            found: dict[str, float] = {"base": perplexity(anchor[name])}
            if guard is not None:
                costs = guard.bound(len(tokens) - 1) / (len(tokens) - 1)
                found["most"] = (1 + self.rules.canary_rise) * perplexity(anchor[name] + costs)
                found["perplexity"] = perplexity(evaluate(guard, tokens))
            if path is not None:
                found["drift"] = evaluate(path, tokens) - anchor[name]
            figures[name] = found
        return figures

    def judge(
        self, guard: Guard | None, path: LanguageModel | None, *, whole: bool = False
    ) -> dict[str, Any]:
        """The same; Refused if a canary is not kept."""
        figures = self.measure(guard, path, whole=whole)
        for name, found in figures.items():
            if not found.get("perplexity", 0.0) <= found.get("most", 0.0):  # NaN is refused too
                reached, most = found["perplexity"], found["most"]
                raise Refused(f"canary {name!r} would be at {reached:.5g}; {most:.5g} is the most", figures)
            if self.rules.drift is not None and not found.get("drift", 0.0) <= self.rules.drift:
                raise Refused(
                    f"the path would be {found['drift']:.3g} nats per token worse than the base on canary "
                    f"{name!r}; its budget of drift is {self.rules.drift:g}",
                    figures,
                )
        return figures
