"""Reproduce what the paper and the benchmark report; every study writes one JSON file.

    python -m studies list                             what there is
    python -m studies shifts --size smoke              minutes on two CPU cores: it runs, no conclusions
    python -m studies shifts --size full --jobs 6      one GPU; once stopped, the same command goes on
    python -m studies report runs/*/result.json        one page of charts and tables from any results
    python -m studies facts --help                     facts, trivia and edits have their own options

`python -m studies NAME --help` shows what a study takes.
"""

import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from attractor import distributed, presets
from attractor.cli.common import INTERRUPTED, dataset_of, mistakes, progress_bar
from attractor.config import check_seed
from studies import (
    anatomy,
    capacity,
    equal_time,
    forgetting,
    gaps,
    knobs,
    locality,
    match,
    retrofit,
    sensitivity,
    shifts,
    table1,
    table2,
    time_cells,
)
from studies.cells import Benchmark
from studies.grid import CellsFailed, GridStopped
from studies.methods import METHODS
from studies.plan import MIXTURE, Size, named_texts
from studies.report import markdown, page
from studies.report.readings import read
from studies.report.study_tables import shown


@dataclass(kw_only=True)
class List:
    """Name the studies."""

    def run(self) -> None:
        about = {name: study.__doc__ for name, study in STUDIES.items()}
        about |= FACTS
        print("\n".join(f"{name:11s}  {sentence}" for name, sentence in about.items()))


@dataclass(kw_only=True)
class Study:
    """What every study takes."""

    result: Path | None = None
    """Where the JSON goes (default: into OUT)."""
    device: str | None = None
    """cpu, cuda, cuda:1, ... (default: the GPU if there is one)."""


@dataclass(kw_only=True)
class Cells(Study):
    """What every study takes that computes cells, each a JSON file."""

    out: Path | None = None
    """Gets the models and the cells; what is done is not done again (default: runs/STUDY-SIZE)."""
    jobs: int = 1
    """Cells that run side by side, in processes of their own."""


@dataclass(kw_only=True)
class Table1(Study):
    """The paper's Table 1: dense against APN on char Shakespeare."""

    size: table1.Size = "smoke"
    """"smoke": two CPU cores, about two minutes. "paper": the paper's settings, one GPU."""
    out: Path = Path("runs/table1")
    """Gets both runs; what is trained is not trained again."""
    models: tuple[Literal["dense", "apn"], ...] = ("dense", "apn")
    """The rows of the table."""

    def run(self) -> None:
        distributed.parse_device(self.device)
        if not self.models:
            raise ValueError("--models names no model; say dense, apn or both")
        dataset = dataset_of(presets.paper_dense())
        result = self.result or self.out / f"{self.size}.json"
        steps = sum(table1.run_config(model, self.size).train.max_steps for model in self.models)
        with progress_bar(steps // len(self.models), f"table1 {self.size}") as report:
            table1.run(
                self.size,
                dataset,
                self.out / self.size,
                result,
                device=self.device,
                models=self.models,
                report=report,
            )
        show(result)


@dataclass(kw_only=True)
class Table2(Study):
    """The paper's Table 2: adapt to a second domain and measure what is left of the first, with controls."""

    size: table2.Size = "smoke"
    """"smoke": two CPU cores, three to four minutes. "paper": the paper's settings, one GPU."""
    domain_b: str = "paper-shift"
    """The second domain: a name of `attractor data list`, a file, a folder or a quoted glob."""
    out: Path = Path("runs/table2")
    """Gets both models and one JSON per row; what is finished is not done again."""
    seed: int = 0
    """The seed of the batches of B; both models are trained with the seed of their preset."""

    def run(self) -> None:
        distributed.parse_device(self.device)
        check_seed(self.seed)
        dataset = dataset_of(presets.paper_dense())
        result = self.result or self.out / f"{self.size}.json"
        with progress_bar(table2.work(self.size), f"table2 {self.size}") as report:
            table2.run(
                self.size,
                dataset,
                self.out / self.size,
                result,
                domain_b=self.domain_b,
                device=self.device,
                seed=self.seed,
                report=report,
            )
        show(result)


class CellBar:
    """One step per cell; how many there will be is not known before learning rates are chosen."""

    def __init__(self, name: str) -> None:
        from tqdm import tqdm

        self.bar = tqdm(desc=name, unit=" cells")

    def __enter__(self) -> Callable[[dict[str, Any]], None]:
        return self.show

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, record: dict[str, Any]) -> None:
        self.bar.update()
        if not record["found"]:
            self.bar.set_postfix_str(record["cell"], refresh=False)


