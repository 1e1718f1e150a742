"""Pretrain a model, and adapt it by one method to one new domain: the cells of the benchmark."""

import copy
import dataclasses
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attractor import monitor
from attractor import tokenizer as tokenizers
from attractor.checkpoint import find_model
from attractor.config import RunConfig
from attractor.continual.guard import Guard
from attractor.continual.overlay import fingerprint
from attractor.continual.update import NotFiniteUpdate
from attractor.data import Batches, Dataset
from attractor.evaluate import autocast, evaluate, routing, token_losses
from attractor.lm import LanguageModel, TrainableModel
from attractor.loop import Loop
from attractor.measure import train_and_measure
from attractor.model import GPT
from attractor.tokenizer import ByteTokenizer
from attractor.trainer import NotFiniteLoss
from studies.grid import Settings, Values
from studies.methods import METHODS, Adapter, Situation
from studies.plan import PLANS, Plan, Text, device_of, domain, load_base

BLOCK = 1024
"""Tokens of a block, for the bootstrap: the losses of neighbours are not independent."""


def pretrain(settings: Settings, folder: Path) -> Values:
    """Train a model to its best validation loss; the values are those of `train_and_measure`."""
    plan = PLANS[settings["size"]]
    texts = [domain(plan, folder, name) for name in settings["members"]]
    dataset = tokens_of(plan, settings["tokenizer"], texts, folder)
    config = RunConfig.from_dict(settings["config"])
    if (passes := settings.get("passes")) is not None:
        tokens = config.train.batch_size * config.model.context
        most = min(config.train.max_steps, max(1, passes * len(dataset.train) // tokens))
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=most))
    place = own_folder(folder / "pretrained" / settings["base"], settings)
    values = train_and_measure(config, dataset, place, device=settings["device"], report=lambda record: None)
    return {**values, "base": fingerprint(GPT.from_pretrained(find_model(place)))}


def own_folder(place: Path, settings: Settings) -> Path:
    """With what these settings left there, if anything: a model of others is not one to go on with."""
    mark, described = place / "settings.json", json.dumps(settings, sort_keys=True)
    if place.exists() and (not mark.is_file() or mark.read_text() != described):
        shutil.rmtree(place)
    place.mkdir(parents=True, exist_ok=True)
    mark.write_text(described)
    return place


def train(settings: Settings, folder: Path) -> Values:
    """The same for a model that is only compared: if it diverges it has no loss, and the others go on.

    It is not needed afterwards, and there are many.
    """
    try:
        values = pretrain(settings, folder)
    except NotFiniteLoss:
        unknown = dict.fromkeys(("val_loss", "best_step", "parameters", "multiply_adds_per_token"))
        values = {**unknown, "training_seconds": None, "config": settings["config"]}
    shutil.rmtree(folder / "pretrained" / settings["base"])
    return values


def tokens_of(plan: Plan, kind: str, texts: Sequence[Text], folder: Path) -> Dataset:
    """The training and validation parts of all texts, one after the other, in tokens of this kind."""
    train, val = (np.concatenate([text[part] for text in texts]) for part in (0, 1))
    if kind == "byte":
        return Dataset(folder, {"unknown_characters": {}}, ByteTokenizer(), train, val)
    words = [part.astype(np.uint8).tobytes().decode(errors="replace") for part in (train, val)]
    known = "".join(words) if kind == "char" else words[0]
    tokenizer = tokenizers.train(kind, known, plan.bpe_vocabulary if kind == "bpe" else None)
    return Dataset(folder, {"unknown_characters": {}}, tokenizer, *(tokenizer.encode(text) for text in words))


class Meter:
    """Losses on whole texts, alone and behind the guard."""

    def __init__(self, base: GPT, texts: Mapping[str, np.ndarray]) -> None:
        self.base, self.texts = base, dict(texts)

    def cast(self) -> AbstractContextManager:
        return autocast(self.base.device, "auto")

    def losses(self, model: LanguageModel, name: str) -> np.ndarray:
        return token_losses(model, self.texts[name], autocast=self.cast).double().cpu().numpy()

    def measure(self, model: LanguageModel) -> dict[str, dict[str, Any]]:
        """For every text the mean loss, and that of each block."""
        return {name: blocks(self.losses(model, name)) for name in self.texts}

    def guarded(self, model: LanguageModel) -> Guard:
        guard = Guard({"base": self.base, "adapted": model})
        return guard.to(self.base.device).eval()


