"""What a layer costs and what it can do: parameters, multiply-adds, rank, overlap, reach of an update.

Counting needs shapes only, so it works on a layer built with device="meta".
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attractor.layer import APN, LOCAL_ROLES, PATCH_ROLES, ROLES, check_roles
from attractor.lm import mode
from attractor.model import GPT
from attractor.moe import MoE


def parameter_counts(layer: APN) -> dict[str, int]:
    """Parameters by role, the "total", and the "active" ones that a single token reads.

    The router reads every prototype; of gates and decoders a token reads top_k patches.
    """
    counts: dict[str, int] = {}
    for name, parameter in layer.named_parameters():
        counts[ROLES[name]] = counts.get(ROLES[name], 0) + parameter.numel()
    total = sum(counts.values())
    idle = (
        (layer.num_patches - layer.config.top_k) * (counts["gates"] + counts["decoders"]) // layer.num_patches
    )
    return {**counts, "total": total, "active": total - idle}


def multiply_adds(layer: APN | MoE) -> dict[str, int]:
    """Multiply-adds of the matrix products for one token; elementwise work (gates, softmax) is left out.

    So is the noise of an MoE's router, which only training draws. A token that Switch drops counts in full.
    """
    if isinstance(layer, MoE):
        experts = layer.config.top_k * 2 * layer.dim * layer.hidden
        return {"router": layer.router.numel(), "experts": experts, "total": layer.router.numel() + experts}
    k, (d, r) = layer.config.top_k, layer.encoder.shape
    compared = layer.prototypes if layer.codebooks is None else layer.codebooks
    counts = {"router": compared.numel(), "encoder": d * r}
    if layer.router_projection is not None:
        counts["router"] += layer.router_projection.numel()
    if layer.offset_in is None:
        counts["decoders"] = k * r * d
    else:
        q = layer.offset_in.shape[-1]
        counts |= {"base": r * d, "decoders": k * (r * q + q * d)}
    return {**counts, "total": sum(counts.values())}


def dense_multiply_adds(dim: int, hidden: int | None = None) -> int:
    """Multiply-adds per token of a dense FFN, of width 4 * dim if no other is given: the one that this layer
    replaces. Also its parameters, without biases."""
    return 2 * dim * (hidden or 4 * dim)


def model_multiply_adds(model: GPT) -> int:
    """Multiply-adds of a forward pass per token of a full context; attention over the causal half of it."""
    config = model.config
    ffns = sum(
        multiply_adds(ffn)["total"]
        if isinstance(ffn, APN | MoE)
        else dense_multiply_adds(config.dim, config.hidden)
        for ffn in (block.ffn for block in model.blocks)
    )
    attention = config.num_layers * (4 * config.dim**2 + config.context * config.dim)
    return ffns + attention + config.vocab_size * config.dim


def uniform_overlap(num_patches: int, top_k: int) -> float:
    """Expected |K(h) & K(h')| when both active sets are drawn evenly: k^2 / K."""
    return top_k**2 / num_patches


class EffectiveRank(NamedTuple):
    span: Tensor  # (n) rank of the active decoders side by side: where the update can point. At most k * r
    map: Tensor  # (n) rank of the active map z -> update with gates and weights held fixed. At most r


@torch.no_grad()
def effective_rank(layer: APN, tokens: Tensor) -> EffectiveRank:
    """Numeric ranks of what is active at each routed token, in float64.

    The paper bounds both by k * r. All patches read one shared code, so the second is in fact at most r.
    """
    active = _active_sets(layer, tokens)
    encoder = layer.encoder.double()
    spans, maps = [], []
    for z, indices, weights in zip(*active, strict=True):
        decoders, code = _decoders(layer, indices), z.double() @ encoder
        slope = 0 if layer.gate_slope is None else layer.gate_slope[indices].double() * code
        gates = torch.sigmoid(slope + layer.gate_bias[indices].double()).expand(-1, len(code))
        mixed = torch.einsum("k,kr,krd->rd", weights.double(), gates, decoders)
        spans.append(torch.linalg.matrix_rank(decoders.flatten(0, 1)))
        maps.append(torch.linalg.matrix_rank(encoder @ mixed))
    return EffectiveRank(*(torch.tensor([int(rank) for rank in ranks]) for ranks in (spans, maps)))


class _ActiveSets(NamedTuple):
    z: Tensor  # (n, d) what the router saw
    indices: Tensor  # (n, k)
    weights: Tensor  # (n, k)


def _active_sets(layer: APN, tokens: Tensor) -> _ActiveSets:
    """Routing without dropout, of the tokens that are routed at all."""
    with mode(layer, training=False):
        _, stats = layer(tokens.reshape(-1, layer.dim), return_stats=True)
    routed = stats.indices[:, 0] >= 0
    z = tokens.reshape(-1, layer.dim)[routed]
    return _ActiveSets(
        z if layer.norm is None else layer.norm(z), stats.indices[routed], stats.weights[routed]
    )


def _decoders(layer: APN, indices: Tensor) -> Tensor:
    """Return the decoders (k, r, d) in float64, the shared base included."""
    if layer.decoder is not None:
        return layer.decoder[indices].double()
    assert layer.decoder_base is not None
    assert layer.offset_in is not None
    assert layer.offset_out is not None
    offsets = layer.offset_in[indices].double() @ layer.offset_out[indices].double()
    return layer.decoder_base.double() + offsets


ROUTING_ROLES = {"prototypes", "router", "norm"}
"""Training these can change which patches a token selects."""


class UpdateSurface(NamedTuple):
    patches: Tensor  # the patches that some token selected
    parameters: int  # how many parameters can change
    fraction: float  # of all parameters of the layer
    is_local: bool  # tokens that select none of these patches are not affected


@torch.no_grad()
def update_surface(layer: APN, tokens: Tensor, *, roles: Sequence[str] = LOCAL_ROLES) -> UpdateSurface:
    """What an online update on these tokens can change if it trains these roles of the active patches.

    Only gates and decoders are local. Every token is compared with every prototype, and the other roles are
    shared, so training those can affect tokens that select none of the changed patches.
    """
    sizes = _trained_sizes(layer, roles)
    patches = _active_sets(layer, tokens).indices.unique()
    changed = len(patches) * (sizes.patch + sizes.prototype) + sizes.shared
    is_local = sizes.prototype == sizes.shared == 0
    return UpdateSurface(patches, changed, changed / sizes.total, is_local)


def interference_bound(
    layer: APN, overlap: float, *, tokens: int = 1, roles: Sequence[str] = LOCAL_ROLES
) -> float:
    """Proposition 1 with its function spelled out; proof in docs/math.md.

    Of all the layer's parameters, the expected fraction that an A-token reads and that local updates on
    `tokens` B-tokens may have changed, given `overlap` = Omega(A, B) from `monitor.expected_overlap`. With
    gates and decoders trained it is at most min(k, tokens * Omega) patches. A changed router (prototypes,
    projection, norm) may send the A-token to any patch, and Omega does not help: k patches, and the router.
    """
    if not 0 <= overlap <= layer.config.top_k:
        raise ValueError(f"overlap={overlap} must lie between 0 and top_k={layer.config.top_k}")
    if tokens < 0:
        raise ValueError(f"tokens={tokens} must not be negative")
    sizes = _trained_sizes(layer, roles)
    rerouted = tokens > 0 and not ROUTING_ROLES.isdisjoint(roles)
    patches = layer.config.top_k if rerouted else min(layer.config.top_k, tokens * overlap)
    prototypes = min(layer.num_patches, tokens * layer.config.top_k)
    return (patches * sizes.patch + prototypes * sizes.prototype + sizes.shared) / sizes.total


class _TrainedSizes(NamedTuple):
    patch: int  # trained gate and decoder parameters of one patch
    prototype: int  # trained parameters of one prototype
    shared: int  # trained parameters that belong to no patch
    total: int  # all parameters of the layer


def _trained_sizes(layer: APN, roles: Sequence[str]) -> _TrainedSizes:
    check_roles(roles)
    counts = parameter_counts(layer)
    trained = {role: counts.get(role, 0) for role in set(roles)}
    shared = sum(size for role, size in trained.items() if role not in PATCH_ROLES)
    patch = sum(trained.get(role, 0) for role in LOCAL_ROLES) // layer.num_patches
    return _TrainedSizes(patch, trained.get("prototypes", 0) // layer.num_patches, shared, counts["total"])
