"""What `kvplug ab bench` was asked for, checked before any server starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_kvplug.evals.errors import EvalUsageError
from vllm_kvplug.evals.sides import SideChoice, choices

WORKLOAD_NAMES = ("random", "shared-prefixes", "multi-turn", "long-documents", "mooncake")
DEFAULT_NUM_REQUESTS = 32
QUICK_NUM_REQUESTS = 16
DEFAULT_MAX_CONCURRENCY = 8
# The fewest pairs that say anything are statistics.MIN_PAIRS_FOR_INTERVAL; one more allows a sign test.
DEFAULT_NUM_PAIRS = 6
QUICK_NUM_PAIRS = 5
# Seeds of runs are SEEDS_PER_RUN_SEED * seed + number of the pair, and numpy takes 32 bits.
SEEDS_PER_RUN_SEED = 10_000
MAX_SEED = 2**32 // SEEDS_PER_RUN_SEED - 1


@dataclass(frozen=True)
class ThroughputOptions:
    """One comparison.

    Args:
        model: a name of `kvplug model list`, a hub name or a path.
        num_pairs: runs of each side; None: 6, or 5 with `quick`.
        num_requests: of a run; None: 32, or 16 with `quick`.
        request_rate: requests (multi-turn: conversations) that start in a second, as a Poisson process; None: as fast
            as `max_concurrency` allows.
        max_concurrency: requests (multi-turn: conversations) under way at once; None: 8, but no limit where arrival
            times are given.
        length_scale: factor of all lengths in tokens; 1 suits a maximum length of 2048 tokens, 32 is the mooncake
            trace's own lengths.
        think_time_s: mean of the time between an answer and the next turn (multi-turn).
        trace: the file that workload mooncake replays.
        time_scale: factor of the trace's times: 0.5 is twice as fast.
        trace_sample: part of the trace's conversations that is replayed.
        one_at_a_time: never both servers up; False decides by free memory.
        server_args: of both servers.
        server_command: what to run in place of `vllm` (tests).
    """

    model: str
    workload: str
    num_pairs: int | None = None
    num_requests: int | None = None
    request_rate: float | None = None
    max_concurrency: int | None = None
    length_scale: float = 1.0
    think_time_s: float = 0.5
    trace: Path | None = None
    time_scale: float = 1.0
    trace_sample: float = 1.0
    seed: int = 0
    one_at_a_time: bool = False
    quick: bool = False
    server_args: tuple[str, ...] = ()
    sides: tuple[SideChoice, SideChoice] = field(default_factory=choices)
    out: Path | None = None
    server_command: Sequence[str] | None = None

    @property
    def pairs(self) -> int:
        """Runs of each side."""
        return self.num_pairs or (QUICK_NUM_PAIRS if self.quick else DEFAULT_NUM_PAIRS)

    @property
    def requests(self) -> int:
        """Requests of each run."""
        return self.num_requests or (QUICK_NUM_REQUESTS if self.quick else DEFAULT_NUM_REQUESTS)

    @property
    def concurrency(self) -> int:
        """Requests or conversations under way at once, where no arrival times are given."""
        return self.max_concurrency or DEFAULT_MAX_CONCURRENCY

    def check(self) -> None:
        """Raises EvalUsageError for a value that no run can have."""
        if self.workload not in WORKLOAD_NAMES:
            raise EvalUsageError(f"--workload: expected one of {', '.join(WORKLOAD_NAMES)}, found {self.workload!r}")
        for option, count in (
            ("--pairs", self.num_pairs),
            ("--num-requests", self.num_requests),
            ("--max-concurrency", self.max_concurrency),
        ):
            if count is not None and count < 1:
                raise EvalUsageError(f"{option}: expected 1 or more, found {count}")
        if self.num_pairs is not None and self.num_pairs >= SEEDS_PER_RUN_SEED:
            raise EvalUsageError(f"--pairs: expected less than {SEEDS_PER_RUN_SEED}, found {self.num_pairs}")
        for option, factor in (
            ("--request-rate", self.request_rate),
            ("--length-scale", self.length_scale),
            ("--time-scale", self.time_scale),
        ):
            if factor is not None and not (math.isfinite(factor) and factor > 0):
                raise EvalUsageError(f"{option}: expected a number above 0, found {factor}")
        if not 0 < self.trace_sample <= 1:
            raise EvalUsageError(f"--trace-sample: expected a part above 0 and at most 1, found {self.trace_sample}")
        if not (math.isfinite(self.think_time_s) and self.think_time_s >= 0):
            raise EvalUsageError(f"--think-time: expected 0 or more seconds, found {self.think_time_s}")
        if not 0 <= self.seed <= MAX_SEED:
            raise EvalUsageError(f"--seed: expected 0 to {MAX_SEED}, found {self.seed}")
        self._check_trace()

    def _check_trace(self) -> None:
        if self.workload != "mooncake":
            if self.trace is not None:
                raise EvalUsageError(
                    f"--trace: only workload mooncake replays a trace, found --workload {self.workload}"
                )
            if (self.time_scale, self.trace_sample) != (1.0, 1.0):
                raise EvalUsageError("--time-scale, --trace-sample: only workload mooncake replays a trace")
            return
        if self.trace is None:
            raise EvalUsageError("--workload mooncake: expected --trace PATH, a file of Mooncake's JSON lines")
        if self.request_rate is not None:
            raise EvalUsageError(
                "--request-rate: workload mooncake has the trace's times; scale them with --time-scale"
            )
        if not self.trace.is_file():
            raise EvalUsageError(f"--trace: expected a file, found none at {self.trace}")

    def seed_of_run(self, index: int) -> int:
        """Of pair `index`, the same for both sides; -1 is the warm-up."""
        return self.seed * SEEDS_PER_RUN_SEED + index + 1
