"""What the guard promises, tried hard: overlays that want to do harm, and what guarded generation costs."""

import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attractor.continual.guard import Guard
from attractor.continual.overlay import Branch, fingerprint
from attractor.data import Batches
from attractor.evaluate import autocast, evaluate
from attractor.generate import sample
from attractor.lm import LanguageModel, mode
from attractor.loop import Loop, descend
from studies.adapting import situation
from studies.grid import Settings, Values
from studies.methods import METHODS, PAPER_ROLES
from studies.plan import PLANS, Plan, device_of, domain, load_base

HARMS = ("random", "huge", "trained to be wrong", "trained against the guard")


def harm(settings: Settings, folder: Path) -> Values:
    """The perplexity of A under the guard with overlays made to ruin it, against the bound."""
    plan, device = PLANS[settings["size"]], device_of(settings)
    base = load_base(folder, settings["base"], device)
    unchanged = fingerprint(base)
    text = domain(plan, folder, settings["members"][0])

    def cast_() -> Any:
        return autocast(device, "auto")

    before = evaluate(base, text.test, autocast=cast_)
    found = {}
    for name in HARMS:
        branch = Branch(base, roles=PAPER_ROLES, attention="whole", also=("embedding", "norms"))
        guard = Guard({"base": base, "harmful": branch.model}).to(device)
        _spoil(name, branch, guard, text.train, plan, settings["seed"])
        after = evaluate(guard, text.test, autocast=cast_)
        found[name] = {
            "alone": evaluate(branch.model, text.test, autocast=cast_),
            "guarded": after,
            "rise": math.expm1(after - before),
        }
    context = base.config.context
    bound = guard.bound(len(text.test) - 1) / (len(text.test) - 1)
    return {
        "before": before,
        "overlays": found,
        "bound": math.expm1(bound),
        "window": context,
        "base": unchanged,
        "base_unchanged": fingerprint(base) == unchanged,
    }


def _spoil(name: str, branch: Branch, guard: Guard, train: np.ndarray, plan: Plan, seed: int) -> None:
    own = [layer.get_parameter(key) for _, layer, key in branch._own()] + list(branch.others.values())
    chance = torch.Generator().manual_seed(seed)
    if name in ("random", "huge"):
        with torch.no_grad():
            for parameter in own:
                drawn = torch.randn(parameter.shape, generator=chance).to(parameter)
                parameter.copy_(drawn * parameter.std() * (1 if name == "random" else 100))
        return
    victim = branch.model if name == "trained to be wrong" else guard
    guard.requires_grad_(False)
    for parameter in own:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(own, weight_decay=0.0)
    device = branch.model.device
    batches = Batches(train, plan.batch_size, branch.model.config.context, seed)

    def take(step: int) -> Tensor:
        inputs, targets = (part.to(device) for part in next(batches))
        with mode(victim, training=False), autocast(device, "auto"):
            logits = victim(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        descend(optimizer, [-loss], 1e-3, clip=own, clip_norm=1.0)
        return loss.detach()

    Loop(take).run_until(plan.steps // 3)


def speed(settings: Settings, folder: Path) -> Values:
    """Tokens per second of guarded generation after the posterior settled, over those of the overlay alone.

    An overlay learns B; texts of B are prompts; then both write, in turns. A guard's tokens count from when a
    path first rests.
    """
    plan, device = PLANS[settings["size"]], device_of(settings)
    base = load_base(folder, settings["base"], device)
    old = {name: domain(plan, folder, name) for name in settings["members"]}
    new = domain(plan, folder, settings["shift"])
    adapter = METHODS[settings["method"]].make(situation(plan, settings, base, old))
    batches = Batches(new.train, plan.batch_size, base.config.context, settings["seed"])
    loop = Loop(lambda step: adapter.step(*next(batches), plan.rate_at(step, settings["rate"], plan.steps)))
    loop.run_until(plan.steps)
    guard = Guard({"base": base, "adapted": adapter.model}, pause=settings["pause"]).to(device).eval()
    context = base.config.context
    prompt_length, rounds = context * 5 // 8, 6
    found: dict[str, list[float]] = {"guarded": [], "alone": []}
    settled_after: list[int | None] = []
    for number in range(rounds):
        start = number * context
        prompt = torch.from_numpy(new.test[start : start + prompt_length])[None].to(device)
        for name, model in (("guarded", guard), ("alone", adapter.model)):
            cache = model.new_cache(1)
            rates, settled = _write(model, cache, prompt, context - prompt_length - 1)
            if number:  # the first round warms up
                found[name] += rates
                if name == "guarded":
                    settled_after.append(settled)
    medians = {name: statistics.median(times) if times else math.nan for name, times in found.items()}
    return {
        "ratio": medians["alone"] / medians["guarded"],
        "tokens": {name: len(t) for name, t in found.items()},
        "settled_after": settled_after,
        "prompt": prompt_length,
        "pause": settings["pause"],
        "all_paths_ratio": _both_paths(guard, adapter.model, new.test, context),
    }


@torch.no_grad()
def _write(model: LanguageModel, cache: Any, prompt: Tensor, count: int) -> tuple[list[float], int | None]:
    """Seconds of each token; of a guard, once a path has rested. And after how many tokens that began."""
    random = torch.Generator(prompt.device).manual_seed(0)
    watched = hasattr(cache, "at_rest")
    times, settled = [], None
    for token in prompt.split(1, 1):
        logits = model(token, cache=cache)[:, -1]
    for number in range(count):
        started = time.perf_counter()
        token = sample(logits.float(), 1.0, None, None, random)
        logits = model(token[:, None], cache=cache)[:, -1]
        token.tolist()  # a reader of the text waits for it
        if settled is None and (not watched or cache.at_rest):
            settled = number
        elif settled is not None:  # from then on everything counts, waking up included
            times.append(time.perf_counter() - started)
    return times, settled


@torch.no_grad()
def _both_paths(guard: Guard, alone: LanguageModel, text: np.ndarray, context: int) -> float:
    """The same ratio while no path rests: what the guard costs before the text has settled."""
    tokens = torch.from_numpy(text[: context // 2])[None].to(alone.device)
    pause, guard.pause = guard.pause, 0.0
    times: dict[str, list[float]] = {"guard": [], "alone": []}
    for _ in range(3):
        for name, model in (("guard", guard), ("alone", alone)):
            cache = model.new_cache(1)
            for token in tokens.split(1, 1):
                started = time.perf_counter()
                model(token, cache=cache)[:, -1].argmax(-1).tolist()
                times[name].append(time.perf_counter() - started)
    guard.pause = pause
    return statistics.median(times["alone"]) / statistics.median(times["guard"])
