"""What a pass over the upper half of a model is given, and the same filled up to sizes that come again."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTH, PAST, GRADED = 128, 128, 64
"""Rows are filled up to a multiple of so many tokens, and of so many that are seen and not read; and so are
the tokens that are graded."""


def missing(count: int, least: int = 1) -> int:
    """So many fill up: to a multiple of an eighth of the power of two, and of `least`."""
    return -count % max(least, 1 << max(0, count.bit_length() - 3))


class Rows(NamedTuple):
    """Texts in rows, as the model is given them."""

    tokens: Tensor  # (rows, width)
    place: Tensor  # (texts, longest) of each token that is read, counted through all rows
    source: Tensor  # (rows, width) which token stands there: text * longest + position
    past: Tensor  # (rows, columns) which tokens are seen and not read, likewise
    given: dict[str, Tensor]  # positions, and what each token sees; nothing where every row is a text


class Above(NamedTuple):
    """What the upper half goes on from."""

    rows: Rows
    output: Tensor | None  # (rows, width, dim)
    read: Tensor | None  # (rows, width, width of what is read), if it comes from the lower half
    past: dict[int, tuple[Tensor, Tensor]]  # block -> keys and values of the tokens that are not read


def filled_up(state: Above, *graded: Tensor) -> tuple[Above, list[Tensor]]:
    """The same pass with sizes that come again, and the places, targets and weights that are graded likewise:
    what fills them up is seen by no text and weighs nothing."""
    (count, width), mask = state.rows.tokens.shape, state.rows.given["attention_mask"]
    past = mask.shape[3] - width
    rows, columns, older = missing(count), -width % WIDTH, -past % PAST

    def grown(x: Tensor) -> Tensor:
        """(rows, width, ...) or (rows * width, ...) filled up."""
        is_flat = x.shape[:2] != (count, width)
        whole = x.unflatten(0, (count, width)) if is_flat else x
        whole = F.pad(whole, (*(0, 0) * (whole.dim() - 2), 0, columns, 0, rows))
        return whole.flatten(0, 1) if is_flat else whole

    def longer(x: Tensor) -> Tensor:
        """Keys or values (rows, heads, columns, size) filled up."""
        return F.pad(x, (0, 0, 0, older, 0, 0, 0, rows))

    least = torch.finfo(mask.dtype).min
    sees = torch.cat([F.pad(mask[..., :past], (0, older), value=least), mask[..., past:]], 3)
    sees = F.pad(sees, (0, columns, 0, columns, 0, 0, 0, rows), value=least)
    sees[..., past + older :].diagonal(dim1=2, dim2=3).zero_()  # a token that saw nothing would be NaN
    given = {"position_ids": grown(state.rows.given["position_ids"]), "attention_mask": sees}
    whole = Above(
        state.rows._replace(tokens=grown(state.rows.tokens), given=given),
        None if state.output is None else grown(state.output),
        None if state.read is None else grown(state.read),
        {number: (longer(keys), longer(values)) for number, (keys, values) in state.past.items()},
    )
    place, *aims = graded
    place = place // width * (width + columns) + place % width
    return whole, [F.pad(x, (0, missing(len(x), GRADED))) for x in (place, *aims)]


def tensors_of(state: Above) -> list[Tensor]:
    """All that a model is given."""
    whole = [state.rows.tokens, *state.rows.given.values(), state.output, state.read]
    return [x for x in (*whole, *(x for pair in state.past.values() for x in pair)) if x is not None]


def with_tensors(state: Above, tensors: Sequence[Tensor]) -> Above:
    """The same pass with other tensors, in the order of `tensors_of`."""
    rest = iter(tensors)
    rows = state.rows._replace(tokens=next(rest), given={name: next(rest) for name in state.rows.given})
    output = None if state.output is None else next(rest)
    read = None if state.read is None else next(rest)
    return Above(rows, output, read, {number: (next(rest), next(rest)) for number in state.past})
