"""A table that a page, Markdown and a terminal show: what a cell says, sorts by, and has beside it."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

MISSING = "\u2013"


class Cell(NamedTuple):
    """`value` is what a column is sorted by; a missing or infinite one goes last."""

    text: str
    value: float | str | None = None
    note: str = ""  # smaller, after the text
    kind: str = ""  # "good" or "bad": coloured, and the text says so too; "visited": framed
    heat: float | None = None  # from -1, cool, to 1, warm: the shade behind the text


class Column(NamedTuple):
    title: str
    group: str = ""
    main: bool = True  # also in Markdown and in a terminal
    words: bool = False


class Table(NamedTuple):
    """The first column names the rows."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    @property
    def groups(self) -> list[tuple[str, int]]:
        """What stands above neighbouring columns, and above how many."""
        return [(group, len(list(part))) for group, part in groupby(column.group for column in self.columns)]

    def main(self) -> "Table":
        """The same without the columns that only a page has room for."""
        kept = [at for at, column in enumerate(self.columns) if column.main]
        rows = [[row[at] for at in kept] for row in self.rows]
        return Table(self.caption, [self.columns[at] for at in kept], rows)


def name(text: str, note: str = "") -> Cell:
    return Cell(text, text, note)


def number(
    value: float | None, form: str = ".3f", interval: Sequence[float] | None = None, unit: str = ""
) -> Cell:
    """A value with its 95 % interval; what was not measured or did not stay finite says so."""
    if value is None:
        return Cell(MISSING)
    if not math.isfinite(value):
        return Cell("not finite")
    known = interval and all(map(math.isfinite, interval))
    note = " to ".join(f"{bound:{form}}" for bound in interval) if interval and known else ""
    text = f"{value:{form}}"
    if text.startswith("-") and not text.strip("-0.,"):
        text = text[1:]  # no minus before a zero
    return Cell(text + unit, value, note)


def count(value: float | None) -> Cell:
    if value is None or value < 1e5:
        return number(value, ",.0f")
    return Cell(f"{value / 1e6:,.2f}M", value)


def size(nbytes: float | None) -> Cell:
    if nbytes is None or nbytes < 1e3:
        return number(nbytes, ",.0f", unit=" B")
    unit, word = (1e3, "kB") if nbytes < 1e6 else (1e6, "MB")
    return Cell(f"{nbytes / unit:,.1f} {word}", nbytes)


def percent(value: float | None) -> Cell:
    return Cell(MISSING) if value is None else Cell(f"{value:.1%}", value)


def rise(value: float | None) -> Cell:
    """By how much a perplexity rose; what is small has more digits."""
    if value is None:
        return Cell(MISSING)
    digits = 0 if abs(value) >= 1 else 1 if abs(value) >= 0.01 else 3
    return Cell(f"{value:+.{digits}%}" if value else "0%", value)


def spread(values: Sequence[float]) -> tuple[float, float] | None:
    """The range of several numbers, from the smallest to the largest."""
    return (min(values), max(values)) if len(values) > 1 else None


def markdown(table: Table) -> str:
    """The main columns, with intervals in brackets."""
    _, columns, rows = table.main()
    lines = [[", ".join(part for part in (column.group, column.title) if part) for column in columns]]
    lines.append(["---" if column.words else "---:" for column in columns])
    lines += [[cell.text + (f" ({cell.note})" if cell.note else "") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(plain(text) for text in line)} |" for line in lines)


def plain(text: str) -> str:
    """Text that Markdown takes as it is, on one line."""
    one_line = " ".join(text.split())
    for sign in "\\`*_[]<|":
        one_line = one_line.replace(sign, "\\" + sign)
    return one_line


def text(table: Table) -> str:
    """The main columns for a terminal, without intervals."""
    table = table.main()
    lines = [[column.title for column in table.columns]]
    lines += [[" ".join(cell.text.split()) for cell in row] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    above, at = [], 0
    for group, columns in table.groups:
        across = sum(widths[at : at + columns]) + 2 * (columns - 1)
        widths[at] += max(0, len(group) - across)
        above.append(f"{group:>{max(across, len(group))}s}")
        at += columns
    shown = [f"{table.caption}:", *(["  ".join(above)] if any(group for group, _ in table.groups) else [])]
    for line in lines:
        cells = zip(line, table.columns, widths, strict=True)
        shown.append("  ".join(f"{cell:{'<' if c.words else '>'}{width}s}" for cell, c, width in cells))
    return "\n".join(line.rstrip() for line in shown)
