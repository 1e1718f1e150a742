"""Every way to adapt a model that the benchmark compares, under one roof.

    adapter = METHODS["dense, full"].make(Situation(base, memory, rate=1e-3))
    adapter.step(inputs, targets); adapter.model; adapter.extra_bytes

An adapter leaves the base alone and teaches a model of its own. Any of them can then stand behind the guard:
that is one line, `Guard({"base": base, "adapted": adapter.model})`, and so every method has a guarded twin.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from attractor.continual.baselines import AGEM, EWC, GEM, FineTune, LoRA, Replay
from attractor.continual.config import AllocationConfig, AlsoName, AttentionName, LearnConfig, UpdateConfig
from attractor.continual.learner import OnlineLearner
from attractor.continual.overlay import Branch
from attractor.data import Batch
from attractor.evaluate import autocast
from attractor.lm import TrainableModel
from attractor.model import GPT

CLIP = 1.0
"""On the norm of gradients, the same for every method."""
PAPER_ROLES = ("decoders", "gates", "encoder", "prototypes")
"""U, a, b, V and P: what the paper's rule trains."""


@dataclass(frozen=True)
class Situation:
    """What a method may use: the model as it is, some of the old text, and the rate chosen for it."""

    base: GPT
    by_domain: Sequence[Batch]  # (N, T) sequences of each domain of the old text
    background: np.ndarray  # tokens of the old text, for a learner that ranks patches
    rate: float
    seed: int = 0

    def cast(self) -> AbstractContextManager:
        return autocast(self.base.device, "auto")

    def options(self) -> dict[str, Any]:
        return {"learning_rate": self.rate, "clip_norm": CLIP, "dropout": False, "autocast": self.cast}

    @property
    def memory(self) -> Batch:
        """Sequences of all domains, in a random order."""
        inputs, targets = (torch.cat([batch[part] for batch in self.by_domain]) for part in (0, 1))
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(self.seed))
        order = order.to(inputs.device)
        return inputs[order], targets[order]

    def few(self, count: int) -> Batch:
        inputs, targets = self.memory
        return inputs[:count], targets[:count]


class Steps(Protocol):
    learning_rate: float

    def step(self, inputs: Tensor, targets: Tensor) -> float: ...


@dataclass
class Adapter:
    """A method at work."""

    method: Steps
    model: TrainableModel
    trained: int
    extra_bytes: int = 0  # kept while learning, beside weights and optimizer: memories, Fisher information
    branch: Branch | None = None

    def step(self, inputs: Tensor, targets: Tensor, rate: float) -> float:
        self.method.learning_rate = rate
        return self.method.step(inputs, targets)


class Method(NamedTuple):
    model: str  # which pretrained model: "dense", "apn", "moe" or "switch"
    make: Callable[[Situation], Adapter]


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def baseline(build: Callable[[GPT, Situation], Any], extra: Callable[[Any], int] = lambda method: 0) -> Any:
    def make(situation: Situation) -> Adapter:
        model = copy.deepcopy(situation.base)
        method = build(model, situation)
        trained = sum(parameter.numel() for parameter in method.trainable)
        return Adapter(method, model, trained, extra(method))

    return make


def _fine_tune(train: Any) -> Any:
    return baseline(lambda model, s: FineTune(model, train, **s.options()))


def _blocks_without_norms(model: GPT, s: Situation) -> FineTune:
    """What an overlay of patches and attention trains, in a dense model: no embedding, no norms."""
    parts = [part for block in model.blocks for part in (block.attention, block.ffn)]
    return FineTune(model, [p for part in parts for p in part.parameters()], **s.options())


def _lora(targets: Any) -> Any:
    return baseline(lambda model, s: LoRA(model, 16, 32, targets=targets, seed=s.seed, **s.options()))


def _ewc(strength: float) -> Any:
    def build(model: GPT, s: Situation) -> EWC:
        return EWC(model, [s.few(64)], strength, seed=s.seed, **s.options())

    return baseline(build, lambda method: _nbytes([*method.fisher, *method.centre]))


def _gem(model: GPT, s: Situation) -> GEM:
    """One memory for each domain of the old text, as large as two batches."""
    memories = [(inputs[:64], targets[:64]) for inputs, targets in s.by_domain]
    return GEM(model, memories, of="step", **s.options())


