"""Plots of a throughput run: paired ratios as a forest plot, and latency distributions."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

from vllm_kvplug.evals.report import drawing, numbers, tables
from vllm_kvplug.evals.report.drawing import Canvas, Plot
from vllm_kvplug.evals.results import MetricPairs, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Ratios beyond are drawn at the border, as an arrow.
_LIMIT = 8.0
# So are those that reach this many times as far from 1 as three quarters of the metrics.
_OTHERS = 2.0
_LABEL_CHARS = 22
_LATENCY_NAMES = {"ttft": "Time to first token", "itl": "Inter-token latency", "e2el": "End-to-end latency"}
# Spread from which a linear axis hides the body of the distribution.
_LOG_SPREAD = 8.0
_TICK_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


def ratio_plot(report: Report) -> Plot | None:
    """The paired ratios with their intervals; None where no metric has a finite ratio."""
    if report.throughput is None:
        return None
    metrics = [metric for metric in report.throughput.metrics if numbers.is_number(metric.ratio)]
    if not metrics:
        return None
    first, second = (side.label for side in report.sides)
    canvas = Canvas(1.0 + 0.38 * len(metrics))
    axes = canvas.axes
    axes.set_xscale("log")
    limits = _ratio_limits(metrics)
    axes.axvline(1, color=drawing.TEXT, linewidth=1.2, zorder=1)
    for position, metric in enumerate(metrics):
        _draw_ratio(axes, position, metric, limits)
    axes.set_yticks(range(len(metrics)), [_short_name(metric) for metric in metrics], parse_math=False)
    axes.set_ylim(len(metrics) - 0.4, -0.6)
    axes.set_xlim(*limits)
    axes.grid(False, axis="y")
    drawing.plain_log_axis(axes.xaxis, _ratio_ticks(limits))
    axes.set_xlabel(f"{drawing.shortened(second)} / {drawing.shortened(first)}", parse_math=False)
    listed = "; ".join(
        f"{metric.name} {numbers.ratio_with_interval(metric.ratio, metric.interval)}, {metric.verdict}"
        for metric in metrics
    )
    num_left_out = len(report.throughput.metrics) - len(metrics)
    left_out = f" {num_left_out} without a finite ratio left out." if num_left_out else ""
    return canvas.plot(
        name="ratios",
        heading="Paired ratios",
        description=f"Ratio of {second} to {first} by metric, with intervals. {listed}.",
        caption=(
            "Diamond and line: median ratio and its interval, filled where it leaves out 1; triangle: goes on "
            f"beyond the border; dots: single pairs. ↑ higher is better, ↓ lower is better.{left_out}"
        ),
    )


def _short_name(metric: MetricPairs) -> str:
    text = f"{drawing.shortened(metric.name)}{tables.NO_BREAK}{tables.direction(metric.lower_is_better)}"
    return textwrap.fill(text, _LABEL_CHARS, break_on_hyphens=False)


def _draw_ratio(axes: Axes, position: int, metric: MetricPairs, limits: tuple[float, float]) -> None:
    shown = tables.excludes_one(metric)
    color = drawing.TEXT
    finite = [ratio for ratio in metric.ratios if numbers.is_number(ratio)]
    dots = drawing.thinned([ratio for ratio in finite if limits[0] <= ratio <= limits[1]], 60)
    axes.plot(dots, [position + 0.22] * len(dots), ".", color=color, markersize=3, alpha=0.6)
    if metric.interval is not None and all(math.isfinite(end) for end in metric.interval):
        ends = [min(max(end, limits[0]), limits[1]) for end in metric.interval]
        axes.plot(ends, [position] * 2, color=color, linewidth=2.6 if shown else 1.6, solid_capstyle="butt")
        for cut_end, end in zip(ends, metric.interval, strict=True):
            if cut_end != end:
                axes.plot([cut_end], [position], "<" if end < 1 else ">", color=color, markersize=5, clip_on=False)
    ratio = metric.ratio if metric.ratio is not None else math.nan
    marker = "D" if limits[0] <= ratio <= limits[1] else "<" if ratio < 1 else ">"
    place = min(max(ratio, limits[0]), limits[1])
    face = color if shown else drawing.SURFACE
    axes.plot([place], [position], marker, color=color, markerfacecolor=face, markersize=6, clip_on=False)


def _ratio_limits(metrics: list[MetricPairs]) -> tuple[float, float]:
    """Even on both sides of 1 and around the intervals, but for those far wider than the rest."""
    reaches = [max(_reach(value) for value in (metric.ratio, *(metric.interval or ()))) for metric in metrics]
    most = sorted(reaches)[(3 * len(reaches) - 1) // 4]
    half = min(max(reaches), max(_OTHERS * most, math.log(1.05)), math.log(_LIMIT)) * 1.1
    half = max(half, math.log(1.02))
    return math.exp(-half), math.exp(half)


def _reach(ratio: float | None) -> float:
    """How far from 1, as a logarithm; 0 for what has none."""
    return abs(math.log(ratio)) if ratio is not None and math.isfinite(ratio) and ratio > 0 else 0.0


def _ratio_ticks(limits: tuple[float, float]) -> list[float]:
    """1 and a few round ratios on both sides."""
    reach = limits[1] - 1
    if reach >= 1:
        candidates = [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
    else:
        step = next((step for step in _TICK_STEPS if reach / step <= 3.5), _TICK_STEPS[-1])
        candidates = [round(1 + step * index, 4) for index in range(-4, 5)]
    return [tick for tick in candidates if tick > 0 and limits[0] * 0.999 <= tick <= limits[1] * 1.001]


def latency_plots(report: Report) -> list[Plot]:
    """For each kind, the part of the requests that waited no longer."""
    if report.throughput is None:
        return []
    found = []
    for index, (kind, values) in enumerate(report.throughput.latencies_ms.items()):
        finite = [sorted(value for value in side if math.isfinite(value) and value >= 0) for side in values]
        if all(finite):
            found.append(_latency(report, kind, finite, f"latency-{index}"))
    return found


def _latency(report: Report, kind: str, values: list[list[float]], name: str) -> Plot:
    labels = (report.sides[0].label, report.sides[1].label)
    heading = _LATENCY_NAMES.get(kind, kind)
    canvas = Canvas(2.7)
    axes = canvas.axes
    for side, side_values in enumerate(values):
        # The last steps matter most: every one of them is kept.
        points = [((index + 1) / len(side_values), value) for index, value in enumerate(side_values)]
        points = [(0.0, side_values[0]), *drawing.thinned(points[:-20]), *points[-20:]]
        axes.step(
            [value for _, value in points],
            [part for part, _ in points],
            where="post",
            color=drawing.SIDES[side],
            linestyle=drawing.LINE_STYLES[side],
            marker=drawing.MARKERS[side],
            markevery=(side * 5, drawing.mark_every(len(points))),
            markersize=4,
        )
    low, high = min(side[len(side) // 100] for side in values), max(side[-1 - len(side) // 100] for side in values)
    log = low > 0 and high / low > _LOG_SPREAD
    if log:
        axes.set_xscale("log")
        drawing.plain_log_axis(axes.xaxis, drawing.log_ticks(*axes.get_xlim()))
    else:
        axes.set_xlim(left=0)
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 0.9, 0.99], ["0", "25 %", "50 %", "75 %", "90 %", "99 %"])
    axes.set_xlabel("milliseconds" + (" (log)" if log else ""))
    canvas.legend(labels)
    told = "; ".join(
        f"{label}: median {numbers.measured(_quantile(side, 0.5))} ms, 99th percentile "
        f"{numbers.measured(_quantile(side, 0.99))} ms"
        for label, side in zip(labels, values, strict=True)
    )
    return canvas.plot(
        name=name,
        heading=heading,
        description=f"{heading}, cumulative distribution. {told}.",
        caption=f"Part of the requests at or below. {told}.",
    )


def _quantile(values: list[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))]
