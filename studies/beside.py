"""Basins beside a model that stays as it is: a patch for each domain that a stream turns out to have.

    learner = BesideLearner(BesideBase(base), home, rate=1e-2)
    learner.learn(tokens)                       # of which domain? nobody says
    evaluate(learner.model, text)

Which domain a byte is of, the byte and its neighbours do not say: routers that read tokens sort them by
local context. So a basin is a region of what the base's own FFN in the upper half makes of the last
`horizon` tokens in the mean. A token lies in the basin whose mean is nearest (by linear discriminants), if it
is so much nearer than the mean of the base's own text that hardly any token of that text is: that margin is
the radius. There the domain's patch adds its update beside each FFN: it reads the FFN's inner channels, gates
each, and decodes. Outside of every basin the model is the base, to the bit.

The base's own text is read once, before the stream, to calibrate. Of domains means and covariances are kept,
and no text.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor import ops
from attractor.config import GPTConfig
from attractor.continual.update import NotFiniteUpdate
from attractor.data import windows
from attractor.evaluate import autocast
from attractor.lm import mode
from attractor.model import GPT, MLP

PIECE = 4
"""Batches of a piece: which domain that is of is judged as a whole."""
OUTSIDE = 0.995
"""Share of the base's own tokens that a basin leaves out by its radius."""
WITHIN = 1.5
"""A basin ends where its own domain is rare, this many of its standard deviations before its mean, if that is
farther from the base's own text: the room in between belongs to domains that were not seen yet."""
SHRINK = 0.1
"""Of covariances towards a multiple of the identity."""
FAR = 1.5
"""A piece that is farther from a mean than this times the farthest of the base's own is of another domain."""
NEAR = 0.5
"""Or so much nearer to a basin's mean than that is to any other mean (squared): then it is of that domain."""
REFITS = 8
"""Pieces by which a basin is placed."""
MOST_KEYS = 16_384
"""Tokens of the base's own text that radii are measured by."""


class Patch(nn.Module):
    """What a domain adds beside every FFN. It begins with decoders of zero."""

    def __init__(self, layers: int, dim: int, device: torch.device) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(layers, 4 * dim, device=device))
        self.bias = nn.Parameter(torch.zeros(layers, 4 * dim, device=device))
        self.decoder = nn.Parameter(torch.zeros(layers, 4 * dim, dim, device=device))

    def forward(self, inner: Tensor, layer: int) -> Tensor:
        return F.gelu(inner * self.slope[layer] + self.bias[layer]) @ self.decoder[layer]


@dataclass
class Moments:
    """How many contexts there were, their mean, and their covariance: sums, so that they add up."""

    count: int
    first: Tensor  # (c) summed
    second: Tensor  # (c, c) summed

    @classmethod
    def of(cls, contexts: Tensor) -> "Moments":
        contexts = contexts.double()
        return cls(len(contexts), contexts.sum(0), contexts.T @ contexts)

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.count + other.count, self.first + other.first, self.second + other.second)

    @property
    def mean(self) -> Tensor:
        return self.first / self.count

    @property
    def covariance(self) -> Tensor:
        return self.second / self.count - torch.outer(self.mean, self.mean)


class Rereading:
    """A cache that keeps the text itself: which basin a token is in depends on those before it."""

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        self.length = 0

    def with_more(self, tokens: Tensor) -> Tensor:
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], 1)
        self.length = self.tokens.shape[1]
        return self.tokens


