"""The paper, equation by equation, without tricks: the ground truth of every other backend.

It gathers one decoder per token and slot, so it is slow and hungry; it is meant to be read and to be right.
Equations are numbered in docs/math.md, which also says what the paper leaves open and what we chose.

Shape suffixes: n tokens, d channels, K patches, k active patches, r code size, q offset rank (r when there
are no offsets), g routing groups, m routing channels (d, or fewer with contextual prototypes; in a grouped
tensor, the channels of one group). Of product prototypes: N = sqrt(K) rows in each codebook, of m = d / 2
channels, and c pairs of rows to choose from.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attractor.ops.rows import rows


class APNOutput(NamedTuple):
    update: Tensor  # (n, d) gamma * sum_i w_i Delta_i; NaN in rows whose input is not finite
    indices: Tensor  # (n, k) integers: the active set, best score first; -1 in rows that are not finite, and,
    # with radii, in slots whose patch has no weight
    weights: Tensor  # (n, k) softmax over the active set; 0 where a slot is dropped or its index is -1
    confidence: Tensor  # (n) max_i s_i, or max_i m_i with radii; NaN in rows whose input is not finite


def unit(x_xm: Tensor) -> Tensor:
    """Norm(x) = x / |x|; Norm(0) = 0 with a zero gradient, where x / max(|x|, eps) would have 1 / eps."""
    return x_xm / lengths(x_xm)


def lengths(x_xm: Tensor) -> Tensor:
    """|x| (..., 1) to divide by: infinite where x = 0, so that quotient and gradient are 0 there."""
    length_x1 = torch.linalg.vector_norm(x_xm, dim=-1, keepdim=True)
    return length_x1.masked_fill(length_x1 == 0, torch.inf)


def finite_rows(z_nd: Tensor) -> Tensor:
    """(n, 1) True where a token may be routed. A squared length that overflows counts as not finite."""
    return routing_precision(z_nd).square().sum(-1, keepdim=True).isfinite()


def routing_precision(x: Tensor) -> Tensor:
    """Which patches a token gets must not depend on bfloat16 rounding: scores are float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


def without_autocast(device_type: str) -> AbstractContextManager:
    if device_type == "meta":  # knows no autocast
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def is_exporting() -> bool:
    """Whether a program is made that must do without our operators, and whose shapes may be free.

    `torch.compiler.is_exporting` says so too, but up to torch 2.12 also of everything that torch.compile
    compiles. The flag behind it does not.
    """
    return torch.compiler._is_exporting_flag


def scores(
    z_nd: Tensor, P_Km: Tensor, *, temperature: float, routing: str, projection_gdm: Tensor | None = None
) -> Tensor:
    """s (n, K), eq. (1): <Norm(z), Norm(p_i)> / tau, or <z, Norm(p_i)> / tau for routing="dot".

    With a projection (contextual prototypes, eq. 9), each group of channels is compared in its own subspace
    and the score is the mean over groups.
    """
    groups = 1 if projection_gdm is None else projection_gdm.shape[0]
    with without_autocast(z_nd.device.type):
        x_ngm = routing_precision(z_nd).unflatten(-1, (groups, -1))
        p_Kgm = routing_precision(P_Km).unflatten(-1, (groups, -1))
        if projection_gdm is not None:
            x_ngm = torch.einsum("ngd,gdm->ngm", x_ngm, routing_precision(projection_gdm))
        if routing == "cosine":
            x_ngm = unit(x_ngm)
        is_short = not is_exporting() and len(z_nd) < P_Km.shape[1]
        if groups == 1 and is_short:  # fewer scores to divide than numbers in prototypes
            return x_ngm[:, 0] @ p_Kgm[:, 0].T / (lengths(p_Kgm[:, 0]).T * temperature)
        return x_ngm.flatten(1) @ unit(p_Kgm).flatten(1).T / (groups * temperature)


def best_patches(s_nK: Tensor, top_k: int) -> Tensor:
    """(2) K(h) = TopK(s, k), best first; a stable sort, because ties must go to the lower index everywhere"""
    if top_k == 1:  # the first of equal ones
        return s_nK.argmax(dim=-1, keepdim=True)
    if torch.onnx.is_in_onnx_export():  # where a sort is not stable, and this takes the lower of equal ones
        return s_nK.topk(top_k, dim=-1).indices
    return s_nK.argsort(dim=-1, descending=True, stable=True)[:, :top_k]


