"""Shapes that are compared by time: what their names say, how well one predicts, how long one takes.

A shape's name is its recipe, so that any shape can be asked for:

    dense 6d                         a dense FFN six times as wide as the model
    apn 4/64 r128                    4 of 64 patches of rank 128
    apn 4/65536 r8 product           prototypes are pairs from two codebooks; gradients have rows
    apn 16/1048576 r2 product @3     in block 3 alone; the FFNs of the others are dense
    apn 8/256 r128 @1,3,5            in these blocks
    moe 8/32 h192                    8 of 32 experts of width 192
    switch 4 h1536                   one of 4 experts
"""

import dataclasses
import gc
import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attractor import analysis, bench, monitor, presets
from attractor.config import APNConfig, MoEConfig, RunConfig
from attractor.data import Batches, Dataset
from attractor.evaluate import autocast, evaluate, routing
from attractor.lm import mode
from attractor.loop import Loop, descend, move_rows
from attractor.model import GPT
from attractor.trainer import NotFiniteLoss, Trainer
from studies.adapting import tokens_of
from studies.grid import Settings, Values
from studies.plan import PLANS, Plan, Text, device_of, domain

DENSE = re.compile(r"dense (\d+)d")
PATCHES = re.compile(r"apn (\d+)/(\d+) r(\d+)( product)?( @\d+(?:,\d+)*)?")
EXPERTS = re.compile(r"(moe) (\d+)/(\d+) h(\d+)|(switch) (\d+) h(\d+)")
Way = Literal["eager", "pass", "compiled", "graphs"]
WAYS: tuple[Way, ...] = get_args(Way)
"""How a step is timed: launched one by one; the forward and backward pass of that as a replayed CUDA graph;
by torch.compile as it is; and as the trainer does it, with CUDA graphs. AdamW and clipping are in all but the
second, and never in a graph: steps of sparse rows cannot be captured."""
STREAMS = (1, 64)
CHECK_EVERY = 100
"""Steps from one look at the loss to the next: who diverges need not go on."""


def shape(name: str, run: RunConfig) -> RunConfig:
    """What a shape's name says, in the place of a dense FFN."""
    model = run.model
    if found := DENSE.fullmatch(name):
        return dataclasses.replace(
            run, model=dataclasses.replace(model, hidden=int(found[1]) * model.dim, ffn="mlp")
        )
    if found := PATCHES.fullmatch(name):
        active, patches, rank = map(int, found.groups()[:3])
        apn = APNConfig(num_patches=patches, top_k=active, rank=rank)
        if found[4]:
            apn = dataclasses.replace(apn, prototypes="product", sparse_gradients=True)
        if found[5]:
            some = {block: {"ffn": "apn"} for block in found[5].strip(" @").split(",")}
            return dataclasses.replace(run, model=dataclasses.replace(model, apn=apn, per_layer=some))
        return presets.with_apn(run, apn)
    if found := EXPERTS.fullmatch(name):
        if found[1]:
            active, experts, hidden = map(int, found.groups()[1:4])
            moe = MoEConfig(num_experts=experts, top_k=active, hidden=hidden, noise=False)
            return presets.with_mixture(run, "moe", moe)
        experts, hidden = map(int, found.groups()[5:])
        return presets.with_mixture(run, "switch", MoEConfig(num_experts=experts, hidden=hidden))
    raise ValueError(
        f"shape {name!r} is unknown; write 'dense 4d', 'apn 4/64 r128', 'apn 4/65536 r8 product', "
        "'apn 16/1048576 r2 product @3' (in block 3 alone; @1,3 in two), 'moe 2/8 h768' or 'switch 4 h1536'"
    )


def is_bank(name: str) -> bool:
    """Whether a shape is about many patches: those learn a shift, too."""
    return "product" in name


def make_trainer(config: RunConfig, dataset: Dataset, folder: Path, device: torch.device) -> Trainer:
    """A trainer whose model starts where it will be: a million patches are drawn slowly on a CPU."""
    compiles = config.train.compile or (config.train.compile is None and device.type == "cuda")
    later = dataclasses.replace(config, train=dataclasses.replace(config.train, compile=False))
    with device:  # tensors are made there; a compiler need not know
        trainer = Trainer(later, dataset, folder, device=device)
    if compiles:
        compile_as(trainer, "graphs" if device.type == "cuda" else "compiled")
    return trainer


