"""A KV connector on the CPU engine behind both managers: prompts saved, loaded into an empty cache, failing to load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serving.connector_run import NUM_PROMPTS
from tests.serving.engine_run import run_program

pytestmark = pytest.mark.serving


def run_engine(manager: str, model_path: str, policy: str, tmp_path: Path) -> dict[str, Any]:
    output, folder = tmp_path / f"{manager}.json", tmp_path / f"{manager}-files"
    run_program("tests.serving.connector_run", manager, model_path, str(output), policy, str(folder))
    return json.loads(output.read_text())


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_both_managers_load_the_same(model_path: str, policy: str, tmp_path: Path) -> None:
    upstream = run_engine("upstream", model_path, policy, tmp_path)
    kvplug = run_engine("kvplug", model_path, policy, tmp_path)
    assert upstream.pop("manager_class") == "vllm.v1.core.kv_cache_manager.KVCacheManager"
    assert kvplug.pop("manager_class") == "vllm_kvplug.vllm_glue.manager.KVCacheManager"

    saved, loaded, failing = (kvplug[name] for name in ("saved", "loaded", "failing"))
    assert saved["num_saves"] > 0
    assert saved["num_loads"] == saved["num_external_tokens"] == 0
    for later in (loaded, failing):
        assert later["num_saves"] == 0
        assert later["num_loads"] == NUM_PROMPTS
        assert later["num_external_tokens"] > 0
    # What was loaded says what was computed.
    texts = [request["text"] for request in saved["requests"]]
    assert len(set(texts)) > NUM_PROMPTS // 3
    assert [request["text"] for request in loaded["requests"]] == texts
    failed = [request for request in failing["requests"] if request["finish_reason"] == "error"]
    assert bool(failed) is (policy == "fail")
    if policy == "recompute":
        assert [request["text"] for request in failing["requests"]] == texts

    assert kvplug == upstream
    print(f"{loaded['num_external_tokens']} external tokens in {NUM_PROMPTS} requests; {policy}: {len(failed)} ended")
