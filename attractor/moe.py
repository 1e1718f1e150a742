"""Mixtures of experts, the controls for APN: few large experts where APN has many small patches.

    layer = MoE(64)                                # Shazeer et al. 2017: noisy top-k gating
    layer = Switch(64, MoEConfig(num_experts=4))   # Fedus et al. 2022: one expert, limited capacity
    update, stats = layer(tokens, return_stats=True)

Experts are the dense FFN without biases; all of them are stacked, and tokens are sorted by expert.
"""

import math
from typing import Any, ClassVar, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor.config import FFNName, MoEConfig, check_probability, check_size
from attractor.layer import RoutingStats, length
from attractor.ops import routing_precision
from attractor.ops.reference import without_autocast


class Routed(NamedTuple):
    """What the router made of n tokens."""

    indices: Tensor  # (n, k) experts, best first
    weights: Tensor  # (n, k) factors on their outputs
    logits: Tensor  # (n, E) the router's scores without noise
    noisy: Tensor  # (n, E) the scores that decided
    noise_scale: Tensor | None  # (n, E) standard deviation of the noise


class MoE(nn.Module):
    """Sparsely gated mixture: the `top_k` experts with the largest noisy scores, mixed by their softmax.

    Maps (..., dim) to the update (..., dim), like APN and the dense FFN. Every option is in `MoEConfig`.
    """

    kind: ClassVar[FFNName] = "moe"

    def __init__(
        self,
        dim: int,
        config: MoEConfig | None = None,
        *,
        dropout: float = 0.0,
        num_layers: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_size("dim", dim)
        check_size("num_layers", num_layers)
        check_probability("dropout", dropout)
        self.config = config = (config or MoEConfig()).for_kind(self.kind)
        self.dim, self.dropout, self.num_layers = dim, dropout, num_layers
        self.hidden = config.hidden or max(16, (4 * dim // config.top_k + 8) // 16 * 16)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.router = parameter(config.num_experts, dim)
        self.noise = parameter(config.num_experts, dim) if config.noise else None
        self.up = parameter(config.num_experts, dim, self.hidden)
        self.out = parameter(config.num_experts, self.hidden, dim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with GPT-2's initialisation, as the dense FFN does."""
        for name, values in self.named_parameters():
            values.normal_(std=0.02 / math.sqrt(2 * self.num_layers) if name == "out" else 0.02)

    @overload
    def forward(self, x: Tensor, *, return_stats: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, *, return_stats: Literal[True]) -> tuple[Tensor, RoutingStats]: ...
    def forward(self, x: Tensor, *, return_stats: bool = False) -> Tensor | tuple[Tensor, RoutingStats]:
        """The update for tokens x (..., dim); with `return_stats`, also what the router did."""
        self._check_input(x)
        tokens = x.reshape(-1, self.dim)
        with without_autocast(x.device.type):  # Fedus et al., 2.4: the router is unstable in bfloat16
            routed = self._route(routing_precision(tokens))
        mixed = self._mix(tokens, routed.indices, routed.weights)
        update = F.dropout(mixed, self.dropout, self.training).reshape(x.shape)
        if not return_stats:
            return update
        leading = x.shape[:-1]
        with without_autocast(x.device.type):
            stats = RoutingStats(
                indices=routed.indices.reshape(*leading, self.config.top_k),
                weights=routed.weights.reshape(*leading, self.config.top_k),
                confidence=routed.logits.amax(-1).reshape(leading),
                balance=self._balance(routed),
                entropy=self._entropy(routed),
                update_norm=length(mixed).reshape(leading),
                input_norm=length(x),
                num_patches=self.config.num_experts,
            )
        return update, stats

    def _route(self, tokens: Tensor) -> Routed:
        """Equations (3) to (5): H = x W_g + N(0, 1) * softplus(x W_noise), G = softmax(KeepTopK(H))."""
        logits = noisy = F.linear(tokens, self.router.to(tokens.dtype))
        scale = None
        if self.noise is not None and self.training:
            # clamped because the load divides by it
            scale = F.softplus(F.linear(tokens, self.noise.to(tokens.dtype))).clamp(min=1e-6)
            noisy = logits + torch.randn_like(logits) * scale
        kept, indices = noisy.topk(self.config.top_k)
        return Routed(indices, kept.softmax(-1), logits, noisy, scale)

    def _balance(self, routed: Routed) -> Tensor:
        """L_importance + L_load: CV^2 over experts of their summed weights, and of their tokens."""
        gates = torch.zeros_like(routed.logits).scatter(1, routed.indices, routed.weights)
        return _squared_variation(gates.sum(0)) + _squared_variation(self._load(routed))

    def _load(self, routed: Routed) -> Tensor:
        """Return the tokens per expert (E), smoothed by the noise (appendix A), or counted without noise.

        P(x, i) is the probability that expert i is kept when its own noise is drawn again: it has to beat the
        k-th largest of the other scores. A count has no gradient.
        """
        is_kept = _members(routed.indices, self.config.num_experts)
        top_k = self.config.top_k
        if routed.noise_scale is None or top_k == self.config.num_experts:
            return is_kept.to(routed.logits).sum(0)
        largest = routed.noisy.topk(top_k + 1).values
        rival = torch.where(is_kept, largest[:, top_k:], largest[:, top_k - 1 : top_k])
        return torch.special.ndtr((routed.logits - rival) / routed.noise_scale).sum(0)

    def _entropy(self, routed: Routed) -> Tensor:
        """Mean entropy of the weights of the kept experts."""
        return _mean_entropy(routed.weights)

    def _mix(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Return sum_k weight * expert(token): tokens sorted by expert, through the experts, and back."""
        top_k = indices.shape[1]
        if _is_autocast(tokens.device.type) and tokens.dtype != torch.float64:
            # as autocast would before the product, and grouped_mm has no autocast; here it halves the copies
            tokens = tokens.to(torch.get_autocast_dtype(tokens.device.type))
        ordered, order = indices.flatten().sort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        rows = self._experts(_Reorder.apply(tokens, order, place, top_k), ordered)
        rows = _Reorder.apply(rows, place, order, 1).reshape(len(tokens), top_k, self.dim)
        return (rows * weights.to(rows.dtype).unsqueeze(-1)).sum(1)

    def _experts(self, rows: Tensor, ordered: Tensor) -> Tensor:
        """Each row (sorted by expert) through its own expert."""
        experts = torch.arange(self.config.num_experts, device=rows.device)
        ends = torch.searchsorted(ordered, experts, right=True)  # no bincount: it waits for the host
        fits = len(rows) and self.dim % 8 == 0 and self.hidden % 8 == 0  # it needs strides of 16 bytes
        if fits and rows.is_cuda and rows.dtype == torch.bfloat16 and hasattr(F, "grouped_mm"):
            up, out, ends = self.up.to(rows.dtype), self.out.to(rows.dtype), ends.int()
            return F.grouped_mm(F.gelu(F.grouped_mm(rows, up, offs=ends)), out, offs=ends)
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        parts = zip(rows.split(sizes), self.up, self.out, strict=True)
        return torch.cat([F.gelu(part @ up) @ out for part, up, out in parts])

    def extra_repr(self) -> str:
        config = self.config
        parts = [f"{self.dim}", f"num_experts={config.num_experts}", f"top_k={config.top_k}"]
        return ", ".join([*parts, f"hidden={self.hidden}"])

    def _check_input(self, x: Tensor) -> None:
        if x.dim() == 0 or x.shape[-1] != self.dim:
            raise ValueError(f"input of shape {tuple(x.shape)}: the last dimension must be dim={self.dim}")
        if x.dtype != self.up.dtype and not _is_autocast(x.device.type):
            raise ValueError(
                f"input of dtype {x.dtype} for a layer of dtype {self.up.dtype}: "
                "convert one of them, or run under torch.autocast"
            )


class Switch(MoE):
    """Switch: the one best expert, times its probability; tokens beyond an expert's capacity get no update.

    Who is beyond is decided in the order of the flattened tokens. That is so in training, where it evens out
    the experts' work; afterwards all are served, and what is said of a text does not depend on others.
    """

    kind = "switch"

    def _route(self, tokens: Tensor) -> Routed:
        """Equations (1) to (3): p = softmax(x W_r), y = p_i E_i(x) for i = argmax p."""
        logits = F.linear(tokens, self.router.to(tokens.dtype))
        weights, indices = logits.softmax(-1).max(-1, keepdim=True)
        if not self.training:
            return Routed(indices, weights, logits, logits, None)
        share = self.config.capacity_factor * len(tokens) / self.config.num_experts
        capacity = max(1, math.ceil(share - 1e-9))  # 1.1 * 10 is a little over 11
        queues = _members(indices, self.config.num_experts).cumsum(0)  # (n, E) tokens up to and with this one
        fits = queues.gather(1, indices) <= capacity
        return Routed(indices, weights * fits, logits, logits, None)

    def _balance(self, routed: Routed) -> Tensor:
        """Equations (4) to (6): N sum_i f_i P_i, with f the share of tokens that wanted an expert."""
        tokens = max(1, len(routed.logits))
        wanted = _members(routed.indices, self.config.num_experts).to(routed.logits).sum(0) / tokens
        probability = routed.logits.softmax(-1).sum(0) / tokens
        return self.config.num_experts * (wanted * probability).sum()

    def _entropy(self, routed: Routed) -> Tensor:
        """Mean entropy of the whole distribution: a single weight has none."""
        return _mean_entropy(routed.logits.softmax(-1))


class _Reorder(torch.autograd.Function):
    """Each row `repeats` times, the copies permuted by `order`. The gradient permutes them back and adds the
    copies: no atomics, where indexing would scatter."""

    @staticmethod
    def forward(rows: Tensor, order: Tensor, inverse: Tensor, repeats: int) -> Tensor:
        return rows[order // repeats]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        _, order, inverse, ctx.repeats = inputs
        ctx.save_for_backward(order, inverse)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        order, inverse = ctx.saved_tensors
        copies = _Reorder.apply(gradients[0], inverse, order, 1)
        if ctx.repeats > 1:
            copies = copies.reshape(-1, ctx.repeats, copies.shape[-1]).sum(1)
        return copies, None, None, None


def _is_autocast(device_type: str) -> bool:
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _members(indices: Tensor, num_experts: int) -> Tensor:
    """Mark which token chose which expert (n, E)."""
    experts = torch.arange(num_experts, device=indices.device)
    return (indices.unsqueeze(-1) == experts).any(1)


def _squared_variation(totals: Tensor) -> Tensor:
    """CV^2 = variance / mean^2 over experts; 0 when there were no tokens."""
    smallest = torch.finfo(totals.dtype).tiny
    return totals.var(correction=0) / totals.mean().square().clamp(min=smallest)


def _mean_entropy(shares: Tensor) -> Tensor:
    """Mean entropy of the rows in nats, with 0 log 0 = 0; 0 when there are none."""
    return -(shares * shares.masked_fill(shares == 0, 1).log()).sum() / max(1, len(shares))
