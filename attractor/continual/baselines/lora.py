"""Low-rank adaptation: the weights stay, and a small product of two matrices beside each learns."""

import math
from collections.abc import Iterator
from typing import Literal, Unpack, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor.config import check_choice, check_number, check_probability, check_size
from attractor.continual.baselines.baseline import Baseline, Options
from attractor.model import GPT, MLP

TargetsName = Literal["ffn", "attention", "all"]


class LowRank(nn.Module):
    """A linear layer with W + scale * B A in place of W; B starts at zero, so at first nothing changes."""

    def __init__(
        self, linear: nn.Linear, rank: int, scale: float, dropout: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.linear, self.scale, self.dropout = linear, scale, dropout
        start = torch.empty(rank, linear.in_features)
        nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
        self.down = nn.Parameter(start.to(linear.weight))  # A (rank, in)
        self.up = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))  # B (out, rank)

    def forward(self, x: Tensor) -> Tensor:
        code = F.linear(F.dropout(x, self.dropout, self.training), self.down)
        return self.linear(x) + F.linear(code, self.up) * self.scale

    @torch.no_grad()
    def merge(self) -> None:
        self.linear.weight.add_((self.up @ self.down) * self.scale)


class LoRA(Baseline):
    """Hu et al. 2021: W + (alpha / rank) B A on linear maps of dense FFNs, of attention, or of both.

    `finish` adds the products to the weights, `unload` drops them; either way the model's modules are the
    ones it came with. `adapter_dropout` acts on the adapters' input.
    """

    def __init__(
        self,
        model: GPT,
        rank: int = 8,
        alpha: float = 16,
        *,
        targets: TargetsName = "ffn",
        adapter_dropout: float = 0.0,
        seed: int = 0,
        **options: Unpack[Options],
    ) -> None:
        check_size("rank", rank)
        check_number("alpha", alpha)
        check_probability("adapter_dropout", adapter_dropout)
        check_choice("targets", targets, get_args(TargetsName))
        places = list(_linear_maps(model, targets))
        if not places:
            raise ValueError(
                f"targets={targets!r}: this model has no such linear maps that are not adapted yet (a routed "
                'FFN is not dense); targets="attention" adapts attention'
            )
        generator = torch.Generator().manual_seed(seed)
        self.adapters: list[tuple[nn.Module, str, LowRank]] = []
        for owner, name, linear in places:
            adapter = LowRank(linear, rank, alpha / rank, adapter_dropout, generator).train(linear.training)
            setattr(owner, name, adapter)
            self.adapters.append((owner, name, adapter))
        try:
            super().__init__(
                model, [p for _, _, adapter in self.adapters for p in (adapter.down, adapter.up)], **options
            )
        except BaseException:
            self._remove()
            raise

    def finish(self) -> GPT:
        """The adapted model, a plain GPT again: the adapters are merged into its weights."""
        for _, _, adapter in self.adapters:
            adapter.merge()
        return self.unload()

    def unload(self) -> GPT:
        """The model as it was before, bit for bit: what was learned is dropped. The method is then done."""
        self._remove()
        return super().finish()

    def _remove(self) -> None:
        for owner, name, adapter in self.adapters:
            setattr(owner, name, adapter.linear)
        self.adapters = []


def _linear_maps(model: GPT, targets: TargetsName) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the modules that own linear maps, the name there, and the map."""
    for block in model.blocks:
        places: list[tuple[nn.Module, str]] = []
        if targets != "ffn":
            places += [(block.attention, "qkv"), (block.attention, "out")]
        if targets != "attention" and isinstance(block.ffn, MLP):
            places += [(block.ffn, "up"), (block.ffn, "out")]
        for owner, name in places:
            if isinstance(linear := getattr(owner, name), nn.Linear):  # not one that is adapted already
                yield owner, name, linear
