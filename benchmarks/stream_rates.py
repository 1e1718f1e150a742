"""Do guarded learners gain from steps that get smaller with the age of an overlay, or of a copy?

The stream of `attractor experiment shifts`, at constant rates and at rates that fall:

python benchmarks/stream_rates.py --size smoke --out runs/stream-rates --result runs/stream-rates.json
python benchmarks/stream_rates.py --size full --jobs 12 --rates 0.0003 0.001 --horizons 16384 65536 ...
"""

import argparse
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from attractor.experiments.benchmark import Benchmark
from attractor.experiments.grid import Inquiry, ask
from attractor.experiments.plan import HOME
from attractor.experiments.result import write_result
from attractor.experiments.shifts import stream_order
from attractor.experiments.statistics import transfer
from attractor.experiments.streams import COPIES, GUARDED, LEARNERS

METHODS = (GUARDED, *COPIES)


def measured(bench: Benchmark, method: str, rate: float, horizon: int | None, seed: int) -> Inquiry[Any]:
    yield from ask(bench.pretrain(LEARNERS[method], HOME, seed))
    (cell,) = (yield bench.stream(method, stream_order(bench), seed, rate, horizon)).values()
    first_visits = sorted({cell["order"].index(name) for name in cell["order"]} - {0})
    return {
        "seed": seed, **transfer(cell["matrix"], cell["order"]), "matrix": cell["matrix"],
        "progressive": cell["progressive"], "claimed": cell["claimed"],
        "new_texts": float(np.mean([cell["progressive"][visit] for visit in first_visits])),
        "overlays": len({name for visit in cell["claimed"] for name in visit} - {"base", "nobody yet"}),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=("smoke", "small", "full"), default="smoke")
    parser.add_argument("--out", type=Path, required=True, help="gets models and cells; what is done stays")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3])
    parser.add_argument("--horizons", type=int, nargs="+", default=[16_384], help="tokens; beside none")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--domain", nargs="*", default=[], metavar="NAME=FILE")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device")
    given = parser.parse_args()

    domains = dict(named.split("=", 1) for named in given.domain)
    bench = Benchmark(given.size, given.out, domains=domains, device=given.device, seeds=given.seeds,
                      jobs=given.jobs, report=lambda record: print(record["cell"], flush=True))  # fmt: skip
    grid = list(itertools.product(given.methods, given.rates, [None, *given.horizons]))
    asked = {(*row, seed): measured(bench, *row, seed) for row in grid for seed in range(bench.plan.seeds)}
    found = bench.answer(asked)
    rows = []
    for method, rate, horizon in grid:
        seeds = [found[method, rate, horizon, seed] for seed in range(bench.plan.seeds)]
        mean = {key: float(np.mean([seed[key] for seed in seeds])) for key in ("final", "new_texts")}
        rows.append({"method": method, "rate": rate, "rate_horizon": horizon, **mean, "seeds": seeds})
        opened = Counter(seed["overlays"] for seed in seeds)
        print(f"{method:40s} {rate:8g} {horizon or '':>8} end {mean['final']:.4f} "
              f"new texts {mean['new_texts']:.4f} overlays {dict(opened)}")  # fmt: skip
    write_result(given.result, {
        "experiment": "guarded streams at a rate that falls", "size": bench.size, "texts": bench.hashes,
        "order": stream_order(bench), "rows": rows, **bench.origins(),
    })  # fmt: skip


if __name__ == "__main__":
    main()
