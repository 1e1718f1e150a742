"""APN against dense, MoE and Switch at equal parameters, and at equal multiply-adds per token.

    attractor experiment match --size smoke

Characters of one text, bytes of a mixture, byte pairs of the same mixture. No model gets more training than
another: the same steps, batches, schedule and dropout; the best validation loss of each counts. On the one
text, which is small, all have dropout and stop early, and APN has patch dropout; on the mixture nobody does.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attractor import presets
from attractor.config import APNConfig, GPTConfig, MoEConfig, RunConfig
from attractor.experiments.benchmark import Benchmark, slug
from attractor.experiments.grid import Values
from attractor.experiments.plan import HOME
from attractor.experiments.result import write_result

DENSE = "dense"


def apn_of_parameters(model: GPTConfig, apn: APNConfig) -> APNConfig:
    """As many patches as have the parameters of a dense FFN, 8 d^2."""
    d, r = model.dim, apn.rank
    patches = round((8 * d * d - d * r) / (d + 2 * r + r * d))
    return dataclasses.replace(apn, num_patches=max(patches, apn.top_k))


def apn_of_multiply_adds(model: GPTConfig, apn: APNConfig) -> APNConfig:
    """As many active patches of twice the rank as cost no more than a dense FFN."""
    d, r = model.dim, 2 * apn.rank
    top_k = (8 * d * d - d * apn.num_patches - d * r) // (d * r)
    return dataclasses.replace(apn, rank=r, top_k=max(1, min(top_k, apn.num_patches)))


def models(bench: Benchmark) -> dict[str, RunConfig]:
    plan = bench.plan
    run, dim = plan.config(DENSE, 0), plan.model.dim
    experts = plan.moe.num_experts
    return {
        DENSE: run,
        "APN, equal parameters": presets.with_apn(run, apn_of_parameters(plan.model, plan.apn)),
        "APN, as planned": presets.with_apn(run, plan.apn),
        "APN, equal multiply-adds": presets.with_apn(run, apn_of_multiply_adds(plan.model, plan.apn)),
        "MoE, equal parameters": presets.with_mixture(
            run, "moe", MoEConfig(num_experts=experts, hidden=4 * dim // experts)
        ),
        "MoE, equal multiply-adds": presets.with_mixture(run, "moe", MoEConfig(num_experts=experts)),
        "Switch, equal parameters": presets.with_mixture(
            run, "switch", MoEConfig(num_experts=experts // 2, hidden=8 * dim // experts)
        ),
        "Switch, equal multiply-adds": presets.with_mixture(
            run, "switch", MoEConfig(num_experts=experts // 2)
        ),
    }


class Data(NamedTuple):
    tokenizer: str
    members: list[str]
    is_small: bool = False
    """A small text is overfitted: models keep the plan's dropout there. Elsewhere they have none."""

    def of(self, config: RunConfig, steps: int) -> RunConfig:
        if self.is_small:
            return config
        model = dataclasses.replace(
            config.model, dropout=0.0, apn=dataclasses.replace(config.model.apn, patch_dropout=0.0)
        )
        train = dataclasses.replace(config.train, max_steps=steps, patience=None)
        return dataclasses.replace(config, model=model, train=train)


def datasets(bench: Benchmark) -> dict[str, Data]:
    mixture = list(bench.mixture)
    return {f"{HOME}, characters": Data("char", [HOME], True), "mixture, bytes": Data("byte", mixture),
            "mixture, byte pairs": Data("bpe", mixture)}  # fmt: skip


def run(bench: Benchmark, result: Path) -> dict[str, Any]:
    cells = {
        (dataset, name, seed): bench.train(
            slug(name), data.of(config, bench.plan.mixture_steps), data.members, data.tokenizer, seed
        )
        for dataset, data in datasets(bench).items()
        for name, config in models(bench).items() for seed in range(bench.plan.seeds)
    }  # fmt: skip
    done = bench.run({name: cell for part in cells.values() for name, cell in part.items()})

    def of(dataset: str, name: str) -> list[Values]:
        return [done[next(iter(cells[dataset, name, seed]))] for seed in range(bench.plan.seeds)]

    found = {
        dataset: {
            name: {
                "val_loss": [part["val_loss"] for part in of(dataset, name)],
                "best_step": [part["best_step"] for part in of(dataset, name)],
                "parameters": of(dataset, name)[0]["parameters"],
                "multiply_adds_per_token": of(dataset, name)[0]["multiply_adds_per_token"],
                "seconds": [part["training_seconds"] for part in of(dataset, name)],
                "config": of(dataset, name)[0]["config"],
            }
            for name in models(bench)
        }
        for dataset in datasets(bench)
    }
    values = {
        "experiment": "match", "size": bench.size, "seeds": bench.plan.seeds, "texts": bench.hashes,
        "mixture": list(bench.mixture), "datasets": found,
    }  # fmt: skip
    write_result(result, values)
    return values


def table(values: dict[str, Any]) -> str:
    lines = []
    for dataset, rows in values["datasets"].items():
        dense = float(np.mean(rows[DENSE]["val_loss"]))
        lines.append(f"{dataset}: validation loss in nats per token, mean of {values['seeds']} seed(s)")
        for name, row in rows.items():
            loss, spread = float(np.mean(row["val_loss"])), float(np.std(row["val_loss"]))
            size, work = row["parameters"] / 1e6, row["multiply_adds_per_token"] / 1e6
            lines.append(
                f"  {name:30s}{loss:8.4f} +-{spread:.4f}{loss - dense:+9.4f}{size:9.2f}M parameters"
                f"{work:9.2f}M multiply-adds"
            )
    return "\n".join(lines)
