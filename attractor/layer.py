"""APN: the drop-in feed-forward layer. Parameters, initialisation, variants and routing statistics live here;
the mathematics is in `attractor.ops`."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Self, get_args, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor import ops
from attractor.config import (
    APNConfig,
    DecoderName,
    GateName,
    InitName,
    PrototypesName,
    RoutingName,
    check_choice,
    check_config,
    check_number,
    check_size,
)
from attractor.config import check_roles as check_roles  # beside ROLES

ROLES = {
    "prototypes": "prototypes",
    "codebooks": "router",
    "router_projection": "router",
    "encoder": "encoder",
    "gate_slope": "gates",
    "gate_bias": "gates",
    "decoder": "decoders",
    "offset_in": "decoders",
    "offset_out": "decoders",
    "decoder_base": "base",
    "norm.weight": "norm",
    "norm.bias": "norm",
}
"""What each parameter is for. Rows of "prototypes", "gates" and "decoders" belong to one patch each;
the other roles are shared by all patches."""
PATCH_ROLES = ("prototypes", "gates", "decoders")
LOCAL_ROLES = ("gates", "decoders")
"""The ones that only tokens of their patch read; the router compares every token with every prototype."""


SizeName = Literal["parameters", "time"]
CLOSE = 0.01
"""How far from a dense FFN's parameters `APN.like_ffn` may be, as a share of them."""
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class RoutingStats(NamedTuple):
    """What the router did with a batch; leading shapes are the input's. `monitor` makes numbers of it."""

    indices: Tensor  # (..., k) selected patches, best first; -1 where the input was not finite, and where
    # a token did not enter the patch's basin
    weights: Tensor  # (..., k) routing weights; 0 for slots removed by patch dropout, and outside of basins
    confidence: Tensor  # (...) max_i s_i; with basins, by how much it exceeds the nearest edge
    balance: Tensor  # () usage-balance loss L_bal; add it to the loss to spread usage
    entropy: Tensor  # () mean entropy of the routing weights, in nats; subtract it to soften routing
    update_norm: Tensor  # (...) |APN(h)|
    input_norm: Tensor  # (...) |h| as this layer saw it
    num_patches: int

    @property
    def touched(self) -> Tensor:
        """(...) Did any patch act on the token? Without basins, one always does."""
        return (self.weights != 0).any(-1)


