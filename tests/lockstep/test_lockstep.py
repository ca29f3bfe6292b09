"""Both managers on the same random traffic."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from rich.console import Console
from rich.table import Table

from tests.lockstep.mutation import mistake
from tests.lockstep.options import option
from tests.lockstep.runner import MUST_HAPPEN, report, run_ops, run_seed
from tests.lockstep.trace import draw_trace


def test_both_managers_agree(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    first_seed, num_seeds, num_ops = (option(request.config, name) for name in ("first-seed", "seeds", "steps"))
    counts: Counter[str] = Counter()
    start_s = time.monotonic()
    for seed in range(first_seed, first_seed + num_seeds):
        failure = run_seed(seed, num_ops, counts)
        if failure is not None:
            pytest.fail(report(seed, num_ops, failure), pytrace=False)
    title = f"Lockstep: {num_seeds} seeds from {first_seed}, {num_ops} steps each, {time.monotonic() - start_s:.0f} s"
    with capsys.disabled():
        _print_summary(title, counts)
    never_happened = [name for name in MUST_HAPPEN if not counts[name]]
    # A single seed, repeated by hand, need not see everything.
    assert not never_happened or num_seeds < 100, f"the traffic never had: {', '.join(never_happened)}"


def test_a_failure_is_shrunk_and_can_be_repeated() -> None:
    wrong_order = mistake(
        "free gives back the last block first",
        "groups.base.AttentionGroup.free",
        "table.block_ids[::-1]",
        "table.block_ids",
    )
    num_ops = 60
    with wrong_order.applied():
        failures = {seed: run_seed(seed, num_ops, Counter()) for seed in range(10)}
        seed, failure = next((seed, failure) for seed, failure in failures.items() if failure is not None)
        text = report(seed, num_ops, failure)
    lines = text.splitlines()
    ops = [line for line in lines if line.startswith("  Op(")]
    # A request, its blocks, and their end: nothing else is needed to see this one.
    assert 2 <= len(ops) <= 4, text
    assert lines[0].startswith(f"seed {seed}: ")
    assert "  free order" in lines, text
    assert lines[-1].endswith(f"--lockstep-first-seed {seed} --lockstep-seeds 1 --lockstep-steps {num_ops}")
    assert run_seed(seed, num_ops, Counter()) is None


def test_any_part_of_a_trace_is_a_trace() -> None:
    for seed in range(20):
        setup, ops = draw_trace(seed, 60)
        for step in (2, 3, 7):
            assert run_ops(setup, ops[seed % step :: step]) is None


def _print_summary(title: str, counts: Counter[str]) -> None:
    table = Table("what happened", "times")
    table.columns[1].justify = "right"
    for name in MUST_HAPPEN:
        table.add_row(name, f"{counts[name]:,}")
    console = Console(width=100)
    console.print()
    console.print(title)
    console.print(table)
