"""Block sizes of the kernels for flat prototypes, tried on one GPU: right, the same bits twice, and how fast?

    PYTHONPATH=. python benchmarks/tune.py --result results/tune.json

Every size that is tried is first compiled, by several processes at once, and those that fail are left out. A
run then tries one size of every kernel, and the profiler says how long each took. The best of each are
checked against float64 and timed together, beside what is chosen today and the dense FFN. With --old FOLDER,
the package in that folder is profiled too, and its outputs and gradients are compared with ours.
"""

import argparse
import cProfile
import json
import math
import multiprocessing
import os
import pstats
import subprocess
import sys
import tempfile
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
from attractor.ops import kernels, launch
from attractor.results import write_result

Tried = dict[str, dict[str, int]]  # kernel -> sizes; "tile" and "plan" are of several
SIZES = (
    Size(384, 16384, 256, 128, 16),
    Size(384, 16384, 64, 128, 16),
    Size(384, 16384, 256, 32, 4),
    Size(768, 16384, 256, 64, 4),
    Size(2048, 4096, 256, 128, 4),
)
EAGER = SIZES[2:]
OTHERS = (("product", 65536, 8, 4), ("product", 4096, 8, 4), ("static", 4096, 32, 4))
"""Prototypes, patches, rank and active patches of layers whose kernels are only profiled."""
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
CALLS = 50  # as many as the queue of launches takes without waiting for the GPU
BEFORE = time.monotonic()


def say(*words: Any) -> None:
    print(f"{time.monotonic() - BEFORE:5.0f} s ", *words, flush=True)


def some(names: str, rows: list[tuple[int, ...]]) -> Iterator[dict[str, int]]:
    """{"BD": 64, "num_warps": 8} for some("BD num_warps", [(64, 8)]). 0 is left out."""
    for row in rows:
        yield {name: value for name, value in zip(names.split(), row, strict=True) if value}


def variants(size: Size) -> dict[str, list[Tried]]:
    """What is tried of each kernel; the first is what is chosen today."""
    wide, many = size.rank > 64, size.tokens * size.top_k // size.num_patches >= 1024
    found: dict[str, list[Tried]] = {group: [{}] for group in TOGETHER}

    def add(group: str, names: str, rows: list[tuple[int, ...]], **more: dict[str, int]) -> None:
        found[group] += [{group: blocks, **more} for blocks in some(names=names, rows=rows)]

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
    for tile in (64, 128, 256) if many else (64, 128):
        rows = [(64, 8, 3, 0), (64, 8, 2, 0), (64, 8, 2, 128), (128, 8, 2, 0), (64, 4, 3, 0)]
        add("decode", "BD num_warps num_stages maxnreg", rows, tile={"BM": tile})
        rows = [(64, 8, 3, 0), (64, 8, 2, 0), (128, 8, 2, 0), (32, 8, 4, 0)]
        rows += [(64, 8, 3, 128)] if tile == 64 else []
        rows += [] if wide else [(64, 4, 3, 0), (64, 4, 4, 0), (128, 4, 3, 0)]
        add("decode_backward", "BD num_warps num_stages maxnreg", rows, tile={"BM": tile})
    for segment in (512, 2048) if many else (512,):
        rows = [(64, 128, 4, 3), (64, 128, 4, 5), (64, 128, 4, 7), (32, 128, 4, 5), (32, 128, 4, 7)]
        rows += [(64, 128, 8, 5), (64, 256, 8, 3), (64, 256, 8, 5), (128, 128, 8, 3), (128, 128, 8, 5)]
        add("bank_backward", "BM BD num_warps num_stages", rows, plan={"SEGMENT": segment})
    if many:
        for segment in (1024, 4096):
            add("bank_backward", "BM BD num_warps num_stages", [(64, 128, 4, 5)], plan={"SEGMENT": segment})
    return found


@lru_cache(1)
def layer_of(size: Size) -> tuple[nn.Module, Tensor, Tensor]:
    layer = bench.make("triton", size, DEVICE, DTYPE)
    generator = torch.Generator(DEVICE).manual_seed(1)
    x, upstream = (torch.randn(size.tokens, size.dim, device=DEVICE, generator=generator) for _ in range(2))
    return layer, x.to(DTYPE).requires_grad_(), upstream.to(DTYPE)


def step(layer: nn.Module, x: Tensor, upstream: Tensor) -> list[Tensor]:
    update, stats = layer(x, return_stats=True)
    gradients = torch.autograd.grad(update, [x, *layer.parameters()], upstream)
    return [stats.indices, update.detach(), *gradients]


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
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(CALLS):
        both()
    found["python_forward_backward"] = 1e6 * (time.perf_counter() - started) / CALLS
    torch.cuda.synchronize()
    return found


