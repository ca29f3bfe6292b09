"""Figures as SVG for a page: text stays text, colours are the page's (so light, dark and print need one drawing).

Sides are told apart by colour, by line style and by marker.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_kvplug.evals.report import answers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Stand-ins that the SVG is drawn with, and the page's colour for each.
TEXT, GRID, SURFACE = "#010203", "#040506", "#070809"
SIDES = ("#0a0b0c", "#0d0e0f")
_PAGE_COLOURS = {TEXT: "--text", GRID: "--grid", SURFACE: "--surface", SIDES[0]: "--side-a", SIDES[1]: "--side-b"}
LINE_STYLES: tuple[Any, Any] = ("-", (0, (4, 1.6)))
MARKERS = ("o", "s")
# A phone shows the figure about one to one; a desk twice as large.
WIDTH_INCHES = 4.6
MAX_POINTS = 400
_MAX_LABEL_CHARS = 34

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvplug",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "grid.color": GRID,
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "legend.frameon": False,
    "legend.labelcolor": TEXT,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "axes.unicode_minus": True,
}


@dataclass(frozen=True)
class Plot:
    """A drawn figure: its heading, what it shows in words (for who cannot see it), its SVG, and a line below it."""

    name: str
    heading: str
    description: str
    svg: str
    caption: str = ""


class Canvas:
    """A figure with one pair of axes in the page's style."""

    def __init__(self, height_inches: float) -> None:
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context(_STYLE):
            self.figure: Figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
            self.axes: Axes = self.figure.add_subplot()

    def legend(self, labels: tuple[str, str], *, with_line: bool = True) -> None:
        """The sides, above the axes."""
        from matplotlib.lines import Line2D

        handles = [
            Line2D([], [], color=color, linestyle=style if with_line else "none", marker=marker)
            for color, style, marker in zip(SIDES, LINE_STYLES, MARKERS, strict=True)
        ]
        shown = [shortened(label) for label in labels]
        legend = self.figure.legend(handles, shown, loc="outside upper left", ncols=2, handlelength=2.6, frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)
            text.set_color(TEXT)

    def plot(self, name: str, heading: str, description: str, caption: str = "") -> Plot:
        """Drawn."""
        return Plot(name, heading, description, self._svg(name, description), caption)

    def _svg(self, name: str, description: str) -> str:
        import matplotlib

        buffer = io.StringIO()
        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
            # The reader's browser draws the text, with its own fonts.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            self.figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        return answers.printable(_for_page(buffer.getvalue(), name, description))


def _for_page(svg: str, name: str, description: str) -> str:
    """Without the head of a file, with ids of its own and the page's colours, and described."""
    from html import escape

    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    view_box = re.search(r'viewBox="([^"]+)"', body)
    assert view_box is not None
    inner = body[body.index(">") + 1 :]
    inner = inner.replace("xlink:href", "href")
    inner = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', inner)
    inner = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', inner)
    inner = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", inner)
    # matplotlib names its own fonts; the page's is what the rest of the text has.
    inner = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", inner)
    inner = re.sub(r" ?font-family: [^;\"]*;?", "", inner)
    inner = re.sub(r"[ \t]*\n[ \t]*", "\n", inner)
    for color, variable in _PAGE_COLOURS.items():
        inner = inner.replace(color, f"var({variable})")
    return (
        f'<svg role="img" aria-label="{escape(description, quote=True)}" viewBox="{view_box.group(1)}">{inner}'.strip()
    )


def shortened(label: str) -> str:
    """In one line, cut in the middle where it is long: ends tell task names apart."""
    label = " ".join(label.split())
    if len(label) <= _MAX_LABEL_CHARS:
        return label
    half = (_MAX_LABEL_CHARS - 1) // 2
    return f"{label[:half]}…{label[-half:]}"


def thinned(values: list[Any], num_points: int = MAX_POINTS) -> list[Any]:
    """At most about `num_points` of them, evenly, with the first and the last."""
    if len(values) <= num_points:
        return values
    step = (len(values) - 1) / (num_points - 1)
    return [values[round(index * step)] for index in range(num_points)]


def mark_every(num_points: int) -> int:
    """So that a line shows about ten markers."""
    return max(1, num_points // 10)


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... between the ends; only powers of ten where the ends are far apart."""
    lowest, highest = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if highest - lowest <= 4 else (1,)
    ticks = [step * 10.0**power for power in range(lowest, highest + 1) for step in steps]
    return [tick for tick in ticks if low <= tick <= high]


def plain_log_axis(axis: Any, ticks: list[float]) -> None:
    """Given ticks only, as plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
