"""From the gradient of the update to those of tokens, encoder, gates, decoders and prototypes."""

import triton
import triton.language as tl

from attractor.ops.kernels.forward import (
    COUNTS,
    PAIRS,
    PARTS,
    SEGMENTS,
    TILES,
    TOTALS,
    dot,
    gate,
    gates,
    sigmoid,
    tile_of,
)
from attractor.ops.kernels.quick import quick


@quick
@triton.jit
def decode_backward(
    grad,
    u,
    w,
    a,
    b,
    U,
    order,
    plan,
    codes,
    grad_u,
    grad_w,
    grad_a,
    grad_b,
    most_segments,
    scale,
    D: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    R_P: tl.constexpr,
    k: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    GATE: tl.constexpr,
    WHOLE: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For one tile: gradients of the pairs' codes, weights and of the tile's part of the gates.

    Not WHOLE, it stores the codes that were decoded, and that is all: decoders alone learn.
    """
    if tl.program_id(0) < tl.load(plan + COUNTS * K):
        patch, first, count = tile_of(plan, most_segments, K, BM)
        ranks = tl.arange(0, BM)
        is_pair = ranks < count
        places = first + ranks
        pair = tl.load(order + places, mask=is_pair, other=0).to(tl.int64)
        code = tl.arange(0, R_P)
        here = is_pair[:, None] & (code < R)[None, :]
        acc = tl.zeros((BM, R_P), tl.float32)
        if WHOLE:
            for start in range(0, D, BD):
                cols = start + tl.arange(0, BD)
                U_tile = tl.load(  # transposed by its pointers
                    U + patch * (R * D) + code[None, :] * D + cols[:, None],
                    mask=(code < R)[None, :] & (cols < D)[:, None],
                    other=0.0,
                )
                inside = is_pair[:, None] & (cols < D)[None, :]
                g_tile = tl.load(grad + (pair // k)[:, None] * D + cols, mask=inside, other=0.0)
                acc = dot(g_tile.to(DTYPE), U_tile.to(DTYPE), acc, PRECISION)
        acc *= scale
        if GATE > 0:
            u_tile = tl.load(u + (pair // k)[:, None] * R + code, mask=here, other=0.0)
            # what meets `acc` here lies as `acc` does: no tile moves between threads in what follows
            u_tile = tl.where(acc == acc, u_tile, acc)
            weight = tl.load(w + pair, mask=is_pair, other=0.0)
            open_ = gate(u_tile, a, b, patch, code[None, :], R, GATE)
            phi = u_tile * open_
            if WHOLE:
                tl.store(grad_w + pair, tl.sum(acc * phi, 1), mask=is_pair)
            wphi = (weight[:, None] * phi).to(codes.dtype.element_ty)  # for bank_backward, in its order
            tl.store(codes + places[:, None].to(tl.int64) * R + code, wphi, mask=here)
            if WHOLE:
                acc *= weight[:, None]  # d phi
                inner = acc * phi * (1 - open_)  # d (a u + b)
                acc *= open_
                db = tl.sum(inner, 0)
                if GATE == 2:
                    slope = tl.load(a + patch * R + code, mask=code < R, other=0.0).to(tl.float32)
                    acc += inner * slope[None, :]
                    part = tl.program_id(0).to(tl.int64) * R + code
                    tl.store(grad_a + part, tl.sum(inner * u_tile, 0), mask=code < R)
                    tl.store(grad_b + part, db, mask=code < R)
                else:
                    tl.store(grad_b + tl.program_id(0), tl.sum(db, 0))
        if WHOLE:
            tl.store(grad_u + pair[:, None] * R + code, acc.to(grad_u.dtype.element_ty), mask=here)


@quick
@triton.jit
def pair_products(
    grad,
    U,
    order,
    plan,
    products,
    scale,
    D: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    R_P: tl.constexpr,
    k: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    SEGMENT: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of phi, before the weight, of BM pairs of a segment.

    With `code_backward` and `gate_backward` it does what `decode_backward` does alone, whose registers do
    not suffice where codes are wide: here are products, and there numbers one by one, first by token and
    then by patch, so that no gradient of a pair's code is written.
    """
    segment = tl.program_id(1)
    if segment < tl.load(plan + COUNTS * K + 1):
        patch = tl.load(plan + COUNTS * K + 2 + segment).to(tl.int64)
        total = tl.load(plan + TOTALS * K + patch)
        number = segment - tl.load(plan + SEGMENTS * K + patch)
        first = number * SEGMENT + tl.program_id(0) * BM
        if first < total:
            ranks = first + tl.arange(0, BM)
            is_pair = ranks < total
            places = (tl.load(plan + PAIRS * K + patch) + ranks).to(tl.int64)
            pair = tl.load(order + places, mask=is_pair, other=0).to(tl.int64)
            token = pair // k
            code = tl.arange(0, R_P)
            acc = tl.zeros((BM, R_P), tl.float32)
            for start in range(0, D, BD):
                cols = start + tl.arange(0, BD)
                U_tile = tl.load(  # transposed by its pointers
                    U + patch * (R * D) + code[None, :] * D + cols[:, None],
                    mask=(code < R)[None, :] & (cols < D)[:, None],
                    other=0.0,
                )
                inside = is_pair[:, None] & (cols < D)[None, :]
                g_tile = tl.load(grad + token[:, None] * D + cols, mask=inside, other=0.0)
                acc = dot(g_tile.to(DTYPE), U_tile.to(DTYPE), acc, PRECISION)
            here = is_pair[:, None] & (code < R)[None, :]
            place = products + pair[:, None] * R + code
            tl.store(place, (acc * scale).to(products.dtype.element_ty), mask=here)


@quick
@triton.jit
def gate_backward(
    u,
    w,
    a,
    b,
    order,
    plan,
    products,
    grad_a,
    grad_b,
    most_segments,
    K: tl.constexpr,
    R: tl.constexpr,
    R_P: tl.constexpr,
    k: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    GATE: tl.constexpr,
):
    """Gradients of the gates from the products of a tile, BR pairs at a time; w phi takes their place."""
    if tl.program_id(0) < tl.load(plan + COUNTS * K):
        patch, first, count = tile_of(plan, most_segments, K, BM)
        code = tl.arange(0, R_P)
        slope, bias = gates(a, b, patch, code[None, :], R, GATE)
        da = tl.zeros((BR, R_P), tl.float32)
        db = tl.zeros((BR, R_P), tl.float32)
        for start in range(0, count, BR):
            ranks = start + tl.arange(0, BR)
            is_pair = ranks < count
            here = is_pair[:, None] & (code < R)[None, :]
            pair = tl.load(order + first + ranks, mask=is_pair, other=0).to(tl.int64)
            place = products + pair[:, None] * R + code
            dphi = tl.load(place, mask=here, other=0.0).to(tl.float32)
            u_tile = tl.load(u + (pair // k)[:, None] * R + code, mask=here, other=0.0)
            weight = tl.load(w + pair, mask=is_pair, other=0.0)[:, None]
            open_ = sigmoid(slope * u_tile + bias)
            wphi = weight * (u_tile * open_)
            inner = dphi * wphi
            inner -= inner * open_  # d (a u + b)
            db += inner
            if GATE == 2:
                da += inner * u_tile
            tl.store(place, wphi.to(products.dtype.element_ty), mask=here)
        if GATE == 2:
            part = tl.program_id(0).to(tl.int64) * R + code
            tl.store(grad_a + part, tl.sum(da, 0), mask=code < R)
            tl.store(grad_b + part, tl.sum(db, 0), mask=code < R)
        else:
            tl.store(grad_b + tl.program_id(0), tl.sum(tl.sum(db, 0), 0))


@quick
@triton.jit
def code_backward(
    u,
    w,
    a,
    b,
    idx,
    products,
    sides,
    grad_w,
    R: tl.constexpr,
    R_P: tl.constexpr,
    W: tl.constexpr,
    k: tl.constexpr,
    k_P: tl.constexpr,
    GATE: tl.constexpr,
):
    """Gradients of one token's code and of its weights, from the products of its pairs."""
    token = tl.program_id(0).to(tl.int64)
    slots, code = tl.arange(0, k_P), tl.arange(0, R_P)
    pairs = token * k + slots
    patch = tl.load(idx + pairs, mask=slots < k, other=-1)
    is_pair = patch >= 0
    here = is_pair[:, None] & (code < R)[None, :]
    weight = tl.load(w + pairs, mask=is_pair, other=0.0)[:, None]
    dphi = tl.load(products + pairs[:, None] * R + code, mask=here, other=0.0).to(tl.float32)
    u_row = tl.load(u + token * R + code, mask=code < R, other=0.0)[None, :]
    of_patch = tl.maximum(patch, 0).to(tl.int64)[:, None]
    slope, bias = gates(a, b, of_patch, code[None, :], R, GATE)
    open_ = sigmoid(slope * u_row + bias)
    inner = dphi * (u_row * open_)
    tl.store(grad_w + pairs, tl.sum(inner, 1), mask=is_pair)
    du = tl.sum(weight * (dphi * open_ + (inner - inner * open_) * slope), 0)
    tl.store(sides + token * W + code, du.to(sides.dtype.element_ty), mask=code < R)


@quick
@triton.jit
def token_backward(
    z,
    P,
    V,
    idx,
    w,
    s,
    inverse_z,
    inverse_p,
    grad_u_pairs,
    grad_w,
    extra_w,
    extra_confidence,
    sides,
    grad_s,
    coefficient,
    grad_z,
    n,
    inverse_tau,
    D: tl.constexpr,
    K: tl.constexpr,
    K_P: tl.constexpr,
    R: tl.constexpr,
    R_P: tl.constexpr,
    W: tl.constexpr,
    k: tl.constexpr,
    k_P: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    COSINE: tl.constexpr,
    HAS_W: tl.constexpr,
    HAS_CONFIDENCE: tl.constexpr,
    HAS_RADIUS: tl.constexpr,
    SUMMED: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For BN tokens: through the softmax to the scores, and from codes and scores to the tokens.

    `sides` is what `token_products` multiplies with the tokens: the gradient of the code and, with W > R, of
    the product with every prototype. Both ways from there, to tokens and to prototypes, are then products.
    """
    rows = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    slots = tl.arange(0, k_P)
    code = tl.arange(0, R_P)
    pairs = rows[:, None] * k + slots
    is_pair = tl.load(idx + pairs, mask=(rows < n)[:, None] & (slots < k)[None, :], other=-1) >= 0
    routed = tl.max(is_pair.to(tl.int32), 1) > 0

    weight = tl.load(w + pairs, mask=is_pair, other=0.0)
    dw = tl.load(grad_w + pairs, mask=is_pair, other=0.0)
    if HAS_W:
        dw += tl.load(extra_w + pairs, mask=is_pair, other=0.0).to(tl.float32)
    slope = weight
    if HAS_RADIUS:  # nobody's share moves too
        slope = tl.where(is_pair, weight + (1 - tl.sum(weight, 1))[:, None], 0.0)
    ds = slope * (dw - tl.sum(weight * dw, 1)[:, None])
    if HAS_CONFIDENCE:
        extra = tl.load(extra_confidence + rows, mask=routed, other=0.0).to(tl.float32)
        ds += tl.where((slots == 0)[None, :], extra[:, None], 0.0)
    length = tl.load(inverse_z + rows, mask=routed, other=0.0)
    factor = length * inverse_tau if COSINE else tl.zeros((BN,), tl.float32) + inverse_tau
    if W == R:
        tl.store(grad_s + pairs, ds, mask=is_pair)
        tl.store(coefficient + pairs, ds * factor[:, None], mask=is_pair)
    radial = tl.sum(ds * tl.load(s + pairs, mask=is_pair, other=0.0), 1) * length

    is_row = (rows < n)[:, None]
    in_code = is_row & (code < R)[None, :]
    own = sides + rows[:, None] * W + code
    if SUMMED:  # by `code_backward`
        du = tl.load(own, mask=in_code, other=0.0)
    else:
        du = tl.zeros((BN, R_P), tl.float32)
        for slot in tl.static_range(k):
            used = tl.load(idx + rows * k + slot, mask=rows < n, other=-1) >= 0
            here = used[:, None] & (code < R)[None, :]
            part = tl.load(grad_u_pairs + (rows * k + slot)[:, None] * R + code, mask=here, other=0.0)
            du += part.to(tl.float32)
        tl.store(own, du.to(sides.dtype.element_ty), mask=in_code)
    if W > R:
        patches = tl.arange(0, K_P)
        share = tl.zeros((BN, K_P), tl.float32)
        for slot in range(k):
            patch = tl.load(idx + rows * k + slot, mask=rows < n, other=-1)
            amount = tl.sum(tl.where((slots == slot)[None, :], ds, 0.0), 1) * factor
            share = tl.where(patch[:, None] == patches[None, :], amount[:, None], share)
        share *= tl.load(inverse_p + patches, mask=patches < K, other=0.0)[None, :]
        in_share = is_row & (patches < K)[None, :]
        tl.store(sides + rows[:, None] * W + R + patches, share.to(sides.dtype.element_ty), mask=in_share)

    for start in range(0, D, BD):
        cols = start + tl.arange(0, BD)
        V_tile = tl.load(  # transposed by its pointers
            V + cols[None, :] * R + code[:, None], mask=(cols < D)[None, :] & (code < R)[:, None], other=0.0
        )
        dz = dot(du.to(DTYPE), V_tile.to(DTYPE), tl.zeros((BN, BD), tl.float32), PRECISION)
        inside = routed[:, None] & (cols < D)[None, :]
        if W > R:
            P_tile = tl.load(
                P + patches[:, None] * D + cols, mask=(patches < K)[:, None] & (cols < D)[None, :], other=0.0
            )
            dz = dot(share.to(DTYPE), P_tile.to(DTYPE), dz, PRECISION)
        else:
            for slot in tl.static_range(k):
                patch = tl.load(idx + rows * k + slot, mask=routed, other=0).to(tl.int64)
                patch = tl.maximum(patch, 0)  # an empty slot has ds = 0
                amount = tl.sum(tl.where((slots == slot)[None, :], ds, 0.0), 1) * factor
                amount *= tl.load(inverse_p + patch, mask=routed, other=0.0)
                P_rows = tl.load(P + patch[:, None] * D + cols, mask=inside, other=0.0)
                dz += amount[:, None] * P_rows.to(tl.float32)
        if COSINE:
            z_tile = tl.load(z + rows[:, None] * D + cols, mask=inside, other=0.0)
            dz -= radial[:, None] * z_tile.to(tl.float32) * length[:, None]  # length squared may overflow
        dz = tl.where(routed[:, None], dz, 0.0)
        in_row = is_row & (cols < D)[None, :]
        tl.store(grad_z + rows[:, None] * D + cols, dz.to(grad_z.dtype.element_ty), mask=in_row)


@quick
@triton.jit
def bank_backward(
    grad,
    z,
    P,
    codes,
    s,
    grad_s,
    coefficient,
    inverse_p,
    order,
    plan,
    grad_U,
    grad_P,
    part_U,
    part_P,
    part_radial,
    scale,
    D: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    R_P: tl.constexpr,
    k: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    SEGMENT: tl.constexpr,
    BY_PAIR: tl.constexpr,
    HAS_P: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For one segment and BD channels: gradients of the patch's decoder and, with HAS_P, of its prototype.

    With BY_PAIR codes lie in the order of their pairs, and else in that of the patches. A patch with one
    segment is finished here; the parts of a busier one are added by `sum_parts`.
    """
    segment = tl.program_id(0)
    if segment < tl.load(plan + COUNTS * K + 1):
        patch = tl.load(plan + COUNTS * K + 2 + segment).to(tl.int64)
        cols = tl.program_id(1) * BD + tl.arange(0, BD)
        code = tl.arange(0, R_P)
        total = tl.load(plan + TOTALS * K + patch)
        number = segment - tl.load(plan + SEGMENTS * K + patch)
        begin = tl.load(plan + PAIRS * K + patch)
        dU = tl.zeros((R_P, BD), tl.float32)
        dp = tl.zeros((BD,), tl.float32)
        radial = tl.zeros((BM,), tl.float32)
        for start in range(number * SEGMENT, tl.minimum((number + 1) * SEGMENT, total), BM):
            ranks = start + tl.arange(0, BM)
            is_pair = ranks < total
            pair = tl.load(order + begin + ranks, mask=is_pair, other=0).to(tl.int64)
            token = pair // k
            inside = is_pair[:, None] & (cols < D)[None, :]
            here = (code < R)[:, None] & is_pair[None, :]
            row = pair if BY_PAIR else (begin + ranks).to(tl.int64)
            code_tile = tl.load(codes + row[None, :] * R + code[:, None], mask=here, other=0.0)  # (R_P, BM)
            g_tile = tl.load(grad + token[:, None] * D + cols, mask=inside, other=0.0)
            dU = dot(code_tile.to(DTYPE), g_tile.to(DTYPE), dU, PRECISION)
            if HAS_P:
                amount = tl.load(coefficient + pair, mask=is_pair, other=0.0)
                z_tile = tl.load(z + token[:, None] * D + cols, mask=inside, other=0.0)
                dp += tl.sum(amount[:, None] * z_tile.to(tl.float32), 0)
                score = tl.load(s + pair, mask=is_pair, other=0.0)
                radial += tl.load(grad_s + pair, mask=is_pair, other=0.0) * score
        dU *= scale
        bank = code[:, None] * D + cols
        in_bank = (code < R)[:, None] & (cols < D)[None, :]
        if total <= SEGMENT:
            tl.store(grad_U + patch * (R * D) + bank, dU.to(grad_U.dtype.element_ty), mask=in_bank)
            if HAS_P:
                length = tl.load(inverse_p + patch)
                p = tl.load(P + patch * D + cols, mask=cols < D, other=0.0).to(tl.float32) * length
                dp = length * (dp - p * tl.sum(radial, 0))
                tl.store(grad_P + patch * D + cols, dp.to(grad_P.dtype.element_ty), mask=cols < D)
        else:
            part = (tl.load(plan + PARTS * K + patch) + number).to(tl.int64)
            tl.store(part_U + part * (R * D) + bank, dU, mask=in_bank)
            if HAS_P:
                tl.store(part_P + part * D + cols, dp, mask=cols < D)
                tl.store(part_radial + part, tl.sum(radial, 0), mask=tl.program_id(1) == 0)


@quick
@triton.jit
def sum_parts(
    P,
    inverse_p,
    plan,
    part_U,
    part_P,
    part_radial,
    part_a,
    part_b,
    grad_U,
    grad_P,
    grad_a,
    grad_b,
    D: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    R_P: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    SEGMENT: tl.constexpr,
    GATE: tl.constexpr,
    HAS_P: tl.constexpr,
):
    """Add the parts of one patch: its gates from its tiles, the rest from its segments; zeros if unused."""
    patch = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    code = tl.arange(0, R_P)
    total = tl.load(plan + TOTALS * K + patch)
    if GATE > 0 and tl.program_id(1) == 0:
        begin, tiles = tl.load(plan + TILES * K + patch).to(tl.int64), tl.cdiv(total, BM)
        if GATE == 2:
            da = tl.zeros((BT, R_P), tl.float32)
            db = tl.zeros((BT, R_P), tl.float32)
            for first in range(0, tiles, BT):
                tile = first + tl.arange(0, BT)
                part = (begin + tile)[:, None] * R + code
                here = (tile < tiles)[:, None] & (code < R)[None, :]
                da += tl.load(part_a + part, mask=here, other=0.0)
                db += tl.load(part_b + part, mask=here, other=0.0)
            tl.store(grad_a + patch * R + code, tl.sum(da, 0).to(grad_a.dtype.element_ty), mask=code < R)
            tl.store(grad_b + patch * R + code, tl.sum(db, 0).to(grad_b.dtype.element_ty), mask=code < R)
        else:
            db = tl.zeros((BT,), tl.float32)
            for first in range(0, tiles, BT):
                tile = first + tl.arange(0, BT)
                db += tl.load(part_b + begin + tile, mask=tile < tiles, other=0.0)
            tl.store(grad_b + patch, tl.sum(db, 0).to(grad_b.dtype.element_ty))
    if total == 0 or total > SEGMENT:
        bank = code[:, None] * D + cols
        in_bank = (code < R)[:, None] & (cols < D)[None, :]
        begin = tl.load(plan + PARTS * K + patch).to(tl.int64)
        dU = tl.zeros((R_P, BD), tl.float32)
        dp = tl.zeros((BD,), tl.float32)
        radial = tl.zeros((), tl.float32)
        for part in range(tl.cdiv(total, SEGMENT)):
            dU += tl.load(part_U + (begin + part) * (R * D) + bank, mask=in_bank, other=0.0)
            if HAS_P:
                dp += tl.load(part_P + (begin + part) * D + cols, mask=cols < D, other=0.0)
                radial += tl.load(part_radial + begin + part)
        tl.store(grad_U + patch * (R * D) + bank, dU.to(grad_U.dtype.element_ty), mask=in_bank)
        if HAS_P:
            length = tl.load(inverse_p + patch)
            p = tl.load(P + patch * D + cols, mask=cols < D, other=0.0).to(tl.float32) * length
            dp = length * (dp - p * radial)
            tl.store(grad_P + patch * D + cols, dp.to(grad_P.dtype.element_ty), mask=cols < D)


@quick
@triton.jit
def token_products(
    z,
    sides,
    inverse_z,
    parts,
    n,
    D: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Part of sides^T z over every num_programs(2)-th block of tokens; `add_products` adds the parts."""
    side = tl.program_id(0) * BW + tl.arange(0, BW)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    acc = tl.zeros((BW, BD), tl.float32)
    for first in range(tl.program_id(2) * BN, n, tl.num_programs(2) * BN):
        rows = (first + tl.arange(0, BN)).to(tl.int64)
        length = tl.load(inverse_z + rows, mask=rows < n, other=float("nan"))
        finite = length == length
        here = finite[None, :] & (side < W)[:, None]
        side_tile = tl.load(sides + rows[None, :] * W + side[:, None], mask=here, other=0.0)
        inside = finite[:, None] & (cols < D)[None, :]
        z_tile = tl.load(z + rows[:, None] * D + cols, mask=inside, other=0.0)
        acc = dot(side_tile.to(DTYPE), z_tile.to(DTYPE), acc, PRECISION)
    tl.store(
        parts + (tl.program_id(2) * W + side)[:, None].to(tl.int64) * D + cols,
        acc,
        mask=(side < W)[:, None] & (cols < D)[None, :],
    )


@quick
@triton.jit
def add_products(
    P,
    inverse_p,
    parts,
    grad_V,
    grad_P,
    num_parts,
    D: tl.constexpr,
    D_P: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    BP: tl.constexpr,
):
    """The sum of the parts, in one order: a column of the encoder's gradient, or that of a prototype."""
    side = tl.program_id(0)
    cols = tl.arange(0, D_P)
    acc = tl.zeros((BP, D_P), tl.float32)
    for first in range(0, num_parts, BP):
        part = first + tl.arange(0, BP)
        here = (part < num_parts)[:, None] & (cols < D)[None, :]
        acc += tl.load(parts + (part * W + side)[:, None].to(tl.int64) * D + cols, mask=here, other=0.0)
    total = tl.sum(acc, 0)
    if side < R:
        tl.store(grad_V + cols * R + side, total.to(grad_V.dtype.element_ty), mask=cols < D)
    else:
        if W > R:  # not compiled otherwise
            row = (side - R).to(tl.int64) * D + cols
            p = tl.load(P + row, mask=cols < D, other=0.0).to(tl.float32) * tl.load(inverse_p + side - R)
            total -= p * tl.sum(total * p, 0)  # what only changes its length
            tl.store(grad_P + row, total.to(grad_P.dtype.element_ty), mask=cols < D)