@dataclass(kw_only=True)
class Grid(Cells):
    """What the studies of the benchmark take."""

    size: Size = "smoke"
    """"smoke": two CPU cores, minutes, no conclusions. "small": between. "full": one GPU."""
    domain: tuple[str, ...] = ()
    """NAME=FILE: one more domain to adapt to, or another text for one that is there."""
    minutes: float | None = None
    """Start no cell later than this; the same command goes on with the rest. 0: only sum up what is there,
    also where the device is not."""

    def measure(self, bench: Benchmark, result: Path) -> None:
        """Run the study, and write its result."""
        raise NotImplementedError

    def run(self) -> None:
        study = type(self).__name__.lower()
        domains = named_texts("--domain", self.domain)
        out = self.out or Path(f"runs/{study}-{self.size}")
        result = self.result or out / "result.json"
        more = {name: getattr(self, name) for name in ("mixture", "seeds") if hasattr(self, name)}
        with CellBar(study) as report:
            bench = Benchmark(
                self.size,
                out,
                domains=domains,
                device=self.device,
                jobs=self.jobs,
                minutes=self.minutes,
                report=report,
                **more,
            )
            self.measure(bench, result)
        show(result)


@dataclass(kw_only=True)
class Forgetting(Grid):
    """What the guard promises, what it costs, and how far overlays can adapt."""

    seed: int = 0
    """The seed of the models and of the batches."""

    def measure(self, bench: Benchmark, result: Path) -> None:
        forgetting.run(bench, result, seed=self.seed)


@dataclass(kw_only=True)
class Repeated(Grid):
    """What those take that are run with several seeds."""

    seeds: int | None = None
    """How many (default: as many as the size has); what is done counts when there are more."""


@dataclass(kw_only=True)
class Shifts(Repeated):
    """The honest benchmark: every method on every shift, alone and behind the guard, and on a stream."""

    methods: tuple[str, ...] = tuple(METHODS)
    """Rows of the table, such as "dense, full" (which is always there: gains are measured by it)."""
    mixture: tuple[str, ...] = MIXTURE
    """The domains of the second pretraining text."""

    def measure(self, bench: Benchmark, result: Path) -> None:
        methods = tuple(dict.fromkeys((shifts.BEST_FULL, *self.methods)))
        shifts.run(bench, result, methods=methods)


@dataclass(kw_only=True)
class Sensitivity(Repeated):
    """What each knob of an APN does to perplexity, routing and forgetting, one at a time."""

    def measure(self, bench: Benchmark, result: Path) -> None:
        sensitivity.run(bench, result)


@dataclass(kw_only=True)
class Knobs(Repeated):
    """What each knob of learning from a stream does to the old and the new domain, one at a time."""

    def measure(self, bench: Benchmark, result: Path) -> None:
        knobs.run(bench, result)


@dataclass(kw_only=True)
class Anatomy(Repeated):
    """The loss by patch, the active sets that occur, and the rank of an update beside a dense FFN's."""

    def measure(self, bench: Benchmark, result: Path) -> None:
        anatomy.run(bench, result)


@dataclass(kw_only=True)
class Locality(Repeated):
    """A stream of domains without labels, guard or replay: sparse patches and basins against everybody."""

    stream: tuple[str, ...] = ()
    """The domains of the stream, in order (default: the first four besides the First Folio)."""
    methods: tuple[str, ...] = tuple(locality.LEARNERS)
    """Rows of the table, such as "basins beside the base"."""

    def measure(self, bench: Benchmark, result: Path) -> None:
        locality.study(bench, result, stream=self.stream, methods=self.methods)


