"""What radii cost: the forward pass of a layer with basins over that of the same layer without, on one GPU.

    python benchmarks/basins.py --result results/basins-speed.json

Each time is the median over replays of a CUDA graph, in bfloat16; a ratio above 1 is slower. "Whitened"
routes in a whitened space. Lessons read five widths at once: the FFN's input, and what attention added in
four blocks.
"""

import argparse
from pathlib import Path

import torch

from attractor import APN
from attractor.bench import seconds
from attractor.results import write_result

SHAPES = [  # dim, tokens, patches, rank, top_k
    (384, 16384, 256, 32, 4),
    (768, 16384, 256, 64, 4),
    (2048, 4096, 256, 128, 4),
    (576, 8192, 4096, 1, 1),
    (768, 16, 4096, 16, 4),
]


def time_of(layer: APN, x: torch.Tensor) -> float:
    """Milliseconds of one forward pass."""
    with torch.no_grad():
        return 1e3 * seconds(lambda: layer(x), x.device, graph=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    rows = []
    for dim, tokens, patches, rank, top_k in SHAPES:
        sizes = {
            "num_patches": patches,
            "rank": rank,
            "top_k": top_k,
            "device": "cuda",
            "dtype": torch.bfloat16,
        }
        torch.manual_seed(0)
        x = torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16)
        plain = time_of(APN(dim, **sizes), x)
        found = {
            "dim": dim,
            "tokens": tokens,
            "patches": patches,
            "rank": rank,
            "top_k": top_k,
            "plain_ms": plain,
        }
        wide = torch.randn(tokens, 5 * dim, device="cuda", dtype=torch.bfloat16)
        for name, radius in (("everyone inside", -1.0), ("nobody inside", 2.0)):
            found[name] = time_of(APN(dim, radius=radius, **sizes), x) / plain
            whitened = APN(dim, radius=radius, whiten=True, **sizes)
            found[f"whitened, {name}"] = time_of(whitened, x) / plain
            reading = APN(dim, radius=radius, whiten=True, read_dim=5 * dim, **sizes)
            found[f"whitened from five widths, {name}"] = time_of(reading, wide) / plain
        found["the same again"] = time_of(APN(dim, **sizes), x) / plain
        rows.append(found)
        print({name: round(value, 4) for name, value in found.items()}, flush=True)
    write_result(given.result, {"experiment": "basins-speed", "rows": rows})


if __name__ == "__main__":
    main()
