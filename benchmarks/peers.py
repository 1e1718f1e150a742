"""Layers of others beside ours, in one run: what each takes over a dense FFN of width 4d.

    pip install PEER-pytorch                                                # and what else is to be compared
    PYTHONPATH=path/to/scattermoe python benchmarks/peers.py --result results/peers-h200.json
    python benchmarks/peers.py --device cpu --small                         # a test of the script itself

Every layer is taken as its authors give it, with settings near ours; `active` is how many hidden numbers a
token uses, which says more than names do. What is not installed is left out, and the result says why. None of
their code is in this repository. "decoders alone" is what an APN gathers and adds, by PyTorch's own operator.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor import APN, bench
from attractor.config import MoEConfig
from attractor.moe import MoE
from attractor.results import write_result

Maker = Callable[[int], nn.Module]


class Batched(nn.Module):
    """A layer that wants (batch, tokens, width)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[None])[0]


class Routed(nn.Module):
    """Experts that want to be told which: the usual router, a softmax over a linear map."""

    def __init__(self, experts: nn.Module, dim: int, count: int, active: int) -> None:
        super().__init__()
        self.router, self.experts, self.active = nn.Linear(dim, count, bias=False), experts, active

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(self.active)
        return self.experts(x, (weights / weights.sum(-1, keepdim=True)).to(x.dtype), chosen)


class Gathered(nn.Module):
    """The decoders of chosen patches, gathered and added up: the least that such a layer does."""

    def __init__(self, dim: int, patches: int, rank: int, active: int, tokens: int) -> None:
        super().__init__()
        self.bank = nn.Parameter(torch.randn(patches * rank, dim) / dim**0.5)
        chosen = torch.randint(patches, (tokens, active, 1)) * rank + torch.arange(rank)
        self.register_buffer("rows", chosen.flatten(1))
        self.encoder = nn.Linear(dim, active * rank, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding_bag(self.rows, self.bank, per_sample_weights=self.encoder(x), mode="sum")


def layers(dim: int, tokens: int, scale: int) -> dict[str, tuple[Maker, int, str]]:
    """Name -> how it is made, how many hidden numbers are active, and the package that it needs."""

    def apn(**options: Any) -> Maker:
        return lambda dim: APN(dim, **options)

    def moe(dim: int) -> nn.Module:
        return MoE(dim, MoEConfig(num_experts=8, top_k=2, hidden=2 * dim, noise=False))

    def peer(dim: int) -> nn.Module:
        from PEER_pytorch import PEER

        many = {"num_experts": scale**2, "num_experts_per_head": 16, "non_competing_scores": False}
        return Batched(PEER(dim, heads=8, **many))

    def scattered(dim: int) -> nn.Module:
        from scattermoe.mlp import MLP

        sizes = {"input_size": dim, "hidden_size": 2 * dim, "num_experts": 8, "top_k": 2}
        return Routed(MLP(**sizes, activation=nn.GELU()), dim, 8, 2)

    paper = {"num_patches": 256, "rank": 32, "top_k": 4}
    bank = {"num_patches": scale**2, "rank": 8, "top_k": 16, "prototypes": "product"}
    return {
        "dense": (
            lambda dim: bench.make("dense", bench.Size(dim, 1, 1, 1), "cpu", torch.float32),
            4 * dim,
            "",
        ),
        "APN, 4 of 256, rank 32": (apn(**paper), 128, ""),
        "APN, 8 of 256, rank 128": (apn(num_patches=256, rank=128, top_k=8), 1024, ""),
        f"APN, 16 of {scale**2:,}, rank 8": (apn(**bank, sparse_gradients=True), 128, ""),
        "the reference, compiled": (
            lambda dim: torch.compile(APN(dim, **paper, backend="reference")),
            128,
            "",
        ),
        "decoders alone, 4 of 256, rank 32": (lambda dim: Gathered(dim, 256, 32, 4, tokens), 128, ""),
        f"PEER, 8 heads of 16 of {scale**2:,}": (peer, 128, "PEER-pytorch"),
        "MoE, 2 of 8 experts": (moe, 4 * dim, ""),
        "ScatterMoE, 2 of 8 experts": (scattered, 4 * dim, "scattermoe"),
    }


def measured(make: Maker, dim: int, x: Tensor, upstream: Tensor) -> dict[str, Any]:
    """Seconds and bytes of forward and backward; a graph where the layer can be one."""
    torch.manual_seed(0)
    layer = make(dim).to(x.device, x.dtype)
    leaves = [x, *layer.parameters()]

    def both() -> list[Tensor]:
        return list(torch.autograd.grad(layer(x), leaves, upstream, allow_unused=True))

    row: dict[str, Any] = {"parameters": sum(p.numel() for p in layer.parameters())}
    row["eager"] = bench.seconds(both, x.device, graph=False)
    if x.is_cuda:
        row["extra_memory"] = bench.extra_memory(lambda: [g for g in both() if g is not None])
        try:
            row["graph"] = bench.seconds(both, x.device, graph=True)
        except RuntimeError as error:
            row["no_graph"] = str(error).splitlines()[0][:200]
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--small", action="store_true", help="few tokens and patches: see that it runs")
    parser.add_argument("--result", type=Path, default=Path("peers.json"))
    options = parser.parse_args(arguments)
    dim, tokens, scale = (32, 64, 16) if options.small else (options.dim, options.tokens, 256)
    dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    x = torch.randn(tokens, dim, device=options.device, dtype=dtype, requires_grad=True)
    upstream = torch.randn_like(x)
    rows: dict[str, dict[str, Any]] = {}
    for name, (make, active, package) in layers(dim, tokens, scale).items():
        try:
            rows[name] = {"active": active, **measured(make, dim, x, upstream)}
        except ImportError as error:
            rows[name] = {"active": active, "left_out": str(error)}
        except Exception as error:
            rows[name] = {"active": active, "error": f"{type(error).__name__}: {error}"[:300]}
        if package and "left_out" not in rows[name]:
            rows[name]["version"] = _version(package)
        for way in ("eager", "graph", "extra_memory"):
            if rows[name].get(way) and rows["dense"].get(way):
                rows[name][f"{way}_over_dense"] = rows[name][way] / rows["dense"][way]
        print(
            f"{name:36s}", json.dumps({k: v for k, v in rows[name].items() if k != "parameters"}), flush=True
        )
    settings = {"dim": dim, "tokens": tokens, "dtype": str(dtype), "device": options.device}
    write_result(options.result, {"experiment": "peers", "seed": 0, "settings": settings, "rows": rows})
    return int(any("error" in row for row in rows.values()))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # it is on the path and was not installed
        return "unknown"


if __name__ == "__main__":
    raise SystemExit(main())