@dataclass(kw_only=True)
class Gaps(Repeated):
    """What the guard's bound does not cover: first tokens, greedy answers, samples, windows that mix."""

    stream: tuple[str, ...] = ()
    """The domains that overlays learn; the first is the one of a single overlay."""
    rate: float | None = None
    """That of every overlay (default: the middle of the size's)."""
    basins_rate: float | None = None
    """That of the basins (default: the middle of the size's)."""

    def measure(self, bench: Benchmark, result: Path) -> None:
        gaps.run(bench, result, stream=self.stream, rate=self.rate, basins_rate=self.basins_rate)


@dataclass(kw_only=True)
class Match(Repeated):
    """APN against dense, MoE and Switch at equal parameters, and at no more multiply-adds per token."""

    mixture: tuple[str, ...] = match.MIXTURE
    """The domains of the mixture."""

    def measure(self, bench: Benchmark, result: Path) -> None:
        match.run(bench, result)


@dataclass(kw_only=True)
class Time(Repeated):
    """The loss of dense, APN, MoE and Switch models against the time of a step, up to a million patches."""

    shapes: tuple[str, ...] = ("default",)
    """What is compared, by names such as "dense 6d", "apn 4/64 r128", "apn 16/65536 r8 product @3" (in block
    3 alone), "moe 8/32 h192" or "switch 4 h1536". "default": those of the size; "banks": a million patches
    and as few beside them."""
    dim: int | None = None
    """The width of all models, whose heads have 64 channels (default: that of the size)."""
    mixture: tuple[str, ...] = equal_time.MIXTURE
    """The domains of the mixture."""
    steps: int | None = None
    """Steps of every training (default: as many as the size has)."""
    rates: tuple[float, ...] = ()
    """Learning rates that the first seed of each shape tries; the best is taken (default: one by kind)."""
    again: tuple[str, ...] = ()
    """Shapes to be trained once more, for as many steps as fit into the time of --within."""
    within: str = "dense 4d"
    """The shape in whose time that is."""
    ways: tuple[time_cells.Way, ...] = time_cells.WAYS
    """How steps are timed: launched one by one, forward and backward of that as a graph, compiled, and
    compiled with CUDA graphs. Without a GPU only the first."""
    decode: bool = True
    """Also time how long a token takes that is written."""
    by: time_cells.Way | None = None
    """The one that is drawn and decides equal time (default: graphs, or the first there is)."""
    shift: str | None = None
    """What shapes of many patches learn by strictly local steps (default: one that is not in MIXTURE)."""
    local_rate: float = 3e-3
    """The learning rate of that."""
    compiled: bool = True
    """Train with torch.compile on a GPU; shapes with product prototypes are never compiled."""
    only: Literal["train", "clock"] | None = None
    """Train or take times alone. What was done is not done again, so that the two can follow each other."""

    def measure(self, bench: Benchmark, result: Path) -> None:
        known = {"default": equal_time.SHAPES[self.size], "banks": equal_time.BANKS}
        ask = equal_time.Ask(
            shapes=[shape for name in self.shapes for shape in known.get(name, (name,))],
            dim=self.dim,
            rates=self.rates,
            steps=self.steps,
            again=self.again,
            within=self.within,
            by=self.by,
            ways=self.ways,
            decode=self.decode,
            shift=self.shift,
            local_rate=self.local_rate,
            compiled=self.compiled,
            trains=self.only != "clock",
            times=self.only != "train",
        )
        equal_time.run(bench, result, ask)


