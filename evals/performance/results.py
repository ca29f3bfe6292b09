"""`results.json` of `kvplug bench`, as pydantic models, and how ratios come from samples.

Pairs of values are baseline, candidate. **Ratios are baseline / candidate**: 3 means that the candidate costs a third.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_kvplug.evals import setting
from vllm_kvplug.evals.results import Machine
from vllm_kvplug.evals.sides import SideChoice

SCHEMA_VERSION = 1
Unit = Literal["us", "bytes", "objects"]
# How far a row comes: both ratios at least the stretch; the target; one of the two at least the target; none.
Reached = Literal["stretch", "target", "partly", "no"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


class Goal(_Record):
    """What a row is to reach."""

    target: float | None = Field(default=None, description="least ratio")
    stretch: float | None = Field(default=None, description="ratio beyond the target")
    limit: float | None = Field(default=None, description="the candidate's most, in the row's unit, not a ratio")


class CurvePoint(_Record):
    """Where a row stands in a plot."""

    curve: str = Field(description="name of the plot")
    line: str = Field(description="operation")
    x: float


class RowResult(_Record):
    """One row: the same work on both managers."""

    name: str = Field(description="as --rows takes it")
    group: str
    what: str
    unit: Unit
    samples: tuple[list[float], list[float]] = Field(description="by side, in the order of the repeats")
    minima: tuple[float, float]
    medians: tuple[float, float]
    ratio_of_minima: float | None = Field(description="baseline / candidate; null: the candidate's is zero")
    ratio_of_medians: float | None = Field(description="baseline / candidate; null: the candidate's is zero")
    goal: Goal
    reached: Reached | None = Field(description="null: the row has no goal")
    in_table: bool = Field(description="false: only a point of a curve")
    point: CurvePoint | None

    @classmethod
    def of(
        cls,
        name: str,
        group: str,
        what: str,
        samples: tuple[Sequence[float], Sequence[float]],
        *,
        unit: Unit = "us",
        goal: Goal | None = None,
        in_table: bool = True,
        point: CurvePoint | None = None,
    ) -> RowResult:
        """Minima, medians and ratios of these samples; neither side's may be empty."""
        goal = goal or Goal()
        minima = (min(samples[0]), min(samples[1]))
        medians = (statistics.median(samples[0]), statistics.median(samples[1]))
        ratios = (ratio(*minima), ratio(*medians))
        return cls(
            name=name,
            group=group,
            what=what,
            unit=unit,
            samples=(list(samples[0]), list(samples[1])),
            minima=minima,
            medians=medians,
            ratio_of_minima=ratios[0],
            ratio_of_medians=ratios[1],
            goal=goal,
            reached=how_far(goal, ratios, medians[1]),
            in_table=in_table,
            point=point,
        )


def ratio(baseline: float, candidate: float) -> float | None:
    """How many times the candidate's cost the baseline's is; None where the candidate's is zero."""
    return baseline / candidate if candidate else None


def how_far(goal: Goal, ratios: tuple[float | None, float | None], candidate_median: float) -> Reached | None:
    """Both ratios must reach a goal, or the candidate's median stay within its limit; None without a goal."""
    if goal.limit is not None:
        return "target" if candidate_median <= goal.limit else "no"
    if goal.target is None:
        return None
    # A candidate that costs nothing has reached whatever was asked for.
    low, high = sorted(float("inf") if value is None else value for value in ratios)
    if goal.stretch is not None and low >= goal.stretch:
        return "stretch"
    if low >= goal.target:
        return "target"
    return "partly" if high >= goal.target else "no"


class BenchSide(_Record):
    """One of the two managers."""

    label: str
    manager: str = Field(description="as --kv-cache-manager takes it")
    settings: dict[str, Any] = Field(default_factory=dict)


class ManagerShare(_Record):
    """How much of a scheduler's step is the manager's, timed in a pass of its own. Pairs are by side."""

    num_running: int
    manager_us: tuple[float, float] = Field(description="in the manager's calls of a step, median")
    step_us: tuple[float, float] = Field(description="of the same steps, with the timers in them, median")
    part: tuple[float, float] = Field(description="manager_us / step_us, 0.0 to 1.0")


class BenchReport(_Record):
    """One run of `kvplug bench manager` or `kvplug bench scheduler`."""

    schema_version: int = Field(default=SCHEMA_VERSION, description="raised when a field changes its meaning or goes")
    kind: Literal["manager", "scheduler"]
    created: str = Field(description="ISO 8601, UTC")
    duration_s: float
    command: str
    quick: bool = Field(description="fewer repeats, no points but the table's")
    machine: Machine
    versions: dict[str, str] = Field(description="of vllm, vllm_kvplug, torch and others; `commit` of the checkout")
    sides: tuple[BenchSide, BenchSide]
    conditions: list[str] = Field(description="what was measured under: the collector, the hash, what is on and off")
    rows: list[RowResult]
    shares: list[ManagerShare] = Field(default_factory=list, description="of bench scheduler")

    @classmethod
    def of_run(
        cls,
        kind: Literal["manager", "scheduler"],
        choices: Sequence[SideChoice],
        started_s: float,
        *,
        quick: bool,
        conditions: list[str],
        rows: list[RowResult],
        shares: Sequence[ManagerShare] = (),
    ) -> BenchReport:
        """What was measured since `time.monotonic()` said `started_s`, with this machine's setting."""
        first, second = (
            BenchSide(label=choice.label, manager=choice.manager, settings=choice.settings) for choice in choices
        )
        return cls(
            kind=kind,
            created=setting.now(),
            duration_s=time.monotonic() - started_s,
            command=setting.command_line(),
            quick=quick,
            machine=setting.machine(),
            versions=setting.versions(),
            sides=(first, second),
            conditions=conditions,
            rows=rows,
            shares=list(shares),
        )

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> BenchReport:
        """Read what `write` wrote."""
        return cls.model_validate_json(path.read_text(encoding="utf-8"))