class BesideBase(nn.Module):
    """A GPT with dense FFNs, and patches beside them where a token is in a basin."""

    def __init__(self, base: GPT) -> None:
        super().__init__()
        if not all(isinstance(block.ffn, MLP) for block in base.blocks):
            raise ValueError("basins stand beside dense FFNs here, and this model has others")
        self.base = copy.deepcopy(base).requires_grad_(False).eval()
        self.patches = nn.ModuleList()
        self.at = base.config.num_layers // 2
        self.early = max(2, base.config.context // 8)
        self.horizon = base.config.context // 2
        self.weights: Tensor = torch.zeros(0)  # (P, c) of linear discriminants, the base's own at 0
        self.offsets: Tensor = torch.zeros(0)  # (P)
        self.radius: Tensor = torch.zeros(0)  # (P)

    @property
    def config(self) -> GPTConfig:
        return self.base.config

    @property
    def device(self) -> torch.device:
        return self.base.device

    def new_cache(self, batch: int, after: object = None) -> Rereading:
        return Rereading()

    def forward(self, tokens: Tensor, *, cache: Any = None, owner: Tensor | None = None) -> Tensor:
        """Logits (B, T, V); with `owner` (B, T) the patch of each token is given, -1 for none."""
        text = tokens if cache is None else cache.with_more(tokens)
        with torch.no_grad():
            owner = self.owners(self.contexts(text)) if owner is None else owner
        present: list[int] = [number for number in owner.unique().tolist() if number >= 0]
        h = self._embedded(text)
        for layer, block in enumerate(self.base.blocks):
            h = h + block.attention(block.norm_1(h), None)
            x = block.norm_2(h)
            update = block.ffn(x)
            if present:
                update = update + self._beside(cast(MLP, block.ffn).up(x), update, layer, owner, present)
            h = h + update
        logits = F.linear(self.base.norm(h), self.base.embedding.weight)
        return logits[:, -tokens.shape[1] :]

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.base.embedding(tokens) + self.base.positions.weight[: tokens.shape[1]]

    def _beside(self, inner: Tensor, like: Tensor, layer: int, owner: Tensor, present: list[int]) -> Tensor:
        added = torch.zeros_like(like)
        for number in present:
            here = owner == number
            added = added.index_put((here,), self.patches[number](inner[here], layer).to(added.dtype))
        return added

    @torch.no_grad()
    def contexts(self, tokens: Tensor) -> Tensor:
        """What the base's FFN makes inside of the tokens up to each one, in a mean that fades (B, T, 4 d)."""
        h = self._embedded(tokens)
        for number, block in enumerate(self.base.blocks):
            h = h + block.attention(block.norm_1(h), None)
            x = block.norm_2(h)
            if number == self.at:
                break
            h = h + block.ffn(x)
        with ops.without_autocast(tokens.device.type):
            inner = F.gelu(cast(MLP, self.base.blocks[self.at].ffn).up(x.float()))
            steps = torch.arange(tokens.shape[1], device=tokens.device)
            fading = (1 - 1 / self.horizon) ** (steps[:, None] - steps).clamp(min=0) * (
                steps[:, None] >= steps
            )
            return (fading / fading.sum(1, keepdim=True)).float() @ inner

    @torch.no_grad()
    def owners(self, contexts: Tensor) -> Tensor:
        """The basin of each token (B, T), -1 for none."""
        if not len(self.radius):
            return torch.full(contexts.shape[:-1], -1, device=contexts.device)
        with ops.without_autocast(contexts.device.type):
            nearer = contexts @ self.weights.T + self.offsets
        depth = nearer - self.radius
        best = nearer.argmax(-1)
        inside = depth.gather(-1, best[..., None])[..., 0] > 0
        inside[..., : self.early] = False
        return best.masked_fill(~inside, -1)


class BesideLearner:
    """Places basins in a stream without labels, and teaches their patches."""

    def __init__(
        self,
        model: BesideBase,
        home: np.ndarray,
        held_out: np.ndarray,
        *,
        rate: float,
        batch_size: int,
        clip_norm: float = 1.0,
        most: int = 32,
    ) -> None:
        self.model, self.rate, self.batch_size, self.clip_norm = model, rate, batch_size, clip_norm
        self.most = most
        self.optimizers: list[torch.optim.AdamW] = []
        self.tokens: list[int] = []  # by basin
        self.means: list[Moments] = []
        self.pieces: list[int] = []  # by which each was placed
        found = [self._contexts(part) for part in self._cut(home, batch_size * model.config.context)]
        self.home = sum(map(Moments.of, found[1:]), Moments.of(found[0]))
        between = torch.stack([part.double().mean(0) for part in found]).T.cov()
        self.between = torch.linalg.inv(
            between + between.diagonal().mean() * torch.eye(len(between)).to(between)
        )
        own = [self._contexts(piece) for piece in self._cut(held_out, self.piece)]
        self.keys = torch.cat(own)[:: max(1, sum(map(len, own)) // MOST_KEYS)]
        self.usual = max(self._far(part.double().mean(0), self.home.mean) for part in own)

    @staticmethod
    def _cut(tokens: np.ndarray, size: int) -> list[np.ndarray]:
        """Whole pieces of this size, or all of it."""
        return [tokens[at : at + size + 1] for at in range(0, len(tokens) - size, size)] or [tokens]

    @property
    def piece(self) -> int:
        return PIECE * self.batch_size * self.model.config.context

    def learn(self, tokens: np.ndarray) -> str:
        """Learn a piece, once; returns whose it is."""
        owner = self._owner(tokens)
        if owner is None:
            return "the base"
        for inputs, targets in self._batches(tokens):
            self._step(owner, inputs, targets)
        self.tokens[owner] += len(tokens) - 1
        return f"basin {owner}"

    def _owner(self, tokens: np.ndarray) -> int | None:
        """Whose a piece is: that of the nearest mean, if it is near enough. Else a basin is opened for it."""
        contexts = self._contexts(tokens)
        seen, mean = Moments.of(contexts), contexts.double().mean(0)
        means = [self.home.mean, *(moments.mean for moments in self.means)]
        distances = [self._far(mean, other) for other in means]
        nearest = int(np.argmin(distances))
        near = FAR * self.usual
        if nearest:
            apart = [self._far(means[nearest], other) for at, other in enumerate(means) if at != nearest]
            near = max(near, NEAR * min(apart))
        if distances[nearest] > near and len(self.means) < self.most:
            self._open(seen)
            return len(self.means) - 1
        if nearest and self.pieces[nearest - 1] < REFITS:
            self.means[nearest - 1] += seen
            self.pieces[nearest - 1] += 1
            self._place()
        return nearest - 1 if nearest else None

    def _open(self, seen: Moments) -> None:
        config = self.model.config
        patch = Patch(config.num_layers, config.dim, self.model.device)
        self.model.patches.append(patch)
        self.optimizers.append(torch.optim.AdamW(patch.parameters(), betas=(0.9, 0.99), weight_decay=0.0))
        self.means.append(seen)
        self.tokens.append(0)
        self.pieces.append(1)
        self._place()

    @torch.no_grad()
    def _place(self) -> None:
        """Discriminants of all basins against the base's own text, and radii that leave that text out."""
        known = [self.home, *self.means]
        pooled = torch.stack([moments.covariance for moments in known]).mean(0)
        even = torch.eye(len(pooled), device=pooled.device, dtype=pooled.dtype)
        inverse = torch.linalg.inv(pooled + SHRINK * pooled.diagonal().mean() * even)
        own = self.home.mean
        weights = torch.stack([inverse @ (moments.mean - own) for moments in self.means])
        middles = torch.stack([(moments.mean + own) / 2 for moments in self.means])
        offsets = -(weights * middles).sum(1)  # 0 where a token is as near to the base's own text
        nearer = self.keys.double() @ weights.T + offsets
        self.model.weights, self.model.offsets = weights.float(), offsets.float()
        usual = torch.stack([moments.mean for moments in self.means]).mul(weights).sum(1) + offsets
        spread = torch.stack(
            [w @ moments.covariance @ w for w, moments in zip(weights, self.means, strict=True)]
        )
        edge = usual - WITHIN * spread.clamp(min=0).sqrt()
        self.model.radius = torch.maximum(torch.quantile(nearer, OUTSIDE, dim=0).clamp(min=0), edge).float()

    def _far(self, mean: Tensor, other: Tensor) -> float:
        """How far pieces lie apart, by how far batches of the base's own text do: plays differ, too."""
        away = mean - other
        return float(away @ self.between @ away)

    def _step(self, owner: int, inputs: Tensor, targets: Tensor) -> None:
        """The patch learns where it will act: from tokens inside of its basin, and from no others."""
        patch, optimizer = self.model.patches[owner], self.optimizers[owner]
        owners = self.model.owners(self.model.contexts(inputs))
        given = owners.masked_fill(owners != owner, -1)
        if not bool((given >= 0).any()):
            return
        with self.autocast():
            logits = self.model(inputs, owner=given)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        gradients = torch.autograd.grad(loss, list(patch.parameters()))
        length = nn.utils.get_total_norm(gradients)
        if not bool(length.isfinite()):
            raise NotFiniteUpdate("a gradient is not finite; nothing was changed")
        for parameter, gradient in zip(patch.parameters(), gradients, strict=True):
            parameter.grad = gradient * (self.clip_norm / length.clamp(min=self.clip_norm))
        for group in optimizer.param_groups:
            group["lr"] = self.rate
        optimizer.step()
        optimizer.zero_grad()

    def autocast(self) -> Any:
        return autocast(self.model.device, "auto")

    def _batches(self, tokens: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets, _ in windows(tokens, self.model.config.context, self.batch_size):
            yield inputs.to(self.model.device), targets.to(self.model.device)

    def _contexts(self, tokens: np.ndarray) -> Tensor:
        """Of all tokens but the first of each window (n, 4 d)."""
        with mode(self.model, training=False), self.autocast():
            parts = [
                self.model.contexts(inputs)[:, self.model.early :].flatten(0, 1)
                for inputs, _ in self._batches(tokens)
            ]
        return torch.cat(parts)