@dataclass(kw_only=True)
class Retrofit(Cells):
    """A pretrained model learns a domain: full fine-tune, LoRA, APN beside its FFNs, alone and guarded."""

    size: retrofit.Size = "smoke"
    """"smoke": a few steps on a CPU, no conclusions. "full": one GPU, ten minutes."""
    model: str = "smollm2-135m"
    """The model, named as for `attractor retrofit`; a Llama-like one, for LoRA names its FFN's matrices."""
    domain: tuple[str, ...] = ()
    """NAME=FILE: what to learn (default: the First Folio)."""
    retain: tuple[str, ...] = ()
    """NAME=FILE: what must not be forgotten (default: the King James Bible and Python)."""
    seed: int = 0
    """The seed of the batches, and of what is new in a model."""

    def run(self) -> None:
        out = self.out or Path(f"runs/retrofit-{self.size}")
        result = self.result or out / "result.json"
        with CellBar("retrofit") as report:
            retrofit.run(
                self.size,
                out,
                result,
                model=self.model,
                device=self.device,
                jobs=self.jobs,
                seed=self.seed,
                domains=named_texts("--domain", self.domain) or retrofit.DOMAINS,
                retained=named_texts("--retain", self.retain) or retrofit.RETAINED,
                report=report,
            )
        show(result)


@dataclass(kw_only=True)
class Capacity(Cells):
    """Bits of made-up biographies that dense and APN models and lessons keep, per parameter."""

    size: capacity.Size = "smoke"
    """"smoke": half a minute on two CPU cores, no conclusions. "full", "large": one GPU."""
    seed: int = 0
    """The seed of the people and of the models."""

    def run(self) -> None:
        out = self.out or Path(f"runs/capacity-{self.size}")
        result = self.result or out / "result.json"
        with CellBar("capacity") as report:
            capacity.run(
                self.size, out, result, device=self.device, jobs=self.jobs, seed=self.seed, report=report
            )
        show(result)


@dataclass(kw_only=True)
class Report:
    """Show results: one HTML page from their JSON, and Markdown with figures where asked."""

    results: tyro.conf.Positional[tuple[Path, ...]]
    """JSON files of studies, in the order in which they are to be shown."""
    out: Path = Path("report.html")
    """Where the page goes."""
    docs: Path | None = None
    """The first page in Markdown; the others go to the folder of its name, figures to figures/ beside it.
    What was written by hand in pages that are already there stays."""

    def run(self) -> None:
        if not self.results:
            raise ValueError("no results given; name JSON files that a study wrote")
        results = [read(path) for path in self.results]
        files = {} if self.docs is None else markdown.render(results, self.docs, self.out)
        files[self.out] = page.render(results)
        markdown.write(files)  # only now: a damaged result leaves what was there
        print("\n".join(f"written to {path}" for path in files))


def show(path: Path) -> None:
    """The tables of a result, as they stand in its file."""
    print(shown(read(path)))
    print(f"written to {path}")


STUDIES: dict[str, Any] = {
    "table1": Table1,
    "table2": Table2,
    "forgetting": Forgetting,
    "shifts": Shifts,
    "sensitivity": Sensitivity,
    "knobs": Knobs,
    "anatomy": Anatomy,
    "locality": Locality,
    "gaps": Gaps,
    "match": Match,
    "time": Time,
    "capacity": Capacity,
    "retrofit": Retrofit,
}

FACTS = {
    "facts": "A pretrained model learns invented people, towns and companies, chunk by chunk.",
    "trivia": "A pretrained model learns questions of TriviaQA, and sits other exams after all.",
    "edits": "A pretrained model learns invented facts one at a time.",
}
"""Studies with options of their own, which need nothing but the package and transformers."""


def _commands() -> Any:
    """The verbs as a type: tyro makes parser and help from it."""
    verb = tyro.conf.subcommand
    found: Any = Annotated[List, verb("list")]
    for name, command in (*STUDIES.items(), ("report", Report)):
        found = found | Annotated[command, verb(name)]
    return found


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    try:
        if arguments and arguments[0] in FACTS:
            importlib.import_module(f"studies.{arguments[0]}").main(arguments[1:])
            return 0
        command = tyro.cli(_commands(), args=arguments, prog="python -m studies", description=__doc__)
        return command.run() or 0
    except (*mistakes(), CellsFailed) as error:
        print(f"studies: {error}", file=sys.stderr)
        return 1
    except GridStopped as stopped:
        print(f"studies: {stopped}", file=sys.stderr)
        return INTERRUPTED
    except KeyboardInterrupt:
        print("studies: interrupted; what was saved is kept", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
