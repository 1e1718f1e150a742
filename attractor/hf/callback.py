"""A callback for the Trainer of transformers: warm-up, patches for what is new, and usage in the log.

Trainer(model=net, args=..., train_dataset=..., callbacks=[APNCallback(warmup_steps=100)])
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from attractor import monitor
from attractor.config import check_number
from attractor.continual.allocate import Allocation, Allocator
from attractor.continual.config import AllocationConfig
from attractor.continual.update import Undo
from attractor.hf.net import Retrofit
from attractor.layer import APN, PATCH_ROLES, ROLES, RoutingStats, warmup_factor
from attractor.lm import mode

TOKENS = 1024
"""The tokens of the last batch that are kept, for the log and to see what is new."""
LOGGED = ("usage_entropy", "dead_patches", "max_usage", "confidence_mean", "update_ratio_mean")


class APNCallback(TrainerCallback):
    """Log how patches are used while a Hugging Face Trainer trains a retrofit, and warm its layers up.

    `apn/LAYER/...` values join the trainer's log history and what callbacks after this one are given. Over
    `warmup_steps` steps the scale of the layers goes from 0 to 1. It is given to the trainer:

        Trainer(net, args, train_dataset=texts, callbacks=[APNCallback(warmup_steps=100)])

    With `allocation`, a layer whose router is far from what it reads, or hardly uses one of its patches, gets
    that patch anew; `self.allocations` lists each. The clock counts the tokens that are kept of each step.
    """

    def __init__(self, warmup_steps: int = 0, allocation: AllocationConfig | None = None) -> None:
        check_number(
            "warmup_steps", warmup_steps, "a whole number, 0 or more", lambda n: n >= 0 and n == int(n)
        )
        if allocation is not None and allocation.mode == "grow":
            raise ValueError(
                'allocation.mode="grow" makes new parameters, which the optimizer of a Trainer does not '
                'know; use "replace"'
            )
        self.warmup_steps, self.allocation = warmup_steps, allocation or AllocationConfig()
        self.allocator: Allocator | None = None
        self.allocations: list[Allocation] = []
        self.tokens = 0
        self.inputs: dict[int, Tensor] = {}  # block -> tokens (n, dim) of the last batch
        self.hooks: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not isinstance(model, Retrofit) or not model.apn_layers():
            raise ValueError(f"APNCallback needs a retrofit in use, not a {type(model).__name__}")
        self._clean_up(model)  # after a run that an exception ended
        if self.allocation.mode != "off":
            if args.world_size > 1:
                raise ValueError(f"allocation needs one process, not {args.world_size}: each would choose")
            self.allocator = Allocator(model.apn_layers(), self.allocation)
            self.allocations, self.tokens = [], 0
        for number, layer in model.apn_layers().items():
            self.hooks.append(layer.register_forward_pre_hook(partial(_keep, self.inputs, number)))

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for layer in model.apn_layers().values() if self.warmup_steps else ():
            layer.set_scale_factor(warmup_factor(state.global_step, self.warmup_steps))

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        if self.allocator is None:
            return
        moments = OptimizerMoments(model.apn_layers(), optimizer)
        self.tokens += max(map(len, self.inputs.values()), default=0)
        for number, inputs in self.inputs.items():
            stats = self._stats(model.apn_layers()[number], inputs)
            seen = self.allocator.outlook(number, inputs, stats.indices, stats.confidence)
            counts = monitor.usage(stats.indices, stats.num_patches)
            habits = self.allocator.with_usage(number, counts, len(inputs))
            habits, event = self.allocator.allocate(number, habits, seen, self.tokens, moments, undo=[])
            self.allocator.habits = self.allocator.habits | {number: habits}
            self.allocations += [event] if event else []

    def on_log(
        self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **_: Any
    ) -> None:
        values: dict[str, float] = {}
        for number, layer in model.apn_layers().items():
            if number in self.inputs:
                summary = monitor.summary(self._stats(layer, self.inputs[number]))
                values |= {f"apn/{number}/{name}": summary[name] for name in LOGGED}
            if self.allocator is not None:
                own = [event for event in self.allocations if event.layer == number]
                values[f"apn/{number}/allocations"] = len(own)
        state.log_history[-1].update(values)
        logs.update(values)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._clean_up(model)

    def _clean_up(self, model: Retrofit) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.inputs, self.allocator = [], {}, None
        for layer in model.apn_layers().values() if self.warmup_steps else ():
            layer.set_scale_factor(1.0)

    @torch.no_grad()
    def _stats(self, layer: APN, inputs: Tensor) -> RoutingStats:
        with mode(layer, training=False):
            return layer(inputs, return_stats=True)[1]


def _keep(inputs: dict[int, Tensor], number: int, module: object, arguments: tuple[Tensor, ...]) -> None:
    tokens = arguments[0].detach()
    inputs[number] = tokens.reshape(-1, tokens.shape[-1])[:TOKENS].clone()


class OptimizerMoments:
    """What an optimizer of torch remembers of patches: any state of a parameter that has its shape."""

    def __init__(self, layers: Mapping[int, APN], optimizer: Any) -> None:
        self.layers, self.state = layers, optimizer.state

    @torch.no_grad()
    def forget(self, number: int, patch: int, undo: Undo) -> None:
        for name, parameter in self.layers[number].named_parameters(recurse=False):
            for value in self.state.get(parameter, {}).values() if ROLES[name] in PATCH_ROLES else ():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    value[patch] = 0

    def follow(self, number: int, undo: Undo) -> None:
        raise NotImplementedError("the optimizer of a Trainer cannot follow a layer that grows")
