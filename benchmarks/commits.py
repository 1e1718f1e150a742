"""How long a commit to the store takes, by policy and size.

    python benchmarks/commits.py result.json

The store lies beside the result, so the disk that is measured is the one that is named. A commit includes
packing the delta and its checksum, not only the disk.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import get_args

import torch
from measuring import milliseconds

from attractor.continual.delta import Delta
from attractor.results import write_result
from attractor.serve.config import SyncName
from attractor.serve.store import Store

SIZES = {"1 KB": 1 << 10, "100 KB": 100 << 10, "1 MB": 1 << 20}


def commit_times(folder: Path, policy: SyncName, size: int, seconds: float) -> dict[str, float]:
    delta = Delta({"bank": (torch.arange(4), torch.randn(4, size // 16))})
    times: list[float] = []
    with Store.open(folder, identity="benchmark", sync=policy, keep_snapshots=1) as store:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            started = time.perf_counter()
            number = store.commit(
                "lesson", {"tokens": 512}, at="2026", source="benchmark", fields={}, delta=delta
            )
            times.append(time.perf_counter() - started)
            if number % 200 == 0:  # outside of the clock: no more than some hundred deltas on the disk
                store.snapshot()
    warm = times[len(times) // 20 :]
    return {"commits": len(warm), **milliseconds(warm)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each policy and size")
    options = parser.parse_args()
    torch.manual_seed(0)
    options.result.parent.mkdir(parents=True, exist_ok=True)
    measured: dict[str, dict[str, dict[str, float]]] = {}
    for policy in get_args(SyncName):
        for name, size in SIZES.items():
            with tempfile.TemporaryDirectory(dir=options.result.parent) as folder:
                measured.setdefault(policy, {})[name] = commit_times(
                    Path(folder), policy, size, options.seconds
                )
            print(policy, name, json.dumps(measured[policy][name]), flush=True)
    write_result(
        options.result,
        {"experiment": "commits", "seed": 0, "config": {"seconds": options.seconds}, "commit": measured},
    )


if __name__ == "__main__":
    main()
