"""Runs seeds, counts what happened in them, and shrinks what fails."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.lockstep.compare import Mismatch
from tests.lockstep.deviations import HAS_GATE, TRIGGERS
from tests.lockstep.driver import Driver
from tests.lockstep.structures import STRUCTURES
from tests.lockstep.trace import Op, Setup, draw_trace

# What a run must have seen at least once to prove anything, and what the summary shows.
TRAFFIC = (
    "steps",
    "calls",
    "calls compared with upstream as it is",
    "lookups",
    "hits",
    "evictions",
    "blocks evicted on request",
    "None answers",
    "retries refused again",
    "retries admitted",
    "preemptions",
    "resumptions",
    "late outputs",
    "prompts computed anew",
    "aborts",
    "duplicates",
    "resets",
    "resets refused",
    "prefill chunks",
    "steps without a new block",
    "drafts",
    "rejected drafts",
    "sessions continued",
    "external tokens at once",
    "external tokens behind hits",
    "external tokens later",
    "common prefixes",
    "events",
    "salted requests",
    "LoRA requests",
    "image requests",
    "requests that skip reading",
    "requests that reached max_model_len",
    "refused misuses",
    *(("full sequences that do not fit",) if HAS_GATE else ()),
)
GROUPS = (
    "sliding: blocks left behind",
    "chunked: blocks left behind",
    "mamba none: blocks left behind",
    "mamba all: blocks left behind",
    "mamba align: blocks left behind",
    "mamba align: speculative blocks moved on",
    "mamba: defers",
    "cross: encoder allocations",
    "hits with skipped blocks",
    "hits shortened by another group",
    "hits with eagle",
    *(f"hits: {name}" for name in ("full", "mla", "sink", "sliding", "chunked", "mamba all", "mamba align")),
)
SETUPS = (
    *(f"setups: {num_groups} groups" for num_groups in range(5)),
    *(f"setups: group: {name}" for name in ("full", "mla", "sink", "sliding", "chunked", "cross")),
    *(f"setups: group: mamba {mode}" for mode in ("none", "all", "align")),
    "setups: speculative blocks",
    "setups: mixed block sizes",
    "setups: hashes finer than all blocks",
    "setups: equal groups among others",
    "setups: eagle, several groups",
    "setups: connector, several groups",
    "setups: context parallel",
    "setups: prefix caching off",
)
EXCUSED = tuple(f"excused {deviation_id}" for deviation_id in TRIGGERS)
MUST_HAPPEN = (*TRAFFIC, *STRUCTURES, *GROUPS, *SETUPS, *EXCUSED)


@dataclass
class Failure:
    """A trace that fails, and how."""

    setup: Setup
    ops: Sequence[Op]
    mismatch: Mismatch


def run_ops(setup: Setup, ops: Sequence[Op], counts: Counter[str] | None = None) -> Failure | None:
    """Carry out a trace; answers the failure with the operations up to it, or None."""
    position = 0
    try:
        driver = Driver(setup, Counter() if counts is None else counts)
        for position, op in enumerate(ops):  # noqa: B007  # read after an error
            driver.apply(op)
        driver.take_events()
        driver.take_stats()
        driver.take_new_block_ids()
    except Mismatch as mismatch:
        return Failure(setup, list(ops[: position + 1]), mismatch)
    return None


def run_seed(seed: int, num_ops: int, counts: Counter[str]) -> Failure | None:
    """Carry out the trace of a seed."""
    return run_ops(*draw_trace(seed, num_ops), counts)


def shrink(failure: Failure, limit_s: float = 60.0) -> Failure:
    """A shorter trace that fails too: leave out halves first, single operations at last (delta debugging)."""
    end_s = time.monotonic() + limit_s
    part_ops = max(len(failure.ops) // 2, 1)
    while time.monotonic() < end_s:
        first, shrunk = 0, False
        while first < len(failure.ops) and time.monotonic() < end_s:
            ops = [*failure.ops[:first], *failure.ops[first + part_ops :]]
            smaller = run_ops(failure.setup, ops)
            if smaller is not None:
                failure, shrunk = smaller, True
            else:
                first += part_ops
        if part_ops == 1 and not shrunk:
            break
        part_ops = max(part_ops // 2, 1)
    return failure


def report(seed: int, num_ops: int, failure: Failure) -> str:
    """What a person needs to look into a failing seed."""
    smallest = shrink(failure)
    lines = [
        f"seed {seed}: the managers differ after operation {len(failure.ops)} of {num_ops}; "
        f"shrunk to {len(smallest.ops)} operations:",
        f"  {smallest.setup}",
        *(f"  {op}" for op in smallest.ops),
        str(smallest.mismatch),
        f"again: python -m pytest tests/lockstep/test_lockstep.py --lockstep-first-seed {seed} --lockstep-seeds 1 "
        f"--lockstep-steps {num_ops}",
    ]
    return "\n".join(lines)
