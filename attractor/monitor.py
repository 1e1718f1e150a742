"""The paper's monitoring metrics: is routing healthy, and how much would an update disturb?

Everything here reads the `indices` of a `RoutingStats`: (..., k), with -1 for tokens that were not routed.

    update, stats = layer(tokens, return_stats=True)
    logger.log(monitor.summary(stats))
"""

import math

import torch
from torch import Tensor

from attractor.config import check_size
from attractor.layer import RoutingStats

EPSILON = 1e-12


def _active_sets(indices: Tensor) -> Tensor:
    """Return active sets (n, k) without the tokens that were not routed."""
    flat = indices.reshape(-1, indices.shape[-1])
    return flat[flat[:, 0] >= 0]


def _counts(active: Tensor, num_patches: int) -> Tensor:
    if active.numel() and int(active.max()) >= num_patches:
        raise ValueError(f"indices name patch {int(active.max())}, but num_patches={num_patches}")
    return torch.bincount(active.flatten(), minlength=num_patches).double()


def usage(indices: Tensor, num_patches: int) -> Tensor:
    """Return q (K), each patch's share of all selections. It sums to 1; zeros when nothing was routed.

    The paper's "frequency that patch i appears in the active set" is top_k times this.
    """
    counts = _counts(_active_sets(indices), num_patches)
    return counts / counts.sum().clamp(min=1)


def usage_entropy(q: Tensor) -> float:
    """H(q) in nats: 0 when one patch does all the work, log(K) when all work alike."""
    return float(-(q * (q + EPSILON).log()).sum())


def dead_patches(q: Tensor) -> Tensor:
    """The patches that no token selected."""
    return (q == 0).nonzero().flatten()


def mean_overlap(indices: Tensor, num_patches: int) -> float:
    """Mean |K(h) & K(h')| over pairs of different tokens; NaN with fewer than two.

    Counting is enough: the sum over pairs is the sum over patches of count * (count - 1).
    """
    active = _active_sets(indices)
    counts = _counts(active, num_patches)
    pairs = len(active) * (len(active) - 1)
    return float((counts * (counts - 1)).sum()) / pairs if pairs else float("nan")


def overlap_histogram(indices: Tensor, num_patches: int, *, max_tokens: int = 2048) -> Tensor:
    """Return the share of pairs of different tokens whose active sets share 0, 1, ..., k patches: (k + 1).

    The pairs are quadratic in the tokens, so more than `max_tokens` are thinned evenly.
    """
    active = _active_sets(indices)
    check_size("max_tokens", max_tokens)
    _counts(active, num_patches)  # for its check
    active = active[:: -(-len(active) // max_tokens) or 1]
    used, place = active.unique(return_inverse=True)  # of a million patches, a few thousand
    members = torch.zeros(len(active), len(used), device=active.device)
    members.scatter_(1, place, 1.0)
    shared = (members @ members.T).long()
    histogram = torch.bincount(shared.flatten(), minlength=indices.shape[-1] + 1).double()
    histogram[-1] -= len(active)  # every token shares its whole set with itself
    return histogram / histogram.sum().clamp(min=1)


def expected_overlap(indices_a: Tensor, indices_b: Tensor, num_patches: int) -> float:
    """Omega(A, B) of the interference proposition: mean |K(h) & K(h')| over h in A and h' in B."""
    active_a, active_b = _active_sets(indices_a), _active_sets(indices_b)
    pairs = len(active_a) * len(active_b)
    shared = _counts(active_a, num_patches) @ _counts(active_b, num_patches)
    return float(shared) / pairs if pairs else float("nan")


def overlap_score(indices_a: Tensor, indices_b: Tensor, num_patches: int) -> float:
    """Omega(A, B) / k: the same overlap between 0 (disjoint) and 1 (identical active sets)."""
    return expected_overlap(indices_a, indices_b, num_patches) / indices_a.shape[-1]


def summary(stats: RoutingStats, *, prefix: str = "") -> dict[str, float]:
    """One flat dict of numbers for a logger.

    The ratio |update| / |h| is to the statistics' `input_norm`: that of the residual stream if they are a
    GPT's, else that of the layer's own input, which a pre-norm block has already normalised.
    """
    q = usage(stats.indices, stats.num_patches)
    routed = stats.indices[..., 0] >= 0
    entropy = usage_entropy(q)
    values = {
        "tokens": float(routed.numel()),
        "unrouted_tokens": float((~routed).sum()),
        "usage_entropy": entropy,
        "effective_patches": math.exp(entropy),
        "dead_patches": float(len(dead_patches(q))),
        "max_usage": float(q.max()),
        "mean_overlap": mean_overlap(stats.indices, stats.num_patches),
        "balance_loss": float(stats.balance.detach()),
        "weight_entropy": float(stats.entropy.detach()),
    }
    ratio = stats.update_norm / stats.input_norm
    samples = {"confidence": stats.confidence, "update_norm": stats.update_norm, "update_ratio": ratio}
    for name, each in samples.items():
        values |= _distribution(name, each.detach()[routed])
    return {prefix + name: value for name, value in values.items()}


def _distribution(name: str, samples: Tensor) -> dict[str, float]:
    names = [f"{name}_{part}" for part in ("mean", "p05", "p50", "p95", "max")]
    if samples.numel() == 0:
        return dict.fromkeys(names, float("nan"))
    ordered = samples.double().flatten().sort().values
    last = len(ordered) - 1
    picks = [ordered[round(last * share)] for share in (0.05, 0.5, 0.95, 1.0)]
    return dict(zip(names, [float(value) for value in (ordered.mean(), *picks)], strict=True))
