"""How much shared memory the kernels need, and tiles that are read in two ways: compiled for a GPU that need
not be there, and not run.

    python tests/shared_memory.py 86 256 bfloat16 64           compute capability 8.6, rank 256, 64 patches
    python tests/shared_memory.py 86 256 bfloat16 64 whole     all the way to machine code
    python tests/shared_memory.py 86 256 bfloat16 64 90 128 float32 64         one after the other
    python tests/shared_memory.py 86 8 bfloat16 65536 product                  product prototypes
    python tests/shared_memory.py 90 128 bfloat16 256 autocast                 float32 tokens and prototypes

prints JSON, kernel -> bytes and tiles, a line for each. TRITON_INTERPRET must not be set: the interpreter
has no compiler.
"""

import json
import math
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptx_version_from_options
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from attractor.ops import fused, kernels, launch, product
from attractor.ops.kernels.quick import Quick

MOST = {80: 166_912, 86: 101_376, 90: 232_448}
"""Bytes of shared memory that a block may have, by compute capability (CUDA programming guide)."""
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}
NUMBERS = {bool: "i1", int: "i32", float: "fp32"}
OPTIONS = ("num_warps", "num_stages", "maxnreg")
Launch = tuple[Any, dict[str, Any], dict[str, Any]]  # a kernel, its arguments, its options


class Recorder:
    """Stands in for a kernel, and remembers how it was called."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launched(*positional: Any, **named: Any) -> None:
            options = {name: named.pop(name) for name in OPTIONS if name in named}
            arguments = dict(zip(self.kernel.arg_names, positional, strict=False)) | named
            self.launches.append((self.kernel, arguments, options))

        return launched


def flat_step(rank: int, dtype: torch.dtype, patches: int, tokens: torch.dtype | None = None) -> None:
    dim, top_k = 384, 16 if rank == 128 else 4  # as in results/tune-h200.json
    z, P = (torch.zeros(rows, dim, dtype=tokens or dtype) for rows in (16384, patches))
    a = torch.zeros(patches, rank)
    V, U = torch.zeros(dim, rank, dtype=dtype), torch.zeros(patches, rank, dim, dtype=dtype)
    radius = torch.zeros(patches)  # with basins the kernels do a little more
    options = (top_k, 0.07, 1.0, True, dtype, True)
    update, saved = fused.fused(z, P, V, a, a, U, None, radius, *options)
    tensors = (update, None, None, z, P, V, a, a, U, saved)
    for wants in ([True] * 5, [False, False, False, True, False]):  # all that learns, and decoders alone
        fused.fused_backward(*tensors, top_k, 0.07, 1.0, True, True, tokens or dtype, wants)


def product_step(rank: int, dtype: torch.dtype, patches: int) -> None:
    dim = 768
    z, C = torch.zeros(4096, dim, dtype=dtype), torch.zeros(2, math.isqrt(patches), dim // 2, dtype=dtype)
    # as large as they are said to be, without taking the memory: nothing reads them
    a, U = (
        torch.zeros(1, 1).expand(patches, rank),
        torch.zeros(1, 1, 1, dtype=dtype).expand(patches, rank, dim),
    )
    V = torch.zeros(dim, rank, dtype=dtype)
    product.product_forward(z[:8], C, V, a, a, U, None, 4, 0.07, 1.0, True, dtype, False)  # few tokens
    outputs = product.product_forward(z, C, V, a, a, U, None, 4, 0.07, 1.0, True, dtype, True)
    update, idx, w, confidence, *saved = outputs
    idx.zero_()
    tensors = (z, C, V, a, a, U, idx, w, *saved)
    *_, codes, gates = product.product_backward(update, w, confidence, *tensors, 0.07, 1.0, True, True)
    product.product_bank_gradient(update, idx, codes, gates, a, U, 1.0, True)


def launches_of(step: Callable[..., None], *sizes: Any) -> list[Launch]:
    """What a training step launches; nothing runs."""
    found: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
    real = {name: kernel for name, kernel in vars(kernels).items() if isinstance(kernel, Quick)}
    for name, kernel in real.items():
        setattr(kernels, name, Recorder(kernel.kernel, found))
    step(*sizes)
    for name, kernel in real.items():
        setattr(kernels, name, kernel)
    return found


def source_of(kernel: Any, arguments: dict[str, Any]) -> ASTSource:
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = NUMBERS[type(value)]
    return ASTSource(kernel, signature, constants, attributes)


def shared_memory(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> tuple[int, list[str]]:
    """The bytes, and tiles that are read twice: what `triton.compile` does until it knows the size.

    LLVM and the assembler take longer.
    """
    context, module, chosen = lowered(source, target, options)
    tiles = tiles_read_twice(str(module))
    manager = ir.pass_manager(context)  # from here on, the first steps of the stage "llir"
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager, False)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    version = get_ptx_version_from_options(chosen, target.arch)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, target.arch, version)
    manager.run(module, "shared_memory")
    return int(module.get_int_attr("ttg.shared")), tiles


def tiles_read_twice(text: str) -> list[str]:
    """Pipelined tiles of a kernel that a product still reads when the next are copied, and others read too.

    Triton then counts one buffer too few, and the copy lands in a tile that is being multiplied.
    """
    queue_of: dict[str, str] = {}  # of a tile; a number tells queues of the same name apart
    loaded, multiplied = set(), set()
    for line in text.splitlines():
        if found := re.search(r"(%\w+) = ttg\.local_alloc : \(\) ->", line):
            queue_of[found[1]] = f"{found[1]} ({len(queue_of)})"
        elif found := re.search(r"(%\w+) = ttg\.memdesc_(?:index|trans) (%\w+)", line):
            queue_of[found[1]] = queue_of.get(found[2], "")
        elif found := re.search(r"ttg\.local_load (%\w+)", line):
            loaded.add(queue_of.get(found[1], ""))
        elif found := re.search(r"warp_group_dot_wait ([^{]*)\{pendings = [1-9]", line):
            multiplied |= {queue_of.get(name, "") for name in re.findall(r"%\w+", found[1])}
    return sorted(loaded & multiplied - {""})


def lowered(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The kernel as Triton's own language for GPUs, with its context and the options it took."""
    backend = make_backend(target)
    chosen = backend.parse_options(options | source.parse_options())
    stages: dict[str, Callable[..., Any]] = {}
    backend.add_stages(stages, chosen, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parts = backend.get_codegen_implementation(chosen), backend.get_module_map(), context
    module, metadata = source.make_ir(target, chosen, *parts), {}
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, metadata)
    return context, module, chosen


