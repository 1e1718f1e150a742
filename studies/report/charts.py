"""The charts of results, drawn by matplotlib: for the page and for the figures of the documentation.

Every function returns the text of an SVG, but for maps of patches, which have too many lines. A sheet has one
chart for each shift and one legend for all. Families of methods share a colour; what stands out has a marker
of its own, so that a sheet can be read in grey.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from attractor.figures import in_style, new_figure, png, svg
from studies.report.tables import Table

Rows = Mapping[str, Mapping[str, Any]]
"""Method -> what a result says about it on one shift."""
IMPORTANT = (
    "dense, full",
    "dense, FFN only",
    "dense, replay 5 %",
    "APN, paper rule",
    "APN, overlay",
    "APN, overlay + all",
)
"""What stands out: large, with intervals, and with its trajectory."""
MARKERS = "osD^XvP<>*pHd8"
COLOURS = {
    "dense": "#35559c",
    "memory": "#1d9a8c",
    "mixture": "#8d55ad",
    "local": "#d79b1e",
    "apn": "#c8380e",
    "other": "#777777",
}
"""Dense without and with something of the old text; experts; APN changed in place, and in an overlay."""


class Look(NamedTuple):
    colour: str
    marker: str


def family(method: str) -> str:
    """Methods of a family share a colour; there are too many for one each."""
    model = method.partition(",")[0]
    if model == "dense":
        return "memory" if any(word in method for word in ("EWC", "GEM", "replay")) else "dense"
    if model == "APN":
        return "apn" if "overlay" in method or "guarded" in method else "local"
    return "mixture" if model in ("MoE", "Switch") else "other"


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """A colour for each family; a marker of its own for what stands out, for others one within the family."""
    known = list(methods)
    chosen = [method for method in known if method in important(known)]
    found = {method: Look(COLOURS[family(method)], MARKERS[at]) for at, method in enumerate(chosen)}
    rest = sorted(set(known) - set(chosen), key=lambda method: (family(method), known.index(method)))
    for kind, members in itertools.groupby(rest, key=family):
        for method, marker in zip(members, itertools.cycle(MARKERS[len(chosen) :]), strict=False):
            found[method] = Look(COLOURS[kind], marker)
    return found


def important(methods: Iterable[str]) -> set[str]:
    """The methods that stand out; of unknown ones the first few."""
    known = list(methods)
    return set(known) & set(IMPORTANT) or set(known[: len(IMPORTANT)])


def gain_interval(row: Mapping[str, Any], way: str) -> tuple[float, float] | None:
    """That of B against dense full, on the scale of gains; none where dense full gained nothing."""
    now, gained = row[way], row["full_gained"]
    if gained <= 0:
        return None
    low, high = (
        now["gain"] + math.log(now["B_over_full"] / bound) / gained for bound in now["B_over_full_interval"]
    )
    return min(low, high), max(low, high)


class Spot(NamedTuple):
    """A method in the plane of gain and forgetting, one way."""

    lost: float
    gain: float
    lost_interval: Sequence[float]
    gain_interval: Sequence[float]


def _spots(row: Mapping[str, Any]) -> dict[str, Spot]:
    """Alone and guarded; nothing for a method whose numbers are not finite."""
    found = {}
    for way in ("alone", "guarded"):
        now = row[way]
        values = [now[key] for key in ("forgetting", "gain", "B", "B_over_full")]
        values += [*now["forgetting_interval"], *now["B_over_full_interval"]]
        if not all(value is not None and math.isfinite(value) for value in values):
            return {}
        gains = gain_interval(row, way) or (now["gain"], now["gain"])
        found[way] = Spot(now["forgetting"], now["gain"], now["forgetting_interval"], gains)
    return found


@in_style
def pareto(shifts: Mapping[str, Rows]) -> str:
    """For each shift gain on B against forgetting of A: hollow alone, filled behind the guard."""
    methods = list(dict.fromkeys(method for rows in shifts.values() for method in rows))
    chosen, look = important(methods), looks(methods)
    figure, axes = _sheet(len(shifts))
    for place, (title, rows) in zip(axes, shifts.items(), strict=True):
        found = {method: spots for method, row in rows.items() if (spots := _spots(row))}
        for method in sorted(found, key=chosen.__contains__):  # what stands out is drawn last
            _method(place, found[method], look[method], method in chosen)
        _front(place, [spots["alone"] for spots in found.values()])
        place.set(xlabel="forgetting of A, nats per byte", ylabel="gain on B, share of dense full")
        _title(place, title, "better: up and left", [method for method in rows if method not in found])
    handles = [_handle(method, look[method], method in chosen) for method in methods]
    handles.append(
        Line2D([], [], marker="o", color="black", markerfacecolor="white", linestyle="", label="alone")
    )
    handles.append(Line2D([], [], marker="o", color="black", linestyle="", label="behind the guard"))
    handles.append(Line2D([], [], color="black", linewidth=1, label="95 % interval"))
    handles.append(Line2D([], [], color="grey", linestyle=":", label="best of those alone"))
    _legend(figure, handles)
    return svg(figure)


def _method(axes: Axes, spots: Mapping[str, Spot], look: Look, large: bool) -> None:
    alpha, size = (1.0, 7.5) if large else (0.55, 4.5)
    alone, guarded = spots["alone"], spots["guarded"]
    axes.plot(
        [alone.lost, guarded.lost], [alone.gain, guarded.gain], "--", color=look.colour, lw=0.6, alpha=alpha
    )
    for way, spot in spots.items():
        if large:
            axes.plot(spot.lost_interval, [spot.gain] * 2, color=look.colour, linewidth=1)
            axes.plot([spot.lost] * 2, spot.gain_interval, color=look.colour, linewidth=1)
        inside = "white" if way == "alone" else look.colour
        axes.plot(
            spot.lost,
            spot.gain,
            look.marker,
            color=look.colour,
            markerfacecolor=inside,
            markersize=size,
            alpha=alpha,
        )


def _front(axes: Axes, spots: Sequence[Spot]) -> None:
    """The steps beyond which no method gets without the guard."""
    corners: list[Spot] = []
    for spot in sorted(spots, key=lambda spot: (spot.lost, -spot.gain)):
        if not corners or spot.gain > corners[-1].gain:
            corners.append(spot)
    if corners:
        places, gains = [spot.lost for spot in corners], [spot.gain for spot in corners]
        axes.step([*places, axes.get_xlim()[1]], [*gains, gains[-1]], ":", where="post", color="grey")


@in_style
def trajectories(shifts: Mapping[str, Rows]) -> str:
    """For each shift A against B along the steps, of a few methods; a large dot is the step that counts."""
    methods = list(dict.fromkeys(method for rows in shifts.values() for method in rows))
    chosen, look = important(methods), looks(methods)
    figure, axes = _sheet(len(shifts))
    for place, (title, rows) in zip(axes, shifts.items(), strict=True):
        left_out = []
        for method, row in rows.items():
            way = [p for p in row["trajectory"] if math.isfinite(p["A"]) and math.isfinite(p["B"])]
            if not way:
                left_out.append(method)
            elif method in chosen:
                colour, marker = look[method]
                best = [p for p in way if p["step"] == row["best_steps"][0]]
                for points, line, size in ((way, "-", 4), (best, "", 9)):
                    x, y = [p["B"] for p in points], [p["A"] for p in points]
                    place.plot(x, y, color=colour, marker=marker, linestyle=line, markersize=size)
        place.set(xlabel="loss of B, nats per byte", ylabel="loss of A, nats per byte")
        _title(place, title, "better: down and left", left_out)
    _legend(figure, [_handle(method, look[method], True) for method in methods if method in chosen])
    return svg(figure)


@in_style
def scatter(
    points: Mapping[str, tuple[float, float]],
    x_title: str,
    y_title: str,
    title: str,
    spreads: Mapping[str, tuple[float, float]] | None = None,
    joined: str = "",
) -> str:
    """Named points, one for each model, and from where to where its seeds go, if there are several.

    Those of the group `joined` are a line.

    Models called "option=value" share the look of their option; the value stands beside the point where there
    is room.
    """
    found = {name: point for name, point in points.items() if all(map(math.isfinite, point))}
    groups = list(dict.fromkeys(name.partition("=")[0] for name in found))
    figure = new_figure(8.4, 4.2)
    axes = figure.subplots()
    handles = []
    for number, group in enumerate(groups):
        look = Look(f"C{number % 10}", MARKERS[number % len(MARKERS)])
        handles.append(_handle(group, look, True))
        members = [point for name, point in found.items() if name.partition("=")[0] == group]
        if group == joined:
            axes.plot(*zip(*sorted(members), strict=True), "-", color=look.colour, linewidth=0.9)
        axes.plot(*zip(*members, strict=True), look.marker, color=look.colour, markersize=6.5, alpha=0.9)
    for name, ends in (spreads or {}).items():
        axes.plot([points[name][0]] * 2, ends, color="black", linewidth=0.8)
    axes.set(xlabel=x_title, ylabel=y_title)
    _title(axes, title, "", [name for name in points if name not in found])
    figure.legend(handles=handles, loc="outside right upper", fontsize=8)
    _label(figure, axes, {point: name.partition("=")[2] for name, point in found.items() if "=" in name})
    return svg(figure)


@in_style
def lines(series: Mapping[str, Sequence[float]], x_title: str, y_title: str, title: str) -> str:
    """Named values at 1, 2, 3 and so on."""
    figure = new_figure(8.4, 4.2)
    axes = figure.subplots()
    known = {name: values for name, values in series.items() if all(map(math.isfinite, values))}
    for number, (name, values) in enumerate(known.items()):
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(range(1, len(values) + 1), values, marker=marker, markersize=3, lw=1, label=name)
    axes.set(xlabel=x_title, ylabel=y_title)
    _title(axes, title, "", [name for name in series if name not in known])
    figure.legend(loc="outside right upper", fontsize=8)
    return svg(figure)


def _label(figure: Figure, axes: Axes, labels: Mapping[tuple[float, float], str]) -> None:
    """Beside each point its label, where that covers no point, no other label and no axis."""
    if not labels:
        return
    figure.draw_without_rendering()  # only then is known where points lie
    places = axes.transData.transform(list(labels)) * 72 / figure.dpi
    left = axes.bbox.x0 * 72 / figure.dpi
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    for (point, label), (x, y) in zip(labels.items(), places, strict=True):
        width = 5.2 * len(label)
        for right, up in ((6, 2), (-6 - width, 2), (6, -9), (-6 - width, -9)):
            box = (x + right, y + up - 2, x + right + width, y + up + 8)
            if box[0] > left and not any(
                box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken
            ):
                taken.append(box)
                axes.annotate(label, point, (right, up), textcoords="offset points", fontsize=7.5)
                break


@in_style
def usage(routed: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Methods by layers, as PNG: how often A (up) and B (down) select each patch, after (filled) and before.

    Patches are in the order in which A prefers them to B, before; heights share a scale within a layer.
    """
    layers = list(next(iter(routed.values()))["before"])
    figure = new_figure(1.3 * len(layers) + 2.4, 0.6 * len(routed) + 0.9)
    axes = figure.subplots()
    for column, layer in enumerate(layers):
        shares = {
            method: [routing[when][layer]["usage"] for when in ("before", "after")]
            for method, routing in routed.items()
        }
        top = max(max(map(max, text)) for pair in shares.values() for text in pair) or 1.0
        for row, (before, after) in enumerate(shares.values()):
            order = np.argsort(np.subtract(before[1], before[0]), kind="stable")
            edges = column + 0.9 * np.linspace(0, 1, len(order) + 1)
            for sign, text, colour in ((1, 0, COLOURS["dense"]), (-1, 1, COLOURS["apn"])):
                heights = [
                    -row + sign * 0.45 * np.asarray(when[text])[order] / top for when in (after, before)
                ]
                axes.stairs(heights[0], edges, baseline=-row, fill=True, color=colour, alpha=0.6)
                axes.stairs(heights[1], edges, baseline=None, color="black", linewidth=0.7)
    axes.set_xticks([column + 0.45 for column in range(len(layers))], [f"layer {layer}" for layer in layers])
    axes.set_yticks([-row for row in range(len(routed))], list(routed))
    axes.grid(visible=False)
    handles = [
        Rectangle((0, 0), 1, 1, color=colour, alpha=0.6, label=label)
        for label, colour in (("A, after", COLOURS["dense"]), ("B, after", COLOURS["apn"]))
    ]
    _legend(figure, [*handles, Line2D([], [], color="black", linewidth=0.7, label="before")])
    return png(figure)


