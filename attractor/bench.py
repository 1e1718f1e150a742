"""How long the layer takes, beside the dense FFN it replaces and in the same run.

    attractor bench layer     forward, forward and backward, memory; --sweep for more sizes
    attractor bench train     whole training steps of two presets
    attractor bench decode    one token at a time

A backend whose output or gradients do not match the float64 reference gets no time.
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor import analysis, ops, presets, tokenizer
from attractor.config import APNConfig, GPTConfig, MoEConfig, check_size
from attractor.data import Dataset
from attractor.layer import APN
from attractor.model import GPT, MLP, KVCache
from attractor.moe import MoE
from attractor.trainer import Trainer

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 4e-3, torch.float32: 1e-5}
"""Largest relative RMS difference from the float64 reference, for outputs and every gradient."""


@dataclass(frozen=True)
class Size:
    dim: int
    tokens: int
    num_patches: int
    rank: int
    top_k: int = 4

    def __str__(self) -> str:
        return f"d={self.dim} tokens={self.tokens} K={self.num_patches} r={self.rank} k={self.top_k}"


def size_of(text: str) -> Size:
    """A size as it is written on a command line: width, tokens, patches, rank, active patches."""
    numbers = text.split(",")
    if not (4 <= len(numbers) <= 5 and all(number.strip().isdecimal() for number in numbers)):
        raise ValueError(
            f"size {text!r} must be width,tokens,patches,rank and, if not 4 of them act, how many: "
            "384,16384,256,32 or 1536,16384,48,128,8"
        )
    size = Size(*map(int, numbers))
    APNConfig(num_patches=size.num_patches, rank=size.rank, top_k=size.top_k)  # raises what cannot be
    for name in ("dim", "tokens"):
        check_size(name, getattr(size, name))
    return size


SIZES = (
    Size(384, 16384, 256, 32),
    Size(384, 16384, 64, 128),
    Size(768, 16384, 256, 64),
    Size(2048, 4096, 256, 128),
)
"""The paper's layer, its variant with few large patches, GPT-2's width, and a wide model."""


PEERS = ("dense", "adapter", "moe")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Adapter(nn.Module):
    """A bottleneck as wide as the codes a token uses: about the cheapest thing in an FFN's place."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.down = nn.Linear(size.dim, size.top_k * size.rank, bias=False)
        self.up = nn.Linear(size.top_k * size.rank, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.gelu(self.down(x)))


