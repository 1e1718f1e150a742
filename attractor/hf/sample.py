"""What goes into the FFNs of a model on a sample of text, and prototypes that lie among it."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attractor import ops
from attractor.hf.find import Place
from attractor.hf.site import check_arguments, check_output
from attractor.layer import APN
from attractor.lm import mode

Sample = Tensor | Sequence[str]

SEQUENCES = 8
"""The sequences of a sample that are read at once."""
ROUNDS = 25
MOST_NUMBERS = 1 << 27
"""The numbers that are kept of inputs and outputs of FFNs at a time: half a gigabyte."""


def sample_batches(model: Any, sample: Sample, tokenizer: Any = None) -> list[Tensor]:
    """Token ids (b, t), ready for the model: rows of a tensor, or each text by itself, without padding."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(sample, Tensor):
        if sample.dim() != 2 or sample.is_floating_point() or not sample.numel():
            raise ValueError(
                f"sample of shape {tuple(sample.shape)} and type {sample.dtype}: expected token ids (n, time)"
            )
        if context is not None and sample.shape[1] > context:
            raise ValueError(f"sample has rows of {sample.shape[1]} tokens; the model's context is {context}")
        batches = list(sample.long().split(SEQUENCES))
    else:
        if isinstance(sample, str) or not all(isinstance(text, str) for text in sample) or not sample:
            raise ValueError(f"sample of type {type(sample).__name__}: expected token ids or a list of texts")
        if tokenizer is None:
            raise ValueError("sample is text: give the model's tokenizer= too, or token ids")
        texts = [torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64) for text in sample]
        batches = [part[None] for text in texts for part in text.split(context or max(1, len(text)))]
    most = model.get_input_embeddings().weight.shape[0]
    if any(int(batch.min()) < 0 or int(batch.max()) >= most for batch in batches if batch.numel()):
        raise ValueError(f"sample has tokens outside the model's vocabulary, 0 to {most - 1}")
    return [batch.to(model.device) for batch in batches if batch.numel()]


def activations(
    model: Any, places: Sequence[Place], batches: list[Tensor], *, with_outputs: bool = True
) -> Iterator[tuple[Place, Tensor, Tensor | None]]:
    """Every place with the inputs and outputs (n, dim) of its FFN; as many at a time as fit."""
    if not batches:
        raise ValueError("the sample has no tokens")
    width = model.config.get_text_config().hidden_size
    numbers = 2 * width * sum(batch.numel() for batch in batches)
    at_once = max(1, MOST_NUMBERS // max(1, numbers))
    for start in range(0, len(places), at_once):
        some = places[start : start + at_once]
        inputs, outputs = _read(model, some, batches, with_outputs)
        yield from zip(some, inputs, outputs, strict=True)


class _Read(Exception):
    """Every place was read: the rest of the model need not run."""


@torch.no_grad()
def _read(
    model: Any, places: Sequence[Place], batches: list[Tensor], with_outputs: bool
) -> tuple[list[Tensor], Sequence[Tensor | None]]:
    """Read inputs and outputs in float32; an output is without a residual that it adds."""
    inputs: list[list[Tensor]] = [[] for _ in places]
    outputs: list[list[Tensor]] = [[] for _ in places]

    def stop_after_last(number: int) -> None:
        if number == len(places) - 1:  # they are in the order of their blocks: what comes after is not needed
            raise _Read

    def watch(number: int, place: Place) -> list[Any]:
        def keep_input(module: object, arguments: tuple[Any, ...]) -> None:
            hidden, *residuals = check_arguments(place, arguments if with_outputs else arguments[:1])
            inputs[number].append(hidden.float().flatten(0, -2))
            if not with_outputs:
                return stop_after_last(number)
            outputs[number].append(torch.zeros_like(inputs[number][-1]))
            for residual in residuals:
                outputs[number][-1] -= residual.float().flatten(0, -2)

        def keep_output(module: object, arguments: object, output: Tensor) -> None:
            outputs[number][-1] += check_output(place, output).float().flatten(0, -2)
            stop_after_last(number)

        first = place.modules[0].register_forward_pre_hook(keep_input)
        return [first, *([place.modules[-1].register_forward_hook(keep_output)] if with_outputs else [])]

    hooks = [hook for number, place in enumerate(places) for hook in watch(number, place)]
    try:
        with mode(model, training=False):
            for batch in batches:
                with suppress(_Read):
                    model.base_model(input_ids=batch, use_cache=False)  # no head: most of a small model
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(parts) for parts in inputs], [torch.cat(parts) if parts else None for parts in outputs]


@torch.no_grad()
def set_prototypes(layer: APN, inputs: Tensor, seed: int) -> None:
    """Prototypes in the middle of clusters of `inputs` (n, dim), by spherical k-means; lengths are kept."""
    if layer.config.prototypes == "product":
        raise ValueError('prototypes="product" cannot be placed among activations: start them at random')
    directions = layer.represent(inputs.to(layer.encoder.dtype)).float()
    directions = directions[directions.any(1)]
    count, groups = layer.num_patches, layer.config.routing_groups
    if len(directions) < count:
        raise ValueError(
            f"the sample has {len(directions)} tokens for {count} prototypes: give more, or start at random"
        )
    generator = torch.Generator().manual_seed(seed)
    start = torch.randperm(len(directions), generator=generator)[:count]
    centres, owners = directions[start.to(directions.device)], None
    for _ in range(ROUNDS):
        likeness, owner = (directions @ centres.T).max(1)
        if owners is not None and torch.equal(owner, owners):
            break
        members = F.one_hot(owner, count).to(directions)  # (n, K); a product is the same on every run
        owners, sums, empty = owner, members.T @ directions, members.sum(0) == 0
        sums[empty] = directions[likeness.argsort(stable=True)[: int(empty.sum())]]  # those that fit worst
        centres = ops.unit(sums.unflatten(-1, (groups, -1))).flatten(1)
    lengths = layer.prototypes.float().norm(dim=1, keepdim=True) / groups**0.5
    layer.prototypes.copy_(centres * lengths)
