"""A GPT whose feed-forward layers are dense, APN or a mixture of experts. Pre-norm blocks, as in the paper:

h' = h + Attention(Norm(h));  y = h' + FFN(Norm(h')).

    model = GPT(presets.tiny_apn().model)
    logits = model(tokens)                       # (batch, time) -> (batch, time, vocabulary)
    model.save_pretrained("my-model"); GPT.from_pretrained("my-model")
"""

import copy
import dataclasses
import os
from pathlib import Path
from typing import Literal, Self, overload

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from attractor.config import APNConfig, GPTConfig, MoEConfig
from attractor.layer import APN, RoutingStats
from attractor.moe import MoE, Switch


class KVCache:
    """Keys and values of the tokens seen so far, so that generating a token costs one token."""

    def __init__(self, model: "GPT", batch: int) -> None:
        config, weight = model.config, model.embedding.weight
        shape = (batch, config.num_heads, config.context, config.dim // config.num_heads)
        self.layers = [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in range(config.num_layers)]
        self.length = 0

    def split(self, parts: int) -> list["KVCache"]:
        """The same memory as caches of their own, for parts of the batch that go on apart."""
        views = [copy.copy(self) for _ in range(parts)]
        for number, view in enumerate(views):
            view.layers = [(k.chunk(parts)[number], v.chunk(parts)[number]) for k, v in self.layers]
        return views

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + keys.shape[2]
        stored_keys, stored_values = self.layers[layer]
        stored_keys[:, :, self.length : end] = keys
        stored_values[:, :, self.length : end] = values
        return stored_keys[:, :, :end].to(keys), stored_values[:, :, :end].to(values)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.num_heads, self.dropout = layer, config.num_heads, config.dropout
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=config.bias)
        self.out = nn.Linear(config.dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor, cache: KVCache | None) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B, T, 3, nh, hs)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, nh, T, hs)
        mask = None
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
            steps, seen = q.shape[2], k.shape[2]
            mask = torch.ones(steps, seen, dtype=torch.bool, device=x.device).tril(seen - steps)
        y = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout if self.training else 0.0, is_causal=mask is None
        )
        return F.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout, self.training)


