"""Product prototypes on one GPU: up to a million patches, beside 256 flat ones and the dense FFN, in one run.

    python benchmarks/product.py --result results/product-speed.json

Times are medians over replays of a CUDA graph and, as "eager", of launches one by one; bfloat16. A layer
whose indices, output or gradients do not match float64 gets no time. Kernels are timed by torch's profiler;
their bytes are given as a share of what a copy moves in the same run: "bandwidth" counts a patch once,
however many tokens selected it, "delivered" once for each of them, from the cache or not.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from attractor import APN
from attractor.bench import TOLERANCE, Size, mismatch, relative_rms, seconds
from attractor.config import GPTConfig
from attractor.loop import move_rows
from attractor.model import MLP
from attractor.ops import reference
from attractor.results import write_result

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
DIM, TOKENS, TOP_K = 768, 16384, 4
LAYERS = [  # patches, rank, sparse gradients
    (256, 1, False),
    (4096, 1, False),
    (4096, 1, True),
    (65536, 1, False),
    (65536, 1, True),
    (2**20, 1, False),
    (2**20, 1, True),
    (256, 8, False),
    (65536, 8, True),
    (2**20, 8, True),
]
"""256 are flat."""
SHOWN = ("bandwidth", "delivered", "embedding_bag", "eager_optimizer", "few_tokens")
REPEATS = 10
"""Passes that the profiler looks at."""


def layer_of(patches: int, rank: int, sparse: bool) -> APN:
    torch.manual_seed(0)
    kind = "static" if patches == 256 else "product"
    options = {"num_patches": patches, "rank": rank, "top_k": TOP_K, "prototypes": kind}
    return APN(DIM, **options, sparse_gradients=sparse, device=DEVICE, dtype=DTYPE)


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


def wrong_choices(layer: APN, x: Tensor, indices: Tensor, count: int = 128) -> float:
    """The share of some tokens whose patches are not the best of all pairs, by the cosine in float64."""
    half = reference.half_scores(
        x[:count].double(), layer.codebooks.double(), temperature=layer.config.temperature, routing="cosine"
    )
    every = (half[0][:, :, None] + half[1][:, None, :]).flatten(1)
    return float((every.topk(TOP_K).indices != indices[:count]).any(-1).float().mean())


def check(layer: APN, x: Tensor, upstream: Tensor) -> dict[str, float]:
    """The largest relative RMS difference from float64, and how many tokens chose otherwise."""
    if layer.codebooks is None:
        return {"mismatch": mismatch(layer, Size(DIM, TOKENS, layer.num_patches, layer.config.rank, TOP_K))}
    tokens = x.detach().clone().requires_grad_()
    update, stats = layer(tokens, return_stats=True)
    indices = stats.indices
    parameters = [layer.codebooks, layer.encoder, layer.gate_slope, layer.gate_bias, layer.decoder]
    found = list(torch.autograd.grad(update, [tokens, *parameters], upstream))
    used = indices.unique()
    for number, gradient in enumerate(found):
        if number >= 3:
            rows = gradient.coalesce() if gradient.is_sparse else gradient
            touched = rows.indices()[0] if rows.is_sparse else rows.flatten(1).any(1).nonzero()[:, 0]
            assert torch.isin(touched, used).all(), "a patch that nobody selected has a gradient"
            found[number] = rows.values() if rows.is_sparse else rows[used]
    exact, gradients = exact_gradients(layer, x, upstream, indices)
    pairs = [(update, exact), *zip(found, gradients, strict=True)]
    names = ["update", "x", "codebooks", "encoder", "gate_slope", "gate_bias", "decoder"]
    errors = {name: relative_rms(*pair) for name, pair in zip(names, pairs, strict=True)}
    wrong = wrong_choices(layer, x, indices)
    return {"mismatch": max(errors.values()), "wrong_choices": wrong, "distinct": len(used) / indices.numel()}


def timed(run: Callable[[], Any], *, graph: bool) -> float | None:
    """Microseconds; None if it cannot run, or a graph of it cannot be recorded."""
    try:
        return 1e6 * seconds(run, DEVICE, graph=graph)
    except RuntimeError as error:
        print(f"  not timed ({graph=}): {str(error).splitlines()[0]}", flush=True)
        torch.cuda.synchronize()
        return None


def times(module: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, float | None]:
    leaves = [x, *module.parameters()]

    def forward() -> Tensor:
        with torch.no_grad():
            return module(x)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(module(x), leaves, upstream)

    runs = {"forward": forward, "forward_backward": both}
    found = {name: timed(run, graph=True) for name, run in runs.items()}
    return found | {f"eager_{name}": timed(run, graph=False) for name, run in runs.items()}


def few_time(layer: APN, x: Tensor) -> float | None:
    """Microseconds of a forward pass, as in writing text."""

    def forward() -> Tensor:
        with torch.no_grad():
            return layer(x)

    return timed(forward, graph=True)


def kernel_times(layer: APN, x: Tensor, upstream: Tensor) -> dict[str, float]:
    """Microseconds of each kernel of one pass forward and backward."""
    leaves = [x, *layer.parameters()]
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(REPEATS):
            torch.autograd.grad(layer(x), leaves, upstream)
        torch.cuda.synchronize()
    events = [e for e in found.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    taken: dict[str, float] = {}
    for event in events:  # names of templates are long, and begin alike
        taken[event.key[:60]] = taken.get(event.key[:60], 0) + event.self_device_time_total / REPEATS
    return taken


def optimizer_time(layer: APN, x: Tensor, upstream: Tensor) -> float | None:
    """Microseconds of a step of AdamW, launched one by one."""
    parameters = list(layer.parameters())
    gradients = torch.autograd.grad(layer(x), parameters, upstream)
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    optimizer.register_step_pre_hook(move_rows)

    def step() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    return timed(step, graph=False)


def kernel_bytes(layer: APN, patches: int) -> dict[str, int]:
    """What each kernel must read and write if it reads so many patches."""
    rank, side, size = layer.config.rank, math.isqrt(layer.num_patches), DTYPE.itemsize
    pairs, tokens = TOKENS * TOP_K, TOKENS * DIM * size
    rows = patches * rank * DIM * size
    return {
        "route_pairs": tokens + side * DIM * size + pairs * 12 + TOKENS * (4 * rank + 8),
        "gather_decode": rows + tokens + pairs * (8 + 4 * rank),
        "gather_backward": rows + tokens + pairs * (12 + 16 * rank),
        "sum_runs": tokens + rows + pairs * (28 + 12 * rank),
    }


def copy_bandwidth() -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), DEVICE, graph=True)


def bag_times(layer: APN, x: Tensor, upstream: Tensor) -> dict[str, float | None]:
    """PyTorch's gather and sum of the same rows, with given weights."""
    rank = layer.config.rank
    with torch.no_grad():
        indices = layer(x, return_stats=True)[1].indices
    rows = (indices[:, :, None] * rank + torch.arange(rank, device=DEVICE)).flatten(1)
    bank = layer.decoder.detach().flatten(0, 1).requires_grad_()
    weights = torch.rand(TOKENS, TOP_K * rank, device=DEVICE, dtype=DTYPE, requires_grad=True)

    def forward() -> Tensor:
        with torch.no_grad():
            return F.embedding_bag(rows, bank, mode="sum", per_sample_weights=weights)

    def both() -> tuple[Tensor, ...]:
        sparse = layer.config.sparse_gradients
        update = F.embedding_bag(rows, bank, mode="sum", per_sample_weights=weights, sparse=sparse)
        return torch.autograd.grad(update, [bank, weights], upstream)

    return {"forward": timed(forward, graph=True), "eager_forward_backward": timed(both, graph=False)}


