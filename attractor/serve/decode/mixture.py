"""The mixture of paths for a batch: what `GuardCache` computes for one text, for texts that come and go."""

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from attractor.continual.guard import LEAST, Guard, Resting, counted, is_quiet, log_odds


@dataclasses.dataclass
class Evidence:
    """How well each path predicted each text: a column per text, and a row of the tensors per path.

    A path that a text does not have has no prior in its column, and is never awake.
    """

    prior: Tensor  # (M, B) float64
    sums: Tensor  # (M, B) float64: the prior, and what the paths gave the tokens of this window
    awake: Tensor  # (M, B)
    predicted: Tensor  # (B) predictions made: the position in the window
    window: Tensor  # (B)
    floor: Tensor  # (B), and the other numbers of `Resting`
    most_odds: Tensor  # (B)
    quiet: Tensor  # (B)

    @classmethod
    def start(cls, log_prior: Tensor, guard: Guard) -> "Evidence":
        """The evidence of one text before its first token."""
        rule = Resting(guard.pause, guard.window, guard.config.vocab_size)
        numbers = log_prior.new_tensor([[rule.floor], [rule.most_odds], [rule.quiet(len(log_prior))]])
        counts = torch.tensor([[0], [guard.window]], device=log_prior.device)
        prior = log_prior[:, None]
        return cls(prior, prior.clone(), torch.ones_like(prior, dtype=torch.bool), *counts, *numbers)

    @classmethod
    def empty(cls, device: torch.device) -> "Evidence":
        """The evidence of a batch without texts."""
        prior = torch.zeros(0, 1, dtype=torch.float64, device=device)
        counts = torch.ones(1, dtype=torch.long, device=device)
        numbers = prior.new_zeros(1)
        return cls(prior, prior, prior.bool(), counts, counts, numbers, numbers, numbers).keep([])

    def keep(self, columns: list[int]) -> "Evidence":
        index = torch.tensor(columns, dtype=torch.long, device=self.prior.device)
        return Evidence(*(getattr(self, field.name)[..., index] for field in dataclasses.fields(self)))

    def beside(self, other: "Evidence") -> "Evidence":
        """The columns of both, one after the other."""
        most = max(len(self.prior), len(other.prior))

        def padded(x: Tensor) -> Tensor:
            missing = most - len(x)
            nothing = False if x.dtype == torch.bool else -torch.inf
            return F.pad(x, (0, 0, 0, missing), value=nothing) if x.dim() == 2 and missing else x

        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))
        return Evidence(*(torch.cat([padded(ours), padded(theirs)], -1) for ours, theirs in pairs))

    @property
    def at_rest(self) -> Tensor:
        return ~self.awake & self.prior.isfinite()

    def count(self, logprobs: Tensor) -> Tensor:
        """Add what the paths gave the last token (M, B), 0 at rest; return where (B) a new window starts."""
        begins = self.predicted % self.window == 0
        self.sums = torch.where(begins, self.prior, counted(self.sums, logprobs, self.prior))
        return begins

    def log_weights(self) -> Tensor:
        return self.sums.masked_fill(~self.awake, -torch.inf).log_softmax(0)

    def to_wake(self, begins: Tensor) -> Tensor:
        """(B) texts whose paths at rest are to read what they missed."""
        odds = log_odds(self.sums, self.at_rest, self.awake)
        return self.at_rest.any(0) & (begins | (odds > self.most_odds))

    def to_rest(self) -> Tensor:
        """(M, B) paths that may rest from now on."""
        return self.awake & ~self.at_rest.any(0) & is_quiet(self.sums, self.quiet)

    def mixed(self, predictions: Tensor, log_weights: Tensor, columns: Tensor, *, some_rest: bool) -> Tensor:
        """Log-probabilities (B, V) of the mixtures of (N, V) predictions, with their weights and columns (N).

        This is `attractor.continual.guard.mixed` for predictions that are not a full grid of paths and texts.
        """
        count, vocabulary = self.prior.shape[1], predictions.shape[1]
        if len(columns) == count and not some_rest:  # one path for each text
            return predictions[columns.argsort()]
        parts = predictions.exp().mul_(log_weights.exp().to(predictions.dtype)[:, None])
        sums = parts.new_zeros(count, vocabulary).index_add_(0, columns, parts)
        if some_rest:
            floor = (self.floor * self.at_rest.any(0)).to(sums.dtype)[:, None]
            sums = sums * (1 - floor) + floor / vocabulary
        return sums.log_().clamp_(min=LEAST)