def half_scores(z_nd: Tensor, C_2Nm: Tensor, *, temperature: float, routing: str) -> Tensor:
    """(2, n, N), eq. (P2): what each half of a token and each row of that half's codebook add to a score."""
    with without_autocast(z_nd.device.type):
        x_nd = routing_precision(z_nd)
        if routing == "cosine":
            x_nd = unit(x_nd)
        x_2nm = x_nd.unflatten(-1, (2, -1)).transpose(0, 1)
        return x_2nm @ unit(routing_precision(C_2Nm)).mT / (math.sqrt(2) * temperature)


def best_pairs(
    half_2nN: Tensor, top_k: int, select: Callable[[Tensor, int], Tensor] = best_patches
) -> Tensor:
    """(P3) TopK over all N * N pairs, of which (i, j) is patch i N + j, from the best k of each half.

    The pair of the p-th best row of one half and the q-th best of the other is beaten by p q - 1 pairs of
    rows at least as good, so it matters only if p q <= k.
    """
    N = half_2nN.shape[-1]
    most = min(top_k, N)
    i_nk, j_nk = (select(s_nN, most) for s_nN in half_2nN)
    pairs = [i_nk[:, p, None] * N + j_nk[:, : top_k // (p + 1)] for p in range(most)]
    patch_nc = torch.cat(pairs, 1).sort(dim=-1).values  # so that a stable selection gives ties to the lower
    return patch_nc.gather(1, best_patches(pair_scores(half_2nN, patch_nc), top_k))


def pair_scores(half_2nN: Tensor, patch_nk: Tensor) -> Tensor:
    """(P2) s_ij = a_i + b_j of these patches"""
    N = half_2nN.shape[-1]
    return half_2nN[0].gather(1, patch_nk // N) + half_2nN[1].gather(1, patch_nk % N)


def margins(s_nK: Tensor, radius_K: Tensor | None, temperature: float) -> Tensor:
    """m (n, K), eq. (B1): by how much the score exceeds the edge of the basin; s itself without radii."""
    return s_nK if radius_K is None else s_nK - routing_precision(radius_K) / temperature


def basin_weights(m_nk: Tensor) -> Tensor:
    """(B2) softmax over the patches entered and nobody: (e^m_i - 1) / (1 + sum_j (e^m_j - 1)), 0 if m_i <= 0.

    Continuous at the edge, where m = 0. Everything is divided by e^top, so that nothing overflows.
    """
    m_nk = m_nk.masked_fill(m_nk <= 0, 0)  # NaN stays: a broken prototype must show
    top_n1 = m_nk.detach().amax(-1, keepdim=True)
    e_nk = (m_nk - top_n1).exp() * -torch.expm1(-m_nk)
    return e_nk / (e_nk.sum(-1, keepdim=True) + (-top_n1).exp())


def gathered_decode(code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> Tensor:
    """sum_k code[n, k] @ U[idx[n, k]] -> (n, d)"""
    return torch.einsum("nkq,nkqd->nd", code_nkq, rows(U_Kqd, idx_nk))


def decode_backward(
    grad_nd: Tensor, code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `gathered_decode` that can be differentiated again."""
    grad_code_nkq = torch.einsum("nd,nkqd->nkq", grad_nd, U_Kqd[idx_nk])
    grad_U_pqd = torch.einsum("nd,nkq->nkqd", grad_nd, code_nkq).flatten(0, 1)
    return grad_code_nkq, torch.zeros_like(U_Kqd).index_add(0, idx_nk.flatten(), grad_U_pqd)


def apn(
    z_nd: Tensor,  # tokens, layer-normalised by the block or by the layer
    P_Km: Tensor,  # prototypes; or, of pairs, two codebooks (2, sqrt(K), d / 2)
    V_dr: Tensor,  # encoder
    a_Kr: Tensor | None,  # gate slopes; None for the scalar gate
    b_Kr: Tensor,  # gate biases; (K, 1) for the scalar gate
    U_Kqd: Tensor,  # decoders, transposed: Delta_i = phi_i @ U[i]; the outer factor of the offsets if shared
    *,
    top_k: int,
    temperature: float,
    scale: float | Tensor,
    routing: str,
    U0_rd: Tensor | None = None,  # base decoder of the shared variant
    A_Krq: Tensor | None = None,  # inner factor of its patch offsets
    projection_gdm: Tensor | None = None,  # routing subspaces of contextual prototypes
    keep_nk: Tensor | None = None,  # patch dropout: which slots stay; at least one per row
    radius_K: Tensor | None = None,  # basins: the score, times tau, that a patch must exceed; not learned
    sparse: bool = False,  # gradients of a, b and U with the rows of the active sets alone
    select: Callable[[Tensor, int], Tensor] = best_patches,
    decode: Callable[[Tensor, Tensor, Tensor], Tensor] = gathered_decode,
) -> APNOutput:
    finite_n1 = finite_rows(z_nd)
    z_nd = z_nd.masked_fill(~finite_n1, 0)  # a bad row must reach no other row and no gradient

    if P_Km.dim() == 3:
        half_2nN = half_scores(z_nd, P_Km, temperature=temperature, routing=routing)
        idx_nk = best_pairs(half_2nN.detach(), top_k, select)
        s_nk = pair_scores(half_2nN, idx_nk)
    else:
        s_nK = scores(z_nd, P_Km, temperature=temperature, routing=routing, projection_gdm=projection_gdm)
        s_nK = margins(s_nK, radius_K, temperature)
        idx_nk = select(s_nK.detach(), top_k)  # (2)
        s_nk = s_nK.gather(1, idx_nk)
    confidence_n = s_nk[:, 0] if radius_K is None else s_nk[:, 0].detach()
    if keep_nk is not None:
        s_nk = s_nk.masked_fill(~keep_nk, -torch.inf)  # a softmax over what is left renormalises
    w_nk = s_nk.softmax(-1) if radius_K is None else basin_weights(s_nk)  # (3), or (B2)

    u_nr = z_nd @ V_dr  # (4) u = V^T z
    u_nkr = u_nr.unsqueeze(1)
    slope_nkr = 0 if a_Kr is None else rows(a_Kr, idx_nk, sparse=sparse) * u_nkr
    # (5), or (7) with one scalar per patch
    phi_nkr = u_nkr * torch.sigmoid(slope_nkr + rows(b_Kr, idx_nk, sparse=sparse))

    phi_nkr = (w_nk.unsqueeze(-1) * phi_nkr).to(U_Kqd.dtype)  # w_i scales the small side
    code_nkq = phi_nkr if A_Krq is None else torch.einsum("nkr,nkrq->nkq", phi_nkr, rows(A_Krq, idx_nk))
    update_nd = decode(code_nkq, U_Kqd, idx_nk)  # (6) sum_i w_i U_i phi_i
    if U0_rd is not None:  # (8) U_i = U_0 + offset_i, and U_0 is the same for all
        update_nd = update_nd + phi_nkr.sum(1) @ U0_rd

    chosen_nk = finite_n1 if radius_K is None else finite_n1 & (w_nk != 0)
    return APNOutput(
        update=(scale * update_nd).masked_fill(~finite_n1, torch.nan),
        indices=idx_nk.masked_fill(~chosen_nk, -1),
        weights=w_nk.masked_fill(~finite_n1, 0),
        confidence=confidence_n.masked_fill(~finite_n1.squeeze(1), torch.nan),
    )


def differentiable_backward(
    inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None], **options: Any
) -> tuple[Tensor | None, ...]:
    """Gradients of `apn` that can be differentiated again, for backends whose own cannot."""
    # Fresh views: if one input was computed from another, only the direct derivative is ours.
    direct: list[Any] = [None if x is None else x.view_as(x) for x in inputs]
    output = apn(*direct[:6], keep_nk=direct[6], radius_K=direct[7], **options)
    used = [(y, grad) for y, grad in zip(output, grads, strict=True) if grad is not None]
    wanted = [x for x in direct if x is not None and x.requires_grad]
    outputs, output_grads = zip(*used, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, output_grads, create_graph=True, allow_unused=True))
    return tuple(next(found) if x is not None and x.requires_grad else None for x in direct)


def balance_loss(
    z_nd: Tensor, P_Km: Tensor, *, temperature: float, routing: str, projection_gdm: Tensor | None = None
) -> Tensor:
    """L_bal, eq. (10): sum_i (u_i - 1/K)^2, u_i the mean over tokens of the softmax over all K scores.

    A count of selections has no gradient; the full softmax has one, and tends to the top-1 count as tau -> 0.
    """
    finite_n1 = finite_rows(z_nd)
    z_nd = z_nd.masked_fill(~finite_n1, 0)
    if P_Km.dim() == 3:  # a softmax over pairs is the product of two
        half_2nN = half_scores(z_nd, P_Km, temperature=temperature, routing=routing)
        first_nN, second_nN = half_2nN.softmax(-1).masked_fill(~finite_n1, 0)
        with without_autocast(z_nd.device.type):
            usage_NN = first_nN.T @ second_nN / finite_n1.sum().clamp(min=1)
        return (usage_NN - 1 / usage_NN.numel()).square().sum()
    s_nK = scores(z_nd, P_Km, temperature=temperature, routing=routing, projection_gdm=projection_gdm)
    share_nK = s_nK.softmax(-1).masked_fill(~finite_n1, 0)
    usage_K = share_nK.sum(0) / finite_n1.sum().clamp(min=1)
    return (usage_K - 1 / P_Km.shape[0]).square().sum()