def _agem(model: GPT, s: Situation) -> AGEM:
    return AGEM(model, s.memory, min(16, len(s.memory[0])), seed=s.seed, of="step", **s.options())


def replay(fraction: float, *, remember: bool = False) -> Any:
    def build(model: GPT, s: Situation) -> Replay:
        return Replay(model, s.memory, fraction, remember=remember, seed=s.seed, **s.options())

    return baseline(build, lambda method: _nbytes([method.memory.inputs.to(torch.uint8)]))


def _paper_rule(model: GPT, s: Situation) -> FineTune:
    roles = [p for layer in model.apn_layers().values() for p in layer.parameters_of(*PAPER_ROLES)]
    return FineTune(model, roles, **s.options(), weight_decay=0.01)  # torch's own, as in the paper's code


def _local(share: float | None = None) -> Callable[[Situation], Adapter]:
    """Strictly local; with a share, only those patches learn that B uses more than A does."""

    def make(s: Situation) -> Adapter:
        model = copy.deepcopy(s.base)
        most = None
        if share is not None:
            most = max(1, round(share * min(layer.num_patches for layer in model.apn_layers().values())))
        update = UpdateConfig(learning_rate=s.rate, clip_norm=CLIP)
        allocation = AllocationConfig(usage_horizon=10**12)  # what A uses stays what it was
        config = LearnConfig(update=update, max_patches=most, allocation=allocation)
        learner = OnlineLearner(model, config=config)
        if share is not None:
            learner.set_background(s.background)
        return Adapter(learner, model, sum(p.numel() for _, _, p in learner.update.parameters()))

    return make


def _overlay(
    attention: AttentionName = "off", also: tuple[AlsoName, ...] = ()
) -> Callable[[Situation], Adapter]:
    def make(s: Situation) -> Adapter:
        branch = Branch(s.base, roles=PAPER_ROLES, attention=attention, rank=16, also=also, seed=s.seed)
        update = UpdateConfig(train=PAPER_ROLES, learning_rate=s.rate, clip_norm=CLIP)
        config = LearnConfig(update=update)
        learner = OnlineLearner(branch.model, config=config, others=branch.others)
        trained = sum(p.numel() for _, _, p in learner.update.parameters())
        return Adapter(learner, branch.model, trained, branch=branch)

    return make


METHODS = {
    "dense, full": Method("dense", _fine_tune("all")),
    "dense, FFN only": Method("dense", _fine_tune("ffn")),
    "dense, FFN + attention": Method("dense", baseline(_blocks_without_norms)),
    "dense, LoRA on FFN": Method("dense", _lora("ffn")),
    "dense, LoRA on all": Method("dense", _lora("all")),
    "dense, EWC 0.1": Method("dense", _ewc(0.1)),
    "dense, EWC 1": Method("dense", _ewc(1.0)),
    "dense, EWC 10": Method("dense", _ewc(10.0)),
    "dense, GEM": Method(
        "dense", baseline(_gem, lambda m: _nbytes([inputs.to(torch.uint8) for inputs, _ in m.memories]))
    ),
    "dense, A-GEM": Method("dense", baseline(_agem, lambda m: _nbytes([m.memory.inputs.to(torch.uint8)]))),
    "dense, replay 1 %": Method("dense", replay(0.01)),
    "dense, replay 5 %": Method("dense", replay(0.05)),
    "MoE, FFN only": Method("moe", _fine_tune("ffn")),
    "Switch, FFN only": Method("switch", _fine_tune("ffn")),
    "APN, full": Method("apn", _fine_tune("all")),
    "APN, paper rule": Method("apn", baseline(_paper_rule)),
    "APN, strictly local": Method("apn", _local()),
    "APN, ranked": Method("apn", _local(0.25)),
    "APN, overlay": Method("apn", _overlay()),
    "APN, overlay + attention rank 16": Method("apn", _overlay("low_rank")),
    "APN, overlay + attention": Method("apn", _overlay("whole")),
    "APN, overlay + all": Method("apn", _overlay("whole", ("embedding", "norms"))),
}
"""Row of the table -> how. "overlay + all" has attention, norms and embedding of its own, beside patches."""