def shares(moved: dict[str, int], taken: dict[str, float], bandwidth: float) -> dict[str, float]:
    """Bytes per second of each kernel, and of choosing and gathering together, over those of a copy."""
    found = {name: moved[name] / taken[name] / 1e-6 / bandwidth for name in moved if name in taken}
    both = ("route_pairs", "gather_decode")
    if found.keys() >= set(both):
        spent = sum(taken[name] for name in both) * 1e-6
        found["selection and gather"] = sum(moved[name] for name in both) / spent / bandwidth
    return found


def measure(patches: int, rank: int, sparse: bool, bandwidth: float) -> dict[str, Any]:
    layer = layer_of(patches, rank, sparse)
    x = torch.randn(TOKENS, DIM, device=DEVICE, dtype=DTYPE, requires_grad=True)
    upstream = torch.randn_like(x)
    row: dict[str, Any] = {"patches": patches, "rank": rank, "sparse_gradients": sparse}
    row |= check(layer, x.detach(), upstream)
    if not row["mismatch"] <= TOLERANCE[DTYPE] or row.get("wrong_choices", 0) > 0.02:
        return row
    row |= times(layer, x, upstream)
    row["few_tokens"] = {count: few_time(layer, x.detach()[:count]) for count in (1, 64)}
    if layer.codebooks is None:
        return row
    row["kernels"] = kernel_times(layer, x, upstream)
    pairs = TOKENS * TOP_K
    for name, read in (("bandwidth", round(row["distinct"] * pairs)), ("delivered", pairs)):
        row[name] = shares(kernel_bytes(layer, read), row["kernels"], bandwidth)
    if spent := row["kernels"].get("route_pairs"):
        row["selection_flops"] = 2 * TOKENS * DIM * (math.isqrt(patches) + rank) / spent / 1e-6
    row["embedding_bag"] = bag_times(layer, x, upstream)
    row["eager_optimizer"] = optimizer_time(layer, x, upstream)
    return row


