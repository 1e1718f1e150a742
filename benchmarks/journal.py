"""How long an append to the journal takes, by policy and size.

    python benchmarks/journal.py result.json

The journal lies beside the result, so the disk that is measured is the one that is named. An append includes
packing the tensors and their checksum, not only the disk.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from attractor.results import write_result
from attractor.serve.journal import Journal, SyncName

SIZES = {"1 KB": 1 << 10, "100 KB": 100 << 10, "1 MB": 1 << 20}


def append_times(folder: Path, policy: SyncName, size: int, seconds: float) -> dict[str, float]:
    values = {"rows": torch.randn(size // 4)}
    times: list[float] = []
    with Journal.open(folder, identity="benchmark", sync=policy) as journal:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            started = time.perf_counter()
            number = journal.append("lesson", {"source": "benchmark", "tokens": 512}, values)
            times.append(1000 * (time.perf_counter() - started))
            if number % 200 == 0:  # outside of the clock: no more than 200 records on the disk
                journal.rotate()
                journal.drop_before(number)
    settled = np.array(times[len(times) // 20 :])
    p50, p99, worst = (float(np.percentile(settled, part)) for part in (50, 99, 100))
    return {"appends": len(settled), "p50_ms": p50, "p99_ms": p99, "worst_ms": worst}


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
                measured.setdefault(policy, {})[name] = append_times(
                    Path(folder), policy, size, options.seconds
                )
            print(policy, name, json.dumps(measured[policy][name]), flush=True)
    write_result(
        options.result,
        {"experiment": "journal", "seed": 0, "config": {"seconds": options.seconds}, "append": measured},
    )


if __name__ == "__main__":
    main()
