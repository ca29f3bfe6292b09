"""Real engines behind both managers, in pools that must preempt and evict: the same texts and the same decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.serving.engine_run import ADAPTERS, run_both
from tests.serving.lora_adapter import write_adapter
from vllm_kvplug.cli.model import ensure_model

pytestmark = pytest.mark.serving


def check_equal(upstream: dict[str, Any], kvplug: dict[str, Any], num_requests: int) -> None:
    """All that came out is equal, and the run was one that compares something."""
    assert len(kvplug["requests"]) == num_requests
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


def test_the_default_model(model_path: str, tmp_path: Path) -> None:
    check_equal(*run_both(model_path, "default", tmp_path), num_requests=32)


def test_a_model_of_three_kv_cache_groups(tmp_path: Path) -> None:
    upstream, kvplug = run_both(ensure_model("tiny-hybrid"), "hybrid", tmp_path)
    assert kvplug["num_groups"] == 3
    check_equal(upstream, kvplug, num_requests=32)


def test_two_adapters_and_salts(model_path: str, tmp_path: Path) -> None:
    """Their keys are what kvplug makes otherwise than upstream; where no name is used twice, the hits are the same."""
    for seed, name in enumerate(ADAPTERS):
        write_adapter(tmp_path / name, model_path, seed)
    check_equal(*run_both(model_path, "keys", tmp_path), num_requests=24)
