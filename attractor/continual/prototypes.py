"""The moving average of prototypes: each turns slowly towards the tokens that chose it."""

import torch
from torch import Tensor

from attractor import ops
from attractor.continual.update import NotFiniteUpdate, Undo, precise, write_rows
from attractor.layer import APN, RoutingStats


@torch.no_grad()
def pull(layer: APN, stats: RoutingStats, inputs: Tensor, admitted: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each patch the weighted sum of the admitted tokens that chose it, and of their weights."""
    tokens = layer.represent(inputs[admitted])
    indices, weights = stats.indices[admitted], stats.weights.detach()[admitted]
    toward = tokens.new_zeros(layer.num_patches, tokens.shape[1])
    amount = tokens.new_zeros(layer.num_patches)
    for slot in range(indices.shape[1]):  # not index_add_, whose atomics differ from run to run
        weight, patch = weights[:, slot].to(tokens), (indices[:, slot].clamp(min=0),)
        toward.index_put_(patch, weight[:, None] * tokens, accumulate=True)
        amount.index_put_(patch, weight, accumulate=True)
    return toward, amount


@torch.no_grad()
def turn(layer: APN, patches: Tensor, toward: Tensor, amount: Tensor, rate: float, undo: Undo) -> None:
    """A step of `rate` from a prototype's direction towards its tokens'; lengths stay (by group)."""
    groups = layer.config.routing_groups
    pulled = patches[amount[patches] > 0]
    old = precise(layer.prototypes[pulled]).unflatten(-1, (groups, -1))
    mean = precise(toward[pulled]).unflatten(-1, (groups, -1))
    turned = ops.unit(torch.lerp(ops.unit(old), ops.unit(mean), rate))
    new = (turned * old.norm(dim=-1, keepdim=True)).flatten(1)
    if not new.isfinite().all():
        raise NotFiniteUpdate("a prototype would not be finite; nothing was changed")
    write_rows(layer.prototypes, pulled, new, undo)
