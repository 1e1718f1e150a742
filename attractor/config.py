"""What a layer, a model and a run are: frozen dataclasses that check themselves and travel as JSON.

This file imports only the standard library, so that a configuration can be read anywhere.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast, get_args

SCHEMA_VERSION = 1

RoutingName = Literal["cosine", "dot"]
InitName = Literal["silu", "paper"]
GateName = Literal["vector", "scalar"]
DecoderName = Literal["independent", "shared"]
PrototypesName = Literal["static", "contextual"]
FFNName = Literal["mlp", "apn", "moe", "switch"]
PrecisionName = Literal["auto", "float32", "bfloat16"]
ParallelName = Literal["ddp", "fsdp"]
RuleName = Literal["sgd", "adamw"]
AllocationName = Literal["off", "grow", "replace"]


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; allowed: {', '.join(map(repr, allowed))}")


def check_size(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive integer{_unless(value, int)}")


def check_number(
    name: str,
    value: object,
    allowed: str = "a finite number",
    test: Callable[[float], bool] = lambda number: True,
) -> None:
    is_number = type(value) in (int, float) and abs(cast(float, value)) < 1e300
    if not is_number or not test(cast(float, value)):
        raise ValueError(f"{name}={value!r} must be {allowed}{_unless(value, int, float)}")


def _unless(value: object, *types: type) -> str:
    """What to add to a message when the value looks right and its type is not (NumPy scalars, strings)."""
    return "" if type(value) in types else f" (a Python {' or '.join(t.__name__ for t in types)})"


def check_probability(name: str, value: object) -> None:
    check_number(name, value, "a probability, 0 <= p < 1", lambda p: 0 <= p < 1)


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
        except json.JSONDecodeError as error:
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
    """The shape and behaviour of one APN layer, without its width, device, dtype or backend."""

    num_patches: int = 256
    """K: how many patches the layer holds."""
    top_k: int = 4
    """k: how many patches each token uses. With 1 the weight is constant and the router never learns."""
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
        check_number("temperature", self.temperature, "a number, 1e-6 or more", lambda tau: tau >= 1e-6)
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
        if self.routing_dim is not None and self.routing_dim < 2 * self.routing_groups:
            raise ValueError(
                f"routing_dim={self.routing_dim} leaves one channel for each of routing_groups="
                f"{self.routing_groups}: a direction in one dimension is only a sign; use 2 per group or more"
            )


@dataclass(frozen=True, kw_only=True)
class MoEConfig(JSONConfig):
    """A mixture of experts, sparsely gated (ffn="moe") or Switch (ffn="switch"): the controls for APN.

    Switch gives a token one expert and has no noise, so it reads neither `top_k` nor `noise`; only Switch has
    a capacity. `for_kind` says which values of an unread setting are errors.
    """

    num_experts: int = 8
    top_k: int = 2
    """How many experts each token uses (moe). With 1 only the balance loss teaches the router."""
    hidden: int | None = None
    """Width of an expert (default: 4 * dim / top_k, to the nearest 16: a token costs what an MLP costs)."""
    noise: bool = True
    """Noise of a learned size on the router's scores while training (moe)."""
    capacity_factor: float = 1.25
    """An expert serves this times its even share of the tokens; later ones get no update (switch)."""

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

        One that it does not read may have its default, which nobody typed, or the value that describes what
        the layer does; any other value was meant to do something and is an error.
        """
        if kind == "switch":
            if self.top_k not in (1, MoEConfig.top_k):
                raise ValueError(
                    f'top_k={self.top_k} contradicts ffn="switch", which gives a token one expert; '
                    'leave it out, or use ffn="moe"'
                )
            return dataclasses.replace(self, top_k=1, noise=False)
        if self.capacity_factor != MoEConfig.capacity_factor:
            raise ValueError(
                f'capacity_factor={self.capacity_factor} needs ffn="switch"; "moe" never drops a token'
            )
        return self


@dataclass(frozen=True, kw_only=True)
class GPTConfig(JSONConfig):
    """A pre-norm decoder. `apn` and `moe` describe layers of those kinds; `per_layer` changes single ones."""

    vocab_size: int = 65
    context: int = 256
    """The longest sequence the model sees."""
    num_layers: int = 6
    num_heads: int = 6
    dim: int = 384
    dropout: float = 0.0
    """On embeddings, attention and FFN outputs."""
    bias: bool = False
    """Biases in linear maps and norms."""
    ffn: FFNName = "mlp"
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
        for key in self.per_layer:
            if not (key.isdecimal() and int(key) < self.num_layers):
                raise ValueError(f"per_layer names layer {key!r}; allowed: '0' to '{self.num_layers - 1}'")
        kinds = {self.ffn_of(layer)[0] for layer in range(self.num_layers)}
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
    max_steps: int = 5000
    batch_size: int = 64
    """Sequences per optimizer step, over all processes and accumulation steps."""
    accumulation: int = 1
    """Split each batch into this many pieces to save memory."""
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-4
    warmup_steps: int = 100
    weight_decay: float = 0.1
    """On matrices; never on norms, biases, gates or prototypes."""
    beta2: float = 0.99
    clip_norm: float = 1.0
    """Limit on the gradient norm; 0 is no limit."""
    balance_weight: float = 0.0
    """Weight of the usage-balance loss of APN layers."""
    entropy_weight: float = 0.0
    """Reward for soft routing weights in APN layers."""
    scale_warmup_steps: int = 0
    """Steps over which the scale of APN layers rises from a tenth to its value."""
    eval_interval: int = 250
    checkpoint_interval: int = 250
    log_interval: int = 10
    patience: int | None = None
    """Stop after this many evaluations without a new best; None trains to the end."""
    seed: int = 1337
    precision: PrecisionName = "auto"
    """"auto" is bfloat16 autocast on a GPU that has it, float32 elsewhere."""
    compile: bool | None = None
    """torch.compile; None compiles on a GPU only."""
    parallel: ParallelName = "ddp"
    """Under torchrun: a whole model in every process, or ("fsdp") a part of every tensor."""

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "accumulation", "eval_interval", "checkpoint_interval",
                     "log_interval"):  # fmt: skip
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
    source: str = "shakespeare"
    """A named corpus (`attractor data list`), a file, a folder or a glob."""
    tokenizer: str = "char"
    """"char", "byte", "bpe", or the tokenizer.json of another dataset."""
    vocab_size: int | None = None
    """Size of a BPE vocabulary (default: 4096)."""
    val_fraction: float = 0.1
    """The last part of the text, held out for validation."""

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


@dataclass(frozen=True, kw_only=True)
class UpdateConfig(JSONConfig):
    """How an online step changes an APN layer (Algorithm 2 and the paper's stability knobs)."""

    train: tuple[str, ...] = ("decoders", "gates")
    """Roles that learn: "decoders", "gates", "prototypes" by patch; "encoder" and the others as a whole."""
    rule: RuleName = "adamw"
    """"adamw" keeps moments and a count of steps for each patch, and leaves those of other patches alone."""
    learning_rate: float = 1e-3
    """alpha, the gain of an update."""
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    """On the decoders of patches that learn in a step, and only then."""
    max_change: float | None = None
    """kappa: the most that one step may change a patch, as the length over all of its trained parameters."""
    max_decoder: float | None = None
    """The largest Frobenius norm of a decoder after it learned; a larger one is scaled down to it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "train", tuple(self.train))  # JSON knows only lists
        if not self.train:
            raise ValueError("train=() names no role: nothing would learn")
        check_choice("rule", self.rule, get_args(RuleName))
        check_number("learning_rate", self.learning_rate, "a positive number", lambda rate: rate > 0)
        check_probability("beta1", self.beta1)
        check_probability("beta2", self.beta2)
        check_number("weight_decay", self.weight_decay, "a number, 0 or more", lambda decay: decay >= 0)
        for name in ("max_change", "max_decoder"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), "a positive number", lambda most: most > 0)


@dataclass(frozen=True, kw_only=True)
class GateConfig(JSONConfig):
    """Which tokens may teach. A gate that is None lets every token pass."""

    min_entropy: float | None = None
    """Least entropy of the model's prediction, in nats: what is certain already has nothing to teach."""
    max_entropy: float | None = None
    """Largest entropy of the prediction: no large updates from guesses (the paper's confidence gating)."""
    min_confidence: float | None = None
    """Least router confidence max_i s_i, in every APN layer: updates attach to stable addresses."""
    max_surprise: float | None = None
    """Largest loss, in standard deviations above the mean of the stream so far."""

    def __post_init__(self) -> None:
        for name in ("min_entropy", "max_entropy"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), "a number, 0 or more", lambda nats: nats >= 0)
        if self.min_confidence is not None:
            check_number("min_confidence", self.min_confidence)
        if self.max_surprise is not None:
            check_number("max_surprise", self.max_surprise, "a positive number", lambda most: most > 0)
        least, most = self.min_entropy, self.max_entropy
        if least is not None and most is not None and least >= most:
            raise ValueError(f"min_entropy={least} must be below max_entropy={most}")


