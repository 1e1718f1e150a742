"""Texts side by side in rows: little is filled up, and what texts of a row begin with alike is there once.

    woven = weave(texts, first)
    woven.tokens, woven.positions, woven.sees   # for a model that is given positions and a mask
    woven.place[text, position]                 # where a token of a text is, counted through all rows

Tokens before `first` of a text are its past: they are seen, and not read again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attractor.continual.reading import padded

NOWHERE = -1
WIDTHS = (128, 96, 104, 112, 120, 136, 144, 152, 160)
"""Rows have at most so many tokens, or as many as the longest text: whatever leaves the least to fill up."""
MANY = 4096
"""Of so many tokens little is filled up by any width."""


class Woven(NamedTuple):
    """Texts in rows. What is no token of a text is `NOWHERE`."""

    tokens: Tensor  # (rows, width)
    positions: Tensor  # (rows, width) of each token in its text
    source: Tensor  # (rows, width) the text that it is of, and where: text * longest + position
    place: Tensor  # (texts, longest) of each token that is read: row * width + column
    past: Tensor  # (rows, columns) of each token that is not: text * longest + position
    sees: Tensor  # (rows, width, columns + width) which tokens a token depends on, past ones first


def weave(texts: Sequence[list[int]], first: Sequence[int]) -> Woven:
    """Put texts into rows, each from its token `first` on."""
    widths = WIDTHS if sum(map(len, texts)) < MANY else WIDTHS[:1]
    order = sorted(range(len(texts)), key=texts.__getitem__)  # those that begin alike are neighbours
    rows, columns = min((_arrange(texts, first, order, width) for width in widths), key=_size)
    column = pad_sequence([torch.tensor(own) for own in columns], batch_first=True, padding_value=NOWHERE)
    row, token = torch.tensor(rows), padded(texts)
    place = torch.arange(token.shape[1])
    is_past = (place < torch.tensor(list(first))[:, None]) & (column != NOWHERE)
    is_read = (column != NOWHERE) & ~is_past
    past, width = (int(column.where(part, NOWHERE).max()) + 1 for part in (is_past, is_read))

    def put(part: Tensor, size: int, filler: int) -> Tensor:
        """Which token stands in each of so many columns."""
        found = torch.full((max(rows) + 1, size), filler)
        text, position = part.nonzero().unbind(1)
        found[row[text], column[text, position]] = text * token.shape[1] + position
        return found

    source = put(is_read, width, 0)
    sees = torch.zeros(*source.shape, past + width, dtype=torch.bool)
    seen = torch.where(is_past, column, past + column)
    is_before = is_read[:, :, None] & (column != NOWHERE)[:, None, :] & (place <= place[:, None])
    text, later, earlier = is_before.nonzero().unbind(1)
    sees[row[text], column[text, later], seen[text, earlier]] = True
    sees[:, :, past:] |= torch.eye(width, dtype=torch.bool)  # a filler that saw nothing would be NaN
    return Woven(
        tokens=token.flatten()[source],
        positions=source % token.shape[1],
        source=source,
        place=torch.where(is_read, row[:, None] * width + column, NOWHERE),
        past=put(is_past, past, NOWHERE),
        sees=sees,
    )


Arranged = tuple[list[int], list[list[int]]]
"""The row of each text, and the column of each of its tokens: past ones are counted by themselves."""


def _arrange(texts: Sequence[list[int]], first: Sequence[int], order: Sequence[int], width: int) -> Arranged:
    rows: list[int] = [0] * len(texts)
    columns: list[list[int]] = [[]] * len(texts)
    row, used = 0, [0, 0]  # columns of the last row that are read, and that are past
    nodes: dict[tuple[int, int, bool], tuple[int, int]] = {}  # after which, token, past? -> number, column
    for number in order:
        text, start = texts[number], first[number]
        node, own = _followed(nodes, text, start)
        if used[False] and used[False] + len(text) - max(len(own), start) > width:
            row, used, nodes = row + 1, [0, 0], {}
            node, own = NOWHERE, []
        for place in range(len(own), len(text)):
            is_past = place < start
            new = len(nodes), used[is_past]
            nodes[node, text[place], is_past] = new
            node = new[0]
            used[is_past] += 1
            own.append(new[1])
        rows[number], columns[number] = row, own
    return rows, columns


def _followed(
    nodes: dict[tuple[int, int, bool], tuple[int, int]], text: list[int], start: int
) -> tuple[int, list[int]]:
    """The columns of those first tokens of a text that are there already, and the last of these nodes."""
    node, own = NOWHERE, list[int]()
    for place, token in enumerate(text):
        found = nodes.get((node, token, place < start))
        if found is None:
            break
        node = found[0]
        own.append(found[1])
    return node, own


def _size(arranged: Arranged) -> int:
    rows, columns = arranged
    return (max(rows) + 1) * (max(map(max, columns)) + 1)
