"""`kvplug bench`'s figures: minima, medians and ratios from samples, how far a row came, turns, and what is printed."""

from __future__ import annotations

import gc
import io
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from vllm_kvplug.evals.performance import numbers
from vllm_kvplug.evals.performance.measuring import frozen_heap, take_turns
from vllm_kvplug.evals.performance.plots import lines_by_curve
from vllm_kvplug.evals.performance.report import markdown, print_summary, verdict
from vllm_kvplug.evals.performance.results import BenchReport, BenchSide, CurvePoint, Goal, ManagerShare, RowResult
from vllm_kvplug.evals.results import Machine

GOAL = Goal(target=2, stretch=4)


def row(
    name: str = "decode",
    baseline: tuple[float, ...] = (8.0,),
    candidate: tuple[float, ...] = (2.0,),
    goal: Goal = GOAL,
    point: CurvePoint | None = None,
) -> RowResult:
    return RowResult.of(name, "decode", "what it is", (baseline, candidate), goal=goal, point=point)


def report_of(*rows: RowResult, shares: tuple[ManagerShare, ...] = ()) -> BenchReport:
    return BenchReport(
        kind="manager",
        created="2025-01-01T00:00:00+00:00",
        duration_s=1.0,
        command="kvplug bench manager",
        quick=True,
        machine=Machine(cpu_model="any", num_cores=2, memory_gib=4.0, system="Linux", python="3.12"),
        versions={"vllm": "0.17.1"},
        sides=(BenchSide(label="upstream", manager="upstream"), BenchSide(label="kvplug", manager="kvplug")),
        conditions=["warm"],
        rows=list(rows),
        shares=list(shares),
    )


def test_minima_medians_and_ratios_come_from_the_samples_of_their_side() -> None:
    found = row(baseline=(9.0, 6.0, 30.0, 8.0), candidate=(4.0, 2.0, 3.0))
    assert found.minima == (6.0, 2.0)
    # Of an even number of samples the middle two's mean.
    assert found.medians == (8.5, 3.0)
    assert found.ratio_of_minima == 3.0
    assert found.ratio_of_medians == pytest.approx(8.5 / 3.0)
    assert found.samples == ([9.0, 6.0, 30.0, 8.0], [4.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("baseline", "candidate", "goal", "reached"),
    [
        # Ratios of minima and of medians in the notes.
        ((8.0, 8.0, 8.0), (2.0, 2.0, 2.0), GOAL, "stretch"),  # 4, 4: exactly is enough
        ((8.0, 8.0, 8.0), (2.0, 2.5, 2.5), GOAL, "target"),  # 4, 3.2: both must reach the stretch
        ((4.0, 4.0, 4.0), (2.0, 2.0, 2.0), GOAL, "target"),  # 2, 2
        ((4.0, 4.0, 4.0), (1.0, 3.0, 3.0), GOAL, "partly"),  # 4, 1.3: the stretch in one is no target in both
        ((4.0, 9.0, 9.0), (3.0, 3.0, 3.0), GOAL, "partly"),  # 1.3, 3
        ((4.0, 4.0, 4.0), (2.5, 2.5, 2.5), GOAL, "no"),  # 1.6, 1.6
        ((9.0, 9.0, 9.0), (1.0, 1.0, 1.0), Goal(target=2), "target"),  # no stretch is asked for
        ((9.0, 9.0, 9.0), (1.0, 1.0, 1.0), Goal(), None),
        ((5.0, 5.0, 5.0), (0.0, 0.0, 0.0), GOAL, "stretch"),  # costs nothing
        ((5.0, 5.0, 5.0), (0.0, 5.0, 5.0), GOAL, "partly"),  # nothing, 1
        ((5.0, 5.0, 5.0), (98.0, 99.0, 200.0), Goal(limit=99), "target"),  # the candidate's median counts
        ((5.0, 5.0, 5.0), (98.0, 100.0, 100.0), Goal(limit=99), "no"),
        ((900.0, 900.0, 900.0), (100.0, 100.0, 100.0), Goal(limit=99), "no"),  # however good the ratio
    ],
)
def test_how_far_a_row_came(
    baseline: tuple[float, ...], candidate: tuple[float, ...], goal: Goal, reached: str | None
) -> None:
    assert row(baseline=baseline, candidate=candidate, goal=goal).reached == reached


def test_a_cost_of_zero_has_no_ratio() -> None:
    found = row(candidate=(0.0, 0.0, 4.0, 4.0, 4.0))
    assert (found.ratio_of_minima, found.ratio_of_medians) == (None, 2.0)


def test_the_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    share = ManagerShare(num_running=64, manager_us=(2.0, 1.0), step_us=(8.0, 7.0), part=(0.25, 1 / 7))
    point = CurvePoint(curve="context", line="free", x=2048)
    report = report_of(row(point=point), row("zero", candidate=(0.0,)), row("none", goal=Goal()), shares=(share,))
    report.write(tmp_path / "results.json")
    assert BenchReport.read(tmp_path / "results.json") == report


def test_a_field_that_is_not_known_is_refused(tmp_path: Path) -> None:
    text = report_of(row()).model_dump_json().replace('"quick"', '"quick_run":1,"quick"')
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValidationError, match="quick_run"):
        BenchReport.read(tmp_path / "results.json")


