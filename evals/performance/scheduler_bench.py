"""`kvplug bench scheduler`: vLLM's own scheduler with each manager, step by step in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_kvplug.errors import UsageError
from vllm_kvplug.evals.performance import measuring, sides
from vllm_kvplug.evals.performance.progress import RowProgress
from vllm_kvplug.evals.performance.results import BenchReport, CurvePoint, Goal, ManagerShare, RowResult
from vllm_kvplug.evals.performance.scheduler_sides import NUM_PROMPT_TOKENS, BenchedScheduler, TimedCalls
from vllm_kvplug.evals.sides import SideChoice

CONDITIONS = [
    "vLLM's Scheduler, constructed as an engine does it, and its Request objects; the model's output is one made-up "
    "token for each request. No model runner, no server, no other thread.",
    "Both schedulers in one process, in turns (A B B A), step by step.",
    "Garbage collector as in vLLM's engine: the heap collected and frozen after the set-up (freeze_gc_heap), then the "
    "collector runs as Python has it by default.",
    f"{sides.NUM_TOKENS_PER_BLOCK} tokens a block, sha256, prefix caching and log_stats on; events, residency metrics, "
    "drafter, connector and asynchronous scheduling off.",
    f"All requests decode, none ends; their prompts, of {NUM_PROMPT_TOKENS} tokens and some more, share nothing. "
    "In each step one in 16 gets a block and one in 16 fills one.",
]
# Steps of each side: (full, --quick).
NUM_STEPS = (400, 80)
_NUM_WARM_UP_STEPS = 16
_NUM_SHARE_STEPS_PER_STEP = 4  # of the pass with timers there is one for each so many
_MAX_RUNNING = 65_536
# The whole step at this number of running requests has a goal.
_GOAL = (256, Goal(target=1.8, stretch=2.0))


def parse_running(text: str) -> tuple[int, ...]:
    """The numbers of `--running`.

    Raises:
        UsageError: not numbers of requests, each once.
    """
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or len(set(numbers)) != len(numbers) or not all(1 <= number <= _MAX_RUNNING for number in numbers):
        raise UsageError(f"--running: expected numbers from 1 to {_MAX_RUNNING} as 64,256, each once; found {text!r}")
    return numbers


@dataclass(frozen=True)
class SchedulerBench:
    """What was asked for."""

    choices: tuple[SideChoice, SideChoice]
    running: Sequence[int]
    quick: bool = False

    def run(self, progress: Callable[[int], RowProgress] = RowProgress) -> BenchReport:
        """Measure all numbers of running requests, one after another.

        Raises:
            SettingsError: an unknown manager, or wrong settings.
            ContractError: a manager that does not keep vLLM's contract.
        """
        started_s = time.monotonic()
        sides.prepare()
        num_steps = NUM_STEPS[self.quick]
        rows: list[RowResult] = []
        shares: list[ManagerShare] = []
        with progress(len(self.running) * num_steps) as shown:
            for num_running in self.running:
                shown.begin(f"{num_running} running")
                measured, share = self._measure(num_running, num_steps, shown.advance)
                rows += measured
                shares.append(share)
                shown.end(measured[-1])
        return BenchReport.of_run(
            "scheduler", self.choices, started_s, quick=self.quick, conditions=CONDITIONS, rows=rows, shares=shares
        )

    def _measure(
        self, num_running: int, num_steps: int, on_step: Callable[[], None]
    ) -> tuple[list[RowResult], ManagerShare]:
        num_share_steps = max(num_steps // _NUM_SHARE_STEPS_PER_STEP, 1)
        num_all_steps = _NUM_WARM_UP_STEPS + num_steps + num_share_steps
        both = [BenchedScheduler(choice, num_running, num_all_steps) for choice in self.choices]
        steps: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])

        def repeats() -> list[measuring.Repeat]:
            return [lambda side=side: _note(steps[side], both[side].step()) for side in (0, 1)]  # type: ignore[misc]

        with measuring.frozen_heap():
            measuring.take_turns(repeats(), num_steps, num_warm_up=_NUM_WARM_UP_STEPS, on_repeat=on_step)
            share = _share(both, num_running, num_share_steps)
        counted = [side_steps[_NUM_WARM_UP_STEPS:] for side_steps in steps]
        return _rows(num_running, counted), share


def _note(steps: list[tuple[float, float]], step: tuple[float, float]) -> float:
    steps.append(step)
    return sum(step)


def _rows(num_running: int, steps: Sequence[Sequence[tuple[float, float]]]) -> list[RowResult]:
    rows = []
    for name, what, part in (
        ("schedule", "schedule()", lambda step: step[0]),
        ("update", "update_from_output()", lambda step: step[1]),
        ("step", "both", sum),
    ):
        samples = ([part(step) for step in steps[0]], [part(step) for step in steps[1]])
        goal = _GOAL[1] if name == "step" and num_running == _GOAL[0] else Goal()
        rows.append(
            RowResult.of(
                f"{name}-{num_running}",
                f"{num_running} running",
                f"{what}, {num_running} running",
                samples,
                goal=goal,
                point=CurvePoint(curve="running", line=what, x=num_running),
            )
        )
    return rows


def _share(both: Sequence[BenchedScheduler], num_running: int, num_steps: int) -> ManagerShare:
    """Steps of their own, with timers around the manager's calls."""
    timers = [TimedCalls(side.scheduler.kv_cache_manager) for side in both]
    manager_us: tuple[list[float], list[float]] = ([], [])
    step_us: tuple[list[float], list[float]] = ([], [])
    for _ in range(num_steps):
        for side in (0, 1):
            timers[side].reset()
            step_us[side].append(sum(both[side].step()))
            manager_us[side].append(timers[side].total_us)
    managers = (statistics.median(manager_us[0]), statistics.median(manager_us[1]))
    whole = (statistics.median(step_us[0]), statistics.median(step_us[1]))
    return ManagerShare(
        num_running=num_running,
        manager_us=managers,
        step_us=whole,
        part=(managers[0] / whole[0], managers[1] / whole[1]),
    )
