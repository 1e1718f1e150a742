"""Block sizes of the kernels for flat prototypes, tried on one GPU: right, the same bits twice, and how fast?

    PYTHONPATH=. python benchmarks/tune.py --result results/tune-h200.json                   five minutes
    PYTHONPATH=. python benchmarks/tune.py --result tune.json --sizes 2 --jobs 4             one shape alone

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
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from attractor import APN, bench
from attractor.bench import Size
from attractor.ops import launch
from attractor.results import write_result

Tried = dict[str, dict[str, int]]  # kernel -> sizes; "plan" is of several
SIZES = (
    Size(384, 16384, 256, 128, 16),
    Size(384, 16384, 64, 128, 16),
    Size(384, 16384, 256, 32, 4),
    Size(768, 16384, 256, 64, 4),
    Size(2048, 4096, 256, 128, 4),
)
TOGETHER = {
    "route": ("route",),
    "place": ("place",),
    "decode": ("decode",),
    "combine": ("combine",),
    "decode_backward": ("decode_backward",),
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
    return {group: shape.blocks(group)}


def variants(size: Size) -> list[tuple[str, Tried]]:
    """What is tried of each group of kernels."""
    wide, many = size.rank > 64, size.tokens * size.top_k // size.num_patches >= 1024
    found: list[tuple[str, Tried]] = []

    def add(group: str, names: str, rows: list[tuple[int, ...]], **more: dict[str, int]) -> None:
        found.extend((group, {group: blocks, **more}) for blocks in some(names, rows))

    rows: list[tuple[int, ...]] = [(128, 8, 2), (64, 8, 2), (64, 4, 2), (64, 8, 3), (128, 8, 4)]
    add("route", "BN num_warps num_stages", rows)
    add("place", "num_warps", [(1,), (2,)])
    add("combine", "BN BD num_warps", [(4, 128, 4), (4, 512, 4), (2, 512, 4), (16, 128, 4), (8, 256, 8)])
    token_rows: list[tuple[int, ...]] = [(16, 64, 4), (32, 64, 4), (32, 64, 8), (32, 128, 8), (64, 64, 8)]
    add("token_backward", "BN BD num_warps", [*token_rows, (64, 32, 8), (64, 32, 4), (128, 32, 8)])
    side_rows: list[tuple[int, ...]] = [(64, 128, 128, 4, 5), (128, 128, 128, 8, 3), (64, 64, 128, 4, 5)]
    add(
        "token_products",
        "BN BW BD num_warps num_stages",
        [*side_rows, (32, 128, 128, 4, 5), (64, 64, 64, 4, 5)],
    )
    rows = [(64, 8, 3, 0), (64, 8, 2, 0), (64, 8, 2, 128), (128, 8, 2, 0), (64, 4, 3, 0)]
    add("decode", "BD num_warps num_stages maxnreg", rows)
    rows = [(64, 8, 3, 0), (64, 8, 2, 0), (128, 8, 2, 0), (32, 8, 4, 0), (64, 8, 3, 128)]
    rows += [] if wide else [(64, 4, 3, 0), (64, 4, 4, 0), (128, 4, 3, 0)]
    add("decode_backward", "BD num_warps num_stages maxnreg", rows)
    for segment in (512, 2048) if many else (512,):
        rows = [(64, 128, 4, 3), (64, 128, 4, 5), (64, 128, 4, 7), (32, 128, 4, 5), (32, 128, 4, 7)]
        rows += [(64, 128, 8, 5), (64, 256, 8, 3), (64, 256, 8, 5), (128, 128, 8, 3), (128, 128, 8, 5)]
        add("bank_backward", "BM BD num_warps num_stages", rows, plan={"SEGMENT": segment})
    if many:
        for segment in (1024, 4096):
            add("bank_backward", "BM BD num_warps num_stages", [(64, 128, 4, 5)], plan={"SEGMENT": segment})
    return found


@lru_cache(1)
def layer_of(size: Size) -> tuple[APN, Tensor, Tensor]:
    layer = bench.make("triton", size, DEVICE, DTYPE)
    assert isinstance(layer, APN)
    generator = torch.Generator(DEVICE).manual_seed(1)
    x, upstream = (torch.randn(size.tokens, size.dim, device=DEVICE, generator=generator) for _ in range(2))
    return layer, x.to(DTYPE).requires_grad_(), upstream.to(DTYPE)


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
    return found


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
            times = kernel_times(lambda: step(layer, x, upstream))
        except Exception as error:
            say("failed:", json.dumps(launch.TRIED), str(error)[:200])
            continue
        for group, tried in chosen.items():
            found[group].append((sum(times[name] for name in TOGETHER[group]), json.dumps(tried)))
    use({})
    best: Tried = {}
    say(size)
    for group, rows in found.items():
        rows.sort()
        best |= json.loads(rows[0][1])
        now = next((spent for spent, text in rows if text == json.dumps(today(size, group))), math.nan)
        shown = "; ".join(f"{spent:.1f} {text}" for spent, text in rows[:3])
        print(f"    {group:16s} today {now:6.1f}, best {shown}", flush=True)
    return found, best


def final(size: Size, best: Tried) -> dict[str, Any]:
    """What is chosen today and the best of all, checked and timed."""
    rows: dict[str, Any] = {}
    for name, tried in (("today", {}), ("best", best)):
        use(tried)
        layer, x, upstream = layer_of(size)
        try:
            rows[name] = checked(size) | both_ways(layer, x, upstream)
            rows[name]["kernels"] = kernel_times(lambda: step(layer, x, upstream))  # noqa: B023
        except Exception as error:  # what ran alone may not run together
            rows[name] = {"problem": str(error)[:300]}
    use({})
    return rows


def compiled(sizes: list[Size], jobs: int) -> list[tuple[Size, str, Tried]]:
    """All variants that work."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        build_all(pool, [(size, "", {}) for size in sizes])  # what all have in common, once
        tasks = [(size, group, tried) for size in sizes for group, tried in variants(size)]
        good = build_all(pool, tasks)
    say(f"compiled {len(good)} of {len(tasks)} variants")
    return good


def table(result: dict[str, Any]) -> None:
    """Times over those of dense."""
    heads = ("forward", "forward_backward", "eager_forward", "eager_forward_backward")
    print("over dense: graph forward, graph both, eager forward, eager both; checks")
    for name, rows in result["final"].items():
        dense = result["dense"][name]
        print(f"{name}   dense {dense['forward_backward']:.0f} us")
        for kind, row in rows.items():
            ratios = [row[h] / dense[h] if row.get(h) and dense[h] else math.nan for h in heads]
            checks = {check: row.get(check) for check in ("mismatch", "differing_runs", "problem")}
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
    given = parser.parse_args()
    sizes = [SIZES[number] for number in given.sizes]
    good = compiled(sizes, given.jobs)
    result: dict[str, Any] = {"experiment": "tune", "dense": {}, "tuned": {}, "final": {}}
    for size in sizes:
        _, x, upstream = layer_of(size)
        result["dense"][str(size)] = both_ways(bench.make("dense", size, DEVICE, DTYPE), x, upstream)
        mine = [(group, today(size, group)) for group in TOGETHER]
        found, best = tune(size, mine + [(group, tried) for where, group, tried in good if where == size])
        result["tuned"][str(size)] = {"microseconds": found, "best": best}
        result["final"][str(size)] = final(size, best)
        write_result(given.result, result)
    table(result)


if __name__ == "__main__":
    main()
