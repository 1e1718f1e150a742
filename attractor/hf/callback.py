"""For the Trainer of transformers: warm-up of gamma, and routing health in the log.

Trainer(model=net, args=..., train_dataset=..., callbacks=[APNCallback(warmup_steps=100)])
"""

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from attractor import monitor
from attractor.config import check_number
from attractor.hf.net import Retrofit
from attractor.layer import mode, warmup_factor

TOKENS = 1024
"""So many tokens of the last batch are kept for the log."""
LOGGED = ("usage_entropy", "dead_patches", "max_usage", "confidence_mean", "update_ratio_mean")


class APNCallback(TrainerCallback):
    """`apn/LAYER/...` values join the trainer's log history and what callbacks after this one are given."""

    def __init__(self, warmup_steps: int = 0) -> None:
        check_number(
            "warmup_steps", warmup_steps, "a whole number, 0 or more", lambda n: n >= 0 and n == int(n)
        )
        self.warmup_steps = warmup_steps
        self.inputs: dict[int, Tensor] = {}  # block -> tokens (n, dim) of the last batch
        self.hooks: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not isinstance(model, Retrofit) or not model.apn_layers():
            raise ValueError(f"APNCallback needs a retrofit in use, not a {type(model).__name__}")
        for number, layer in model.apn_layers().items():

            def keep(module: object, arguments: tuple[Tensor, ...], number: int = number) -> None:
                tokens = arguments[0].detach()
                self.inputs[number] = tokens.reshape(-1, tokens.shape[-1])[:TOKENS].clone()

            self.hooks.append(layer.register_forward_pre_hook(keep))

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for layer in model.apn_layers().values() if self.warmup_steps else ():
            layer.set_scale_factor(warmup_factor(state.global_step, self.warmup_steps))

    def on_log(
        self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **_: Any
    ) -> None:
        values: dict[str, float] = {}
        for number, layer in model.apn_layers().items():
            if number in self.inputs:
                with torch.no_grad(), mode(layer, training=False):
                    _, stats = layer(self.inputs[number], return_stats=True)
                told = monitor.summary(stats)
                values |= {f"apn/{number}/{name}": told[name] for name in LOGGED}
        state.log_history[-1].update(values)
        logs.update(values)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.inputs = [], {}
        for layer in model.apn_layers().values() if self.warmup_steps else ():
            layer.set_scale_factor(1.0)
