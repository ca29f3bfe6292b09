"""Plots of what the servers did over time: usage, hits, preemptions."""

from __future__ import annotations

from vllm_kvplug.evals.report import drawing, numbers
from vllm_kvplug.evals.report.drawing import Canvas, Plot
from vllm_kvplug.evals.results import Report, UsageSample


def cache_plots(report: Report) -> list[Plot]:
    """Usage, hits and preemptions by side; what is zero on both sides, or was not sampled, has no plot."""
    lines = [_samples(report, side) for side in (0, 1)]
    if not any(lines):
        return []
    labels = [side.label for side in report.sides]
    peaks = " and ".join(
        f"{numbers.percent(use.peak_usage)} on {label}" for use, label in zip(report.cache, labels, strict=True)
    )
    found = [
        _over_time(
            report,
            [[(sample.elapsed_s, sample.usage * 100) for sample in line] for line in lines],
            ("usage", "Usage of the cache", "blocks held (%)"),
            f"Highest: {peaks}.",
            top=105,
        )
    ]
    shares = [
        f"{numbers.percent(numbers.share(use.num_hit_tokens, use.num_prompt_tokens))} on {label}"
        for use, label in zip(report.cache, labels, strict=True)
    ]
    if any(sample.num_hit_tokens for line in lines for sample in line):
        found.append(
            _over_time(
                report,
                [[(sample.elapsed_s, sample.num_hit_tokens / 1000) for sample in line] for line in lines],
                ("hits", "Prefix hits", "hit tokens (thousand)"),
                f"Of all prompt tokens: {' and '.join(shares)}.",
            )
        )
    if any(sample.num_preemptions for line in lines for sample in line):
        totals = " and ".join(
            f"{numbers.count(use.num_preemptions)} on {label}" for use, label in zip(report.cache, labels, strict=True)
        )
        found.append(
            _over_time(
                report,
                [[(sample.elapsed_s, float(sample.num_preemptions)) for sample in line] for line in lines],
                ("preemptions", "Preemptions", "preemptions"),
                f"In all: {totals}.",
            )
        )
    return found


def _samples(report: Report, side: int) -> list[UsageSample]:
    """Of the whole stretch; where only runs were sampled, these one behind the other."""
    if report.cache[side].samples or report.throughput is None:
        return report.cache[side].samples
    joined: list[UsageSample] = []
    for pair in report.throughput.runs:
        before = joined[-1] if joined else None
        for sample in pair[side].samples:
            joined.append(sample if before is None else _behind(before, sample))
    return joined


def _behind(before: UsageSample, sample: UsageSample) -> UsageSample:
    counted = ("elapsed_s", "num_hit_tokens", "num_prompt_tokens", "num_preemptions")
    return sample.model_copy(update={name: getattr(before, name) + getattr(sample, name) for name in counted})


def _over_time(
    report: Report,
    lines: list[list[tuple[float, float]]],
    names: tuple[str, str, str],
    told: str,
    top: float | None = None,
) -> Plot:
    name, heading, axis = names
    labels = (report.sides[0].label, report.sides[1].label)
    canvas = Canvas(2.4)
    for side, line in enumerate(lines):
        points = drawing.thinned(line)
        if not points:
            continue
        canvas.axes.plot(
            [point[0] for point in points],
            [point[1] for point in points],
            color=drawing.SIDES[side],
            linestyle=drawing.LINE_STYLES[side],
            marker=drawing.MARKERS[side],
            markevery=(side * drawing.mark_every(len(points)) // 2, drawing.mark_every(len(points))),
            markersize=4,
            linewidth=1.3,
        )
    canvas.axes.set_ylim(0, top)
    canvas.axes.set_xlim(left=0)
    canvas.axes.set_xlabel("seconds since the start of the measured stretch")
    canvas.axes.set_ylabel(axis)
    canvas.legend(labels)
    return canvas.plot(
        name=f"time-{name}",
        heading=f"{heading} over time",
        description=f"{heading} of {labels[0]} and {labels[1]} over time. {told}",
        caption=told,
    )
