"""Block sizes of the kernels for flat prototypes, tried on one GPU: right, the same bits twice, and how fast?

    PYTHONPATH=. python benchmarks/tune.py --result tune.json                                two minutes
    PYTHONPATH=. python benchmarks/tune.py --result tune.json --sizes 2 --jobs 4             one shape alone
    PYTHONPATH=. python benchmarks/tune.py --result tune.json --sizes 2 --no-variants    what is taken today

Every size that is tried is first compiled, by several processes at once, and those that fail are left out. A
run then tries one size of every kernel, and the profiler says how long each took. The best of each are
checked against float64 and timed together, beside what `Shape.blocks` chooses today and the dense FFN. What
is better belongs into `Shape.blocks`, and the result into results/: tests/test_tuned_sizes.py compares them.
"""

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from attractor import APN, bench
from attractor.bench import Size
from attractor.ops import launch
from attractor.ops.tapes import Tape, Taped
from attractor.results import write_result

Tried = dict[str, dict[str, int]]  # kernel -> sizes; "plan" is of several


class Mixed(Size):
    """A layer and tokens of float32 under autocast, as the trainer has them."""

    def __str__(self) -> str:
        return f"{super().__str__()} autocast"


SIZES = (
    Size(384, 16384, 256, 32, 4),
    Size(768, 16384, 256, 64, 4),
    Size(2048, 4096, 256, 128, 4),
    Size(384, 16384, 256, 128, 8),
    Size(384, 16384, 256, 128, 16),
    Size(384, 16384, 64, 128, 16),
    Size(384, 16384, 1024, 32, 4),
    Size(384, 16384, 4096, 32, 4),
    Size(1536, 16384, 48, 128, 8),
    Mixed(384, 16384, 256, 32, 4),
    Mixed(384, 16384, 256, 128, 8),
)
TOGETHER = {
    "route": ("route",),
    "place": ("place",),
    "decode": ("decode",),
    "combine": ("combine",),
    "decode_backward": ("decode_backward", "pair_products", "code_backward", "gate_backward"),
    "token_backward": ("token_backward",),
    "token_products": ("token_products", "add_products"),
    "bank_backward": ("bank_backward", "sum_parts"),
}
"""What is tried, and the kernels whose time it changes."""
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
BEFORE = time.monotonic()


def say(*words: Any) -> None:
    print(f"{time.monotonic() - BEFORE:5.0f} s ", *words, flush=True)


def some(names: str, rows: list[tuple[int, ...]]) -> Iterator[dict[str, int]]:
    """{"BD": 64, "num_warps": 8} for some("BD num_warps", [(64, 8)]). 0 is left out."""
    for row in rows:
        yield {name: value for name, value in zip(names.split(), row, strict=True) if value}


def today(size: Size, group: str) -> Tried:
    shape = launch.Shape(size.tokens, size.dim, size.num_patches, size.top_k, size.rank, DTYPE)
    if group == "decode_backward" and shape.apart:
        return {
            kernel: shape.blocks(kernel) for kernel in ("pair_products", "code_backward", "gate_backward")
        }
    reads_tokens = group in ("route", "token_backward", "token_products")
    return {group: shape.blocks(group, not (reads_tokens and isinstance(size, Mixed)))}


