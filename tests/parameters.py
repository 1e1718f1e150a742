"""What kernels are given, as `attractor.ops.replay` says and as the machine code has it: compiled, not run.

    python tests/parameters.py

prints "the parameters of N kernels are as they are written", or ends with an error. TRITON_INTERPRET must not
be set: the interpreter has no compiler.
"""

import re

import torch
import triton
from shared_memory import flat_step, launches_of, source_of
from triton.backends.compiler import GPUTarget

from attractor.ops.replay import parameter_types

SOME = ("combine", "lengths", "place", "scan_chunks")  # numbers of both types, and quickly compiled
SIZES = {"u64": "*", "u32": "i32", "f32": "fp32"}


def main() -> None:
    seen = 0
    for kernel, arguments, options in launches_of(flat_step, 32, torch.bfloat16, 64):
        if kernel.__name__ not in SOME:
            continue
        compiled = triton.compile(
            source_of(kernel, arguments), target=GPUTarget("cuda", 90, 32), options=options
        )
        types = parameter_types(compiled, (1, 1, 1))
        assert types is not None, kernel.__name__
        head = compiled.asm["ptx"].split(".entry")[1].split(")")[0]
        *found, scratch, of_profilers = [SIZES[kind] for kind in re.findall(r"\.param \.(\w+)", head)]
        assert scratch == of_profilers == "*"
        written = [kind for kind in types if kind != "constexpr"]
        assert found == ["*" if kind[0] == "*" else kind for kind in written], kernel.__name__
        seen += 1
    print(f"the parameters of {seen} kernels are as they are written")


if __name__ == "__main__":
    main()
