"""A retrofitted model as the tools of this package know models: a `TrainableModel`.

model = CausalLM(net, context=512)
evaluate(model, tokens); generate(model, prompt); OnlineLearner(model); Branch(model)
Guard({"base": CausalLM(net, None, context=512), "new": model})    # one copy of the weights
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from attractor.config import JSONConfig, check_size
from attractor.hf import files
from attractor.hf.net import Retrofit
from attractor.layer import APN, RoutingStats
from attractor.model import RaggedCache

IN_USE: Any = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalConfig(JSONConfig):
    """The settings that the tools ask a model for; `config_now` adds what distinguishes one from another."""

    vocab_size: int
    context: int
    """The longest sequence the model sees."""
    base: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The configuration of the base."""
    layers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Number of the block -> settings of its APN layer."""


class Cache:
    """The base's own cache of keys and values; it makes it when it reads the first tokens."""

    def __init__(self) -> None:
        self.length = 0
        self.past: Any = None

    def arguments(self, tokens: Tensor) -> dict[str, Any]:
        """What the base is to know besides the tokens."""
        return {"past_key_values": self.past}

    def took(self, past: Any, steps: int) -> None:
        self.past, self.length = past, self.length + steps


class RaggedRows(RaggedCache):
    """Our memory in the hands of the base, which sees a cache of its own kind."""

    def arguments(self, tokens: Tensor) -> dict[str, Any]:
        from attractor.hf import caches

        steps, count = tokens.shape[1], itertools.count(len(self.layers))
        past = caches.Cache(layer_class_to_replicate=lambda: caches.RowsLayer(self, next(count)))
        past.layers = [caches.RowsLayer(self, number) for number in range(len(self.layers))]
        given: dict[str, Any] = {"past_key_values": past}
        if not self.is_even:
            positions = self.positions(steps, tokens.device)
            columns = torch.arange(self.length + steps, 0, -1, device=tokens.device)
            given |= {"position_ids": positions, "attention_mask": (columns <= positions[:, -1:] + 1).long()}
        return given

    def took(self, past: Any, steps: int) -> None:
        self.length += steps


class CausalLM(nn.Module):
    """A retrofitted model as a language model of ours: for learners, the guard, evaluation and generation.

    `name` is one of its retrofits (default: the one in use), or None for the base. `context` is the longest
    sequence (default: the model's own).

    >>> import torch
    >>> from attractor import APNConfig, CausalLM, retrofit
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    ... )
    >>> base = LlamaForCausalLM(config).eval()
    >>> model = CausalLM(retrofit(base, APNConfig(num_patches=8, rank=4)), context=16)
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 64])

    Each call switches to that retrofit and back, so several of these may share a model, but not two threads.
    With gradient checkpointing, which calls the model again in backward, it must be the one in use.
    """

    def __init__(self, net: Retrofit, name: str | None = IN_USE, *, context: int | None = None) -> None:
        super().__init__()
        own = net.model.config.get_text_config()
        longest = getattr(own, "max_position_embeddings", None)
        context = longest if context is None else context
        if context is None:
            raise ValueError(
                f"{type(net.model).__name__} does not say how long its context is: give context="
            )
        check_size("context", context)
        if longest is not None and context > longest:
            raise ValueError(f"context={context} is more than the model's {longest} positions")
        self.name = net.active if name is IN_USE else name
        self._net = (net,)  # not a child: its state dict has no base
        # before the base, so that parameters have the names that a `TrainableModel` gives them
        blocks = {str(number): nn.ModuleDict({"ffn": layer}) for number, layer in self.apn_layers().items()}
        self.blocks = nn.ModuleDict(blocks)
        self.base = net.model
        self.config = CausalConfig(vocab_size=own.vocab_size, context=context)

    @property
    def net(self) -> Retrofit:
        return self._net[0]

    @property
    def device(self) -> torch.device:
        return self.base.get_input_embeddings().weight.device

    @overload
    def forward(
        self, tokens: Tensor, *, cache: Cache | RaggedRows | None = None, return_stats: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def forward(
        self, tokens: Tensor, *, cache: Cache | RaggedRows | None = None, return_stats: Literal[True]
    ) -> tuple[Tensor, dict[int, RoutingStats]]: ...
    def forward(
        self, tokens: Tensor, *, cache: Cache | RaggedRows | None = None, return_stats: bool = False
    ) -> Tensor | tuple[Tensor, dict[int, RoutingStats]]:
        """Logits (B, T, V) for tokens (B, T); with `return_stats`, also the routing of each APN layer.

        The statistics' `input_norm` is that of the layer's input: the residual stream is out of its sight.
        """
        end = tokens.shape[1] + (0 if cache is None else cache.length)
        if end > self.config.context:
            raise ValueError(f"{end} tokens do not fit into the model's context of {self.config.context}")
        given = {} if cache is None else cache.arguments(tokens)
        shape = tokens.shape if return_stats else None
        with self.net.using(self.name), self.net.recording(shape) as stats:
            output = self.base(input_ids=tokens, use_cache=cache is not None, **given)
        if cache is not None:
            cache.took(output.past_key_values, tokens.shape[1])
        return (output.logits, stats) if return_stats else output.logits

    def new_cache(self, batch: int, after: object = None) -> Cache:
        """Make a cache to generate `batch` texts token by token; `after` is the full one that it replaces."""
        return Cache()

    def new_row(self) -> RaggedRows:
        """Make a cache for a text that others may join: see `attractor.serve.decode.sequences`."""
        return RaggedRows()

    def apn_layers(self) -> dict[int, APN]:
        """Number of the block -> APN layer of the retrofit."""
        return {} if self.name is None else self.net.apn_layers(self.name)

    def num_parameters(self) -> int:
        """All parameters, those of positions too: not every base has them apart."""
        return sum(parameter.numel() for parameter in self.parameters())

    def config_now(self) -> CausalConfig:
        layers = {str(number): layer.config.to_dict() for number, layer in self.apn_layers().items()}
        return dataclasses.replace(self.config, base=files.base_fields(self.base), layers=layers)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the retrofit alone, without its base."""
        if self.name is None:
            raise ValueError("this is the base without a retrofit: there is nothing of ours to save")
        self.net.save_pretrained(folder, name=self.name)
