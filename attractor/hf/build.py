"""New APN layers for the FFNs of a model: random ones, or distilled. Nothing of the model changes here."""

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, Unpack, get_args

import torch
from torch import Tensor, nn

from attractor.config import APNConfig, check_choice, check_size
from attractor.hf.files import ModeName
from attractor.hf.find import Layers, Place, attention_of, find_places
from attractor.hf.sample import Sample, activations, sample_batches, set_prototypes
from attractor.layer import APN, FLOATS
from attractor.lm import mode
from attractor.loop import Loop, annealed, descend

log = logging.getLogger("attractor")

StartName = Literal["random", "kmeans"]
LAST = ("decoder", "decoder_base", "offset_out")
"""The parameters of a layer that its update is linear in."""
BATCH = 1024
LEARNING_RATE = 1e-2
HELD_OUT = 10
"""One token in so many is not trained on: the error is measured there."""


class Options(TypedDict, total=False):
    """The options of a retrofit."""

    layers: Layers
    """"all" (default), a list of layer numbers, or a pattern such as "model.layers.*.mlp"."""
    mode: ModeName
    """"beside" the FFNs, which go on to work (default), or to "replace" them."""
    read_from: int | None
    """Let the layers read what the FFN of this earlier block is given, not their own (default: their own)."""
    read_attention: Sequence[int]
    """Let them also read what the attention of these blocks adds, none of them later (default: of none). The
    layers must whiten."""
    prototypes: StartName
    """"random" (default), or "kmeans" of what goes into the FFN on the sample."""
    sample: Sample | None
    """Token ids (n, time), or texts and their `tokenizer`: for "replace" and for "kmeans"."""
    tokenizer: Any
    steps: int
    """The steps that distil each layer (default: 500)."""
    seed: int
    """The seed of everything random (default: 0)."""
    dtype: torch.dtype | None
    """The type of the APN layers (default: that of the FFN)."""
    backend: str
    """How the layers are computed, as for `APN`."""


@dataclass(frozen=True)
class Built:
    """APN layers and where they go."""

    mode: ModeName
    layers: list[tuple[Place, APN]]
    source: Place | None = None  # whose input the layers read in place of their own
    attention: tuple[str, ...] = ()  # modules whose results they read beside it
    errors: dict[int, float] = field(default_factory=dict)  # block -> relative error of a distilled layer


