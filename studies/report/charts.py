"""What reports look like, and what their charts are made of: axes, labels that keep apart, files of SVG.

A chart has a size of its own, so that its labels can be placed, and takes its colours from the page.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

Ticks = dict[float, str]

LOOK = """\
:root { color-scheme: light dark; --paper: #fdfdfb; --ink: #1d2125; --muted: #646c75; --rule: #dfe0db;
  --dense: #5672a8; --apn: #cb4b12; --even: #217a4b; --uneven: #96650a; --collapsed: #b3261e; }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #15171a; --ink: #e6e7e4; --muted: #9aa2ab; --rule: #33373d;
    --dense: #8eaae0; --apn: #ff8a50; --even: #6cc795; --uneven: #e3b04b; --collapsed: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 58rem; padding: clamp(1.5rem, 5vw, 4rem) clamp(1.1rem, 4vw, 2.5rem);
  background: var(--paper); color: var(--ink); font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", "Liberation Sans", Arial, sans-serif; }
h1 { margin: 0 0 1.2rem; font-size: clamp(1.8rem, 5vw, 2.6rem); line-height: 1.15; letter-spacing: -0.02em; }
h2 { margin: 3.5rem 0 0.6rem; font-size: 1.3rem; letter-spacing: -0.01em; }
h3 { margin: 0; font-size: 1rem; }
p { margin: 0 0 1rem; max-width: 44rem; }
.muted, footer, .key, .y-title, .x-title, .tick { color: var(--muted); font-size: 0.85rem; }
.finding { border-left: 3px solid var(--apn); padding-left: 1rem; font-size: 1.1rem; }
"""

INK = """
:root { --memory: #1a7a70; --mixture: #80519d; --local: #8c6000; --other: #646c75; --better: #2a6fb0;
  --worse: #b3261e; }
@media screen and (prefers-color-scheme: dark) {
  :root { --memory: #5cc4b6; --mixture: #c79be3; --local: #d9a93a; --other: #9aa2ab; --better: #74b2ef;
    --worse: #ff8a80; } }
.dense { --colour: var(--dense); } .memory { --colour: var(--memory); } .apn { --colour: var(--apn); }
.mixture { --colour: var(--mixture); } .local { --colour: var(--local); } .other { --colour: var(--other); }
svg.chart { display: block; font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue",
  "Liberation Sans", Arial, sans-serif; font-variant-numeric: tabular-nums; }
.chart text { fill: var(--muted); font-size: 11px; } .chart .title { fill: var(--ink); font-size: 13px; }
.chart .label { fill: var(--colour); font-size: 11.5px; font-weight: 600; paint-order: stroke;
  stroke: var(--paper); stroke-width: 3px; stroke-linejoin: round; }
.chart .grid { stroke: var(--rule); fill: none; } .chart .zero { stroke: var(--muted); fill: none; }
.chart .front { stroke: var(--muted); fill: none; stroke-dasharray: 2 4; }
.chart .spread, .chart .link, .chart .leader { stroke: var(--colour); fill: none; }
.chart .link { stroke-dasharray: 4 3; opacity: 0.7; } .chart .leader { opacity: 0.6; stroke-width: 0.8; }
.chart .alone { fill: var(--paper); stroke: var(--colour); stroke-width: 2; }
.chart .guarded, .chart .stop { fill: var(--colour); stroke: var(--paper); stroke-width: 1; }
.chart .way { fill: none; stroke: var(--colour); stroke-width: 2; stroke-linejoin: round; }
.chart .step { fill: var(--colour); }
.chart .faint { opacity: 0.3; } .chart .faint .picked { display: none; }
.chart .A { fill: var(--better); } .chart .B { fill: var(--apn); }
.chart .after { fill-opacity: 0.45; } .chart .before { fill: none; stroke: var(--ink); stroke-width: 0.8;
  vector-effect: non-scaling-stroke; }
.chart .cell { fill: var(--colour); } .chart .cell-text { fill: var(--ink); font-size: 10.5px; }
.chart .warmer { --colour: var(--worse); } .chart .cooler { --colour: var(--better); }
.chart .visited { fill: none; stroke: var(--ink); stroke-width: 1.2; }
"""

WIDTH, HEIGHT = 520, 380
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 46
MOST_COVERED = 30
"""Of a label without a free place: square pixels of others that it covers, three times those outside."""


def ticks(low: float, high: float, most: int, unit: str = "") -> Ticks:
    """Round numbers around what is to be drawn; the axis runs from the first to the last."""
    span = (high - low) or 1.0
    size = 10 ** math.floor(math.log10(span / most))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor * most >= span * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil((low + span) / step - 1e-9)
    digits = max(0, -math.floor(math.log10(step)))
    return {number * step: f"{number * step:.{digits}f}{unit}" for number in range(first, last + 1)}


def place(value: float, ticks: Ticks) -> float:
    """Where a value lies on an axis, in percent."""
    low, high = min(ticks), max(ticks)
    return 100 * (value - low) / (high - low)


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def shared(self, other: "Box") -> float:
        """The area of both."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, width) * max(0.0, height)


class Frame:
    """Axes, and where values lie on them."""

    box = Box(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM)

    def __init__(self, xs: Iterable[float], ys: Iterable[float], x_title: str, y_title: str) -> None:
        xs, ys = list(xs), list(ys)
        self.x_ticks, self.y_ticks = ticks(min(xs), max(xs), 6), ticks(min(ys), max(ys), 6)
        self.x_title, self.y_title = x_title, y_title

    def x(self, value: float) -> float:
        return self.box.left + place(value, self.x_ticks) / 100 * (self.box.right - self.box.left)

    def y(self, value: float) -> float:
        return self.box.bottom - place(value, self.y_ticks) / 100 * (self.box.bottom - self.box.top)

    def draw(self, marks: str, description: str, note: str) -> str:
        left, top, right, bottom = self.box
        grid = "".join(
            f'<path class="{"zero" if value == 0 else "grid"}" d="M{left} {self.y(value):.1f}H{right}"/>'
            f'<text x="{left - 6}" y="{self.y(value) + 4:.1f}" text-anchor="end">{text}</text>'
            for value, text in self.y_ticks.items()
        ) + "".join(
            f'<path class="{"zero" if value == 0 else "grid"}" d="M{self.x(value):.1f} {top}V{bottom}"/>'
            f'<text x="{self.x(value):.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>'
            for value, text in self.x_ticks.items()
        )
        titles = (
            f'<text x="{(left + right) / 2:.0f}" y="{bottom + 34}" text-anchor="middle">{self.x_title}</text>'
            f'<text transform="translate(12 {(top + bottom) / 2:.0f}) rotate(-90)" text-anchor="middle">'
            f"{self.y_title}</text>{note}"
        )
        return svg(WIDTH, HEIGHT, grid + titles + marks, description)


def svg(width: float, height: float, marks: str, description: str, more: str = "") -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"{more} '
        f'role="img" aria-label="{escape(description)}">{marks}</svg>'
    )


def sheet(charts: Mapping[str, str], columns: int, width: float = WIDTH, height: float = HEIGHT) -> str:
    """Charts with a title each as one SVG file that needs no page; light and dark."""
    placed = ""
    for number, (title, chart) in enumerate(charts.items()):
        x, y = number % columns * (width + 16), number // columns * (height + 34)
        moved = chart.replace("<svg ", f'<svg x="{x:g}" y="{y + 30:g}" ', 1)
        placed += f'<text class="title" x="{x + 8:g}" y="{y + 18:g}">{escape(title)}</text>{moved}'
    rows, columns = -(-len(charts) // columns), min(columns, len(charts))
    across, down = columns * (width + 16) - 16, rows * (height + 34)
    palette = LOOK[: LOOK.index("* {")]
    paper = f'<rect width="{across:g}" height="{down:g}" style="fill: var(--paper)"/>'
    style = f"<style>{palette}{INK}</style>"
    return svg(across, down, style + paper + placed, "; ".join(charts), ' xmlns="http://www.w3.org/2000/svg"')


def keep_apart(
    wanted: Sequence[tuple[float, float, str]], points: Sequence[Box], frame: Box, *, all_of_them: bool = True
) -> list[str]:
    """Labels of points, (x, y, text), as SVG: the first gets the best place, no two on top of each other.

    Unless all of them are wanted, a label without a free place is empty.
    """
    taken, drawn = list(points), []
    distances = (0, 12, 26, 42, 60) if len(wanted) <= 12 else (0, 12, 26)  # long leaders confuse in a crowd
    for x, y, text in wanted:
        width, choices = 6.9 * len(text), []
        for far in distances:
            for right, down in ((1, 0), (-1, 0), (1, -1), (1, 1), (-1, -1), (-1, 1), (0, -1), (0, 1)):
                start = (
                    x + right * (9 + far / 2) - (0, width / 2, width)[0 if right > 0 else 2 if right else 1]
                )
                base = y + 4 + down * (11 + far)
                box = Box(start, base - 10, start + width, base + 3)
                hidden = sum(box.shared(other) for other in taken)
                outside = width * 13 - box.shared(frame)
                covered = hidden + 3 * outside
                choices.append((round(covered + far + abs(right * down), 3), covered, start, base, box))
        _, covered, start, base, box = min(choices, key=lambda choice: (choice[1] > MOST_COVERED, choice[0]))
        if covered > MOST_COVERED and not all_of_them:
            drawn.append("")
            continue
        taken.append(box)
        near = min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)
        leader = ""
        if math.dist(near, (x, y)) > 14:
            leader = f'<path class="leader" d="M{x:.1f} {y:.1f}L{near[0]:.1f} {near[1]:.1f}"/>'
        label = f'<text class="label" x="{start:.1f}" y="{base:.1f}">{escape(text)}</text>'
        drawn.append(f'<g class="picked">{leader}{label}</g>')
    return drawn
