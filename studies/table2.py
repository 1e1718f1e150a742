"""The paper's Table 2: adapt to a second domain, and measure what is left of the first.

python -m studies table2 --size smoke      a few minutes on two CPU cores
python -m studies table2 --size paper      the paper's settings, one GPU

Two protocols. "paper": 500 steps on a text of about 10 KB, which is hundreds of passes over it. "healthy": as
many steps on 200 KB, stopped where the validation text of the new domain is predicted best, and measured on a
test text. Whole trajectories are kept, because the last step alone shows something else than the best one.
"""

import copy
import hashlib
import itertools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from attractor import monitor
from attractor.checkpoint import find_model
from attractor.continual.baselines import FineTune
from attractor.continual.config import LearnConfig, UpdateConfig
from attractor.continual.learner import OnlineLearner
from attractor.data import Batches, Dataset, read_text
from attractor.distributed import parse_device
from attractor.evaluate import autocast, evaluate, perplexity, routing
from attractor.loop import Loop
from attractor.measure import train_and_measure
from attractor.model import GPT
from attractor.results import write_result
from studies.grid import cell_file, read_cell
from studies.methods import PAPER_ROLES
from studies.table1 import run_config

PAPER = {
    "dense, everything": {"A_before": 4.32, "B_before": 4.99, "A_after": 29.44, "B_after": 17.78},
    "APN, paper rule": {"A_before": 4.55, "B_before": 5.26, "A_after": 11.12, "B_after": 6.38},
}
Size = Literal["smoke", "paper"]
Report = Callable[[dict[str, Any]], None]


class Method(Protocol):
    def step(self, inputs: Tensor, targets: Tensor) -> float: ...


class Recipe(NamedTuple):
    """How domain B is learned."""

    characters: int
    steps: int
    batch_size: int
    learning_rate: float
    evaluated: tuple[int, ...]
    stops_early: bool
    tokens_of_A: int | None = None
    """How much of the held-out A is read; None is all of it."""


def protocols(size: Size) -> dict[str, Recipe]:
    if size == "paper":
        evaluated: tuple[int, ...] = (0, 10, 20, 50, 100, 150, 200, 300, 400, 500)
        return {
            "paper": Recipe(10_000, 500, 32, 1e-4, evaluated, False),
            "healthy": Recipe(200_000, 500, 32, 1e-4, evaluated, True),
        }
    evaluated = (0, 5, 15, 30, 60)
    return {
        "paper": Recipe(10_000, 60, 16, 1e-3, evaluated, False, 16_384),
        "healthy": Recipe(100_000, 60, 16, 1e-3, evaluated, True, 16_384),
    }


def work(size: Size) -> int:
    """Steps of training and of adapting, for a progress bar."""
    training = sum(run_config(model, size).train.max_steps for model in ("dense", "apn"))
    return training + len(ROWS) * sum(recipe.steps for recipe in protocols(size).values())


class Row(NamedTuple):
    model: str
    make: Callable[[GPT, float], tuple[Method, int]]


def cast_of(model: GPT) -> Callable[[], AbstractContextManager]:
    return lambda: autocast(model.device, "auto")


def _fine_tune(choose: Callable[[GPT], Any]) -> Callable[[GPT, float], tuple[Method, int]]:
    def make(model: GPT, rate: float) -> tuple[Method, int]:
        options: dict[str, Any] = {"learning_rate": rate, "autocast": cast_of(model)}
        # the weight decay is torch's own, which the paper's code left as it was
        method = FineTune(model, choose(model), weight_decay=0.01, **options)
        return method, sum(parameter.numel() for parameter in method.trainable)

    return make


def _local(model: GPT, rate: float) -> tuple[Method, int]:
    config = LearnConfig(update=UpdateConfig(train=("decoders", "gates"), learning_rate=rate), dropout=True)
    learner = OnlineLearner(model, config=config)
    return learner, sum(p.numel() for number in learner.layers for _, p in learner.update.trained(number))


def _of_roles(*roles: str) -> Callable[[GPT], Any]:
    return lambda model: [p for layer in model.apn_layers().values() for p in layer.parameters_of(*roles)]


