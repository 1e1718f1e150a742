"""The charts of a benchmark, as SVG: drawn once, for the page and for the figures of the documentation."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from studies.report.charts import RIGHT, TOP, WIDTH, Box, Frame, keep_apart, svg
from studies.report.tables import Table

Rows = Mapping[str, Mapping[str, Any]]
"""Method -> what a result says about it on one shift."""
IMPORTANT = (
    "dense, full", "dense, FFN only", "dense, replay 5 %", "APN, paper rule", "APN, overlay",
    "APN, overlay + all",
)  # fmt: skip
"""What is labelled unless somebody picks others."""
FAMILIES = {
    "dense": "dense, knows nothing of the old text", "memory": "dense, keeps something of the old text",
    "mixture": "mixture of experts", "local": "APN, changed in place", "apn": "APN, overlay",
    "other": "other",
}  # fmt: skip


def family(method: str) -> str:
    """Methods of a family share a colour; there are too many for one each."""
    model = method.partition(",")[0]
    if model == "dense":
        return "memory" if any(word in method for word in ("EWC", "GEM", "replay")) else "dense"
    if model == "APN":
        return "apn" if "overlay" in method or "guarded" in method else "local"
    return "mixture" if model in ("MoE", "Switch") else "other"


def important(methods: Iterable[str]) -> set[str]:
    """The methods to label; of unknown ones the first few."""
    known = list(methods)
    return set(known) & set(IMPORTANT) or set(known[: len(IMPORTANT)])


def classes(method: str, number: int, faint: bool) -> str:
    return f"{family(method)} m{number}" + (" faint" if faint else "")


def gain_interval(row: Mapping[str, Any], way: str) -> tuple[float, float] | None:
    """That of B against dense full, on the scale of gains; none where dense full gained nothing."""
    now = row[way]
    gained = row["full_gained"]
    if gained <= 0:
        return None
    low, high = (
        now["gain"] + math.log(now["B_over_full"] / bound) / gained for bound in now["B_over_full_interval"]
    )
    return min(low, high), max(low, high)


class Spot(NamedTuple):
    """A method on the Pareto plot, one way."""

    lost: float
    gain: float
    lost_interval: Sequence[float]
    gain_interval: Sequence[float]


def _spots(row: Mapping[str, Any]) -> dict[str, Spot]:
    """Alone and guarded; nothing for a method whose numbers are not finite."""
    found = {}
    for way in ("alone", "guarded"):
        now = row[way]
        told = [now[key] for key in ("forgetting", "gain", "B", "B_over_full")]
        told += [*now["forgetting_interval"], *now["B_over_full_interval"]]
        if not all(value is not None and math.isfinite(value) for value in told):
            return {}
        gains = gain_interval(row, way) or (now["gain"], now["gain"])
        found[way] = Spot(now["forgetting"], now["gain"], now["forgetting_interval"], gains)
    return found


def pareto(rows: Rows, numbers: Mapping[str, int], name: str, *, faint: bool = False) -> str:
    """Gain on B against forgetting of A; hollow alone, filled behind the guard, with 95 % intervals.

    With `faint` the important methods alone are labelled; otherwise all are, for the page to choose from.
    """
    found = {method: spots for method, row in rows.items() if (spots := _spots(row))}
    both = [spot for spots in found.values() for spot in spots.values()]
    losses = [0.0, *(value for spot in both for value in (spot.lost, *spot.lost_interval))]
    gains = [1.0, *(value for spot in both for value in (spot.gain, *spot.gain_interval))]
    if min(gains) < 0.5:  # else the axis begins where they do
        gains.append(0.0)
    x_title, y_title = "forgetting of A, nats per byte", "gain on B, as a share of dense full"
    frame = Frame(losses, gains, x_title, y_title)
    chosen = important(rows)
    order = sorted(found, key=lambda method: method not in chosen)
    at = {
        (method, way): (frame.x(spot.lost), frame.y(spot.gain))
        for method in found for way, spot in found[method].items()
    }  # fmt: skip
    points = [Box(x - 5, y - 5, x + 5, y + 5) for x, y in at.values()]
    points.append(_hint_box(frame, frame.box.top + 14))
    labels = keep_apart([(*at[method, "alone"], method) for method in order], points, frame.box)
    groups = []
    for method, label in zip(order, labels, strict=True):
        marks = "M{:.1f} {:.1f}L{:.1f} {:.1f}".format(*at[method, "alone"], *at[method, "guarded"])
        marks = f'<path class="link picked" d="{marks}"/>'
        for way, spot in found[method].items():
            x, y = at[method, way]
            (left, right), (low, high) = map(frame.x, spot.lost_interval), map(frame.y, spot.gain_interval)
            marks += (
                f'<g><path class="spread" d="M{left:.1f} {y:.1f}H{right:.1f}M{x:.1f} {low:.1f}V{high:.1f}"/>'
                f'<circle class="{way}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
                f"<title>{escape(_spot_text(method, way, spot))}</title></g>"
            )
        drawn_as = classes(method, numbers[method], faint and method not in chosen)
        groups.append(f'<g class="{drawn_as}">{marks}{label}</g>')
    note = f'<text x="{frame.box.left + 6}" y="{frame.box.top + 14}">\u2196 better</text>'
    drawn = _front(frame, [spots["alone"] for spots in found.values()]) + "".join(reversed(groups))
    description = f"{name}: gain on B against forgetting of A for {len(found)} methods, alone and guarded"
    return frame.draw(drawn, description, note + _left_out(rows, found))


def _spot_text(method: str, way: str, spot: Spot) -> str:
    lost, gain = spot.lost_interval, spot.gain_interval
    return (
        f"{method}, {way}: gain {spot.gain:.3f} ({gain[0]:.3f} to {gain[1]:.3f}), "
        f"forgetting {spot.lost:.4f} nats ({lost[0]:.4f} to {lost[1]:.4f})"
    )


def _front(frame: Frame, spots: Sequence[Spot]) -> str:
    """The steps beyond which no method gets without the guard."""
    path, best = "", -math.inf
    for spot in sorted(spots, key=lambda spot: (spot.lost, -spot.gain)):
        if spot.gain > best:
            x, y = frame.x(spot.lost), frame.y(spot.gain)
            path += f"H{x:.1f}V{y:.1f}" if path else f"M{x:.1f} {frame.box.bottom}V{y:.1f}"
            best = spot.gain
    return f'<path class="front" d="{path}H{frame.box.right}"/>' if path else ""


def _hint_box(frame: Frame, y: float) -> Box:
    """Where the corner is that says which way is better."""
    return Box(frame.box.left, y - 12, frame.box.left + 56, y + 4)


def _left_out(rows: Iterable[str], found: Mapping[str, Any]) -> str:
    missing = [method for method in rows if method not in found]
    if not missing:
        return ""
    more = f" and {len(missing) - 2} more" if len(missing) > 2 else ""
    text = escape(f"not drawn, not finite: {'; '.join(missing[:2])}{more}")
    return f'<text x="{WIDTH - RIGHT}" y="{TOP + 14}" text-anchor="end">{text}</text>'


def trajectories(rows: Rows, numbers: Mapping[str, int], name: str, *, faint: bool = False) -> str:
    """A against B along the steps, alone, with the first seed; the larger dot is the step that counts.

    With `faint` only the important methods are there. Others may run out of the frame, which holds their
    first and best steps.
    """
    chosen, found = important(rows), {}
    for method, row in rows.items():
        ways = [p for p in row["trajectory"] if math.isfinite(p["A"]) and math.isfinite(p["B"])]
        if ways:
            found[method] = ways
    left_out = _left_out(rows, found)
    if faint:
        found = {method: ways for method, ways in found.items() if method in chosen}
    best = {method: row["best_steps"][0] for method, row in rows.items()}
    inside = [
        p for method, ways in found.items() for p in ways
        if method in chosen or p["step"] in (0, best[method])
    ] or [{"A": 0.0, "B": 0.0}]  # fmt: skip
    titles = "loss of B, nats per byte", "loss of A, nats per byte"
    frame = Frame([p["B"] for p in inside], [p["A"] for p in inside], *titles)
    order = sorted(found, key=lambda method: method not in chosen)
    ends = [(frame.x(ways[-1]["B"]), frame.y(ways[-1]["A"])) for ways in (found[m] for m in order)]
    points = [_hint_box(frame, frame.box.bottom - 8)]  # and along the lines: labels stay off them
    for p, q in (pair for method in order if method in chosen for pair in pairwise(found[method])):
        for share in (0, 0.25, 0.5, 0.75, 1):
            x, y = (frame.x(_between(p["B"], q["B"], share)), frame.y(_between(p["A"], q["A"], share)))
            points.append(Box(x - 3, y - 3, x + 3, y + 3))
    labels = keep_apart([(*end, method) for end, method in zip(ends, order, strict=True)], points, frame.box)
    groups = []
    for method, label in zip(order, labels, strict=True):
        places = [(frame.x(p["B"]), frame.y(p["A"]), p) for p in found[method]]
        marks = f'<path class="way" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y, _ in places)}"/>'
        for x, y, p in places:
            text = escape(f"{method}, step {p['step']}: A {p['A']:.4f}, B {p['B']:.4f} nats")
            kind, size = ("stop", 5) if p["step"] == best[method] else ("step", 2.5)
            marks += (
                f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"><title>{text}</title></circle>'
            )
        groups.append(f'<g class="{classes(method, numbers[method], False)} trace">{marks}{label}</g>')
    left, top, right, bottom = frame.box
    width, height = right - left + 12, bottom - top + 12
    clipped = (
        f'<svg x="{left - 6}" y="{top - 6}" width="{width}" height="{height}" '
        f'viewBox="{left - 6} {top - 6} {width} {height}">'
        f"{''.join(reversed(groups))}</svg>"
    )
    note = f'<text x="{left + 6}" y="{bottom - 8}">\u2199 better</text>'
    description = f"{name}: loss of A against loss of B along the steps, for {len(found)} methods"
    return frame.draw(clipped, description, note + left_out)


def scatter(
    points: Mapping[str, tuple[float, float]],
    x_title: str,
    y_title: str,
    description: str,
    spreads: Mapping[str, tuple[float, float]] | None = None,
) -> str:
    """Named points, one for each model, and from where to where its seeds go, if there are several.

    In a crowd those that stand out are labelled.
    """
    found = {name: point for name, point in points.items() if all(map(math.isfinite, point))}
    reach = {name: spread for name, spread in (spreads or {}).items() if name in found}
    xs, ys = ([point[axis] for point in found.values()] or [0.0] for axis in (0, 1))
    frame = Frame(xs, [*ys, *(end for spread in reach.values() for end in spread)], x_title, y_title)
    middle = frame.x(median(xs)), frame.y(median(ys))
    at = {name: (frame.x(x), frame.y(y)) for name, (x, y) in found.items()}
    order = sorted(at, key=lambda name: -math.dist(at[name], middle))
    boxes = [Box(x - 5, y - 5, x + 5, y + 5) for x, y in at.values()]
    boxes += [
        Box(at[name][0] - 1, frame.y(high), at[name][0] + 1, frame.y(low))
        for name, (low, high) in reach.items()
    ]
    labels = keep_apart([(*at[name], name) for name in order], boxes, frame.box, all_of_them=False)
    marks = ""
    for name, label in zip(order, labels, strict=True):
        x, y = found[name]
        text = escape(f"{name}: {x_title} {x:.4g}, {y_title} {y:.4g}")
        spot = f'cx="{at[name][0]:.1f}" cy="{at[name][1]:.1f}" r="4.5"'
        circle = f'<circle class="stop" {spot}><title>{text}</title></circle>'
        if name in reach:
            low, high = map(frame.y, reach[name])
            circle = f'<path class="spread" d="M{at[name][0]:.1f} {low:.1f}V{high:.1f}"/>{circle}'
        marks += f'<g class="{family(name)}">{circle}{label}</g>'
    return frame.draw(marks, description, _left_out(points, found))


def _between(first: float, last: float, share: float) -> float:
    return first + share * (last - first)


def usage(routing: Mapping[str, Any], layer: str, top: float, description: str) -> str:
    """How often A (up) and B (down) select each patch: filled after adapting, a line before.

    Patches are in the order in which A prefers them to B, before.
    """
    before, after = (routing[when][layer]["usage"] for when in ("before", "after"))
    order = sorted(range(len(before[0])), key=lambda patch: before[1][patch] - before[0][patch])
    marks = ""
    for when, shares in (("after", after), ("before", before)):
        for text, sign, own in (("A", -1, shares[0]), ("B", 1, shares[1])):
            steps = "".join(f"V{sign * 100 * own[patch] / top:.0f}h1" for patch in order)
            marks += f'<path class="{text} {when}" d="M0 0{steps}V0z"/>'
    stretched = f'viewBox="0 -100 {len(order)} 200" preserveAspectRatio="none" width="132" height="84"'
    middle = '<path class="zero" d="M0 42H132"/>'
    return svg(132, 84, f"<svg {stretched}>{marks}</svg>{middle}", description)


def heat(table: Table) -> str:
    """A table of shaded cells, as a picture."""
    left, top, width, height = 92, 22, 74, 24
    marks = "".join(
        f'<text x="{left + (at + 0.5) * width:g}" y="14" text-anchor="middle">{escape(column.title)}</text>'
        for at, column in enumerate(table.columns[1:])
    )
    for row, (head, *cells) in enumerate(table.rows):
        y = top + row * height
        marks += f'<text x="{left - 6}" y="{y + 16}" text-anchor="end">{escape(head.text)}</text>'
        for at, cell in enumerate(cells):
            x, heat = left + at * width, cell.heat or 0.0
            box = f'x="{x}" y="{y}" width="{width - 2}" height="{height - 2}"'
            shade, strength = "warmer" if heat > 0 else "cooler", 0.5 * min(1.0, abs(heat))
            marks += (
                f'<rect class="cell {shade}" {box} fill-opacity="{strength:.2f}"/>'
                f'<text class="cell-text" x="{x + width / 2 - 1:g}" y="{y + 15}" text-anchor="middle">'
                f"{escape(cell.text)}</text>"
            )
            if cell.kind == "visited":
                marks += f'<rect class="visited" {box}/>'
    return svg(left + width * (len(table.columns) - 1), top + height * len(table.rows), marks, table.caption)
