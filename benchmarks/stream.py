"""A long stream through an OnlineLearner: does memory stay constant, and what does observing cost?

python benchmarks/stream.py --tokens 10000000 --result results/stream.json
"""

import argparse
import dataclasses
import json
import resource
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from attractor import presets
from attractor.config import APNConfig, GPTConfig, TrainConfig
from attractor.continual.config import AllocationConfig, GateConfig, LearnConfig
from attractor.continual.learner import OnlineLearner
from attractor.model import GPT
from attractor.results import write_result
from attractor.trainer import make_optimizer


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


LEARN = LearnConfig(
    budget=8192,
    gates=GateConfig(max_surprise=4.0, min_entropy=0.01),
    allocation=AllocationConfig(mode="replace", novelty=8.0, cooldown=200_000),
)
"""Two of the gates, and patches that are replaced."""


def memory_of_a_stream(tokens: int, pieces: int) -> list[dict[str, float]]:
    """Let a tiny model learn from a source that drifts, and watch the memory of the process."""
    shape = GPTConfig(
        vocab_size=64,
        context=64,
        num_layers=2,
        num_heads=2,
        dim=32,
        ffn="apn",
        apn=APNConfig(num_patches=32, top_k=2, rank=8),
    )
    torch.manual_seed(0)
    learner = OnlineLearner(GPT(shape), config=LEARN)
    random, records, started = np.random.default_rng(0), [], time.perf_counter()
    for piece in range(pieces):
        words = random.integers(0, 64, (512, 8))  # a source that drifts
        stream = words[random.integers(0, 512, tokens // pieces // 8)].ravel()
        seen = learner.observe(stream, source=f"source {piece % 5}")
        records.append(
            {
                "tokens": learner.totals.tokens,
                "resident_megabytes": resident_megabytes(),
                "loss": seen.loss,
                "seconds": time.perf_counter() - started,
                "allocations": learner.totals.allocations,
            }
        )
        print(json.dumps(records[-1]), flush=True)
    return records


def cost_of_observing(rounds: int) -> dict[str, float]:
    """`observe` beside a plain training step of the same model and the same tokens, in turns."""
    shape = presets.tiny_apn().model
    torch.manual_seed(0)
    learner, plain = OnlineLearner(GPT(shape), config=LearnConfig(budget=1024)), GPT(shape)
    optimizer = make_optimizer(plain, TrainConfig())
    stream = np.random.default_rng(0).integers(0, shape.vocab_size, 1025)
    inputs, targets = (torch.from_numpy(part).view(16, 64) for part in (stream[:-1], stream[1:]))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(plain(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()

    def observe() -> None:
        assert learner.observe(stream[:-1]).updates == 1

    times: dict[str, list[float]] = {"step": [], "observe": []}
    for _ in range(rounds):
        for name, run in (("step", step), ("observe", observe)):
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    ratios = [a / b for a, b in zip(times["observe"][3:], times["step"][3:], strict=True)]
    return {"observe_over_step": statistics.median(ratios), "tokens": 1024, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--pieces", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--result", type=Path, default=Path("results/stream.json"))
    options = parser.parse_args()
    cost = cost_of_observing(options.rounds)
    print(json.dumps(cost), flush=True)
    records = memory_of_a_stream(options.tokens, options.pieces)
    later = [record["resident_megabytes"] for record in records[len(records) // 10 :]]
    write_result(
        options.result,
        {
            "experiment": "stream",
            "seed": 0,
            "config": {k: str(v) for k, v in vars(options).items()},
            "cost": cost,
            "memory_growth_megabytes": later[-1] - later[0],
            "learn": dataclasses.asdict(LEARN),
            "records": records,
        },
    )


if __name__ == "__main__":
    main()