def needs_of(
    step: Callable[..., None], capability: int, rank: int, dtype: str, patches: int, whole: bool
) -> dict[str, tuple[int, list[str]]]:
    """Of each kernel that a step launches: the most bytes, and the tiles that are read twice."""
    launch.little_shared_memory = lambda: MOST[capability] < launch.LITTLE
    target = GPUTarget("cuda", capability, 32)
    needs: dict[str, tuple[int, list[str]]] = {}
    for kernel, arguments, options in launches_of(step, rank, getattr(torch, dtype), patches):
        source, name = source_of(kernel, arguments), kernel.__name__
        size, tiles = shared_memory(source, target, options)
        if whole:
            size = int(triton.compile(source, target=target, options=options).metadata.shared)
        most, others = needs.get(name, (0, []))
        needs[name] = max(size, most), others + tiles
    return needs


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")  # what needs the most
    words = [word for word in sys.argv[1:] if word not in ("whole", "product", "autocast")]
    step = product_step if "product" in sys.argv else flat_step
    step = partial(step, tokens=torch.float32) if "autocast" in sys.argv else step
    for start in range(0, len(words), 4):
        capability, rank, dtype, patches = words[start : start + 4]
        print(
            json.dumps(needs_of(step, int(capability), int(rank), dtype, int(patches), "whole" in sys.argv))
        )