class MLP(nn.Module):
    """The dense FFN with expansion 4: what APN replaces."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=config.bias)
        self.out = nn.Linear(4 * config.dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.out(F.gelu(self.up(x))), self.dropout, self.training)


def make_ffn(config: GPTConfig, layer: int, backend: str) -> nn.Module:
    kind, settings = config.ffn_of(layer)
    if isinstance(settings, APNConfig):
        return APN.from_config(config.dim, settings, backend=backend)
    if isinstance(settings, MoEConfig):
        mixture = Switch if kind == "switch" else MoE
        return mixture(config.dim, settings, dropout=config.dropout, num_layers=config.num_layers)
    return MLP(config)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int, backend: str) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.dim, bias=config.bias)
        self.attention = Attention(config, layer)
        self.norm_2 = nn.LayerNorm(config.dim, bias=config.bias)
        self.ffn = make_ffn(config, layer, backend)

    def forward(
        self, h: Tensor, cache: KVCache | None, with_stats: bool
    ) -> tuple[Tensor, RoutingStats | None]:
        h = h + self.attention(self.norm_1(h), cache)
        if with_stats and isinstance(self.ffn, APN | MoE):
            update, stats = self.ffn(self.norm_2(h), return_stats=True)
            # the paper's |Delta| / |h| is to the residual stream, not to its normalised copy
            hidden_norm = torch.linalg.vector_norm(h.detach(), dim=-1)
            return h + update, RoutingStats(  # not stats._replace: torch 2.11 cannot compile it
                indices=stats.indices, weights=stats.weights, confidence=stats.confidence,
                balance=stats.balance, entropy=stats.entropy, update_norm=stats.update_norm,
                input_norm=hidden_norm, num_patches=stats.num_patches,
            )  # fmt: skip
        return h + self.ffn(self.norm_2(h)), None


class GPT(nn.Module):
    def __init__(self, config: GPTConfig, *, backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config, layer, backend) for layer in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim, bias=config.bias)  # the head is the embedding, transposed
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """GPT-2's start: 0.02, and 0.02 / sqrt(2 * layers) where a residual branch ends."""
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.LayerNorm | APN | MoE):
                module.reset_parameters()
        for module in self.modules():
            if isinstance(module, Attention | MLP):
                nn.init.normal_(module.out.weight, std=0.02 / (2 * self.config.num_layers) ** 0.5)

    @overload
    def forward(
        self, tokens: Tensor, *, cache: KVCache | None = None, return_stats: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def forward(
        self, tokens: Tensor, *, cache: KVCache | None = None, return_stats: Literal[True]
    ) -> tuple[Tensor, dict[int, RoutingStats]]: ...
    def forward(
        self, tokens: Tensor, *, cache: KVCache | None = None, return_stats: bool = False
    ) -> Tensor | tuple[Tensor, dict[int, RoutingStats]]:
        """Logits (B, T, V) for tokens (B, T); with `return_stats`, also the routing of each routed layer."""
        start = 0 if cache is None else cache.length
        end = start + tokens.shape[1]
        if end > self.config.context:
            raise ValueError(f"{end} tokens do not fit into the model's context of {self.config.context}")
        positions = torch.arange(start, end, device=tokens.device)
        h = self.embedding(tokens) + self.positions(positions)
        h = F.dropout(h, self.config.dropout, self.training)
        stats: dict[int, RoutingStats] = {}
        for layer, block in enumerate(self.blocks):
            h, layer_stats = block(h, cache, return_stats)
            if layer_stats is not None:
                stats[layer] = layer_stats
        if cache is not None:
            cache.length = end
        logits = F.linear(self.norm(h), self.embedding.weight)
        return (logits, stats) if return_stats else logits

    def new_cache(self, batch: int, after: object = None) -> KVCache:
        """For generating `batch` texts token by token; `after` is the full cache that it replaces."""
        return KVCache(self, batch)

    def apn_layers(self) -> dict[int, APN]:
        """Layer number -> APN layer, for whoever freezes, monitors or adapts them."""
        return {i: block.ffn for i, block in enumerate(self.blocks) if isinstance(block.ffn, APN)}

    def num_parameters(self, *, positions: bool = False) -> int:
        """Parameters as the paper counts them: without position embeddings unless asked."""
        total = sum(parameter.numel() for parameter in self.parameters())
        return total if positions else total - self.positions.weight.numel()

    def save_pretrained(self, folder: str | Path, *, state: dict[str, Tensor] | None = None) -> None:
        """Write config.json and model.safetensors; each file appears whole or not at all.

        `state` takes the place of our own tensors where they are spread over processes.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".partial-{os.getpid()}"
        state = self.state_dict() if state is None else state
        try:
            save_file({name: value.contiguous() for name, value in state.items()}, partial)
        except SafetensorError as error:
            raise OSError(f"cannot write {folder}: {error}") from error
        os.replace(partial, folder / "model.safetensors")
        partial.write_text(self.config_now().to_json())
        os.replace(partial, folder / "config.json")

    def config_now(self) -> GPTConfig:
        """The configuration with the patches that layers have by now: they may have grown."""
        per_layer = dict(self.config.per_layer)
        for number, layer in self.apn_layers().items():
            _, settings = self.config.ffn_of(number)
            if not isinstance(settings, APNConfig) or settings.num_patches != layer.num_patches:
                own = per_layer.get(str(number), {})
                per_layer[str(number)] = {**own, "num_patches": layer.num_patches}
        return dataclasses.replace(self.config, per_layer=per_layer)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, backend: str = "auto", device: torch.device | str = "cpu"
    ) -> Self:
        """Read what `save_pretrained` wrote. A missing, extra or reshaped tensor is an error."""
        folder = Path(folder)
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise ValueError(f"{folder} holds no {name}: not a saved model")
        config = GPTConfig.from_json((folder / "config.json").read_text())
        try:
            state = load_file(folder / "model.safetensors", device=str(device))
        except SafetensorError as error:
            raise ValueError(f"{folder / 'model.safetensors'} is damaged: {error}") from error
        with torch.device("meta"):
            model = cls(config, backend=backend)
        try:
            model.load_state_dict(state, assign=True)
        except RuntimeError as error:
            raise ValueError(f"{folder / 'model.safetensors'} does not fit config.json: {error}") from error
        if not all(p.is_floating_point() for p in model.parameters()):
            raise ValueError(f"{folder / 'model.safetensors'} holds weights that are not floating point")
        return model
