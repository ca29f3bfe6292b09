"""What the report's tables hold, as text, for every format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import median

from vllm_kvplug.evals.report import numbers
from vllm_kvplug.evals.results import CacheUse, MetricPairs, Report, Side, TaskAgreement, TaskScore

# Of a table with more rows, formats show the most telling ones first.
MAX_ROWS = 60
NO_BREAK = "\u00a0"


@dataclass(frozen=True)
class Table:
    """Text by row and column. The first column names the row; the last ones, with numbers, stand right."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""
    num_text_columns: int = 1
    # By row: whether a reader should look at it first.
    marked: list[bool] = field(default_factory=list)


def result_table(report: Report) -> Table | None:
    """The one table of the run: scores by task, or metrics by pair of runs."""
    if report.accuracy is not None:
        return _scores(report)
    if report.throughput is not None:
        return _metrics(report)
    return None


def _scores(report: Report) -> Table:
    assert report.accuracy is not None
    agreement = {row.task: row for row in report.accuracy.agreement}
    first, second = (side.label for side in report.sides)
    scores = report.accuracy.scores
    return Table(
        title="Scores",
        num_text_columns=2,
        columns=["task", "metric", f"{first} ± error", f"{second} ± error", "difference", "differing samples"],
        rows=[
            [
                row.task,
                f"{row.metric}{NO_BREAK}{direction(not row.higher_is_better)}",
                *(numbers.score_with_error(*pair) for pair in zip(row.values, row.standard_errors, strict=True)),
                numbers.score_difference(row.difference),
                _agreement_text(agreement.get(row.task), row),
            ]
            for row in scores
        ],
        note=(
            f"Difference is {second} - {first}. Error is one standard error of the score. ↑: higher is better, ↓: "
            "lower is better. Differing samples: how many answers are not the same text on both sides; p: "
            "McNemar's exact test of right against wrong answers, where any sample's score differs."
        ),
        marked=[is_marked_score(row, agreement.get(row.task)) for row in scores],
    )


def cut(report: Report, table: Table) -> Table:
    """Of very many scores, the marked ones and those with the largest difference, in their order."""
    if report.accuracy is None or len(table.rows) <= MAX_ROWS:
        return table
    scores = report.accuracy.scores
    order = sorted(range(len(scores)), key=lambda i: (not table.marked[i], -_size(scores[i].difference)))
    kept = sorted(order[:MAX_ROWS])
    return replace(
        table,
        rows=[table.rows[i] for i in kept],
        marked=[table.marked[i] for i in kept],
        note=f"The {MAX_ROWS} of {len(scores)} scores with the largest difference; the report has all. {table.note}",
    )


def _size(difference: float) -> float:
    return abs(difference) if math.isfinite(difference) else 0.0


def is_marked_score(row: TaskScore, agreement: TaskAgreement | None) -> bool:
    """Whether a difference is one to look at: unlikely by chance, or without such a test, beyond two errors."""
    if agreement is not None and numbers.is_number(agreement.p_value):
        return agreement.p_value is not None and agreement.p_value < 0.05
    errors = [error for error in row.standard_errors if error is not None and math.isfinite(error)]
    return bool(errors) and abs(row.difference) > 2 * math.hypot(*errors)


def _agreement_text(agreement: TaskAgreement | None, row: TaskScore) -> str:
    if agreement is None:
        return numbers.MISSING
    text = f"{numbers.count(agreement.num_differing)} of {numbers.count(agreement.num_samples or row.num_samples)}"
    if agreement.p_value is None:
        return text
    value = numbers.p_value(agreement.p_value)
    return f"{text}, p {value if value.startswith('<') else '= ' + value}"


def _metrics(report: Report) -> Table:
    assert report.throughput is not None
    first, second = (side.label for side in report.sides)
    metrics = report.throughput.metrics
    levels = sorted({metric.confidence for metric in metrics if metric.interval is not None})
    level = " and ".join(f"{value * 100:g} %" for value in levels) or "95 %"
    return Table(
        title="Paired measurements",
        columns=["metric", f"{first}, median", f"{second}, median", "ratio [interval]", "verdict"],
        rows=[
            [
                metric_name(metric),
                *(numbers.measured(finite_median(values)) for values in metric.values),
                numbers.ratio_with_interval(metric.ratio, metric.interval),
                metric.verdict,
            ]
            for metric in metrics
        ],
        note=(
            f"Ratio is {second} / {first}, taken within each pair of runs; its median with a {level} bootstrap "
            "interval. ↑: higher is better, ↓: lower is better."
        ),
        marked=[excludes_one(metric) for metric in metrics],
    )


def direction(lower_is_better: bool) -> str:
    """The arrow of the better direction."""
    return "↓" if lower_is_better else "↑"