def variants(size: Size) -> list[tuple[str, Tried]]:
    """What is tried of each group of kernels."""
    found: list[tuple[str, Tried]] = []

    def add(group: str, names: str, rows: list[tuple[int, ...]], others: Tried | None = None) -> None:
        found.extend((group, {group: blocks} | (others or {})) for blocks in some(names, rows))

    many, wide = size.num_patches > launch.DENSE_PATCHES, size.rank > 64
    if isinstance(size, Mixed):  # the other kernels have what they have without autocast
        add("route", "BN BK BD num_warps num_stages", MIXED_ROUTE)
        add("token_backward", "BN BD num_warps num_stages", TOKENS)
        add("token_products", "BW BN BD num_warps num_stages", MIXED_PRODUCTS)
        return found
    add("route", "BN BK BD num_warps num_stages", MANY_ROUTE if many else ROUTE)
    add("token_backward", "BN BD num_warps num_stages", MANY_TOKENS if many else TOKENS)
    add("decode", "BD num_warps num_stages maxnreg", WIDE_DECODE if wide else DECODE)
    if size.rank > 32 and not many:
        found.append(("decode_backward", {"decode_backward": {}}))  # codes and gates in one kernel
        products = list(some("BM BD num_warps num_stages", PRODUCTS))
        gates = list(some("BR num_warps", GATES))
        both = [(one, gates[0]) for one in products] + [(products[0], one) for one in gates[1:]]
        found += [("decode_backward", {"pair_products": one, "gate_backward": two}) for one, two in both]
        for segment in (512, 2048):
            found.append(("bank_backward", {"plan": {"SEGMENT": segment}}))
    else:
        add("decode_backward", "BD num_warps num_stages", [(64, 4, 4), (128, 4, 3), (64, 2, 4), (64, 1, 4)])
    add("combine", "BN BD num_warps", [(4, 512, 4), (4, 128, 4)])
    add("token_products", "BW BN BD num_warps num_stages", TOKEN_PRODUCTS)
    add("bank_backward", "BM BD num_warps num_stages", FEW_BANK if many else BANK)
    return found


ROUTE = [(128, 256, 32, 8, 4), (128, 256, 64, 8, 2), (64, 256, 64, 4, 3), (64, 256, 64, 8, 3)]
MANY_ROUTE = [(32, 128, 64, 4, 3), (64, 128, 64, 4, 4), (128, 128, 64, 8, 3)]
MIXED_ROUTE = [(128, 256, 32, 8, 2), (64, 256, 32, 4, 3), (128, 256, 16, 8, 4)]
TOKENS = [
    *((64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2), (32, 64, 4, 2), (128, 64, 8, 2), (64, 64, 8, 2)),
    *((16, 64, 4, 3), (32, 64, 8, 2), (16, 128, 4, 2)),
]
MANY_TOKENS = [(32, 64, 4, 2), (16, 64, 4, 2), (16, 256, 4, 2), (64, 64, 8, 2)]
DECODE = [(64, 4, 4, 0), (32, 4, 4, 0), (128, 4, 3, 0), (64, 2, 4, 0), (64, 8, 3, 0)]
WIDE_DECODE = [(64, 8, 2, 64), (32, 8, 3, 64), (32, 8, 2, 64), (64, 8, 3, 64), (128, 8, 2, 0), (32, 4, 4, 0)]
PRODUCTS = [(128, 64, 8, 3), (64, 64, 4, 3), (128, 32, 8, 5), (256, 64, 8, 2)]
GATES = [(16, 2), (8, 1), (4, 1), (8, 2), (16, 4)]
TOKEN_PRODUCTS = [(64, 128, 64, 4, 4), (64, 64, 128, 4, 5), (128, 64, 128, 4, 5)]
MIXED_PRODUCTS = [(128, 32, 128, 4, 5), (64, 32, 128, 8, 5), (128, 64, 64, 4, 3)]
BANK = [(32, 128, 4, 2), (32, 128, 4, 5), (32, 256, 4, 3), (64, 128, 4, 4), (16, 128, 4, 6)]
FEW_BANK = [(16, 128, 2, 3), (16, 64, 1, 3), (16, 64, 2, 4), (32, 64, 4, 4)]


@lru_cache(1)
def layer_of(size: Size) -> tuple[APN, Tensor, Tensor]:
    dtype = torch.float32 if isinstance(size, Mixed) else DTYPE
    layer = bench.make("triton", size, DEVICE, dtype)
    assert isinstance(layer, APN)
    generator = torch.Generator(DEVICE).manual_seed(1)
    x, upstream = (torch.randn(size.tokens, size.dim, device=DEVICE, generator=generator) for _ in range(2))
    return layer, x.to(dtype).requires_grad_(), upstream.to(DTYPE)


def mixed(size: Size) -> torch.autocast:
    return torch.autocast("cuda", DTYPE, enabled=isinstance(size, Mixed), cache_enabled=False)


