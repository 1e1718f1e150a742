"""One function, several ways to compute it. `apn(..., backend=...)` is the only place that chooses."""

from typing import Any

from attractor.config import check_choice
from attractor.ops import reference
from attractor.ops.reference import APNOutput, balance_loss, finite_rows, scores

__all__ = ["BACKENDS", "APNOutput", "apn", "balance_loss", "check_backend", "finite_rows", "scores"]

BACKENDS = {"reference": reference.apn}


def check_backend(backend: str) -> None:
    check_choice("backend", backend, ("auto", *BACKENDS))


def apn(*tensors: Any, backend: str = "auto", **options: Any) -> APNOutput:
    """`reference.apn` on the asked backend; "auto" takes the fastest one that can run these tensors."""
    check_backend(backend)
    return BACKENDS["reference" if backend == "auto" else backend](*tensors, **options)
