"""`results.json`: all that a run of `kvplug ab` measured, as pydantic models. docs/ab_results.md lists the fields.

Sides are two: the first is the baseline (upstream unless said otherwise), the second the candidate. A pair of values is
always in this order. Differences are candidate - baseline, ratios candidate / baseline.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1
# What a run that tests neither prefix cache nor preemption ends with.
UNTESTED_STATUS = 3


class _Record(BaseModel):
    # JSON has no NaN and no infinity: they are written as the strings "NaN", "Infinity", "-Infinity", and read again.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


class Machine(_Record):
    """Where it was measured."""

    cpu_model: str
    num_cores: int = Field(description="that the comparison could use")
    memory_gib: float
    system: str = Field(description="kernel and architecture")
    python: str = Field(description="version")
    gpu: str | None = Field(default=None, description="names; null: none found")


class Side(_Record):
    """One of the two servers."""

    label: str = Field(description="what tables and plots call it; the two differ, also in an A against A run")
    manager: str = Field(description="as --kv-cache-manager takes it")
    settings: dict[str, Any] = Field(default_factory=dict, description="as --kv-cache-manager-config takes them")
    command: str = Field(description="the server's command line")
    in_force: dict[str, str] = Field(
        default_factory=dict, description="labels of kvplug_info on its /metrics; empty: vLLM's own manager"
    )
    start_s: float = Field(description="seconds from its start to its first healthy answer")


class UsageSample(_Record):
    """One look at a server's /metrics. Counts are since the start of the stretch."""

    elapsed_s: float = Field(description="since the start of the stretch")
    usage: float = Field(description="part of the usable blocks that requests hold, 0.0 to 1.0")
    num_running: int = Field(description="requests that run now")
    num_waiting: int = Field(description="requests that wait now")
    num_hit_tokens: int = Field(description="of requests finished so far")
    num_prompt_tokens: int = Field(description="of requests finished so far")
    num_preemptions: int = Field(description="so far")


class CacheUse(_Record):
    """What one side did while it was measured, read from its /metrics."""

    num_finished_requests: int = Field(description="whatever their finish reason")
    num_prompt_tokens: int = Field(description="of finished requests")
    num_hit_tokens: int = Field(description="prompt tokens of finished requests that came from the prefix cache")
    num_output_tokens: int = Field(description="of finished requests")
    num_preemptions: int = Field(description="vllm:num_preemptions")
    peak_usage: float = Field(description="highest usage of the samples, 0.0 to 1.0")
    engine_cpu_s: float | None = Field(default=None, description="user and system CPU seconds of the engine processes")
    num_counted_lookup_tokens: int = Field(
        description="vllm:prefix_cache_queries; upstream counts refused attempts again, so sides are not comparable"
    )
    num_counted_lookup_hit_tokens: int = Field(description="vllm:prefix_cache_hits, see num_counted_lookup_tokens")
    samples: list[UsageSample] = Field(
        default_factory=list, description="in order of time, thinned out where very many"
    )
    num_missed_samples: int = Field(default=0, description="times that /metrics could not be read between the ends")


class TaskScore(_Record):
    """One metric of one lm-eval task."""

    task: str = Field(description="lm-eval's name")
    metric: str = Field(description="lm-eval's name")
    higher_is_better: bool
    num_samples: int = Field(description="samples that both sides answered")
    values: tuple[float, float] = Field(description="by side")
    standard_errors: tuple[float | None, float | None] = Field(description="by side; null: lm-eval gives none")
    difference: float = Field(description="candidate - baseline")


class DifferingAnswer(_Record):
    """One sample that the sides answered differently."""

    task: str
    sample_id: str = Field(description="lm-eval's doc_id")
    prompt_end: str = Field(description="the last characters of the prompt")
    target: str = Field(description="the right answer")
    answers: tuple[str, str] = Field(description="by side, in full")
    scores: tuple[float | None, float | None] = Field(
        description="the sample's score by side; null: it has none of its own"
    )


class TaskAgreement(_Record):
    """How many samples of a task have another answer on the other side."""

    task: str
    num_samples: int = Field(description="samples that both sides answered")
    num_differing: int = Field(description="samples whose answers are not the same text")
    p_value: float | None = Field(
        default=None, description="exact McNemar test of right against wrong; None where no sample's score differs"
    )


class Accuracy(_Record):
    """What `kvplug ab eval` measured."""

    tasks: list[str]
    limit: int | None = Field(description="most samples of a task; null: all")
    num_concurrent: int = Field(description="requests at a time")
    scores: list[TaskScore] = Field(description="one for each metric of each task")
    agreement: list[TaskAgreement] = Field(description="one for each task")
    differing: list[DifferingAnswer] = Field(description="all of them, in the order of tasks and samples")


class MetricPairs(_Record):
    """One metric over all pairs of runs."""

    name: str
    unit: str
    lower_is_better: bool
    values: tuple[list[float], list[float]] = Field(description="by side, the i-th values are of the i-th pair")
    ratios: list[float | None] = Field(
        description="candidate / baseline, by pair; 1 where both are zero, None where the baseline alone is"
    )
    ratio: float | None = Field(description="median of the ratios; None: a pair has none")
    interval: tuple[float, float] | None = Field(
        description="bootstrap confidence interval of the ratio; None: too few pairs or no finite ratio"
    )
    confidence: float = Field(default=0.95, description="of the interval")
    verdict: str = Field(description="'no difference shown' where the interval holds 1")


class Throughput(_Record):
    """What `kvplug ab bench` measured."""

    workload: str
    parameters: dict[str, Any] = Field(description="of the workload")
    seed: int = Field(description="of the workload's requests, the same on both sides")
    num_pairs: int = Field(description="pairs of runs, one run on each side")
    order: list[int] = Field(description="which side (0, 1) each run loaded: A B B A ...")
    both_up: bool = Field(description="both servers ran all the time; else one at a time")
    metrics: list[MetricPairs]
    latencies_ms: dict[str, tuple[list[float], list[float]]] = Field(
        description="by kind (ttft, itl, e2el) and side, the requests' of all runs together, thinned out"
    )
    runs: list[tuple[CacheUse, CacheUse]] = Field(description="by pair and side")


class Report(_Record):
    """One run of `kvplug ab`."""

    schema_version: int = Field(default=SCHEMA_VERSION, description="raised when a field changes its meaning or goes")
    kind: Literal["accuracy", "throughput"]
    created: str = Field(description="ISO 8601, UTC")
    duration_s: float = Field(description="of the whole comparison, starts of the servers included")
    command: str = Field(description="the command line of the comparison")
    model: str = Field(description="as it was asked for")
    machine: Machine
    versions: dict[str, str] = Field(description="of vllm, vllm_kvplug, torch and others; `commit` of the checkout")
    sides: tuple[Side, Side]
    cache: tuple[CacheUse, CacheUse] = Field(description="of the whole measured stretch")
    accuracy: Accuracy | None = Field(default=None, description="where kind is accuracy")
    throughput: Throughput | None = Field(default=None, description="where kind is throughput")
    verdict: list[str] = Field(description="sentences for the reader, the most important first")
    exit_status: int = Field(description="of the command; 3: the run does not test what it should")

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read what `write` wrote."""
        return cls.model_validate_json(path.read_text(encoding="utf-8"))