def blocks(losses: np.ndarray) -> dict[str, Any]:
    size = min(BLOCK, max(1, len(losses) // 4))
    whole = losses[: len(losses) // size * size].reshape(-1, size).mean(1)
    return {"loss": float(losses.mean()), "blocks": [round(float(mean), 5) for mean in whole]}


def adapt(settings: Settings, folder: Path) -> Values:
    """One method on one shift: where it was best by B's validation text, and the way there."""
    plan, device = PLANS[settings["size"]], device_of(settings)
    base = load_base(folder, settings["base"], device)
    before_hash = fingerprint(base)
    old = {name: domain(plan, folder, name) for name in settings["members"]}
    new = domain(plan, folder, settings["shift"])
    meter = Meter(base, {name: text.test for name, text in old.items()} | {"B": new.test})
    torch.manual_seed(settings["seed"])
    adapter = METHODS[settings["method"]].make(situation(plan, settings, base, old))
    steps = plan.steps_on(len(new.train))
    trajectory: list[dict[str, Any]] = []
    looks: list[dict[str, dict[str, Any]]] = []
    best: dict[str, Any] = {"validation": math.inf}
    kept: TrainableModel | None = None

    diverged = None
    batches = Batches(new.train, plan.batch_size, base.config.context, settings["seed"])
    loop = Loop(lambda step: adapter.step(*next(batches), plan.rate_at(step, settings["rate"], steps)))
    try:
        for step in loop.steps(steps):
            if step not in plan.evaluated(steps):
                continue
            validation = evaluate(adapter.model, new.validation, autocast=meter.cast)
            alone = meter.measure(adapter.model)
            looks.append(alone)
            losses = {name: part["loss"] for name, part in alone.items()}
            trajectory.append({"step": step, "validation": validation, "losses": losses})
            if validation < best["validation"]:
                best = {"step": step, "validation": validation, "alone": alone, **sizes(adapter, base)}
                kept = copy.deepcopy(adapter.model)
    except NotFiniteUpdate:  # this rate is too high: what was best before stays its result
        diverged = loop.step
    if kept is None:
        raise ValueError("no loss of B's validation text was finite, not even before learning")
    guard = meter.guarded(kept)
    best["guarded"] = meter.measure(guard)
    return {
        "base": before_hash,
        "before": looks[0],
        "best": best,
        "diverged": diverged,
        "trajectory": trajectory,
        "trained": adapter.trained,
        "extra_bytes": adapter.extra_bytes,
        "seconds": loop.seconds,
        "tokens": steps * plan.batch_size * base.config.context,
        "base_unchanged": fingerprint(base) == before_hash,
        "bound": guard.bound(base.config.context) / base.config.context,
        "routing": usage(base, kept, old, new),
    }


def situation(plan: Plan, settings: Settings, base: GPT, old: Mapping[str, Text]) -> Situation:
    """The old text that a method may keep is spread evenly over each domain of it."""
    context, device = base.config.context, base.device
    by_domain = []
    for text in old.values():
        starts = np.linspace(0, len(text.train) - context - 1, plan.memory // len(old)).astype(np.int64)
        rows = torch.from_numpy(text.train[starts[:, None] + np.arange(context + 1)])
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(settings["seed"]))
        rows = rows[order].to(device)
        by_domain.append((rows[:, :-1], rows[:, 1:]))
    background = np.concatenate([text.train[: plan.val_bytes] for text in old.values()])
    return Situation(base, by_domain, background, settings["rate"], settings["seed"])


def sizes(adapter: Adapter, base: GPT) -> dict[str, int]:
    """Numbers that differ from the base, and the bytes it takes to keep them."""
    if adapter.branch is not None:
        delta = adapter.branch.overlay().delta
        return {"changed": sum(value.numel() for value in delta.values()), "bytes": delta.nbytes}
    old, new = base.state_dict(), adapter.model.state_dict()
    # LoRA puts a module in the place of each map: the map is then its "linear", and two factors are new
    factors = [v for name, v in new.items() if name not in old and not name.endswith(".linear.weight")]
    changed = sum(int((value != old[name]).sum()) for name, value in new.items() if name in old)
    changed += sum(factor.numel() for factor in factors)
    return {"changed": changed, "bytes": 4 * changed}


def usage(base: GPT, adapted: TrainableModel, old: Mapping[str, Text], new: Text) -> dict[str, Any] | None:
    """How the patches are used: by A and by B, before and after."""
    if not base.apn_layers():
        return None
    length = len(new.validation)
    texts = {
        "A": np.concatenate([text.validation[: length // len(old)] for text in old.values()]),
        "B": new.validation,
    }
    found: dict[str, Any] = {}
    for when, model in (("before", base), ("after", adapted)):
        stats = {name: routing(model, text) for name, text in texts.items()}
        layers = {}
        for layer in base.apn_layers():
            a, b = stats["A"][layer], stats["B"][layer]
            counts = [monitor.usage(part.indices, part.num_patches) for part in (a, b)]
            layers[str(layer)] = {
                "entropy": [monitor.usage_entropy(count) for count in counts],
                "overlap": monitor.overlap_score(a.indices, b.indices, a.num_patches),
                "usage": [[round(float(x), 5) for x in count] for count in counts],
            }
        found[when] = layers
    return found
