"""Kernels that are launched at the cost of a few PyTorch operators."""

from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

ONES = ((1, 1, 1), (1, 1), (1,), ())
"""What a grid of so many axes lacks."""


def kind(x: Any) -> Any:
    """All that Triton compiles an argument for: type and alignment of tensors, what divides a number."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() & 15 == 0
    if type(x) is int:
        return x == 1, x & 15 == 0, -(1 << 31) <= x < 1 << 31
    return type(x)


class Quick:
    """A kernel of Triton that is called as before, `kernel[grid](...)`, at less expense for the CPU.

    With every launch Triton binds and looks at every argument, makes a key of text, and compares the kernel's
    global variables. Here that is done once for each kind of arguments, and what was compiled is launched.
    A profiler that hooks into Triton's own launches sees the first launch of each kind alone.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: dict[Any, tuple[Any, ...]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *given: Any, **constants: Any) -> None:
        """`given` are the arguments that are no constants, in order; constants and options go by name."""
        device = torch.cuda.current_device()
        key = (device, *map(kind, given), *constants, *constants.values())
        found = self.launches.get(key)
        if found is None:
            compiled = self.kernel[grid](*given, **constants)
            names = self.kernel.arg_names[len(given) :]
            rest = [constants[name] for name in names]
            self.launches[key] = (compiled, rest)  # the whole of it: what nothing holds is unloaded
            return
        compiled, rest = found
        stream = triton.runtime.driver.active.get_current_stream(device)
        compiled.run(
            *grid,
            *ONES[len(grid)],
            stream,
            compiled.function,
            compiled.packed_metadata,
            *(None, None, None),  # no metadata for hooks, and no hooks
            *given,
            *rest,
        )


def quick(kernel: Any) -> Any:
    """A kernel for the GPU, launched quickly; as it is where Triton interprets it."""
    return Quick(kernel) if isinstance(kernel, triton.runtime.JITFunction) else kernel
