"""`table[index]`, deterministic and compiled safely.

Plain indexing has two faults on the CPU. Its gradient is added with atomics, so the same step gives different
bits each time; an embedding's is not, and is several times faster. And inductor up to torch 2.13 can scatter
either gradient out of bounds when it fuses it into a tiled loop (pytorch issue 191837): so in compiled CPU
code the gradient is an opaque operator, which inductor calls and does not rewrite.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def rows(table: Tensor, index: Tensor, *, sparse: bool = False) -> Tensor:
    """table (K, ...) at index (n, k) -> (n, k, ...); `sparse`: the gradient has those rows alone"""
    if sparse:  # without a view, which has no sparse gradient
        return F.embedding(index, table, sparse=True)
    flat = table.flatten(1)
    hide_gradient = torch.compiler.is_compiling() and table.device.type == "cpu"
    taken = _Rows.apply(flat, index) if hide_gradient else F.embedding(index, flat)
    return taken.unflatten(-1, table.shape[1:])


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(table: Tensor, index: Tensor) -> Tensor:
        return F.embedding(index, table)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        table, index = inputs
        ctx.save_for_backward(index)
        ctx.num_rows = table.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return add_rows(grad.contiguous(), ctx.saved_tensors[0], ctx.num_rows), None


@torch.library.custom_op("attractor::add_rows", mutates_args=())
def add_rows(values: Tensor, index: Tensor, num_rows: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(values, index, num_rows, -1, False)


@add_rows.register_fake
def _(values: Tensor, index: Tensor, num_rows: int) -> Tensor:
    return values.new_empty(num_rows, values.shape[-1])
