"""Fold an overlay into the base, if the texts that must not suffer allow it; reversible until confirmed.

    pending = learner.consolidate("kjv", {"shakespeare": held_out}, tolerance=0.003)
    pending.figures                     # canary -> perplexity of the base before, and after
    pending.revert() or pending.confirm()

The criterion: alone, without a guard, the path of the overlay may predict no canary worse than the base by
more than the tolerance. After that the base is what the path was; other overlays predict as before, to the
bit, as what differs from the new base. Tokens that wait for an update are learned from first.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from attractor.config import check_number
from attractor.continual.baselines.lora import LowRank
from attractor.continual.gates import Surprise
from attractor.continual.overlay import fingerprint
from attractor.evaluate import evaluate, perplexity
from attractor.lm import TrainableModel

if TYPE_CHECKING:
    from attractor.continual.guarded import GuardedLearner, Source


@dataclass
class Consolidation:
    """A base that was replaced, and can come back."""

    learner: "GuardedLearner"
    name: str
    figures: dict[str, tuple[float, float]]
    base: TrainableModel
    base_hash: str
    sources: "dict[str, Source]"

    def confirm(self) -> None:
        """The old base is gone, and the overlay with it: its source can no longer be forgotten.

        What the base is used to has changed: `calibrate` again before texts without labels.
        """
        learner = self._close()
        learner.consolidated.append(self.name)
        learner.usual = Surprise()

    def revert(self) -> None:
        """Put the old base back: everything is as before, to the bit."""
        learner = self._close()
        learner.base, learner.base_hash, learner.sources = self.base, self.base_hash, self.sources

    def _close(self) -> "GuardedLearner":
        if self.learner.consolidation is not self:
            raise ValueError("this consolidation was confirmed or reverted already")
        self.learner.consolidation = None
        return self.learner


def consolidate(
    learner: "GuardedLearner", name: str, canaries: Mapping[str, Any], tolerance: float
) -> Consolidation:
    check_number("tolerance", tolerance, "a share, 0 or more", lambda share: share >= 0)
    if learner.consolidation is not None:
        raise ValueError("a consolidation waits: confirm or revert it first")
    if not canaries:
        raise ValueError("no canaries were given: name one or more texts that must not get worse")
    if learner.config.learn.scale_factor != 1:
        raise ValueError("a base has no scale_factor of its own: consolidation needs scale_factor=1")
    if learner.archive is not None and set(learner.archive.names()) - learner.sources.keys():
        raise ValueError(f"overlays in {learner.archive.folder} would not fit another base: move them first")
    held = learner.sources[learner._known(name)]
    learner.flush()
    others = {other: own for other, own in learner.sources.items() if other != name}
    sizes = [
        {number: layer.num_patches for number, layer in model.apn_layers().items()}
        for model in (learner.base, *(own.branch.model for own in learner.sources.values()))
    ]
    if others and (any(size != sizes[0] for size in sizes) or learner.config.attention == "low_rank"):
        raise ValueError(
            f"{sorted(others)} could not be kept over a base with more patches or other attention: drop or "
            "export them first"
        )
    figures = {
        text: tuple(
            perplexity(evaluate(path, learner.tokens_in(tokens)))
            for path in (learner.base, held.branch.model)
        )
        for text, tokens in canaries.items()
    }
    worse = {text: (old, new) for text, (old, new) in figures.items() if not new <= (1 + tolerance) * old}
    if worse:
        worst = ", ".join(f"{text} {old:.3f} -> {new:.3f}" for text, (old, new) in worse.items())
        raise ValueError(f"{name!r} stays an overlay: more than {100 * tolerance:g} % worse on {worst}")
    base = merged(held.branch.model)
    base_hash = fingerprint(base)
    kept = {other: _moved(learner, base, base_hash, own) for other, own in others.items()}
    pending = Consolidation(
        learner,
        name,
        cast(dict[str, tuple[float, float]], figures),
        learner.base,
        learner.base_hash,
        learner.sources,
    )
    learner.base, learner.base_hash, learner.sources = base, base_hash, kept
    learner.consolidation = pending
    for own in kept.values():
        learner.measure(own)
    return pending


@torch.no_grad()
def merged(model: TrainableModel) -> TrainableModel:
    """A model of its own: no memory shared, low-rank deltas in the weights they stand beside."""
    own: Any = copy.deepcopy(model)
    for owner in list(own.modules()):
        for name, adapter in list(owner.named_children()):
            if isinstance(adapter, LowRank):
                adapter.linear.weight = nn.Parameter(adapter.linear.weight.detach().clone())
                adapter.merge()
                setattr(owner, name, adapter.linear)
    own.config = own.config_now()
    return own.requires_grad_(False).eval()


@torch.no_grad()
def _moved(learner: "GuardedLearner", base: TrainableModel, base_hash: str, held: "Source") -> "Source":
    """The same path over the new base."""
    branch = learner._branch(base, base_hash)
    theirs = dict(held.branch.model.named_parameters())
    for name, parameter in branch.model.named_parameters():
        if not torch.equal(parameter, theirs[name]):
            parameter.copy_(theirs[name])
    moved = copy.copy(held)
    moved.branch, moved.versions, moved.usual = branch, {}, ()
    moved.learner = learner._teacher(branch, held.tokens)
    return moved