@dataclass(frozen=True, kw_only=True)
class AllocationConfig(JSONConfig):
    """When a layer gets a new patch: its router has been far from every prototype for a while."""

    mode: AllocationName = "off"
    """"grow" adds a patch; "replace" recycles the least used one."""
    novelty: float = 5.0
    """Allocate when the mean confidence max_i s_i over the window is below this (scores are cos / tau)."""
    window: int = 1024
    """Tokens over which confidence must stay low."""
    cooldown: int = 8192
    """Tokens of a layer from one allocation to the next; for so long a new patch is not recycled either."""
    most_patches: int | None = None
    """Where "grow" ends (default: twice the patches that were there at first)."""
    usage_horizon: int = 100_000
    """Tokens over which the moving average of usage forgets."""
    min_share: float | None = None
    """Keep usage even: recycle a patch whose usage falls below this share of the mean, novelty or not."""

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, get_args(AllocationName))
        check_number("novelty", self.novelty)
        for name in ("window", "cooldown", "usage_horizon"):
            check_size(name, getattr(self, name))
        if self.most_patches is not None:
            check_size("most_patches", self.most_patches)
            if self.mode != "grow":
                raise ValueError(f'most_patches={self.most_patches} needs mode="grow", not {self.mode!r}')
        if self.min_share is not None:
            check_number("min_share", self.min_share, "a share, 0 < share < 1", lambda share: 0 < share < 1)
            if self.mode != "replace":
                raise ValueError(f'min_share={self.min_share} needs mode="replace", not {self.mode!r}')


