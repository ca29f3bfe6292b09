"""`kvplug bench scheduler`: what is measured, not how long it takes."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_kvplug.errors import UsageError
from vllm_kvplug.evals.performance import scheduler_bench, sides
from vllm_kvplug.evals.performance.scheduler_bench import SchedulerBench, parse_running
from vllm_kvplug.evals.performance.scheduler_sides import BenchedScheduler, TimedCalls
from vllm_kvplug.evals.sides import SideChoice, choices


@pytest.mark.parametrize("text", ["", "x", "64,", "0", "64,64", "-1", "100000"])
def test_a_wrong_number_of_running_requests_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"--running: expected numbers from 1 to 65536") as raised:
        parse_running(text)
    assert repr(text) in str(raised.value)


def test_numbers_of_running_requests() -> None:
    assert parse_running("64, 256,1") == (64, 256, 1)


@pytest.mark.parametrize("manager", ["upstream", "kvplug"])
def test_all_requests_run_and_get_a_token_in_each_step(manager: str) -> None:
    sides.prepare()
    benched = BenchedScheduler(SideChoice(manager, manager), 20, 40)
    running = list(benched.scheduler.running)
    before = [request.num_computed_tokens for request in running]
    # In all phases of their blocks.
    assert {num_tokens % sides.NUM_TOKENS_PER_BLOCK for num_tokens in before} == set(range(16))
    for _ in range(40):
        benched.step()
    assert benched.scheduler.running == running
    assert [request.num_computed_tokens - num_tokens for request, num_tokens in zip(running, before, strict=True)] == (
        [40] * 20
    )
    assert all(request.num_preemptions == 0 and request.num_cached_tokens <= 0 for request in running)
    module = type(benched.scheduler.kv_cache_manager).__module__
    assert module.startswith("vllm_kvplug" if manager == "kvplug" else "vllm.v1")


def test_a_call_within_a_call_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_ns = iter(range(0, 10**9, 1000))
    monkeypatch.setattr("vllm_kvplug.evals.performance.scheduler_sides.perf_counter_ns", lambda: next(clock_ns))
    monkeypatch.setattr(
        "vllm_kvplug.evals.performance.scheduler_sides.elapsed_us", lambda ns: (next(clock_ns) - ns) / 1e3
    )

    class Manager:
        usage = 0.5

        def inner(self) -> int:
            return 1

        def outer(self) -> int:
            return self.inner() + self.inner()

    manager: Any = Manager()
    timed = TimedCalls(manager)
    assert (manager.outer(), manager.inner(), manager.usage) == (2, 1, 0.5)
    assert timed.total_us == 2.0  # one tick of the clock for each of the two calls from outside
    timed.reset()
    assert timed.total_us == 0.0


def test_rows_and_shares_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_bench, "NUM_STEPS", (8, 4))
    report = SchedulerBench(choices("upstream", "kvplug"), (2, 5), quick=True).run()
    assert report.kind == "scheduler"
    assert [row.name for row in report.rows] == [
        *("schedule-2", "update-2", "step-2"),
        *("schedule-5", "update-5", "step-5"),
    ]
    for schedule, update, step in (report.rows[:3], report.rows[3:]):
        for side in (0, 1):
            parts = zip(schedule.samples[side], update.samples[side], strict=True)
            assert step.samples[side] == [sum(part) for part in parts]
            assert len(step.samples[side]) == 4
    assert [share.num_running for share in report.shares] == [2, 5]
    assert all(0.0 < part < 1.0 for share in report.shares for part in share.part)
