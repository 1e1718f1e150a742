"""A GPT whose feed-forward layers are dense, APN or a mixture of experts. Pre-norm blocks, as in the paper:

h' = h + Attention(Norm(h));  y = h' + FFN(Norm(h')).

    model = GPT(presets.tiny_apn().model)
    logits = model(tokens)                       # (batch, time) -> (batch, time, vocabulary)
    model.save_pretrained("my-model"); GPT.from_pretrained("my-model")
"""

import copy
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast, overload

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from attractor import ops
from attractor.config import APNConfig, GPTConfig, MoEConfig
from attractor.files import check_hashes, hashing, parse_json, save_tensors, write_file, write_text
from attractor.layer import APN, RoutingStats
from attractor.moe import MoE, Switch

MODEL_TYPE = "attractor_gpt, which attractor.hf.register() of attractor-patch-networks makes known"
"""In the config.json of a saved GPT: what `AutoModelForCausalLM` prints where it does not know it."""


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

    def positions(self, steps: int, device: torch.device) -> Tensor:
        """Return the positions of the next tokens in the text: (steps), or (batch, steps)."""
        return torch.arange(self.length, self.length + steps, device=device)

    def mask(self, steps: int, device: torch.device) -> Tensor:
        """What each of the next tokens may attend to: (steps, seen), or (batch, 1, steps, seen)."""
        seen = self.length + steps
        return torch.ones(steps, seen, dtype=torch.bool, device=device).tril(seen - steps)

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + keys.shape[2]
        stored_keys, stored_values = self.layers[layer]
        stored_keys[:, :, self.length : end] = keys
        stored_values[:, :, self.length : end] = values
        return stored_keys[:, :, :end].to(keys), stored_values[:, :, :end].to(values)


class RaggedCache(KVCache):
    """Keys and values of rows of different lengths that go on together; a new one has one row, still empty.

    Rows end in the same column, and row b has tokens from column `starts[b]` on; `length` is that of the
    longest. Rows that join and leave copy only themselves, and memory grows when it is full.
    """

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []  # each (slots, heads, columns, head size)
        self.slots, self.columns = 1, 0
        self.length = 0
        self._place([0])

    def _place(self, starts: list[int], default: int = 0) -> None:
        self.starts, self.first = starts, min(starts, default=default)
        self._placed: Tensor | None = None  # `starts` as a tensor (B, 1)
        self._mask: Tensor | None = None

    @property
    def end(self) -> int:
        return self.first + self.length

    @property
    def is_even(self) -> bool:
        return self.first == max(self.starts, default=0)

    def positions(self, steps: int, device: torch.device) -> Tensor:
        if self._placed is None:
            self._placed = torch.tensor(self.starts, device=device)[:, None]
        return torch.arange(self.end, self.end + steps, device=device) - self._placed

    def mask(self, steps: int, device: torch.device) -> Tensor:
        """Make the attention mask, which is the same for every layer of a pass."""
        seen = self.length + steps
        if self._mask is None or self._mask.shape[2:] != (steps, seen):
            causal = super().mask(steps, device)
            # a column of the past is a row's own if it lies as far back as the row is long, or less
            own = torch.arange(seen - 1, -1, -1, device=device) <= self.positions(steps, device)[:, -1:]
            self._mask = causal & own[:, None, None]
        return self._mask

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.make_room(right=keys.shape[2])
        rows, start, end = len(self.starts), self.end, self.end + keys.shape[2]
        if layer == len(self.layers):
            self.layers.append((self._zeros(keys), self._zeros(values)))
        stored_keys, stored_values = self.layers[layer]
        stored_keys[:rows, :, start:end] = keys
        stored_values[:rows, :, start:end] = values
        return stored_keys[:rows, :, self.first : end], stored_values[:rows, :, self.first : end]

    def _zeros(self, like: Tensor) -> Tensor:
        """Allocate zeros and not just memory: what is masked counts 0 times, and 0 times NaN is NaN."""
        return like.new_zeros(self.slots, like.shape[1], self.columns, like.shape[3])

    def make_room(self, rows: int = 0, left: int = 0, right: int = 0) -> None:
        """Make room for so many more rows, and for columns on either side of what is there."""
        needed = len(self.starts) + rows
        if needed > self.slots or self.first < left or self.end + right > self.columns:
            slots = self.slots if needed <= self.slots <= 4 * needed else needed + needed // 2
            self._move(slots, left, right + max(32, self.length // 4))

    def _move(self, slots: int, left: int, right: int) -> None:
        rows, self.slots, self.columns = len(self.starts), slots, left + self.length + right
        for number, pair in enumerate(self.layers):
            keys, values = (self._zeros(old) for old in pair)
            for old, new in zip(pair, (keys, values), strict=True):
                new[:rows, :, left : left + self.length] = old[:rows, :, self.first : self.end]
            self.layers[number] = (keys, values)
        self._place([start - self.first + left for start in self.starts], left)

    def add(self, other: "RaggedCache") -> None:
        """Append the row of `other`."""
        length = other.length
        self.make_room(rows=1, left=max(0, length - self.length))
        row, start, end = len(self.starts), self.end - length, self.end
        for ours, theirs in zip(self.layers, other.layers, strict=True):
            for mine, new in zip(ours, theirs, strict=True):
                mine[row, :, :start] = 0  # the text that was here before may have left NaN
                mine[row, :, start:end] = new[0, :, other.first : other.end]
        self._place([*self.starts, start])
        self.length = end - self.first

    def copy_of(self, row: int) -> "RaggedCache":
        """One row as a cache of its own."""
        one = copy.copy(self)
        start, end = self.starts[row], self.end
        one.layers = [
            (k[row : row + 1, :, start:end].clone(), v[row : row + 1, :, start:end].clone())
            for k, v in self.layers
        ]
        one.slots, one.columns, one.length = 1, end - start, end - start
        one._place([0])
        return one

    def remove(self, row: int) -> None:
        """Free a row; the last row takes its place."""
        last, end = len(self.starts) - 1, self.end
        if row != last:
            for pair in self.layers:
                for stored in pair:
                    stored[row, :, :end] = stored[last, :, :end]
        starts = list(self.starts)
        starts[row] = starts[last]
        self._place(starts[:last])
        self.length = end - self.first if last else 0


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
            mask = cache.mask(q.shape[2], x.device)
        y = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout if self.training else 0.0, is_causal=mask is None
        )
        return F.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout, self.training)