def shown(value: float | None, digits: int = 2) -> str:
    return f"{'-':>10}" if value is None else f"{value:10.{digits}f}"


def table(rows: list[dict[str, Any]], dense: dict[str, float | None]) -> None:
    measures = ("forward", "forward_backward", "eager_forward", "eager_forward_backward")
    print("times over the dense FFN: forward, forward + backward; the same launched one by one;")
    print("then over 256 flat patches of the same rank, forward + backward; share of memory bandwidth")
    heads = ("f", "f+b", "eager f", "eager f+b", "/ 256", "share")
    print(" " * 30 + "".join(f"{head:>10}" for head in heads))
    for row in rows:
        name = f"K={row['patches']} r={row['rank']}" + (" sparse" if row["sparse_gradients"] else "")
        if "forward" not in row:
            print(f"{name:>30}  differs from float64: {row['mismatch']:.1e}, {row.get('wrong_choices')}")
            continue
        ratios = [row[m] and dense[m] and row[m] / dense[m] for m in measures]
        flat = next(r for r in rows if r["patches"] == 256 and r["rank"] == row["rank"])
        own, base = row["forward_backward"], flat.get("forward_backward")
        ratios.append(own and base and own / base)
        ratios.append(row.get("bandwidth", {}).get("selection and gather"))
        print(f"{name:>30}" + "".join(shown(ratio) for ratio in ratios))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    ffn = MLP(GPTConfig(dim=DIM, num_heads=1)).to(DEVICE, DTYPE)
    x = torch.randn(TOKENS, DIM, device=DEVICE, dtype=DTYPE, requires_grad=True)
    dense = times(ffn, x, torch.randn_like(x))
    print(f"copy {bandwidth / 1e12:.2f} TB/s, dense {dense}", flush=True)
    rows = []
    for patches, rank, sparse in LAYERS:
        rows.append(measure(patches, rank, sparse, bandwidth))
        torch.cuda.empty_cache()
        kernels = rows[-1].get("kernels", {})
        print(patches, rank, sparse, {name: round(time, 1) for name, time in kernels.items()}, flush=True)
        print({name: rows[-1].get(name) for name in SHOWN})
    table(rows, dense)
    sizes = {"dim": DIM, "tokens": TOKENS, "top_k": TOP_K, "dtype": str(DTYPE)}
    result = {"experiment": "product-speed", "sizes": sizes, "copy_bytes_per_second": bandwidth}
    write_result(given.result, result | {"dense": dense, "rows": rows})


if __name__ == "__main__":
    main()
