"""New APN layers for the FFNs of a model. Nothing of the model changes here."""

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, Unpack, get_args

import torch
from torch import Tensor, nn

from attractor.config import APNConfig, check_choice, check_size
from attractor.hf.distill import LAST, distill
from attractor.hf.files import ModeName
from attractor.hf.find import Layers, Place, attention_of, find_places
from attractor.hf.sample import Sample, activations, sample_batches, set_prototypes
from attractor.layer import APN, FLOATS

log = logging.getLogger("attractor")

StartName = Literal["random", "kmeans"]


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
