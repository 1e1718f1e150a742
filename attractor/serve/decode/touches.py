"""Which lesson acted on which token of a text.

    logits, found = read_together(models, tokens, cache)
    found[row]                             # (column, lesson, weight) of each token that a lesson acted on

A model that learned lessons says so in every pass. A text on none of whose tokens a lesson acted was computed
from the base's numbers alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attractor.lm import TrainableModel


@dataclass(frozen=True, slots=True)
class Touch:
    """A lesson acted on a token, with a weight between 0 and 1."""

    index: int  # of the token, counted from the start of the prompt
    lesson: int
    weight: float


Found = list[list[tuple[int, int, float]]]
"""For every row: the column of a token, the lesson, and its weight."""


def group_of(model: TrainableModel) -> object:
    """What models have in common that can read their texts in one pass; otherwise the model itself."""
    return getattr(model, "bank", model)


def rows_for(model: TrainableModel) -> Any:
    """Memory of a fixed shape for texts that are read together; None where they share that of the first."""
    make = getattr(model, "rows_for", None)
    return None if make is None else make()


def read_together(models: Sequence[TrainableModel], tokens: Tensor, cache: Any) -> tuple[Tensor, Found]:
    """Logits (B, T, V) for tokens (B, T), a model for each row, and where lessons acted.

    The models belong to one group.
    """
    together = getattr(models[0], "read_together", None)
    if together is not None:
        return together(models, tokens, cache)
    return models[0](tokens, cache=cache), [[] for _ in models]
