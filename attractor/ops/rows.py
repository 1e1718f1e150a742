"""`table[index]`, compiled safely.

Inductor up to torch 2.13 can scatter the gradient of a gather out of bounds when it fuses it into a tiled CPU
loop with several threads: wrong numbers, or a corrupted heap (pytorch issue 191837). In compiled CPU code
the gather and its gradient are therefore two opaque operators, which inductor calls and does not rewrite.
"""

import torch
from torch import Tensor


def rows(table: Tensor, index: Tensor) -> Tensor:
    if torch.compiler.is_compiling() and table.device.type == "cpu":
        return take_rows(table, index)
    return table[index]


@torch.library.custom_op("attractor::take_rows", mutates_args=())
def take_rows(table: Tensor, index: Tensor) -> Tensor:
    return table[index]


@torch.library.custom_op("attractor::add_rows", mutates_args=())
def add_rows(values: Tensor, index: Tensor, num_rows: int) -> Tensor:
    total = values.new_zeros(num_rows, *values.shape[index.dim() :])
    return total.index_put_((index,), values, accumulate=True)


@take_rows.register_fake
def _(table: Tensor, index: Tensor) -> Tensor:
    return table.new_empty(*index.shape, *table.shape[1:])


@add_rows.register_fake
def _(values: Tensor, index: Tensor, num_rows: int) -> Tensor:
    return values.new_empty(num_rows, *values.shape[index.dim() :])


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    table, index = inputs
    ctx.save_for_backward(index)
    ctx.num_rows = table.shape[0]


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    return add_rows(grad, ctx.saved_tensors[0], ctx.num_rows), None


take_rows.register_autograd(_backward, setup_context=_save)
