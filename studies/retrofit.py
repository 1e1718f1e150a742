"""A real model learns a domain it knows badly: full fine-tuning, LoRA, APN beside its FFNs, and the guard.

    python -m studies retrofit --domain law=german.txt --retain news=news.txt --jobs 2

SmolLM2-135M (dequantised from 4 bits) sees the same tokens by every method; each has its best learning rate
of the same few on the first domain's validation text, and is taken where it predicts its own domain's
validation text best. Retention is measured on texts that no method trains on, in windows of 256 tokens.
"""

import copy
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from attractor.config import APNConfig
from attractor.continual.guard import Guard
from attractor.data import read_text
from attractor.distributed import parse_device
from attractor.evaluate import autocast, token_losses
from attractor.results import write_result
from studies.adapting import blocks
from studies.grid import Inquiry, Report, Settings, Values, ask_each, origins, run_inquiries
from studies.plan import device_of, tensor_cores
from studies.rates import or_worst
from studies.statistics import interval

Size = Literal["smoke", "full"]
LORA, WIDE_LORA, LORA_ON_ALL = "LoRA on FFN", "LoRA on FFN, rank 96", "LoRA on all, rank 16"
METHODS = ("full fine-tune", LORA, WIDE_LORA, LORA_ON_ALL, "APN beside")
"""The wide LoRA has about as many parameters as the APN layers of the full size."""
APN_ROW = "APN beside"
DOMAINS = {"first-folio": "first-folio"}
RETAINED = {"kjv": "kjv", "python": "python"}
PLANS: dict[str, dict[str, Any]] = {
    "smoke": {
        "steps": 2,
        "batch_size": 1,
        "context": 32,
        "rates": (1e-3,),
        "train": 4000,
        "held_out": 400,
        "evaluations": 1,
        "apn": {"num_patches": 8, "top_k": 2, "rank": 4},
    },
    "full": {
        "steps": 300,
        "batch_size": 16,
        "context": 256,
        "rates": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
        "train": 3_000_000,
        "held_out": 150_000,
        "evaluations": 4,
        "apn": {"num_patches": 16, "top_k": 8, "rank": 64},
    },
}
"""`train` and `held_out` are characters; a domain holds out as much to choose by and as much to test on."""


def work(settings: Settings, folder: Path) -> Values:
    with tensor_cores(device_of(settings)):
        return adapt(settings, folder)


def adapt(settings: Settings, folder: Path) -> Values:
    """One method on one domain with one rate."""
    from attractor.hf import CausalLM
    from attractor.hf.net import Retrofit
    from attractor.hf.pretrained import load_pretrained
    from attractor.hf.teach import teach

    plan, device = PLANS[settings["size"]], device_of(settings)
    rows = 16 if device.type == "cuda" else 8  # a vocabulary of 49,152 makes large logits
    model, tokenizer = load_pretrained(settings["model"], device=device)
    pristine = CausalLM(Retrofit(copy.deepcopy(model)), None, context=plan["context"])
    text = _read(folder, settings["domain"])
    held_out = plan["held_out"]
    pieces = text[: -2 * held_out], text[-2 * held_out : -held_out], text[-held_out:]
    train, validation, test = (tokenizer.encode(piece) for piece in pieces)
    texts = {"B": test} | {
        name: tokenizer.encode(_read(folder, name)[-held_out:]) for name in settings["retained"]
    }

    def losses(predictor: Any) -> dict[str, Any]:
        found = {
            name: token_losses(predictor, tokens, batch_size=rows, autocast=lambda: autocast(device, "auto"))
            for name, tokens in texts.items()
        }
        return {name: blocks(part.double().cpu().numpy()) for name, part in found.items()}

    torch.manual_seed(settings["seed"])
    learner, parameters = prepare(settings["method"], model, train, plan, settings["seed"])
    done = teach(
        learner,
        parameters,
        train,
        validation,
        steps=plan["steps"],
        batch_size=plan["batch_size"],
        learning_rate=settings["rate"],
        evaluations=plan["evaluations"],
        seed=settings["seed"],
    )
    guard = Guard({"base": pristine, "adapted": learner}).to(device).eval()
    bound = guard.bound(plan["context"]) / plan["context"]
    measured = {"before": losses(pristine), "alone": losses(learner), "guarded": losses(guard)}
    size = sum(parameter.numel() for parameter in pristine.parameters())
    return {**measured, "bound": bound, "taught": done, "parameters": size}


def _read(folder: Path, name: str) -> str:
    """To the byte what `write_texts` wrote: line ends too."""
    return (folder / "texts" / f"{name}.txt").read_bytes().decode("utf-8")