def build(model: Any, config: APNConfig, **options: Unpack[Options]) -> Built:
    if unknown := sorted(options.keys() - Options.__annotations__.keys()):
        raise TypeError(f"unknown options {unknown}; there are: {', '.join(Options.__annotations__)}")
    mode, prototypes = options.get("mode", "beside"), options.get("prototypes", "random")
    steps, seed, sample = options.get("steps", 500), options.get("seed", 0), options.get("sample")
    check_choice("mode", mode, get_args(ModeName))
    check_choice("prototypes", prototypes, get_args(StartName))
    check_size("steps", steps)
    needs_sample = mode == "replace" or prototypes == "kmeans"
    if needs_sample and sample is None:
        raise ValueError(f"mode={mode!r} with prototypes={prototypes!r} needs a sample= of text")
    batches = sample_batches(model, sample, options.get("tokenizer")) if sample is not None else []
    places = find_places(model, options.get("layers", "all"))
    source = find_source(model, options.get("read_from"), places)
    if source is not None and needs_sample:
        raise ValueError(f"read_from={source.number} goes with mode='beside' and prototypes='random' alone")
    attention = find_attention(model, options.get("read_attention", ()), source)
    if attention:
        config = dataclasses.replace(config, read_dim=(1 + len(attention)) * width(model))
    built = Built(mode, [], source, attention)
    seen: Iterable[tuple[Place, Any, Any]] = ((place, None, None) for place in places)
    if needs_sample:
        seen = activations(model, places, batches, with_outputs=mode == "replace")
    gpus = sorted({parameter.device.index for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed reaches GPUs that are not forked
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(seed)
        for place, inputs, outputs in seen:
            weight = weight_of(model, place)
            dtype = options.get("dtype") or weight.dtype
            if dtype not in FLOATS:
                raise ValueError(f"dtype={dtype} must be one of {', '.join(map(str, FLOATS))}")
            layer = APN.from_config(width(model), config, backend=options.get("backend", "auto"))
            layer.to(weight.device)  # drawn on the CPU: the same numbers on every device
            if prototypes == "kmeans":
                set_prototypes(layer, inputs, seed)
            if mode == "replace":
                error = built.errors[place.number] = distill(layer, inputs, outputs, steps=steps, seed=seed)
                log.info("%s is replaced with a relative error of %.3f", place.name, error)
            else:
                zero_decoders(layer)
            built.layers.append((place, layer.to(dtype)))
    return built


def find_source(model: nn.Module, number: int | None, places: list[Place]) -> Place | None:
    """The FFN of block `number`, which all `places` must come after."""
    if number is None:
        return None
    (source,) = find_places(model, [number])
    if any(place.number <= number for place in places):
        raise ValueError(
            f"read_from={number} must be a block before all layers, {places[0].number} and later"
        )
    return source


def find_attention(model: nn.Module, numbers: Sequence[int], source: Place | None) -> tuple[str, ...]:
    """The attention of these blocks, which come before the source's FFN."""
    if not numbers:
        return ()
    if source is None or max(numbers) > source.number:
        raise ValueError(f"read_attention={list(numbers)} must be blocks up to that of read_from=")
    return tuple(attention_of(model, place) for place in find_places(model, numbers))


def width(model: Any) -> int:
    return model.config.get_text_config().hidden_size


def weight_of(model: nn.Module, place: Place) -> Tensor:
    """A weight whose dtype the APN layer takes, and the device on which it is used.

    `accelerate` may keep it elsewhere until then, and says where it brings it.
    """
    own = (part for module in place.modules for part in module.modules())
    for module in (*own, *model.modules()):
        for weight in module.parameters(recurse=False):
            if weight.is_floating_point() and not weight.is_meta:
                return weight
            device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
            if weight.is_floating_point() and device is not None:
                return torch.empty(0, dtype=weight.dtype, device=device)
    raise ValueError(f"{type(model).__name__} has no weights in memory: load it first")


@torch.no_grad()
def zero_decoders(layer: APN) -> None:
    """The layer's update becomes zero, and its decoders can still learn."""
    for name, parameter in layer.named_parameters():
        if name in LAST:
            parameter.zero_()


def adds_nothing(layer: APN) -> bool:
    """Is the update zero for every input?"""
    return not any(parameter.any() for name, parameter in layer.named_parameters() if name in LAST)


def distill(layer: APN, inputs: Tensor, outputs: Tensor, *, steps: int, seed: int) -> float:
    """Train all of a float32 layer on inputs and outputs (n, dim); returns the relative error, |e| / |y|.

    AdamW on the squared error, with a learning rate that falls to zero.
    """
    if len(inputs) < 2 * HELD_OUT:
        raise ValueError(f"the sample has {len(inputs)} tokens; distilling needs at least {2 * HELD_OUT}")
    if not (inputs.isfinite().all() and outputs.isfinite().all()):
        raise ValueError("the FFN gives numbers that are not finite on this sample; it cannot be distilled")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(inputs), generator=generator).to(inputs.device)
    held_out, taught = order[: len(order) // HELD_OUT], order[len(order) // HELD_OUT :]
    loudness_in, loudness_out = (x[taught].square().mean().sqrt().clamp(min=1e-30) for x in (inputs, outputs))
    with torch.no_grad():  # learn in units of what goes in and comes out: one rate then suits every FFN
        if layer.norm is None:
            layer.encoder.div_(loudness_in)
    targets = outputs / loudness_out
    optimizer = torch.optim.AdamW(layer.parameters(), weight_decay=0.0)

    def take(step: int) -> Tensor:
        chosen = torch.randint(len(taught), (min(BATCH, len(taught)),), generator=generator)
        rows = taught[chosen.to(taught.device)]
        loss = (layer(inputs[rows]) - targets[rows]).square().mean()
        descend(optimizer, [loss], LEARNING_RATE * annealed(step, steps))
        return loss.detach()

    with mode(layer, training=True), torch.enable_grad():
        Loop(take).run_until(steps)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name in LAST:
                parameter.mul_(loudness_out)
    return relative_error(layer, inputs[held_out], outputs[held_out])


@torch.no_grad()
def relative_error(layer: APN, inputs: Tensor, outputs: Tensor) -> float:
    with mode(layer, training=False):
        return float((layer(inputs) - outputs).norm() / outputs.norm().clamp(min=1e-30))
