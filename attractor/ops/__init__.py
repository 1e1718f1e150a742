"""One function, several ways to compute it. `apn(..., backend=...)` is the only place that chooses."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attractor.config import check_choice
from attractor.ops import grouped, reference
from attractor.ops.reference import APNOutput, balance_loss, finite_rows, scores

__all__ = ["BACKENDS", "APNOutput", "apn", "balance_loss", "check_backend", "finite_rows", "scores"]

BACKENDS: dict[str, Callable[..., APNOutput]] = {"reference": reference.apn, "grouped": grouped.apn}


def check_backend(backend: str) -> None:
    check_choice("backend", backend, ("auto", *BACKENDS))


def apn(z_nd: Tensor, *tensors: Tensor | None, backend: str = "auto", **options: Any) -> APNOutput:
    """`reference.apn` by the asked backend; "auto" is the fastest that can run these tensors."""
    check_backend(backend)
    on_cpu = z_nd.device.type == "cpu"
    if backend == "auto":
        backend = "grouped" if on_cpu else "reference"
    if backend == "grouped" and not on_cpu:
        raise ValueError(f"backend='grouped' runs on the CPU; the input is on {z_nd.device}")
    return BACKENDS[backend](z_nd, *tensors, **options)