def quality(settings: Settings, folder: Path) -> Values:
    """Train a shape to its last step; how well it predicts, how its patches are used, and what it forgets.

    Nothing is saved: a million patches would fill a disk, and the last step is the best of a rate that falls.
    """
    plan, device = PLANS[settings["size"]], device_of(settings)
    texts = {name: domain(plan, folder, name) for name in settings["members"]}
    dataset = tokens_of(plan, "byte", list(texts.values()), folder)
    config = RunConfig.from_dict(settings["config"])
    steps = config.train.max_steps
    most = settings["passes"] * len(dataset.train) // (config.train.batch_size * config.model.context)
    if capped := most < steps:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=max(1, most)))
    with tempfile.TemporaryDirectory() as place:
        trainer = make_trainer(config, dataset, Path(place), device)
        model = trainer.model
        found: Values = {
            "config": config.to_dict(),
            "steps": config.train.max_steps,
            "capped": capped,  # else it would read the texts more often
            "parameters": model.num_parameters(),
            "multiply_adds_per_token": analysis.model_multiply_adds(model),
        }
        try:
            for step in trainer.steps(config.train.max_steps):
                if step and (step % CHECK_EVERY == 0 or step == config.train.max_steps):
                    trainer._finite_loss()
        except NotFiniteLoss:
            return {**found, "val_loss": None, "training_seconds": None}
    found |= {
        "training_seconds": trainer.seconds,
        "val_loss": evaluate(model, dataset.val, autocast=trainer.autocast),
        "test": {name: evaluate(model, text.test, autocast=trainer.autocast) for name, text in texts.items()},
    }
    if model.apn_layers():
        found["patches"] = usage(model, {name: text.test for name, text in texts.items()})
    del trainer  # and AdamW's moments with it
    model.zero_grad()
    let_go(device)
    if (local := settings["local"]) is not None:
        new = domain(plan, folder, local["shift"])
        found["local"] = learn_locally(model, plan, texts, new, local["rate"], config.train.seed)
        del model
        let_go(device)
    return found


def let_go(device: torch.device) -> None:
    """Of memory: graphs hold it in circles, and another process or shape may need it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def usage(model: GPT, texts: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """By layer: how many patches no token of any text chose, and how much the first and last text share.

    With many patches and few tokens even two halves of one text share little: `overlap_self` is that, by
    windows in turn, and `overlap` is between halves of the same size.
    """
    names = list(texts)
    indices = {
        name: {
            layer: stats.indices
            for layer, stats in routing(model, text, autocast=lambda: autocast(model.device, "auto")).items()
            if layer in model.apn_layers()
        }
        for name, text in texts.items()
    }
    found = {}
    for number, layer in model.apn_layers().items():
        count = layer.num_patches
        chosen = monitor.usage(torch.cat([indices[name][number] for name in names]), count)
        first, last = (indices[name][number] for name in (names[0], names[-1]))
        (one, other), (far, _) = (halves(part, model.config.context) for part in (first, last))
        found[str(number)] = {
            "patches": count,
            "tokens": sum(len(part[number]) for part in indices.values()),
            "dead": len(monitor.dead_patches(chosen)),
            "used": 1 - len(monitor.dead_patches(chosen)) / count,
            "effective": math.exp(monitor.usage_entropy(chosen)),
            "texts": [names[0], names[-1]],
            "overlap": shared_top(one, far, count),
            "overlap_self": shared_top(one, other, count),
            "active_overlap": monitor.overlap_score(first, last, count),
        }
    return found


def halves(indices: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Active sets (n, k) of every other window, and of those between."""
    odd = torch.arange(len(indices)) // window % 2 == 1
    return indices[~odd], indices[odd]


def shared_top(one: Tensor, other: Tensor, num_patches: int) -> float:
    """What the distributions of the patch that comes first have in common: 1 if they are the same."""
    shares = [monitor.usage(part[:, :1], num_patches) for part in (one, other)]
    return float(torch.minimum(*shares).sum())


