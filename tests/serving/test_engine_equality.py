"""The default model behind both managers, a pool that must preempt and evict: the same texts and the same decisions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.serving


def run_engine(manager: str, model_path: str, tmp_path: Path) -> dict[str, Any]:
    output = tmp_path / f"{manager}.json"
    command = [sys.executable, "-m", "tests.serving.engine_run", manager, model_path, str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(output.read_text())


def test_both_managers_give_the_same_answers_under_preemption_and_eviction(model_path: str, tmp_path: Path) -> None:
    upstream = run_engine("upstream", model_path, tmp_path)
    kvplug = run_engine("kvplug", model_path, tmp_path)
    assert upstream.pop("manager_class") == "vllm.v1.core.kv_cache_manager.KVCacheManager"
    assert kvplug.pop("manager_class") == "vllm_kvplug.vllm_glue.manager.KVCacheManager"

    # A run without hits or preemptions would compare nothing.
    assert len(kvplug["requests"]) == 64
    assert kvplug["num_hit_tokens"] > 0
    assert kvplug["num_preemptions"] > 0
    assert len({request["text"] for request in kvplug["requests"]}) > 32

    assert kvplug == upstream
    assert kvplug["usage_after"] == 0.0
    print(
        f"64 requests: {kvplug['num_preemptions']} preemptions, "
        f"{kvplug['num_hit_tokens']} of {kvplug['num_queried_tokens']} tokens hit, on both sides"
    )
