"""Train, sample and study Attractor Patch Networks. `attractor VERB --help` tells what a verb takes."""

import dataclasses
import json
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from attractor import analysis, bench, distributed, ops, presets
from attractor.checkpoint import find_model, read_metrics
from attractor.config import RunConfig, check_choice, check_size
from attractor.corpora import CORPORA, CorpusUnavailable
from attractor.data import Dataset, prepare
from attractor.experiments import demo, table1
from attractor.experiments.result import write_result
from attractor.generate import generate
from attractor.model import GPT
from attractor.tokenizer import load as load_tokenizer
from attractor.trainer import NotFiniteLoss, Trainer
from attractor.version import __version__

INTERRUPTED = 75
"""Exit code of a run that a signal stopped after saving: run it again with --resume auto."""


@dataclass(kw_only=True)
class DataList:
    """Name the built-in corpora."""

    def run(self) -> None:
        for corpus in CORPORA.values():
            print(f"{corpus.name:12s} {corpus.description} [{corpus.licence}]")


@dataclass(kw_only=True)
class DataPrepare:
    """Turn a corpus, a file, a folder or a glob into train.bin, val.bin and tokenizer.json."""

    source: tyro.conf.Positional[str]
    """A name of `attractor data list`, a file, a folder or a quoted glob."""
    out: Path | None = None
    """Where to write (default: data/NAME)."""
    tokenizer: str = "char"
    """"char", "byte", "bpe", or the tokenizer.json of another dataset."""
    vocab_size: int | None = None
    """Size of a BPE vocabulary (default: 4096)."""
    val_fraction: float = 0.1
    """The last part of the text, held out for validation."""
    size: int | None = None
    """Characters of paper-shift: 10000 for the paper's protocol, 200000 for a healthy one."""
    overwrite: bool = False
    """Replace a dataset that was prepared differently."""

    def run(self) -> None:
        out = self.out or Path("data") / Path(self.source).stem
        options: dict[str, Any] = {} if self.size is None else {"size": self.size}
        dataset = prepare(
            self.source, out, tokenizer=self.tokenizer, vocab_size=self.vocab_size,
            val_fraction=self.val_fraction, overwrite=self.overwrite,
            **options,
        )  # fmt: skip
        print(f"{out}: {len(dataset.train):,} training and {len(dataset.val):,} validation tokens, "
              f"vocabulary {dataset.tokenizer.vocab_size:,}")  # fmt: skip


@dataclass(kw_only=True)
class Train:
    """Train a model from a preset. Every number of the preset can be changed."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    out: Path | None = None
    """The run's folder (default: runs/PRESET)."""
    resume: Literal["never", "auto"] = "never"
    """"auto" goes on from the run's last checkpoint if there is one."""
    device: str | None = None
    """cpu, cuda, cuda:1, ... (default: the GPU if there is one)."""
    preset: tyro.conf.Suppress[str] = ""

    def run(self) -> int:
        with distributed.world(self.device) as (world, device):
            return self.run_in(world, device)

    def run_in(self, world: distributed.World, device: torch.device) -> int:
        out = self.out or Path("runs") / self.preset
        dataset = world.one_per_machine_first(lambda: _dataset(self.config))
        model = dataclasses.replace(self.config.model, vocab_size=dataset.tokenizer.vocab_size)
        config = dataclasses.replace(self.config, model=model)
        if self.resume == "never" and world.from_leader((out / "checkpoints").exists):
            raise ValueError(
                f"{out} holds a run already; --resume auto goes on with it, --out starts another"
            )
        with progress_bar(config.train.max_steps, self.preset, shown=world.is_leader) as report:
            trainer = Trainer(config, dataset, out, device=device, world=world, report=report)
            if self.resume == "auto" and trainer.resume():
                report({"step": trainer.step})
            summary = trainer.run()
        if world.is_leader:
            print(json.dumps(summary, indent=2))
            if summary["interrupted"]:
                print(f"stopped at step {summary['step']}; --resume auto goes on", file=sys.stderr)
        return INTERRUPTED if summary["interrupted"] else 0


@dataclass(kw_only=True)
class Sample:
    """Write text with a trained model."""

    run_folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(name="run")]
    """A run, a checkpoint or a saved model."""
    prompt: str = "\n"
    max_tokens: int = 300
    temperature: float = 0.8
    """0 always takes the likeliest token."""
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    device: str = "cpu"

    def run(self) -> None:
        folder = find_model(self.run_folder)
        model, tokenizer = (
            GPT.from_pretrained(folder, device=self.device),
            load_tokenizer(folder / "tokenizer.json"),
        )
        tokens = torch.from_numpy(tokenizer.encode(self.prompt))[None].to(self.device)
        shown, written = tokenizer.decode(tokens[0].tolist()), tokens[0].tolist()
        print(shown, end="", flush=True)
        for token in generate(
            model, tokens, max_tokens=self.max_tokens, temperature=self.temperature, top_k=self.top_k,
            top_p=self.top_p, seed=self.seed,
        ):  # fmt: skip
            written.append(int(token))
            text = tokenizer.decode(written)  # a character may take several tokens: print what became whole
            if not text.endswith("\ufffd"):
                print(text[len(shown) :], end="", flush=True)
                shown = text
        print()


