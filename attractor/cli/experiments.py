"""attractor demo, attractor experiment list|table1|table2|forgetting|shifts|sensitivity|match|retrofit"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attractor import distributed, presets
from attractor.cli.common import dataset_of, progress_bar
from attractor.config import check_seed, check_size
from attractor.experiments import demo, forgetting, match, retrofit, sensitivity, shifts, table1, table2
from attractor.experiments.benchmark import Benchmark
from attractor.experiments.methods import METHODS
from attractor.experiments.plan import MIXTURE, Size


@dataclass(kw_only=True)
class Demo:
    """Train a tiny dense and a tiny APN model, teach both something new, write a report: three minutes."""

    out: Path = Path("runs/demo")
    """Gets demo.json, report.html and both runs; a demo that was stopped goes on from there."""
    steps: int = demo.STEPS
    """Training steps of each model."""
    device: str | None = None
    """cpu, cuda, cuda:1, ... (default: the GPU if there is one)."""

    def run(self) -> None:
        check_size("steps", self.steps)
        distributed.parse_device(self.device)
        dataset = dataset_of(presets.tiny_apn())
        with progress_bar(len(demo.MODELS) * self.steps, "demo") as report:
            result = demo.run(self.out, dataset, steps=self.steps, device=self.device, report=report)
        parts = (demo.table, demo.routing_table, demo.adaptation_table, demo.samples)
        print(*(part(result) for part in parts), sep="\n\n")
        print(f"\nThe report, with curves and charts: {(self.out / 'report.html').resolve().as_uri()}")


@dataclass(kw_only=True)
class ExperimentList:
    """Name the experiments."""

    def run(self) -> None:
        print(f"table1       {Table1.__doc__}")
        print(f"table2       {Table2.__doc__}")
        print(f"forgetting   {Forgetting.__doc__}")
        print(f"shifts       {Shifts.__doc__}")
        print(f"sensitivity  {Sensitivity.__doc__}")
        print(f"match        {Match.__doc__}")
        print(f"retrofit     {RetrofitExperiment.__doc__}")


@dataclass(kw_only=True)
class Table1:
    """The paper's Table 1: dense against APN on char Shakespeare."""

    size: table1.Size = "smoke"
    """"smoke": two CPU cores, about two minutes. "paper": the paper's settings, one GPU."""
    out: Path = Path("runs/table1")
    result: Path | None = None
    """Where the JSON goes (default: OUT/SIZE.json)."""
    device: str | None = None
    models: tuple[Literal["dense", "apn"], ...] = ("dense", "apn")

    def run(self) -> None:
        distributed.parse_device(self.device)
        if not self.models:
            raise ValueError("--models names no model; say dense, apn or both")
        dataset = dataset_of(presets.paper_dense())
        steps = sum(table1.run_config(model, self.size).train.max_steps for model in self.models)
        with progress_bar(steps // len(self.models), f"table1 {self.size}") as report:
            result = self.result or self.out / f"{self.size}.json"
            values = table1.run(
                self.size,
                dataset,
                self.out / self.size,
                result,
                device=self.device,
                models=self.models,
                report=report,
            )
        print(table1.table(values["rows"], self.size))
        print(f"written to {result}")


@dataclass(kw_only=True)
class Table2:
    """The paper's Table 2: adapt to a second domain and measure what is left of the first, with controls."""

    size: table2.Size = "smoke"
    """"smoke": two CPU cores, three to four minutes. "paper": the paper's settings, one GPU."""
    domain_b: str = "paper-shift"
    """The second domain: a name of `attractor data list`, a file, a folder or a quoted glob."""
    out: Path = Path("runs/table2")
    """Gets both models and one JSON per row; what is finished is not done again."""
    result: Path | None = None
    """Where the JSON goes (default: OUT/SIZE.json)."""
    device: str | None = None
    seed: int = 0
    """Of the batches of B; both models are trained with the seed of their preset."""

    def run(self) -> None:
        distributed.parse_device(self.device)
        check_seed(self.seed)
        dataset = dataset_of(presets.paper_dense())
        work = table2.work(self.size)
        with progress_bar(work, f"table2 {self.size}") as report:
            result = self.result or self.out / f"{self.size}.json"
            values = table2.run(
                self.size, dataset, self.out / self.size, result, domain_b=self.domain_b, device=self.device,
                seed=self.seed, report=report,
            )  # fmt: skip
        print(table2.table(values))
        print(f"written to {result}")


def named_texts(option: str, given: tuple[str, ...]) -> dict[str, str]:
    named: dict[str, str] = {}
    for text in given:
        label, sign, source = text.partition("=")
        if not sign or not label.replace("-", "").isalnum():
            raise ValueError(f"{option} {text!r} must be NAME=FILE; the name has letters, digits and -")
        if label in named:
            raise ValueError(f"{option} names {label!r} twice: {named[label]} and {source}")
        named[label] = source
    return named


@dataclass(kw_only=True)
class Grid:
    """Options of a benchmark whose every cell is a JSON file."""

    size: Size = "smoke"
    """"smoke": two CPU cores, minutes, no conclusions. "small": between. "full": one GPU."""
    domain: tuple[str, ...] = ()
    """NAME=FILE: one more domain to adapt to, or another text for one that is there."""
    out: Path | None = None
    """Gets the models and the cells; what is done is not done again (default: runs/EXPERIMENT-SIZE)."""
    result: Path | None = None
    """Where the JSON goes (default: OUT/result.json)."""
    device: str | None = None
    jobs: int = 1
    """Cells that run side by side, in processes of their own."""
    minutes: float | None = None
    """Start no cell later than this; the same command goes on with the rest. 0: only sum up what is there,
    also where the device is not."""

    def benchmark(
        self, name: str, mixture: tuple[str, ...] = MIXTURE, seeds: int | None = None
    ) -> tuple[Benchmark, Path, "CellBar"]:
        domains = named_texts("--domain", self.domain)
        out = self.out or Path(f"runs/{name}-{self.size}")
        bar = CellBar(name)
        bench = Benchmark(
            self.size, out, domains=domains, mixture=mixture, device=self.device, seeds=seeds,
            jobs=self.jobs, minutes=self.minutes, report=bar.show,
        )  # fmt: skip
        return bench, self.result or out / "result.json", bar


class CellBar:
    """One step per cell; how many there will be is not known before learning rates are chosen."""

    def __init__(self, name: str) -> None:
        from tqdm import tqdm

        self.bar = tqdm(desc=name, unit=" cells")

    def show(self, record: dict[str, Any]) -> None:
        self.bar.update()
        if not record["found"]:
            self.bar.set_postfix_str(record["cell"], refresh=False)


@dataclass(kw_only=True)
class Forgetting(Grid):
    """What the guard promises, what it costs, and how far overlays can adapt."""

    seed: int = 0

    def run(self) -> None:
        bench, result, bar = self.benchmark("forgetting")
        with bar.bar:
            values = forgetting.run(bench, result, seed=self.seed)
        print(forgetting.table(values))
        print(f"written to {result}")


@dataclass(kw_only=True)
class Repeated(Grid):
    """A benchmark that is run with several seeds."""

    seeds: int | None = None
    """How many (default: as many as the size has); what is done counts when there are more."""


@dataclass(kw_only=True)
class Shifts(Repeated):
    """The honest benchmark: every method on every shift, alone and behind the guard, and on a stream."""

    methods: tuple[str, ...] = tuple(METHODS)
    """Rows of the table, such as "dense, full" (which is always there: gains are measured by it)."""
    mixture: tuple[str, ...] = MIXTURE
    """The domains of the second pretraining text."""

    def run(self) -> None:
        bench, result, bar = self.benchmark("shifts", self.mixture, self.seeds)
        with bar.bar:
            methods = tuple(dict.fromkeys((shifts.BEST_FULL, *self.methods)))
            values = shifts.run(bench, result, methods=methods)
        print(shifts.table(values))
        print(f"written to {result}")


@dataclass(kw_only=True)
class Sensitivity(Repeated):
    """What each knob of an APN does to perplexity, routing and forgetting, one at a time."""

    def run(self) -> None:
        bench, result, bar = self.benchmark("sensitivity", seeds=self.seeds)
        with bar.bar:
            values = sensitivity.run(bench, result)
        print(sensitivity.table(values))
        print(f"written to {result}")


@dataclass(kw_only=True)
class Match(Repeated):
    """APN against dense, MoE and Switch at equal parameters, and at no more multiply-adds per token."""

    mixture: tuple[str, ...] = match.MIXTURE
    """The domains of the mixture."""

    def run(self) -> None:
        bench, result, bar = self.benchmark("match", self.mixture, self.seeds)
        with bar.bar:
            values = match.run(bench, result)
        print(match.table(values))
        print(f"written to {result}")


@dataclass(kw_only=True)
class RetrofitExperiment:
    """A pretrained model learns a domain: full fine-tune, LoRA, APN beside its FFNs, alone and guarded."""

    size: retrofit.Size = "smoke"
    """"smoke": a few steps on a CPU, no conclusions. "full": one GPU, ten minutes."""
    model: str = "smollm2-135m"
    """As for `attractor retrofit`; a Llama-like one, for LoRA names its FFN's matrices."""
    domain: tuple[str, ...] = ()
    """NAME=FILE: what to learn (default: the First Folio)."""
    retain: tuple[str, ...] = ()
    """NAME=FILE: what must not be forgotten (default: the King James Bible and Python)."""
    out: Path | None = None
    """Gets one JSON per cell; what is done is not done again (default: runs/retrofit-SIZE)."""
    result: Path | None = None
    """Where the JSON goes (default: OUT/result.json)."""
    device: str | None = None
    jobs: int = 1
    seed: int = 0

    def run(self) -> None:
        out = self.out or Path(f"runs/retrofit-{self.size}")
        result = self.result or out / "result.json"
        bar = CellBar("retrofit")
        with bar.bar:
            values = retrofit.run(
                self.size, out, result, model=self.model, device=self.device, jobs=self.jobs, seed=self.seed,
                domains=named_texts("--domain", self.domain) or retrofit.DOMAINS,
                retained=named_texts("--retain", self.retain) or retrofit.RETAINED, report=bar.show,
            )  # fmt: skip
        print(retrofit.table(values))
        print(f"written to {result}")
