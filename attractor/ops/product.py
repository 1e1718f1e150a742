"""Product prototypes in a few Triton kernels: what GPUs use for up to a million patches.

Choosing (`route_pairs`) and decoding (`gather_decode`) are one kernel each, after one for lengths; scores
stay in registers. No kernel adds floats with atomics, and nothing waits for the host: gradients of gates and
decoders are summed over pairs sorted by patch. They are dense, or compact: rows of the patches that were
selected, as many as there are pairs, of which those too many are zeros for the last patch once more.

Shape suffixes as in reference.py; p = n * k pairs.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attractor.ops import launch, reference
from attractor.ops.launch import Shape, power
from attractor.ops.reference import APNOutput

MOST_RANK, MOST_ACTIVE = 64, 16
"""Up to here the kernels hold what they need in registers."""
MOST_ROWS = 1024
"""So large may codebooks be on a GPU: up to here benchmarks/product_check.py found the choices of float64 and
the same bits in every run."""
FEW_TOKENS, FEW_ROWS = 64, 4096
"""Up to here, without gradients, a token and a few rows of a codebook have a program of their own."""
WAVE = 264
"""Programs that keep a large GPU busy."""


def gather_blocks(shape: Shape, most: int = 8192, of_a_warp: int = 512) -> dict[str, int]:
    """A whole row of up to 1024 channels to a program, and a few such rows, of `most` numbers together.

    A warp takes `of_a_warp` channels of a row.
    """
    BD = min(1024, power(shape.d, 16))
    warps = max(1, min(4, BD // of_a_warp))
    return {"BR": min(power(shape.r), max(1, most // BD)), "BD": BD, "num_warps": warps}


def route_blocks(
    shape: Shape, rows: int, of_tokens: torch.dtype, of_codebooks: torch.dtype
) -> tuple[dict[str, int], bool]:
    """Sizes of `route_pairs`, and whether float32 factors are split for the matrix unit."""
    float32 = torch.float32 in (of_tokens, of_codebooks)
    exact = shape.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    split = float32 and not (exact and of_tokens == of_codebooks)
    blocks = shape.blocks("route")
    # 64 tokens and 128 rows: what four warps hold in registers while they look for the best
    blocks |= {"BN": min(blocks["BN"], 64), "BK": min(128, power(shape.K, 16))}
    blocks["num_warps"] = 4 if blocks["BN"] == 64 and not float32 else 8
    if float32:
        blocks |= {"BD": min(32, power(shape.d, 16)), "num_stages": 2}
    return blocks, split


def product_forward(
    z_nd: Tensor,
    C_2Nm: Tensor,
    V_dr: Tensor,
    a_Kr: Tensor | None,
    b_Kr: Tensor,
    U_Krd: Tensor,
    keep_nk: Tensor | None,
    top_k: int,
    temperature: float,
    scale: float,
    cosine: bool,
    dtype: torch.dtype,
    backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """update, indices, weights, confidence; then scores, codes and inverse lengths for the backward pass."""
    from attractor.ops import kernels

    outputs = _empty_outputs(z_nd, C_2Nm, V_dr, top_k, dtype)
    update_nd, idx_nk, w_nk, confidence_n, s_nk, u_nr, inverse_z_n, inverse_c_2N = outputs
    n, d, N = *z_nd.shape, C_2Nm.shape[1]
    shape = Shape(n, d, N, top_k, V_dr.shape[1], dtype)
    if n == 0:
        return outputs
    rows, kind = min(top_k, N), launch.gate_kind(a_Kr, b_Kr)
    chosen = {"N": N, "h": rows, "h_P": power(rows, 2), "k": top_k, "k_P": power(top_k, 2)}
    if not backward and n <= FEW_TOKENS and N <= FEW_ROWS and keep_nk is None:
        half_scores_n2N = torch.empty(n, 2, N, device=z_nd.device)
        blocks = shape.blocks("few_scores")
        kernels.few_halves[(n, 2 * -(-N // blocks["BK"]) + -(-shape.r // blocks["BK"]))](
            z_nd,
            C_2Nm,
            V_dr,
            half_scores_n2N,
            u_nr,
            1 / temperature,
            D=d,
            N=N,
            R=shape.r,
            D_P=power(d, 16),
            M_P=power(d // 2, 16),
            COSINE=cosine,
            **blocks,
        )
        blocks = gather_blocks(shape) | {"BD": min(128, power(d, 16)), "num_warps": 4}
        kernels.few_pairs[(n, -(-d // blocks["BD"]))](
            half_scores_n2N,
            u_nr,
            a_Kr,
            b_Kr,
            U_Krd,
            idx_nk,
            w_nk,
            confidence_n,
            update_nd,
            scale,
            D=d,
            N_P=power(N, 2),
            R=shape.r,
            GATE=kind,
            **chosen,
            **blocks,
        )
        return outputs
    launch.lengths(z_nd, C_2Nm.flatten(0, 1), inverse_z_n, inverse_c_2N)
    blocks, split = route_blocks(shape, rows, z_nd.dtype, C_2Nm.dtype)
    kernels.route_pairs[(-(-n // blocks["BN"]),)](
        z_nd,
        C_2Nm,
        V_dr,
        keep_nk,
        idx_nk,
        w_nk,
        s_nk,
        u_nr,
        inverse_z_n,
        inverse_c_2N,
        confidence_n,
        n,
        1 / temperature,
        COSINE=cosine,
        SPLIT=split,
        HAS_KEEP=keep_nk is not None,
        **chosen,
        **shape.sizes(),
        **shape.dots(),
        **blocks,
    )
    blocks = gather_blocks(shape)
    kernels.gather_decode[(n, -(-d // blocks["BD"]))](
        u_nr, w_nk, a_Kr, b_Kr, U_Krd, idx_nk, update_nd, scale, D=d, R=shape.r, k=top_k, GATE=kind, **blocks
    )
    return outputs


def _empty_outputs(
    z_nd: Tensor, C_2Nm: Tensor, V_dr: Tensor, top_k: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    n = z_nd.shape[0]

    def new(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=z_nd.device)

    return (
        new(n, z_nd.shape[1], dtype=dtype),
        new(n, top_k, dtype=torch.int32),
        new(n, top_k),
        new(n),
        new(n, top_k),
        new(n, V_dr.shape[1]),
        new(n),
        new(2, C_2Nm.shape[1]),
    )


_product_forward = launch.operator(product_forward, _empty_outputs)


def product_backward(
    grad_nd: Tensor,
    grad_w_nk: Tensor | None,
    grad_confidence_n: Tensor | None,
    z_nd: Tensor,
    C_2Nm: Tensor,
    V_dr: Tensor,
    a_Kr: Tensor | None,
    b_Kr: Tensor,
    U_Krd: Tensor,
    idx_nk: Tensor,
    w_nk: Tensor,
    s_nk: Tensor,
    u_nr: Tensor,
    inverse_z_n: Tensor,
    inverse_c_2N: Tensor,
    temperature: float,
    scale: float,
    cosine: bool,
    wants_codebooks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of z, V and C (empty if it is not wanted); codes and gradients of the gate of each pair."""
    from attractor.ops import kernels

    outputs = _empty_gradients(z_nd, C_2Nm, V_dr, a_Kr, idx_nk, u_nr, wants_codebooks)
    grad_z_nd, grad_V_dr, grad_C_2Nm, code_pr, gates_pw = outputs
    (n, d), k, N = z_nd.shape, idx_nk.shape[1], C_2Nm.shape[1]
    shape = Shape(n, d, N, k, V_dr.shape[1], grad_nd.dtype)
    if n == 0:
        return (grad_z_nd, grad_V_dr.zero_(), grad_C_2Nm.zero_(), code_pr, gates_pw)
    grad_u_nr = torch.empty(n, shape.r, dtype=shape.dtype, device=z_nd.device)
    coefficient_nk, radial_n = torch.empty_like(w_nk), torch.empty_like(inverse_z_n)
    kernels.gather_backward[(n,)](
        grad_nd,
        u_nr,
        w_nk,
        a_Kr,
        b_Kr,
        U_Krd,
        idx_nk,
        s_nk,
        inverse_z_n,
        grad_w_nk,
        grad_confidence_n,
        code_pr,
        gates_pw,
        grad_u_nr,
        coefficient_nk,
        radial_n,
        scale,
        1 / temperature,
        D=d,
        R=shape.r,
        k=k,
        k_P=power(k, 2),
        GATE=launch.gate_kind(a_Kr, b_Kr),
        COSINE=cosine,
        HAS_W=grad_w_nk is not None,
        HAS_CONFIDENCE=grad_confidence_n is not None,
        **gather_blocks(shape),
    )
    blocks = {"BN": 16, "BD": min(128, power(d, 16)), "num_warps": 4, "num_stages": 2}
    kernels.token_gradient[(-(-n // blocks["BN"]), -(-d // blocks["BD"]))](
        z_nd,
        C_2Nm,
        V_dr,
        idx_nk,
        inverse_z_n,
        inverse_c_2N,
        grad_u_nr,
        coefficient_nk,
        radial_n,
        grad_z_nd,
        n,
        N=N,
        k=k,
        COSINE=cosine,
        **shape.sizes(),
        **shape.dots(),
        **blocks,
    )
    launch.token_products(shape, z_nd, inverse_z_n, grad_u_nr, grad_V_dr)
    if wants_codebooks:
        _codebook_gradient(shape, z_nd, C_2Nm, idx_nk, coefficient_nk, inverse_c_2N, grad_C_2Nm)
    return outputs


def _codebook_gradient(
    shape: Shape,
    z_nd: Tensor,
    C_2Nm: Tensor,
    idx_nk: Tensor,
    coefficient_nk: Tensor,
    inverse_c_2N: Tensor,
    grad_C_2Nm: Tensor,
) -> None:
    from attractor.ops import kernels

    _, N, m = C_2Nm.shape
    wide = 1 if shape.dtype.itemsize == 2 and not launch.little_shared_memory() else 2
    blocks = {
        "BN": 64 // wide,
        "BK": min(128 // wide, power(N, 16)),
        "BD": min(128 // wide, power(m, 16)),
        "num_warps": 4 * (3 - wide),
        "num_stages": 3,
    }
    grid = -(-N // blocks["BK"]), -(-m // blocks["BD"])
    parts = max(1, min(-(-shape.n // blocks["BN"]), -(-WAVE // (2 * math.prod(grid)))))
    parts_2Nm = torch.empty(parts, 2, N, m, device=z_nd.device)
    kernels.codebook_parts[(*grid, 2 * parts)](
        z_nd, idx_nk, coefficient_nk, parts_2Nm, shape.n, D=shape.d, N=N, k=shape.k, **shape.dots(), **blocks
    )
    kernels.codebook_gradient[(2 * N,)](
        C_2Nm, inverse_c_2N, parts_2Nm, grad_C_2Nm, parts, N=N, M=m, M_P=power(m, 16)
    )


def _empty_gradients(
    z_nd: Tensor,
    C_2Nm: Tensor,
    V_dr: Tensor,
    a_Kr: Tensor | None,
    idx_nk: Tensor,
    u_nr: Tensor,
    wants_codebooks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    pairs, r = idx_nk.numel(), V_dr.shape[1]
    return (
        torch.empty_like(z_nd),
        torch.empty_like(V_dr),
        torch.empty_like(C_2Nm) if wants_codebooks else C_2Nm.new_empty(0),
        u_nr.new_empty(pairs, r),
        u_nr.new_empty(pairs, 1 if a_Kr is None else 2 * r),
    )


_product_backward = launch.operator(product_backward, _empty_gradients)


class Runs(NamedTuple):
    """Pairs sorted by patch; the pairs of one patch are a run."""

    order: Tensor  # (p) the pairs
    patches: Tensor  # (p) their patches
    starts: Tensor  # (p) where the run of each begins
    ends: Tensor  # (p) and ends

    @classmethod
    def of(cls, idx_nk: Tensor) -> "Runs":
        # a token that was not routed has no gradient: its pairs may as well be those of patch 0
        patches, order = idx_nk.flatten().clamp(min=0).sort(stable=True)
        starts = torch.searchsorted(patches, patches, out_int32=True)
        ends = torch.searchsorted(patches, patches, out_int32=True, right=True)
        return cls(order, patches, starts, ends)

    def numbered(self) -> tuple[Tensor, Tensor, Tensor]:
        """The number of each pair's run, the patch of each run (the last one repeated), and how many."""
        is_first = self.starts == torch.arange(len(self.starts), device=self.starts.device)
        number = is_first.cumsum(0) - 1
        patch_of = self.patches[-1:].expand_as(self.patches).clone().scatter_(0, number, self.patches)
        return number, patch_of, number[-1:] + 1


def product_bank_gradient(
    grad_nd: Tensor,
    idx_nk: Tensor,
    code_pr: Tensor,
    gates_pw: Tensor,
    b_Kr: Tensor,
    U_Krd: Tensor,
    scale: float,
    compact: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of decoders and gates (bias, then slope): of all patches, or of some and which these are."""
    from attractor.ops import kernels

    patch_p, grad_U, grad_gates = _empty_bank_gradient(idx_nk, gates_pw, b_Kr, U_Krd, compact)
    pairs, width = gates_pw.shape
    if pairs == 0:
        return patch_p, grad_U.zero_(), grad_gates.zero_()
    runs = Runs.of(idx_nk)
    places, count = runs.patches, None
    if compact:
        places, patch_p, count = runs.numbered()
    else:
        grad_U.zero_()
        grad_gates.zero_()
    (n, d), (_, r, _) = grad_nd.shape, U_Krd.shape
    shape = Shape(n, d, U_Krd.shape[0], idx_nk.shape[1], r, grad_nd.dtype)
    spans = -(-pairs // launch.SPAN)
    part_U, part_gates = code_pr.new_empty(2 * spans, r * d), code_pr.new_empty(2 * spans, width)
    blocks = gather_blocks(shape, 2048, 256)
    sizes = {"D": d, "R": r, "W": width, "W_P": power(width), **blocks}
    outputs = (grad_U, grad_gates, part_U, part_gates)
    kernels.sum_runs[(pairs, -(-d // blocks["BD"]))](
        grad_nd,
        code_pr,
        gates_pw,
        runs.order,
        runs.starts,
        runs.ends,
        places,
        count,
        *outputs,
        scale,
        k=shape.k,
        COMPACT=compact,
        **sizes,
    )
    kernels.sum_spans[(spans, -(-d // blocks["BD"]))](
        runs.starts, runs.ends, places, *outputs, pairs, **sizes
    )
    return patch_p, grad_U, grad_gates


def _empty_bank_gradient(
    idx_nk: Tensor, gates_pw: Tensor, b_Kr: Tensor, U_Krd: Tensor, compact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = idx_nk.numel() if compact else U_Krd.shape[0]
    return (
        idx_nk.new_empty(rows if compact else 0),
        U_Krd.new_empty(rows, *U_Krd.shape[1:]),
        b_Kr.new_empty(rows, gates_pw.shape[1]),
    )


_product_bank_gradient = launch.operator(product_bank_gradient, _empty_bank_gradient)


class _Product(torch.autograd.Function):
    """Reverse mode to any order, beyond the first by the reference; forward mode is an error."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        C: Tensor,
        V: Tensor,
        a: Tensor | None,
        b: Tensor,
        U: Tensor,
        keep: Tensor | None,
        top_k: int,
        temperature: float,
        scale: float,
        cosine: bool,
        dtype: torch.dtype,
        backward: bool,
        sparse: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        update, idx, w, confidence, *rest = _product_forward(
            z, C, V, a, b, U, keep, top_k, temperature, scale, cosine, dtype, backward
        )
        ctx.save_for_backward(z, C, V, a, b, U, keep, idx, w, *rest)
        ctx.options = (top_k, temperature, scale, cosine, sparse)
        ctx.mark_non_differentiable(idx)
        ctx.set_materialize_grads(False)
        return update, idx, w, confidence

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None, grad_w: Tensor | None, grad_c: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        z, C, V, a, b, U, keep, idx = saved[:8]
        top_k, temperature, scale, cosine, sparse = ctx.options
        if launch.wants_graph():
            if z.dtype != V.dtype:
                raise RuntimeError('second derivatives under autocast need backend="reference"')
            grads = reference.differentiable_backward(
                (z, C, V, a, b, U, keep, None),
                (grad, None, grad_w, grad_c),
                top_k=top_k,
                temperature=temperature,
                scale=scale,
                routing="cosine" if cosine else "dot",
            )
            return *grads[:7], *[None] * 7
        if grad is None:  # only the weights or the confidence were used
            grad = torch.zeros(z.shape, dtype=V.dtype, device=z.device)
        grad = grad.contiguous()
        extra = (None if x is None else x.contiguous() for x in (grad_w, grad_c))
        dz, dV, dC, codes, gates = _product_backward(
            grad, *extra, z, C, V, a, b, U, *saved[7:], temperature, scale, cosine, ctx.needs_input_grad[1]
        )
        if not ctx.needs_input_grad[1]:
            dC = None
        da = db = dU = None
        if any(ctx.needs_input_grad[3:6]):
            patches, dU, gates = _product_bank_gradient(grad, idx, codes, gates, b, U, scale, sparse)
            db, da = gates[:, : b.shape[1]], None if a is None else gates[:, b.shape[1] :]
            if sparse:
                dU, db, da = (_sparse(patches, *pair) for pair in ((dU, U), (db, b), (da, a)))
        return dz, dC, dV, da, db, dU, *[None] * 8


def _sparse(patches: Tensor, values: Tensor | None, like: Tensor | None) -> Tensor | None:
    if values is None or like is None:
        return None
    return torch.sparse_coo_tensor(patches[None].long(), values, like.shape, check_invariants=False)


def can_run(C_2Nm: Tensor, V_dr: Tensor, top_k: int, U0_rd: Tensor | None) -> bool:
    if C_2Nm.is_cuda and C_2Nm.shape[1] > MOST_ROWS:
        return False
    return U0_rd is None and V_dr.shape[1] <= MOST_RANK and top_k <= MOST_ACTIVE


def apn(
    z_nd: Tensor,
    C_2Nm: Tensor,
    V_dr: Tensor,
    a_Kr: Tensor | None,
    b_Kr: Tensor,
    U_Krd: Tensor,
    *,
    top_k: int,
    temperature: float,
    scale: float | Tensor,
    routing: str,
    keep_nk: Tensor | None,
    sparse: bool,
) -> APNOutput:
    dtype = launch.product_dtype(z_nd)
    update, idx, w, confidence = _Product.apply(
        z_nd.contiguous(),
        C_2Nm.contiguous(),
        V_dr.to(dtype).contiguous(),
        None if a_Kr is None else a_Kr.contiguous(),
        b_Kr.contiguous(),
        U_Krd.contiguous(),
        None if keep_nk is None else keep_nk.contiguous(),
        top_k,
        temperature,
        1.0 if isinstance(scale, Tensor) else float(scale),
        routing == "cosine",
        dtype,
        launch.needs_backward(z_nd, C_2Nm, V_dr, a_Kr, b_Kr, U_Krd),
        sparse,
    )
    return APNOutput(scale * update if isinstance(scale, Tensor) else update, idx, w, confidence)