def make_moe(size: Size) -> MoE:
    """The usual mixture: the top 2 of 8 dense experts with the parameters of the APN layer in all."""
    parameters = size.num_patches * (size.dim + 2 * size.rank + size.rank * size.dim)
    hidden = max(16, parameters // (2 * size.dim * 8) // 16 * 16)  # grouped_mm needs 16-byte strides
    return MoE(size.dim, MoEConfig(num_experts=8, top_k=2, hidden=hidden, noise=False))


def make(name: str, size: Size, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A module by name: one of PEERS, or the APN layer with a backend."""
    torch.manual_seed(0)
    if name == "dense":
        module: nn.Module = MLP(GPTConfig(dim=size.dim, num_heads=1))
    elif name in PEERS:
        module = Adapter(size) if name == "adapter" else make_moe(size)
    else:
        module = APN(size.dim, num_patches=size.num_patches, top_k=size.top_k, rank=size.rank, backend=name)
    return module.to(device, dtype)


def names_for(size: Size, device: torch.device, dtype: torch.dtype) -> list[str]:
    """What can be measured here. The reference gathers a decoder per pair: left out beyond 16 GB of them."""
    gathered = size.tokens * size.top_k * size.rank * size.dim * dtype.itemsize
    backends = [name for name in ops.BACKENDS if ops.why_not(name, device, dtype) is None]
    if gathered > 16e9 or (device.type == "cpu" and gathered > 1e9):
        backends.remove("reference")
    has_grouped_mm = device.type == "cuda" and dtype == torch.bfloat16 and hasattr(F, "grouped_mm")
    return [*(PEERS if has_grouped_mm else PEERS[:2]), *backends]


def mismatch(layer: APN, size: Size) -> float:
    """Largest relative RMS difference to the float64 reference, over the output and all gradients.

    Where two scores are so close that rounding decides which patch a token gets, both answers are right: such
    rows (at most one in a hundred) are left out of the comparison, on both sides.
    """
    weight = layer.encoder
    tokens = torch.randn(min(size.tokens, 1024), size.dim, device=weight.device, dtype=weight.dtype)
    exact = APN.from_config(
        size.dim, layer.config, backend="reference", dtype=torch.float64, device=weight.device
    )
    exact.load_state_dict(layer.state_dict())
    inputs = [tokens.clone().requires_grad_(), tokens.double().requires_grad_()]
    results = [module(x, return_stats=True) for module, x in zip((layer, exact), inputs, strict=True)]
    same = (results[0][1].indices == results[1][1].indices).all(-1, keepdim=True)
    if same.float().mean() < 0.99:
        return math.inf
    upstream = torch.randn_like(tokens) * same
    differences = []
    for module, x, (update, _) in zip((layer, exact), inputs, results, strict=True):
        gradients = torch.autograd.grad((update * upstream).sum(), [x, *module.parameters()])
        differences.append([update * same, *gradients])
    return max(relative_rms(ours, theirs) for ours, theirs in zip(*differences, strict=True))


def relative_rms(ours: Tensor, exact: Tensor) -> float:
    return float((ours.detach().double() - exact.detach()).norm() / exact.detach().norm())


def seconds(run: Callable[[], Any], device: torch.device, *, graph: bool) -> float:
    """Median time of a call, by replaying a CUDA graph of it or by the clock."""
    if device.type != "cuda":
        run()
        times: list[float] = []
        while len(times) < 3 or (sum(times) < 2 and len(times) < 50):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        return median(times)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
    events = [torch.cuda.Event(enable_timing=True) for _ in range(41)]
    for _ in range(5):
        run()
    for event in events[:-1]:
        event.record()
        run()
    events[-1].record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(events)) / 1000


def extra_memory(run: Callable[[], list[Tensor]]) -> int:
    """Peak bytes of a call beyond what was there before and the gradients it returns."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = run()
    torch.cuda.synchronize()
    kept = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
    return torch.cuda.max_memory_allocated() - before - kept


H200_FLOPS, H200_BANDWIDTH = 790e12, 4.3e12
"""What matrix products and copies reach on an H200, per second."""


def floor(size: Size, itemsize: int, *, backward: bool) -> float:
    """Seconds that no implementation can beat: the larger of arithmetic and of reading and writing once."""
    counts = APN(size.dim, num_patches=size.num_patches, top_k=size.top_k, rank=size.rank, device="meta")
    work = 2 * analysis.multiply_adds(counts)["total"] * size.tokens * (3 if backward else 1)
    parameters = sum(parameter.numel() for parameter in counts.parameters())
    traffic = size.tokens * size.dim * (5 if backward else 2) + parameters * (3 if backward else 1)
    return max(work / H200_FLOPS, traffic * itemsize / H200_BANDWIDTH)


def measure_layer(
    name: str, size: Size, device: torch.device, dtype: torch.dtype, compiled: bool = False
) -> dict[str, Any]:
    """Seconds and bytes of one module; for APN only the mismatch, if that is beyond TOLERANCE.

    `compiled` also measures what torch.compile makes of it, in its default mode.
    """
    module = make(name, size, device, dtype)
    row: dict[str, Any] = {"name": name, "parameters": sum(p.numel() for p in module.parameters())}
    if isinstance(module, APN):
        row["mismatch"] = mismatch(module, size)
        if (
            name != "reference" and not row["mismatch"] <= TOLERANCE[dtype]
        ):  # in bfloat16 it rounds at each step
            return row
    x = torch.randn(size.tokens, size.dim, device=device, dtype=dtype, requires_grad=True)
    upstream = torch.randn_like(x)
    leaves = [x, *module.parameters()]

    def forward(module: Callable[..., Tensor] = module) -> Tensor:
        with torch.no_grad():
            return module(x)

    def both(module: Callable[..., Tensor] = module) -> list[Tensor]:
        return list(torch.autograd.grad(module(x), leaves, upstream))

    on_gpu = device.type == "cuda"
    row["forward"] = seconds(forward, device, graph=on_gpu)
    row["forward_backward"] = seconds(both, device, graph=on_gpu)
    if on_gpu:
        row["eager_forward"] = seconds(forward, device, graph=False)
        row["eager_forward_backward"] = seconds(both, device, graph=False)
        row["extra_memory"] = extra_memory(both)
    if compiled:
        torch.compiler.reset()  # of one function it keeps eight modules
        faster = torch.compile(module)
        row["compiled_forward"] = seconds(lambda: forward(faster), device, graph=False)
        row["compiled_forward_backward"] = seconds(lambda: both(faster), device, graph=False)
    return row


MEASURES = (
    *("forward", "forward_backward", "eager_forward", "eager_forward_backward", "extra_memory"),
    *("compiled_forward", "compiled_forward_backward"),
)
Report = Callable[[str], None]


def bench_layer(
    sizes: Iterable[Size],
    device: torch.device,
    dtype: torch.dtype,
    report: Report,
    rounds: int = 1,
    compiled: bool = False,
    only: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Every module at every size, or `only` some beside dense.

    Rounds take turns and give medians: for machines with other work.
    """
    known = (*PEERS, *ops.BACKENDS)
    if unknown := set(only) - set(known):
        raise ValueError(f"{', '.join(sorted(unknown))}: not among what is timed, {', '.join(known)}")
    results = []
    for size in sizes:
        report(str(size))
        rows: list[dict[str, Any]] = []
        names = [name for name in names_for(size, device, dtype) if not only or name in ("dense", *only)]
        measured = [
            {name: measure_layer(name, size, device, dtype, compiled) for name in names}
            for _ in range(rounds)
        ]
        for name in names:
            row = dict(measured[0][name])
            for measure in MEASURES:
                if measure in row:
                    row[measure] = median(turn[name][measure] for turn in measured)
                    row[f"{measure}_over_dense"] = row[measure] / rows[0][measure] if rows else 1.0
            rows.append(row)
            report(_line(row))
        floors = {
            f"floor_{kind}": floor(size, dtype.itemsize, backward=kind == "forward_backward")
            for kind in ("forward", "forward_backward")
        }
        results.append({"size": asdict(size), **(floors if device.type == "cuda" else {}), "rows": rows})
    return results


def _line(row: dict[str, Any]) -> str:
    if "forward" not in row:
        return f"  {row['name']:10s} differs from the reference by {row['mismatch']:.1e}: not timed"
    parts = [f"{measure} {row[f'{measure}_over_dense']:.2f}" for measure in MEASURES if measure in row]
    return f"  {row['name']:10s} over dense: " + ", ".join(parts)


def sweep_sizes() -> list[Size]:
    """One thing changed at a time, from the paper's size; layers with 8 and 16 active patches that predict
    better; a width at which small experts are slow; and few tokens of GPT-2's width."""
    start = SIZES[0]
    patches = [replace(start, num_patches=2**power) for power in (6, 10, 12, 14, 16)]
    tokens = [replace(start, tokens=4**power) for power in (0, 2, 4, 6, 8)]
    active = [replace(start, num_patches=number, rank=128, top_k=16) for number in (64, 256)]
    active += [Size(384, 16384, 256, 128, 8), Size(1536, 16384, 48, 128, 8), Size(768, 64, 256, 64)]
    others = [replace(start, dim=1024), replace(start, rank=8), replace(start, rank=128)]
    return [*patches, *tokens, *others, *active]


def random_tokens(vocab_size: int) -> Dataset:
    """A text without sense, to time training on."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, 1 << 20).astype(np.uint16)
    alphabet = map(chr, range(48, 48 + vocab_size))
    return Dataset(Path(), {}, tokenizer.train(kind="char", text=alphabet), tokens, tokens[:1000])


def measure_train(preset: str, device: torch.device, steps: int) -> dict[str, Any]:
    """Seconds of a training step by the trainer, as it compiles it, on random tokens."""
    config = presets.NAMES[preset]()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, random_tokens(config.model.vocab_size), Path(folder), device=device)
        return {"name": preset, "step": step_seconds(trainer, steps)}


def step_seconds(trainer: Trainer, steps: int) -> float:
    """Median time by the clock of a step as this trainer takes it: forward, backward, clipping, AdamW."""
    times = []
    for _ in range(3):
        for _ in range(10 if trainer.device.type == "cuda" else 1):  # compile, record graphs, warm up
            trainer._train_step()
        _wait(trainer.device)
        started = time.perf_counter()
        for _ in range(steps):
            trainer._train_step()
        _wait(trainer.device)
        times.append((time.perf_counter() - started) / steps)
    return median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_decode(preset: str, streams: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Seconds to append one token to each stream, half a context into the text."""
    torch.manual_seed(0)
    config = replace(presets.NAMES[preset]().model, dropout=0.0)
    model = GPT(config).to(device, dtype).eval()
    return {"name": preset, "streams": streams, **decode_seconds(model, streams)}


@torch.no_grad()
def decode_seconds(model: GPT, streams: int) -> dict[str, float]:
    """The same for a model that is there, launched one by one and, on a GPU, as a replayed CUDA graph."""
    config, device = model.config, model.device
    cache = KVCache(model, streams)
    model(torch.randint(config.vocab_size, (streams, config.context // 2), device=device), cache=cache)
    token, length = torch.randint(config.vocab_size, (streams, 1), device=device), cache.length

    def step() -> Tensor:
        cache.length = length
        return model(token, cache=cache)

    found = {"eager": seconds(step, device, graph=False)}
    if device.type == "cuda":
        found["graph"] = seconds(step, device, graph=True)
    return found
