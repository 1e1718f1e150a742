"""The same function for the CPU, grouped by patch: a decoder is read once for all tokens of its patch.

The (token, slot) pairs are sorted by patch, and each group is one small product; too small for several
threads, so it is the groups that are shared out. For few tokens, and for decoders that stay in the cache, the
forward pass is faster still as weighted sums of rows of U (an embedding bag). All of it is deterministic.

The layer without variants has a backward pass of its own (`_Patches`): the scores' gradient is zero outside
the active set, so it needs no (n, K), and nothing larger than (n, d) or (n, k, r) is kept for it. Everything
else, low precision and torch.compile included, is the reference with a faster decoder.

Shape suffixes as in reference.py; p = n * k pairs, in the order of their patches or of their tokens.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from attractor.ops import gathered, reference
from attractor.ops.reference import APNOutput

CACHE = 2**24
"""Bytes of decoders or temporaries that a last-level cache is trusted to hold."""


def best_patches(s_nK: Tensor, top_k: int) -> Tensor:
    """`reference.best_patches` without sorting all of a row, unless a tie makes it matter."""
    if len(s_nK) <= 8:  # the checks below take longer than the sort
        return reference.best_patches(s_nK, top_k)
    s_nk, idx_nk = s_nK.topk(top_k)
    clear_n = (s_nk[:, 1:] < s_nk[:, :-1]).all(-1)  # false for NaN as well
    if top_k < s_nK.shape[1]:
        clear_n &= s_nK.scatter(1, idx_nk, -torch.inf).amax(-1) < s_nk[:, -1]
    if not clear_n.all():
        unclear = (~clear_n).nonzero().squeeze(1)
        idx_nk[unclear] = reference.best_patches(s_nK[unclear], top_k)
    return idx_nk


def by_patch(idx_nk: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """The order that brings pairs of one patch together, and how many each patch has."""
    patch_p = idx_nk.flatten()
    return patch_p.argsort(stable=True), patch_p.bincount(minlength=K)


def inverse(order_p: Tensor) -> Tensor:
    """Where each pair went."""
    return torch.empty_like(order_p).scatter_(0, order_p, torch.arange(len(order_p)))


def may_set_threads() -> bool:
    """The number of threads is the process's: only the main thread can change it and put it back."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def share_out(work: Callable[[Any], None], pieces: Sequence[Any]) -> None:
    """Each piece on one of `torch.get_num_threads()` threads, whose own operators then use one thread only.

    The threads live for one call: a pool that stays would be dead in the children of a fork.
    """
    if not may_set_threads():
        for piece in pieces:
            work(piece)
        return
    threads = torch.get_num_threads()
    inference = torch.is_inference_mode_enabled()

    def alone(piece: Any) -> None:  # neither mode is inherited
        with torch.inference_mode(inference), torch.no_grad():
            work(piece)

    with one_thread():  # also restores what threads start with, which a thread's own setting changes for all
        if threads == 1 or len(pieces) == 1:
            for piece in pieces:
                work(piece)
        else:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                list(pool.map(alone, pieces))


