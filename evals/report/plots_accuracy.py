"""Plots of an accuracy run: scores by task and side."""

from __future__ import annotations

import math

from vllm_kvplug.evals.report import drawing, numbers
from vllm_kvplug.evals.report.drawing import Canvas, Plot
from vllm_kvplug.evals.results import Report, TaskScore

MAX_ROWS = 30
_MAX_PLOTS = 4
# Normal approximation of a 95 % interval, in standard errors.
_INTERVAL_ERRORS = 1.96


def score_plots(report: Report) -> list[Plot]:
    """One for the metrics that are parts of one, and one for each other metric."""
    if report.accuracy is None:
        return []
    groups: dict[str, list[TaskScore]] = {}
    for row in report.accuracy.scores:
        if all(numbers.is_number(value) for value in row.values):
            part_of_one = all(0 <= value <= 1 for value in row.values)
            groups.setdefault("" if part_of_one else row.metric, []).append(row)
    shown = list(groups.items())[:_MAX_PLOTS]
    return [_scores(report, metric, rows, index) for index, (metric, rows) in enumerate(shown)]


def _scores(report: Report, metric: str, rows: list[TaskScore], index: int) -> Plot:
    labels = (report.sides[0].label, report.sides[1].label)
    shown = rows
    if len(rows) > MAX_ROWS:
        widest = sorted(range(len(rows)), key=lambda i: -abs(_finite(rows[i].difference)))[:MAX_ROWS]
        shown = [rows[i] for i in sorted(widest)]
    several = len({row.metric for row in shown}) > 1
    names = [f"{row.task} · {row.metric}" if several else row.task for row in shown]
    canvas = Canvas(0.95 + 0.36 * len(shown))
    axes = canvas.axes
    for side in (0, 1):
        offset = (-0.15, 0.15)[side]
        errors = [_finite(row.standard_errors[side]) * _INTERVAL_ERRORS for row in shown]
        axes.errorbar(
            [row.values[side] for row in shown],
            [position + offset for position in range(len(shown))],
            xerr=errors,
            fmt=drawing.MARKERS[side],
            color=drawing.SIDES[side],
            elinewidth=1.4,
            capsize=2.5,
        )
    axes.set_yticks(range(len(shown)), [drawing.shortened(name) for name in names], parse_math=False)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.grid(False, axis="y")
    if not metric:
        axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel(metric or (shown[0].metric if not several else "score"), parse_math=False)
    canvas.legend(labels, with_line=False)
    listed = "; ".join(
        f"{name}: {numbers.score(row.values[0])} and {numbers.score(row.values[1])}"
        for name, row in list(zip(names, shown, strict=True))[:10]
    )
    more = "" if len(shown) <= 10 else "; and more, see the table"
    cut = "" if len(shown) == len(rows) else f" The {len(shown)} of {len(rows)} scores with the largest difference."
    return canvas.plot(
        name=f"scores-{index}",
        heading=f"Scores: {metric}" if metric else "Scores by task",
        description=f"Scores of {labels[0]} and {labels[1]} by task. {listed}{more}.",
        caption=f"Bars: 95 % (1.96 standard errors).{cut}",
    )


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0
