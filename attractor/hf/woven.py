"""Texts side by side in rows: there is little padding, and what texts begin with alike is read once.

    texts    the cat sat    the cat ran    a dog
    a row    the cat sat ran a dog

"ran" stands behind "sat", but has the position of the third token and depends on "the cat" alone. So a model
that is given the positions and a mask predicts for each text what it would predict for the text by itself.

    woven = weave(texts, first)
    woven.tokens, woven.positions, woven.sees   # for the model
    woven.place[text, position]                 # where a token of a text is, counted through all rows

Tokens before `first` of a text are its past: the model has keys and values of them, and does not read them
again. They have columns of their own, before those of the tokens that are read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attractor.continual.reading import padded

NOWHERE = -1
WIDTHS = (128, 96, 104, 112, 120, 136, 144, 152, 160)
"""A row has at most so many tokens, or as many as the longest text: the width with the least padding."""
MANY = 4096
"""With so many tokens there is little padding with any width, so that the first one is taken."""


class Woven(NamedTuple):
    """Texts in rows. A token is known by its text and position, as text * longest + position."""

    tokens: Tensor  # (rows, width), padded
    positions: Tensor  # (rows, width) of each token in its text
    source: Tensor  # (rows, width) which token stands there
    place: Tensor  # (texts, longest) where each token is read: row * width + column, or NOWHERE
    past: Tensor  # (rows, columns) which token of the past has this column, or NOWHERE
    sees: Tensor  # (rows, width, columns + width) whether a token depends on another one, past ones first


def weave(texts: Sequence[list[int]], first: Sequence[int]) -> Woven:
    """Put texts into rows, each from its token `first` on."""
    widths = WIDTHS if sum(map(len, texts)) < MANY else WIDTHS[:1]
    order = sorted(range(len(texts)), key=texts.__getitem__)  # those that begin alike are neighbours
    rows, columns = min((_arranged(texts, first, order, width) for width in widths), key=_size)
    # below, all is (texts, longest): a token is a text and its position
    column = pad_sequence([torch.tensor(own) for own in columns], batch_first=True, padding_value=NOWHERE)
    row, token = torch.tensor(rows), padded(texts)
    position = torch.arange(token.shape[1])
    is_token = column != NOWHERE
    is_past = is_token & (position < torch.tensor(list(first))[:, None])
    is_read = is_token & ~is_past
    past, width = (int(column.where(part, NOWHERE).max()) + 1 for part in (is_past, is_read))

    def in_rows(part: Tensor, size: int, padding: int) -> Tensor:
        """Which of these tokens stands in each column of each row."""
        found = torch.full((max(rows) + 1, size), padding)
        text, at = part.nonzero().unbind(1)
        found[row[text], column[text, at]] = text * token.shape[1] + at
        return found

    source = in_rows(is_read, width, 0)
    sees = torch.zeros(*source.shape, past + width, dtype=torch.bool)
    is_seen = is_read[:, :, None] & is_token[:, None, :] & (position <= position[:, None])
    text, later, earlier = is_seen.nonzero().unbind(1)
    seen = torch.where(is_past, column, past + column)
    sees[row[text], column[text, later], seen[text, earlier]] = True
    sees[:, :, past:] |= torch.eye(width, dtype=torch.bool)  # padding that saw nothing would be NaN
    return Woven(
        tokens=token.flatten()[source],
        positions=source % token.shape[1],
        source=source,
        place=torch.where(is_read, row[:, None] * width + column, NOWHERE),
        past=in_rows(is_past, past, NOWHERE),
        sees=sees,
    )


Arranged = tuple[list[int], list[list[int]]]
"""The row of each text, and the column of each of its tokens; past ones have columns of their own."""


def _arranged(texts: Sequence[list[int]], first: Sequence[int], order: Sequence[int], width: int) -> Arranged:
    """Fill one row after the other, up to this width."""
    rows: list[int] = [0] * len(texts)
    columns: list[list[int]] = [[]] * len(texts)
    number, row = 0, _Row()
    for text in order:
        tokens, start = texts[text], first[text]
        shared = row.begins(tokens, start)
        if row.read and row.read + len(tokens) - max(len(shared), start) > width:
            number, row, shared = number + 1, _Row(), []
        rows[text], columns[text] = number, row.add(tokens, start, shared)
    return rows, columns


class _Row:
    """The tokens of a row as a tree: texts share its nodes as long as they begin alike."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[int, int, bool], tuple[int, int]] = {}
        """The node before, a token, and whether it is past -> the node of that token, and its column."""
        self.read = self.past = 0  # columns that are taken

    def begins(self, tokens: list[int], start: int) -> list[tuple[int, int]]:
        """The nodes and columns of those first tokens of a text that are there already."""
        found: list[tuple[int, int]] = []
        for position, token in enumerate(tokens):
            before = found[-1][0] if found else NOWHERE
            if (known := self.nodes.get((before, token, position < start))) is None:
                break
            found.append(known)
        return found

    def add(self, tokens: list[int], start: int, found: list[tuple[int, int]]) -> list[int]:
        """Put a text into the row, of which these first tokens are there; the columns of all its tokens."""
        for position in range(len(found), len(tokens)):
            before = found[-1][0] if found else NOWHERE
            is_past = position < start
            new = len(self.nodes), self.past if is_past else self.read
            self.nodes[before, tokens[position], is_past] = new
            self.past += is_past
            self.read += not is_past
            found.append(new)
        return [column for _, column in found]


def _size(arranged: Arranged) -> int:
    rows, columns = arranged
    return (max(rows) + 1) * (max(map(max, columns)) + 1)
