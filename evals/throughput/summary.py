"""From runs to metrics, and from metrics to sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvplug.evals.results import CacheUse, MetricPairs
from vllm_kvplug.evals.throughput.run_result import KINDS, RunResult
from vllm_kvplug.evals.throughput.statistics import CONFIDENCE, NO_DIFFERENCE, Metric, compare

MAX_LATENCIES = 2000
_LATENCY_NAMES = {"ttft": "TTFT", "itl": "inter-token latency", "e2el": "end-to-end latency"}
_PERCENTILES = {"median": 50, "p99": 99}
_THROUGHPUT_UNITS = {
    "request throughput": "requests/s",
    "output token throughput": "tokens/s",
    "total token throughput": "tokens/s",
}
_CPU = "engine CPU per 1000 output tokens"


@dataclass(frozen=True)
class Run:
    """One run of one side."""

    result: RunResult
    cache: CacheUse


def order_of_runs(num_pairs: int) -> list[int]:
    """The side of each run: 0 1 1 0 0 1 ..., so that a drift of the machine falls on both alike."""
    return [side for pair in range(num_pairs) for side in ((0, 1) if pair % 2 == 0 else (1, 0))]


def metrics_of(runs: Sequence[tuple[Run, Run]], seed: int) -> list[MetricPairs]:
    """All metrics of all pairs; engine CPU only where every run has it."""
    by_run = [tuple(_values(run) for run in pair) for pair in runs]
    return [
        compare(metric, [pair[0][metric.name] for pair in by_run], [pair[1][metric.name] for pair in by_run], seed)
        for metric in _METRICS
        if all(metric.name in values for pair in by_run for values in pair)
    ]


def _metrics() -> list[Metric]:
    found = [Metric(name, unit, lower_is_better=False) for name, unit in _THROUGHPUT_UNITS.items()]
    for kind in KINDS:
        found += [Metric(f"{_LATENCY_NAMES[kind]} {level}", "ms", lower_is_better=True) for level in _PERCENTILES]
    found.append(Metric("hit tokens", "tokens", lower_is_better=False))
    found.append(Metric("preemptions", "preemptions", lower_is_better=True))
    found.append(Metric(_CPU, "s", lower_is_better=True))
    return found


_METRICS = _metrics()


def _values(run: Run) -> dict[str, float]:
    import numpy

    values = run.result.throughput()
    for kind, latencies_ms in run.result.latencies_ms().items():
        for level, percentile in _PERCENTILES.items():
            # Answers of one token have no inter-token latency.
            values[f"{_LATENCY_NAMES[kind]} {level}"] = float(numpy.percentile(latencies_ms or [0.0], percentile))
    values["hit tokens"] = float(run.cache.num_hit_tokens)
    values["preemptions"] = float(run.cache.num_preemptions)
    num_output_tokens = sum(run.result.output_lens)
    if run.cache.engine_cpu_s is not None and num_output_tokens:
        values[_CPU] = run.cache.engine_cpu_s / num_output_tokens * 1000
    return values


def thinned(values: Sequence[float], max_values: int = MAX_LATENCIES) -> list[float]:
    """At most so many values with the same distribution, ascending, least and greatest included."""
    ordered = sorted(values)
    if len(ordered) > max_values:
        step = (len(ordered) - 1) / (max_values - 1)
        ordered = [ordered[round(index * step)] for index in range(max_values)]
    return [round(value, 3) for value in ordered]


def latencies_of(runs: Sequence[tuple[Run, Run]]) -> dict[str, tuple[list[float], list[float]]]:
    """By kind and side, of all runs."""
    sides = [[pair[side].result.latencies_ms() for pair in runs] for side in (0, 1)]
    first, second = ({kind: [v for run in side for v in run[kind]] for kind in KINDS} for side in sides)
    return {kind: (thinned(first[kind]), thinned(second[kind])) for kind in KINDS}


def summed(parts: Sequence[CacheUse]) -> CacheUse:
    """One side's runs together; the samples follow each other in time."""
    samples = []
    offset_s = 0.0
    # A run's samples count from its own start; here they go on counting.
    before = dict.fromkeys(("num_hit_tokens", "num_prompt_tokens", "num_preemptions"), 0)
    for part in parts:
        for sample in part.samples:
            update = {name: num_before + getattr(sample, name) for name, num_before in before.items()}
            samples.append(sample.model_copy(update={**update, "elapsed_s": round(offset_s + sample.elapsed_s, 2)}))
        offset_s += part.samples[-1].elapsed_s if part.samples else 0.0
        before = {name: num_before + getattr(part, name) for name, num_before in before.items()}
    counts = {name: sum(getattr(part, name) for part in parts) for name in CacheUse.model_fields if name[:4] == "num_"}
    cpu_s = [part.engine_cpu_s for part in parts if part.engine_cpu_s is not None]
    return CacheUse(
        **counts,
        peak_usage=max(part.peak_usage for part in parts),
        engine_cpu_s=round(sum(cpu_s), 3) if len(cpu_s) == len(parts) else None,
        samples=samples,
    )


def verdict(metrics: Sequence[MetricPairs], labels: tuple[str, str], alone: str | None) -> list[str]:
    """Sentences for the reader. `alone` is why one server ran at a time, if it did."""
    num_pairs = len(metrics[0].ratios)
    different = [metric for metric in metrics if not metric.verdict.startswith(NO_DIFFERENCE)]
    sides = f"{labels[1]} (candidate) against {labels[0]} (baseline), {num_pairs} pairs of runs"
    if not different:
        sentences = [f"{sides}: {NO_DIFFERENCE} in any of {len(metrics)} metrics."]
    else:
        sentences = [f"{sides}: a difference in {len(different)} of {len(metrics)} metrics."]
        sentences += [f"{metric.name}: {metric.verdict}{_interval(metric)}." for metric in different]
    if any(metric.interval for metric in metrics):
        sentences.append(
            f"{len(metrics)} metrics were compared with {CONFIDENCE:.0%} intervals: about 1 in 20 misses 1 by chance "
            "alone, so a single small difference is no finding; repeat with more --pairs and another --seed."
        )
    else:
        sentences.append(f"{num_pairs} pairs give no interval: no difference can be told from noise.")
    if alone is not None:
        sentences.append(f"One server ran at a time, each run with a new one: {alone}.")
    return sentences


def _interval(metric: MetricPairs) -> str:
    if metric.ratio is None or metric.interval is None:
        return ""
    low, high = metric.interval
    return f", ratio {metric.ratio:.3f} [{low:.3f}, {high:.3f}]"
