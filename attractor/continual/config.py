"""How a model keeps learning: frozen dataclasses that check themselves and travel as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from attractor.config import (
    JSONConfig,
    check_choice,
    check_config,
    check_number,
    check_probability,
    check_roles,
    check_size,
)

RuleName = Literal["sgd", "adamw"]
AllocationName = Literal["off", "grow", "replace"]
AttentionName = Literal["off", "low_rank", "whole"]
AlsoName = Literal["embedding", "norms"]


def check_also(also: Sequence[str]) -> None:
    if not isinstance(also, list | tuple) or not all(one in get_args(AlsoName) for one in also):
        raise ValueError(f"also={also!r} must be a sequence of {', '.join(get_args(AlsoName))}")


@dataclass(frozen=True, kw_only=True)
class UpdateConfig(JSONConfig):
    """How an online step changes an APN layer (Algorithm 2 and the paper's stability knobs)."""

    train: tuple[str, ...] = ("decoders", "gates")
    """Roles that learn: "decoders", "gates", "prototypes" by patch; "encoder" and the others as a whole."""
    rule: RuleName = "adamw"
    """"adamw" keeps moments and a count of steps for each patch, and leaves those of other patches alone."""
    learning_rate: float = 1e-4
    """alpha, the learning rate of patches."""
    others_rate: float = 1.0
    """The rate of parameters outside of APN layers, if any learn, is `learning_rate` times this."""
    beta1: float = 0.9
    """Adam's first moment: how slowly the mean of a patch's gradients follows."""
    beta2: float = 0.99
    """Adam's second moment: how slowly the mean of their squares follows."""
    weight_decay: float = 0.0
    """Weight decay of decoders, in the steps in which their patches learn."""
    clip_norm: float | None = None
    """The largest norm of all gradients of a step together; None is no limit."""
    max_change: float | None = None
    """kappa: the most that the update of one step may move a patch, over all of its trained parameters."""
    max_decoder: float | None = None
    """The largest Frobenius norm of a decoder after it learned; a larger one is scaled down, at once."""

    def __post_init__(self) -> None:
        check_roles(self.train, "train")
        object.__setattr__(self, "train", tuple(self.train))  # JSON knows only lists
        if not self.train:
            raise ValueError("train=() names no role: nothing would learn")
        check_choice("rule", self.rule, get_args(RuleName))
        check_number("learning_rate", self.learning_rate, "a positive number", lambda rate: rate > 0)
        check_number("others_rate", self.others_rate, "a number, 0 or more", lambda factor: factor >= 0)
        check_probability("beta1", self.beta1)
        check_probability("beta2", self.beta2)
        check_number("weight_decay", self.weight_decay, "a number, 0 or more", lambda decay: decay >= 0)
        for name in ("clip_norm", "max_change", "max_decoder"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), "a positive number", lambda most: most > 0)
        for name in ("max_decoder", "weight_decay"):
            if getattr(self, name) and "decoders" not in self.train:
                raise ValueError(f"{name}={getattr(self, name)} acts on decoders, and train={self.train}")


@dataclass(frozen=True, kw_only=True)
class GateConfig(JSONConfig):
    """Which tokens may teach. A gate that is None lets every token pass."""

    min_entropy: float | None = None
    """A token teaches only where the prediction has at least this entropy, in nats: it is not certain."""
    max_entropy: float | None = None
    """A token teaches only where the prediction has at most this entropy (the paper's confidence gating)."""
    min_confidence: float | None = None
    """A token teaches only where max_i s_i, the router's confidence, is at least this in every APN layer."""
    max_surprise: float | None = None
    """A token teaches only where its loss is at most so many standard deviations above the stream's mean."""

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
    """Tokens from one allocation of a layer to the next; a new patch is not recycled for as long."""
    most_patches: int | None = None
    """The most patches that "grow" makes; None is twice as many as there were at first."""
    usage_horizon: int = 100_000
    """Tokens over which the moving average of usage forgets."""
    min_share: float | None = None
    """A patch whose usage falls below this share of the mean is recycled, whether or not tokens are new."""

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


