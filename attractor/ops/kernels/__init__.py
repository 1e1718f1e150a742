"""Triton kernels of the fused backend; fused.py launches them. The only folder that imports triton.

A pair is a (token, slot); pair number = token * k + slot. The pairs are grouped by patch with a counting sort
(deterministic, no host sync), cut into tiles of pairs of one patch, and each tile is one matrix product. No
kernel adds floats with atomics, so the same inputs give the same bits.

Shape suffixes as in reference.py; p pairs in the order of their patches, t tiles. Sizes that end in _P are
padded to a power of two. GATE: 0 codes are given, 1 scalar gate, 2 vector gate.
"""

from attractor.ops.kernels.backward import (
    add_products,
    bank_backward,
    code_backward,
    decode_backward,
    gate_backward,
    pair_products,
    sum_parts,
    token_backward,
    token_products,
)
from attractor.ops.kernels.forward import (
    combine,
    count,
    decode,
    few_scores,
    few_tokens,
    lengths,
    make_plan,
    place,
    route,
    scan_chunks,
)
from attractor.ops.kernels.product import (
    codebook_gradient,
    codebook_parts,
    few_halves,
    few_pairs,
    gather_backward,
    gather_decode,
    route_pairs,
    sum_runs,
    sum_spans,
    token_gradient,
)

__all__ = [
    "add_products",
    "bank_backward",
    "code_backward",
    "codebook_gradient",
    "codebook_parts",
    "combine",
    "count",
    "decode",
    "decode_backward",
    "few_halves",
    "few_pairs",
    "few_scores",
    "few_tokens",
    "gate_backward",
    "gather_backward",
    "gather_decode",
    "lengths",
    "make_plan",
    "pair_products",
    "place",
    "route",
    "route_pairs",
    "scan_chunks",
    "sum_parts",
    "sum_runs",
    "sum_spans",
    "token_backward",
    "token_gradient",
    "token_products",
]