def checked(size: Size, old: list[Tensor] | None) -> dict[str, Any]:
    """Against float64 on fewer tokens, against the old package on all, and how many of five runs differ."""
    layer, x, upstream = layer_of(size)
    row: dict[str, Any] = {"mismatch": bench.mismatch(layer, size)}
    first = step(layer, x, upstream)
    other = torch.randn_like(x).requires_grad_()
    row["differing_runs"] = 0
    for _ in range(5):
        step(layer, other, upstream)
        again = step(layer, x, upstream)
        row["differing_runs"] += not all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    if old:
        row["other_choices"] = int((first[0] != old[0].to(DEVICE)).any(-1).sum())
        pairs = zip(first[1:], old[1:], strict=True)
        row["from_old"] = max(bench.relative_rms(ours, theirs.to(DEVICE).double()) for ours, theirs in pairs)
    return row


def tune(size: Size, good: list[tuple[str, Tried]], rounds: int) -> tuple[dict[str, Any], Tried]:
    """Microseconds of every group of kernels for each of its variants, and the best of all."""
    layer, x, upstream = layer_of(size)
    by_group = {group: [tried for name, tried in good if name == group] for group in TOGETHER}
    tiles = sorted({t["tile"]["BM"] for t in by_group["decode"] if "tile" in t})
    table: dict[str, dict[str, list[float]]] = {group: {} for group in TOGETHER}

    def run_with(chosen: dict[str, Tried]) -> None:
        use({name: sizes for tried in chosen.values() for name, sizes in tried.items()})
        try:
            times = kernel_times(lambda: step(layer, x, upstream))
        except Exception as error:
            say("failed:", json.dumps(launch.TRIED), str(error)[:200])
            return
        for group, tried in chosen.items():
            spent = sum(times.get(name, math.nan) for name in TOGETHER[group])
            table[group].setdefault(json.dumps(tried), []).append(spent)

    for _ in range(rounds):
        for tile in (0, *tiles):  # kernels that share a tile are tried together
            tiled = {
                group: [t for t in by_group[group] if t.get("tile", {"BM": 0})["BM"] == tile]
                for group in ("decode", "decode_backward")
            }
            others = {g: by_group[g] for g in by_group if g not in tiled} if tile == 0 else {}
            choices = {group: tries for group, tries in (tiled | others).items() if tries}
            for number in range(max(map(len, choices.values()), default=0)):
                run_with({group: tries[number % len(tries)] for group, tries in choices.items()})
    use({})
    least = {
        group: sorted((min(spent), text) for text, spent in rows.items() if min(spent) == min(spent))
        for group, rows in table.items()
    }
    best: Tried = {}
    for group, rows in least.items():
        if group not in ("decode", "decode_backward") and rows:
            best |= json.loads(rows[0][1])
    by_tile: list[tuple[float, Tried]] = []
    for tile in (0, *tiles):
        ours = [
            next(
                (row for row in least[group] if (json.loads(row[1]).get("tile") or {"BM": 0})["BM"] == tile),
                None,
            )
            for group in ("decode", "decode_backward")
        ]
        if all(ours):
            by_tile.append(
                (sum(r[0] for r in ours), {k: v for r in ours for k, v in json.loads(r[1]).items()})
            )
    if by_tile:
        best |= min(by_tile, key=lambda pair: pair[0])[1]
    return {"microseconds": least, "by_tile": by_tile}, best


def show(size: Size, found: dict[str, Any], best: Tried) -> None:
    say(size)
    for group, rows in found["microseconds"].items():
        today = next((spent for spent, text in rows if text == "{}"), math.nan)
        shown = "; ".join(f"{spent:.1f} {text}" for spent, text in rows[:3])
        print(f"    {group:16s} today {today:6.1f}, best {shown}", flush=True)
    print("    by tile:", [(round(spent, 1), tried.get("tile")) for spent, tried in found["by_tile"]])
    print("    best:", json.dumps(best), flush=True)


def profile_old(folder: Path, sizes: list[Size]) -> None:
    """In a process that has imported the old package: its profile, times and outputs, into `folder`."""
    for size in sizes:
        layer, x, upstream = layer_of(size)
        torch.save([t.cpu() for t in step(layer, x, upstream)], folder / f"{size}.pt")
        while not (folder / f"{size} may start").exists():  # others use the GPU
            time.sleep(0.05)
        times = kernel_times(lambda: step(layer, x, upstream))  # noqa: B023
        row = {"kernels": times, **both_ways(layer, x, upstream)}
        (folder / f"{size}.json").write_text(json.dumps(row))


def plain_launches() -> Callable[[], None]:
    """Kernels are launched by Triton's own code until the function that is returned is called."""
    quick = {name: kernel for name, kernel in vars(kernels).items() if hasattr(kernel, "launches")}
    for name, kernel in quick.items():
        setattr(kernels, name, kernel.kernel)
    return lambda: [setattr(kernels, name, kernel) for name, kernel in quick.items()] and None


def python_costs(size: Size) -> None:
    """Where the time of a call goes before it reaches the driver."""
    layer, x, upstream = layer_of(size)
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):  # so that the profiler sees the backward pass
        step(layer, x, upstream)
        torch.cuda.synchronize()
        profiler.enable()
        for _ in range(CALLS):
            step(layer, x, upstream)
        profiler.disable()
    torch.cuda.synchronize()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(22)