def metric_name(metric: MetricPairs) -> str:
    """With its unit and better direction, as in: TTFT p99 (ms) ↓"""
    unit = f" ({metric.unit})" if metric.unit and metric.unit not in metric.name.split() else ""
    return f"{metric.name}{unit}{NO_BREAK}{direction(metric.lower_is_better)}"


def excludes_one(metric: MetricPairs) -> bool:
    """Whether the interval shows a difference."""
    if metric.interval is None or not all(math.isfinite(end) for end in metric.interval):
        return False
    return not metric.interval[0] <= 1 <= metric.interval[1]


def finite_median(values: Iterable[float]) -> float | None:
    """Median of the finite values."""
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else None


def cache_table(report: Report) -> Table:
    """Prefix hits, preemptions and usage of each side."""
    return Table(
        title="Prefix cache and preemption",
        columns=["", *(side.label for side in report.sides)],
        rows=_transposed([_cache_column(use) for use in report.cache]),
    )


def _cache_column(use: CacheUse) -> dict[str, str]:
    hit_share = numbers.share(use.num_hit_tokens, use.num_prompt_tokens)
    counted_share = numbers.share(use.num_counted_lookup_hit_tokens, use.num_counted_lookup_tokens)
    return {
        "finished requests": numbers.count(use.num_finished_requests),
        "prompt tokens": numbers.count(use.num_prompt_tokens),
        "hit tokens": f"{numbers.count(use.num_hit_tokens)} ({numbers.percent(hit_share)})",
        "preemptions": numbers.count(use.num_preemptions),
        "peak usage": numbers.percent(use.peak_usage),
        "output tokens": numbers.count(use.num_output_tokens),
        "engine CPU": numbers.duration(use.engine_cpu_s),
        "lookups counted by the server (tokens)*": numbers.count(use.num_counted_lookup_tokens),
        "lookup hits counted by the server (tokens)*": (
            f"{numbers.count(use.num_counted_lookup_hit_tokens)} ({numbers.percent(counted_share)})"
        ),
    }


def sides_table(report: Report) -> Table:
    """What was compared."""
    return Table(
        title="Sides",
        columns=["", *(side.label for side in report.sides)],
        rows=_transposed([_side_column(side) for side in report.sides]),
        num_text_columns=3,
    )


def _side_column(side: Side) -> dict[str, str]:
    in_force = ", ".join(f"{name}={value}" for name, value in side.in_force.items())
    return {
        "manager": side.manager,
        "settings": json.dumps(side.settings, ensure_ascii=False) if side.settings else "none",
        "in force, as its /metrics say": in_force or "vLLM's own manager (no kvplug_info)",
        "time to start": numbers.duration(side.start_s),
    }


def setting_table(report: Report) -> Table:
    """Model, workload, machine and versions."""
    machine = report.machine
    rows = [["model", report.model], ["measured", f"{report.created}, {numbers.duration(report.duration_s)}"]]
    if report.accuracy is not None:
        accuracy = report.accuracy
        limit = "all samples" if accuracy.limit is None else f"at most {accuracy.limit} samples each"
        rows += [
            ["tasks", f"{len(accuracy.tasks)} ({limit})"],
            ["requests at a time", str(accuracy.num_concurrent)],
        ]
    if report.throughput is not None:
        throughput = report.throughput
        order = " ".join("AB"[side] if side in (0, 1) else str(side) for side in throughput.order)
        first, second = (side.label for side in report.sides)
        up = "both servers up all the time" if throughput.both_up else "one server at a time"
        rows += [
            ["workload", throughput.workload],
            *([f"workload: {name}", _plain(value)] for name, value in throughput.parameters.items()),
            ["seed", str(throughput.seed)],
            ["runs", f"{throughput.num_pairs} pairs, {up}"],
            ["order", f"{order} (A: {first}, B: {second})" if order else numbers.MISSING],
        ]
    rows += [
        ["CPU", f"{machine.cpu_model}, {machine.num_cores} cores"],
        ["memory", f"{numbers.fixed(machine.memory_gib, 1)} GiB"],
        *([["GPU", machine.gpu]] if machine.gpu else []),
        ["system", machine.system],
        ["Python", machine.python],
        *([name, version] for name, version in report.versions.items()),
    ]
    return Table(title="Setting", columns=["", "value"], rows=rows, num_text_columns=2)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _transposed(columns: list[dict[str, str]]) -> list[list[str]]:
    return [[name, *(column[name] for column in columns)] for name in columns[0]]


def commands(report: Report) -> list[tuple[str, str]]:
    """What to run again, by what it starts."""
    return [("comparison", report.command), *((f"server {side.label}", side.command) for side in report.sides)]


def title(report: Report) -> str:
    """What is against what."""
    first, second = (side.label for side in report.sides)
    return f"{report.kind.capitalize()}: {first} against {second}"