@dataclass(frozen=True, kw_only=True)
class LearnConfig(JSONConfig):
    """How a model learns from a stream: Algorithm 2, who may teach, and when capacity is added."""

    update: UpdateConfig = field(default_factory=UpdateConfig)
    gates: GateConfig = field(default_factory=GateConfig)
    allocation: AllocationConfig = field(default_factory=AllocationConfig)
    budget: int = 1024
    """B: learn once in so many tokens of the stream."""
    max_patches: int | None = None
    """Of the patches a step could teach, only so many learn: those used here more than usual."""
    prototype_rate: float = 0.0
    """Moving average of the prototypes that are taught, towards the tokens that chose them; 0 is off."""
    scale_factor: float = 1.0
    """Factor on the scale (gamma) of every APN layer while this learner holds the model."""
    dropout: bool = False
    """Keep the model's dropout on while learning."""
    max_observation: int = 16_777_216
    """Tokens that one observation may have; give longer streams in pieces."""

    def __post_init__(self) -> None:
        for name in ("budget", "max_observation"):
            check_size(name, getattr(self, name))
        if self.max_patches is not None:
            check_size("max_patches", self.max_patches)
        check_number("prototype_rate", self.prototype_rate, "a share, 0 <= rate < 1", lambda r: 0 <= r < 1)
        check_number("scale_factor", self.scale_factor)
        if not isinstance(self.dropout, bool):
            raise ValueError(f"dropout={self.dropout!r} must be True or False")
        if self.prototype_rate and "prototypes" in self.update.train:
            raise ValueError(
                f"prototype_rate={self.prototype_rate} moves prototypes, and update.train={self.update.train} "
                "trains them too; choose one"
            )