def profile_others() -> dict[str, Any]:
    found = {}
    for prototypes, patches, rank, top_k in OTHERS:
        options = {"num_patches": patches, "rank": rank, "top_k": top_k, "prototypes": prototypes}
        layer = APN(384, **options, backend="triton", device=DEVICE, dtype=DTYPE)
        x = torch.randn(16384, 384, device=DEVICE, dtype=DTYPE, requires_grad=True)
        upstream = torch.randn_like(x)
        times = kernel_times(lambda: step(layer, x, upstream))  # noqa: B023
        found[f"{prototypes} K={patches} r={rank}"] = times
        say(prototypes, patches, "rank", rank, {name[:24]: round(spent, 1) for name, spent in times.items()})
    return found


def run_all(path: Path, budget: float, jobs: int, old: Path | None, sizes: list[Size]) -> None:
    result: dict[str, Any] = {"experiment": "tune", "dense": {}, "old": {}, "tuned": {}, "final": {}}

    def left() -> float:
        return budget - (time.monotonic() - BEFORE)

    def note(kind: str, name: Any, row: Any) -> None:
        result[kind][str(name)] = row
        write_result(path, result)

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        folder = Path(tempfile.mkdtemp())
        olds: dict[Size, subprocess.Popen[bytes]] = {}
        for size in sizes if old else ():
            command = [sys.executable, __file__, "--profile-old", str(folder), "--result", str(path)]
            command += ["--sizes", str(SIZES.index(size))]
            olds[size] = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(old)})
        build_all(pool, [(size, "", {}) for size in sizes])  # what all have in common, once
        say("compiled what is chosen today")
        tasks = [
            (size, g, tried) for size in sizes for g, tries in variants(size).items() for tried in tries[1:]
        ]
        good = build_all(pool, tasks)
    say(f"compiled {len(good)} of {len(tasks)} variants")
    for size, process in olds.items():
        (folder / f"{size} may start").touch()
        say("the old package ended with", process.wait())
    saved: dict[Size, list[Tensor]] = {}
    for size in sizes:
        if (folder / f"{size}.json").exists():
            note("old", size, json.loads((folder / f"{size}.json").read_text()))
            saved[size] = torch.load(folder / f"{size}.pt")
    for size in sizes:
        if left() < 15:
            say("no time for", size)
            continue
        dense = bench.make("dense", size, DEVICE, DTYPE)
        _, x, upstream = layer_of(size)
        note("dense", size, both_ways(dense, x, upstream))
        mine = [(group, {}) for group in TOGETHER] + [(g, tried) for s, g, tried in good if s == size]
        found, best = tune(size, mine, rounds=1)
        note("tuned", size, found | {"best": best})
        show(size, found, best)
        rows = {}
        for name, tried in (("today", {}), ("best", best)):
            use(tried)
            layer, x, upstream = layer_of(size)
            try:
                row = checked(size, saved.get(size)) | both_ways(layer, x, upstream)
                row["kernels"] = kernel_times(lambda: step(layer, x, upstream))  # noqa: B023
            except Exception as error:
                row = {"problem": str(error)[:300]}
            if name == "today" and size in EAGER:
                restore = plain_launches()
                row["plain"] = both_ways(layer, x, upstream)
                restore()
            use({})
            rows[name] = row
            print(f"    {name}:", {k: v for k, v in row.items() if k not in ("kernels", "plain")}, flush=True)
            if "kernels" in row:
                ordered = sorted(row["kernels"].items(), key=lambda pair: -pair[1])
                print("       ", ", ".join(f"{k[:24]} {v:.1f}" for k, v in ordered), flush=True)
        note("final", size, rows)
    if left() > 20:
        result["others"] = profile_others()
    if left() > 5:
        python_costs(EAGER[0])
    write_result(path, result)
    table(result)


def table(result: dict[str, Any]) -> None:
    """Times over those of dense."""
    print("over dense: graph forward, graph both, eager forward, eager both; microseconds of Python; checks")
    for name, rows in result["final"].items():
        dense, old = result["dense"][name], result["old"].get(name)
        lines = {"old": old, **rows, "plain launches": rows["today"].get("plain")}
        print(f"{name}   dense {dense['forward_backward']:.0f} us")
        for kind, row in lines.items():
            if not row or "forward" not in row:
                continue
            heads = ("forward", "forward_backward", "eager_forward", "eager_forward_backward")
            ratios = [row[h] / dense[h] if row[h] and dense[h] else math.nan for h in heads]
            checks = {
                c: row[c] for c in ("mismatch", "differing_runs", "other_choices", "from_old") if c in row
            }
            shown = " ".join(f"{ratio:6.2f}" for ratio in ratios)
            print(f"    {kind:16s}{shown} {row['python_forward_backward']:8.0f}  {checks}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=220)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--old", type=Path, help="a folder with another version of the package")
    parser.add_argument("--profile-old", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(range(len(SIZES))))
    given = parser.parse_args()
    sizes = [SIZES[number] for number in given.sizes]
    if given.profile_old:
        profile_old(given.profile_old, sizes)
        return
    run_all(given.result, given.seconds, given.jobs, given.old, sizes)


if __name__ == "__main__":
    main()