@dataclass(kw_only=True)
class Info:
    """Describe a trained model, or what this machine can run."""

    run_folder: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(name="run")] = None
    """A run, a checkpoint or a saved model."""
    backends: bool = False
    """Tell which backends this machine has."""

    def run(self) -> None:
        if self.backends or self.run_folder is None:
            print(describe_machine())
        if self.run_folder is not None:
            print(model_card(find_model(self.run_folder)))


@dataclass(kw_only=True)
class Demo:
    """Train a tiny dense and a tiny APN model and write a report: two to three minutes on two CPU cores."""

    out: Path = Path("runs/demo")
    """Gets demo.json, report.html and both runs; a demo that was stopped goes on from there."""
    steps: int = demo.STEPS
    """Training steps of each model."""
    device: str | None = None
    """cpu, cuda, cuda:1, ... (default: the GPU if there is one)."""

    def run(self) -> None:
        check_size("steps", self.steps)
        distributed.parse_device(self.device)
        dataset = _dataset(presets.tiny_apn())
        with progress_bar(len(demo.MODELS) * self.steps, "demo") as report:
            result = demo.run(self.out, dataset, steps=self.steps, device=self.device, report=report)
        print(demo.table(result), demo.routing(result), demo.samples(result), sep="\n\n")
        print(f"\nThe report, with curves and charts: {(self.out / 'report.html').resolve().as_uri()}")


@dataclass(kw_only=True)
class ExperimentList:
    """Name the experiments."""

    def run(self) -> None:
        print(f"table1       {Table1.__doc__}")


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
        dataset = _dataset(presets.paper_dense())
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
class BenchLayer:
    """Time the layer beside the dense FFN, an adapter and an MoE: forward, backward, memory."""

    device: str | None = None
    """cpu, cuda, cuda:1, ... (default: the GPU if there is one)."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Default: bfloat16 on a GPU, float32 on a CPU."""
    sweep: bool = False
    """Many sizes around the paper's instead of the four of docs/performance.md."""
    rounds: int = 1
    """Take turns this often and give medians; 3 or more on a machine that does other work."""
    json: Path | None = None
    """Where the JSON goes (default: nowhere)."""

    def run(self) -> None:
        device = distributed.parse_device(self.device)
        check_size("rounds", self.rounds)
        dtype = self.dtype or ("bfloat16" if device.type == "cuda" else "float32")
        sizes = (
            bench.sweep_sizes() if self.sweep else bench.SIZES if device.type == "cuda" else bench.SIZES[:1]
        )
        results = bench.bench_layer(sizes, device, bench.DTYPES[dtype], print, self.rounds)
        _write(self.json, "bench layer", {"dtype": dtype, "rounds": self.rounds}, results=results)


@dataclass(kw_only=True)
class BenchTrain:
    """Time whole training steps: data, forward, backward, clipping and the optimizer."""

    presets: tuple[str, str] = ("paper_dense", "paper_apn")
    """The first is what the second is compared with."""
    steps: int = 60
    device: str | None = None
    json: Path | None = None

    def run(self) -> None:
        device = distributed.parse_device(self.device)
        check_size("steps", self.steps)
        _check_presets(self.presets)
        rows = [bench.measure_train(preset, device, self.steps) for preset in self.presets]
        ratio = rows[1]["step"] / rows[0]["step"]
        print(f"a step of {self.presets[1]} takes {ratio:.3f} of one of {self.presets[0]}")
        _write(self.json, "bench train", {"steps": self.steps}, rows=rows, ratio=ratio)


