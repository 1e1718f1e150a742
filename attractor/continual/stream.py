"""Teach a learner texts, one after the other: canaries, a log, checkpoints, and a polite stop.

    summary = adapt(learner, {"kjv": tokens}, out=Path("runs/adapted"), canary=held_out)

`out`/learner is the newest checkpoint and `out`/log.jsonl the story: losses before learning, canary
perplexities, what the gates held back, allocations. A run that was stopped goes on from its checkpoint.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from attractor.continual.observation import Observation, Totals
from attractor.files import finite, read_jsonl

Report = Callable[[dict[str, Any]], None]


class Learner(Protocol):
    """OnlineLearner, GuardedLearner, or another that learns from a stream."""

    notes: dict[str, Any]
    totals: Totals

    @property
    def budget(self) -> int: ...
    def observe(self, text: Any, source: str | None) -> Observation: ...
    def flush(self) -> Observation: ...
    def perplexity(self, text: Any) -> float: ...
    def usage_entropy(self) -> float: ...
    def monitor(self) -> dict[str, float]: ...
    def save(self, folder: Path) -> None: ...


def adapt(
    learner: Learner,
    texts: Mapping[str, np.ndarray],
    out: Path,
    *,
    canary: np.ndarray | None = None,
    every: int = 16_384,
    labelled: bool = True,
    stop: Callable[[], bool] = lambda: False,
    report: Report = lambda record: None,
) -> dict[str, Any]:
    """Observe every text in pieces of `every` tokens (rounded up to the budget), with a record after each.

    A checkpoint is written every 16 pieces, after each text, when stopped and when a piece fails.
    Without labels the learner does not know which text a piece is from. Returns the canary's perplexity
    before and after, and for each text the loss of its first and last piece; what is left over at its end is
    no piece if it is shorter than half of one.
    """
    plan = [[name, len(tokens), _hash(tokens)] for name, tokens in texts.items()]
    watched = None if canary is None else _hash(canary)
    notes = learner.notes
    if not notes:
        notes = {
            "text": 0,
            "offset": 0,
            "plan": plan,
            "losses": {},
            "canary": watched,
            "canary_before": _canary(learner, canary),
        }
    elif notes["plan"] != plan:
        known = ", ".join(f"{count:,} tokens of {name}" for name, count, _ in notes["plan"])
        raise ValueError(f"{out} adapts to {known}; resume with the same texts, and as many tokens of them")
    elif notes["canary"] != watched:
        raise ValueError(f"{out} watched another canary; give that one, or before and after are two texts")
    out.mkdir(parents=True, exist_ok=True)
    kept = read_jsonl(out / "log.jsonl", "tokens", learner.totals.tokens)
    every = -(-every // learner.budget) * learner.budget  # so that no lesson waits at a checkpoint
    names, pieces, stopped = list(texts), 0, False

    def save() -> None:
        learner.notes = notes
        learner.save(out / "learner")

    with (out / "log.jsonl").open("w") as log:
        log.writelines(json.dumps(record) + "\n" for record in kept)
        while not stopped and notes["text"] < len(names):
            name = names[notes["text"]]
            tokens = texts[name][notes["offset"] : notes["offset"] + every]
            try:
                seen = learner.observe(tokens, source=name if labelled else None)
            except Exception as error:  # what was learned before it stays learned
                done = getattr(error, "observed", Observation()).tokens
                notes = {**notes, "offset": notes["offset"] + done}
                save()
                raise
            offset, pieces = notes["offset"] + len(tokens), pieces + 1
            is_last = offset >= len(texts[name])
            losses = notes["losses"].get(name, {"first": seen.loss, "last": seen.loss})
            if 2 * len(tokens) >= every:
                losses = {**losses, "last": seen.loss}
            notes = {
                **notes,
                "losses": {**notes["losses"], name: losses},
                "text": notes["text"] + is_last,
                "offset": 0 if is_last else offset,
            }
            stopped = stop()
            if is_last:
                seen = seen.then(learner.flush())
            record = finite(describe(learner, seen) | {"canary": _canary(learner, canary)})
            log.write(json.dumps(record) + "\n")
            log.flush()
            report(record)
            if is_last or stopped or pieces % 16 == 0:
                save()
    return {
        "canary_before": notes["canary_before"],
        "canary_after": _canary(learner, canary),
        "losses": notes["losses"],
        "interrupted": stopped and notes["text"] < len(texts),
        **learner.monitor(),
    }


def describe(learner: Learner, seen: Observation) -> dict[str, Any]:
    """One record of the log."""
    return {
        "tokens": learner.totals.tokens,
        "source": seen.source,
        "loss": seen.loss,
        "taught": seen.taught,
        "held_back": seen.held_back,
        "updates": seen.updates,
        "patches": {str(layer): count for layer, count in seen.patches.items()},
        "largest_change": {str(layer): length for layer, length in seen.largest_change.items()},
        "usage_entropy": learner.usage_entropy(),
        "allocations": [event._asdict() for event in seen.allocations],
    }


def _canary(learner: Learner, tokens: np.ndarray | None) -> float | None:
    return None if tokens is None else learner.perplexity(tokens)


def _hash(tokens: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype=np.int64).tobytes()).hexdigest()