def learn_locally(
    model: GPT, plan: Plan, old: Mapping[str, Text], new: Text, rate: float, seed: int
) -> dict[str, Any]:
    """Learn B by gates and decoders of the patches that its tokens choose, and see what A loses on the way.

    Everything else is frozen, and rows that a batch did not choose keep their bits: AdamW without decay on
    rows alone. `LocalUpdate` refuses product prototypes, whose rows patches share; here they do not move.
    Rows share one count of steps, where `LocalUpdate` counts those of each patch.
    """

    def cast() -> Any:
        return autocast(model.device, "auto")

    model.requires_grad_(False)
    own = [parameter for layer in model.apn_layers().values() for parameter in layer.patch_parameters()]
    for parameter in own:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(own, weight_decay=0.0)
    optimizer.register_step_pre_hook(only_rows)
    optimizer.register_step_pre_hook(move_rows)
    steps = plan.steps_on(len(new.train))
    batches = Batches(new.train, plan.batch_size, model.config.context, seed)

    def take(step: int) -> Tensor:
        inputs, targets = (part.to(model.device) for part in next(batches))
        with mode(model, training=False), cast():
            loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
        descend(optimizer, [loss], plan.rate_at(step, rate, steps), clip=own, clip_norm=1.0)
        return loss.detach()

    trajectory = []
    for step in (loop := Loop(take)).steps(steps):
        if step in plan.evaluated(steps):
            losses = {name: evaluate(model, text.test, autocast=cast) for name, text in old.items()}
            trajectory.append({"step": step, "B": evaluate(model, new.test, autocast=cast), "A": losses})
    trained = sum(parameter.numel() for parameter in own)
    return {"rate": rate, "trained": trained, "seconds": loop.seconds, "trajectory": trajectory}


def only_rows(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A hook before the step: of dense gradients the rows that are not zero, as sparse ones have them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse:
                rows = gradient.flatten(1).any(1).nonzero().flatten()
                parameter.grad = torch.sparse_coo_tensor(
                    rows[None], gradient[rows], gradient.shape, check_invariants=False
                )


def clock(settings: Settings, folder: Path) -> Values:
    """How long a training step of a shape takes in one way, or a decoded token; nothing else may run.

    A way that fails has no time, and `error` says why.
    """
    try:
        return {"seconds": _timed(settings), "error": None}
    except Exception as error:
        return {"seconds": None, "error": f"{type(error).__name__}: {error}"[:400]}
    finally:
        let_go(device_of(settings))


def _timed(settings: Settings) -> Any:
    config = RunConfig.from_dict(settings["config"])
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, compile=False))
    dataset = bench.random_tokens(config.model.vocab_size)
    with tempfile.TemporaryDirectory() as place:
        trainer = make_trainer(config, dataset, Path(place), device_of(settings))
        if settings["way"] == "decode":
            return token_times(trainer.model)
        return step_time(trainer, settings["way"], settings["steps"])


def token_times(model: GPT) -> dict[str, dict[str, float]]:
    """Seconds of a token for one stream and for several, by how it is launched."""
    model = model.to(torch.bfloat16 if model.device.type == "cuda" else torch.float32).eval()
    return {str(streams): bench.decode_seconds(model, streams) for streams in STREAMS}


def step_time(trainer: Trainer, way: str, steps: int) -> float:
    """Seconds of a step in this way; see `WAYS`. The trainer is one that compiles nothing."""
    if way == "pass":
        inputs, targets = (part.to(trainer.device) for part in next(trainer.batches))
        parameters = list(trainer.model.parameters())
        trainer.model.train()

        def both() -> list[Tensor]:
            with trainer.autocast():
                _, objective = trainer._losses(inputs, targets)
            return list(torch.autograd.grad(objective, parameters, allow_unused=True))

        return bench.seconds(both, trainer.device, graph=trainer.device.type == "cuda")
    if way != "eager":
        compile_as(trainer, way)
    return bench.step_seconds(trainer, steps)


def compile_as(trainer: Trainer, way: str) -> None:
    """From now on this trainer takes steps that are "compiled" or, with CUDA graphs, "graphs"."""
    torch.compiler.reset()  # of one function it keeps eight models; further ones would run slowly
    mode = "reduce-overhead" if way == "graphs" else "default"
    trainer.compiled = torch.compile(trainer.spread, mode=mode)
