"""A table that a page and Markdown both show: what a cell says, what it sorts by, what belongs beside it."""

import math
from collections.abc import Sequence
from html import escape
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
    main: bool = True  # also in Markdown
    words: bool = False


class Table(NamedTuple):
    """The first column names the rows."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


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


def html(table: Table) -> str:
    """With what a script needs for sorting; it reads well without one. Scrolls by itself when too wide."""
    groups = [(group, len(list(part))) for group, part in groupby(column.group for column in table.columns)]
    above = "".join(
        f'<th scope="colgroup" colspan="{width}">{escape(group)}</th>' if group
        else f'<td colspan="{width}"></td>'
        for group, width in groups
    )  # fmt: skip
    heads = "".join(
        f'<th scope="col" data-sort="{"words" if column.words else "numbers"}"'
        f"{' class=words' if column.words else ''}>{escape(column.title)}</th>"
        for column in table.columns
    )
    body = "".join(
        f"<tr>{''.join(_cell(cell, at, table.columns[at]) for at, cell in enumerate(row))}</tr>\n"
        for row in table.rows
    )
    grouped = f'<tr class="groups">{above}</tr>\n' if any(column.group for column in table.columns) else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.caption)}">'
        f'<table class="sortable">\n<caption><span>{escape(table.caption)}</span></caption>\n<thead>{grouped}'
        f"<tr>{heads}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>"
    )


def _cell(cell: Cell, at: int, column: Column) -> str:
    tag = 'th scope="row"' if at == 0 else "td"
    shade = "" if cell.heat is None else "warm" if cell.heat > 0 else "cool"
    kinds = " ".join(kind for kind in (cell.kind, shade, "words" if column.words else "") if kind)
    kind = f' class="{kinds}"' if kinds else ""
    if cell.heat is not None:
        kind += f' style="--heat: {50 * min(1.0, abs(cell.heat)):.0f}%"'
    value = "" if cell.value is None else f' data-value="{escape(str(cell.value))}"'
    note = f" <small>{escape(cell.note)}</small>" if cell.note else ""
    return f"<{tag}{kind}{value}>{escape(cell.text)}{note}</{tag[:2]}>"


def markdown(table: Table) -> str:
    """The main columns."""
    kept = [at for at, column in enumerate(table.columns) if column.main]
    heads = [", ".join(part for part in table.columns[at][1::-1] if part) for at in kept]
    lines = [heads, ["---" if table.columns[at].words else "---:" for at in kept]]
    lines += [
        [row[at].text + (f" ({row[at].note})" if row[at].note else "") for at in kept] for row in table.rows
    ]
    return "\n".join(f"| {' | '.join(plain(text) for text in line)} |" for line in lines)


def plain(text: str) -> str:
    """Text that Markdown takes as it is, on one line."""
    one_line = " ".join(text.split())
    for sign in "\\`*_[]<|":
        one_line = one_line.replace(sign, "\\" + sign)
    return one_line