ROWS = {
    "dense, everything": Row("dense", _fine_tune(lambda model: "all")),
    "dense, FFN only": Row("dense", _fine_tune(lambda model: "ffn")),
    "APN, everything": Row("apn", _fine_tune(lambda model: "all")),
    "APN, paper rule": Row("apn", _fine_tune(_of_roles(*PAPER_ROLES))),
    "APN, decoders only": Row("apn", _fine_tune(_of_roles("decoders"))),
    "APN, strictly local": Row("apn", _local),
}


class Domains(NamedTuple):
    """Held-out A; B to learn from, to choose the step by, and to measure on."""

    A: np.ndarray
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    left_out: int  # characters of B that the model does not know

    def hash(self) -> str:
        """Of every token, so that a row of another text is not taken for this one."""
        parts = (self.A, self.train, self.validation, self.test)
        return hashlib.sha256(b"|".join(part.astype(np.int64).tobytes() for part in parts)).hexdigest()


def domains(dataset: Dataset, source: str, protocol: Recipe) -> Domains:
    """The paper holds out the last tenth of B; where we stop early, another tenth is the test text."""
    options: dict[str, Any] = {"size": protocol.characters} if source == "paper-shift" else {}
    text = read_text(source, **options)[: protocol.characters]
    tokens, dropped = dataset.tokenizer.encode_known(text)
    held_out = len(tokens) // 10
    if held_out < 2:
        raise ValueError(f"{source!r} has {len(tokens)} tokens that the model knows; that is too little")
    test = tokens[-held_out:]
    validation = tokens[-2 * held_out : -held_out] if protocol.stops_early else test
    rest = 2 * held_out if protocol.stops_early else held_out
    held_out_A = np.asarray(dataset.val)[: protocol.tokens_of_A]
    return Domains(held_out_A, tokens[:-rest], validation, test, dropped.total())


