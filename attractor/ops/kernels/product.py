"""Product prototypes: choosing pairs of rows, gathering their decoders, and back.

A patch is a pair (i, j) of rows of two codebooks, each with N rows of M = D / 2 channels; its number is
i N + j. There are so many patches that hardly two pairs (token, slot) share one: decoders are gathered for
each pair, and nothing is cut into tiles. For the gradients of gates and decoders the pairs are sorted by
patch. Those of one patch are a run; a run longer than SPAN is added up in spans, and these after that.
"""

import triton
import triton.language as tl

from attractor.ops import launch
from attractor.ops.kernels.forward import (
    LEAST,
    best_first,
    dot,
    gate,
    inverse_length,
    keep_best,
    keep_better,
    scores,
    softmax,
)
from attractor.ops.kernels.quick import quick

SPAN = tl.constexpr(launch.SPAN)
"""Pairs of one run that one program adds up."""
HALF = tl.constexpr(0.7071067811865476)
"""The length of each half of a prototype."""
NOBODY = tl.constexpr(2147483647)


@triton.jit
def best_rows(
    z_rows,
    is_row,
    C,
    inverse_c,
    factor,
    half: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    k: tl.constexpr,
    k_P: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The k best rows of one codebook for BN tokens, best first, and what they add to a score (P2)."""
    M: tl.constexpr = D // 2
    slots = tl.arange(0, k_P)
    best = tl.zeros((BN, k_P), tl.float32) + tl.where(slots < k, float("-inf"), float("inf"))
    best_row = tl.zeros((BN, k_P), tl.int32) + (N + slots)
    for first in range(0, N, BK):
        codes = first + tl.arange(0, BK)
        acc = tl.zeros((BN, BK), tl.float32)
        for start in range(0, M, BD):  # nothing but the product may read these tiles: see forward.lengths
            cols = start + tl.arange(0, BD)
            z_tile = tl.load(z_rows + half * M + cols, mask=is_row[:, None] & (cols < M)[None, :], other=0.0)
            C_tile = tl.load(
                C + (half * N + codes)[None, :] * M + cols[:, None],
                mask=(codes < N)[None, :] & (cols < M)[:, None],
                other=0.0,
            )
            acc = scores(z_tile, C_tile, acc, SPLIT, PRECISION)
        length = tl.load(inverse_c + half * N + codes, mask=codes < N, other=0.0)
        acc = acc * length[None, :] * factor[:, None]
        acc = tl.where(acc == acc, acc, float("inf"))  # a broken row is chosen, and its NaN shows
        acc = tl.where(acc > LEAST, acc, LEAST)  # every row beats an empty slot
        acc = tl.where((codes < N)[None, :], acc, float("-inf"))
        best, best_row = keep_better(acc, best, best_row, first, k, k_P, BK)
    return best_first(best, best_row, k, k_P)


@triton.jit
def best_pairs(
    first,
    first_row,
    second,
    second_row,
    N: tl.constexpr,
    h: tl.constexpr,
    h_P: tl.constexpr,
    k: tl.constexpr,
    k_P: tl.constexpr,
    BN: tl.constexpr,
):
    """The k best of the h * h pairs of rows (P3), best first; of equal ones the lower patch."""
    ranks, slots = tl.arange(0, h_P), tl.arange(0, k_P)
    there = (ranks < h)[None, :, None] & (ranks < h)[None, None, :]
    score = first[:, :, None] + second[:, None, :]
    score = tl.where(score > LEAST, score, LEAST)
    score = tl.reshape(tl.where(there, score, float("-inf")), (BN, h_P * h_P))
    patch = first_row[:, :, None] * N + second_row[:, None, :]
    patch = tl.reshape(tl.where(there, patch, NOBODY), (BN, h_P * h_P))
    ordered = tl.full((BN, k_P), float("-inf"), tl.float32)
    ordered_patch = tl.zeros((BN, k_P), tl.int32)
    for slot in range(k):
        top = tl.max(score, 1)
        lowest = tl.min(tl.where(score == top[:, None], patch, NOBODY), 1)
        ordered = tl.where((slots == slot)[None, :], top[:, None], ordered)
        ordered_patch = tl.where((slots == slot)[None, :], lowest[:, None], ordered_patch)
        score = tl.where(patch == lowest[:, None], float("-inf"), score)
    return ordered, ordered_patch


@quick
@triton.jit
def route_pairs(
    z,
    C,
    V,
    keep,
    idx,
    w,
    s,
    u,
    inverse_z,
    inverse_c,
    confidence,
    n,
    inverse_tau,
    D: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    R_P: tl.constexpr,
    h: tl.constexpr,
    h_P: tl.constexpr,
    k: tl.constexpr,
    k_P: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    COSINE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Codes, the best rows of both codebooks, the best of their pairs, and the softmax, for BN tokens."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    is_row = rows < n
    slots = tl.arange(0, k_P)
    code = tl.arange(0, R_P)
    z_rows = z + rows[:, None].to(tl.int64) * D
    length = tl.load(inverse_z + rows, mask=is_row, other=0.0)
    finite = length == length
    u_acc = tl.zeros((BN, R_P), tl.float32)
    for start in range(0, D, BD):  # here too: see forward.lengths
        cols = start + tl.arange(0, BD)
        z_tile = tl.load(z_rows + cols, mask=is_row[:, None] & (cols < D)[None, :], other=0.0)
        here = (cols < D)[:, None] & (code < R)[None, :]
        V_tile = tl.load(V + cols[:, None] * R + code, mask=here, other=0.0)
        u_acc = dot(z_tile.to(DTYPE), V_tile.to(DTYPE), u_acc, PRECISION)
    u_acc = tl.where(finite[:, None], u_acc, 0.0)
    tl.store(u + rows[:, None].to(tl.int64) * R + code, u_acc, mask=is_row[:, None] & (code < R)[None, :])
    factor = length * (inverse_tau * HALF) if COSINE else tl.zeros((BN,), tl.float32) + inverse_tau * HALF

    first, first_row = best_rows(
        z_rows, is_row, C, inverse_c, factor, 0, D, N, h, h_P, BN, BK, BD, SPLIT, PRECISION
    )
    second, second_row = best_rows(
        z_rows, is_row, C, inverse_c, factor, 1, D, N, h, h_P, BN, BK, BD, SPLIT, PRECISION
    )
    ordered, patch = best_pairs(first, first_row, second, second_row, N, h, h_P, k, k_P, BN)

    pairs = rows[:, None].to(tl.int64) * k + slots
    is_pair = is_row[:, None] & (slots < k)[None, :]
    tl.store(confidence + rows, tl.where(finite, tl.max(ordered, 1), float("nan")), mask=is_row)
    kept = ordered
    if HAS_KEEP:
        kept = tl.where(tl.load(keep + pairs, mask=is_pair, other=1) != 0, ordered, float("-inf"))
    tl.store(w + pairs, tl.where(finite[:, None], softmax(kept), 0.0), mask=is_pair)
    tl.store(s + pairs, ordered, mask=is_pair)
    tl.store(idx + pairs, tl.where(finite[:, None], patch, -1), mask=is_pair)


@quick
@triton.jit
def few_halves(
    z,
    C,
    V,
    half_scores,
    u,
    inverse_tau,
    D: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    D_P: tl.constexpr,
    M_P: tl.constexpr,
    BK: tl.constexpr,
    COSINE: tl.constexpr,
):
    """What BK rows of a codebook add to the scores of one token (NaN if it is not finite), or its code."""
    M: tl.constexpr = D // 2
    tiles: tl.constexpr = (N + BK - 1) // BK
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, D_P)
    z_row = tl.load(z + row * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    if tile < 2 * tiles:
        half = tile // tiles
        codes, own = tile % tiles * BK + tl.arange(0, BK), tl.arange(0, M_P)
        here = (codes < N)[:, None] & (own < M)[None, :]
        C_rows = tl.load(C + (half * N + codes)[:, None] * M + own, mask=here, other=0.0).to(tl.float32)
        z_half = tl.load(z + row * D + half * M + own, mask=own < M, other=0.0).to(tl.float32)
        out = tl.sum(C_rows * z_half[None, :], 1) * inverse_length(tl.sum(C_rows * C_rows, 1))
        squared = tl.sum(z_row * z_row, 0)
        out *= inverse_tau * HALF
        if COSINE:
            out *= inverse_length(squared)
        out = tl.where(out < LEAST, LEAST, out)
        out = tl.where(squared < float("inf"), out, float("nan"))
        tl.store(half_scores + row * (2 * N) + half * N + codes, out, mask=codes < N)
    else:
        code = (tile - 2 * tiles) * BK + tl.arange(0, BK)
        is_V = (cols < D)[:, None] & (code < R)[None, :]
        V_cols = tl.load(V + cols[:, None] * R + code, mask=is_V, other=0.0).to(tl.float32)
        tl.store(u + row * R + code, tl.sum(z_row[:, None] * V_cols, 0), mask=code < R)


@triton.jit
def best_of_row(half_scores, N: tl.constexpr, N_P: tl.constexpr, k: tl.constexpr, k_P: tl.constexpr):
    """The k best of one row of scores, best first, and whether all of them are numbers."""
    codes, slots = tl.arange(0, N_P), tl.arange(0, k_P)
    score = tl.load(half_scores + codes, mask=codes < N, other=float("-inf"))[None, :]
    finite = tl.sum((score != score).to(tl.int32)) == 0
    best = tl.zeros((1, k_P), tl.float32) + tl.where(slots < k, float("-inf"), float("inf"))
    best_row = tl.zeros((1, k_P), tl.int32) + (N + slots)
    best, best_row = keep_best(tl.where(finite, score, 0.0), best, best_row, 0, k, k_P, N_P, k <= 4)
    ordered, ordered_row = best_first(best, best_row, k, k_P)
    return ordered, ordered_row, finite


@quick
@triton.jit
def few_pairs(
    half_scores,
    u,
    a,
    b,
    U,
    idx,
    w,
    confidence,
    update,
    scale,
    D: tl.constexpr,
    N: tl.constexpr,
    N_P: tl.constexpr,
    R: tl.constexpr,
    h: tl.constexpr,
    h_P: tl.constexpr,
    k: tl.constexpr,
    k_P: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    GATE: tl.constexpr,
):
    """BD channels of one token's update, from the patches that it chooses here: for writing text."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    slots = tl.arange(0, k_P)
    first, first_row, finite = best_of_row(half_scores + row * (2 * N), N, N_P, h, h_P)
    second, second_row, is_finite = best_of_row(half_scores + row * (2 * N) + N, N, N_P, h, h_P)
    finite = finite & is_finite
    ordered, patches = best_pairs(first, first_row, second, second_row, N, h, h_P, k, k_P, 1)
    weights = softmax(ordered)
    if tl.program_id(1) == 0:
        pairs, is_pair = row * k + slots[None, :], (slots < k)[None, :]
        tl.store(idx + pairs, tl.where(finite, patches, -1), mask=is_pair)
        tl.store(w + pairs, tl.where(finite, weights, 0.0), mask=is_pair)
        tl.store(confidence + row, tl.where(finite, tl.max(ordered), float("nan")))
    acc = tl.zeros((BR, BD), tl.float32)
    for start in range(0, R, BR):
        code = start + tl.arange(0, BR)
        u_part = tl.load(u + row * R + code, mask=code < R, other=0.0)
        for slot in tl.static_range(k):
            patch = tl.sum(tl.where((slots == slot)[None, :], patches, 0)).to(tl.int64)
            weight = tl.sum(tl.where((slots == slot)[None, :], weights, 0.0))
            phi = u_part * gate(u_part, a, b, patch, code, R, GATE)
            U_rows = tl.load(
                U + patch * (R * D) + code[:, None] * D + cols,
                mask=(code < R)[:, None] & (cols < D)[None, :],
                other=0.0,
            )
            acc += (weight * phi)[:, None] * U_rows.to(tl.float32)
    out = tl.where(finite, tl.sum(acc, 0) * scale, float("nan"))
    tl.store(update + row * D + cols, out.to(update.dtype.element_ty), mask=cols < D)


@quick
@triton.jit
def gather_decode(
    u,
    w,
    a,
    b,
    U,
    idx,
    update,
    scale,
    D: tl.constexpr,
    R: tl.constexpr,
    k: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    GATE: tl.constexpr,
):
    """Eqs. (5) and (6) for BD channels of one token: rows of decoders are read once and added up."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    routed = tl.load(idx + row * k) >= 0
    acc = tl.zeros((BR, BD), tl.float32)
    for start in range(0, R, BR):
        code = start + tl.arange(0, BR)
        u_part = tl.load(u + row * R + code, mask=code < R, other=0.0)
        for slot in tl.static_range(k):
            patch = tl.maximum(tl.load(idx + row * k + slot), 0).to(tl.int64)
            weight = tl.load(w + row * k + slot)
            phi = u_part * gate(u_part, a, b, patch, code, R, GATE)
            U_rows = tl.load(
                U + patch * (R * D) + code[:, None] * D + cols,
                mask=(code < R)[:, None] & (cols < D)[None, :],
                other=0.0,
            )
            acc += (weight * phi)[:, None] * U_rows.to(tl.float32)
    out = tl.where(routed, tl.sum(acc, 0) * scale, float("nan"))
    tl.store(update + row * D + cols, out.to(update.dtype.element_ty), mask=cols < D)


@quick
@triton.jit
def gather_backward(
    grad,
    u,
    w,
    a,
    b,
    U,
    idx,
    s,
    inverse_z,
    extra_w,
    extra_confidence,
    codes,
    gates,
    grad_u,
    coefficient,
    radial,
    scale,
    inverse_tau,
    D: tl.constexpr,
    R: tl.constexpr,
    k: tl.constexpr,
    k_P: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    GATE: tl.constexpr,
    COSINE: tl.constexpr,
    HAS_W: tl.constexpr,
    HAS_CONFIDENCE: tl.constexpr,
):
    """For one token: from the update to its codes, gates and weights, and through the softmax to its scores.

    Written for what follows: w phi and the gradients of the gate (bias, then slope) of each pair, the
    gradient of u, and the factors of each pair's prototype and of the token in the gradient of the token.
    """
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, k_P)
    routed = tl.load(idx + row * k) >= 0
    dw = tl.zeros((k_P,), tl.float32)
    db = tl.zeros((k_P,), tl.float32)
    for start in range(0, R, BR):
        code = start + tl.arange(0, BR)
        u_part = tl.load(u + row * R + code, mask=code < R, other=0.0)
        du = tl.zeros((BR,), tl.float32)
        for slot in tl.static_range(k):
            pair = row * k + slot
            patch = tl.maximum(tl.load(idx + pair), 0).to(tl.int64)
            weight = tl.load(w + pair)
            acc = tl.zeros((BR, BD), tl.float32)
            for begin in range(0, D, BD):
                cols = begin + tl.arange(0, BD)
                g = tl.load(grad + row * D + cols, mask=(cols < D) & routed, other=0.0).to(tl.float32)
                U_rows = tl.load(
                    U + patch * (R * D) + code[:, None] * D + cols,
                    mask=(code < R)[:, None] & (cols < D)[None, :],
                    other=0.0,
                )
                acc += g[None, :] * U_rows.to(tl.float32)
            dphi = tl.sum(acc, 1) * scale
            open_ = gate(u_part, a, b, patch, code, R, GATE)
            phi = u_part * open_
            dw += tl.where(slots == slot, tl.sum(dphi * phi, 0), 0.0)
            tl.store(codes + pair * R + code, weight * phi, mask=code < R)
            dphi *= weight
            logit = dphi * phi * (1 - open_)  # d (a u + b)
            du += dphi * open_
            if GATE == 1:
                db += tl.where(slots == slot, tl.sum(logit, 0), 0.0)
            else:
                logit = tl.where(routed, logit, 0.0)
                tl.store(gates + pair * (2 * R) + code, logit, mask=code < R)
                tl.store(gates + pair * (2 * R) + R + code, logit * u_part, mask=code < R)
                du += logit * tl.load(a + patch * R + code, mask=code < R, other=0.0).to(tl.float32)
        du = tl.where(routed, du, 0.0)
        tl.store(grad_u + row * R + code, du.to(grad_u.dtype.element_ty), mask=code < R)
    pairs, is_pair = row * k + slots, (slots < k) & routed
    if GATE == 1:
        tl.store(gates + pairs, tl.where(routed, db, 0.0), mask=slots < k)
    weight = tl.load(w + pairs, mask=is_pair, other=0.0)
    if HAS_W:
        dw += tl.load(extra_w + pairs, mask=is_pair, other=0.0).to(tl.float32)
    ds = weight * (dw - tl.sum(weight * dw, 0))
    if HAS_CONFIDENCE:
        extra = tl.load(extra_confidence + row, mask=routed, other=0.0).to(tl.float32)
        ds += tl.where((slots == 0) & routed, extra, 0.0)
    length = tl.load(inverse_z + row)
    factor = length * inverse_tau if COSINE else inverse_tau
    tl.store(coefficient + pairs, tl.where(routed, ds * factor, 0.0), mask=slots < k)
    if COSINE:
        along = tl.sum(ds * tl.load(s + pairs, mask=is_pair, other=0.0), 0) * length
        tl.store(radial + row, tl.where(routed, along, 0.0))


@quick
@triton.jit
def token_gradient(
    z,
    C,
    V,
    idx,
    inverse_z,
    inverse_c,
    grad_u,
    coefficient,
    radial,
    grad_z,
    n,
    D: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    R_P: tl.constexpr,
    k: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    COSINE: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For BN tokens and BD channels: from codes and scores to the tokens."""
    M: tl.constexpr = D // 2
    rows = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    code = tl.arange(0, R_P)
    routed = tl.load(idx + rows * k, mask=rows < n, other=-1) >= 0
    inside = routed[:, None] & (cols < D)[None, :]
    is_second = (cols >= M)[None, :]
    du = tl.load(grad_u + rows[:, None] * R + code, mask=routed[:, None] & (code < R)[None, :], other=0.0)
    V_tile = tl.load(  # transposed by its pointers
        V + cols[None, :] * R + code[:, None], mask=(cols < D)[None, :] & (code < R)[:, None], other=0.0
    )
    dz = dot(du.to(DTYPE), V_tile.to(DTYPE), tl.zeros((BN, BD), tl.float32), PRECISION)
    for slot in tl.static_range(k):
        patch = tl.load(idx + rows * k + slot, mask=routed, other=0)
        amount = tl.load(coefficient + rows * k + slot, mask=routed, other=0.0) * HALF
        first = amount * tl.load(inverse_c + patch // N)
        second = amount * tl.load(inverse_c + N + patch % N)
        row = tl.where(is_second, (N + patch % N)[:, None], (patch // N)[:, None])
        C_rows = tl.load(C + row * M + (cols % M)[None, :], mask=inside, other=0.0)
        dz += tl.where(is_second, second[:, None], first[:, None]) * C_rows.to(tl.float32)
    if COSINE:
        length = tl.load(inverse_z + rows, mask=routed, other=0.0)
        along = tl.load(radial + rows, mask=routed, other=0.0)
        z_tile = tl.load(z + rows[:, None] * D + cols, mask=inside, other=0.0)
        dz -= along[:, None] * z_tile.to(tl.float32) * length[:, None]  # length squared may overflow
    dz = tl.where(routed[:, None], dz, 0.0)
    tl.store(
        grad_z + rows[:, None] * D + cols,
        dz.to(grad_z.dtype.element_ty),
        mask=(rows < n)[:, None] & (cols < D)[None, :],
    )


@quick
@triton.jit
def codebook_parts(
    z,
    idx,
    coefficient,
    parts,
    n,
    D: tl.constexpr,
    N: tl.constexpr,
    k: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Part of the sum over tokens of coefficient * z for BK rows of a codebook and BD channels.

    Who chose a row is a matrix with k numbers for each token, made here as it is needed: a product with it
    takes the tokens in the same order every time.
    """
    M: tl.constexpr = D // 2
    half, part = tl.program_id(2) % 2, tl.program_id(2) // 2
    codes = tl.program_id(0) * BK + tl.arange(0, BK)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    acc = tl.zeros((BK, BD), tl.float32)
    for begin in range(part * BN, n, tl.num_programs(2) // 2 * BN):
        rows = (begin + tl.arange(0, BN)).to(tl.int64)
        routed = tl.load(idx + rows * k, mask=rows < n, other=-1) >= 0
        chosen = tl.zeros((BK, BN), tl.float32)
        for slot in tl.static_range(k):
            patch = tl.load(idx + rows * k + slot, mask=routed, other=0)
            amount = tl.load(coefficient + rows * k + slot, mask=routed, other=0.0)
            row = tl.where(half == 0, patch // N, patch % N)
            chosen += tl.where(row[None, :] == codes[:, None], amount[None, :], 0.0)
        z_tile = tl.load(
            z + rows[:, None] * D + (half * M + cols), mask=routed[:, None] & (cols < M)[None, :], other=0.0
        )
        acc = dot(chosen.to(DTYPE), z_tile.to(DTYPE), acc, PRECISION)
    place = (part * 2 + half).to(tl.int64) * (N * M) + codes[:, None] * M + cols
    tl.store(parts + place, acc, mask=(codes < N)[:, None] & (cols < M)[None, :])


@quick
@triton.jit
def codebook_gradient(
    C, inverse_c, parts, grad_C, num_parts, N: tl.constexpr, M: tl.constexpr, M_P: tl.constexpr
):
    """Add the parts of one row of a codebook, and take out what only changes its length."""
    row = tl.program_id(0)
    cols = tl.arange(0, M_P)
    acc = tl.zeros((M_P,), tl.float32)
    for part in range(num_parts):
        acc += tl.load(parts + part * (2 * N * M) + row * M + cols, mask=cols < M, other=0.0)
    length = tl.load(inverse_c + row)
    c = tl.load(C + row * M + cols, mask=cols < M, other=0.0).to(tl.float32) * length
    acc *= HALF
    acc = length * (acc - c * tl.sum(acc * c, 0))
    tl.store(grad_C + row * M + cols, acc.to(grad_C.dtype.element_ty), mask=cols < M)


@triton.jit
def outer(grad, codes, pair, code, cols, D: tl.constexpr, R: tl.constexpr, k: tl.constexpr):
    """What one pair adds to the gradient of its decoder: (BR, BD). A code of 0 adds nothing to nothing: the
    gradient of a token that was not routed may be NaN.
    """
    amount = tl.load(codes + pair * R + code, mask=code < R, other=0.0)[:, None]
    g = tl.load(grad + pair // k * D + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :]
    return tl.where(amount == 0, 0.0, amount * g)


@quick
@triton.jit
def sum_runs(
    grad,
    codes,
    gates,
    order,
    starts,
    ends,
    places,
    count,
    grad_U,
    grad_gates,
    part_U,
    part_gates,
    scale,
    D: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    W_P: tl.constexpr,
    k: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    COMPACT: tl.constexpr,
):
    """Gradients of a patch's gate and decoder, if the program's number is where a span of its run starts.

    `starts` and `ends` say for each sorted pair where its run lies, `places` to which row of the gradients it
    belongs. COMPACT: there are only `count` rows, and those behind are filled with zeros.
    """
    p = tl.program_id(0)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    numbers = tl.arange(0, W_P)
    in_gates = (numbers < W) & (tl.program_id(1) == 0)
    # all at once: what waits for one of them waits for none of the others
    start, end = tl.load(starts + p), tl.load(ends + p)
    own, place = tl.load(order + p).to(tl.int64), tl.load(places + p).to(tl.int64)
    if (p - start) % SPAN == 0:
        stop = tl.minimum(p + SPAN, end)
        # in a window of SPAN pairs at most two long runs meet: one that goes on, and one that starts
        part = (2 * (p // SPAN) + tl.where(p == start, 1, 0)).to(tl.int64)
        for begin in range(0, R, BR):
            code = begin + tl.arange(0, BR)
            dU = outer(grad, codes, own, code, cols, D, R, k)
            for q in range(p + 1, stop):
                dU += outer(grad, codes, tl.load(order + q).to(tl.int64), code, cols, D, R, k)
            dU *= scale
            bank = code[:, None] * D + cols
            in_bank = (code < R)[:, None] & (cols < D)[None, :]
            if end - start <= SPAN:
                tl.store(grad_U + place * (R * D) + bank, dU.to(grad_U.dtype.element_ty), mask=in_bank)
            else:
                tl.store(part_U + part * (R * D) + bank, dU, mask=in_bank)
        dgates = tl.load(gates + own * W + numbers, mask=in_gates, other=0.0)
        for q in range(p + 1, stop):
            pair = tl.load(order + q).to(tl.int64)
            dgates += tl.load(gates + pair * W + numbers, mask=in_gates, other=0.0)
        if end - start <= SPAN:
            tl.store(grad_gates + place * W + numbers, dgates.to(grad_gates.dtype.element_ty), mask=in_gates)
        else:
            tl.store(part_gates + part * W + numbers, dgates, mask=in_gates)
    if COMPACT:
        too_many = p >= tl.load(count)
        place = p.to(tl.int64)
        for begin in range(0, R, BR):
            code = begin + tl.arange(0, BR)
            in_bank = (code < R)[:, None] & (cols < D)[None, :] & too_many
            bank = grad_U + place * (R * D) + code[:, None] * D + cols
            tl.store(bank, tl.zeros((BR, BD), tl.float32).to(grad_U.dtype.element_ty), mask=in_bank)
        nothing = tl.zeros((W_P,), tl.float32).to(grad_gates.dtype.element_ty)
        tl.store(grad_gates + place * W + numbers, nothing, mask=in_gates & too_many)


@quick
@triton.jit
def sum_spans(
    starts,
    ends,
    places,
    grad_U,
    grad_gates,
    part_U,
    part_gates,
    num_pairs,
    D: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    W_P: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    """Add the spans of the long run that starts in this window of SPAN pairs, if one does."""
    window = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    begins = tl.load(starts + window, mask=window < num_pairs, other=-1)
    is_long = tl.load(ends + window, mask=window < num_pairs, other=0) - begins > SPAN
    p = tl.max(tl.where((begins == window) & is_long, window, -1), 0)
    if p >= 0:
        spans = tl.cdiv(tl.load(ends + p) - p, SPAN)
        place = tl.load(places + p).to(tl.int64)
        first = (p // SPAN).to(tl.int64)
        for begin in range(0, R, BR):
            code = begin + tl.arange(0, BR)
            bank = code[:, None] * D + cols
            in_bank = (code < R)[:, None] & (cols < D)[None, :]
            dU = tl.load(part_U + (2 * first + 1) * (R * D) + bank, mask=in_bank, other=0.0)
            for span in range(1, spans):
                dU += tl.load(part_U + 2 * (first + span) * (R * D) + bank, mask=in_bank, other=0.0)
            tl.store(grad_U + place * (R * D) + bank, dU.to(grad_U.dtype.element_ty), mask=in_bank)
        numbers = tl.arange(0, W_P)
        in_gates = (numbers < W) & (tl.program_id(1) == 0)
        dgates = tl.load(part_gates + (2 * first + 1) * W + numbers, mask=in_gates, other=0.0)
        for span in range(1, spans):
            dgates += tl.load(part_gates + 2 * (first + span) * W + numbers, mask=in_gates, other=0.0)
        tl.store(grad_gates + place * W + numbers, dgates.to(grad_gates.dtype.element_ty), mask=in_gates)
