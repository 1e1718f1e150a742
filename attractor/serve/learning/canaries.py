"""Texts that learning must leave alone: the operator's own, short prompts, and what the base would write.

Where texts are learned, every canary is predicted twice after a text was tried on the weights, and before
anybody else can see it: by the mixture that readers get, and by the path that learned, alone. The first may
be no worse than under the base by more than the guard's bound and `canary_rise`; the second by no more nats
per token than the `drift` that a path may have in all. The base is the anchor: small steps add up to the same
limit.

    canaries = Canaries(base, {"news": tokens}, rules)
    canaries.judge(guard, path)               # Refused, if one of them suffers

Where lessons are taught, a lesson acts on a token only if its key lies in a basin. So the keys of all
canaries are kept, and a lesson whose basins hold none of them changes nothing there, to the bit. Only where
it does is a text predicted, with the lesson and without.

    canaries = BasinCanaries(net, lessons, {"news": tokens}, rules, context=512)
    for doing in canaries.prepare(): ...      # once, in pieces
    verdict = canaries.judge(patches_of)      # Refused, if one of them suffers from these lessons' patches
    canaries.accept(verdict)                  # once they are there
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attractor import ops
from attractor.continual.guard import Guard
from attractor.continual.lessons import Lessons
from attractor.evaluate import evaluate, perplexity
from attractor.generate import generate
from attractor.hf.causal import CausalLM
from attractor.hf.halves import Halves
from attractor.hf.net import Retrofit
from attractor.hf.teachable import NAME
from attractor.lm import LanguageModel
from attractor.serve.config import Rules
from attractor.serve.errors import Refused, Unavailable

SELF = "self"
"""The canary that is always there: a text that the base wrote."""
WINDOW = 128
"""Tokens that are read at once: a text is judged by the windows that a lesson enters."""
MOST = 8192
"""Tokens of a canary whose keys are kept."""
CLOSE = 1e-4
"""So close to a basin counts as inside: passes over batches of other shapes round differently."""
SHORT = "short prompts"
TOGETHER = 8
"""So many short prompts are gone on from at once: a token of all of them takes hardly longer than of one."""
WRITTEN = 8
"""Tokens that the base writes after each short prompt, for this canary."""
PROMPTS = (
    "Hello", "Hi!", "Yes", "The", "Once upon a time", "How are you?", "Thank you", "What is your name?",
    "The capital of France is", "The largest planet is", "Two plus two is", "Water boils at",
    "The president said", "In the year 1999", "My favourite food is", "She was born in",
    "He works as a", "Dear Sir or Madam,", "def main():", "import os", "1, 2, 3,", "A:", "Q: Why?",
    "It was a dark and", "The best way to learn is", "According to the report,", "I think that",
    "Summary:", "The company was founded in", "The city of London is", "Write a poem about", "Good night",
)  # fmt: skip
"""Beginnings that anybody may ask with. A lesson about one of them would change what everybody gets."""


def self_canary(base: LanguageModel, tokens: int) -> np.ndarray:
    """What the base writes: a model that is changed beyond recognition predicts this badly."""
    start = torch.zeros(1, 1, dtype=torch.int64, device=base.device)
    written = [int(token) for token in generate(base, start, max_tokens=tokens, seed=0)]
    return np.array([0, *written], dtype=np.int64)


def check_lengths(texts: Mapping[str, np.ndarray]) -> None:
    for name, tokens in texts.items():
        if len(tokens) < 2:
            raise ValueError(f"canary {name!r} has {len(tokens)} tokens; it needs two or more")


class Canaries:
    """Texts that must not suffer, and what the base makes of them."""

    def __init__(self, base: LanguageModel, texts: Mapping[str, np.ndarray], rules: Rules) -> None:
        self.base, self.rules = base, rules
        check_lengths(texts)
        self.whole = dict(texts)
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


@dataclass
class Canary:
    windows: list[Tensor] = field(default_factory=list)  # (T) tokens each
    keys: list[Tensor] = field(default_factory=list)  # (T, m) each
    base: dict[int, float] = field(default_factory=dict)  # window -> nats under the base
    rise: dict[int, float] = field(default_factory=dict)  # window -> nats more with all lessons

    def share(self, rise: Mapping[int, float]) -> float:
        """The share by which its perplexity is higher if these windows cost so many nats more."""
        return math.expm1(sum(rise.values()) / max(1, sum(len(window) - 1 for window in self.windows)))


@dataclass(frozen=True)
class Verdict:
    """What lessons that may be published do to the canaries."""

    figures: dict[str, Any]
    rises: dict[str, dict[int, float]]  # canary -> window -> nats


class BasinCanaries:
    def __init__(
        self,
        net: Retrofit,
        lessons: Lessons,
        texts: Mapping[str, np.ndarray],
        rules: Rules,
        context: int,
    ) -> None:
        if reserved := {SELF, SHORT} & texts.keys():
            raise ValueError(f"{min(reserved)!r} is a canary that the base writes: choose another name")
        check_lengths(texts)
        self.lessons, self.rules = lessons, rules
        self.base, self.taught = (CausalLM(net, name, context=context) for name in (None, NAME))
        self.halves = Halves(net, NAME)
        self.window = min(WINDOW, context)
        self.canaries = {name: Canary() for name in (*texts, SHORT, SELF)}
        self._failure: Exception | None = None
        self._pending = self._steps({name: np.asarray(text)[:MOST] for name, text in texts.items()})

    def prepare(self) -> Iterator[str]:
        """Read what was not read yet, a piece at a time, and say what is being read."""
        while True:  # it goes on where it was left
            if self._failure is not None:
                raise Unavailable(f"the canaries could not be read: {self._failure}") from self._failure
            try:
                doing = next(self._pending)
            except StopIteration:
                return
            except Exception as error:
                self._failure = error
                continue
            yield doing

    def _steps(self, texts: Mapping[str, np.ndarray]) -> Iterator[str]:
        for name, tokens in texts.items():
            for start in range(0, len(tokens) - 1, self.window):
                yield f"canary {name!r} is being read"
                self._add(name, tokens[start : start + self.window])
        prompts = [[*map(int, self.lessons.encode(prompt))][: self.window // 2] for prompt in PROMPTS]
        for start in range(0, len(prompts), TOGETHER):
            yield f"canary {SHORT!r} is being read ({start} of {len(prompts)})"
            part = prompts[start : start + TOGETHER]
            for tokens in self._continued(part, min(WRITTEN, self.window - max(map(len, part)))):
                self._add(SHORT, tokens)
        yield f"canary {SELF!r} is being written"
        self._add(SELF, *self._continued([[0]], min(self.window - 1, self.rules.canary_tokens)))

    def _continued(self, prompts: Sequence[list[int]], count: int) -> list[np.ndarray]:
        written = self.halves.write(prompts, count)
        return [np.array(prompt + more) for prompt, more in zip(prompts, written, strict=True)]

    @torch.no_grad()
    def _add(self, name: str, tokens: np.ndarray) -> None:
        """Keep the keys of a window, and what the lessons that are there do to it."""
        if len(tokens) < 2:
            return
        canary, window = self.canaries[name], torch.as_tensor(tokens.astype(np.int64))
        read = self.halves.read(window[None].to(self.base.device))
        canary.windows.append(window)
        canary.keys.append(self.lessons.layer.represent(read.to(self.lessons.layer.encoder.dtype)))
        patches = [patch for patch, owner in enumerate(self.lessons.owners) if owner >= 0]
        canary.rise |= self._rises(canary, patches, [len(canary.windows) - 1])

    # --- judging

    def judge(self, patches_of: Sequence[Sequence[int]]) -> Verdict:
        """What lessons with these patches, which are new, do to the canaries.

        Refused if a canary would suffer, with the places of the lessons that are at fault.
        """
        patches = [patch for own in patches_of for patch in own]
        rises = {
            name: canary.rise | self._rises(canary, patches, range(len(canary.windows)))
            for name, canary in self.canaries.items()
        }
        figures = {
            name: {
                "rise": canary.share(rises[name]),
                "most": self.rules.canary_rise,
                "windows": len(canary.windows),
                "windows_entered": len(rises[name]),
            }
            for name, canary in self.canaries.items()
        }
        for name, found in figures.items():
            if not found["rise"] <= found["most"]:  # NaN is refused too
                at_fault = self._at_fault(self.canaries[name], rises[name], patches_of)
                raise Refused(
                    f"canary {name!r} would be predicted worse: its perplexity would rise by "
                    f"{found['rise']:.2%}, and {found['most']:.2%} is the most",
                    figures,
                    at_fault,
                )
        return Verdict(figures, rises)

    def _at_fault(
        self, canary: Canary, rise: dict[int, float], patches_of: Sequence[Sequence[int]]
    ) -> list[int]:
        """Which of several lessons would have to go, the worst first, until the rest is allowed.

        Nothing is read again: a window that a lesson enters is taken to be the base's without it.
        """
        windows = {place: set(self._entered(canary, own, rise)) for place, own in enumerate(patches_of)}
        entered = {place: own for place, own in windows.items() if own}
        found: list[int] = []
        while entered:
            staying = canary.rise.keys() | set().union(*entered.values())
            if canary.share({window: rise[window] for window in staying}) <= self.rules.canary_rise:
                break
            worst = max(entered, key=lambda place: sum(rise[window] for window in entered[place]))
            found.append(worst)
            del entered[worst]
        return sorted(found)

    def accept(self, verdict: Verdict) -> None:
        """The lessons that were judged are there now."""
        for name, rise in verdict.rises.items():
            self.canaries[name].rise = rise

    def measure_again(self) -> None:
        """Something was taken back: windows that were entered may not be any more."""
        patches = [patch for patch, owner in enumerate(self.lessons.owners) if owner >= 0]
        for canary in self.canaries.values():
            canary.rise = self._rises(canary, patches, sorted(canary.rise))

    def add(self, patches: Sequence[int]) -> None:
        """These are new, and somebody else judged them."""
        for canary in self.canaries.values():
            canary.rise |= self._rises(canary, patches, range(len(canary.windows)))

    @torch.no_grad()
    def _rises(self, canary: Canary, patches: Sequence[int], windows: Iterable[int]) -> dict[int, float]:
        """How many nats more each of these windows costs that has a token in one of the patches."""
        rises = {}
        for number in self._entered(canary, patches, windows):
            tokens = canary.windows[number].numpy()
            if number not in canary.base:
                canary.base[number] = evaluate(self.base, tokens) * (len(tokens) - 1)
            rises[number] = evaluate(self.taught, tokens) * (len(tokens) - 1) - canary.base[number]
        return rises

    @torch.no_grad()
    def _entered(self, canary: Canary, patches: Sequence[int], windows: Iterable[int]) -> list[int]:
        """Those of these windows that have a token in one of the patches."""
        layer = self.lessons.layer
        assert layer.radius is not None
        if not len(patches):
            return []
        prototypes = ops.unit(layer.prototypes[list(patches)].float())
        radius = layer.radius[list(patches)].float() - CLOSE
        return [number for number in windows if bool((canary.keys[number] @ prototypes.T > radius).any())]

    def figures(self) -> dict[str, dict[str, Any]]:
        """By how much the perplexity of each canary is higher, and how many of its windows differ at all."""
        return {
            name: {
                "rise": canary.share(canary.rise),
                "windows": len(canary.windows),
                "windows_entered": len(canary.rise),
            }
            for name, canary in self.canaries.items()
        }
