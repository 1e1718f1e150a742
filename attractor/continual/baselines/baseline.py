"""What every baseline shares: the parameters that learn, the optimizer, steps whole or not at all."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor.config import check_choice, check_number
from attractor.continual.update import NotFiniteUpdate
from attractor.data import IGNORED, Batch
from attractor.lm import LanguageModel, mode
from attractor.model import GPT

Train = Literal["all", "ffn"] | Sequence[nn.Parameter]


class Options(TypedDict, total=False):
    """What every method takes by keyword and hands on to `Baseline`, where the defaults are."""

    learning_rate: float
    weight_decay: float
    clip_norm: float | None
    dropout: bool
    autocast: Callable[[], AbstractContextManager]


class Baseline:
    """Learns a model in place, batch by batch. Subclasses override `penalty` and `project_gradients`.

    `train` is "all", "ffn" (of every block, of any kind) or a list of the model's parameters; the rest
    is frozen until `finish`. `dropout` says whether the model's dropout is on while it learns.
    """

    def __init__(
        self,
        model: GPT,
        train: Train = "all",
        *,
        learning_rate: float = 1e-4,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
        dropout: bool = True,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        check_number("learning_rate", learning_rate, "a positive number", lambda rate: rate > 0)
        check_number("weight_decay", weight_decay, "a number, 0 or more", lambda decay: decay >= 0)
        if clip_norm is not None:
            check_number("clip_norm", clip_norm, "a positive number", lambda norm: norm > 0)
        self.trainable = _choose(model, train)
        self.model, self.clip_norm, self.dropout, self.autocast = model, clip_norm, dropout, autocast
        self.done = False
        self._flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
        learning = set(self.trainable)
        for parameter in self._flags:
            parameter.requires_grad_(parameter in learning)
        self.optimizer = torch.optim.AdamW(
            self.trainable, lr=learning_rate, betas=(0.9, 0.99), weight_decay=weight_decay
        )

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step; a schedule may set it."""
        return float(self.optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        check_number("learning_rate", rate, "a number, 0 or more", lambda r: r >= 0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Learn from one batch, (B, T) each; returns its loss in nats per token, as it was before the step.

        Where a loss or a gradient is not finite, raises NotFiniteUpdate, and nothing was changed.
        """
        inputs, targets = check_batch(self.model, (inputs, targets))
        try:
            with mode(self.model, training=self.dropout):
                loss = self.loss(inputs, targets)
                gradients = self.gradients(loss + self.penalty())
                for parameter, gradient in zip(self.trainable, gradients, strict=True):
                    parameter.grad = gradient
                self.project_gradients()
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.trainable, self.clip_norm)
            self.take_step()
        finally:
            self.optimizer.zero_grad()
        return float(loss.detach())

    def penalty(self) -> Tensor | float:
        """What is added to the loss of a batch."""
        return 0.0

    def project_gradients(self) -> None:
        """Change the gradients of `trainable` before the optimizer uses them."""

    def take_step(self) -> None:
        self.optimizer.step()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy, nats per token."""
        return F.cross_entropy(self.logits(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits (B, T, V) in float32 at least."""
        with self.autocast():
            logits = self.model(inputs)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        """The gradient of each trainable parameter, zero where the loss does not depend on it."""
        if self.done:
            raise RuntimeError("this method is finished: build a new one to learn on")
        if not loss.isfinite():
            raise NotFiniteUpdate(f"the loss is {float(loss.detach())}; nothing was changed")
        gradients = torch.autograd.grad(loss, self.trainable, materialize_grads=True)
        if not nn.utils.get_total_norm(gradients).isfinite():
            raise NotFiniteUpdate("a gradient is not finite; nothing was changed")
        return gradients

    def finish(self) -> GPT:
        """The adapted model, every `requires_grad` as it was found. The method is then done."""
        for parameter, flag in self._flags.items():
            parameter.requires_grad_(flag)
        self._flags = {}
        self.done = True
        return self.model


def _choose(model: GPT, train: Train) -> list[nn.Parameter]:
    if isinstance(train, str):
        check_choice("train", train, ("all", "ffn"))
        if train == "ffn":
            return [parameter for block in model.blocks for parameter in block.ffn.parameters()]
        return list(model.parameters())
    if not train or len(set(train)) < len(train) or not set(train) <= set(model.parameters()):
        raise ValueError('train must be "all", "ffn" or parameters of this model, one or more, each once')
    return list(train)


def check_batch(model: LanguageModel, batch: Batch, name: str = "the batch") -> Batch:
    """Inputs and targets on the model's device; a ValueError where they are not a batch for this model."""
    if len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
        raise ValueError(f"{name} must be two tensors, inputs and targets")
    inputs, targets = batch
    shapes = f"inputs of shape {tuple(inputs.shape)} and targets of shape {tuple(targets.shape)}"
    if inputs.dim() != 2 or inputs.shape != targets.shape or inputs.numel() == 0:
        raise ValueError(f"{name} has {shapes}; both must be the same (sequences, tokens), and not empty")
    if inputs.dtype != torch.int64 or targets.dtype != torch.int64:
        raise ValueError(f"{name} has tokens of {inputs.dtype} and {targets.dtype}; both must be torch.int64")
    if inputs.shape[1] > model.config.context:
        raise ValueError(f"{name} has {shapes}; the model's context is {model.config.context}")
    counted = targets[targets != IGNORED]
    for tokens in (inputs, counted):  # on a GPU a token beyond the vocabulary would end the process
        if ((tokens < 0) | (tokens >= model.config.vocab_size)).any():
            raise ValueError(f"{name} has tokens outside 0 to {model.config.vocab_size - 1}")
    device = model.device
    return inputs.to(device), targets.to(device)


class Memory:
    """Old sequences, (N, T) inputs and targets, to draw some of at random, none twice in a draw."""

    def __init__(self, model: GPT, sequences: Batch, seed: int) -> None:
        inputs, targets = check_batch(model, sequences, "the memory")
        self.inputs, self.targets = inputs.clone(), targets.clone()
        self.offered = len(inputs)
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> Batch:
        if count > len(self.inputs):
            raise ValueError(f"the memory holds {len(self.inputs)} sequences, {count} were asked for")
        order = torch.randperm(len(self.inputs), generator=self._generator)
        chosen = order[:count].to(self.inputs.device)
        return self.inputs[chosen], self.targets[chosen]

    def offer(self, inputs: Tensor, targets: Tensor) -> None:
        """Offer sequences: of all so far and those at the start, each is kept with the same chance."""
        ranks = self.offered + 1 + torch.arange(len(inputs))
        places = (torch.rand(len(inputs), generator=self._generator, dtype=torch.float64) * ranks).long()
        kept = {place: row for row, place in enumerate(places.tolist()) if place < len(self.inputs)}
        self.inputs[list(kept)] = inputs[list(kept.values())]
        self.targets[list(kept)] = targets[list(kept.values())]
        self.offered += len(inputs)


def flatten(gradients: Iterable[Tensor | None]) -> Tensor:
    """One vector, in float64: inner products of long vectors lose too much in float32."""
    return torch.cat([gradient.flatten().double() for gradient in gradients if gradient is not None])


def write_gradients(vector: Tensor, parameters: list[nn.Parameter]) -> None:
    """Write a vector that `flatten` made back to the gradients."""
    pieces = vector.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter).to(parameter.dtype)
