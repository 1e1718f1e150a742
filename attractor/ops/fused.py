"""The whole layer in a few Triton kernels: what GPUs use.

Independent decoders and static prototypes, with either gate and with patch dropout, run fused: scores never
become an (n, K) tensor, and what is saved for the backward pass is as small as the code. Shared decoders and
contextual prototypes follow the reference's equations and use the kernels for the decoding alone.

Saved and passed between the two operators are the tokens, what `route` says of them, and a plan: the pairs
in the order of their patches and the tiles they are cut into. Shape suffixes as in reference.py.
"""

import importlib.util
import math
import os
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attractor.ops import gathered, launch, product, reference
from attractor.ops.launch import Plan, Shape
from attractor.ops.reference import APNOutput

HAS_TRITON = importlib.util.find_spec("triton") is not None
FEW_TOKENS = 64
"""Up to here a token reads its decoders directly; grouping would cost more than it saves."""
FEW_PATCHES = 4096
"""Up to here one program can choose from all scores of a token."""
MOST_RANK = 256
NO_MORE = (None,) * 9
"""Gradients of what is no parameter."""


def why_not(device_type: str, dtype: torch.dtype) -> str | None:
    """None if these kernels can run, else the reason."""
    if not HAS_TRITON:
        return "triton is not installed"
    if device_type != "cuda" and not (device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"Triton kernels need a GPU, and the input is on {device_type}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the kernels know float32, bfloat16 and float16, not {dtype}"
    return None


def fused(
    z_nd: Tensor,
    P_Kd: Tensor,
    V_dr: Tensor,
    a_Kr: Tensor | None,
    b_Kr: Tensor,
    U_Krd: Tensor,
    keep_nk: Tensor | None,
    radius_K: Tensor | None,
    top_k: int,
    temperature: float,
    scale: float,
    cosine: bool,
    dtype: torch.dtype,
    backward: bool,
) -> tuple[Tensor, Tensor]:
    """The update, and all else that is known of the tokens (`Saved`)."""
    from attractor.ops import kernels

    (n, d), (K, r) = z_nd.shape, (P_Kd.shape[0], V_dr.shape[1])
    shape = Shape(n, d, K, top_k, r, dtype)
    device = z_nd.device
    outputs = update_nd, saved = _empty_outputs(z_nd, P_Kd, V_dr, top_k, dtype)
    if n == 0:
        return outputs
    idx_nk, w_nk, confidence_n, s_nk, u_nr, inverse_z_n, inverse_p_K, *plan_of_pairs = Saved.cut(saved, shape)
    if not backward and n <= FEW_TOKENS and K <= FEW_PATCHES and keep_nk is None:
        scores_nK = torch.empty(n, K, device=device)
        blocks = shape.blocks("few_scores")
        kernels.few_scores[(n, -(-K // blocks["BK"]) + -(-r // blocks["BK"]))](
            z_nd,
            P_Kd,
            V_dr,
            radius_K,
            scores_nK,
            u_nr,
            1 / temperature,
            K=K,
            D=d,
            R=r,
            D_P=launch.power(d, 16),
            COSINE=cosine,
            HAS_RADIUS=radius_K is not None,
            **blocks,
        )
        launch.decode_few(
            shape,
            scores_nK,
            u_nr,
            a_Kr,
            b_Kr,
            U_Krd,
            idx_nk,
            w_nk,
            confidence_n,
            update_nd,
            scale,
            has_radius=radius_K is not None,
        )
        return outputs
    histogram = launch.empty_histogram(shape, device)
    float32 = torch.float32 in (z_nd.dtype, P_Kd.dtype)
    exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    split = float32 and not (exact and z_nd.dtype == P_Kd.dtype)
    blocks = shape.blocks("route", not float32)
    blocks["BK"] = min(blocks["BK"], launch.power(K, 16))
    launch.lengths(z_nd, P_Kd, inverse_z_n, inverse_p_K, histogram)
    kernels.route[(-(-n // blocks["BN"]),)](
        z_nd,
        P_Kd,
        V_dr,
        keep_nk,
        radius_K,
        idx_nk,
        w_nk,
        s_nk,
        u_nr,
        inverse_z_n,
        inverse_p_K,
        confidence_n,
        histogram,
        n,
        1 / temperature,
        K=K,
        k=top_k,
        k_P=launch.power(top_k, 2),
        COSINE=cosine,
        SPLIT=split,
        HAS_KEEP=keep_nk is not None,
        HAS_RADIUS=radius_K is not None,
        COUNT=True,
        **shape.sizes(),
        **shape.dots(),
        **blocks,
    )
    plan = Plan(*plan_of_pairs)
    plan.make(shape, idx_nk, histogram)
    known_n = None if radius_K is None else confidence_n
    launch.decode(shape, plan, u_nr, w_nk, a_Kr, b_Kr, U_Krd, idx_nk, known_n, update_nd, scale)
    return outputs


class Saved(NamedTuple):
    """What is known of tokens and patches, in one tensor: to allocate nine takes longer than to launch."""

    idx_nk: Tensor
    w_nk: Tensor
    confidence_n: Tensor
    s_nk: Tensor
    u_nr: Tensor
    inverse_z_n: Tensor
    inverse_p_K: Tensor
    order: Tensor
    numbers: Tensor

    @staticmethod
    def sizes(shape: Shape) -> list[tuple[int, ...]]:
        n, k, K = shape.n, shape.k, shape.K
        of_pairs, of_tokens = (n, k), (n,)
        routing = [of_pairs, of_pairs, of_tokens, of_pairs]
        return [*routing, (n, shape.r), of_tokens, (K,), *((size,) for size in Plan.sizes(shape))]

    @classmethod
    def count(cls, shape: Shape) -> int:
        return sum(launch.aligned(math.prod(size)) for size in cls.sizes(shape))

    @classmethod
    def cut(cls, whole: Tensor, shape: Shape) -> "Saved":
        parts, start = [], 0
        for size in cls.sizes(shape):
            parts.append(whole[start : start + math.prod(size)].view(size))
            start += launch.aligned(math.prod(size))
        whole_numbers = (0, 7, 8)
        return cls(
            *(
                part.view(torch.int32) if number in whole_numbers else part
                for number, part in enumerate(parts)
            )
        )


def _shape_of(z_nd: Tensor, P_Kd: Tensor, V_dr: Tensor, top_k: int, dtype: torch.dtype) -> Shape:
    return Shape(z_nd.shape[0], z_nd.shape[1], P_Kd.shape[0], top_k, V_dr.shape[1], dtype)


def _empty_outputs(
    z_nd: Tensor, P_Kd: Tensor, V_dr: Tensor, top_k: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    shape = _shape_of(z_nd, P_Kd, V_dr, top_k, dtype)
    count = Saved.count(shape)
    return (
        torch.empty(shape.n, shape.d, dtype=dtype, device=z_nd.device),
        torch.empty(count, dtype=torch.float32, device=z_nd.device),
    )


_fused = launch.operator(fused, _empty_outputs)


def fused_backward(
    grad_nd: Tensor,
    grad_w_nk: Tensor | None,
    grad_confidence_n: Tensor | None,
    z_nd: Tensor,
    P_Kd: Tensor,
    V_dr: Tensor,
    a_Kr: Tensor | None,
    b_Kr: Tensor,
    U_Krd: Tensor,
    saved: Tensor,
    top_k: int,
    temperature: float,
    scale: float,
    cosine: bool,
    has_radius: bool,
    master: torch.dtype,
    wants: list[bool],
) -> list[Tensor]:
    """Gradients of z, P, V, U, b and, with vector gates, a; those of V and U have the dtype `master`.

    `wants` says of z, P, V, U and the gates whether anybody wants theirs. What nobody wants is empty, and
    nothing is launched for it.
    """
    from attractor.ops import kernels

    (n, d), (K, r), k = z_nd.shape, (P_Kd.shape[0], V_dr.shape[1]), top_k
    shape = Shape(n, d, K, k, r, grad_nd.dtype)
    if n == 0:
        return [x.zero_() for x in _empty_gradients(z_nd, P_Kd, V_dr, a_Kr, b_Kr, U_Krd, master, wants)]
    wants_z, wants_P, wants_V, wants_U, wants_gates = wants
    past_decoders = wants_z or wants_P or wants_V
    idx_nk, w_nk, _, s_nk, u_nr, inverse_z_n, inverse_p_K, *plan_of_pairs = Saved.cut(saved, shape)
    plan, pairs = Plan(*plan_of_pairs), (grad_nd, u_nr, w_nk, a_Kr, b_Kr, U_Krd, scale)
    whole, sides_nw = past_decoders or wants_gates, None
    if past_decoders:
        sides_nw = torch.empty(n, shape.width, dtype=shape.dtype, device=z_nd.device)
    if shape.apart and whole:
        grads = launch.apart_backward(shape, plan, *pairs, idx_nk, sides_nw, wants_U or wants_gates)
    else:
        grads = launch.decode_backward(shape, plan, *pairs, whole=whole)
    grad_z_nd = grad_P_Kd = grad_V_dr = grad_U_Krd = grad_b_Kr = grad_a_Kr = None
    routing: tuple[Tensor, ...] = ()
    if sides_nw is not None:
        grad_s_nk, coefficient_nk, grad_z_nd = map(torch.empty_like, (w_nk, w_nk, z_nd))
        blocks = shape.blocks("token_backward", z_nd.dtype == shape.dtype)
        kernels.token_backward[(-(-n // blocks["BN"]),)](
            z_nd,
            P_Kd,
            V_dr,
            idx_nk,
            w_nk,
            s_nk,
            inverse_z_n,
            inverse_p_K,
            grads.code,
            grads.weight,
            grad_w_nk,
            grad_confidence_n,
            sides_nw,
            grad_s_nk,
            coefficient_nk,
            grad_z_nd,
            n,
            1 / temperature,
            K=K,
            K_P=launch.power(K, 16),
            W=shape.width,
            k=k,
            k_P=launch.power(k, 2),
            COSINE=cosine,
            HAS_W=grad_w_nk is not None,
            HAS_CONFIDENCE=grad_confidence_n is not None,
            HAS_RADIUS=has_radius,
            SUMMED=grads.code is None,
            **shape.sizes(),
            **shape.dots(),
            **blocks,
        )
        products: tuple[Tensor, ...] = ()
        if shape.dense:
            grad_P_Kd = torch.empty_like(P_Kd)
            products = (P_Kd, inverse_p_K, grad_P_Kd)
        elif wants_P:
            routing = (z_nd, P_Kd, s_nk, grad_s_nk, coefficient_nk, inverse_p_K)
        if wants_V or (wants_P and products):
            grad_V_dr = torch.empty_like(V_dr, dtype=master)
            launch.token_products(shape, z_nd, inverse_z_n, sides_nw, grad_V_dr, *products)
    if wants_U or wants_gates or routing:
        grad_U_Krd, grad_of_pairs_Kd, grad_b_Kr, grad_a_Kr = launch.bank_backward(
            shape,
            plan,
            grad_nd,
            grads,
            U_Krd,
            scale,
            a_Kr,
            b_Kr,
            *routing,
            master=master,
            wants_gates=wants_gates,
        )
        grad_P_Kd = grad_of_pairs_Kd if routing else grad_P_Kd
    found = (grad_z_nd, grad_P_Kd, grad_V_dr, grad_U_Krd, grad_b_Kr, grad_a_Kr)
    wanted = zip((*wants, wants_gates), (z_nd, P_Kd, V_dr, U_Krd, b_Kr, a_Kr), found, strict=True)
    return [
        grad if wants_it and grad is not None else x.new_empty(0)
        for wants_it, x, grad in wanted
        if x is not None
    ]


def _empty_gradients(
    z_nd: Tensor,
    P_Kd: Tensor,
    V_dr: Tensor,
    a_Kr: Tensor | None,
    b_Kr: Tensor,
    U_Krd: Tensor,
    master: torch.dtype,
    wants: list[bool],
) -> list[Tensor]:
    given = zip((z_nd, P_Kd, V_dr, U_Krd, b_Kr, a_Kr), (*wants, wants[-1]), strict=True)
    types = (None, None, master, master, None, None)
    return [
        torch.empty_like(x, dtype=dtype) if wanted else x.new_empty(0)
        for (x, wanted), dtype in zip(given, types, strict=True)
        if x is not None
    ]


_fused_backward = launch.operator(fused_backward, _empty_gradients)


class _Fused(torch.autograd.Function):
    """Reverse mode to any order, beyond the first by the reference; forward mode is an error."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        P: Tensor,
        V: Tensor,
        a: Tensor | None,
        b: Tensor,
        U: Tensor,
        keep: Tensor | None,
        radius: Tensor | None,
        top_k: int,
        temperature: float,
        scale: float,
        cosine: bool,
        dtype: torch.dtype,
        backward: bool,
        stats: bool,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
        master = U.dtype
        V, U = (x if x.dtype == dtype else x.to(dtype) for x in (V, U))
        update, known = _fused(
            z, P, V, a, b, U, keep, radius, top_k, temperature, scale, cosine, dtype, backward
        )
        if backward:
            ctx.save_for_backward(z, P, V, a, b, U, keep, radius, known)
        ctx.options = (top_k, temperature, scale, cosine)
        ctx.master = master  # of float32 parameters, autocast's copies are made here: so are their gradients
        ctx.set_materialize_grads(False)
        if not stats:
            return update
        parts = Saved.cut(known, _shape_of(z, P, V, top_k, dtype))
        idx, w, confidence = (part.clone() for part in parts[:3])  # nobody may keep, or change, the others
        ctx.mark_non_differentiable(idx, *([] if radius is None else [confidence]))
        return update, idx, w, confidence

    @staticmethod
    def backward(
        ctx: Any,
        grad: Tensor | None,
        _: None = None,
        grad_w: Tensor | None = None,
        grad_c: Tensor | None = None,
    ) -> Any:
        z, P, V, a, b, U, keep, radius, known = ctx.saved_tensors
        top_k, temperature, scale, cosine = ctx.options
        if launch.wants_graph():
            if z.dtype != U.dtype:
                raise RuntimeError('second derivatives under autocast need backend="reference"')
            grads = reference.differentiable_backward(
                (z, P, V, a, b, U, keep, radius),
                (grad, None, grad_w, grad_c),
                top_k=top_k,
                temperature=temperature,
                scale=scale,
                routing="cosine" if cosine else "dot",
            )
            return *grads, *[None] * 7
        if grad is None:  # only the weights or the confidence were used
            grad = torch.zeros(z.shape, dtype=U.dtype, device=z.device)
        wants_z, wants_P, wants_V, wants_a, wants_b, wants_U, *_ = ctx.needs_input_grad
        wants_gates = wants_a or wants_b
        dz, dP, dV, dU, db, *da = _fused_backward(
            grad.contiguous(),
            None if grad_w is None else grad_w.contiguous(),
            None if grad_c is None else grad_c.contiguous(),
            z,
            P,
            V,
            a,
            b,
            U,
            known,
            top_k,
            temperature,
            scale,
            cosine,
            radius is not None,
            ctx.master,
            [wants_z, wants_P, wants_V, wants_U, wants_gates],
        )
        return (
            dz if wants_z else None,
            dP if wants_P else None,
            dV if wants_V else None,
            da[0] if da and wants_gates else None,
            db if wants_gates else None,
            dU if wants_U else None,
            *NO_MORE,
        )


def fused_decode(
    code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor, backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """sum_k code[n, k] @ U[idx[n, k]] -> (n, d), and the plan."""
    from attractor.ops import kernels

    (n, k, q), (K, _, d) = code_nkq.shape, U_Kqd.shape
    shape = Shape(n, d, K, k, q, code_nkq.dtype)
    update_nd, order, numbers = _empty_decoded(code_nkq, U_Kqd, backward)
    if n == 0:
        return update_nd, order, numbers
    if n <= FEW_TOKENS and not backward:
        given = (code_nkq, None, None, U_Kqd, idx_nk, None, None, update_nd)
        launch.decode_few(shape, None, *given, 1.0)
        return update_nd, order, numbers
    plan = Plan(order, numbers) if backward else Plan.empty(shape, code_nkq.device)
    histogram = launch.empty_histogram(shape, code_nkq.device).zero_()
    kernels.count[(histogram.shape[1],)](idx_nk, histogram, n * k)
    plan.make(shape, idx_nk, histogram)
    launch.decode(shape, plan, code_nkq, None, None, None, U_Kqd, idx_nk, None, update_nd, 1.0)
    return update_nd, order, numbers


def _empty_decoded(code_nkq: Tensor, U_Kqd: Tensor, backward: bool) -> tuple[Tensor, Tensor, Tensor]:
    (n, k, q), (K, _, d) = code_nkq.shape, U_Kqd.shape
    plan = Plan.empty(Shape(n if backward else 0, d, K, k, q, code_nkq.dtype), code_nkq.device)
    return code_nkq.new_empty(n, d), plan.order, plan.numbers


_fused_decode = launch.operator(fused_decode, _empty_decoded)


def fused_decode_backward(
    grad_nd: Tensor, code_nkq: Tensor, U_Kqd: Tensor, order: Tensor, numbers: Tensor, wants: list[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of codes and decoders; empty where `wants` says of them that nobody does."""
    (n, k, q), (K, _, d) = code_nkq.shape, U_Kqd.shape
    grad_code, grad_U = _empty_decode_gradients(code_nkq, U_Kqd, wants)
    if n == 0:
        return grad_code.zero_(), grad_U.zero_()
    shape = Shape(n, d, K, k, q, code_nkq.dtype)
    plan = Plan(order, numbers)
    pairs = (grad_nd, code_nkq, None, None, None, U_Kqd, 1.0)
    grads = launch.decode_backward(shape, plan, *pairs, whole=wants[0])
    if wants[1]:
        grad_U, *_ = launch.bank_backward(shape, plan, grad_nd, grads, U_Kqd, 1.0)
    if wants[0]:
        assert grads.code is not None  # without gates nothing is summed
        grad_code = grads.code.view(n, k, q)
    return grad_code, grad_U


def _empty_decode_gradients(code_nkq: Tensor, U_Kqd: Tensor, wants: list[bool]) -> tuple[Tensor, Tensor]:
    code, decoders = (
        torch.empty_like(x) if wanted else x.new_empty(0)
        for x, wanted in zip((code_nkq, U_Kqd), wants, strict=True)
    )
    return code, decoders


_fused_decode_backward = launch.operator(fused_decode_backward, _empty_decode_gradients)


class _FusedDecode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor, backward: bool) -> Tensor:
        update_nd, order, numbers = _fused_decode(code_nkq, U_Kqd, idx_nk, backward)
        if backward:
            ctx.save_for_backward(code_nkq, U_Kqd, idx_nk, order, numbers)
        return update_nd

    @staticmethod
    def backward(ctx: Any, grad_nd: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        code_nkq, U_Kqd, idx_nk, order, numbers = ctx.saved_tensors
        if launch.wants_graph():
            return *reference.decode_backward(grad_nd, code_nkq, U_Kqd, idx_nk.long()), None, None
        wants = list(ctx.needs_input_grad[:2])
        dcode, dU = _fused_decode_backward(grad_nd.contiguous(), code_nkq, U_Kqd, order, numbers, wants)
        return dcode if wants[0] else None, dU if wants[1] else None, None, None


def decode(code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> Tensor:
    dtype = launch.product_dtype(code_nkq)
    return _FusedDecode.apply(
        code_nkq.to(dtype).contiguous(),
        U_Kqd.to(dtype).contiguous(),
        idx_nk.int().contiguous(),
        launch.needs_backward(code_nkq, U_Kqd),
    )


def decode_in_parts(code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> Tensor:
    """A code wider than the kernels take is decoded piece by piece: the sum is the same."""
    pieces = zip(code_nkq.split(MOST_RANK, -1), U_Kqd.split(MOST_RANK, 1), strict=True)
    first, *others = [decode(code, U, idx_nk) for code, U in pieces]
    return sum(others, first)


def apn(
    z_nd: Tensor,
    P_Km: Tensor,
    V_dr: Tensor,
    a_Kr: Tensor | None,
    b_Kr: Tensor,
    U_Kqd: Tensor,
    *,
    top_k: int,
    temperature: float,
    scale: float | Tensor,
    routing: str,
    U0_rd: Tensor | None = None,
    A_Krq: Tensor | None = None,
    projection_gdm: Tensor | None = None,
    keep_nk: Tensor | None = None,
    radius_K: Tensor | None = None,
    sparse: bool = False,
    stats: bool = True,
) -> APNOutput:
    if P_Km.dim() == 3 and product.can_run(P_Km, V_dr, top_k, U0_rd):
        return product.apn(
            z_nd,
            P_Km,
            V_dr,
            a_Kr,
            b_Kr,
            U_Kqd,
            top_k=top_k,
            temperature=temperature,
            scale=scale,
            routing=routing,
            keep_nk=keep_nk,
            sparse=sparse,
        )
    if P_Km.dim() == 3 or U0_rd is not None or projection_gdm is not None or V_dr.shape[1] > MOST_RANK:
        return reference.apn(
            z_nd,
            P_Km,
            V_dr,
            a_Kr,
            b_Kr,
            U_Kqd,
            top_k=top_k,
            temperature=temperature,
            scale=scale,
            routing=routing,
            U0_rd=U0_rd,
            A_Krq=A_Krq,
            projection_gdm=projection_gdm,
            keep_nk=keep_nk,
            radius_K=radius_K,
            sparse=sparse,
            decode=decode_in_parts if P_Km.dim() == 2 else partial(gathered.decode, sparse=sparse),
        )
    dtype = launch.product_dtype(z_nd)
    outputs = _Fused.apply(
        z_nd.contiguous(),
        P_Km.contiguous(),
        V_dr.contiguous(),
        None if a_Kr is None else a_Kr.contiguous(),
        b_Kr.contiguous(),
        U_Kqd.contiguous(),
        None if keep_nk is None else keep_nk.contiguous(),
        None if radius_K is None else radius_K.contiguous(),
        top_k,
        temperature,
        1.0 if isinstance(scale, Tensor) else float(scale),
        routing == "cosine",
        dtype,
        launch.needs_backward(z_nd, P_Km, V_dr, a_Kr, b_Kr, U_Kqd),
        stats,
    )
    update, *of_tokens = outputs if stats else (outputs, None, None, None)
    return APNOutput(scale * update if isinstance(scale, Tensor) else update, *of_tokens)