def rate_factor(seen: int, horizon: int | None) -> float:
    """What a rate is multiplied by after so many tokens, by `LearnConfig.rate_horizon`."""
    return 1.0 if horizon is None else (1 + seen / horizon) ** -0.5


@dataclass(frozen=True, kw_only=True)
class LearnConfig(JSONConfig):
    """How a model learns from a stream: Algorithm 2, who may teach, and when capacity is added."""

    update: UpdateConfig = field(default_factory=UpdateConfig)
    gates: GateConfig = field(default_factory=GateConfig)
    allocation: AllocationConfig = field(default_factory=AllocationConfig)
    budget: int = 1024
    """B: learn once in so many tokens of the stream, and when the source changes or the learner is saved."""
    rate_horizon: int | None = None
    """Every rate is divided by sqrt(1 + tokens so far / this); None keeps the rates as they are."""
    max_patches: int | None = None
    """The most patches that learn in a step: those that are used more than usual; None is no limit."""
    prototype_rate: float = 0.0
    """How fast prototypes of taught patches move towards the tokens that chose them; 0 is not at all."""
    scale_factor: float = 1.0
    """The scale (gamma) of every APN layer is multiplied by this while the learner holds the model."""
    dropout: bool = False
    """Keep the model's dropout on while learning."""
    max_observation: int = 16_777_216
    """Tokens that one observation may have; give longer streams in pieces."""

    def __post_init__(self) -> None:
        check_config("update", self.update, UpdateConfig)
        check_config("gates", self.gates, GateConfig)
        check_config("allocation", self.allocation, AllocationConfig)
        for name in ("budget", "max_observation"):
            check_size(name, getattr(self, name))
        for name in ("max_patches", "rate_horizon"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        check_number("prototype_rate", self.prototype_rate, "a share, 0 <= rate < 1", lambda r: 0 <= r < 1)
        check_number("scale_factor", self.scale_factor, "a number, 0 or more", lambda factor: factor >= 0)
        if not isinstance(self.dropout, bool):
            raise ValueError(f"dropout={self.dropout!r} must be True or False")
        if self.allocation.mode != "off" and "decoders" not in self.update.train:
            raise ValueError(
                f"allocation.mode={self.allocation.mode!r} gives patches with zero decoders, and "
                f"update.train={self.update.train} would never train them"
            )
        if self.prototype_rate and "prototypes" in self.update.train:
            raise ValueError(
                f"prototype_rate={self.prototype_rate} moves prototypes, which update.train="
                f"{self.update.train} trains; choose one"
            )


@dataclass(frozen=True, kw_only=True)
class GuardConfig(JSONConfig):
    """Learning in overlays, and predicting by the evidence for each of them."""

    learn: LearnConfig = field(default_factory=LearnConfig)
    prior: float = 0.5
    """The weight of the base; overlays share the rest. A window costs at most log(1 / prior) nats more."""
    window: int | None = None
    """Tokens after which the weights start again; None is the model's context."""
    switch_rate: float = 0.0
    """The share of the weights that each token moves back to the prior, for texts that change in between."""
    pause: float = 0.01
    """Nats that a window of generated text may cost more, so that paths which hardly count need not run."""
    attention: AttentionName = "off"
    """What an overlay may change in attention: nothing, low-rank deltas, or whole matrices."""
    attention_rank: int = 8
    """The rank of low-rank deltas of attention."""
    also: tuple[AlsoName, ...] = ()
    """What else an overlay may change: "embedding" (tokens the base never saw need it), "norms"."""
    max_overlays: int = 8
    """The most overlays; each costs a forward pass until the text has shown which one is right."""
    keep_versions: int = 16
    """How many versions of an overlay can be rolled back to."""
    tolerance: float = 0.1
    """Without labels: nats per token above what a path is used to that still make a text its own."""
    piece: int = 1024
    """Without labels: tokens that are judged at a time."""
    patience: int = 3
    """Without labels: pieces in a row that no path explains before a new overlay is opened for them."""

    def __post_init__(self) -> None:
        check_config("learn", self.learn, LearnConfig)
        check_number("prior", self.prior, "a probability, 0 < prior < 1", lambda p: 0 < p < 1)
        if self.window is not None:
            check_size("window", self.window)
        check_probability("switch_rate", self.switch_rate)
        check_number("pause", self.pause, "a number of nats, 0 or more", lambda nats: nats >= 0)
        check_choice("attention", self.attention, get_args(AttentionName))
        check_also(self.also)
        object.__setattr__(self, "also", tuple(self.also))  # JSON knows only lists
        check_number("tolerance", self.tolerance, "a number of nats, 0 or more", lambda nats: nats >= 0)
        for name in ("attention_rank", "max_overlays", "keep_versions", "piece", "patience"):
            check_size(name, getattr(self, name))
        if self.pause and self.switch_rate:
            raise ValueError(f"pause={self.pause} needs switch_rate=0, not {self.switch_rate}: set one to 0")


@dataclass(frozen=True, kw_only=True)
class LessonConfig(JSONConfig):
    """How a lesson is learned."""

    passes: int = 24
    """The most passes over the forms of a lesson."""
    step: float = 2.7
    """The length of the first step of the lesson's vector, as a multiple of `Lessons.unit`."""
    momentum: float = 0.8
    """The share of the last step that is in the next one."""
    decay: float = 0.1
    """The share by which the vector shrinks in a step, so that what is added by accident is small."""
    prototypes: int = 6
    """A lesson begins with at most so many patches: the subject as seen in different contexts."""
    most: int = 16
    """The most patches in the end: one more for each context that would be taken for another lesson's."""
    cover: float = 0.95
    """No further prototype is added once every context has this cosine with one."""
    radius: float = 0.65
    """The least radius; a lesson's own is larger where background or an earlier lesson comes close."""
    strangers: int = 32
    """Texts, about, that name something else in the subject's place, so that silent patches can be placed;
    with 0 there are none, and another name with the same last word may be taken for the subject."""
    apart: float = 0.6
    """Where a silent patch takes over: from the mean of those other names, 0, to that of the subject, 1."""
    near: float = 0.05
    """A basin gets a silent patch only if one of those other names comes so close to its edge, or enters."""
    room: float = 0.02
    """How far basins stay away from background, and from prototypes of other lessons."""
    contexts: int = 8
    """In how many different frames each form is read."""
    lower_case: int = 0
    """In so many of these, never the first, a prompt is in small letters, as people type: a model takes a
    name in small letters for another one. More than a few cost what is said in the usual way."""
    after: int = 4
    """Tokens that the base would write after an answer, and that are learned with it."""
    mention: int = 16
    """Tokens that the base would write after a sentence that names the subject and asks nothing."""
    after_weight: float = 0.1
    """What a token of the base's own counts beside one of the answer."""
    least_forms: int = 3
    """What a lesson of fewer forms says is also learned in answer to open questions about its subject."""
    questions: int = 3
    """So many answers of a lesson are asked for before and after it, in a form that it is not learned in."""
    enough: float = 0.25
    """A lesson is learned no further once its loss, in nats per token, was below this in every frame."""
    rows: int = 256
    """Texts that are read at once."""

    def __post_init__(self) -> None:
        for name in ("passes", "prototypes", "most", "contexts", "rows"):
            check_size(name, getattr(self, name))
        for name in ("after", "mention", "strangers", "questions", "least_forms", "lower_case"):
            check_number(
                name, getattr(self, name), "0 or more", lambda value: value >= 0 and value == int(value)
            )
        if self.lower_case >= self.contexts:
            raise ValueError(
                f"lower_case={self.lower_case}: in the first of its {self.contexts} contexts a lesson is "
                "tested as it was said, so give fewer than these"
            )
        check_number("step", self.step, "a positive number", lambda value: value > 0)
        for name in ("after_weight", "enough"):
            check_number(name, getattr(self, name), "0 or more", lambda value: value >= 0)
        for name in ("momentum", "decay"):
            check_number(name, getattr(self, name), "0 or more, below 1", lambda value: 0 <= value < 1)
        for name in ("cover", "radius", "room", "apart", "near"):
            check_number(name, getattr(self, name), "between 0 and 1", lambda value: 0 <= value <= 1)