def step(layer: nn.Module, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """The update and all gradients."""
    update = layer(x)
    return [update.detach(), *torch.autograd.grad(update, [x, *layer.parameters()], upstream)]


def use(tried: Tried) -> None:
    launch.TRIED.clear()
    launch.TRIED.update(tried)


def build(size: Size, tried: Tried) -> str:
    """Compiled and run once, in a process of its own; the disk keeps the result. Says what went wrong."""
    use(tried)
    try:
        with mixed(size):
            step(*layer_of(size))
        torch.cuda.synchronize()
    except Exception as error:  # whatever the compiler says, the others are worth trying
        return f"{type(error).__name__}: {str(error)[:120]}"
    return ""


def build_all(
    pool: ProcessPoolExecutor, tasks: list[tuple[Size, str, Tried]]
) -> list[tuple[Size, str, Tried]]:
    """Those that work."""
    made = [(task, pool.submit(build, task[0], task[2])) for task in tasks]
    good = []
    for task, result in made:
        try:
            problem = result.result()
        except Exception as error:
            problem = f"the process ended: {error}"
        if problem:
            say("left out:", task[0], json.dumps(task[2]), problem)
        else:
            good.append(task)
    return good


def kernel_times(run: Callable[[], Any], times: int = 5) -> dict[str, float]:
    """Microseconds of each kernel in one call."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in seen.key_averages():
        spent = getattr(event, "self_device_time_total", 0) / times
        if spent:
            found[event.key[:60]] = found.get(event.key[:60], 0.0) + spent
    return found


def microseconds(run: Callable[[], Any], *, graph: bool) -> float | None:
    try:
        return 1e6 * bench.seconds(run, DEVICE, graph=graph)
    except RuntimeError as error:
        say("not timed:", str(error).splitlines()[0])
        return None


def both_ways(module: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, float | None]:
    leaves = [x, *module.parameters()]

    def forward() -> Tensor:
        with torch.no_grad():
            return module(x)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(module(x), leaves, upstream)

    found = {}
    for name, run in (("forward", forward), ("forward_backward", both)):
        found[name] = microseconds(run, graph=True)
        found[f"eager_{name}"] = microseconds(run, graph=False)
        found[f"python_{name}"] = host_microseconds(run)
    with torch.autograd.set_multithreading_enabled(False):  # no thread of PyTorch's is waited for
        found["python_one_thread"] = host_microseconds(both)
    return found


def host_microseconds(run: Callable[[], Any]) -> float:
    """How long the CPU is busy with a call, while the GPU waits."""
    spent = []
    for _ in range(41):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        spent.append(time.perf_counter() - begun)
    return 1e6 * median(spent)


def checked(size: Size) -> dict[str, Any]:
    """Against float64 on fewer tokens, and how many of five runs differ."""
    layer, x, upstream = layer_of(size)
    row: dict[str, Any] = {"mismatch": bench.mismatch(layer, size)}
    first = step(layer, x, upstream)
    other = torch.randn_like(x).requires_grad_()
    row["differing_runs"] = 0
    for _ in range(5):
        step(layer, other, upstream)
        again = step(layer, x, upstream)
        row["differing_runs"] += not all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return row


def tune(size: Size, good: list[tuple[str, Tried]]) -> tuple[dict[str, list[tuple[float, str]]], Tried]:
    """Microseconds of every group of kernels for each of its variants, and the best of all."""
    layer, x, upstream = layer_of(size)
    by_group = {group: [tried for name, tried in good if name == group] for group in TOGETHER}
    found: dict[str, list[tuple[float, str]]] = {group: [] for group in TOGETHER}
    for number in range(max(map(len, by_group.values()))):
        chosen = {group: tries[number] for group, tries in by_group.items() if number < len(tries)}
        use({name: sizes for tried in chosen.values() for name, sizes in tried.items()})
        try:
            with mixed(size):
                times = kernel_times(lambda: step(layer, x, upstream))
        except Exception as error:
            say("failed:", json.dumps(launch.TRIED), str(error)[:200])
            continue
        for group, tried in chosen.items():
            found[group].append((sum(times.get(name, 0.0) for name in TOGETHER[group]), json.dumps(tried)))
    use({})
    best: Tried = {}
    say(size)
    for group, rows in found.items():
        rows.sort()
        if not rows:
            continue
        best |= json.loads(rows[0][1])
        now = next((spent for spent, text in rows if text == json.dumps(today(size, group))), math.nan)
        shown = "; ".join(f"{spent:.1f} {text}" for spent, text in rows[:3])
        print(f"    {group:16s} today {now:6.1f}, best {shown}", flush=True)
    return found, best


def final(size: Size, best: Tried) -> dict[str, Any]:
    """What is chosen today and the best of all, checked and timed.

    "plain" is today without launches that are remembered, which is so wherever sizes are tried.
    """
    rows: dict[str, Any] = {}
    wanted: list[Tensor] = []
    for name, tried in (("today", {}), ("plain", {"nothing": {}}), ("best", best)):
        use(tried)
        layer, x, upstream = layer_of(size)
        try:
            with mixed(size):
                rows[name] = checked(size) if name != "plain" else {}
                rows[name] |= both_ways(layer, x, upstream)
                rows[name]["kernels"] = kernel_times(lambda: step(layer, x, upstream))  # noqa: B023
                found = step(layer, x, upstream)
            wanted = wanted or found
            if name == "today":
                tapes = [tape for each in Taped.every for tape in each.tapes.values()]
                known = [tape for tape in tapes if isinstance(tape, Tape)]
                rows[name]["tapes"] = len(known)
            rows[name]["from_today"] = max(
                bench.relative_rms(*pair) for pair in zip(found, wanted, strict=True)
            )
        except Exception as error:  # what ran alone may not run together
            rows[name] = {"problem": str(error)[:300]}
    use({})
    return rows


def compiled(sizes: list[Size], jobs: int, tried: bool) -> list[tuple[Size, str, Tried]]:
    """What is chosen today is compiled, and if others are `tried`, these, too: those that work."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        build_all(pool, [(size, "", {}) for size in sizes])  # what all have in common, once
        tasks = [(size, group, blocks) for size in sizes if tried for group, blocks in variants(size)]
        good = build_all(pool, tasks)
    say(f"compiled {len(good)} of {len(tasks)} variants")
    return good


CHECKS = ("mismatch", "differing_runs", "from_today", "tapes", "problem")


def table(result: dict[str, Any]) -> None:
    """Times over those of dense."""
    heads = ("forward", "forward_backward", "eager_forward", "eager_forward_backward")
    print("over dense: graph forward, both, eager forward, both; us of Python, in one thread; checks")
    for name, rows in result["final"].items():
        dense = result["dense"][name]
        python = "python_forward_backward"
        spent = f"{dense[python]:.0f} of Python, {dense['python_one_thread']:.0f} in one thread"
        print(f"{name}   dense {dense['forward_backward']:.0f} us, {spent}")
        for kind, row in rows.items():
            ratios = [row[h] / dense[h] if row.get(h) and dense[h] else math.nan for h in heads]
            checks = {check: row[check] for check in CHECKS if check in row}
            ratios += [row.get(python, math.nan), row.get("python_one_thread", math.nan)]
            print(f"    {kind:8s}", " ".join(f"{ratio:6.2f}" for ratio in ratios), checks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=list(range(len(SIZES))), help="of SIZES, from 0"
    )
    parser.add_argument("--no-variants", action="store_true", help="only what is chosen today")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="no further shape is begun after these"
    )
    given = parser.parse_args()
    sizes = [SIZES[number] for number in given.sizes]
    good = compiled(sizes, given.jobs, not given.no_variants)
    result: dict[str, Any] = {"experiment": "tune", "dense": {}, "tuned": {}, "final": {}}
    for size in sizes:
        if time.monotonic() - BEFORE > given.seconds:
            say("no time left for", size)
            continue
        try:
            _, x, upstream = layer_of(size)
            with mixed(size):
                dense = bench.make("dense", size, DEVICE, x.dtype)
                result["dense"][str(size)] = both_ways(dense, x, upstream)
            mine = [(group, today(size, group)) for group in TOGETHER]
            found, best = tune(size, mine + [(group, tried) for where, group, tried in good if where == size])
            result["tuned"][str(size)] = {"microseconds": found, "best": best}
            result["final"][str(size)] = final(size, best)
        except Exception as error:  # the other shapes are worth their time
            say("left out:", size, str(error)[:300])
        write_result(given.result, result)
    table(result)


if __name__ == "__main__":
    main()