@dataclass(kw_only=True)
class BenchDecode:
    """Time the next token of one and of several streams, half a context into the text."""

    presets: tuple[str, str] = ("paper_dense", "paper_apn")
    streams: tuple[int, ...] = (1, 64)
    device: str | None = None
    json: Path | None = None

    def run(self) -> None:
        device = distributed.parse_device(self.device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        _check_presets(self.presets)
        results = []
        for streams in self.streams:
            check_size("streams", streams)
            dense, apn = (bench.measure_decode(name, streams, device, dtype) for name in self.presets)
            ratios = {kind: apn[kind] / dense[kind] for kind in ("graph", "eager") if kind in dense}
            results.append({"streams": streams, "rows": [dense, apn], "ratios": ratios})
            shown = ", ".join(f"{kind} {ratio:.3f}" for kind, ratio in ratios.items())
            print(f"{streams} streams, {self.presets[1]} over {self.presets[0]}: {shown}")
        _write(self.json, "bench decode", {"dtype": str(dtype)}, results=results)


def _check_presets(names: tuple[str, ...]) -> None:
    for name in names:
        check_choice("preset", name, tuple(presets.NAMES))


def _write(path: Path | None, experiment: str, config: dict[str, Any], **values: Any) -> None:
    if path is not None:
        write_result(path, {"experiment": experiment, "config": config, "seed": 0, **values})


def _dataset(config: RunConfig) -> Dataset:
    data = config.data
    folder = Path(data.source)
    if (folder / "meta.json").is_file():
        return Dataset.open(folder)
    return prepare(
        data.source, Path("data") / f"{folder.stem}-{Path(data.tokenizer).stem}", tokenizer=data.tokenizer,
        vocab_size=data.vocab_size, val_fraction=data.val_fraction,
    )  # fmt: skip


def describe_machine() -> str:
    device = distributed.parse_device(None)
    name = (
        torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    )
    lines = [f"attractor {__version__}, torch {torch.__version__}, {name}"]
    for backend in ops.BACKENDS:
        reason = ops.why_not(backend, device, torch.float32)
        lines.append(f"  {backend:10s} " + (f"no: {reason}" if reason else "yes"))
    return "\n".join([*lines, f"  auto is {ops.choose_backend(device, torch.float32)}"])


def model_card(folder: Path) -> str:
    model = GPT.from_pretrained(folder)
    layers = model.apn_layers()
    lines = [f"model            {folder}", f"parameters       {model.num_parameters():,} without positions"]
    if layers:
        idle = sum(c["total"] - c["active"] for c in map(analysis.parameter_counts, layers.values()))
        lines += [
            f"  one token uses {model.num_parameters() - idle:,}",
            f"APN layers       {next(iter(layers.values()))}",
        ]
    lines.append(f"multiply-adds    {analysis.model_multiply_adds(model):,} per token, forward")
    run = folder.parent.parent
    if (folder / "run.json").is_file():
        data = RunConfig.from_json((folder / "run.json").read_text()).data
        lines.append(f"data             {data.source}, {data.tokenizer} tokens")
    records = read_metrics(run / "metrics.jsonl")
    if evaluations := [(r["val/loss"], r["step"]) for r in records if r.get("val/loss") is not None]:
        loss, step = min(evaluations)
        lines.append(f"best validation  {math.exp(loss):.4f} perplexity at step {step}")
    return "\n".join(lines)


class progress_bar:
    """A tqdm bar that follows the records of a run; evaluations stay on the screen as lines."""

    def __init__(self, steps: int, name: str, *, shown: bool = True) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=steps, desc=name, unit="step", mininterval=0.5, disable=not shown)

    def __enter__(self) -> Callable[[dict[str, Any]], None]:
        return self.show

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, record: dict[str, Any]) -> None:
        doing = record.get("doing", "")  # of several models, which one
        self.bar.n = record.get("done", record["step"])
        if doing:
            self.bar.set_description_str(doing, refresh=False)
        if "train/loss" in record:
            speed = record["train/tokens_per_second"]
            self.bar.set_postfix_str(f"loss {record['train/loss']:.3f}, {speed:,.0f} tokens/s", refresh=False)
        if record.get("val/ppl") is not None:
            line = f"{doing:14s} step {record['step']:6d}  validation perplexity {record['val/ppl']:.4f}"
            self.bar.write(line.lstrip(), file=sys.stderr)  # stdout is for the result
        self.bar.refresh()


def _commands() -> Any:
    """The tree of verbs as a type: tyro makes parser, help and completion from it."""
    train = tyro.extras.subcommand_type_from_defaults(
        {name: Train(config=preset(), preset=name) for name, preset in presets.NAMES.items()},
        {name: preset.__doc__ or "" for name, preset in presets.NAMES.items()},
    )
    verb = tyro.conf.subcommand
    return (
        Annotated[
            Annotated[DataList, verb("list")] | Annotated[DataPrepare, verb("prepare")],
            verb("data", description="List and prepare texts."),
        ]
        | Annotated[train, verb("train", description="Train a model from a preset.")]
        | Annotated[Sample, verb("sample")]
        | Annotated[Info, verb("info")]
        | Annotated[Demo, verb("demo")]
        | Annotated[
            Annotated[ExperimentList, verb("list")] | Annotated[Table1, verb("table1")],
            verb("experiment", description="Reproduce a table or a figure."),
        ]
        | Annotated[
            Annotated[BenchLayer, verb("layer")]
            | Annotated[BenchTrain, verb("train")]
            | Annotated[BenchDecode, verb("decode")],
            verb("bench", description="Measure speed and memory, always beside the dense FFN."),
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    if arguments == ["--version"]:
        print(f"attractor {__version__}")
        return 0
    command = tyro.cli(_commands(), args=arguments, prog="attractor", description=__doc__)
    try:
        return command.run() or 0
    except (ValueError, OSError, CorpusUnavailable, NotFiniteLoss) as error:
        print(f"attractor: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("attractor: interrupted; what was saved can be resumed", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
