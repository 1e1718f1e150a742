"""One function, several ways to compute it. `apn(..., backend=...)` is the only place that chooses."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attractor.config import check_choice
from attractor.ops import fused, gathered, grouped, reference
from attractor.ops.reference import (
    APNOutput,
    balance_loss,
    finite_rows,
    is_exporting,
    routing_precision,
    scores,
    unit,
    without_autocast,
)

__all__ = [
    "BACKENDS",
    "APNOutput",
    "apn",
    "balance_loss",
    "check_backend",
    "finite_rows",
    "refuse_symbols",
    "routing_precision",
    "scores",
    "unit",
    "without_autocast",
]

BACKENDS: dict[str, Callable[..., APNOutput]] = {
    "reference": reference.apn,
    "grouped": grouped.apn,
    "triton": fused.apn,
}


def refuse_symbols(x: object) -> None:
    """A ValueError for what torch.fx.symbolic_trace gives a module in place of a tensor."""
    if isinstance(x, torch.fx.Proxy):
        raise ValueError(
            "torch.fx.symbolic_trace cannot follow this: what it does depends on shapes. torch.export can, "
            "or a Tracer of torch.fx whose is_leaf_module is true for it"
        )


def check_backend(backend: str) -> None:
    check_choice("backend", backend, ("auto", *BACKENDS))


def apn(z_nd: Tensor, *tensors: Tensor | None, backend: str = "auto", **options: Any) -> APNOutput:
    """`reference.apn` by the asked backend; "auto" is the fastest that can run these tensors.

    The reference alone knows every derivative: it is what torch.func transforms get. With `stats=False`
    nobody wants more than the update, and the rest may be None.
    """
    check_backend(backend)
    if backend == "auto":
        backend = choose_backend(z_nd.device, z_nd.dtype)
    elif reason := why_not(backend, z_nd.device, z_nd.dtype):
        raise ValueError(f"backend={backend!r} cannot run: {reason}")
    run = BACKENDS[backend]
    if backend != "triton":
        options.pop("stats", None)
    if is_exporting():
        options["sparse"] = False  # what is exported has no gradients
    if options.get("sparse") and backend == "reference":
        options["decode"] = partial(gathered.decode, sparse=True)
    if options.get("sparse") and torch.compiler.is_compiling():
        run = torch.compiler.disable(run)  # which knows no sparse gradients: it calls us outside its graph
    return run(z_nd, *tensors, **options)


def choose_backend(device: torch.device, dtype: torch.dtype) -> str:
    if is_exporting():  # a program that needs none of our operators to run
        return "reference"
    if device.type == "cpu":
        return "reference" if _in_function_transform() else "grouped"
    can_fuse = why_not("triton", device, dtype) is None and not _in_function_transform()
    return "triton" if can_fuse else "reference"


def why_not(backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why a backend cannot run tensors like these; None if it can."""
    if backend == "triton":
        return fused.why_not(device.type, dtype)
    if backend == "grouped" and device.type != "cpu":
        return f"it is for the CPU, and the input is on {device}"
    return None


def _in_function_transform() -> bool:
    """Inside torch.func (grad, jvp, vmap, ...)? There is no public way to ask."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
