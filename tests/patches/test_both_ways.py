"""The tests of the seams' way, run again on the patched vLLM: one set of tests for both ways.

Few are of one way alone, marked `seams_only` or `patched_only` (tests/glue/support.py).
"""

from __future__ import annotations

import os
import re

import pytest

from tests.glue.support import run_python

RUNS = {
    # options, a choice, the swap, reports, recording, shadows, replays: without an engine
    "glue": (["tests/glue", "-m", "not engine and not slow"], 800),
    # the engine's own process, which gets the choice by vLLM's fields
    "engine's process": (["tests/glue/test_engine.py", "-k", "users_own_scheduler"], 1),
    # texts and decisions equal to upstream's, in a pool that must preempt and evict
    "equal texts": (["tests/serving/test_engine_equality.py", "-k", "three_kv_cache_groups"], 1),
}


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_same_tests_pass(name: str, patched_path: str) -> None:
    arguments, min_passed = RUNS[name]
    # A run below pytest-xdist would take itself for one of its workers.
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = run_python(*command, env=env | {"PYTHONPATH": patched_path}, timeout_s=900)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    summary = done.stdout.splitlines()[-1]
    found = re.search(r"(\d+) passed", summary)
    assert found is not None
    assert int(found[1]) >= min_passed, summary
