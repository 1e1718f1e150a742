"""Do guarded learners gain from steps that get smaller with the age of an overlay, or of a copy?

The stream of `python -m studies shifts`, at constant rates and at rates that fall:

python benchmarks/stream_rates.py --size smoke --out runs/stream-rates --result runs/stream-rates.json
python benchmarks/stream_rates.py --size full --jobs 12 --rates 0.0003 0.001 --horizons 16384 65536 ...
"""

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attractor.config import check_number, check_size
from studies.cells import Benchmark
from studies.grid import Inquiry, ask
from studies.plan import HOME, named_texts
from studies.shifts import stream_order
from studies.statistics import mean, or_nan, transfer
from studies.streams import COPIES, GUARDED, LEARNERS

METHODS = (GUARDED, *COPIES)


def measured(bench: Benchmark, method: str, rate: float, horizon: int | None, seed: int) -> Inquiry[Any]:
    yield from ask(bench.pretrain(LEARNERS[method], HOME, seed))
    (cell,) = (yield bench.stream(method, stream_order(bench), seed, rate, horizon)).values()
    first_visits = sorted({cell["order"].index(name) for name in cell["order"]} - {0})
    return {
        "seed": seed,
        **transfer(cell["matrix"], cell["order"]),
        "matrix": cell["matrix"],
        "progressive": cell["progressive"],
        "claimed": cell["claimed"],
        "diverged": cell["diverged"],
        "new_texts": mean(or_nan(cell["progressive"][visit]) for visit in first_visits),
        "overlays": len({name for visit in cell["claimed"] for name in visit} - {"base", "nobody yet"}),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=("smoke", "small", "full"), default="smoke")
    parser.add_argument("--out", type=Path, required=True, help="gets models and cells; what is done stays")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3])
    parser.add_argument(
        "--horizons",
        type=int,
        nargs="*",
        default=[16_384],
        help="tokens; a constant rate is always beside them",
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--domain", nargs="*", default=[], metavar="NAME=FILE")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device")
    given = parser.parse_args(arguments)
    try:
        for rate in given.rates:
            check_number("rate", rate, "a positive number", lambda rate: rate > 0)
        for horizon in given.horizons:
            check_size("horizon", horizon)
        bench = Benchmark(
            given.size,
            given.out,
            domains=named_texts("--domain", tuple(given.domain)),
            device=given.device,
            seeds=given.seeds,
            jobs=given.jobs,
            report=lambda record: print(record["cell"], flush=True),
        )
        check_size("jobs", given.jobs)
    except (ValueError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    horizons = dict.fromkeys([None, *given.horizons])
    grid = list(itertools.product(dict.fromkeys(given.methods), dict.fromkeys(given.rates), horizons))
    asked = {(*row, seed): measured(bench, *row, seed) for row in grid for seed in range(bench.plan.seeds)}
    found = bench.answer(asked)
    rows = []
    for method, rate, horizon in grid:
        seeds = [found[method, rate, horizon, seed] for seed in range(bench.plan.seeds)]
        means = {key: mean(seed[key] for seed in seeds) for key in ("final", "new_texts")}
        rows.append({"method": method, "rate": rate, "rate_horizon": horizon, **means, "seeds": seeds})
        opened = Counter(seed["overlays"] for seed in seeds)
        print(
            f"{method:40s} {rate:8g} {horizon or '':>8} end {means['final']:.4f} "
            f"new texts {means['new_texts']:.4f} overlays {dict(opened)}"
        )
    bench.write(given.result, "guarded streams at a rate that falls", order=stream_order(bench), rows=rows)


if __name__ == "__main__":
    main()
