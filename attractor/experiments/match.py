"""APN against dense, MoE and Switch at equal parameters, and at no more multiply-adds per token.

    attractor experiment match --size smoke

Characters of one text, bytes of a mixture, byte pairs of the same mixture. No model gets more training than
another: the same steps and batches; the best validation loss of each counts. The one text is small and is
learned by heart: there all have dropout, stop early, and each has the weight decay that suits it best of the
same two; APN has patch dropout. On the mixture nobody has any of that, and each has the learning rate that
suits it best of the same two. The first seed chooses, for all. Dense is also there with the start that APN
has by default, and experts have it: at small widths that is worth more than the kind of FFN.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attractor import presets
from attractor.config import APNConfig, FFNName, FFNStartName, GPTConfig, MoEConfig, RunConfig
from attractor.experiments.benchmark import Benchmark, slug
from attractor.experiments.grid import Values
from attractor.experiments.plan import HOME
from attractor.experiments.rates import finite
from attractor.experiments.result import write_result

DENSE = "dense"
STARTS: tuple[FFNStartName, ...] = ("gpt2", "unit")
DECAYS = (0.1, 1.0)
"""Of weights, where a text is small."""
RATES = (1e-3, 2e-3)
"""Of learning, where it is not."""


def apn_of_parameters(model: GPTConfig, apn: APNConfig) -> APNConfig:
    """As many patches of twice the rank as have the parameters of a dense FFN, 8 d^2; half as many active.

    Twice the rank, because few wide patches predict better than many narrow ones.
    """
    d, r = model.dim, 2 * apn.rank
    patches = max(2, round((8 * d * d - d * r) / (d + 2 * r + r * d)))
    active = min(max(2, apn.top_k // 2), patches)
    return dataclasses.replace(apn, rank=r, num_patches=patches, top_k=active)


def models(bench: Benchmark) -> dict[str, RunConfig]:
    """At full size no APN has more multiply-adds than dense; the paper's has 256 patches at any width."""
    plan = bench.plan
    run, dim, apn = plan.config(DENSE, 0), plan.model.dim, plan.apn
    experts = plan.moe.num_experts
    mixtures: dict[str, tuple[FFNName, MoEConfig]] = {
        "MoE, equal parameters": ("moe", MoEConfig(num_experts=experts, hidden=4 * dim // experts)),
        "MoE, equal multiply-adds": ("moe", MoEConfig(num_experts=experts)),
        "Switch, equal parameters": (
            "switch", MoEConfig(num_experts=experts // 2, hidden=8 * dim // experts)),
        "Switch, equal multiply-adds": ("switch", MoEConfig(num_experts=experts // 2)),
    }  # fmt: skip
    patches = {
        "APN, equal parameters": apn_of_parameters(plan.model, apn),
        "APN, as planned": apn,
        "APN, twice the patches": dataclasses.replace(apn, num_patches=2 * apn.num_patches),
        "APN, a quarter active": dataclasses.replace(apn, top_k=max(1, apn.top_k // 4)),
        "APN, the paper's": APNConfig(init="paper"),
    }
    usual, unit = (
        dataclasses.replace(run, model=dataclasses.replace(run.model, ffn_start=start)) for start in STARTS
    )
    return (
        {DENSE: usual, "dense, unit start": unit}
        | {name: presets.with_apn(run, config) for name, config in patches.items()}
        | {name: presets.with_mixture(unit, kind, moe) for name, (kind, moe) in mixtures.items()}
    )


class Data(NamedTuple):
    tokenizer: str
    members: list[str]
    is_small: bool = False
    """A small text is learned by heart: models keep the plan's dropout there. Elsewhere they have none."""

    def ways(self, config: RunConfig, steps: int) -> dict[str, RunConfig]:
        """The ways to train a model on this text, by name; the best of them counts."""
        if self.is_small:
            return {f"weight decay {decay:g}": _trained(config, weight_decay=decay) for decay in DECAYS}
        apn = dataclasses.replace(config.model.apn, patch_dropout=0.0)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.0, apn=apn))
        config = _trained(config, max_steps=steps, patience=None)
        return {
            f"rate {rate:g}": _trained(config, learning_rate=rate, min_learning_rate=rate / 10)
            for rate in RATES
        }


def _trained(config: RunConfig, **changes: Any) -> RunConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


def datasets(bench: Benchmark) -> dict[str, Data]:
    mixture = list(bench.mixture)
    return {f"{HOME}, characters": Data("char", [HOME], True), "mixture, bytes": Data("byte", mixture),
            "mixture, byte pairs": Data("bpe", mixture)}  # fmt: skip


def run(bench: Benchmark, result: Path) -> dict[str, Any]:
    data = datasets(bench)
    ways = {
        (dataset, name): data[dataset].ways(config, bench.plan.mixture_steps)
        for dataset in data for name, config in models(bench).items()
    }  # fmt: skip
    tried = _train(bench, ways, 0)
    chosen = {
        key: min(told, key=lambda way, told=told: finite(told[way]["val_loss"]))  # type: ignore[misc]
        for key, told in tried.items()
    }
    only = {key: {chosen[key]: own[chosen[key]]} for key, own in ways.items()}
    seeds = [tried, *(_train(bench, only, seed) for seed in range(1, bench.plan.seeds))]
    found: dict[str, dict[str, Any]] = {}
    for (dataset, name), way in chosen.items():
        parts = [seed[dataset, name][way] for seed in seeds]
        losses = {other: told["val_loss"] for other, told in tried[dataset, name].items()}
        found.setdefault(dataset, {})[name] = {
            "val_loss": [part["val_loss"] for part in parts], "way": way, "first_seed_by_way": losses,
            "best_step": [part["best_step"] for part in parts],
            "parameters": parts[0]["parameters"],
            "multiply_adds_per_token": parts[0]["multiply_adds_per_token"],
            "seconds": [part["training_seconds"] for part in parts], "config": parts[0]["config"],
        }  # fmt: skip
    values = {
        "experiment": "match", "size": bench.size, "seeds": bench.plan.seeds, "texts": bench.hashes,
        "mixture": list(bench.mixture), "datasets": found,
    }  # fmt: skip
    write_result(result, values)
    return values


def _train(
    bench: Benchmark, ways: dict[tuple[str, str], dict[str, RunConfig]], seed: int
) -> dict[tuple[str, str], dict[str, Values]]:
    """Every model in every way given, with one seed."""
    data = datasets(bench)
    cells = {
        (key, way): bench.train(slug(f"{key[1]} {way}"), config, data[key[0]].members,
                                data[key[0]].tokenizer, seed)
        for key, own in ways.items() for way, config in own.items()
    }  # fmt: skip
    done = bench.run({name: cell for part in cells.values() for name, cell in part.items()})
    return {key: {way: done[next(iter(cells[key, way]))] for way in own} for key, own in ways.items()}


def table(values: dict[str, Any]) -> str:
    lines = []
    for dataset, rows in values["datasets"].items():
        dense = min(float(np.mean(row["val_loss"])) for name, row in rows.items() if name.startswith(DENSE))
        lines.append(
            f"{dataset}: validation loss, nats per token, mean of {values['seeds']} seed(s); over best dense"
        )
        for name, row in rows.items():
            loss, spread = float(np.mean(row["val_loss"])), float(np.std(row["val_loss"]))
            size, work = row["parameters"] / 1e6, row["multiply_adds_per_token"] / 1e6
            lines.append(
                f"  {name:30s}{loss:8.4f} +-{spread:.4f}{loss - dense:+9.4f}{size:9.2f}M parameters"
                f"{work:9.2f}M multiply-adds"
            )
    return "\n".join(lines)
