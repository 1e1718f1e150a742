"""The same function, grouped by patch: sort the (token, slot) pairs by patch and multiply each group at once.

Only the decoding differs from the reference: instead of one gathered decoder per token and slot, each decoder
is read once. It is for the CPU, where a loop over the patches in use costs little. It is deterministic, and
opaque to torch.compile.

Shape suffixes as in reference.py; p = n * k pairs in the order of their patches.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attractor.ops import reference


@torch.library.custom_op("attractor::grouped_decode", mutates_args=())
def grouped_decode(code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> Tensor:
    """sum_k code[n, k] @ U[idx[n, k]] -> (n, d)"""
    n, k, _ = code_nkq.shape
    order_p, groups = _by_patch(idx_nk)
    code_pq = code_nkq.flatten(0, 1)[order_p]
    update_pd = code_nkq.new_empty(n * k, U_Kqd.shape[-1])
    for patch, pairs in groups:
        torch.mm(code_pq[pairs], U_Kqd[patch], out=update_pd[pairs])
    place_p = torch.empty_like(order_p).scatter_(0, order_p, torch.arange(n * k))  # where each pair went
    return update_pd[place_p].unflatten(0, (n, k)).sum(1)


@torch.library.custom_op("attractor::grouped_decode_backward", mutates_args=())
def grouped_decode_backward(
    grad_nd: Tensor, code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor
) -> tuple[Tensor, Tensor]:
    n, k, q = code_nkq.shape
    order_p, groups = _by_patch(idx_nk)
    code_pq, grad_pd = code_nkq.flatten(0, 1)[order_p], grad_nd[order_p // k]
    grad_code_pq, grad_U_Kqd = torch.empty_like(code_pq), torch.zeros_like(U_Kqd)
    for patch, pairs in groups:
        torch.mm(grad_pd[pairs], U_Kqd[patch].T, out=grad_code_pq[pairs])
        torch.mm(code_pq[pairs].T, grad_pd[pairs], out=grad_U_Kqd[patch])
    grad_code_nkq = torch.empty_like(code_pq)
    grad_code_nkq[order_p] = grad_code_pq
    return grad_code_nkq.view(n, k, q), grad_U_Kqd


def _by_patch(idx_nk: Tensor) -> tuple[Tensor, list[tuple[int, slice]]]:
    """The order that brings pairs of one patch together, and (patch, its stretch) for patches in use."""
    sorted_p, order_p = idx_nk.flatten().sort(stable=True)
    patches, counts = sorted_p.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0).tolist()
    stretches = [slice(start, end) for start, end in pairwise([0, *ends])]
    return order_p, list(zip(patches.tolist(), stretches, strict=True))


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
        if (
            torch.is_grad_enabled() and not torch.compiler.is_compiling()
        ):  # create_graph=True: differentiate us
            grad_code_nkq = torch.einsum("nd,nkqd->nkq", grad_nd, U_Kqd[idx_nk])
            grad_U_pqd = torch.einsum("nd,nkq->nkqd", grad_nd, code_nkq).flatten(0, 1)
            return grad_code_nkq, torch.zeros_like(U_Kqd).index_add(0, idx_nk.flatten(), grad_U_pqd), None
        return *grouped_decode_backward(grad_nd.contiguous(), code_nkq, U_Kqd, idx_nk), None


def decode(code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> Tensor:
    device = code_nkq.device.type
    if torch.is_autocast_enabled(device):  # autocast does not know our operator: do what it does for a matmul
        dtype = torch.get_autocast_dtype(device)
        code_nkq, U_Kqd = code_nkq.to(dtype), U_Kqd.to(dtype)
    return _GroupedDecode.apply(code_nkq, U_Kqd, idx_nk)


apn = partial(reference.apn, decode=decode)
