"""`table[index]`, deterministic and compiled safely.

Plain indexing has two faults on the CPU. Its gradient is added with atomics, so the same step gives different
bits each time; an embedding's is not, and is several times faster. And inductor up to torch 2.13 can scatter
either gradient out of bounds when it fuses it into a tiled loop (pytorch issue 191837): so in compiled CPU
code the gather and its gradient are two opaque operators, which inductor calls and does not rewrite.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def rows(table: Tensor, index: Tensor) -> Tensor:
    """table (K, ...) at index (n, k) -> (n, k, ...)"""
    flat = table.flatten(1)
    opaque = torch.compiler.is_compiling() and table.device.type == "cpu"
    taken = take_rows(flat, index) if opaque else F.embedding(index, flat)
    return taken.unflatten(-1, table.shape[1:])


@torch.library.custom_op("attractor::take_rows", mutates_args=())
def take_rows(table: Tensor, index: Tensor) -> Tensor:
    return F.embedding(index, table)


@torch.library.custom_op("attractor::add_rows", mutates_args=())
def add_rows(values: Tensor, index: Tensor, num_rows: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(values, index, num_rows, -1, False)


@take_rows.register_fake
def _(table: Tensor, index: Tensor) -> Tensor:
    return table.new_empty(*index.shape, table.shape[1])


@add_rows.register_fake
def _(values: Tensor, index: Tensor, num_rows: int) -> Tensor:
    return values.new_empty(num_rows, values.shape[-1])


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    table, index = inputs
    ctx.save_for_backward(index)
    ctx.num_rows = table.shape[0]


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    return add_rows(grad, ctx.saved_tensors[0], ctx.num_rows), None


take_rows.register_autograd(_backward, setup_context=_save)
