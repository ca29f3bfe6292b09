"""Both managers behind vLLM's own scheduler: the same schedules, block ids, outputs and usage, step by step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.scheduler.cases import HAS_FULL_PROMPT_RESERVATION, Case
from tests.scheduler.loops import Counts, Pair, answers_of
from tests.scheduler.traffic import random_scripts

SEEDS = (1, 2)

# Pools that one request of the largest size fits, and not many; drafts and windows need some blocks more.
TIGHT = {"num_blocks": 44}
ROOMIER = {"num_blocks": 60}
ASYNC = {"is_async": True, "num_in_flight": 2}
CASES = [
    Case("plain", num_blocks=400),
    Case("preempting", **TIGHT),
    Case("mla", ("mla",), **TIGHT),
    Case("without chunked prefill", is_chunked=False, max_num_tokens=160, **TIGHT),
    Case("long prefill threshold", long_prefill_threshold=10, **TIGHT),
    Case("without prefix caching", enable_caching=False, **TIGHT),
    Case("priority policy", policy="priority", **TIGHT),
    Case("n-gram drafts", drafts="ngram", **TIGHT),
    Case("eagle", drafts="eagle", **ROOMIER),
    Case("eagle, priority policy", drafts="eagle", policy="priority", **ROOMIER),
    # With a synchronous scheduler and drafts vLLM has one step in flight: two make it schedule negative tokens.
    Case("three steps in flight", num_in_flight=3, num_blocks=400),
    Case("three steps in flight, preempting", num_in_flight=3, **TIGHT),
    Case("asynchronous", **ASYNC, **TIGHT),
    Case("asynchronous, n-gram drafts", drafts="ngram", **ASYNC, **ROOMIER),
    Case("asynchronous, eagle", drafts="eagle", **ASYNC, **ROOMIER),
    Case("asynchronous, priority policy", policy="priority", **ASYNC, **TIGHT),
]
HYBRIDS = [
    Case("window", ("window:17",), **TIGHT),
    Case("chunked local", ("chunk:40",), num_blocks=30),
    Case("full and window", ("full", "window:17"), num_blocks=90),
    Case("full and two windows", ("window:9", "full", "window:32"), num_blocks=130),
    Case("window and chunked local", ("window:17", "chunk:24"), num_blocks=70),
    Case("full and chunked local, three steps in flight", ("full", "chunk:24"), num_blocks=90, num_in_flight=3),
    Case("full and window, asynchronous", ("full", "window:17"), num_blocks=90, **ASYNC),
    Case("full and window, priority policy", ("full", "window:17"), num_blocks=90, policy="priority"),
    Case("full and window, without prefix caching", ("full", "window:17"), num_blocks=90, enable_caching=False),
    Case("full and window, n-gram drafts", ("full", "window:17"), num_blocks=90, drafts="ngram"),
    Case("full and Mamba align", ("full", "mamba:align"), **ROOMIER),
    Case("full and Mamba align, asynchronous", ("full", "mamba:align"), **ROOMIER, **ASYNC),
    Case("full and Mamba all", ("full", "mamba:all"), num_blocks=90),
    Case("full and Mamba without prefix caching", ("full", "mamba:none"), enable_caching=False, **TIGHT),
    Case(
        "full and Mamba without prefix caching, drafts",
        ("full", "mamba:none"),
        num_blocks=70,
        enable_caching=False,
        drafts="ngram",
    ),
    Case("full, window and Mamba align", ("full", "window:17", "mamba:align"), num_blocks=100),
]
RESERVING = [
    Case("full prompts reserved", reserves_full_prompts=True, **TIGHT),
    Case("full and window, full prompts reserved", ("full", "window:17"), num_blocks=90, reserves_full_prompts=True),
    Case("full and Mamba align, full prompts reserved", ("full", "mamba:align"), reserves_full_prompts=True, **ROOMIER),
    Case("asynchronous, eagle, full prompts reserved", drafts="eagle", reserves_full_prompts=True, **ASYNC, **ROOMIER),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES + HYBRIDS, ids=lambda case: case.name)
def test_equal(base_config: Any, case: Case, seed: int) -> None:
    counts = run_pair(base_config, case, seed)
    assert (counts.hit_tokens > 0) is case.enable_caching
    assert (counts.preemptions > 0) is (case.num_blocks < 400)
    assert (min(counts.accepted_drafts, counts.rejected_drafts) > 0) is (case.drafts is not None)


@pytest.mark.skipif(not HAS_FULL_PROMPT_RESERVATION, reason="from vLLM 0.19 on")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", RESERVING, ids=lambda case: case.name)
def test_equal_with_full_prompts_reserved(base_config: Any, case: Case, seed: int) -> None:
    """Each request that waits is asked for by `can_fit_full_sequence`, and some are refused."""
    counts = run_pair(base_config, case, seed)
    without = run_pair(base_config, dataclasses.replace(case, reserves_full_prompts=False), seed)
    assert counts.hit_tokens > 0
    assert counts.preemptions < without.preemptions


def run_pair(base_config: Any, case: Case, seed: int, *, same_block_ids: bool = True) -> Counts:
    print(f"case {case.name!r}, seed {seed}")
    scripts = random_scripts(case, seed)
    counts = Pair(case, base_config, scripts, same_block_ids=same_block_ids).run(seed)
    print(counts.summary())
    answers = {name: tokens for name, (tokens, reason) in counts.answers.items() if reason == "length"}
    assert answers == {name: tokens for name, tokens in answers_of(scripts).items() if name in answers}
    return counts
