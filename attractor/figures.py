"""Figures of matplotlib as SVG or PNG, the same bytes each time, and as part of a page that fetches nothing.

    @in_style
    def chart():
        figure = new_figure(8, 3)
        figure.subplots().plot([1, 2, 3])
        return svg(figure)

    page = f'<img alt="three points" src="{data_uri(chart())}">'

Nothing here touches pyplot: no backend is chosen for the program that imports this, and no figure stays open.
"""

import base64
import io
import logging
from typing import Any

import matplotlib
from matplotlib.figure import Figure

logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it likes to talk about fonts

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "attractor",  # names inside of a file depend on its content alone
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e0",
    "legend.frameon": False,
}
in_style = matplotlib.rc_context(STYLE)
"""Around a function that draws, as a decorator."""


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that keeps its labels inside."""
    return Figure(figsize=(width, height), layout="constrained")


def svg(figure: Figure) -> str:
    """The text of an SVG file, without the time at which it was drawn."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def png(figure: Figure) -> bytes:
    """The bytes of a PNG file, for what has too many lines for SVG."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()


def data_uri(drawing: str | bytes) -> str:
    """The text of an SVG or the bytes of a PNG as an address that holds the whole picture."""
    kind, content = ("svg+xml", drawing.encode()) if isinstance(drawing, str) else ("png", drawing)
    return f"data:image/{kind};base64," + base64.b64encode(content).decode()
