"""How far the layer is from the independent transcription of the paper, over random configurations.

python benchmarks/agreement.py results/agreement.json
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attractor import APN, analysis, ops
from attractor.results import write_result

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import paper

CONFIGURATIONS, TOKENS, SEED = 400, 5, 0


def draw(source: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """The shape of a layer, and what the transcription takes beside its parameters."""
    groups = source.choice([1, 2, 3])
    num_patches, rank = source.randint(1, 40), source.randint(1, 12)
    shape: dict[str, Any] = {
        "dim": groups * source.randint(2, 12),
        "num_patches": num_patches,
        "rank": rank,
        "gate": source.choice(["vector", "scalar"]),
        "layer_norm": source.random() < 0.5,
        "backend": source.choice(sorted(ops.BACKENDS)),
    }
    if source.random() < 0.5:
        dims = {"routing_dim": groups * source.randint(2, 5), "routing_groups": groups}
        shape |= {"prototypes": "contextual", **dims}
    if source.random() < 0.5:
        shape |= {"decoder": "shared", "offset_rank": source.randint(1, rank)}
    numbers = {"temperature": source.uniform(0.05, 2), "scale": source.uniform(-2, 2)}
    return shape, {
        "k": source.randint(1, num_patches),
        "routing": source.choice(["cosine", "dot"]),
        **numbers,
    }


def difference(shape: dict[str, Any], call: dict[str, Any], seed: int) -> float | None:
    """The largest difference of any output channel; None if a near tie was resolved differently."""
    random_numbers = np.random.default_rng(seed)
    options = {name: value for name, value in call.items() if name != "k"}
    layer = APN(**shape, top_k=call["k"], **options, dtype=torch.float64)
    parameters = {
        name: random_numbers.standard_normal(tuple(p.shape)) for name, p in layer.named_parameters()
    }
    layer.load_state_dict({name: torch.from_numpy(value) for name, value in parameters.items()})
    x = random_numbers.standard_normal((TOKENS, shape["dim"]))
    update, stats = layer(torch.from_numpy(x), return_stats=True)
    expected = [paper.apn(h, parameters, **call) for h in x]
    if stats.indices.tolist() != [token.indices for token in expected]:
        return None
    return float(np.abs(update.detach().numpy() - np.array([token.update for token in expected])).max())


def main(path: str) -> None:
    source = random.Random(SEED)
    differences = [difference(*draw(source), seed) for seed in range(CONFIGURATIONS)]
    compared = [value for value in differences if value is not None]
    layer = APN(384, num_patches=256, top_k=4, rank=32, device="meta")
    ours, dense = analysis.multiply_adds(layer)["total"], analysis.dense_multiply_adds(384)
    values = {
        "experiment": "agreement",
        "config": {"configurations": CONFIGURATIONS, "tokens": TOKENS},
        "seed": SEED,
        "compared": len(compared),
        "near_ties": len(differences) - len(compared),
        "worst_absolute_difference": max(compared),
        "paper_size": {"multiply_adds": ours, "dense_multiply_adds": dense, "ratio": dense / ours},
    }
    write_result(Path(path), values)
    worst = max(compared)
    print(f"{len(compared)} configurations, worst difference {worst:.1e}; dense / APN {dense / ours:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result")
    main(parser.parse_args().result)