class MLP(nn.Module):
    """The dense FFN, usually with expansion 4: what APN replaces."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        hidden = config.hidden or 4 * config.dim
        self.up = nn.Linear(config.dim, hidden, bias=config.bias)
        self.out = nn.Linear(hidden, config.dim, bias=config.bias)

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
                indices=stats.indices,
                weights=stats.weights,
                confidence=stats.confidence,
                balance=stats.balance,
                entropy=stats.entropy,
                update_norm=stats.update_norm,
                input_norm=hidden_norm,
                num_patches=stats.num_patches,
            )
        return h + self.ffn(self.norm_2(h)), None


class GPT(nn.Module):
    """A decoder-only Transformer whose FFNs are dense, APN layers or mixtures of experts.

    `config` is its shape, and `backend` how APN layers are computed: "auto" takes the fastest that runs.

    >>> import torch
    >>> from attractor import GPT, GPTConfig
    >>> model = GPT(GPTConfig(vocab_size=65, context=16, num_layers=2, num_heads=2, dim=32, ffn="apn"))
    >>> tokens = torch.zeros(1, 8, dtype=torch.int64)
    >>> model(tokens).shape
    torch.Size([1, 8, 65])
    >>> logits, routing = model(tokens, return_stats=True)
    >>> routing[0].indices.shape  # of block 0: four patches for each token
    torch.Size([1, 8, 4])

    A text longer than the context is a ValueError. `save_pretrained` writes a folder that
    `GPT.from_pretrained` and `attractor.load` read.
    """

    def __init__(self, config: GPTConfig, *, backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        blocks = nn.ModuleList(Block(config, layer, backend) for layer in range(config.num_layers))
        self.blocks = cast(Sequence[Block], blocks)  # torch's list does not say what it holds
        self.norm = nn.LayerNorm(config.dim, bias=config.bias)  # the head is the embedding, transposed
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """GPT-2's start: 0.02, and 0.02 / sqrt(2 * layers) where a residual branch ends; see `ffn_start`."""
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
            if isinstance(module, MLP | MoE) and self.config.ffn_start == "unit":
                up = module.up.weight if isinstance(module, MLP) else module.up
                nn.init.normal_(up, std=self.config.dim**-0.5)

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
        ops.refuse_symbols(tokens)
        steps = tokens.shape[1]
        end = steps + (0 if cache is None else cache.length)
        if end > self.config.context:
            raise ValueError(f"{end} tokens do not fit into the model's context of {self.config.context}")
        device = tokens.device
        positions = torch.arange(end, device=device) if cache is None else cache.positions(steps, device)
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
        """Make a cache to generate `batch` texts token by token; `after` is the full one that it replaces."""
        return KVCache(self, batch)

    def new_row(self) -> RaggedCache:
        """Make a cache for a text that others may join: see `attractor.serve.decode.sequences`."""
        return RaggedCache()

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def apn_layers(self) -> dict[int, APN]:
        """Return the APN layers by the number of their block, to freeze, monitor or adapt them."""
        return {i: block.ffn for i, block in enumerate(self.blocks) if isinstance(block.ffn, APN)}

    def num_parameters(self) -> int:
        """Parameters as the paper counts them: without position embeddings."""
        return sum(parameter.numel() for parameter in self.parameters()) - self.positions.weight.numel()

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        state: dict[str, Tensor] | None = None,
        config: GPTConfig | None = None,
    ) -> None:
        """Write config.json and model.safetensors, each whole or not at all, and their hashes.

        `AutoModelForCausalLM` reads them, too. `state` takes the place of our own tensors where they are
        spread over processes, and `config` that of `config_now()`.
        """
        state = self.state_dict() if state is None else state
        fields = {"model_type": MODEL_TYPE, **(config or self.config_now()).to_dict()}
        with hashing(Path(folder), "config.json", "model.safetensors"):
            write_file(Path(folder) / "model.safetensors", functools.partial(save_tensors, state))
            write_text(Path(folder) / "config.json", json.dumps(fields, indent=2))

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
    def empty(cls, config: GPTConfig, shapes: Mapping[str, Sequence[int]], *, backend: str = "auto") -> Self:
        """A model without memory for tensors of these shapes; a ValueError if it is not of its configuration.

        So a file that says it is of some terabytes costs nothing.
        """
        blocks = {name.split(".")[1] for name in shapes if name.startswith("blocks.")}
        if len(blocks) != config.num_layers:
            raise ValueError(f"there are {len(blocks)} blocks, and num_layers={config.num_layers}")
        try:
            with torch.device("meta"):
                model = cls(config, backend=backend)
        except (RuntimeError, OverflowError, TypeError) as error:  # as torch says that a number is too large
            raise ValueError(f"no model can be so large: {str(error).splitlines()[0]}") from error
        expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        found = {name: tuple(shape) for name, shape in shapes.items()}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                own, theirs = expected.get(name, "nothing"), found.get(name, "nothing")
                raise ValueError(f"{name}: the model has {own}, the file {theirs}")
        return model

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, backend: str = "auto", device: torch.device | str = "cpu"
    ) -> Self:
        """Read what `save_pretrained` wrote, also that of `GPTForCausalLM`.

        A file or a tensor that is not as it was is a ValueError.
        """
        folder = Path(folder)
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise ValueError(f"{folder} holds no {name}: not a saved model")
        check_hashes(folder, "config.json", "model.safetensors")
        config = GPTConfig.from_dict(own_fields(parse_json((folder / "config.json").read_text())))
        try:
            state = load_file(folder / "model.safetensors", device=str(device))
            state = {name.removeprefix("gpt."): value for name, value in state.items()}
        except SafetensorError as error:
            raise ValueError(f"{folder / 'model.safetensors'} is damaged: {error}") from error
        try:
            model = cls.empty(config, {name: value.shape for name, value in state.items()}, backend=backend)
            model.load_state_dict(state, assign=True)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{folder / 'model.safetensors'} does not fit config.json: {error}") from error
        if not all(p.is_floating_point() for p in model.parameters()):
            raise ValueError(f"{folder / 'model.safetensors'} holds weights that are not floating point")
        return model


def own_fields(config: Any) -> Any:
    """What is a GPTConfig's in a config.json: transformers keeps it in a field beside its own."""
    if not isinstance(config, dict):
        return config
    return config.get("gpt", {name: value for name, value in config.items() if name != "model_type"})