def prepare(
    method: str, model: Any, train: np.ndarray, plan: dict[str, Any], seed: int
) -> tuple[Any, list[Any]]:
    """The model as the method changes it, and what of it learns."""
    from attractor.hf import CausalLM
    from attractor.hf.net import Retrofit

    net = Retrofit(model)
    if method == "full fine-tune":
        return CausalLM(net, None, context=plan["context"]), list(model.parameters())
    if method in (LORA, WIDE_LORA, LORA_ON_ALL):
        import peft

        names = ["gate_proj", "up_proj", "down_proj"]
        names += ["q_proj", "k_proj", "v_proj", "o_proj"] if method == LORA_ON_ALL else []
        rank = 96 if method == WIDE_LORA else 16
        peft.get_peft_model(
            model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
        )  # in place
        return CausalLM(net, None, context=plan["context"]), [
            p for p in model.parameters() if p.requires_grad
        ]
    rows = min(32, len(train) // plan["context"])
    sample = torch.from_numpy(train[: rows * plan["context"]].reshape(rows, -1))
    config = APNConfig(**plan["apn"])
    net.add("new", config, prototypes="kmeans", sample=sample, seed=seed, dtype=torch.float32)
    return CausalLM(net, "new", context=plan["context"]), net.trainable_parameters()


def run(
    size: Size,
    folder: Path,
    result: Path,
    *,
    model: str = "smollm2-135m",
    domains: Mapping[str, str] = DOMAINS,
    retained: Mapping[str, str] = RETAINED,
    device: str | None = None,
    jobs: int = 1,
    seed: int = 0,
    report: Report = lambda record: None,
) -> dict[str, Any]:
    plan = PLANS[size]
    hashes = write_texts(folder, plan, domains, retained)
    first, *_ = domains
    asked: set[str] = set()
    known = weights_hash(model)
    weights = {"weights": known} if known else {}
    unread = {method: {"rates"} if method == APN_ROW else {"rates", "apn"} for method in METHODS}

    def cell(domain: str, method: str, rate: float) -> dict[str, Settings]:
        settings = {
            "size": size,
            "model": model,
            "domain": domain,
            "method": method,
            "rate": rate,
            "seed": seed,
            "retained": list(retained),
            "device": str(parse_device(device)),
            "plan": {key: value for key, value in plan.items() if key not in unread[method]},
            "texts": {name: hashes[name] for name in (domain, *retained)},
            **weights,
        }
        return {f"{domain}-{method.replace(' ', '_')}-{rate:g}-{seed}": settings}

    def learned(method: str) -> Inquiry[tuple[dict[float, Values], float, dict[str, Values]]]:
        """By every rate on the first domain; the best rate; by that on every domain."""
        tried = yield from ask_each({rate: cell(first, method, rate) for rate in plan["rates"]})
        best = min(tried, key=lambda rate: or_worst(tried[rate]["taught"]["best"]))
        return tried, best, (yield from ask_each({domain: cell(domain, method, best) for domain in domains}))

    def relayed(record: dict[str, Any]) -> None:
        asked.add(record["cell"])
        report(record)

    with tensor_cores(parse_device(device)):  # what cells say about where they come from
        found = run_inquiries({m: learned(m) for m in METHODS}, work, folder, jobs=jobs, report=relayed)
    values = {
        "experiment": "retrofit",
        "size": size,
        "model": model,
        "seed": seed,
        "rates": {method: best for method, (_, best, _) in found.items()},
        "tried": {
            f"{method} {rate:g}": part["taught"]["best"]
            for method, (tried, _, _) in found.items()
            for rate, part in tried.items()
        },
        "domains": {
            domain: {
                method: row(cells[domain], found[LORA][2][domain], list(retained))
                for method, (_, _, cells) in found.items()
            }
            for domain in domains
        },
        "plan": {**plan, "rates": list(plan["rates"])},
        "cells": origins(folder, asked),
    }
    write_result(result, values)
    return values


def weights_hash(model: str) -> str | None:
    """The hash of the files that a path names; None for a model that is known by its name."""
    place = Path(model)
    files = [place] if place.is_file() else sorted(path for path in place.glob("*") if path.is_file())
    if not files:
        return None
    found = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            found.update(hashlib.file_digest(content, "sha256").digest())
    return found.hexdigest()


def write_texts(folder: Path, plan: dict[str, Any], *sources: Mapping[str, str]) -> dict[str, str]:
    """Every text in a file, for the cells to read; returns their hashes."""
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    hashes: dict[str, str] = {}
    for name, source in (pair for part in sources for pair in part.items()):
        if name in hashes or name == "B":
            raise ValueError(f"{name!r} names two texts, or the new domain itself: choose another name")
        text = read_text(source)
        if len(text) < 4 * plan["held_out"]:
            raise ValueError(f"{source!r} has {len(text):,} characters; {4 * plan['held_out']:,} are needed")
        held_out = 2 * plan["held_out"]
        used = text[:-held_out][: plan["train"]] + text[-held_out:]
        (folder / "texts" / f"{name}.txt").write_text(used, encoding="utf-8", newline="")
        hashes[name] = hashlib.sha256(used.encode()).hexdigest()
    return hashes


def row(cell: Values, lora: Values, retained: Sequence[str]) -> dict[str, Any]:
    """Perplexities of the new domain and of what should be kept, alone and behind the guard."""
    row: dict[str, Any] = {key: cell["taught"][key] for key in ("trained", "seconds", "tokens", "best_step")}
    row["parameters"] = cell["parameters"]
    row["before"] = {name: math.exp(part["loss"]) for name, part in cell["before"].items()}
    for way in ("alone", "guarded"):
        rises = {
            name: math.expm1(cell[way][name]["loss"] - cell["before"][name]["loss"]) for name in retained
        }
        ours, theirs = cell[way]["B"], lora["alone"]["B"]
        apart = ours["loss"] - theirs["loss"]
        pairs = [[a - b for a, b in zip(ours["blocks"], theirs["blocks"], strict=True)]]
        row[way] = {
            "B": math.exp(ours["loss"]),
            "rises": rises,
            "worst_rise": max(rises.values()),
            "B_over_lora": math.exp(apart),
            "B_over_lora_interval": [math.exp(bound) for bound in interval(pairs, apart)],
        }
    return row
