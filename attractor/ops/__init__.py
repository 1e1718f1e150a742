"""One function, several ways to compute it. `apn(..., backend=...)` is the only place that chooses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attractor.config import check_choice
from attractor.ops import grouped, reference
from attractor.ops.reference import APNOutput, balance_loss, finite_rows, routing_precision, scores

__all__ = [
    "BACKENDS",
    "APNOutput",
    "apn",
    "balance_loss",
    "check_backend",
    "finite_rows",
    "routing_precision",
    "scores",
]

BACKENDS: dict[str, Callable[..., APNOutput]] = {"reference": reference.apn, "grouped": grouped.apn}


def check_backend(backend: str) -> None:
    check_choice("backend", backend, ("auto", *BACKENDS))


def apn(z_nd: Tensor, *tensors: Tensor | None, backend: str = "auto", **options: Any) -> APNOutput:
    """`reference.apn` by the asked backend; "auto" is the fastest that can run these tensors.

    The reference alone knows every derivative: it is what torch.func transforms get.
    """
    check_backend(backend)
    on_cpu = z_nd.device.type == "cpu"
    if backend == "auto":
        backend = "grouped" if on_cpu and not _in_function_transform() else "reference"
    if backend == "grouped" and not on_cpu:
        raise ValueError(f"backend='grouped' runs on the CPU; the input is on {z_nd.device}")
    return BACKENDS[backend](z_nd, *tensors, **options)


def _in_function_transform() -> bool:
    """Inside torch.func (grad, jvp, vmap, ...)? There is no public way to ask."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
