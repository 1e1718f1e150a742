"""What the package asks of a language model, of each of its three kinds.

`attractor.model.GPT`, `attractor.hf.CausalLM` (a retrofitted Hugging Face model) and
`attractor.continual.guard.Guard` (a mixture of models) are language models: `evaluate` and `generate` take
any of them. The first two are trainable models too: their APN layers can be looked at, and taught.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, overload, runtime_checkable

import torch
from torch import Tensor, nn

from attractor.config import JSONConfig
from attractor.layer import APN, RoutingStats


class Sizes(Protocol):
    """What every model's configuration says."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def context(self) -> int:
        """The longest sequence that the model reads."""


class Cache(Protocol):
    """What a model keeps of the tokens that it has read, so that the next one costs one token."""

    length: int


@runtime_checkable
class LanguageModel(Protocol):
    """A torch module that predicts the next token: tokens (B, T) -> logits (B, T, V)."""

    @property
    def config(self) -> Sizes: ...
    @property
    def device(self) -> torch.device:
        """The device on which tokens are expected."""

    def __call__(self, tokens: Tensor, *, cache: Any = None) -> Tensor: ...
    def new_cache(self, batch: int, after: Any = None) -> Cache:
        """Make a cache to read `batch` texts piece by piece; `after` is the full cache that it replaces."""

    def modules(self) -> Iterator[nn.Module]: ...
    def train(self, mode: bool = True) -> Any: ...
    def eval(self) -> Any: ...


@runtime_checkable
class TrainableModel(LanguageModel, Protocol):
    """A language model with APN layers that learners, overlays and the monitor know by their numbers.

    In every kind of model, `named_parameters` and files call the parameters of layer N blocks.N.ffn.*.
    """

    @overload
    def __call__(
        self, tokens: Tensor, *, cache: Any = None, return_stats: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def __call__(
        self, tokens: Tensor, *, cache: Any = None, return_stats: Literal[True]
    ) -> tuple[Tensor, dict[int, RoutingStats]]: ...
    def apn_layers(self) -> dict[int, APN]: ...
    def new_row(self) -> Any:
        """An empty `attractor.model.RaggedCache`, for a text that is read together with others."""

    def config_now(self) -> JSONConfig:
        """All that distinguishes this model from another, with the patches that its layers have by now."""

    def save_pretrained(self, folder: str | Path) -> None: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def state_dict(self) -> Mapping[str, Tensor]: ...
    def get_parameter(self, target: str) -> nn.Parameter: ...
    def get_submodule(self, target: str) -> nn.Module: ...
    def requires_grad_(self, requires_grad: bool = True) -> Any: ...


@contextmanager
def mode(module: nn.Module | LanguageModel, *, training: bool) -> Iterator[None]:
    """Call `module.train(training)` for a while; then every part has its own mode again."""
    before = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, was_training in before:
            part.training = was_training


@contextmanager
def inputs_of(layer: nn.Module) -> Iterator[list[Tensor]]:
    """What a layer is given in each call of it meanwhile, without its gradients."""
    seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    try:
        yield seen
    finally:
        hook.remove()
