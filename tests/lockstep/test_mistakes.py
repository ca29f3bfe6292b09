"""Lockstep's teeth: with a deliberate mistake in our code it must fail."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from rich.console import Console
from rich.table import Table

from tests.lockstep.compare import Mismatch
from tests.lockstep.driver import Driver
from tests.lockstep.mistakes import MISTAKES, ORDER
from tests.lockstep.mistakes_groups import BY_GROUP
from tests.lockstep.mistakes_runs import BY_RUN
from tests.lockstep.mutation import Edit, Mistake, MistakeDoesNotFit
from tests.lockstep.options import option
from tests.lockstep.trace import Op, Setup, draw_trace

_SEED_LIMIT_S = 10.0
_NUM_PARTS = 8
_MODULES = {
    "block.py",
    "block_pool.py",
    "block_run.py",
    "block_states.py",
    "prefix_index.py",
    "geometry.py",
    "allocation.py",
    "coordinator.py",
    "manager.py",
    "groups/base.py",
    "groups/holding.py",
    "groups/table.py",
    "groups/full_attention.py",
    "groups/sliding_window.py",
    "groups/chunked_local.py",
    "groups/mamba.py",
    "groups/cross_attention.py",
    "hash_row.py",
    "hashing.py",
    "eviction/lru.py",
    "observers.py",
    "vllm_glue/geometry.py",
    "vllm_glue/manager.py",
    "vllm_glue/observers.py",
}


Trace = tuple[Setup, list[Op]]


class Hang(BaseException):
    """A mistake made a seed run without end. Not an Exception, so that nobody in between takes it for an answer."""


@contextlib.contextmanager
def _time_limit(limit_s: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _find(setup: Setup, ops: list[Op], limit_s: float = _SEED_LIMIT_S) -> tuple[str, str]:
    """How a trace finds the mistake that is applied ("difference", "hang", "invariant" or ""), and where."""
    driver: Driver | None = None
    try:
        with _time_limit(limit_s):
            driver = Driver(setup, Counter(), stops_at_invariants=False)
            for op in ops:
                driver.apply(op)
            driver.take_events()
            driver.take_stats()
            driver.take_new_block_ids()
    except Mismatch as mismatch:
        return "difference", mismatch.field
    except Hang:
        return "hang", f"no end after {limit_s:g} s"
    error = driver.pair.invariant_error
    return ("invariant", f"{error!s:.50}") if error is not None else ("", "")


def _try(mistake: Mistake, traces: list[Trace], num_seeds: int) -> tuple[int, str, str]:
    """How many seeds it took until one found the mistake, how that one did, and where it saw it.

    A difference is what counts. A broken invariant alone is taken in the end, if a third of the seeds has seen no more.
    """
    num_tried, how, detail = 0, "", ""
    with mistake.applied():
        for setup, ops in traces:
            if not mistake.needs(setup):
                continue
            num_tried += 1
            found, where = _find(setup, ops)
            if found == "difference":
                return num_tried, found, where
            if found == "invariant" or not how:
                how, detail = found, where
            most_seeds = num_seeds // 3 if how == "invariant" else num_seeds
            if num_tried >= most_seeds or (found == "hang" and num_tried >= 3):
                break
    return num_tried, how, detail


# By thread: the alarm is ours. In parts, so that several processes share them.
@pytest.mark.timeout(1800, method="thread")
@pytest.mark.parametrize("part", range(_NUM_PARTS))
def test_every_mistake_is_found(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], part: int) -> None:
    num_seeds, num_ops = (option(request.config, name) for name in ("mistake-seeds", "steps"))
    # Rare setups among them: some mistakes are tried on one setup in twenty.
    traces = [draw_trace(seed, num_ops) for seed in range(20 * num_seeds)]
    table = Table("module", "rule that the mistake breaks", "seeds", "seen in", expand=True)
    table.columns[2].justify = "right"
    missed, outdated = [], []
    start_s = time.monotonic()
    mistakes = sorted(MISTAKES, key=lambda mistake: mistake.module)[part::_NUM_PARTS]
    for mistake in mistakes:
        try:
            num_tried, how, where = _try(mistake, traces, num_seeds)
        except MistakeDoesNotFit as error:
            outdated.append(f"{mistake.rule!r}: {error}")
            continue
        if how not in ("difference", "invariant"):
            # A hang alone is no find: on a busy machine a seed can be slow without any fault.
            missed.append(f"{mistake.rule!r} ({mistake.module}), {num_tried} seeds")
        table.add_row(
            mistake.module, mistake.rule, str(num_tried), f"invariant: {where}" if how == "invariant" else where
        )
    table.title = f"{len(mistakes)} deliberate mistakes, each until a seed finds it, {time.monotonic() - start_s:.0f} s"
    with capsys.disabled():
        console = Console(width=140)
        console.print()
        console.print(table)
    assert not outdated, "mistakes that no longer fit the code, to be written anew:\n" + "\n".join(outdated)
    assert not missed, "mistakes that no seed found:\n" + "\n".join(missed)


def test_the_mistakes_cover_the_rules_and_every_module() -> None:
    assert len(MISTAKES) >= 260
    assert len(ORDER) >= 22
    assert len(BY_GROUP) >= 80
    assert len(BY_RUN) >= 95
    assert {mistake.module for mistake in MISTAKES} >= _MODULES
    rules = [mistake.rule for mistake in MISTAKES]
    assert len(set(rules)) == len(rules)


def test_a_mistake_that_no_longer_fits_says_so() -> None:
    for place, old in (
        ("block_pool.BlockPool.take", "no such text"),
        ("block_pool.BlockPool.gone", "x"),
        ("gone.gone", "x"),
    ):
        with pytest.raises(MistakeDoesNotFit, match=place), Edit(place, old, "").applied():
            pass


def test_a_mistake_that_hangs_is_stopped() -> None:
    with Edit("block_pool.BlockPool.take", "self.num_free_blocks -= num_blocks", "while True: pass").applied():
        assert "hang" in {_find(*draw_trace(seed, 60), limit_s=0.3)[0] for seed in range(6)}


def test_a_mistake_is_gone_afterwards() -> None:
    from vllm_kvplug.block_pool import BlockPool

    before = vars(BlockPool).copy()
    for mistake in ORDER:
        with mistake.applied():
            pass
    assert vars(BlockPool) == before
