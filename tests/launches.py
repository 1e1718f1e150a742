"""Launches by Triton and by `quick`, side by side, of all that a step of training launches. Nothing runs.

    python tests/launches.py

prints "N launches of M kinds are the same", or ends with an error. TRITON_INTERPRET must not be set.
"""

from types import SimpleNamespace
from typing import Any

import torch
import triton
from shared_memory import flat_step, product_step
from triton.backends.compiler import GPUTarget

from attractor.ops import kernels
from attractor.ops.kernels.quick import Quick

HOOKS = 7
"""Where they stand among what a launch is given: grid, stream, function, metadata twice, hooks, arguments."""
launched: list[tuple[Any, ...]] = []
compiled: list[str] = []


class Compiled:
    """In the place of a kernel that was compiled."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *arguments: Any) -> None:
        hooks = range(HOOKS, HOOKS + 2)  # of profilers, which `quick` does not call
        launched.append((self.name, *(told(x) for n, x in enumerate(arguments) if n not in hooks)))

    def launch_metadata(self, *_: Any) -> None:
        return None


def told(x: Any) -> Any:
    """A tensor is launched as the number of its place, which is another in every run."""
    x = x.data_ptr() if isinstance(x, torch.Tensor) else x
    return "a place in memory" if type(x) is int and x > 1 << 32 else x


def compile_nothing(self: Any, key: str, *arguments: Any) -> Compiled:
    compiled.append(key)
    kernel = Compiled(self.fn.__name__)
    self.device_caches[0][0][key] = kernel
    return kernel


def steps() -> tuple[list[Any], list[str]]:
    launched.clear()
    compiled.clear()
    for dtype in (torch.bfloat16, torch.float32):
        for _ in range(2):
            flat_step(32, dtype, 64)
            product_step(8, dtype, 4096)
    return list(launched), list(compiled)


def main() -> None:
    triton.runtime.JITFunction._do_compile = compile_nothing
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 7,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )
    torch.cuda.current_device = lambda: 0
    quick, kinds = steps()
    for name, kernel in list(vars(kernels).items()):
        if isinstance(kernel, Quick):
            kernel.kernel.device_caches.clear()
            setattr(kernels, name, kernel.kernel)
    plain, their_kinds = steps()
    assert len(plain) > 40
    assert quick == plain
    assert kinds == their_kinds
    print(f"{len(quick)} launches of {len(kinds)} kinds are the same")


if __name__ == "__main__":
    main()
