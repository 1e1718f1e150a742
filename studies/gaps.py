"""What the guard's bound does not cover: single tokens, greedy answers, samples, and windows that mix.

    python -m studies gaps --size smoke
    python -m studies gaps --size small --jobs 3 --stream python kjv

The bound is about the probability of whole windows. Here a model of one domain learns another one, in a copy
of itself that is asked alone or behind the guard (also with a switch rate, and as one of eight overlays), and
in basins beside it. Measured on the old domain: the loss of each of the first tokens of a window, greedy
answers that are the base's, and how much of what is sampled an overlay writes, by the length of the prompt;
and the loss of windows in which both domains take turns.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attractor.continual.guard import Guard
from attractor.continual.overlay import fingerprint
from attractor.evaluate import evaluate, token_losses
from attractor.generate import generate
from attractor.lm import LanguageModel
from attractor.model import GPT
from studies.adapting import Meter, situation
from studies.beside import PIECE, BesideBase
from studies.grid import Inquiry, Settings, Values
from studies.knobs import mixed
from studies.locality import Beside, stream_of
from studies.methods import METHODS
from studies.plan import HOME, PLANS, Plan, Text, device_of, domain, load_base
from studies.statistics import mean
from studies.streams import Online

if TYPE_CHECKING:
    from studies.cells import Benchmark

FIRST = 32
"""Tokens of a window that are looked at one by one."""
SHOWN = (1, 2, 4, 8, 16, 32)
OVERLAYS = 8
ANSWERS = {"smoke": 4, "small": 256, "full": 512}
"""Prompts, by size."""


class Asked(NamedTuple):
    """A model, and how to know which part of it wrote a token."""

    model: LanguageModel
    guard: Guard | None = None
    basins: BesideBase | None = None


def taught(plan: Plan, settings: Settings, base: GPT, texts: Mapping[str, Text], which: int) -> LanguageModel:
    """A copy of the base that learned its share of a domain, the others of its domain other ones."""
    new = settings["new"]
    name = new[which % len(new)]
    start = plan.stream_tokens * (which // len(new))
    tokens = texts[name].train[start : start + plan.stream_tokens + 1]
    if len(tokens) <= plan.stream_tokens:
        raise ValueError(f"{name} has too few bytes for overlays of {plan.stream_tokens}: name more domains")
    rate = settings["rates"]["overlay"]
    adapter = METHODS["dense, full"].make(
        situation(plan, settings | {"rate": rate}, base, {HOME: texts[HOME]})
    )
    Online(adapter, plan, rate).learn(tokens)
    return adapter.model.eval()


def models(plan: Plan, settings: Settings, base: GPT, texts: Mapping[str, Text]) -> dict[str, Asked]:
    overlays = {f"overlay-{which}": taught(plan, settings, base, texts, which) for which in range(OVERLAYS)}
    first = {"overlay-0": overlays["overlay-0"]}

    def guard(paths: Mapping[str, LanguageModel], switch_rate: float = 0.0) -> Asked:
        mixture = Guard({"base": base, **paths}, switch_rate=switch_rate).to(base.device).eval()
        return Asked(mixture, guard=mixture)

    basins = Beside(base, plan, settings["rates"]["basins"], texts[HOME])
    tokens = texts[settings["new"][0]].train[: plan.stream_tokens + 1]
    piece = PIECE * plan.batch_size * base.config.context
    for at in range(0, len(tokens) - 1, piece):
        basins.learn(tokens[at : at + piece + 1])
    return {
        "base": Asked(base),
        "no guard": Asked(overlays["overlay-0"]),
        "guard": guard(first),
        "guard, switch_rate=0.01": guard(first, 0.01),
        "guard, switch_rate=0.05": guard(first, 0.05),
        f"guard, {OVERLAYS} overlays": guard(overlays),
        "basins": Asked(basins.model, basins=basins.model),
    }


def measure(settings: Settings, folder: Path) -> Values:
    """The cell of one seed."""
    plan = PLANS[settings["size"]]
    base = load_base(folder, settings["base"], device_of(settings))
    texts = {name: domain(plan, folder, name) for name in (HOME, *settings["new"])}
    torch.manual_seed(settings["seed"])
    meter, context = Meter(base, {}), base.config.context
    old, new = texts[HOME], texts[settings["new"][0]]
    mixture = mixed(old, new, context)
    lengths = [length for length in (1, 2, 4, 8, 16, 32, 64) if 2 * length <= context]
    count, answer = ANSWERS[settings["size"]], context // 2
    found: dict[str, Any] = {}
    beginnings = prompts(old.test, count, context // 4, base.device)
    plain = answers(base, beginnings, answer)
    reread = answers(BesideBase(base), beginnings, answer)  # rounding differs without a cache
    for name, part in models(plan, settings, base, texts).items():
        losses = token_losses(part.model, old.test, autocast=meter.cast)
        windows = losses[: len(losses) // context * context].view(-1, context).double()
        same = (answers(part.model, beginnings, answer) == (plain if part.basins is None else reread)).long()
        writes = part.guard is not None or part.basins is not None
        found[name] = {
            "positions": windows.mean(0)[:FIRST].tolist(),
            "later": float(windows[:, FIRST:].mean()) if context > FIRST else None,
            "new": evaluate(part.model, new.test, autocast=meter.cast),
            "mixed": evaluate(part.model, mixture, autocast=meter.cast),
            "same": float(same.all(1).double().mean()),
            "until": float(same.cumprod(1).sum(1).double().mean()),
            "written": {
                str(length): shares(
                    part, prompts(old.test, count, length, base.device), answer, settings["seed"]
                )
                for length in lengths
            }
            if writes
            else None,
        }
    return {"models": found, "answer": answer, "count": count, "prompts": lengths, "base": fingerprint(base)}


def prompts(tokens: np.ndarray, count: int, length: int, device: torch.device) -> Tensor:
    """Evenly spread beginnings (count, length)."""
    starts = np.linspace(0, len(tokens) - length, count).astype(np.int64)
    return torch.from_numpy(tokens[starts[:, None] + np.arange(length)]).to(device)


def answers(model: LanguageModel, given: Tensor, length: int, **options: Any) -> Tensor:
    """What is written (count, length), by default greedily."""
    return torch.stack(list(generate(model, given, max_tokens=length, **{"temperature": 0.0, **options})), 1)


@torch.no_grad()
def shares(part: Asked, given: Tensor, length: int, seed: int) -> float:
    """How much of sampled text an overlay writes: the mean weight of all, or the share that is in basins."""
    whole = torch.cat([given, answers(part.model, given, length, temperature=1.0, seed=seed)], 1)
    writers = []
    for text in whole.split(64):
        if part.guard is not None:
            writers.append(1 - part.guard.posterior(text)[..., 0])
        elif part.basins is not None:
            writers.append((part.basins.owners(part.basins.contexts(text)) >= 0).double())
    return float(torch.cat(writers)[:, given.shape[1] - 1 : -1].double().mean())  # before each was written


def run(
    bench: "Benchmark",
    result: Path,
    *,
    stream: Sequence[str] = (),
    rate: float | None = None,
    basins_rate: float | None = None,
) -> dict[str, Any]:
    new = stream_of(bench, stream)
    middle = bench.plan.rates[len(bench.plan.rates) // 2]
    rates = {"overlay": rate or min(middle, 1e-3), "basins": basins_rate or middle}

    def seeded(seed: int) -> Inquiry[Values]:
        yield bench.pretrain("dense", HOME, seed)
        done = yield bench.gaps(new, seed, rates)
        return next(iter(done.values()))

    cells = list(bench.answer({seed: seeded(seed) for seed in range(bench.plan.seeds)}).values())
    first = cells[0]
    rows = {name: row([cell["models"] for cell in cells], name) for name in first["models"]}
    return bench.write(
        result,
        "gaps",
        seeds=len(cells),
        order=[HOME, *new],
        rates=rates,
        overlays=OVERLAYS,
        shown=[at for at in SHOWN if at <= len(rows["base"]["by_position"])],
        prompts=first["prompts"],
        answer=first["answer"],
        count=first["count"],
        models=rows,
    )


def row(cells: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """A model over seeds: rises over the base's losses, and what else was measured."""
    pairs = [(cell[name], cell["base"]) for cell in cells]
    own = [cell[name] for cell in cells]
    by_seed = [
        [now - then for now, then in zip(here["positions"], base["positions"], strict=True)]
        for here, base in pairs
    ]
    whole = all(here["later"] is not None for here in own)
    written = [here["written"] for here in own]
    return {
        "by_position": [mean(column) for column in zip(*by_seed, strict=True)],
        "later": mean(here["later"] - base["later"] for here, base in pairs) if whole else None,
        **{key: mean(here[key] - base[key] for here, base in pairs) for key in ("new", "mixed")},
        **{key: mean(here[key] for here in own) for key in ("same", "until")},
        "written": None
        if None in written
        else {key: mean(part[key] for part in written) for key in written[0]},
        "seeds": own,
    }
