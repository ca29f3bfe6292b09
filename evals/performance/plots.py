"""Curves: both managers' costs as lines, one pair of axes for each operation, as PNG and SVG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvplug.evals.performance.results import BenchReport, RowResult
from vllm_kvplug.evals.report import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVE_TITLES = {
    "context": "Cost against context length",
    "running": "Cost of a step against running requests",
    "pool": "Cost of construction against pool size",
    "groups": "Cost against KV cache groups (one with full attention, the others with a sliding window)",
}
_X_LABELS = {
    "context": "tokens of the prompt",
    "running": "running requests",
    "pool": "blocks of the pool",
    "groups": "KV cache groups",
}
_COLORS = ("#b4532a", "#1f6fb2")
_NUM_COLUMNS = 3
_AXES_INCHES = (3.4, 2.7)
Lines = dict[str, list[RowResult]]


def lines_by_curve(report: BenchReport) -> dict[str, Lines]:
    """By curve and operation, the rows with a point there, by x. An operation with one point has no line."""
    found: dict[str, Lines] = {}
    for row in report.rows:
        if row.point is not None:
            found.setdefault(row.point.curve, {}).setdefault(row.point.line, []).append(row)
    curves = {
        curve: {line: sorted(rows, key=_x) for line, rows in lines.items() if len(rows) > 1}
        for curve, lines in found.items()
    }
    return {curve: lines for curve, lines in curves.items() if lines}


def _x(row: RowResult) -> float:
    assert row.point is not None
    return row.point.x


def write_plots(report: BenchReport, folder: Path) -> list[tuple[str, str]]:
    """Write CURVE.png and CURVE.svg for each curve; answers (title, name of the PNG) of each."""
    written = []
    for curve, lines in lines_by_curve(report).items():
        _write(report, curve, lines, folder)
        written.append((CURVE_TITLES[curve], f"{curve}.png"))
    return written


def _write(report: BenchReport, curve: str, lines: Lines, folder: Path) -> None:
    from matplotlib.figure import Figure

    num_columns = min(_NUM_COLUMNS, len(lines))
    num_rows = -(-len(lines) // num_columns)
    size = (_AXES_INCHES[0] * num_columns, _AXES_INCHES[1] * num_rows + 0.7)
    figure = Figure(figsize=size, layout="constrained")
    all_axes = figure.subplots(num_rows, num_columns, squeeze=False).flat
    for axes, (line, rows) in zip(all_axes, lines.items(), strict=False):
        _draw(axes, line, rows, curve)
    for axes in list(all_axes)[len(lines) :]:
        axes.set_visible(False)
    labels = [drawing.shortened(side.label) for side in report.sides]
    handles = all_axes[0].get_lines()[:2]
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(CURVE_TITLES[curve], fontsize=11)
    for suffix in ("png", "svg"):
        figure.savefig(folder / f"{curve}.{suffix}", dpi=150)


def _draw(axes: Axes, line: str, rows: list[RowResult], curve: str) -> None:
    xs = [_x(row) for row in rows]
    for side, color in enumerate(_COLORS):
        axes.plot(
            xs,
            [row.medians[side] for row in rows],
            color=color,
            linestyle=drawing.LINE_STYLES[side],
            marker=drawing.MARKERS[side],
            markersize=5,
        )
    for side, color in enumerate(_COLORS):
        lows, highs = [row.minima[side] for row in rows], [row.medians[side] for row in rows]
        axes.fill_between(xs, lows, highs, color=color, alpha=0.2, linewidth=0)
    axes.set_yscale("log")
    if curve != "groups":
        axes.set_xscale("log")
    axes.set_xticks(xs, [f"{x:g}" if x < 10_000 else f"{x / 1000:g}k" for x in xs], fontsize=8)
    axes.minorticks_off()
    axes.set_title(line, fontsize=9, loc="left", parse_math=False)
    axes.set_xlabel(_X_LABELS[curve], fontsize=8)
    axes.set_ylabel("microseconds", fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(True, linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
