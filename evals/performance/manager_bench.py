"""`kvplug bench manager`: measures the rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from vllm_kvplug.evals.performance import measuring, sides
from vllm_kvplug.evals.performance.catalogue import Row
from vllm_kvplug.evals.performance.progress import RowProgress
from vllm_kvplug.evals.performance.results import BenchReport, RowResult
from vllm_kvplug.evals.sides import SideChoice

CONDITIONS = [
    "Both managers in one process, in turns (A B B A); each side's samples are its own.",
    "Garbage collector as in vLLM's engine: the heap collected and frozen after the set-up (freeze_gc_heap), then the "
    "collector runs as Python has it by default; nothing is frozen while a pool is constructed, as in the engine.",
    f"{sides.NUM_TOKENS_PER_BLOCK} tokens a block, sha256, prefix caching and log_stats on; events, residency metrics, "
    "drafter and connector off, as a server has it by default.",
    "vLLM's Request objects with the hasher that an engine with the manager gives them; no two requests share a token "
    "object.",
    f"Pools of {sides.NUM_BLOCKS:,} blocks unless a row says otherwise or needs more; windows of "
    f"{sides.SLIDING_WINDOW_TOKENS:,} tokens.",
    f"Caches warm unless a row says cold: then {measuring.COLD_WALK_BYTES // 10**6} MB are read before each step.",
]


@dataclass(frozen=True)
class ManagerBench:
    """What was asked for."""

    choices: tuple[SideChoice, SideChoice]
    rows: Sequence[Row]
    quick: bool = False

    def run(self, progress: Callable[[int], RowProgress] = RowProgress) -> BenchReport:
        """Measure all rows, one after another.

        Raises:
            SettingsError: an unknown manager, or wrong settings.
            ContractError: a manager that does not keep vLLM's contract.
        """
        started_s = time.monotonic()
        both = (sides.BenchedSide(self.choices[0]), sides.BenchedSide(self.choices[1]))
        sides.prepare()
        results = []
        with progress(sum(self._num_repeats(row) for row in self.rows)) as shown:
            for row in self.rows:
                shown.begin(row.name)
                results.append(measure(row, both, self._num_repeats(row), on_repeat=shown.advance))
                shown.end(results[-1])
        return BenchReport.of_run(
            "manager", self.choices, started_s, quick=self.quick, conditions=CONDITIONS, rows=results
        )

    def _num_repeats(self, row: Row) -> int:
        return row.num_repeats[self.quick]


def measure(
    row: Row,
    both: tuple[sides.BenchedSide, sides.BenchedSide],
    num_repeats: int,
    *,
    on_repeat: Callable[[], None] | None = None,
) -> RowResult:
    """One row on both sides. Its pools go when the next one's set-up is collected, untimed."""
    repeats = [row.build(side) for side in both]
    with measuring.frozen_heap() if row.is_frozen else nullcontext():
        samples = measuring.take_turns(repeats, num_repeats, num_warm_up=row.num_warm_up, on_repeat=on_repeat)
    return RowResult.of(
        row.name,
        row.group,
        row.what,
        samples,
        unit=row.unit,
        goal=row.goal,
        in_table=row.in_table,
        point=row.point,
    )
