"""Do the kernels of product prototypes choose what float64 chooses, the same in every run, and how fast?

    PYTHONPATH=. python benchmarks/product_check.py --result results/product-check.json

For 64, 256 and 1024 rows a codebook in bfloat16 and float32, on one GPU, in about a minute. The kernels run
even where the layer would not take them yet (product.MOST_ROWS). A choice is wrong if its score in float64
is not the score that belongs there: of two that are equal but for rounding, either is right. Between equal
runs other tokens pass, so that memory that nobody wrote shows. Times are medians over replays of a CUDA graph
and, as "eager", of launches one by one, over those of the dense FFN (4 d) in the same run.

Of each is said, too, what choosing and gathering move of the memory's bandwidth: every decoder that somebody
chose is counted once. Then flat prototypes, whose kernel loads its tiles alike; 256 of the same rank are what
many patches are compared with. Every row is written as soon as it is known.
"""

import argparse
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tune import kernel_times

from attractor import APN
from attractor.bench import H200_BANDWIDTH, TOLERANCE, relative_rms, seconds
from attractor.config import GPTConfig
from attractor.model import MLP
from attractor.ops import product, reference
from attractor.results import write_result

TOP_K = 4
SCORE_TOLERANCE = 1e-4
"""Of a score: a cosine over a temperature of 0.07, added up in float32."""
FLAT = [(256, 32, 4), (64, 128, 16), (256, 8, 4)]
"""Patches, rank and active patches: the paper's layer, the benchmark's, and few of the rank of many."""
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    dim: int = 384
    tokens: int = 16384
    rank: int = 8
    runs: int = 20
    device: str = "cuda"


def product_layer(sizes: Sizes, rows: int, dtype: torch.dtype) -> APN:
    """Gradients of a million decoders are sparse: dense ones are as large as the bank."""
    torch.manual_seed(0)
    options = {"num_patches": rows**2, "rank": sizes.rank, "top_k": TOP_K, "sparse_gradients": rows > 512}
    return APN(sizes.dim, **options, prototypes="product", backend="triton", device=sizes.device, dtype=dtype)