@in_style
def heat(tables: Sequence[Table]) -> str:
    """Tables of shaded cells, each as a picture; a frame is where the stream just was."""
    columns = 3
    rows = -(-len(tables) // columns)
    figure = new_figure(3.9 * min(columns, len(tables)), (0.27 * len(tables[0].rows) + 0.6) * rows)
    axes = list(figure.subplots(rows, min(columns, len(tables)), squeeze=False).flat)
    for place, table in zip(axes, tables, strict=False):
        shades = [[cell.heat or 0.0 for cell in cells[1:]] for cells in table.rows]
        place.imshow(shades, cmap="RdBu_r", vmin=-2, vmax=2, aspect="auto")
        for y, cells in enumerate(table.rows):
            for x, cell in enumerate(cells[1:]):
                place.text(x, y, cell.text, ha="center", va="center", fontsize=8)
                if cell.kind == "visited":
                    place.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, fill=False, linewidth=1.2))
        place.set_xticks(range(len(table.columns) - 1), [column.title for column in table.columns[1:]])
        place.set_yticks(range(len(table.rows)), [cells[0].text for cells in table.rows])
        place.tick_params(length=0, top=False, bottom=False)
        place.set_title(table.caption, fontsize=9, loc="left")
        place.grid(visible=False)
        place.spines[:].set_visible(False)
    for empty in axes[len(tables) :]:
        empty.set_visible(False)
    return svg(figure)


