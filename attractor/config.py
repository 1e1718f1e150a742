"""What a layer, a model and a run are: frozen dataclasses that check themselves and travel as JSON.

This file imports only the standard library, so that a configuration can be read anywhere.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast, get_args

SCHEMA_VERSION = 1

RoutingName = Literal["cosine", "dot"]
InitName = Literal["silu", "paper"]
GateName = Literal["vector", "scalar"]
DecoderName = Literal["independent", "shared"]
PrototypesName = Literal["static", "contextual", "product"]
FFNName = Literal["mlp", "apn", "moe", "switch"]
FFNStartName = Literal["gpt2", "unit"]
PrecisionName = Literal["auto", "float32", "bfloat16"]
ParallelName = Literal["ddp", "fsdp"]
RoleName = Literal["prototypes", "router", "encoder", "gates", "decoders", "base", "norm"]
"""What the parameters of an APN layer are for; `attractor.layer.ROLES` says which parameter has which."""


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; allowed: {', '.join(map(repr, allowed))}")


def check_size(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive integer{_unless(value, int)}")
    if value >= 1 << 63:  # torch takes no longer integer
        raise ValueError(f"{name}={value!r} must be below 2**63")


def check_seed(seed: object) -> None:
    if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise ValueError(f"seed={seed!r} must be an integer, 0 <= seed < 2**64")


def check_number(
    name: str,
    value: object,
    allowed: str = "a finite number",
    test: Callable[[float], bool] = lambda number: True,
) -> None:
    most = 1 << 63 if type(value) is int else 1e300  # as for sizes
    is_number = type(value) in (int, float) and abs(cast(float, value)) < most
    if not is_number or not test(cast(float, value)):
        raise ValueError(f"{name}={value!r} must be {allowed}{_unless(value, int, float)}")


def _unless(value: object, *types: type) -> str:
    """What to add to a message when the value looks right and its type is not (NumPy scalars, strings)."""
    return "" if type(value) in types else f" (a Python {' or '.join(t.__name__ for t in types)})"


def check_probability(name: str, value: object) -> None:
    check_number(name, value, "a probability, 0 <= p < 1", lambda p: 0 <= p < 1)


def check_roles(roles: Iterable[str], name: str = "roles") -> None:
    """Names of roles in a sequence; a lone string would be taken apart into letters."""
    if isinstance(roles, str):
        raise ValueError(f"{name}={roles!r} must be a sequence of roles, such as ({roles!r},)")
    try:
        unknown = sorted(set(roles) - set(get_args(RoleName)), key=str)
    except TypeError as error:  # out of a file it may be anything
        raise ValueError(f"{name}={roles!r} must be a sequence of roles") from error
    if unknown:
        raise ValueError(f"{name}: unknown roles {unknown}; allowed: {', '.join(get_args(RoleName))}")


def check_config(name: str, value: object, kind: type, remedy: str = "") -> None:
    """A configuration of the right class; `remedy` says what to do with a likely mistake."""
    if not isinstance(value, kind):
        shown = type(value).__name__ if dataclasses.is_dataclass(value) else repr(value)
        raise ValueError(f"{name} is {shown}, and must be of the class {kind.__name__}{remedy}")


class JSONConfig:
    """Mixin: a dataclass that writes itself as JSON and reads itself back, strictly."""

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}  # type: ignore[call-overload]

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote; a missing field takes its default, an unknown one is an error."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a configuration: {error}") from error
        return cls.from_dict(fields)

    @classmethod
    def from_dict(cls, fields: Any) -> Self:
        if not isinstance(fields, dict):
            raise ValueError(f"not a configuration: expected a JSON object, got {type(fields).__name__}")
        version = fields.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(f"schema_version={version!r}: this release of attractor reads {SCHEMA_VERSION}")
        return cls._build({name: value for name, value in fields.items() if name != "schema_version"})

    @classmethod
    def _build(cls, values: dict[str, Any]) -> Self:
        if not isinstance(values, dict):
            raise ValueError(f"{cls.__name__} must be a JSON object, not {values!r}")
        known = {field.name: field.default_factory for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"unknown fields {unknown}; {cls.__name__} has {sorted(known)}")
        for (
            name,
            nested,
        ) in known.items():  # a field whose default is built by a configuration class holds one
            if isinstance(nested, type) and issubclass(nested, JSONConfig) and name in values:
                values = values | {name: nested._build(values[name])}
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class APNConfig(JSONConfig):
    """The shape and behaviour of one APN layer, without its width, device, dtype or backend.

    >>> from attractor import APNConfig
    >>> config = APNConfig(num_patches=64, rank=16)
    >>> APNConfig.from_json(config.to_json()) == config
    True

    A value that is not allowed is a ValueError when the configuration is made.
    """

    num_patches: int = 256
    """K: how many patches the layer holds."""
    top_k: int = 4
    """k: how many patches each token uses. With 1 the weight is constant and the router never learns."""
    rank: int = 32
    """r: how many numbers the code of a token has, which patches decode."""
    temperature: float = 0.07
    """tau: a smaller one makes routing sharper."""
    scale: float = 1.0
    """gamma: the update is multiplied by it."""
    routing: RoutingName = "cosine"
    """"cosine" compares directions (Algorithm 1); "dot" keeps the token's length (the core definition)."""
    init: InitName = "silu"
    """"silu" starts every patch as SiLU; "paper" starts gates at one half, and prototypes short."""
    dropout: float = 0.0
    """The probability with which a channel of the update is zeroed while training."""
    patch_dropout: float = 0.0
    """The probability with which a selected patch is dropped while training; one always stays."""
    gate: GateName = "vector"
    """"vector" gates each code channel by the token; "scalar" is one learned number per patch."""
    decoder: DecoderName = "independent"
    """"independent" decoders, or one "shared" decoder plus a low-rank offset per patch."""
    prototypes: PrototypesName = "static"
    """"static" vectors, "contextual" ones in a learned subspace, or "product": all pairs of two codebooks."""
    sparse_gradients: bool = False
    """With product prototypes: gates and decoders get gradients with rows for selected patches alone."""
    layer_norm: bool = False
    """Normalise the input inside the layer, for blocks without a pre-norm."""
    routing_dim: int | None = None
    """The size of the subspace of contextual prototypes; None is a quarter of the width."""
    routing_groups: int = 1
    """With contextual prototypes: groups of channels that have a subspace of their own."""
    offset_rank: int | None = None
    """The rank of what patches add to a shared decoder; None is a quarter of `rank`."""
    num_layers: int = 1
    """Depth of the surrounding model: decoders start at 0.02 / sqrt(2 * num_layers)."""
    radius: float | None = None
    """Every patch starts with this radius and acts only inside its basin; None has no basins."""
    whiten: bool = False
    """Whiten the input by statistics of background text, which `calibrate` measures."""
    read_dim: int | None = None
    """The width of what router and encoder read, before whitening; None is the width of the update."""

    def __post_init__(self) -> None:
        for name in ("num_patches", "top_k", "rank", "routing_groups", "num_layers"):
            check_size(name, getattr(self, name))
        for name in ("routing_dim", "offset_rank", "read_dim"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        check_number("temperature", self.temperature, "a number, 1e-6 or more", lambda tau: tau >= 1e-6)
        check_number("scale", self.scale)
        check_probability("dropout", self.dropout)
        check_probability("patch_dropout", self.patch_dropout)
        check_choice("routing", self.routing, get_args(RoutingName))
        check_choice("init", self.init, get_args(InitName))
        check_choice("gate", self.gate, get_args(GateName))
        check_choice("decoder", self.decoder, get_args(DecoderName))
        check_choice("prototypes", self.prototypes, get_args(PrototypesName))
        for name in ("layer_norm", "whiten", "sparse_gradients"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.radius is not None:
            check_number("radius", self.radius)
        if self.read_dim is not None and (not self.whiten or self.layer_norm):
            raise ValueError(f"read_dim={self.read_dim} needs whiten=True, and layer_norm=False")
        if self.top_k > self.num_patches:
            raise ValueError(f"top_k={self.top_k} must not exceed num_patches={self.num_patches}")
        if self.offset_rank is not None and self.decoder != "shared":
            raise ValueError(f'offset_rank={self.offset_rank} needs decoder="shared", not {self.decoder!r}')
        if self.offset_rank is not None and self.offset_rank > self.rank:
            raise ValueError(f"offset_rank={self.offset_rank} must not exceed rank={self.rank}")
        self._check_product()
        if self.prototypes != "contextual" and (self.routing_dim is not None or self.routing_groups != 1):
            raise ValueError(
                f"routing_dim={self.routing_dim} and routing_groups={self.routing_groups} need "
                f'prototypes="contextual", not {self.prototypes!r}'
            )
        if self.routing_dim is not None and self.routing_dim % self.routing_groups:
            raise ValueError(
                f"routing_dim={self.routing_dim} must be a multiple of routing_groups={self.routing_groups}"
            )
        if self.routing_dim is not None and self.routing_dim < 2 * self.routing_groups:
            raise ValueError(
                f"routing_dim={self.routing_dim} leaves one channel for each of routing_groups="
                f"{self.routing_groups}: a direction in one dimension is only a sign; use 2 per group or more"
            )

    def _check_product(self) -> None:
        if self.prototypes != "product":
            if self.sparse_gradients:
                raise ValueError(
                    f'sparse_gradients=True needs prototypes="product", not {self.prototypes!r}: '
                    "leave it out, or choose product prototypes"
                )
            return
        side = math.isqrt(self.num_patches)
        if side**2 != self.num_patches:
            raise ValueError(
                f'num_patches={self.num_patches} must be a square with prototypes="product", which are pairs '
                f"from two codebooks of the same size: use {side**2} or {(side + 1) ** 2}"
            )
        if self.radius is not None:
            raise ValueError(
                f'radius={self.radius} needs prototypes="static" or "contextual", not "product": the largest '
                "margin does not follow from the best rows of each codebook; leave radius out"
            )
        if self.sparse_gradients and self.decoder == "shared":
            raise ValueError(
                'sparse_gradients=True needs decoder="independent", not "shared": leave one of them out'
            )


@dataclass(frozen=True, kw_only=True)
class MoEConfig(JSONConfig):
    """A mixture of experts, sparsely gated (ffn="moe") or Switch (ffn="switch"): the controls for APN.

    Switch gives a token one expert and has no noise, so it reads neither `top_k` nor `noise`; only Switch has
    a capacity. `for_kind` says which values of an unread setting are errors.
    """

    num_experts: int = 8
    """How many experts a layer has."""
    top_k: int = 2
    """With "moe": how many experts each token uses. With 1 the router learns by the noise alone."""
    hidden: int | None = None
    """The width of an expert; None is 4 * dim / top_k to the nearest 16, so that a token costs as much."""
    noise: bool = True
    """With "moe": the router's scores get noise of a learned size while training."""
    capacity_factor: float = 1.25
    """With "switch": in training an expert serves at most this times its even share of the tokens."""

    def __post_init__(self) -> None:
        check_size("num_experts", self.num_experts)
        check_size("top_k", self.top_k)
        if self.hidden is not None:
            check_size("hidden", self.hidden)
        if not isinstance(self.noise, bool):
            raise ValueError(f"noise={self.noise!r} must be True or False")
        check_number("capacity_factor", self.capacity_factor, "a positive number", lambda factor: factor > 0)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} must not exceed num_experts={self.num_experts}")

    def for_kind(self, kind: FFNName) -> Self:
        """What a layer of this kind reads of these settings.

        One that it does not read may have its default, which was not typed, or the value that describes what
        the layer does; any other value was meant to do something and is an error.
        """
        if kind == "switch":
            if self.top_k not in (1, MoEConfig.top_k):
                raise ValueError(
                    f'top_k={self.top_k} contradicts ffn="switch", which gives a token one expert; '
                    'leave it out, or use ffn="moe"'
                )
            return dataclasses.replace(self, top_k=1, noise=False)
        if self.top_k == 1 and not self.noise:
            raise ValueError(
                "top_k=1 without noise: nothing would teach the router; use top_k=2, noise, or "
                'ffn="switch", which weighs its one expert'
            )
        if self.capacity_factor != MoEConfig.capacity_factor:
            raise ValueError(
                f'capacity_factor={self.capacity_factor} needs ffn="switch"; "moe" never drops a token'
            )
        return self


@dataclass(frozen=True, kw_only=True)
class GPTConfig(JSONConfig):
    """A pre-norm decoder. `apn` and `moe` describe layers of those kinds; `per_layer` changes single ones.

    >>> from attractor import APNConfig, GPTConfig
    >>> GPTConfig(num_layers=2, ffn="apn", apn=APNConfig(rank=8)).apn.rank
    8

    A value that is not allowed is a ValueError when the configuration is made.
    """

    vocab_size: int = 65
    """How many tokens the model knows; training sets it to what the text has."""
    context: int = 256
    """The longest sequence the model sees."""
    num_layers: int = 6
    """How many blocks follow each other."""
    num_heads: int = 6
    """Heads of attention in each block."""
    dim: int = 384
    """The width of a token inside the model."""
    dropout: float = 0.0
    """The probability with which embeddings, attention and FFN outputs are dropped while training."""
    bias: bool = False
    """Linear maps and norms have biases."""
    ffn: FFNName = "mlp"
    """What stands in the place of the FFN in every block."""
    ffn_start: FFNStartName = "gpt2"
    """How dense FFNs and experts start: with GPT-2's 0.02, or with outputs of unit variance, as APN does."""
    hidden: int | None = None
    """The width of dense FFNs; None is 4 * dim."""
    apn: APNConfig = field(default_factory=APNConfig)
    """Settings of APN layers; their `dropout` and `num_layers` are the model's own."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """Settings of layers with ffn="moe" or "switch"; each kind takes what it reads."""
    per_layer: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Layer number -> what differs there: {"0": {"ffn": "mlp"}, "3": {"num_patches": 512}}."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "num_layers", "num_heads", "dim"):
            check_size(name, getattr(self, name))
        check_probability("dropout", self.dropout)
        check_choice("ffn", self.ffn, get_args(FFNName))
        check_choice("ffn_start", self.ffn_start, get_args(FFNStartName))
        if self.hidden is not None:
            check_size("hidden", self.hidden)
        if self.dim % self.num_heads:
            raise ValueError(f"dim={self.dim} must be a multiple of num_heads={self.num_heads}")
        if self.apn.dropout not in (0.0, self.dropout):
            raise ValueError(
                f"apn.dropout={self.apn.dropout} contradicts dropout={self.dropout}; set only dropout"
            )
        if self.apn.num_layers not in (1, self.num_layers):
            raise ValueError(
                f"apn.num_layers={self.apn.num_layers} contradicts num_layers={self.num_layers}; set only "
                "num_layers"
            )
        if not isinstance(self.per_layer, dict):
            raise ValueError(f"per_layer={self.per_layer!r} must be a dict of layers")
        for key, changes in self.per_layer.items():
            if not isinstance(changes, dict):
                raise ValueError(f"per_layer[{key!r}] must be a dict of settings, not {changes!r}")
            if not (key.isdecimal() and int(key) < self.num_layers):
                raise ValueError(f"per_layer names layer {key!r}; allowed: '0' to '{self.num_layers - 1}'")
        alike = range(min(self.num_layers, 1 + len(self.per_layer)))  # one of them is in no way special
        kinds = {self.ffn_of(int(layer))[0] for layer in {*alike, *self.per_layer}}
        if len(mixtures := kinds & {"moe", "switch"}) == 1:  # with both, a setting may be for the other
            self.moe.for_kind(mixtures.pop())

    def ffn_of(self, layer: int) -> tuple[FFNName, APNConfig | MoEConfig | None]:
        """The kind of FFN in a layer and its settings; a dense layer has none."""
        changes = dict(self.per_layer.get(str(layer), {}))
        ffn: FFNName = changes.pop("ffn", self.ffn)
        check_choice(f"per_layer[{layer}].ffn", ffn, get_args(FFNName))
        own: dict[str, Any] = {"dropout": self.dropout, "num_layers": self.num_layers}
        if ffn in ("moe", "switch"):
            own = {"capacity_factor": MoEConfig.capacity_factor}
            if ffn == "switch":
                own = {"top_k": 1, "noise": False}
            moe = MoEConfig._build({**dataclasses.asdict(self.moe), **own, **changes})
            if moe != moe.for_kind(ffn):  # even a default is a mistake where it was typed for this layer
                raise ValueError(f"per_layer[{layer}]: a switch layer has top_k=1 and noise=False")
            return ffn, moe
        apn = APNConfig._build({**dataclasses.asdict(self.apn), **own, **changes})
        return ffn, apn if ffn == "apn" else None


@dataclass(frozen=True, kw_only=True)
class TrainConfig(JSONConfig):
    """How a model is trained."""

    max_steps: int = 5000
    """Optimizer steps of the run."""
    batch_size: int = 64
    """Sequences per optimizer step, over all processes and accumulation steps."""
    accumulation: int = 1
    """Each batch is read in so many pieces, to save memory."""
    learning_rate: float = 1e-3
    """The largest learning rate, after the warm-up."""
    min_learning_rate: float = 1e-4
    """What the learning rate falls to by the last step."""
    warmup_steps: int = 100
    """Steps over which the learning rate rises from 0."""
    weight_decay: float = 0.1
    """Weight decay of matrices; norms, biases, gates and prototypes have none."""
    beta2: float = 0.99
    """beta2 of AdamW; beta1 is 0.9."""
    clip_norm: float = 1.0
    """The largest norm of the gradients; 0 is no limit."""
    balance_weight: float = 0.0
    """The weight of the loss that keeps the usage of patches even."""
    entropy_weight: float = 0.0
    """The weight of the reward for soft routing weights."""
    scale_warmup_steps: int = 0
    """Steps over which the scale of APN layers rises from a tenth to its value."""
    eval_interval: int = 250
    """Steps from one evaluation on the whole validation text to the next."""
    checkpoint_interval: int = 250
    """Steps from one checkpoint to the next."""
    log_interval: int = 10
    """Steps from one line of the log to the next."""
    patience: int | None = None
    """Stop after this many evaluations without a new best; None trains to the end."""
    seed: int = 1337
    """The same seed gives the same first weights and the same batches."""
    precision: PrecisionName = "auto"
    """"auto" is bfloat16 autocast on a GPU that has it, float32 elsewhere."""
    compile: bool | None = None
    """Compile the model with torch.compile; None compiles on a GPU only."""
    parallel: ParallelName = "ddp"
    """Under torchrun: a whole model in every process, or ("fsdp") a part of every tensor."""

    def __post_init__(self) -> None:
        for name in (
            "max_steps",
            "batch_size",
            "accumulation",
            "eval_interval",
            "checkpoint_interval",
            "log_interval",
        ):
            check_size(name, getattr(self, name))
        for name in ("warmup_steps", "scale_warmup_steps", "seed"):
            check_number(
                name, getattr(self, name), "a whole number, 0 or more", lambda n: n >= 0 and n == int(n)
            )
        check_number("learning_rate", self.learning_rate, "a positive number", lambda rate: rate > 0)
        for name in ("min_learning_rate", "weight_decay", "clip_norm", "balance_weight", "entropy_weight"):
            check_number(name, getattr(self, name), "a number, 0 or more", lambda number: number >= 0)
        check_probability("beta2", self.beta2)
        check_choice("precision", self.precision, get_args(PrecisionName))
        check_choice("parallel", self.parallel, get_args(ParallelName))
        if self.patience is not None:
            check_size("patience", self.patience)
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate={self.min_learning_rate} is above learning_rate={self.learning_rate}"
            )
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"batch_size={self.batch_size} must be a multiple of accumulation={self.accumulation}"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig(JSONConfig):
    """The text of a run, and how it becomes tokens."""

    source: str = "shakespeare"
    """A named corpus (`attractor data list`), a file, a folder or a glob."""
    tokenizer: str = "char"
    """"char", "byte", "bpe", or the tokenizer.json of another dataset."""
    vocab_size: int | None = None
    """Size of a BPE vocabulary; None is 4096."""
    val_fraction: float = 0.1
    """The share of the text, from its end, that is held out for validation."""

    def __post_init__(self) -> None:
        if self.vocab_size is not None:
            check_size("vocab_size", self.vocab_size)
        check_number("val_fraction", self.val_fraction, "a number between 0 and 1", lambda part: 0 < part < 1)


@dataclass(frozen=True, kw_only=True)
class RunConfig(JSONConfig):
    """Everything that decides what a training run computes."""

    model: GPTConfig = field(default_factory=GPTConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
