"""Routing, grouping and decoding: the forward pass. The package says what a pair, a tile and a plan are."""

import os

import triton
import triton.language as tl

from attractor.ops import launch
from attractor.ops.kernels.quick import quick

CHUNK = tl.constexpr(launch.CHUNK)
"""Pairs that one program of the counting sort places."""

LEAST = tl.constexpr(-3.4e38)

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
SIGMOID = tl.constexpr("""{
    .reg .f32 t;
    mul.f32 t, $1, 0fBFB8AA3B;  // -log2(e)
    ex2.approx.ftz.f32 t, t;
    add.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 $0, t;
}""")

# A plan is one tensor of whole numbers. For each patch: how many pairs it has, and where its pairs, tiles,
# segments and parts start; then the number of tiles and of segments, and whose each segment and each tile is.
TOTALS, PAIRS, TILES, SEGMENTS, PARTS, COUNTS = (tl.constexpr(number) for number in range(6))


@triton.jit
def dot(a, b, c, PRECISION: tl.constexpr):
    return tl.dot(a, b, c, input_precision=PRECISION)


@triton.jit
def split_dot(a, b, c):
    """float32 operands on bfloat16 matrix units: a = a1 + a2 and b = b1 + b2, without the product a2 b2."""
    a1, b1 = a.to(tl.bfloat16), b.to(tl.bfloat16)
    a2, b2 = (a - a1.to(tl.float32)).to(tl.bfloat16), (b - b1.to(tl.float32)).to(tl.bfloat16)
    c = tl.dot(a2, b1, c)
    c = tl.dot(a1, b2, c)
    return tl.dot(a1, b1, c)


@triton.jit
def inverse_length(squared):
    """1 / |x|, and 0 for the zero vector: Norm(0) = 0."""
    # a GPU's rsqrt takes subnormal numbers for zero: lift them by 2^64 first
    tiny = squared < 1e-30
    lifted = tl.where(tiny, squared * 18446744073709551616.0, squared)
    inverse = tl.rsqrt(tl.where(lifted > 0, lifted, 1.0)) * tl.where(tiny, 4294967296.0, 1.0)
    return tl.where(lifted > 0, inverse, 0.0)


@triton.jit
def row_lengths(
    x, inverse, first, count, M: tl.constexpr, M_P: tl.constexpr, BN: tl.constexpr, MARK: tl.constexpr
):
    """One over the lengths of BN rows of M channels. MARK: NaN for a row that is not finite."""
    rows = first + tl.arange(0, BN)
    cols = tl.arange(0, M_P)
    here = (rows < count)[:, None] & (cols < M)[None, :]
    tile = tl.load(x + rows[:, None].to(tl.int64) * M + cols, mask=here, other=0.0).to(tl.float32)
    squared = tl.sum(tile * tile, 1)
    length = inverse_length(squared)
    if MARK:
        length = tl.where(squared < float("inf"), length, float("nan"))  # False for NaN too
    tl.store(inverse + rows, length, mask=rows < count)


@quick
@triton.jit
def lengths(
    z,
    P,
    inverse_z,
    inverse_p,
    histogram,
    n,
    counters,
    D: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    D_P: tl.constexpr,
    M_P: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    COUNT: tl.constexpr,
):
    """One over the lengths of all tokens (NaN: not finite) and of K rows of M channels to compare them with.

    With COUNT, the counters of the histogram are set to zero on the way.

    A pass of its own, although the kernels that choose patches load the same tiles. The matrix unit of a
    Hopper GPU still reads a tile while tiles further on are copied, and Triton's pipeline allows for that
    with one more buffer only if nothing but the product reads the tile. With a sum of squares beside the
    product the copy lands in the tile that is being multiplied: other patches in every run (Triton 3.6 to
    3.8). tests/shared_memory.py looks for such tiles.
    """
    tokens = tl.cdiv(n, BN)
    program = tl.program_id(0)
    if program < tokens:
        row_lengths(z, inverse_z, program * BN, n, D, D_P, BN, True)
    elif program < tokens + tl.cdiv(K, BN):
        row_lengths(P, inverse_p, (program - tokens) * BN, K, M, M_P, BN, False)
    else:
        if COUNT:  # not compiled otherwise
            first = (program - tokens - tl.cdiv(K, BN)).to(tl.int64) * BC
            place = first + tl.arange(0, BC)
            tl.store(histogram + place, tl.zeros((BC,), tl.int32), mask=place < counters)