def _sheet(count: int) -> tuple[Figure, Sequence[Axes]]:
    """A figure of so many charts, two beside each other."""
    rows, columns = -(-count // 2), min(count, 2)
    figure = new_figure(5.3 * columns, 4.0 * rows + 1.1)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for empty in axes[count:]:
        empty.set_visible(False)
    return figure, axes[:count]


def _title(axes: Axes, title: str, better: str, left_out: Sequence[str]) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_title(better, loc="right", fontsize=8, color="#555555")
    if left_out:
        more = f" and {len(left_out) - 2} more" if len(left_out) > 2 else ""
        note = f"not drawn, not finite: {'; '.join(left_out[:2])}{more}"
        axes.text(0.98, 0.02, note, transform=axes.transAxes, ha="right", fontsize=7.5, color="#555555")


def _handle(name: str, look: Look, large: bool) -> Line2D:
    size, alpha = (7, 1.0) if large else (4.5, 0.55)
    return Line2D(
        [], [], marker=look.marker, color=look.colour, linestyle="", markersize=size, alpha=alpha, label=name
    )


def _legend(figure: Figure, handles: Sequence[Any]) -> None:
    columns = 4 if figure.get_figwidth() > 8 else 2
    figure.legend(handles=list(handles), loc="outside lower center", ncols=columns, fontsize=8)
