"""A model of three KV cache groups behind both managers, in a pool that must preempt and evict: the same answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.engine_run import run_both
from vllm_kvplug.cli.model import ensure_model

pytestmark = pytest.mark.serving


def test_both_managers_give_the_same_answers(tmp_path: Path) -> None:
    upstream, kvplug = run_both(ensure_model("tiny-hybrid"), "hybrid", tmp_path)
    assert kvplug["num_groups"] == 3
    num_requests = len(kvplug["requests"])
    assert num_requests == 32

    # A run without hits or preemptions, or where all say the same, would compare nothing.
    assert kvplug["num_hit_tokens"] > 0
    assert kvplug["num_preemptions"] > 0
    assert len({request["text"] for request in kvplug["requests"]}) > num_requests // 2

    assert kvplug == upstream
    assert kvplug["usage_after"] == 0.0
    print(
        f"{num_requests} requests: {kvplug['num_preemptions']} preemptions, "
        f"{kvplug['num_hit_tokens']} of {kvplug['num_queried_tokens']} tokens hit, on both sides"
    )
