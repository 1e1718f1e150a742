"""What the kernels of a layer must move and compute, beside the time that they took: a table in Markdown.

    PYTHONPATH=. python benchmarks/roofline.py results/tune-h200.json

prints the tables of docs/performance.md from the result of benchmarks/tune.py. Every tensor is counted once
as read and once as written, however often a kernel gathers its rows: what is gathered again comes from the
cache. The floor is the larger of bytes at 4.3 TB/s and multiply-adds of bfloat16 at 790 TFLOP/s.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attractor.bench import H200_BANDWIDTH, H200_FLOPS
from attractor.ops.launch import CHUNK

SHOWN = ("d=384 tokens=16384 K=256 r=32 k=4", "d=384 tokens=16384 K=256 r=128 k=16")
HALF, FULL = 2, 4  # bytes of a number


def work(
    d: int, n: int, K: int, r: int, k: int, apart: bool
) -> Iterator[tuple[tuple[str, ...], float, float]]:
    """Kernels that go together, the bytes they move and the floating-point operations of their products.

    Where gradients of gates are kernels of their own (`apart`), what passes between them is read twice and
    written twice, and codes have one gradient for each token.
    """
    pairs, width = n * k, r + K
    tokens, codes = n * d * HALF, n * r * FULL
    prototypes, encoder, decoders = K * d * HALF, d * r * HALF, K * r * d * HALF
    of_pairs, one_each = pairs * r * HALF, pairs * FULL
    histogram = K * pairs // CHUNK * FULL
    yield ("lengths",), tokens + prototypes + n * FULL + histogram, 0
    yield ("route",), tokens + prototypes + encoder + codes + 3 * one_each, 2 * n * d * width
    yield ("scan_chunks", "make_plan", "place"), 3 * histogram + 2 * one_each, 0
    yield ("decode",), codes + decoders + 2 * one_each + pairs * d * HALF, 2 * pairs * r * d
    yield ("combine",), pairs * d * HALF + tokens, 0
    yield (
        ("decode_backward", "pair_products", "code_backward", "gate_backward"),  # the first, or the others
        tokens + codes + decoders + 3 * one_each + (4 if apart else 2) * of_pairs,
        2 * pairs * r * d,
    )
    yield (
        ("token_backward",),
        (0 if apart else of_pairs) + 4 * one_each + 2 * tokens + prototypes + encoder + n * width * HALF,
        2 * n * d * width,
    )
    yield (
        ("token_products", "add_products"),
        tokens + n * width * HALF + prototypes + encoder,
        2 * n * d * width,
    )
    yield ("bank_backward", "sum_parts"), of_pairs + one_each + tokens + decoders, 2 * pairs * r * d


def table(result: dict[str, Any], name: str) -> list[str]:
    """Lines of Markdown for a shape; times are of the sizes that are chosen."""
    times = result["final"][name]["today"]["kernels"]
    lines = ["| kernels | MB | GFLOP | floor, µs | µs | share |", "|---|---|---|---|---|---|"]
    floors = spent = 0.0
    for kernels, moved, flops in work(*map(int, re.findall(r"\d+", name)), "gate_backward" in times):
        kernels = tuple(kernel for kernel in kernels if kernel in times)
        took = sum(times[kernel] for kernel in kernels)
        floor = 1e6 * max(moved / H200_BANDWIDTH, flops / H200_FLOPS)
        floors, spent = floors + floor, spent + took
        names = ", ".join(f"`{kernel}`" for kernel in kernels)
        columns = (f"{moved / 1e6:.0f}", f"{flops / 1e9:.1f}", f"{floor:.1f}", f"{took:.1f}")
        lines.append(f"| {names} | {' | '.join(columns)} | {floor / took:.2f} |")
    return [*lines, f"| all | | | {floors:.0f} | {spent:.0f} | {floors / spent:.2f} |"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    result = json.loads(parser.parse_args().result.read_text())
    for name in SHOWN:
        print("\n".join([f"\n{name}\n", *table(result, name)]))


if __name__ == "__main__":
    main()
