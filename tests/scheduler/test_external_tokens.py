"""Tokens that a KV connector brings: within the step or while the request waits, failing or not, sent after the end.

`fake_connector` says what it has and fails; vLLM's scheduler does with it what it does in an engine.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.cases import Case
from tests.scheduler.test_equal_schedules import ASYNC, SEEDS, run_pair

LOADS = {"loads": "any"}
FAILS = {"loads": "any", "loads_fail": True}
ROOM = {"num_blocks": 400}
# Smaller, and loaded requests that wait hold so much that vLLM's scheduler goes round for ever, with either manager.
SMALL = {"num_blocks": 66}
CASES = [
    Case("plenty of blocks", **LOADS, **ROOM),
    Case("preempting", **LOADS, **SMALL),
    Case("priority policy", policy="priority", **LOADS, **SMALL),
    Case("eagle", drafts="eagle", **LOADS, **SMALL),
    Case("n-gram drafts", drafts="ngram", **LOADS, **SMALL),
    Case("three steps in flight", num_in_flight=3, **LOADS, **SMALL),
    Case("asynchronous", **LOADS, **ASYNC, **SMALL),
    Case("without prefix caching", enable_caching=False, **LOADS, **SMALL),
    Case("failing, recomputed", **FAILS, **ROOM),
    Case("failing, recomputed, preempting", **FAILS, **SMALL),
    Case("failing, recomputed, without prefix caching", enable_caching=False, **FAILS, **SMALL),
    Case("failing, ended", failure_policy="fail", **FAILS, **ROOM),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equal(base_config: Any, case: Case, seed: int) -> None:
    # Blocks whose load failed, and what was computed from them, are reused first (F15).
    counts = run_pair(base_config, case, seed, same_block_ids=case.failure_policy != "fail")
    assert counts.loads > counts.failed_loads
    assert (counts.failed_loads > 0) is case.loads_fail
    assert (counts.failed_requests > 0) is (counts.evicted_blocks > 0) is (case.failure_policy == "fail")