def test_turns_are_a_b_b_a_and_warm_ups_do_not_count() -> None:
    taken: list[str] = []

    def side(name: str) -> float:
        taken.append(name)
        return float(len(taken))

    told: list[int] = []
    samples = take_turns(
        [lambda: side("A"), lambda: side("B")], 4, num_warm_up=1, on_repeat=lambda: told.append(len(taken))
    )
    assert "".join(taken) == "AB" + "ABBAABBA"
    assert samples == ([3.0, 6.0, 7.0, 10.0], [4.0, 5.0, 8.0, 9.0])
    assert told == [4, 6, 8, 10]


def test_the_heap_is_frozen_inside_and_never_after() -> None:
    # Some Python versions keep a few hundred objects there themselves.
    with frozen_heap():
        assert gc.get_freeze_count() > 10_000
        assert gc.isenabled()
    assert gc.get_freeze_count() < 10_000
    with pytest.raises(ZeroDivisionError), frozen_heap():
        _ = 1 / 0
    assert gc.get_freeze_count() < 10_000


def test_the_verdict_counts_and_names_what_was_missed() -> None:
    rows = (
        row("far"),
        row("near", baseline=(4.0,)),
        row("half", baseline=(4.0, 4.0, 4.0), candidate=(2.0, 3.0, 3.0)),
        row("short", baseline=(2.0,)),
        row("free", goal=Goal()),
    )
    assert [each.reached for each in rows] == ["stretch", "target", "partly", "no", None]
    assert verdict(report_of(*rows)) == ("2 of 4 rows with a target reach it, 1 of them the stretch; not: half, short.")
    assert verdict(report_of(row(goal=Goal()))) == "No row of this run has a target."


def test_the_table_holds_costs_ratios_goal_and_verdict_in_80_columns() -> None:
    report = report_of(
        row("decode-step-1024-cold", (31_500.0, 42_000.0, 42_000.0), (1_050.0, 1_200.0, 1_200.0)),
        row("zero", candidate=(0.0,)),
    )
    out = io.StringIO()
    print_summary(report, Console(file=out, width=80))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert "decode-step-1024-cold 31.5 ms 1.05 ms 30.0x 35.0x 2x/4x stretch" in lines
    assert max(map(len, out.getvalue().splitlines())) <= 80
    text = markdown(report, [("A curve", "curve.png")])
    assert "![A curve](curve.png)" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| decode-step-1024-cold")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:] == ["31.5 ms", "1.05 ms", "42.0 ms", "1.20 ms", "30.0x", "35.0x", "2x", "4x", "stretch"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.279, "us", "279 ns"),
        (1.0, "us", "1.00 us"),
        (7_540_000.0, "us", "7.54 s"),
        (0.0, "us", "0.00 ns"),
        (21_200_000.0, "bytes", "21.2 MB"),
        (2_000_022.0, "objects", "2,000,022"),
    ],
)
def test_costs_are_written_in_a_unit_of_their_size(value: float, unit: numbers.Unit, text: str) -> None:
    assert numbers.cost(value, unit) == text


def test_a_line_needs_two_points_and_goes_by_x() -> None:
    def at(line: str, x: float) -> RowResult:
        return row(f"{line}-{x:g}", point=CurvePoint(curve="context", line=line, x=x))

    report = report_of(at("free", 32), at("free", 2), at("lookup", 2), row("none"))
    lines = lines_by_curve(report)["context"]
    assert {line: [each.name for each in rows] for line, rows in lines.items()} == {"free": ["free-2", "free-32"]}
    assert lines_by_curve(report_of(at("lookup", 2))) == {}
