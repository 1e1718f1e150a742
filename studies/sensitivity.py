"""What each knob of an APN does: one is changed at a time, everything else stays.

    python -m studies sensitivity --size smoke

Every variant is pretrained on one domain, and then adapted to another by the paper's rule at one rate:
validation perplexity, how evenly patches are used, how much the two domains share them, what is forgotten.
"""

from pathlib import Path
from typing import Any

from studies.cells import Benchmark, Variant
from studies.grid import Inquiry, Values
from studies.plan import HOME, TUNED_ON
from studies.statistics import mean

METHOD = "APN, paper rule"


def variants(bench: Benchmark) -> list[Variant]:
    apn = bench.plan.apn
    patches, top_k, rank = apn.num_patches, apn.top_k, apn.rank
    changed: list[dict[str, Any]] = [
        {},
        *({"num_patches": number} for number in (patches // 4, patches // 2, 2 * patches, 4 * patches)),
        *({"top_k": number} for number in sorted({1, top_k // 4, top_k // 2, 2 * top_k} - {0, top_k})),
        *({"rank": number} for number in (rank // 4, rank // 2, 2 * rank)),
        *({"temperature": tau} for tau in (0.02, 0.2, 0.7)),
        *({"scale": gamma} for gamma in (0.3, 3.0)),
        {"init": "paper"},
        {"gate": "scalar"},
        {"decoder": "shared"},
        {"prototypes": "contextual"},
        *({"patch_dropout": share} for share in (0.0, 0.15, 0.3, 0.5) if share != apn.patch_dropout),
    ]
    found = [Variant(_name(apn) or "as planned", apn=apn) for apn in changed]
    trained: list[dict[str, Any]] = [
        {"balance_weight": 0.01},
        {"entropy_weight": 0.01},
        {"weight_decay": 1.0},
        {"scale_warmup_steps": 200},
    ]
    return found + [Variant(_name(train), train=train) for train in trained]


def _name(changes: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def run(bench: Benchmark, result: Path) -> dict[str, Any]:
    seeds, rate = range(bench.plan.seeds), bench.plan.rates[-2]
    chosen = variants(bench)

    def measured(variant: Variant, seed: int) -> Inquiry[tuple[Values, Values]]:
        trained = yield bench.pretrain("apn", HOME, seed, variant)
        adapted = yield bench.adapt(METHOD, HOME, TUNED_ON, seed, rate, variant)
        return next(iter(trained.values())), next(iter(adapted.values()))

    found: dict[tuple[str, int], tuple[Values, Values]] = {}
    for seed in seeds:  # one after the other: a run that is stopped has whole ones
        found |= bench.answer({(variant.name, seed): measured(variant, seed) for variant in chosen})
    rows = {}
    for variant in chosen:
        trained, learned = zip(*(found[variant.name, seed] for seed in seeds), strict=True)
        layers = [layer for cell in learned for layer in cell["routing"]["before"].values()]
        lost = [c["best"]["alone"][HOME]["loss"] - c["before"][HOME]["loss"] for c in learned]
        rows[variant.name] = {
            "val_ppl": mean(part["val_ppl"] for part in trained),
            "val_ppl_seeds": [part["val_ppl"] for part in trained],
            "parameters": trained[0]["parameters"],
            "multiply_adds_per_token": trained[0]["multiply_adds_per_token"],
            "usage_entropy": mean(layer["entropy"][0] for layer in layers),
            "overlap": mean(layer["overlap"] for layer in layers),
            "forgetting": mean(lost),
            "B": mean(cell["best"]["alone"]["B"]["loss"] for cell in learned),
        }
    return bench.write(
        result,
        "sensitivity",
        seeds=len(seeds),
        rate=rate,
        method=METHOD,
        shift=[HOME, TUNED_ON],
        rows=rows,
        config=bench.plan.config("apn", 0).to_dict(),
    )
