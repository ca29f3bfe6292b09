"""Where vLLM 0.17.1's manager is wrong under its own scheduler, ours is right: what layers read, and the answers.

The ids are those of docs/deviations.md. Schedules differ there, so each side runs alone; the fake worker's memory says
whether a block was taken from a request that still reads it, or given to two.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.cases import Case
from tests.scheduler.fake_worker import WrongContent
from tests.scheduler.loops import Counts, Side, answers_of, run_one
from tests.scheduler.test_equal_schedules import ASYNC
from tests.scheduler.traffic import random_scripts

F2 = [
    Case("F2: window, eagle", ("window:9",), num_blocks=50, drafts="eagle", **ASYNC),
    Case("F2: full and window, eagle", ("full", "window:17"), num_blocks=90, drafts="eagle", **ASYNC),
    Case("F2: full and window, n-gram drafts", ("full", "window:17"), num_blocks=90, drafts="ngram", **ASYNC),
    Case("F2: full and chunked local, n-gram drafts", ("full", "chunk:24"), num_blocks=90, drafts="ngram", **ASYNC),
]
F1 = [
    Case("F1: full and window, external tokens", ("full", "window:17"), num_blocks=80, loads="within"),
    Case("F1: window and full, external tokens", ("window:9", "full"), num_blocks=80, loads="within"),
    Case("F1: three windows, external tokens", ("window:9", "window:17", "window:24"), num_blocks=80, loads="within"),
]
F3 = [
    Case("F3: full and Mamba align, n-gram drafts", ("full", "mamba:align"), num_blocks=90, drafts="ngram"),
    Case("F3: full and Mamba align, eagle", ("full", "mamba:align"), num_blocks=90, drafts="eagle"),
    Case("F3: full and Mamba align, asynchronous", ("full", "mamba:align"), num_blocks=90, drafts="ngram", **ASYNC),
]
F7 = [
    Case("F7: full and window, eagle", ("full", "window:17"), num_blocks=90, drafts="eagle"),
    Case("F7: full and two windows, eagle", ("full", "window:17", "window:9"), num_blocks=130, drafts="eagle"),
]
F8 = [
    Case("F8: two groups of full attention", ("full", "full"), num_blocks=90),
    Case("F8: two equal windows", ("window:17", "window:17"), num_blocks=60),
]
F15 = [
    Case("F15: full, failing loads", num_blocks=66, loads="any", loads_fail=True, failure_policy="fail"),
]
NUM_SEEDS = 4


def run_alone(base_config: Any, case: Case, manager: str, seed: int) -> Counts:
    print(f"case {case.name!r}, {manager}, seed {seed}")
    scripts = random_scripts(case, seed, has_aborts=False)
    side = Side(case, base_config, manager, scripts)
    counts = run_one(side, scripts)
    print(counts.summary())
    failed = [name for name, (_, reason) in counts.answers.items() if reason == "error"]
    assert len(failed) == counts.failed_requests
    answers = {name: tokens for name, (tokens, _) in counts.answers.items() if name not in failed}
    assert answers == {name: tokens for name, tokens in answers_of(scripts).items() if name not in failed}
    assert side.manager.usage == 0
    return counts


@pytest.mark.parametrize("case", F1 + F2 + F3 + F7 + F8 + F15, ids=lambda case: case.name)
def test_ours_is_right(base_config: Any, case: Case) -> None:
    for seed in range(NUM_SEEDS):
        counts = run_alone(base_config, case, "kvplug", seed)
        assert counts.hit_tokens > 0


@pytest.mark.parametrize(
    ("case", "seed"), [(F1[0], 29), (F2[1], 0), (F2[2], 0), (F2[3], 0)], ids=lambda value: getattr(value, "name", None)
)
def test_the_worker_sees_what_upstream_gives_away(base_config: Any, case: Case, seed: int) -> None:
    """Without this, the test above could pass by looking at nothing."""
    with pytest.raises(WrongContent):
        run_alone(base_config, case, "upstream", seed)


def test_f7_finds_more_than_upstream(base_config: Any) -> None:
    for case in F7:
        hits = {
            manager: sum(run_alone(base_config, case, manager, seed).hit_tokens for seed in range(NUM_SEEDS))
            for manager in ("upstream", "kvplug")
        }
        assert hits["kvplug"] > hits["upstream"], (case.name, hits)
