"""Decoders gathered row by row: for so many patches that hardly two pairs of a batch share one.

Nothing is as large as all decoders but their gradient, and with `sparse` not even that: it has a row for each
patch that some token selected. Runs on any device and in any precision, and adds up in the same order every
time. Shape suffixes as in reference.py; t patches that were selected, p = n * k pairs in the order of their
patches.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attractor.ops import reference

BLOCK = 2**24
"""Numbers of gathered decoders at a time."""


def decode(code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor, sparse: bool = False) -> Tensor:
    """sum_k code[n, k] @ U[idx[n, k]] -> (n, d)"""
    device = code_nkq.device.type
    if torch.is_autocast_enabled(device):  # which does not know our operators; a whole bank is not converted
        code_nkq = code_nkq.to(torch.get_autocast_dtype(device))
    return _Gathered.apply(code_nkq, U_Kqd, idx_nk, sparse)


@torch.library.custom_op("attractor::gathered_decode", mutates_args=())
def gathered_decode(code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> Tensor:
    row_nkq = idx_nk.unsqueeze(-1) * U_Kqd.shape[1] + torch.arange(U_Kqd.shape[1], device=idx_nk.device)
    code, bank = code_nkq.flatten(1).to(U_Kqd.dtype), U_Kqd.detach().flatten(0, 1)
    update_nd = F.embedding_bag(row_nkq.flatten(1), bank, mode="sum", per_sample_weights=code)
    return update_nd.to(code_nkq.dtype, copy=False)


@gathered_decode.register_fake
def _(code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> Tensor:
    return code_nkq.new_empty(code_nkq.shape[0], U_Kqd.shape[-1])


class Rows(NamedTuple):
    """Some rows of a gradient; the others are zero."""

    patches: Tensor  # (t), ascending
    values: Tensor  # (t, ...)

    def sparse(self, like: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(
            self.patches[None], self.values, like.shape, is_coalesced=True, check_invariants=False
        )

    def dense(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like).index_copy_(0, self.patches, self.values)


@torch.library.custom_op("attractor::gathered_code_gradient", mutates_args=())
def code_gradient(grad_nd: Tensor, code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> Tensor:
    block = max(1, BLOCK // (idx_nk.shape[1] * U_Kqd[0].numel()))
    pieces = zip(grad_nd.split(block), idx_nk.split(block), strict=True)
    found = [torch.einsum("nd,nkqd->nkq", grad, U_Kqd[idx].to(grad.dtype)) for grad, idx in pieces]
    return torch.cat(found).to(code_nkq.dtype)


@code_gradient.register_fake
def _(grad_nd: Tensor, code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> Tensor:
    return torch.empty_like(code_nkq, memory_format=torch.contiguous_format)


def bank_rows(grad_nd: Tensor, code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> Rows:
    """Pairs are sorted by patch, and the sums of each patch's are taken in that order."""
    sorted_p, order_p = idx_nk.flatten().sort(stable=True)
    patches_t, count_t = sorted_p.unique_consecutive(return_counts=True)
    start_t, token_p = count_t.cumsum(0) - count_t, order_p // idx_nk.shape[1]
    grad_nd = reference.routing_precision(grad_nd)
    code_qp = code_nkq.flatten(0, 1).to(grad_nd.dtype)[order_p].T.contiguous()
    values_tqd = U_Kqd.new_empty(len(patches_t), *U_Kqd.shape[1:])
    for channel, code_p in enumerate(code_qp):
        values_tqd[:, channel] = F.embedding_bag(
            token_p, grad_nd, start_t, mode="sum", per_sample_weights=code_p
        )
    return Rows(patches_t, values_tqd)


@torch.library.custom_op("attractor::gathered_bank_gradient", mutates_args=())
def bank_gradient(grad_nd: Tensor, code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> Tensor:
    return bank_rows(grad_nd, code_nkq, U_Kqd, idx_nk).dense(U_Kqd)


@bank_gradient.register_fake
def _(grad_nd: Tensor, code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> Tensor:
    return torch.empty_like(U_Kqd)


class _Gathered(torch.autograd.Function):
    """Reverse mode to any order, with dense gradients beyond the first; forward mode is an error."""

    @staticmethod
    def forward(code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor, sparse: bool) -> Tensor:
        return gathered_decode(code_nkq, U_Kqd, idx_nk)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.sparse = inputs[3]

    @staticmethod
    def backward(ctx: Any, grad_nd: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            return *reference.decode_backward(grad_nd, *tensors), None, None
        grad_nd, grad_code, grad_U = grad_nd.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            grad_code = code_gradient(grad_nd, *tensors)
        if ctx.needs_input_grad[1]:
            U_Kqd = tensors[1]
            grad_U = (
                bank_rows(grad_nd, *tensors).sparse(U_Kqd) if ctx.sparse else bank_gradient(grad_nd, *tensors)
            )
        return grad_code, grad_U, None, None