@triton.jit
def scores(z_tile, P_tile, acc, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    if SPLIT:
        return split_dot(z_tile.to(tl.float32), P_tile.to(tl.float32), acc)
    else:  # not compiled then: the two may differ in type
        return dot(z_tile, P_tile, acc, PRECISION)


@triton.jit
def keep_best(
    acc,
    best,
    best_patch,
    first,
    k: tl.constexpr,
    k_P: tl.constexpr,
    BK: tl.constexpr,
    UNROLL: tl.constexpr = True,
):
    """Take the k best of the scores (BN, BK) of patches from `first` into the best so far."""
    if UNROLL:
        for _ in tl.static_range(k):
            acc, best, best_patch = keep_one(acc, best, best_patch, first, k, k_P, BK)
    else:  # of many, the compiler would make minutes of work and too few registers
        for _ in range(k):
            acc, best, best_patch = keep_one(acc, best, best_patch, first, k, k_P, BK)
    return best, best_patch


@triton.jit
def keep_one(acc, best, best_patch, first, k: tl.constexpr, k_P: tl.constexpr, BK: tl.constexpr):
    slots = tl.arange(0, k_P)
    top, place = tl.max(acc, 1, return_indices=True, return_indices_tie_break_left=True)
    worst = tl.min(best, 1)
    # of equal ones the highest patch gives way; a new patch is higher than all before it
    gives_way = tl.max(tl.where(best == worst[:, None], best_patch, -1), 1)
    replaced = (best_patch == gives_way[:, None]) & (top > worst)[:, None] & (slots < k)[None, :]
    best = tl.where(replaced, top[:, None], best)
    best_patch = tl.where(replaced, (first + place)[:, None], best_patch)
    acc = tl.where(tl.arange(0, BK)[None, :] == place[:, None], float("-inf"), acc)
    return acc, best, best_patch


@triton.jit
def keep_better(acc, best, best_patch, first, k: tl.constexpr, k_P: tl.constexpr, BK: tl.constexpr):
    """`keep_best`, in as many rounds as the row with the most takes: of later patches few are better."""
    slots, patches = tl.arange(0, k_P)[None, :], tl.arange(0, BK)[None, :]
    top, worst = tl.max(acc, 1), tl.min(best, 1)
    while tl.max((top > worst).to(tl.int32), 0) > 0:
        place = tl.min(tl.where(acc == top[:, None], patches, BK), 1)[:, None]
        gives_way = tl.max(tl.where(best == worst[:, None], best_patch, -1), 1)[:, None]
        replaced = (best_patch == gives_way) & (top > worst)[:, None] & (slots < k)
        best = tl.where(replaced, top[:, None], best)
        best_patch = tl.where(replaced, first + place, best_patch)
        acc = tl.where(patches == place, float("-inf"), acc)
        top, worst = tl.max(acc, 1), tl.min(best, 1)
    return best, best_patch


@triton.jit
def best_first(best, best_patch, k: tl.constexpr, k_P: tl.constexpr):
    """In the order of their scores, and of their numbers where scores are equal."""
    slots = tl.arange(0, k_P)
    best = tl.where((slots < k)[None, :], best, float("-inf"))
    ordered = tl.full(best.shape, float("-inf"), tl.float32)
    ordered_patch = tl.zeros(best.shape, tl.int32)
    for slot in tl.static_range(k):
        top = tl.max(best, 1)
        patch = tl.min(tl.where((best == top[:, None]) & (slots < k)[None, :], best_patch, 2147483647), 1)
        ordered = tl.where((slots == slot)[None, :], top[:, None], ordered)
        ordered_patch = tl.where((slots == slot)[None, :], patch[:, None], ordered_patch)
        taken = best_patch == patch[:, None]
        best = tl.where(taken, float("-inf"), best)
        best_patch = tl.where(taken, 2147483647, best_patch)
    return ordered, ordered_patch


@triton.jit
def best_of_all(acc, k: tl.constexpr, k_P: tl.constexpr, BK: tl.constexpr):
    """The k best scores and their patches where all patches are here, in the order of `best_first`."""
    slots, patches = tl.arange(0, k_P)[None, :], tl.arange(0, BK)[None, :]
    best = tl.full((acc.shape[0], k_P), float("-inf"), tl.float32)
    best_patch = tl.zeros((acc.shape[0], k_P), tl.int32)
    for slot in range(k):  # not unrolled: the code of many would not fit into the cache for instructions
        top = tl.max(acc, 1)[:, None]
        patch = tl.min(tl.where(acc == top, patches, BK), 1)[:, None]
        best = tl.where(slots == slot, top, best)
        best_patch = tl.where(slots == slot, patch, best_patch)
        acc = tl.where(patches == patch, float("-inf"), acc)
    return best, best_patch


@triton.jit
def sigmoid(x):
    """Four instructions, where Triton's takes a dozen: subnormal numbers are 0 here."""
    if INTERPRETED:
        return tl.sigmoid(x)
    else:
        return tl.inline_asm_elementwise(SIGMOID, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def softmax(x):
    x = tl.exp(x - tl.max(x, 1)[:, None])
    return x / tl.sum(x, 1)[:, None]


@triton.jit
def basin_weights(m):
    """Eq. (B2): the softmax over patches that are entered and nobody; every m <= 0 gives an exact zero."""
    m = tl.where(m <= 0, 0.0, m)
    top = tl.max(m, 1)[:, None]
    # 1 - e^-m loses its digits at the edge of a basin: there it is its series
    inside = tl.where(m < 0.01, m * (1 - m * (0.5 - m * (0.16666667 - m * 0.041666667))), 1 - tl.exp(-m))
    e = tl.exp(m - top) * inside
    return e / (tl.sum(e, 1)[:, None] + tl.exp(-top))


@quick
@triton.jit
def route(
    z,
    P,
    V,
    keep,
    radius,
    idx,
    w,
    s,
    u,
    inverse_z,
    inverse_p,
    confidence,
    histogram,
    n,
    inverse_tau,
    D: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    k: tl.constexpr,
    k_P: tl.constexpr,
    R_P: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    COSINE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    HAS_RADIUS: tl.constexpr,
    COUNT: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Eqs. (1) to (4) for BN tokens: code u, scores against BK patches at a time, running top k, softmax."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    is_row = rows < n
    slots = tl.arange(0, k_P)
    code = tl.arange(0, R_P)
    z_rows = z + rows[:, None].to(tl.int64) * D

    length = tl.load(inverse_z + rows, mask=is_row, other=0.0)
    finite = length == length
    # one pass over the tokens: code and the scores of the first patches. Nothing but products may read the
    # tiles: see `lengths`
    u_acc = tl.zeros((BN, R_P), tl.float32)
    patches = tl.arange(0, BK)
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, D, BD):
        cols = start + tl.arange(0, BD)
        z_tile = tl.load(z_rows + cols, mask=is_row[:, None] & (cols < D)[None, :], other=0.0)
        is_col = cols < D
        V_tile = tl.load(V + cols[:, None] * R + code, mask=is_col[:, None] & (code < R)[None, :], other=0.0)
        is_P = (patches < K)[None, :] & is_col[:, None]
        P_tile = tl.load(P + patches[None, :] * D + cols[:, None], mask=is_P, other=0.0)
        u_acc = dot(z_tile.to(DTYPE), V_tile.to(DTYPE), u_acc, PRECISION)
        acc = scores(z_tile, P_tile, acc, SPLIT, PRECISION)
    u_acc = tl.where(finite[:, None], u_acc, 0.0)
    tl.store(u + rows[:, None].to(tl.int64) * R + code, u_acc, mask=is_row[:, None] & (code < R)[None, :])
    factor = length * inverse_tau if COSINE else tl.zeros((BN,), tl.float32) + inverse_tau

    # the best so far, in no order; a slot that is not there can never be the worst
    best = tl.zeros((BN, k_P), tl.float32) + tl.where(slots < k, float("-inf"), float("inf"))
    best_patch = tl.zeros((BN, k_P), tl.int32) + (K + slots)
    for first in range(0, K, BK):
        patches = first + tl.arange(0, BK)
        if first > 0:
            acc = tl.zeros((BN, BK), tl.float32)
            for start in range(0, D, BD):
                cols = start + tl.arange(0, BD)
                z_tile = tl.load(z_rows + cols, mask=is_row[:, None] & (cols < D)[None, :], other=0.0)
                P_tile = tl.load(
                    P + patches[None, :].to(tl.int64) * D + cols[:, None],
                    mask=(patches < K)[None, :] & (cols < D)[:, None],
                    other=0.0,
                )
                acc = scores(z_tile, P_tile, acc, SPLIT, PRECISION)
        length_p = tl.load(inverse_p + patches, mask=patches < K, other=0.0)
        acc = tl.where(finite[:, None], acc * length_p[None, :] * factor[:, None], 0.0)
        if HAS_RADIUS:
            edge = tl.load(radius + patches, mask=patches < K, other=0.0).to(tl.float32) * inverse_tau
            acc -= edge[None, :]
        acc = tl.where(acc == acc, acc, float("inf"))  # a broken prototype is chosen, and its NaN shows
        acc = tl.where(acc > LEAST, acc, LEAST)  # every patch beats an empty slot
        acc = tl.where((patches < K)[None, :], acc, float("-inf"))
        if K <= BK:
            best, best_patch = best_of_all(acc, k, k_P, BK)
        else:
            best, best_patch = keep_better(acc, best, best_patch, first, k, k_P, BK)

    pairs = rows[:, None].to(tl.int64) * k + slots
    is_pair = is_row[:, None] & (slots < k)[None, :]
    if K <= BK:
        ordered, ordered_patch = best, best_patch
    else:
        ordered, ordered_patch = best_first(best, best_patch, k, k_P)
    tl.store(confidence + rows, tl.where(finite, tl.max(ordered, 1), float("nan")), mask=is_row)
    kept = ordered
    if HAS_KEEP:
        kept = tl.where(tl.load(keep + pairs, mask=is_pair, other=1) != 0, ordered, float("-inf"))
    chosen = is_pair & finite[:, None]
    if HAS_RADIUS:
        weight = basin_weights(kept)
        chosen &= weight != 0  # a pair outside is in no plan: nothing is decoded for it
        ordered += tl.load(radius + ordered_patch, mask=chosen, other=0.0).to(tl.float32) * inverse_tau
    else:
        weight = softmax(kept)
    tl.store(w + pairs, tl.where(finite[:, None], weight, 0.0), mask=is_pair)
    tl.store(s + pairs, ordered, mask=is_pair)
    tl.store(idx + pairs, tl.where(chosen, ordered_patch, -1), mask=is_pair)
    if COUNT:
        counter = ordered_patch.to(tl.int64) * tl.cdiv(n * k, CHUNK) + pairs // CHUNK
        # whole numbers: their sum does not depend on the order of the atomics
        tl.atomic_add(histogram + counter, 1, mask=chosen, sem="relaxed")


@quick
@triton.jit
def count(idx, histogram, num_pairs):
    """The histogram of each chunk, for indices that did not come from `route`."""
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    pairs = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    patch = tl.load(idx + pairs, mask=pairs < num_pairs, other=-1)
    tl.atomic_add(histogram + patch.to(tl.int64) * chunks + chunk, 1, mask=patch >= 0, sem="relaxed")


@quick
@triton.jit
def scan_chunks(histogram, plan, num_chunks, K: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr):
    """Per patch: how many pairs the chunks before have (in place), and how many there are in all."""
    patches = tl.program_id(0) * BK + tl.arange(0, BK)
    carry = tl.zeros((BK,), tl.int32)
    for first in range(0, num_chunks, BC):
        chunks = first + tl.arange(0, BC)
        place = histogram + patches[:, None].to(tl.int64) * num_chunks + chunks
        here = (patches < K)[:, None] & (chunks < num_chunks)[None, :]
        counts = tl.load(place, mask=here, other=0)
        tl.store(place, tl.cumsum(counts, 1) - counts + carry[:, None], mask=here)
        carry += tl.sum(counts, 1)
    tl.store(plan + TOTALS * K + patches, carry, mask=patches < K)


@quick
@triton.jit
def make_plan(
    plan, most_segments, K: tl.constexpr, SEGMENT: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr
):
    """Where each patch's pairs, tiles (BM pairs), segments and parts start, and whose they are."""
    segment_patch = plan + COUNTS * K + 2
    tile_patch = segment_patch + most_segments
    pairs = tl.zeros((), tl.int32)
    tiles = tl.zeros((), tl.int32)
    segments = tl.zeros((), tl.int32)
    parts = tl.zeros((), tl.int32)
    for first in range(0, K, BK):
        patches = first + tl.arange(0, BK)
        total = tl.load(plan + TOTALS * K + patches, mask=patches < K, other=0)
        tl.store(plan + PAIRS * K + patches, tl.cumsum(total, 0) - total + pairs, mask=patches < K)
        pairs += tl.sum(total, 0)
        own = tl.cdiv(total, BM)
        begin = tl.cumsum(own, 0) - own + tiles
        tl.store(plan + TILES * K + patches, begin, mask=patches < K)
        for number in range(tl.max(own, 0)):
            tl.store(tile_patch + begin + number, patches, mask=number < own)
        tiles += tl.sum(own, 0)
        own = tl.cdiv(total, SEGMENT)
        begin = tl.cumsum(own, 0) - own + segments
        tl.store(plan + SEGMENTS * K + patches, begin, mask=patches < K)
        for number in range(tl.max(own, 0)):
            tl.store(segment_patch + begin + number, patches, mask=number < own)
        segments += tl.sum(own, 0)
        own = tl.where(own > 1, own, 0)  # a patch with one segment needs no parts
        tl.store(plan + PARTS * K + patches, tl.cumsum(own, 0) - own + parts, mask=patches < K)
        parts += tl.sum(own, 0)
    tl.store(plan + COUNTS * K, tiles)
    tl.store(plan + COUNTS * K + 1, segments)


@quick
@triton.jit
def place(idx, histogram, plan, order, num_pairs, K: tl.constexpr):
    """order[rank] = pair: the last step of the counting sort, stable."""
    own = tl.arange(0, CHUNK)
    first = tl.program_id(0).to(tl.int64) * CHUNK
    patch = tl.load(idx + first + own, mask=first + own < num_pairs, other=-1)
    before = (patch[None, :] == patch[:, None]) & (own[None, :] < own[:, None])
    rank = tl.sum(before.to(tl.int32), 1)
    is_pair = patch >= 0
    rank += tl.load(plan + PAIRS * K + patch, mask=is_pair, other=0)
    counter = patch.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    rank += tl.load(histogram + counter, mask=is_pair, other=0)
    tl.store(order + rank, (first + own).to(tl.int32), mask=is_pair)


@triton.jit
def tile_of(plan, most_segments, K: tl.constexpr, BM: tl.constexpr):
    """The patch of this program's tile, where its pairs are in `order`, and how many there are."""
    tile = tl.program_id(0)
    patch = tl.load(plan + COUNTS * K + 2 + most_segments + tile).to(tl.int64)
    before = (tile - tl.load(plan + TILES * K + patch)) * BM
    count = tl.minimum(tl.load(plan + TOTALS * K + patch) - before, BM)
    return patch, tl.load(plan + PAIRS * K + patch) + before, count


@triton.jit
def gates(a, b, patch, code, R: tl.constexpr, GATE: tl.constexpr):
    """Slope and bias of eq. (5) or (7); `code` numbers the channels along their axis of the tile."""
    if GATE == 2:
        slope = tl.load(a + patch * R + code, mask=code < R, other=0.0).to(tl.float32)
        return slope, tl.load(b + patch * R + code, mask=code < R, other=0.0).to(tl.float32)
    else:  # not compiled otherwise
        nothing = tl.zeros_like(code).to(tl.float32)
        return nothing, tl.load(b + patch).to(tl.float32) + nothing


@triton.jit
def gate(u_tile, a, b, patch, code, R: tl.constexpr, GATE: tl.constexpr):
    slope, bias = gates(a, b, patch, code, R, GATE)
    return sigmoid(slope * u_tile + bias)


@quick
@triton.jit
def decode(
    u,
    w,
    a,
    b,
    U,
    order,
    plan,
    y,
    most_segments,
    D: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    R_P: tl.constexpr,
    k: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    GATE: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[pair] = w phi U, eqs. (5) and (6), for one tile."""
    if tl.program_id(0) < tl.load(plan + COUNTS * K):
        patch, first, count = tile_of(plan, most_segments, K, BM)
        ranks = tl.arange(0, BM)
        is_pair = ranks < count
        pair = tl.load(order + first + ranks, mask=is_pair, other=0).to(tl.int64)
        code = tl.arange(0, R_P)
        here = is_pair[:, None] & (code < R)[None, :]
        if GATE > 0:
            u_tile = tl.load(u + (pair // k)[:, None] * R + code, mask=here, other=0.0)
            weight = tl.load(w + pair, mask=is_pair, other=0.0)
            codes = weight[:, None] * u_tile * gate(u_tile, a, b, patch, code[None, :], R, GATE)
        else:
            codes = tl.load(u + pair[:, None] * R + code, mask=here, other=0.0)
        codes = codes.to(DTYPE)
        for start in range(0, D, BD):
            cols = start + tl.arange(0, BD)
            U_tile = tl.load(
                U + patch * (R * D) + code[:, None] * D + cols,
                mask=(code < R)[:, None] & (cols < D)[None, :],
                other=0.0,
            )
            out = dot(codes, U_tile.to(DTYPE), tl.zeros((BM, BD), tl.float32), PRECISION)
            tl.store(
                y + pair[:, None] * D + cols,
                out.to(y.dtype.element_ty),
                mask=is_pair[:, None] & (cols < D)[None, :],
            )


@quick
@triton.jit
def combine(
    y,
    idx,
    confidence,
    update,
    n,
    scale,
    D: tl.constexpr,
    k: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    HAS_RADIUS: tl.constexpr,
):
    """update = scale * sum over the slots of y; NaN in rows that were not routed.

    With radii a slot can be empty in a row that was routed: its index is -1, and nobody wrote its y.
    """
    rows = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    here = (rows < n)[:, None] & (cols < D)[None, :]
    if HAS_RADIUS:
        sure = tl.load(confidence + rows, mask=rows < n, other=0.0)
        routed = sure == sure
    else:
        routed = tl.load(idx + rows * k, mask=rows < n, other=0) >= 0
    acc = tl.zeros((BN, BD), tl.float32)
    for slot in tl.static_range(k):
        used = routed
        if HAS_RADIUS:
            used &= tl.load(idx + rows * k + slot, mask=rows < n, other=-1) >= 0
        acc += tl.load(y + (rows * k + slot)[:, None] * D + cols, mask=here & used[:, None], other=0.0).to(
            tl.float32
        )
    acc = tl.where(routed[:, None], acc * scale, float("nan"))
    tl.store(update + rows[:, None] * D + cols, acc.to(update.dtype.element_ty), mask=here)


@quick
@triton.jit
def few_scores(
    z,
    P,
    V,
    radius,
    scores,
    u,
    inverse_tau,
    D: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    D_P: tl.constexpr,
    BK: tl.constexpr,
    COSINE: tl.constexpr,
    HAS_RADIUS: tl.constexpr,
):
    """Scores (NaN if the token is not finite) of one token with BK patches, or BK channels of its code."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, D_P)
    z_row = tl.load(z + row * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    number = tl.program_id(1) * BK + tl.arange(0, BK)
    if tl.program_id(1) * BK < K:
        is_P = (number < K)[:, None] & (cols < D)[None, :]
        P_rows = tl.load(P + number[:, None].to(tl.int64) * D + cols, mask=is_P, other=0.0).to(tl.float32)
        out = tl.sum(P_rows * z_row[None, :], 1) * inverse_length(tl.sum(P_rows * P_rows, 1)) * inverse_tau
        squared = tl.sum(z_row * z_row, 0)
        if COSINE:
            out *= inverse_length(squared)
        if HAS_RADIUS:
            out -= tl.load(radius + number, mask=number < K, other=0.0).to(tl.float32) * inverse_tau
        out = tl.where(out < LEAST, LEAST, out)  # every patch beats an empty slot
        out = tl.where(squared < float("inf"), out, float("nan"))
        tl.store(scores + row * K + number, out, mask=number < K)
    else:
        code = number - tl.cdiv(K, BK) * BK
        is_V = (cols < D)[:, None] & (code < R)[None, :]
        V_cols = tl.load(V + cols[:, None] * R + code, mask=is_V, other=0.0).to(tl.float32)
        tl.store(u + row * R + code, tl.sum(z_row[:, None] * V_cols, 0), mask=code < R)


@quick
@triton.jit
def few_tokens(
    scores,
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
    K: tl.constexpr,
    R: tl.constexpr,
    R_P: tl.constexpr,
    K_P: tl.constexpr,
    k: tl.constexpr,
    k_P: tl.constexpr,
    BD: tl.constexpr,
    GATE: tl.constexpr,
    HAS_RADIUS: tl.constexpr,
):
    """BD channels of one token's update, straight from the decoders it chooses: for writing text.

    With GATE the patches are chosen here, from `scores`; without, codes and patches are given as u and idx.
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    code = tl.arange(0, R_P)
    slots = tl.arange(0, k_P)
    acc = tl.zeros((R_P, BD), tl.float32)
    if GATE > 0:
        patches = tl.arange(0, K_P)
        score = tl.load(scores + row * K + patches, mask=patches < K, other=float("-inf"))[None, :]
        finite = tl.sum((score != score).to(tl.int32)) == 0
        best = tl.zeros((1, k_P), tl.float32) + tl.where(slots < k, float("-inf"), float("inf"))
        best_patch = tl.zeros((1, k_P), tl.int32) + (K + slots)
        best, best_patch = keep_best(tl.where(finite, score, 0.0), best, best_patch, 0, k, k_P, K_P)
        ordered, ordered_patch = best_first(best, best_patch, k, k_P)
        chosen = (slots < k)[None, :] & finite
        if HAS_RADIUS:
            weight = basin_weights(ordered)
            chosen &= weight != 0
        else:
            weight = softmax(ordered)
        if tl.program_id(1) == 0:
            pairs = row * k + slots[None, :]
            tl.store(idx + pairs, tl.where(chosen, ordered_patch, -1), mask=(slots < k)[None, :])
            tl.store(w + pairs, tl.where(finite, weight, 0.0), mask=(slots < k)[None, :])
            tl.store(confidence + row, tl.where(finite, tl.max(ordered), float("nan")))
        u_row = tl.load(u + row * R + code, mask=code < R, other=0.0)
    else:
        finite = tl.load(idx + row * k) >= 0
    for slot in tl.static_range(k):
        if GATE > 0:
            patch = tl.sum(tl.where((slots == slot)[None, :], ordered_patch, 0)).to(tl.int64)
            amount = tl.sum(tl.where((slots == slot)[None, :], weight, 0.0))
            codes = amount * u_row * gate(u_row, a, b, patch, code, R, GATE)
        else:
            patch = tl.maximum(tl.load(idx + row * k + slot), 0).to(tl.int64)
            codes = tl.load(u + (row * k + slot) * R + code, mask=code < R, other=0.0).to(tl.float32)
        U_tile = tl.load(
            U + patch * (R * D) + code[:, None] * D + cols,
            mask=(code < R)[:, None] & (cols < D)[None, :],
            other=0.0,
        )
        acc += codes[:, None] * U_tile.to(tl.float32)
    out = tl.where(finite, tl.sum(acc, 0) * scale, float("nan"))
    tl.store(update + row * D + cols, out.to(update.dtype.element_ty), mask=cols < D)
