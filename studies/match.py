"""APN against dense, MoE and Switch at equal parameters, and at no more multiply-adds per token.

    python -m studies match --size smoke

Characters of one text, bytes of a mixture, byte pairs of the same mixture. No model gets more training than
another: the same steps and batches; the best validation loss of each counts, and what diverges has none.
The one text is small and is learned by heart: there all have dropout, stop early, and each has the weight
decay that suits it best of the same two; APN has patch dropout. On the mixture no model has that, there
are three passes at most, and each has the learning rate that suits it best on the same ladder. The first seed
chooses, for all. Dense is also there with the start that APN has by default, and experts have it: at small
widths that is worth more than the kind of FFN.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from attractor import analysis, presets
from attractor.config import APNConfig, FFNName, FFNStartName, GPTConfig, MoEConfig, RunConfig
from attractor.layer import APN
from studies.cells import Benchmark, Cells, slug
from studies.grid import ask_each
from studies.plan import HOME, PAPER, TARGETS
from studies.rates import best_rate, climb

DENSE = "dense"
MIXTURE = (HOME, *(name for name in TARGETS if name != PAPER))
"""Large enough that no model learns it by heart."""
STARTS: tuple[FFNStartName, ...] = ("gpt2", "unit")
DECAYS = (0.1, 1.0)
"""Of weights, where a text is small."""
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
"""Of learning, where it is not: from the middle up or down, as each needs."""


def apn_of_parameters(model: GPTConfig, apn: APNConfig) -> APNConfig:
    """As many patches of twice the rank as have the parameters of a dense FFN, 8 d^2; half as many active.

    Twice the rank, because few wide patches predict better than many narrow ones.
    """
    d, r = model.dim, 2 * apn.rank
    patches = max(2, round((8 * d * d - d * r) / (d + 2 * r + r * d)))
    active = min(max(2, apn.top_k // 2), patches)
    return dataclasses.replace(apn, rank=r, num_patches=patches, top_k=active)


def three_wide(model: GPTConfig, apn: APNConfig) -> APNConfig:
    """As many parameters and multiply-adds in three patches, all active: what is lost by a narrow code?"""
    return dataclasses.replace(apn, num_patches=3, top_k=3, rank=(8 * model.dim - 3) // 4 // 8 * 8)


def experts_like(model: GPTConfig, apn: APNConfig) -> int:
    """As many experts of half a dense FFN as have the parameters of an APN layer."""
    layer = APN.from_config(model.dim, apn, device="meta")
    total = analysis.parameter_counts(layer)["total"]
    return max(2, round(total / (analysis.dense_multiply_adds(model.dim) / 2)))


def models(bench: Benchmark) -> dict[str, RunConfig]:
    """At full size no APN has more multiply-adds than dense; the paper's has 256 patches at any width."""
    plan = bench.plan
    run, dim, apn = plan.config(DENSE, 0), plan.model.dim, plan.apn
    largest = dataclasses.replace(apn, num_patches=4 * apn.num_patches)
    experts = plan.moe.num_experts
    larger = dataclasses.replace(plan.moe, num_experts=experts_like(plan.model, largest))
    mixtures: dict[str, tuple[FFNName, MoEConfig]] = {
        "MoE, equal parameters": ("moe", dataclasses.replace(plan.moe, hidden=4 * dim // experts)),
        "MoE, equal multiply-adds": ("moe", plan.moe),
        "MoE, as large as the largest": ("moe", larger),
        "Switch, equal parameters": (
            "switch",
            MoEConfig(num_experts=experts // 2, hidden=8 * dim // experts),
        ),
        "Switch, equal multiply-adds": ("switch", MoEConfig(num_experts=experts // 2)),
    }
    patches = {
        "APN, equal parameters": apn_of_parameters(plan.model, apn),
        "APN, equal parameters, three patches": three_wide(plan.model, apn),
        "APN, as planned": apn,
        "APN, four times the patches": largest,
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

    @property
    def passes(self) -> int | None:
        """Over the text, at most: of byte pairs there are few, and without dropout they would be known."""
        return None if self.is_small else 3

    @property
    def ladder(self) -> tuple[float, ...]:
        """What each model has the best of: a weight decay or a learning rate."""
        return DECAYS if self.is_small else RATES

    def of(self, config: RunConfig, rung: float, steps: int) -> RunConfig:
        """A model as it is trained on this text."""
        if self.is_small:
            return _trained(config, weight_decay=rung)
        apn = dataclasses.replace(config.model.apn, patch_dropout=0.0)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.0, apn=apn))
        return _trained(
            config, max_steps=steps, patience=None, learning_rate=rung, min_learning_rate=rung / 10
        )


def _trained(config: RunConfig, **changes: Any) -> RunConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


def datasets(bench: Benchmark) -> dict[str, Data]:
    mixture = list(bench.mixture)
    return {
        f"{HOME}, characters": Data("char", [HOME], True),
        "mixture, bytes": Data("byte", mixture),
        "mixture, byte pairs": Data("bpe", mixture),
    }


def run(bench: Benchmark, result: Path) -> dict[str, Any]:
    data, configs = datasets(bench), models(bench)

    def cell(dataset: str, name: str, seed: int, rung: float) -> Cells:
        text = data[dataset]
        config = text.of(configs[name], rung, bench.plan.mixture_steps)
        label = f"{slug(name)}-{rung:g}"
        return bench.train(label, config, text.members, text.tokenizer, seed, passes=text.passes)

    tried = bench.answer(
        {
            (dataset, name): climb(text.ladder, partial(cell, dataset, name, 0))
            for dataset, text in data.items()
            for name in configs
        }
    )
    best = {key: best_rate(rates) for key, rates in tried.items()}
    cells = {
        (key, seed): cell(*key, seed, choice["rate"])
        for seed in range(bench.plan.seeds)  # one after the other: a run that is stopped has whole ones
        for key, choice in best.items()
    }
    done = bench.answer({"": ask_each(cells)})[""]
    found: dict[str, dict[str, Any]] = {}
    for key, choice in best.items():
        dataset, name = key
        parts = [done[key, seed] for seed in range(bench.plan.seeds)]
        found.setdefault(dataset, {})[name] = {
            "val_loss": [part["val_loss"] for part in parts],
            "way": f"{'weight decay' if data[dataset].is_small else 'rate'} {choice['rate']:g}",
            "at_edge": choice["at_edge"] and len(data[dataset].ladder) > 2,
            "first_seed": {str(rung): rates["val_loss"] for rung, rates in sorted(tried[key].items())},
            "best_step": [part["best_step"] for part in parts],
            "parameters": parts[0]["parameters"],
            "multiply_adds_per_token": parts[0]["multiply_adds_per_token"],
            "seconds": [part["training_seconds"] for part in parts],
            "config": parts[0]["config"],
        }
    return bench.write(result, "match", seeds=bench.plan.seeds, mixture=list(bench.mixture), datasets=found)