def adapt(
    name: str,
    model: GPT,
    data: Domains,
    protocol: Recipe,
    *,
    seed: int,
    report: Report,
) -> dict[str, Any]:
    """One row: the trajectory of a copy of the model."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    method, trainable = ROWS[name].make(model, protocol.learning_rate)
    trajectory: list[dict[str, Any]] = []

    batches = Batches(data.train, protocol.batch_size, model.config.context, seed)
    loop = Loop(lambda number: method.step(*next(batches)))
    for step in loop.steps(protocol.steps):
        if step in protocol.evaluated:
            texts = {"A": data.A, "B_validation": data.validation, "B": data.test}
            losses = {part: evaluate(model, text, autocast=cast_of(model)) for part, text in texts.items()}
            trajectory.append({"step": step} | {part: perplexity(loss) for part, loss in losses.items()})
        report({"step": step})
    after = model.state_dict()
    changed = sum(int((after[key] != old).sum()) for key, old in before.items())
    best = min(trajectory, key=lambda point: point["B_validation"])
    routed = routing(model, data.test)
    entropies = [monitor.usage_entropy(monitor.usage(s.indices, s.num_patches)) for s in routed.values()]
    return {
        "trajectory": trajectory,
        "before": trajectory[0],
        "after": trajectory[-1],
        "best": best,
        "last_training_loss": loop.loss,
        "trainable": trainable,
        "changed": changed,
        "parameters": sum(value.numel() for value in before.values()),
        "usage_entropy": sum(entropies) / len(entropies) if entropies else None,
        "seconds": loop.seconds,
    }


def overlap(model: GPT, data: Domains) -> dict[str, float]:
    """Layer -> Omega(A, B) / k before adapting: how much of their patches the domains share."""
    a, b = routing(model, data.A[: len(data.test)]), routing(model, data.test)
    return {
        str(layer): monitor.overlap_score(a[layer].indices, b[layer].indices, a[layer].num_patches)
        for layer in a
    }


def run(
    size: Size,
    dataset: Dataset,
    folder: Path,
    result: Path,
    *,
    domain_b: str = "paper-shift",
    device: str | None = None,
    rows: tuple[str, ...] = tuple(ROWS),
    seed: int = 0,
    report: Report = lambda record: None,
) -> dict[str, Any]:
    """Train both models unless they are there, adapt every row, write the result. Finished rows are kept."""
    where = parse_device(device)
    chosen = protocols(size)
    texts = {name: domains(dataset, domain_b, recipe) for name, recipe in chosen.items()}
    found: dict[str, Any] = {}
    wanted = sorted({ROWS[name].model for name in rows}, reverse=True)
    trained = {}
    done = 0

    def progress(doing: str) -> Report:
        return lambda record: report({**record, "doing": doing, "done": done + record["step"]})

    for model in wanted:
        config = run_config(model, size)
        trained[model] = train_and_measure(
            config, dataset, folder / model, device=device, report=progress(f"training {model}")
        )
        done += config.train.max_steps
    models = {model: GPT.from_pretrained(find_model(folder / model), device=where) for model in wanted}
    for name, protocol in chosen.items():
        data = texts[name]
        found[name] = {"settings": protocol._asdict(), "train_tokens": len(data.train), "rows": {}}
        found[name]["left_out"] = data.left_out
        if "apn" in models:
            found[name]["overlap"] = overlap(models["apn"], data)
        for row in rows:
            cell = f"{name}-{row.replace(', ', '-').replace(' ', '-')}-{seed}"
            settings = {
                "protocol": list(protocol),
                "texts": data.hash(),
                "model": trained[ROWS[row].model]["val_loss"],
            }
            values = read_cell(folder, cell, json.loads(json.dumps(settings)))
            if values is None:
                watch = progress(f"{name}: {row}")
                values = adapt(row, models[ROWS[row].model], data, protocol, seed=seed, report=watch)
                write_result(cell_file(folder, cell), {"settings": settings, "values": values})
            found[name]["rows"][row] = values
            done += protocol.steps
    result_values = {
        "experiment": "table2",
        "size": size,
        "seed": seed,
        "domain_b": domain_b,
        "config": {model: values["config"] for model, values in trained.items()},
        "pretrained": {model: values["val_ppl"] for model, values in trained.items()},
        "protocols": found,
        "paper": PAPER if size == "paper" else None,
    }
    write_result(result, result_values)
    return result_values


def _count(number: int) -> str:
    return f"{number / 1e6:.2f}M" if number >= 1e5 else f"{number:,}"


def retention_at(row: dict[str, Any], B: float) -> float | None:
    """A when the trajectory first reaches this perplexity of B; a straight line between evaluations."""
    for before, after in itertools.pairwise(row["trajectory"]):
        if before["B"] > B >= after["B"]:
            share = (before["B"] - B) / (before["B"] - after["B"])
            return before["A"] + share * (after["A"] - before["A"])
    return None


def verdict(result: dict[str, Any]) -> list[str]:
    """What the numbers say, for or against."""
    sentences = []
    for name, part in result["protocols"].items():
        rows = part["rows"]
        worse = [row for row, values in rows.items() if values["after"]["B"] > values["before"]["B"]]
        if worse:
            sentences.append(
                f"{name}: after the last step {len(worse)} of {len(rows)} rows predict B worse than before "
                f"adapting ({', '.join(worse)}); their best step was "
                f"{', '.join(str(rows[row]['best']['step']) for row in worse)}."
            )
        dense, rule = rows.get("dense, everything"), rows.get("APN, paper rule")
        if dense and rule:
            end, best = rule["after"]["A"] / dense["after"]["A"], rule["best"]["A"] / dense["best"]["A"]
            sentences.append(
                f"{name}: retention perplexity of the paper's rule over dense fine-tuning is {end:.2f} at "
                f"the last step and {best:.2f} at each one's best step, where B is "
                f"{rule['best']['B'] / dense['best']['B']:.2f} of dense."
            )
        control = rows.get("dense, FFN only")
        if control and rule:
            a, b = (rule["best"][x] / control["best"][x] for x in ("A", "B"))
            sentences.append(
                f"{name}: against the control that trains only the dense FFN, at the best steps: A {a:.2f}, "
                f"B {b:.2f} (below 1 the paper's rule is better)."
            )
            same = retention_at(control, rule["best"]["B"])
            if same is not None:
                sentences.append(
                    f"{name}: where that control predicts B as well ({rule['best']['B']:.2f}), its A is "
                    f"{same:.2f}; the paper's rule has {rule['best']['A']:.2f}."
                )
        local = rows.get("APN, strictly local")
        if local and rule:
            sentences.append(
                f"{name}: the paper's rule changed {_count(rule['changed'])} parameters, the strictly local "
                f"one {_count(local['changed'])}."
            )
    return sentences
