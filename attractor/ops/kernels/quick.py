"""Kernels that are launched at the cost of a few PyTorch operators."""

from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from attractor.ops.tapes import recorder

ONES = ((1, 1, 1), (1, 1), (1,), ())
"""What a grid of so many axes lacks."""


class Quick:
    """A kernel of Triton that is called as before, `kernel[grid](...)`, at less expense for the CPU.

    With every launch Triton binds and looks at every argument, makes a key of text, compares the kernel's
    global variables, and asks the driver about every pointer. Here that is done once for each kind of
    arguments, and what was compiled is launched. A profiler that hooks into Triton's own launches sees the
    first launch of each kind alone.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: dict[Any, tuple[Any, ...]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *given: Any, **constants: Any) -> None:
        """`given` are the arguments that are no constants, in order; constants and options go by name."""
        device = torch.cuda.current_device()
        # all that Triton compiles an argument for: type and alignment of tensors, what divides a number
        key: list[Any] = [device, *constants, *constants.values()]
        values: list[Any] = []
        for x in given:
            if isinstance(x, Tensor):
                pointer = x.data_ptr()
                key += (x.dtype, x.is_cuda, pointer & 15 == 0)  # of another device's, Triton complains
                values.append(pointer)
                continue
            values.append(x)
            if type(x) is int:
                key += (x == 1, x & 15 == 0, -(1 << 31) <= x < 1 << 31)
            else:
                key.append(type(x))
        kind = tuple(key)
        found = self.launches.get(kind)
        if found is None:
            compiled = self.kernel[grid](*given, **constants)
            rest = [constants[name] for name in self.kernel.arg_names[len(given) :]]
            # no metadata for hooks, and no hooks; the whole kernel, as what nothing holds is unloaded
            how = (compiled.function, compiled.packed_metadata, None, None, None)
            found = self.launches[kind] = (compiled.run, how, rest, compiled)
        else:
            run, how, rest, _ = found
            stream = triton.runtime.driver.active.get_current_stream(device)
            run(*grid, *ONES[len(grid)], stream, *how, *values, *rest)
        if seen := recorder():
            run, how, rest, _ = found
            seen.launches.append((run, (*grid, *ONES[len(grid)]), how, (*given, *rest)))


def quick(kernel: Any) -> Any:
    """A kernel for the GPU, launched quickly; as it is where Triton interprets it."""
    return Quick(kernel) if isinstance(kernel, triton.runtime.JITFunction) else kernel