class APN(nn.Module):
    """Attractor Patch Network: maps (..., dim) to the update (..., dim) that the block adds to its input.

    A router compares each token with `num_patches` prototypes and picks `top_k`; each picked patch decodes a
    shared code of size `rank` through its own gate and decoder. Every option is described in `APNConfig`.

    The default shape is the paper's and does not know the width: `APN(128)` has 8.4 times the parameters of
    the dense FFN of width 4 * 128, and `APN(384)` 2.8 times. `repr(layer)` says how many there are;
    `APN.like_ffn(dim)` builds a layer with as many as the FFN has.

    >>> import torch
    >>> from attractor import APN
    >>> layer = APN(64, num_patches=32, top_k=2, rank=8)
    >>> tokens = torch.randn(4, 10, 64)
    >>> tokens = tokens + layer(tokens)
    >>> update, stats = layer(tokens, return_stats=True)
    >>> update.shape, stats.indices.shape
    (torch.Size([4, 10, 64]), torch.Size([4, 10, 2]))
    """

    def __init__(
        self,
        dim: int,
        *,
        num_patches: int = 256,
        top_k: int = 4,
        rank: int = 32,
        temperature: float = 0.07,
        scale: float = 1.0,
        routing: RoutingName = "cosine",
        init: InitName = "silu",
        dropout: float = 0.0,
        patch_dropout: float = 0.0,
        gate: GateName = "vector",
        decoder: DecoderName = "independent",
        prototypes: PrototypesName = "static",
        layer_norm: bool = False,
        routing_dim: int | None = None,
        routing_groups: int = 1,
        offset_rank: int | None = None,
        num_layers: int = 1,
        radius: float | None = None,
        whiten: bool = False,
        read_dim: int | None = None,
        sparse_gradients: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        given = locals()
        check_size("dim", dim)
        ops.check_backend(backend)
        config = APNConfig(**{field.name: given[field.name] for field in dataclasses.fields(APNConfig)})
        if dim % routing_groups or (config.prototypes == "contextual" and dim < 2 * routing_groups):
            raise ValueError(
                f"dim={dim} must be a multiple of routing_groups={routing_groups}, 2 or more channels each"
            )
        if config.prototypes == "product" and (dim % 2 or dim < 4):
            raise ValueError(
                f'dim={dim} must be even with prototypes="product", 2 or more channels for each half: use '
                f"{max(4, dim + 1)}"
            )
        if dtype not in (None, *FLOATS):
            raise ValueError(f"dtype={dtype} must be one of {', '.join(map(str, FLOATS))}")
        self.dim = dim
        self.read_dim = dim if read_dim is None else read_dim
        self.config = config
        self.backend = backend
        self.scale_factor: Tensor | None
        self.register_buffer("scale_factor", None, persistent=False)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.router_projection: nn.Parameter | None = None
        prototype_dim = dim
        if config.prototypes == "contextual":
            prototype_dim = config.routing_dim or max(2, dim // 4 // routing_groups) * routing_groups
            self.router_projection = parameter(
                routing_groups, dim // routing_groups, prototype_dim // routing_groups
            )
        self.codebooks: nn.Parameter | None = None
        if config.prototypes == "product":
            self.register_parameter("prototypes", None)  # pairs, which are nowhere written out
            self.codebooks = parameter(2, math.isqrt(num_patches), dim // 2)
        else:
            self.prototypes = parameter(num_patches, prototype_dim)
        self.encoder = parameter(dim, rank)
        scalar = config.gate == "scalar"
        self.gate_slope = None if scalar else parameter(num_patches, rank)
        self.gate_bias = parameter(num_patches, 1 if scalar else rank)
        self.decoder = self.decoder_base = self.offset_in = self.offset_out = None
        if config.decoder == "shared":
            inner = config.offset_rank or max(1, rank // 4)
            self.decoder_base = parameter(rank, dim)
            self.offset_in = parameter(num_patches, rank, inner)
            self.offset_out = parameter(num_patches, inner, dim)
        else:
            self.decoder = parameter(num_patches, rank, dim)
        self.norm = nn.LayerNorm(dim, device=device, dtype=dtype) if layer_norm else None
        self.radius: Tensor | None
        self.whitening: Tensor | None
        self.whitening_shift: Tensor | None

        def buffer(name: str, exists: bool, *shape: int) -> None:
            self.register_buffer(name, torch.empty(shape, device=device, dtype=dtype) if exists else None)

        buffer("radius", radius is not None, num_patches)
        buffer("whitening", whiten, self.read_dim, dim)
        buffer("whitening_shift", whiten, dim)
        self.reset_parameters()

    @classmethod
    def from_config(
        cls,
        dim: int,
        config: APNConfig,
        *,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """A layer of width `dim` with these settings.

        >>> APN.from_config(64, APNConfig(num_patches=8, rank=4)).num_patches
        8
        """
        check_config("config", config, APNConfig, ": the width comes first, as in from_config(64, config)")
        return cls(dim, **dataclasses.asdict(config), backend=backend, device=device, dtype=dtype)

    @classmethod
    def like_ffn(
        cls,
        dim: int,
        hidden: int | None = None,
        *,
        by: SizeName = "parameters",
        rank: int | None = None,
        top_k: int = 4,
        **options: Any,
    ) -> Self:
        """A layer to put in the place of a dense FFN of width `hidden` (default: 4 * dim).

        `by="parameters"` has as many parameters as the FFN's two matrices, 2 * dim * hidden, within 1 % where
        a whole number of patches allows it. Its rank is `rank`, or the one nearest to min(32, dim / 4) that
        comes so close, multiples of 4 first.

        `by="time"` takes no longer than the FFN on the GPU that docs/performance.md was measured on: with
        hidden // 6 patches, at most 256, of rank hidden / 48, at most 128, and 4 of them active it was timed
        at widths of 384, 768 and 2048, forward and backward at 0.61, 0.37 and 0.31 of the FFN's time. Nothing
        is timed here.

        Other options are those of `APN`.

        >>> APN.like_ffn(384)
        APN(384, num_patches=92, top_k=4, rank=32, backend='auto', parameters=1,184,000: 1.00 of a 4d FFN's)
        """
        check_size("dim", dim)
        check_size("hidden", hidden := 4 * dim if hidden is None else hidden)
        check_choice("by", by, get_args(SizeName))
        if "num_patches" in options:
            raise ValueError("num_patches is what like_ffn works out: leave it out, or build APN(...)")
        if options.get("prototypes") == "product":
            raise ValueError(
                'prototypes="product" needs a square of patches, which like_ffn does not work out: '
                "build APN(..., num_patches=n * n)"
            )
        if rank is not None:
            check_size("rank", rank)
        if by == "time":
            rank = min(128, _multiple(8, hidden // 48)) if rank is None else rank
            patches = max(1, min(256, hidden // 6))
        else:
            rank, patches = _as_many_parameters(dim, 2 * dim * hidden, rank, top_k, options)
        return cls(dim, num_patches=patches, rank=rank, top_k=min(top_k, patches), **options)

    @property
    def num_patches(self) -> int:
        return self.gate_bias.shape[0]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """(Re)start every parameter. After building on the meta device: `to_empty`, then this."""
        for name, parameter in self.named_parameters(recurse=False):
            self._start(name, parameter)
        if self.norm is not None:
            self.norm.reset_parameters()
        if self.radius is not None and self.config.radius is not None:
            self.radius.fill_(self.config.radius)
        if self.whitening is not None and self.whitening_shift is not None:
            nn.init.eye_(self.whitening)
            self.whitening_shift.zero_()
        self.scale_factor = None

    def _start(self, name: str, values: Tensor) -> None:
        """First values of one parameter, or of some patches' rows of it."""
        paper = self.config.init == "paper"
        if name in ("gate_bias", "offset_out"):  # offsets at zero: every patch starts as the shared decoder
            values.zero_()
        elif name in ("prototypes", "codebooks") and not paper:
            values.normal_(std=0.3)  # directions alone count; short vectors turn too far in each step
        elif name == "gate_slope" and not paper:
            values.fill_(1)  # u * sigmoid(u): SiLU
        elif name in ("prototypes", "codebooks", "gate_slope"):
            values.normal_(std=0.02)
        elif name == "encoder":
            values.normal_(std=0.02 if paper else self.dim**-0.5)  # codes of unit variance
        elif name in ("router_projection", "offset_in"):
            values.normal_(std=values.shape[1] ** -0.5)
        else:
            assert name in ("decoder", "decoder_base"), name
            values.normal_(std=0.02 / math.sqrt(2 * self.config.num_layers))

    @overload
    def forward(self, x: Tensor, *, return_stats: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, *, return_stats: Literal[True]) -> tuple[Tensor, RoutingStats]: ...
    def forward(self, x: Tensor, *, return_stats: bool = False) -> Tensor | tuple[Tensor, RoutingStats]:
        """The update for tokens x (..., dim); with `return_stats`, also what the router did."""
        self._check_input(x)
        tokens = self._prepare(x)
        output = self._compute(tokens, self._banks(), self.radius, self.backend, stats=return_stats)
        update = output.update
        if self.config.dropout:
            update = F.dropout(update, self.config.dropout, self.training)
        if x.dim() != 2:
            update = update.reshape(*x.shape[:-1], self.dim)
        if not return_stats:
            return update
        leading = x.shape[:-1]
        # 0 log 0 = 0: a slot that patch dropout removed adds nothing, and has no infinite gradient
        token_entropy = -(output.weights * output.weights.masked_fill(output.weights == 0, 1).log()).sum(-1)
        routed = (output.indices[:, 0] >= 0).sum().clamp(min=1)
        stats = RoutingStats(
            indices=output.indices.long().reshape(*leading, self.config.top_k),
            weights=output.weights.reshape(*leading, self.config.top_k),
            confidence=output.confidence.reshape(leading),
            balance=ops.balance_loss(tokens, self._banks()[0], **self._router()),
            entropy=token_entropy.sum() / routed,
            update_norm=length(output.update).reshape(leading),
            input_norm=length(x),
            num_patches=self.num_patches,
        )
        return update, stats

    def choose(self, x: Tensor) -> Tensor:
        """The patches of tokens x (..., dim): (..., top_k), best first; -1 where none acts.

        `return_stats` says so too, with figures that take all scores of all tokens at once.
        """
        self._check_input(x)
        output = self._compute(self._prepare(x), self._banks(), self.radius, self.backend)
        return output.indices.long().reshape(*x.shape[:-1], self.config.top_k)

    def _banks(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
        """What belongs to patches, row by row: prototypes, slopes and biases of gates, decoders, offsets."""
        prototypes = self.prototypes if self.codebooks is None else self.codebooks
        decoder = self.decoder
        if decoder is None:
            decoder = self.offset_out
        assert decoder is not None
        return prototypes, self.gate_slope, self.gate_bias, decoder, self.offset_in

    def _router(self) -> dict[str, Any]:
        return {
            "temperature": self.config.temperature,
            "routing": self.config.routing,
            "projection_gdm": self.router_projection,
        }

    def _compute(
        self,
        tokens: Tensor,
        banks: tuple[Tensor | None, ...],
        radius: Tensor | None,
        backend: str,
        stats: bool = True,
    ) -> ops.APNOutput:
        """What the layer does with tokens (n, dim) if these are its patches."""
        prototypes, gate_slope, gate_bias, decoder, offset_in = banks
        return ops.apn(
            tokens,
            prototypes,
            self.encoder,
            gate_slope,
            gate_bias,
            decoder,
            **self._router(),
            top_k=self.config.top_k,
            scale=self.config.scale if self.scale_factor is None else self.config.scale * self.scale_factor,
            U0_rd=self.decoder_base,
            A_Krq=offset_in,
            keep_nk=self._draw_kept_slots(tokens),
            radius_K=radius,
            sparse=self.config.sparse_gradients,
            stats=stats,
            backend=backend,
        )

    def set_scale_factor(self, factor: float) -> None:
        """Multiply `scale` by `factor` from now on: the warm-up of gamma. See `warmup_factor`.

        The factor is a tensor that is written in place, so compiled graphs and CUDA graphs follow it. It is
        part of no checkpoint: after loading one, set it again.
        """
        check_number("factor", factor, "a number, 0 or more", lambda value: value >= 0)
        if self.scale_factor is None:
            self.scale_factor = torch.ones((), device=self.encoder.device, dtype=self.encoder.dtype)
        self.scale_factor.fill_(factor)

    def parameters_of(self, *roles: str) -> Iterator[nn.Parameter]:
        """Parameters by what they are for: the values of `ROLES`. To freeze a part, never match names."""
        check_roles(roles)
        return (parameter for name, parameter in self.named_parameters() if ROLES[name] in roles)

    def patch_parameters(self) -> Iterator[nn.Parameter]:
        """Gates and decoders: the leading axis is the patch."""
        return self.parameters_of(*LOCAL_ROLES)

    def router_parameters(self) -> Iterator[nn.Parameter]:
        """Prototypes, or the codebooks they are pairs from, and the projection of contextual ones."""
        return self.parameters_of("prototypes", "router")

    @property
    def adds(self) -> Tensor:
        """(K) For each patch, whether its decoder adds anything: a patch of zeros is chosen and does nothing.

        >>> layer = APN(8, num_patches=4, top_k=1, rank=1)
        >>> with torch.no_grad():
        ...     layer.decoder[:2] = 0
        >>> layer.adds.tolist()
        [False, False, True, True]
        """
        if self.decoder is None:
            raise ValueError("shared decoders belong to no patch: this needs decoder='independent'")
        return (self.decoder.detach() != 0).flatten(1).any(1)

    @torch.no_grad()
    def represent(self, x: Tensor) -> Tensor:
        """What the router compares with prototypes: tokens (..., dim) as unit vectors (n, prototype width).

        With groups of a contextual router each group has length 1. Tokens that are not finite become zero.
        """
        self._check_input(x)
        return self._directions(self._prepare(x))

    def _directions(self, tokens: Tensor) -> Tensor:
        tokens = ops.routing_precision(tokens).masked_fill(~ops.finite_rows(tokens), 0)
        if self.router_projection is None:
            return ops.unit(tokens)
        grouped = tokens.unflatten(-1, (self.config.routing_groups, -1))
        return ops.unit(torch.einsum("ngd,gdm->ngm", grouped, self.router_projection.to(tokens))).flatten(1)

    @torch.no_grad()
    def resize(self, num_patches: int, *, shrink: bool = False) -> None:
        """Change the number of patches: append some with a zero decoder, or with `shrink` drop the last ones.

        What dropped patches learned is lost, so fewer patches without `shrink` are a ValueError. Appended
        ones add nothing themselves (with a shared decoder: nothing of their own, only the base); but a token
        that selects one gives it a share of the softmax that other patches had. Parameters become
        new objects: rebuild optimizers, and resize before sharding a model.

        Product prototypes grow with their codebooks, from n * n patches to m * m: the pair (i, j) stays what
        it was, and its number changes from i * n + j to i * m + j.
        """
        config = dataclasses.replace(self.config, num_patches=num_patches)  # checks it
        if num_patches < self.num_patches and not shrink:
            lost = self.num_patches - num_patches
            raise ValueError(
                f"resize({num_patches}) of {self.num_patches} patches would drop the last {lost} and what "
                f"they learned: resize({num_patches}, shrink=True) does that"
            )
        kept = min(num_patches, self.num_patches)
        if self.codebooks is not None:
            rows = self._with_fresh_pairs(math.isqrt(num_patches), self.codebooks)
        else:
            rows = (
                (name, old, torch.cat([old[:kept], new]))
                for name, old, new in self._with_fresh_rows(num_patches - kept)
            )
        resized = {name: nn.Parameter(new, requires_grad=old.requires_grad) for name, old, new in rows}
        if self.radius is not None and self.config.radius is not None:
            start = self.radius.new_full((num_patches - kept,), self.config.radius)
            self.radius = torch.cat([self.radius[:kept], start])
        for name, parameter in resized.items():  # only now: an error above changes nothing
            setattr(self, name, parameter)
        self.config = config

    @torch.no_grad()
    def fresh_patches(self, count: int) -> dict[str, Tensor]:
        """Parameter name -> rows that `count` new patches start with: random prototypes, a zero decoder."""
        if self.codebooks is not None:
            raise ValueError(
                f"fresh_patches({count}): product prototypes cannot be appended one by one, because patches "
                "share the rows of their codebooks; resize(m * m) appends to both"
            )
        return {name: new for name, _, new in self._with_fresh_rows(count)}

    def _with_fresh_rows(self, count: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, old in self.named_parameters(recurse=False):
            if ROLES[name] in PATCH_ROLES:
                new = old.new_empty(count, *old.shape[1:])
                if name == "decoder":
                    new.zero_()
                else:
                    self._start(name, new)
                yield name, old, new

    def _with_fresh_pairs(self, side: int, codebooks: nn.Parameter) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The parameters that grow with the codebooks, with rows for `side` * `side` pairs."""
        kept = min(side, codebooks.shape[1])
        for name, old in self.named_parameters(recurse=False):
            if name == "codebooks":
                new = old.new_empty(2, side, old.shape[2])
                self._start(name, new)
                new[:, :kept] = old[:, :kept]
                yield name, old, new
            elif ROLES[name] in PATCH_ROLES:
                new = old.new_zeros(side * side, *old.shape[1:])
                if name != "decoder":
                    self._start(name, new)
                grid, old_grid = (x.unflatten(0, (math.isqrt(len(x)), -1)) for x in (new, old))
                grid[:kept, :kept] = old_grid[:kept, :kept]
                yield name, old, new

    def extra_repr(self) -> str:
        defaults = APNConfig()
        shown = ["num_patches", "top_k", "rank"]
        shown += [
            field.name
            for field in dataclasses.fields(self.config)
            if field.name not in shown and getattr(self.config, field.name) != getattr(defaults, field.name)
        ]
        parts = [f"{name}={getattr(self.config, name)!r}" for name in shown]
        own = sum(parameter.numel() for parameter in self.parameters())
        size = f"parameters={own:,}: {own / (8 * self.dim**2):.2f} of a 4d FFN's"
        return ", ".join([str(self.dim), *parts, f"backend={self.backend!r}", size])

    def _check_input(self, x: Tensor) -> None:
        ops.refuse_symbols(x)
        if not isinstance(x, Tensor):
            raise ValueError(f"input of type {type(x).__name__}: expected a tensor (..., {self.read_dim})")
        if x.dim() == 0 or x.shape[-1] != self.read_dim:
            name = "dim" if self.config.read_dim is None else "read_dim"
            raise ValueError(
                f"input of shape {tuple(x.shape)}: the last dimension must be {name}={self.read_dim}"
            )
        if not x.is_floating_point():
            raise ValueError(
                f"input of dtype {x.dtype}: tokens must be floating point (embed integer ids first)"
            )
        if x.dtype != self.encoder.dtype and not self._autocast_reconciles(x):
            raise ValueError(
                f"input of dtype {x.dtype} for a layer of dtype {self.encoder.dtype}: "
                "convert one of them, or run under torch.autocast"
            )

    def _autocast_reconciles(self, x: Tensor) -> bool:
        """Autocast brings float32, bfloat16 and float16 together; not float64, and not on meta."""
        if torch.float64 in (x.dtype, self.encoder.dtype) or x.device.type == "meta":
            return False
        return torch.is_autocast_enabled(x.device.type)

    def _prepare(self, x: Tensor) -> Tensor:
        """The tokens (n, dim) that router and encoder read."""
        tokens = x if x.dim() == 2 else x.reshape(-1, self.read_dim)
        if self.norm is not None:
            tokens = self._normalize(tokens, self.norm)
        if self.whitening is None or self.whitening_shift is None:
            return tokens
        with ops.without_autocast(x.device.type):  # which patches a token meets must not depend on rounding
            if tokens.dtype == self.whitening.dtype:  # products of bfloat16 are exact, and summed in float32
                return torch.addmm(self.whitening_shift, tokens, self.whitening)
            exact = ops.routing_precision
            whitened = torch.addmm(exact(self.whitening_shift), exact(tokens), exact(self.whitening))
        return whitened.to(tokens.dtype)

    def _normalize(self, tokens: Tensor, norm: nn.LayerNorm) -> Tensor:
        """LayerNorm that keeps rows that are not finite out of its own gradients, and NaN for the router."""
        finite = ops.finite_rows(tokens)
        return norm(tokens.masked_fill(~finite, 0)).masked_fill(~finite, torch.nan)

    def _draw_kept_slots(self, tokens: Tensor) -> Tensor | None:
        """Patch dropout: each slot goes with probability p; the slot with the largest draw always stays."""
        if not self.training or self.config.patch_dropout == 0:
            return None
        draw = torch.rand(tokens.shape[0], self.config.top_k, device=tokens.device)
        return (draw >= self.config.patch_dropout) | (draw == draw.amax(-1, keepdim=True))

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        saved = _patches_of(state_dict, prefix)
        if saved is not None and saved != self.num_patches:
            name = prefix.rstrip(".") or "the layer"
            error_msgs.append(
                f"{name} holds {self.num_patches} patches, the checkpoint {saved}: "
                "attractor.load_resized(model, state_dict) takes over the checkpoint's patch count."
            )


def _patches_of(state_dict: Mapping[str, Any], prefix: str) -> int | None:
    """How many patches a layer of a checkpoint has; None if that is not known."""
    shapes: dict[str, tuple[int, ...]] = {
        name: getattr(state_dict.get(prefix + name), "shape", ()) for name in ("prototypes", "codebooks")
    }
    prototypes, codebooks = shapes["prototypes"], shapes["codebooks"]
    if len(codebooks) == 3:
        return codebooks[1] ** 2
    return prototypes[0] if len(prototypes) == 2 else None


def _multiple(of: int, number: int) -> int:
    """The largest multiple that does not exceed a number; a number that has none, but at least 1."""
    return number // of * of or max(1, number)


def _as_many_parameters(
    dim: int, wanted: int, rank: int | None, top_k: int, options: Mapping[str, Any]
) -> tuple[int, int]:
    """The rank and the number of patches with which a layer has about so many parameters."""
    usual = min(32, max(1, dim // 4))
    ranks = sorted(range(1, 2 * usual), key=lambda r: (r != usual and r % 4 != 0, abs(r - usual)))
    best, closest = (0, 0), math.inf
    for tried in ranks if rank is None else [rank]:
        shape = {**options, "rank": tried, "top_k": 1, "device": "meta"}
        one, two = (
            sum(parameter.numel() for parameter in APN(dim, num_patches=number, **shape).parameters())
            for number in (1, 2)
        )
        each = two - one  # every patch adds as many
        patches = max(top_k, round((wanted - one) / each) + 1)
        away = abs(one + (patches - 1) * each - wanted) / wanted
        if away < closest:
            best, closest = (tried, patches), away
        if closest <= CLOSE:
            break
    return best


def length(x: Tensor) -> Tensor:
    """|x| for monitoring: in float32 at least, because float16 overflows where a spike should show."""
    return torch.linalg.vector_norm(ops.routing_precision(x.detach()), dim=-1)


def warmup_factor(step: int, steps: int, start: float = 0.1) -> float:
    """The paper's warm-up of gamma: linear from `start` at step 0 to 1 at step `steps` and after.

    >>> from attractor import warmup_factor
    >>> [round(warmup_factor(step, steps=10), 2) for step in (0, 5, 10, 20)]
    [0.1, 0.55, 1.0, 1.0]
    """
    check_number("start", start)
    return 1.0 if step >= steps else start + (1 - start) * max(step, 0) / steps


def load_resized(model: nn.Module, state_dict: Mapping[str, Any], *, assign: bool = False) -> None:
    """`model.load_state_dict(state_dict)`, after giving each APN layer the patch count of the checkpoint.

    Everything else must match exactly, and is checked before anything changes: what does not fit is a
    ValueError. Optimizers must be rebuilt.

    >>> from attractor import APN, load_resized
    >>> small, large = APN(32, num_patches=64), APN(32, num_patches=96)
    >>> load_resized(small, large.state_dict())
    >>> small.num_patches
    96
    """
    modules = model.named_modules(remove_duplicate=False)
    layers = {f"{name}." if name else "": layer for name, layer in modules if isinstance(layer, APN)}
    expected, found = (
        {key: tuple(getattr(value, "shape", ())) for key, value in state.items()}
        for state in (model.state_dict(), state_dict)
    )
    counts = {}
    for prefix, layer in layers.items():
        count = _patches_of(state_dict, prefix)
        if count is None:
            continue  # reported below
        counts[prefix] = count
        dataclasses.replace(layer.config, num_patches=count)  # a count that top_k forbids is an error here
        rows = [name for name, _ in layer.named_parameters() if ROLES[name] in PATCH_ROLES]
        for name in [*rows, *([] if layer.radius is None else ["radius"])]:
            expected[prefix + name] = (count, *expected[prefix + name][1:])
        if layer.codebooks is not None:
            expected[prefix + "codebooks"] = (2, math.isqrt(count), layer.dim // 2)
    problems = [
        f"{key}: the model has {expected.get(key, 'nothing')}, the checkpoint {found.get(key, 'nothing')}"
        for key in sorted(expected.keys() | found.keys())
        if expected.get(key) != found.get(key)
    ]
    if problems:
        raise ValueError("checkpoint does not fit, nothing was loaded:\n  " + "\n  ".join(problems))
    for prefix, count in counts.items():
        if count != layers[prefix].num_patches:
            layers[prefix].resize(count, shrink=True)
    model.load_state_dict(state_dict, assign=assign)
