"""What a layer is, in numbers and words: frozen dataclasses that check themselves and travel as JSON.

This file imports only the standard library, so that a configuration can be read anywhere.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self, cast, get_args

SCHEMA_VERSION = 1

RoutingName = Literal["cosine", "dot"]
InitName = Literal["silu", "paper"]
GateName = Literal["vector", "scalar"]
DecoderName = Literal["independent", "shared"]
PrototypesName = Literal["static", "contextual"]


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; allowed: {', '.join(map(repr, allowed))}")


def check_size(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive integer")


def check_number(
    name: str,
    value: object,
    allowed: str = "a finite number",
    test: Callable[[float], bool] = lambda number: True,
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not test(cast(float, value)):
        raise ValueError(f"{name}={value!r} must be {allowed}")


def check_probability(name: str, value: object) -> None:
    check_number(name, value, "a probability, 0 <= p < 1", lambda p: 0 <= p < 1)


@dataclass(frozen=True, kw_only=True)
class APNConfig:
    """The shape and behaviour of one APN layer, without its width, device, dtype or backend."""

    num_patches: int = 256
    """K: how many patches the layer holds."""
    top_k: int = 4
    """k: how many patches each token uses."""
    rank: int = 32
    """r: size of the code a patch decodes."""
    temperature: float = 0.07
    """tau: smaller is sharper routing."""
    scale: float = 1.0
    """gamma: factor on the update."""
    routing: RoutingName = "cosine"
    """"cosine" compares directions (Algorithm 1); "dot" keeps the token's length (the core definition)."""
    init: InitName = "silu"
    """"silu" starts every patch as SiLU; "paper" starts every gate at one half, so almost linear."""
    dropout: float = 0.0
    """Probability of zeroing a channel of the update while training."""
    patch_dropout: float = 0.0
    """Probability of dropping each selected patch while training; one always stays."""
    gate: GateName = "vector"
    """"vector" gates each code channel by the token; "scalar" is one learned number per patch."""
    decoder: DecoderName = "independent"
    """"independent" decoders, or one "shared" decoder plus a low-rank offset per patch."""
    prototypes: PrototypesName = "static"
    """"static" prototypes live in the token space; "contextual" ones in a learned subspace."""
    layer_norm: bool = False
    """Normalise the input inside the layer, for blocks without a pre-norm."""
    routing_dim: int | None = None
    """Size of the routing subspace of contextual prototypes (default: a quarter of the width)."""
    routing_groups: int = 1
    """Groups of channels with a routing subspace of their own (contextual prototypes)."""
    offset_rank: int | None = None
    """Rank of the patch offsets of a shared decoder (default: a quarter of `rank`)."""
    num_layers: int = 1
    """Depth of the surrounding model: decoders start at 0.02 / sqrt(2 * num_layers)."""

    def __post_init__(self) -> None:
        for name in ("num_patches", "top_k", "rank", "routing_groups", "num_layers"):
            check_size(name, getattr(self, name))
        for name in ("routing_dim", "offset_rank"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        check_number("temperature", self.temperature, "a positive number", lambda tau: tau > 0)
        check_number("scale", self.scale)
        check_probability("dropout", self.dropout)
        check_probability("patch_dropout", self.patch_dropout)
        check_choice("routing", self.routing, get_args(RoutingName))
        check_choice("init", self.init, get_args(InitName))
        check_choice("gate", self.gate, get_args(GateName))
        check_choice("decoder", self.decoder, get_args(DecoderName))
        check_choice("prototypes", self.prototypes, get_args(PrototypesName))
        if not isinstance(self.layer_norm, bool):
            raise ValueError(f"layer_norm={self.layer_norm!r} must be True or False")
        if self.top_k > self.num_patches:
            raise ValueError(f"top_k={self.top_k} must not exceed num_patches={self.num_patches}")
        if self.offset_rank is not None and self.decoder != "shared":
            raise ValueError(f'offset_rank={self.offset_rank} needs decoder="shared", not {self.decoder!r}')
        if self.offset_rank is not None and self.offset_rank > self.rank:
            raise ValueError(f"offset_rank={self.offset_rank} must not exceed rank={self.rank}")
        if self.prototypes != "contextual" and (self.routing_dim is not None or self.routing_groups != 1):
            raise ValueError(
                f"routing_dim={self.routing_dim} and routing_groups={self.routing_groups} need "
                f'prototypes="contextual", not {self.prototypes!r}'
            )
        if self.routing_dim is not None and self.routing_dim % self.routing_groups:
            raise ValueError(
                f"routing_dim={self.routing_dim} must be a multiple of routing_groups={self.routing_groups}"
            )

    def to_json(self) -> str:
        return json.dumps({"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote; a missing field takes its default, an unknown one is an error."""
        try:
            fields: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a configuration: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"not a configuration: expected a JSON object, got {type(fields).__name__}")
        version = fields.pop("schema_version", None)
        if version != SCHEMA_VERSION:
            raise ValueError(f"schema_version={version!r}: this release of attractor reads {SCHEMA_VERSION}")
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise ValueError(f"unknown fields {unknown}; {cls.__name__} has {sorted(known)}")
        return cls(**fields)