def sum_decode(code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> Tensor:
    """sum_k code[n, k] @ U[idx[n, k]] -> (n, d), by gathering, by sums of rows of U or by groups"""
    n, k, q = code_nkq.shape
    K, _, d = U_Kqd.shape
    if n == 1:  # the fewest operators
        return code_nkq.flatten(1) @ U_Kqd.index_select(0, idx_nk[0]).flatten(0, 1)
    if n * k <= 2 * K or U_Kqd.nbytes <= CACHE:  # hardly any patch is shared, or reading one again is cheap
        row_nkq = torch.add(torch.arange(q), idx_nk.unsqueeze(-1), alpha=q)
        rows_of_U, code = U_Kqd.detach().flatten(0, 1), code_nkq.flatten(1)
        return F.embedding_bag(row_nkq.flatten(1), rows_of_U, mode="sum", per_sample_weights=code)
    update_nd = code_nkq.new_empty(n, d)
    block = max(1, CACHE // (k * d * code_nkq.itemsize))

    def decode_block(start: int) -> None:
        tokens = slice(start, start + block)
        order_p, count_K = by_patch(idx_nk[tokens], K)
        counts = count_K.tolist()
        code_pq = code_nkq[tokens].flatten(0, 1).index_select(0, order_p)
        update_pd = code_nkq.new_empty(len(order_p), d)
        for code, U, update in zip(code_pq.split(counts), U_Kqd, update_pd.split(counts), strict=True):
            if len(code):
                torch.mm(code, U, out=update)
        update_nd[tokens] = F.embedding_bag(inverse(order_p).view(-1, k), update_pd, mode="sum")

    share_out(decode_block, range(0, n, block))
    return update_nd


def decode_backward(
    grad_nd: Tensor,
    code_nkq: Tensor,
    U_Kqd: Tensor,
    order_p: Tensor,
    count_K: Tensor,
    wants_code: bool = True,
    wants_U: bool = True,
) -> tuple[Tensor, Tensor]:
    """Gradients of codes and decoders; something else in the place of what nobody wants."""
    n, k, q = code_nkq.shape
    counts = count_K.tolist()
    code_pq = code_nkq.flatten(0, 1).index_select(0, order_p)
    grad_code_pq, grad_U_Kqd = torch.empty_like(code_pq), torch.zeros_like(U_Kqd) if wants_U else U_Kqd
    tokens_p = order_p // k
    per_patch = (tokens_p.split(counts), code_pq.T.split(counts, 1), grad_code_pq.split(counts))
    groups = [group for group in zip(*per_patch, U_Kqd.mT, grad_U_Kqd, strict=True) if len(group[0])]

    def multiply(groups: Iterable[tuple[Tensor, ...]]) -> None:
        for tokens, code_T, grad_code, U_T, grad_U in groups:
            grad = grad_nd.index_select(0, tokens)
            if wants_code:
                torch.mm(grad, U_T, out=grad_code)
            if wants_U:
                torch.mm(code_T, grad, out=grad_U)

    # Smaller products than this are mostly Python, which threads do not share. The bits do not depend on it.
    pieces = 2 * torch.get_num_threads() if len(order_p) >= 16 * len(groups) else 1
    share_out(multiply, [groups[start::pieces] for start in range(pieces)])
    if not wants_code:
        return code_nkq, grad_U_Kqd
    return grad_code_pq.index_select(0, inverse(order_p)).view(n, k, q), grad_U_Kqd


class _Saved(NamedTuple):
    """What the backward pass of `_Patches` needs beside its inputs."""

    finite_n1: Tensor | None  # None if all rows are
    nobody_n1: Tensor | None  # with radii: the weight that no patch has
    row_n1: Tensor  # s = row * <z, p> * column: 1 / (tau |z|), or 1 / tau for routing="dot"
    column_K: Tensor  # 1 / |p|
    s_nk: Tensor
    idx_nk: Tensor
    w_nk: Tensor
    u_nr: Tensor
    gate_nkr: Tensor


def inverse_length(length: Tensor) -> Tensor:
    """1 / length, and 0 for 0"""
    return length.reciprocal().nan_to_num_(nan=torch.nan, posinf=0.0)


def forward(
    z_nd: Tensor,
    P_Kd: Tensor,
    V_dr: Tensor,
    a_Kr: Tensor | None,
    b_Kr: Tensor,
    U_Krd: Tensor,
    keep_nk: Tensor | None,
    radius_K: Tensor | None,
    *,
    top_k: int,
    temperature: float,
    scale: float,
    routing: str,
) -> tuple[APNOutput, _Saved]:
    length_n1 = torch.linalg.vector_norm(z_nd, dim=-1, keepdim=True)
    finite_n1 = None
    if not math.isfinite(length_n1.sum()):
        finite_n1 = length_n1.isfinite()
        z_nd, length_n1 = z_nd.masked_fill(~finite_n1, 0), length_n1.masked_fill(~finite_n1, 0)
    tau_n1 = length_n1 * temperature if routing == "cosine" else torch.full_like(length_n1, temperature)
    row_n1 = inverse_length(tau_n1)
    column_K = inverse_length(torch.linalg.vector_norm(P_Kd, dim=-1))

    edge_K = None if radius_K is None else radius_K / temperature
    block = max(1, CACHE // 4 // (len(P_Kd) * z_nd.itemsize))  # no (n, K) leaves the cache
    fits = len(z_nd) <= block
    blocks = [(z_nd, row_n1)] if fits else zip(z_nd.split(block), row_n1.split(block), strict=True)
    chosen = []
    for z, row in blocks:
        m_nK = (z @ P_Kd.T).mul_(column_K).mul_(row)  # (1)
        if edge_K is not None:
            m_nK -= edge_K  # (B1)
        idx_nk = best_patches(m_nK, top_k)  # (2)
        chosen.append((m_nK.gather(1, idx_nk), idx_nk))
    m_nk, idx_nk = chosen[0] if fits else map(torch.cat, zip(*chosen, strict=True))
    s_nk = m_nk if edge_K is None else m_nk + edge_K[idx_nk]
    kept_nk = m_nk if keep_nk is None else m_nk.masked_fill(~keep_nk, -torch.inf)
    w_nk = kept_nk.softmax(-1) if edge_K is None else reference.basin_weights(kept_nk)  # (3), or (B2)
    nobody_n1 = None if edge_K is None else 1 - w_nk.sum(-1, keepdim=True)

    u_nr = z_nd @ V_dr  # (4)
    u_nkr = u_nr.unsqueeze(1)
    gate_nkr = torch.embedding(b_Kr, idx_nk)
    if a_Kr is not None:
        gate_nkr.addcmul_(torch.embedding(a_Kr, idx_nk), u_nkr)
    gate_nkr.sigmoid_()
    code_nkr = (gate_nkr * u_nkr).mul_((w_nk if scale == 1 else scale * w_nk).unsqueeze(-1))  # (5), weighted
    update_nd = sum_decode(code_nkr, U_Krd, idx_nk)  # (6)

    saved = _Saved(finite_n1, nobody_n1, row_n1, column_K, s_nk, idx_nk, w_nk, u_nr, gate_nkr)
    shown_nk = idx_nk if edge_K is None else idx_nk.masked_fill(w_nk == 0, -1)
    if finite_n1 is None:
        return APNOutput(update_nd, shown_nk, w_nk, m_nk.select(1, 0)), saved
    return APNOutput(
        update=update_nd.masked_fill_(~finite_n1, torch.nan),
        indices=shown_nk.masked_fill(~finite_n1, -1),
        weights=w_nk.masked_fill(~finite_n1, 0),
        confidence=m_nk[:, 0].masked_fill(~finite_n1.squeeze(1), torch.nan),
    ), saved


class _Patches(torch.autograd.Function):
    """Reverse mode to any order; forward mode is an error, never a silent zero."""

    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], *inputs: Any) -> tuple[Tensor, ...]:
        output, saved = forward(*inputs, **options)
        ctx.options = options
        ctx.save_for_backward(*inputs, *saved)
        ctx.set_materialize_grads(False)
        confidence = output.confidence.clone()  # which may be a view of what is saved
        ctx.mark_non_differentiable(output.indices, *([] if inputs[7] is None else [confidence]))
        return *output[:3], confidence

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # once: activation checkpointing computes them when asked
        inputs, saved = tensors[:8], _Saved(*tensors[8:])
        if torch.is_grad_enabled():  # create_graph=True: differentiate us
            return None, *reference.differentiable_backward(inputs, grads, **ctx.options)
        return None, *backward(inputs, saved, grads, ctx.needs_input_grad[1:], **ctx.options)


def backward(
    inputs: Sequence[Any],
    saved: _Saved,
    grads: Sequence[Tensor | None],
    wants: Sequence[bool],
    *,
    top_k: int,
    temperature: float,
    scale: float,
    routing: str,
) -> tuple[Tensor | None, ...]:
    """Of those inputs that are wanted; what nobody wants is not computed."""
    z_nd, P_Kd, V_dr, a_Kr, _, U_Krd, _, _ = inputs
    wants_z, wants_P, wants_V, wants_a, wants_b, wants_U = wants[:6]
    wants_gates, past_decoders = wants_a or wants_b, wants_z or wants_P or wants_V
    finite_n1, nobody_n1, row_n1, column_K, s_nk, idx_nk, w_nk, u_nr, gate_nkr = saved
    grad_nd, _, grad_w_nk, grad_confidence_n = grads
    grad_nd = torch.zeros_like(z_nd) if grad_nd is None else grad_nd.contiguous()
    if finite_n1 is not None:
        z_nd, grad_nd = z_nd.masked_fill(~finite_n1, 0), grad_nd.masked_fill(~finite_n1, 0)
    order_p, count_K = by_patch(idx_nk, len(P_Kd))
    start_K = count_K.cumsum(0) - count_K

    def sum_by_patch(x_nkr: Tensor) -> Tensor:
        return F.embedding_bag(order_p, x_nkr.flatten(0, 1), start_K, mode="sum")

    # (6), (5)
    u_nkr, scaled_w_nkr = u_nr.unsqueeze(1), (scale * w_nk).unsqueeze(-1)
    phi_nkr = gate_nkr * u_nkr
    pairs = (grad_nd, phi_nkr * scaled_w_nkr, U_Krd, order_p, count_K)
    grad_nkr, bank_Krd = decode_backward(*pairs, wants_gates or past_decoders, wants_U)
    grad_z_nd = grad_P_Kd = grad_V_dr = grad_a_Kr = grad_b_Kr = None
    grad_U_Krd = bank_Krd if wants_U else None
    if not (wants_gates or past_decoders):
        return grad_z_nd, grad_P_Kd, grad_V_dr, grad_a_Kr, grad_b_Kr, grad_U_Krd, None, None
    grad_scaled_w_nk = phi_nkr.mul_(grad_nkr).sum(-1)
    grad_phi_nkr = grad_nkr.mul_(scaled_w_nkr)
    grad_gate_nkr = grad_phi_nkr * u_nkr
    if a_Kr is None:
        grad_gate_nkr = grad_gate_nkr.sum(-1, keepdim=True)
    grad_logit_nkr = grad_gate_nkr.mul_(gate_nkr * (1 - gate_nkr))
    if wants_b:
        grad_b_Kr = sum_by_patch(grad_logit_nkr)
    grad_u_nkr = grad_phi_nkr.mul_(gate_nkr)
    if a_Kr is not None:
        grad_u_nkr.addcmul_(grad_logit_nkr, torch.embedding(a_Kr, idx_nk))
        if wants_a:
            grad_a_Kr = sum_by_patch(grad_logit_nkr.mul_(u_nkr))
    if not past_decoders:
        return grad_z_nd, grad_P_Kd, grad_V_dr, grad_a_Kr, grad_b_Kr, grad_U_Krd, None, None
    grad_u_nr = grad_u_nkr.sum(1)

    grad_w_nk = scale * grad_scaled_w_nk + (0 if grad_w_nk is None else grad_w_nk)  # (3)
    slope_nk = w_nk if nobody_n1 is None else (w_nk + nobody_n1).masked_fill(w_nk == 0, 0)  # of (B2)
    grad_s_nk = slope_nk * (grad_w_nk - (w_nk * grad_w_nk).sum(-1, keepdim=True))
    if grad_confidence_n is not None:
        grad_s_nk[:, 0] += grad_confidence_n
    if finite_n1 is not None:
        grad_s_nk.masked_fill_(~finite_n1, 0)

    unit_P_Kd = P_Kd * column_K.unsqueeze(1)  # (1)
    if wants_z:
        grad_z_nd = F.embedding_bag(idx_nk, unit_P_Kd, mode="sum", per_sample_weights=grad_s_nk)
        if routing == "cosine":
            along_z_n1 = (grad_s_nk * s_nk).sum(-1, keepdim=True) * temperature**2 * row_n1
            grad_z_nd.addcmul_(z_nd, along_z_n1, value=-1)
        grad_z_nd *= row_n1  # last: for tiny tokens, its square would overflow
        grad_z_nd.addmm_(grad_u_nr, V_dr.T)  # (4)
    if wants_P:
        grad_dot_p = (grad_s_nk * row_n1).flatten().index_select(0, order_p)
        tokens_p = order_p // top_k
        grad_P_Kd = F.embedding_bag(tokens_p, z_nd, start_K, mode="sum", per_sample_weights=grad_dot_p)
        grad_P_Kd -= (grad_P_Kd * unit_P_Kd).sum(-1, keepdim=True) * unit_P_Kd
        grad_P_Kd *= column_K.unsqueeze(1)
    if wants_V:
        grad_V_dr = z_nd.T @ grad_u_nr
    return grad_z_nd, grad_P_Kd, grad_V_dr, grad_a_Kr, grad_b_Kr, grad_U_Krd, None, None


@torch.library.custom_op("attractor::grouped_decode", mutates_args=())
def grouped_decode(code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> Tensor:
    return sum_decode(code_nkq, U_Kqd, idx_nk)


@torch.library.custom_op("attractor::grouped_decode_backward", mutates_args=())
def grouped_decode_backward(
    grad_nd: Tensor, code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor
) -> tuple[Tensor, Tensor]:
    return decode_backward(grad_nd, code_nkq, U_Kqd, *by_patch(idx_nk, len(U_Kqd)))


@grouped_decode.register_fake
def _(code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> Tensor:
    return code_nkq.new_empty(code_nkq.shape[0], U_Kqd.shape[-1])


@grouped_decode_backward.register_fake
def _(grad_nd: Tensor, code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(code_nkq, memory_format=torch.contiguous_format), torch.empty_like(U_Kqd)


class _GroupedDecode(torch.autograd.Function):
    """Reverse mode to any order; forward mode is an error, never a silent zero."""

    @staticmethod
    def forward(code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> Tensor:
        return grouped_decode(code_nkq, U_Kqd, idx_nk)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_nd: Tensor) -> tuple[Tensor, Tensor, None]:
        code_nkq, U_Kqd, idx_nk = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True, as above
            return *reference.decode_backward(grad_nd, code_nkq, U_Kqd, idx_nk), None
        return *grouped_decode_backward(grad_nd.contiguous(), code_nkq, U_Kqd, idx_nk), None


def decode(code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> Tensor:
    device = code_nkq.device.type
    if torch.is_autocast_enabled(device):  # autocast does not know our operator: do what it does for a matmul
        dtype = torch.get_autocast_dtype(device)
        code_nkq, U_Kqd = code_nkq.to(dtype), U_Kqd.to(dtype)
    return _GroupedDecode.apply(code_nkq, U_Kqd, idx_nk)


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
    keep_nk: Tensor | None = None,
    radius_K: Tensor | None = None,
    sparse: bool = False,
    **variants: Any,
) -> APNOutput:
    """`reference.apn`, as fast as these tensors allow."""
    tensors = (z_nd, P_Km, V_dr, a_Kr, b_Kr, U_Kqd)
    options: dict[str, Any] = {"top_k": top_k, "temperature": temperature, "routing": routing}
    eager = all(x is None or type(x) in (Tensor, nn.Parameter) for x in tensors) and not (
        torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
    )
    if not eager or P_Km.dim() == 3 or not has_own_backward(tensors, variants, scale):
        select = best_patches if eager else reference.best_patches  # ours looks at values
        options |= {"scale": scale, "keep_nk": keep_nk, "radius_K": radius_K, "sparse": sparse, **variants}
        # of product prototypes: so many patches that hardly two pairs share one
        sum_up = partial(gathered.decode, sparse=sparse) if P_Km.dim() == 3 else decode
        return reference.apn(*tensors, **options, select=select, decode=sum_up)
    options["scale"] = float(scale)  # the layer writes its factor in place, maybe before our backward pass
    if radius_K is not None and keep_nk is None:
        return _only_inside(tensors, radius_K, options)
    return _run(tensors, keep_nk, radius_K, options)


def _only_inside(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor],
    radius_K: Tensor,
    options: dict[str, Any],
) -> APNOutput:
    """With radii: compute the few tokens that enter a basin; the update of all others is zero."""
    z_nd, P_Kd, top_k = tensors[0], tensors[1], options["top_k"]
    with torch.no_grad():
        block = max(1, CACHE // 4 // (len(P_Kd) * z_nd.itemsize))
        router = {"temperature": options["temperature"], "routing": options["routing"]}
        scores = (reference.scores(z, P_Kd, **router) for z in z_nd.split(block))  # one block at a time
        best_n = torch.cat([reference.margins(s, radius_K, options["temperature"]).amax(1) for s in scores])
        rows_t = (~(best_n <= 0) | ~reference.finite_rows(z_nd).squeeze(1)).nonzero().squeeze(1)  # NaN too
    if len(rows_t) == len(z_nd):
        return _run(tensors, None, radius_K, options)
    few = _run((z_nd.index_select(0, rows_t), *tensors[1:]), None, radius_K, options)
    zeros_nk = z_nd.new_zeros(len(z_nd), top_k)
    return APNOutput(
        update=torch.zeros_like(z_nd).index_copy(0, rows_t, few.update),
        indices=torch.full_like(zeros_nk, -1, dtype=few.indices.dtype).index_copy(0, rows_t, few.indices),
        weights=zeros_nk.index_copy(0, rows_t, few.weights),
        confidence=best_n.index_copy(0, rows_t, few.confidence),
    )


def _run(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor],
    keep_nk: Tensor | None,
    radius_K: Tensor | None,
    options: dict[str, Any],
) -> APNOutput:
    z_nd, P_Km, V_dr, *_ = tensors
    forward_mode = forward_ad._current_level >= 0  # which `_Patches` refuses
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if wanted or forward_mode:
        return APNOutput(*_Patches.apply(options, *tensors, keep_nk, radius_K))
    multiply_adds = z_nd.numel() * (len(P_Km) + V_dr.shape[1] * (options["top_k"] + 1))
    small = multiply_adds < 2**24 and may_set_threads()
    with one_thread() if small else nullcontext():  # to wake another one takes longer
        return forward(*tensors, keep_nk, radius_K, **options)[0]


def has_own_backward(
    tensors: Iterable[Tensor | None], variants: dict[str, Any], scale: float | Tensor
) -> bool:
    """No variant but the scalar gate, one precision that is at least the router's, a constant scale."""
    dtypes = {x.dtype for x in tensors if x is not None}
    return (
        len(dtypes) == 1
        and dtypes <= {torch.float32, torch.float64}
        and all(x is None for x in variants.values())
        and not torch.is_autocast_enabled("cpu")
        and not (isinstance(scale, Tensor) and (scale.dim() > 0 or scale.requires_grad))
    )
