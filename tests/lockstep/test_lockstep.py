"""Both managers on the same random traffic."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest

import pytest
from rich.console import Console
from rich.table import Table

from tests.lockstep.deviations import TRIGGERS
from tests.lockstep.mistakes import ORDER
from tests.lockstep.options import option
from tests.lockstep.runner import GROUPS, MUST_HAPPEN, SETUPS, TRAFFIC, report, run_ops, run_seed
from tests.lockstep.structures import STRUCTURES
from tests.lockstep.trace import draw_trace


def test_both_managers_agree(
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
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
    # For `make matrix`, by pytest's --junit-xml.
    record_property("calls", counts["calls"])
    record_property("calls_as_upstream", counts["calls compared with upstream as it is"])
    never_happened = [name for name in MUST_HAPPEN if not counts[name]]
    # A single seed, repeated by hand, need not see everything.
    assert not never_happened or num_seeds < 1000, f"the traffic never had: {', '.join(never_happened)}"


def test_a_failure_is_shrunk_and_can_be_repeated() -> None:
    wrong_order = next(one for one in ORDER if one.rule == "free gives back the last block first")
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
    console = Console(width=120)
    console.print()
    console.print(title)
    table = Table(*["what happened", "times"] * 2)
    table.columns[1].justify = table.columns[3].justify = "right"
    names = [*TRAFFIC, *STRUCTURES, *GROUPS, *SETUPS]
    half = -(-len(names) // 2)
    for left, right in zip_longest(names[:half], names[half:], fillvalue=""):
        table.add_row(left, f"{counts[left]:,}", right, f"{counts[right]:,}" if right else "")
    console.print(table)
    # No seed ends early: upstream's side of an excused call is put right, and the run goes on.
    table = Table("id", "excused calls", "trigger")
    table.columns[1].justify = "right"
    for deviation_id, trigger in TRIGGERS.items():
        table.add_row(deviation_id, f"{counts[f'excused {deviation_id}']:,}", trigger)
    console.print(f"{counts['calls']:,} calls compared, of them with upstream's side put right first:")
    console.print(table)
