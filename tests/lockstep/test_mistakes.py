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
from tests.lockstep.mutation import Edit, Mistake, MistakeDoesNotFit
from tests.lockstep.options import option
from tests.lockstep.trace import draw_trace

_SEED_LIMIT_S = 10.0
_MODULES = {
    "block.py",
    "block_pool.py",
    "prefix_index.py",
    "geometry.py",
    "allocation.py",
    "coordinator.py",
    "manager.py",
    "groups/base.py",
    "groups/full_attention.py",
    "eviction/lru.py",
    "observers.py",
    "vllm_glue/manager.py",
    "vllm_glue/observers.py",
}


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


def _find(seed: int, num_ops: int, limit_s: float = _SEED_LIMIT_S) -> tuple[str, str]:
    """How a seed finds the mistake that is applied ("difference", "hang", "invariant" or ""), and where."""
    setup, ops = draw_trace(seed, num_ops)
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
    return ("invariant", f"{error!s:.70}") if error is not None else ("", "")


def _try(mistake: Mistake, num_seeds: int, num_ops: int) -> tuple[Counter[str], Counter[str]]:
    """How many seeds found the mistake, by how; and where they saw it, by field."""
    found: Counter[str] = Counter()
    fields: Counter[str] = Counter()
    with mistake.applied():
        for seed in range(num_seeds):
            how, detail = _find(seed, num_ops)
            if how:
                found[how] += 1
                fields[detail] += 1
    return found, fields


# Each mistake costs up to `num_seeds` time limits where it makes every seed hang. By thread: the alarm is ours.
@pytest.mark.timeout(1800, method="thread")
def test_every_mistake_is_found(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    num_seeds, num_ops = (option(request.config, name) for name in ("mistake-seeds", "steps"))
    table = Table("module", "rule that the mistake breaks", "seeds", "seen first in", "invariant only", expand=True)
    table.columns[2].justify = table.columns[4].justify = "right"
    missed, outdated = [], []
    start_s = time.monotonic()
    for mistake in sorted(MISTAKES, key=lambda mistake: mistake.module):
        try:
            found, fields = _try(mistake, num_seeds, num_ops)
        except MistakeDoesNotFit as error:
            outdated.append(f"{mistake.rule!r}: {error}")
            continue
        num_found = found["difference"] + found["invariant"]
        if not num_found:
            # A hang alone is no find: on a busy machine a seed can be slow without any fault.
            missed.append(f"{mistake.rule!r} ({mistake.module})")
        seen_in = ", ".join(field for field, _ in fields.most_common(2))
        table.add_row(mistake.module, mistake.rule, str(num_found), seen_in, str(found["invariant"] or ""))
    table.title = f"{len(MISTAKES)} deliberate mistakes, {num_seeds} seeds each, {time.monotonic() - start_s:.0f} s"
    with capsys.disabled():
        console = Console(width=140)
        console.print()
        console.print(table)
    assert not outdated, "mistakes that no longer fit the code, to be written anew:\n" + "\n".join(outdated)
    assert not missed, "mistakes that no seed found:\n" + "\n".join(missed)


def test_the_mistakes_cover_the_rules_and_every_module() -> None:
    assert len(MISTAKES) >= 25
    assert len(ORDER) >= 12
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
    with Edit("block_pool.BlockPool.take", "counts[block_id] = 1", "while True: pass").applied():
        assert "hang" in {_find(seed, 60, limit_s=0.3)[0] for seed in range(3)}


def test_a_mistake_is_gone_afterwards() -> None:
    from vllm_kvplug.block_pool import BlockPool

    before = vars(BlockPool).copy()
    for mistake in ORDER:
        with mistake.applied():
            pass
    assert vars(BlockPool) == before