def tokens_of(sizes: Sizes, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator(sizes.device).manual_seed(seed)
    return torch.randn(sizes.tokens, sizes.dim, device=sizes.device, generator=generator).to(dtype)


def exact_gradients(layer: APN, x: Tensor, upstream: Tensor, indices: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The update and its gradients in float64, by the equations, for the patches that were selected."""
    used, place = indices.unique(return_inverse=True)
    bank = [layer.gate_slope[used], layer.gate_bias[used], layer.decoder[used]]
    inputs = (x, layer.codebooks, layer.encoder, *bank)
    z, codebooks, encoder, slope, bias, decoder = (t.detach().double().requires_grad_() for t in inputs)
    half = reference.half_scores(z, codebooks, temperature=layer.config.temperature, routing="cosine")
    weights = reference.pair_scores(half, indices).softmax(-1)
    code = (z @ encoder)[:, None]
    update = 0
    for slot in range(TOP_K):  # one after the other: all at once are gigabytes
        rows = place[:, slot : slot + 1]
        phi = code * torch.sigmoid(slope[rows] * code + bias[rows]) * weights[:, slot, None, None]
        update = update + torch.einsum("nkr,nkrd->nd", phi, decoder[rows])
    gradients = torch.autograd.grad(update, [z, codebooks, encoder, slope, bias, decoder], upstream.double())
    return update.detach(), list(gradients)


def wrong_choices(layer: APN, x: Tensor, indices: Tensor) -> int:
    """Tokens with a patch whose score in float64 is not the score of its place among the best."""
    options = {"temperature": layer.config.temperature, "routing": layer.config.routing}
    if layer.codebooks is not None:
        half = reference.half_scores(x.double(), layer.codebooks.double(), **options)
        tops = [scores.topk(min(TOP_K, scores.shape[-1])).values for scores in half]
        best = (tops[0][:, :, None] + tops[1][:, None, :]).flatten(1).topk(indices.shape[1]).values
        chosen = reference.pair_scores(half, indices.clamp(min=0).long())
    else:
        scores = reference.scores(x.double(), layer.prototypes.double(), **options)
        best = scores.topk(indices.shape[1]).values
        chosen = scores.gather(1, indices.clamp(min=0).long())
    is_wrong = ((chosen - best).abs() > SCORE_TOLERANCE) | (indices < 0)
    twice = (indices.sort(1).values.diff(dim=1) == 0).any(1)
    return int((is_wrong.any(1) | twice).sum())


def step(layer: nn.Module, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """Indices, weights, update and gradients of the tokens and of every parameter."""
    x = x.detach().requires_grad_()
    update, stats = layer(x, return_stats=True)
    gradients = torch.autograd.grad(update, [x, *layer.parameters()], upstream)
    parts = [part for g in gradients for part in ((g._indices(), g._values()) if g.is_sparse else (g,))]
    return [stats.indices, stats.weights.detach(), update.detach(), *parts]


def differing_runs(layer: nn.Module, x: Tensor, other: Tensor, upstream: Tensor, runs: int) -> int:
    """Of so many runs after the first, those with another bit anywhere."""
    first = step(layer, x, upstream)
    differ = 0
    for _ in range(runs):
        step(layer, other, upstream)
        again = step(layer, x, upstream)
        differ += not all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return differ


def errors(layer: APN, x: Tensor, upstream: Tensor) -> Row:
    """Relative RMS differences from float64 for the patches that were chosen, and how many were wrong."""
    tokens = x.detach().clone().requires_grad_()
    update, stats = layer(tokens, return_stats=True)
    indices, used = stats.indices, stats.indices.clamp(min=0).unique()
    parameters = [layer.codebooks, layer.encoder, layer.gate_slope, layer.gate_bias, layer.decoder]
    found = list(torch.autograd.grad(update, [tokens, *parameters], upstream))
    for number in range(3, 6):
        gradient = found[number]
        found[number] = gradient.coalesce().values() if gradient.is_sparse else gradient[used]
    wrong = wrong_choices(layer, x, indices)
    if (indices < 0).any():
        return {"wrong_choices": wrong}
    exact, gradients = exact_gradients(layer, x, upstream, indices)
    half = reference.half_scores(
        x.double(), layer.codebooks.double(), temperature=layer.config.temperature, routing="cosine"
    )
    weights = reference.pair_scores(half, indices.long()).softmax(-1)
    pairs = [(update, exact), (stats.weights, weights), *zip(found, gradients, strict=True)]
    names = ("update", "weights", "x", "codebooks", "encoder", "gate_slope", "gate_bias", "decoder")
    by_name = {name: relative_rms(*pair) for name, pair in zip(names, pairs, strict=True)}
    return {"wrong_choices": wrong, "mismatch": max(by_name.values()), "errors": by_name}


def microseconds(run: Callable[[], Any], device: str, *, graph: bool) -> float | None:
    """None if it cannot run, or a graph of it cannot be recorded."""
    try:
        return 1e6 * seconds(run, torch.device(device), graph=graph)
    except RuntimeError as error:
        print(f"  not timed ({graph=}): {str(error).splitlines()[0]}", flush=True)
        return None


def times(module: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, float | None]:
    x = x.detach().requires_grad_()
    leaves, device = [x, *module.parameters()], x.device.type

    def forward() -> Tensor:
        with torch.no_grad():
            return module(x)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(module(x), leaves, upstream)

    runs = {"forward": forward, "forward_backward": both}
    found = {name: microseconds(run, device, graph=True) for name, run in runs.items()}
    return found | {f"eager_{name}": microseconds(run, device, graph=False) for name, run in runs.items()}


def dense_times(sizes: Sizes, dtype: torch.dtype) -> dict[str, float | None]:
    ffn = MLP(GPTConfig(dim=sizes.dim, num_heads=1)).to(sizes.device, dtype)
    x = tokens_of(sizes, dtype, 1)
    return times(ffn, x, torch.randn_like(x))


def over(spent: dict[str, float | None], dense: dict[str, float | None]) -> dict[str, float | None]:
    pairs = {name: (time, dense[name]) for name, time in spent.items()}
    return {name: time / other if time and other else None for name, (time, other) in pairs.items()}


def check(sizes: Sizes, rows: int, dtype: torch.dtype, dense: dict[str, float | None]) -> Row:
    layer = product_layer(sizes, rows, dtype)
    x, other = tokens_of(sizes, dtype, 1), tokens_of(sizes, dtype, 2)
    upstream = tokens_of(sizes, dtype, 3)
    row: Row = {"rows": rows, "dtype": str(dtype), "sparse_gradients": layer.config.sparse_gradients}
    row |= errors(layer, x, upstream)
    row["differing_runs"] = differing_runs(layer, x, other, upstream, sizes.runs)
    row["microseconds"] = times(layer, x, upstream)
    row["over_dense"] = over(row["microseconds"], dense)
    if sizes.device == "cuda":
        row["kernels"] = kernel_times(lambda: step(layer, x, upstream))
        row |= share_of_memory(
            sizes, row["kernels"], int(layer(x, return_stats=True)[1].indices.unique().numel())
        )
    row["right"] = (
        row["wrong_choices"] == 0
        and row["differing_runs"] == 0
        and row.get("mismatch", math.inf) <= TOLERANCE[dtype]
    )
    return row


def share_of_memory(sizes: Sizes, kernels: dict[str, float], chosen: int) -> Row:
    """Bytes that choosing and gathering must move, over their time, as a share of the bandwidth; bfloat16."""
    tokens = sizes.tokens * sizes.dim * 2
    gathered = chosen * sizes.rank * sizes.dim * 2 + tokens + sizes.tokens * (8 * TOP_K + 4 * sizes.rank)
    choosing = kernels["lengths"] + kernels["route_pairs"]
    second = H200_BANDWIDTH / 1e6
    return {
        "chosen_patches": chosen,
        "share_of_gathering": gathered / kernels["gather_decode"] / second,
        "share_with_choosing": (gathered + tokens) / (kernels["gather_decode"] + choosing) / second,
    }


def check_flat(
    sizes: Sizes,
    patches: int,
    rank: int,
    top_k: int,
    dense: dict[str, float | None],
    dtype: torch.dtype = torch.bfloat16,
) -> Row:
    torch.manual_seed(0)
    options = {"num_patches": patches, "rank": rank, "top_k": top_k, "backend": "triton"}
    layer = APN(sizes.dim, **options, device=sizes.device, dtype=dtype)
    x, other, upstream = (tokens_of(sizes, dtype, seed) for seed in (1, 2, 3))
    wrong = wrong_choices(layer, x, step(layer, x, upstream)[0])
    differing = differing_runs(layer, x, other, upstream, sizes.runs)
    row: Row = {"flat": patches, "rank": rank, "wrong_choices": wrong, "differing_runs": differing}
    row["microseconds"] = times(layer, x, upstream)
    return row | {"over_dense": over(row["microseconds"], dense)}


def shown(number: float | None) -> str:
    return f"{'-':>9}" if number is None else f"{number:9.2f}" if number >= 0.01 else f"{number:9.1e}"


def table(result: Row) -> None:
    heads = ("wrong", "differ", "mismatch", "f", "f+b", "eager f", "eager f+b")
    print("choices that are wrong, runs that differ, error; times over the dense FFN")
    print(" " * 20 + "".join(f"{head:>9}" for head in heads) + "   right")
    for row in result["checks"]:
        ratios = [row.get("mismatch"), *row["over_dense"].values()]
        name = f"{row['rows']} rows {row['dtype'].removeprefix('torch.')}"
        counts = f"{row['wrong_choices']:9}{row['differing_runs']:9}"
        print(f"{name:>20}{counts}{''.join(map(shown, ratios))}   {row['right']}")
        if "share_of_gathering" in row:
            shares = f"{row['share_of_gathering']:.2f} and {row['share_with_choosing']:.2f}"
            print(f"{'':20}   of the bandwidth: {shares} with choosing, {row['chosen_patches']} patches")
    for row in result["flat"]:
        name = f"flat {row['flat']}, rank {row['rank']}"
        counts = f"{row['wrong_choices']:9}{row['differing_runs']:9}"
        print(f"{name:>20}{counts}{'':9}{''.join(map(shown, row['over_dense'].values()))}")


def run_all(sizes: Sizes, rows: list[int], path: Path) -> Row:
    started = time.monotonic()
    result: Row = {"experiment": "product-check", "sizes": dataclasses.asdict(sizes), "top_k": TOP_K}
    result |= {"dense": {}, "checks": [], "flat": []}

    def note(kind: str, row: Row) -> None:
        result[kind].append(row | {"after_seconds": time.monotonic() - started})
        write_result(path, result)
        print(f"{time.monotonic() - started:5.0f} s  {kind}: {row}", flush=True)
        if sizes.device == "cuda":
            torch.cuda.empty_cache()

    for dtype in (torch.bfloat16, torch.float32) if sizes.device == "cuda" else (torch.float32,):
        dense = result["dense"][str(dtype)] = dense_times(sizes, dtype)
        for count in rows:
            note("checks", check(sizes, count, dtype, dense))
    if sizes.device != "cuda":  # bfloat16 is not for the interpreter
        return result
    for patches, rank, top_k in FLAT:
        note("flat", check_flat(sizes, patches, rank, top_k, result["dense"][str(torch.bfloat16)]))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024], help="of a codebook")
    given = parser.parse_args()
    product.MOST_ROWS = max(given.rows)  # whatever the layer would do by itself
    table(run_all(Sizes(), given.rows, given.result))


if __name__ == "__main__":
    main()
