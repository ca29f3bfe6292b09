"""Engines on the patched 0.17.1: with kvplug, with a manager that the fork registers, and the patch without kvplug."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.glue.support import model_folder, run_python

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOY = "small_manager:SmallManager"
OURS = "vllm_kvplug.vllm_glue.manager:KVCacheManager"
UPSTREAM = "vllm.v1.core.kv_cache_manager:KVCacheManager"
UPSTREAM_HASHER = "vllm.v1.core.kv_cache_utils"
START = "KV cache manager in force: "
WAY = "registered in vLLM's own registry (patched tree)"


def run(env: dict[str, str], model: str, *runs: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """What each engine answered, and the lines at start in the log."""
    process = run_python("-m", "tests.patches.engine_run", model, json.dumps(runs), env=env, timeout_s=600)
    assert process.returncode == 0, (process.stdout + process.stderr)[-6000:]
    lines = process.stdout.splitlines()
    answers = [json.loads(line.removeprefix("ANSWER ")) for line in lines if line.startswith("ANSWER ")]
    return answers, [
        line.partition(START)[2] for line in (process.stdout + process.stderr).splitlines() if START in line
    ]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny-qwen2")


def test_kvplug_and_a_registered_toy(patched_env: dict[str, str], model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.gz"
    answers, lines = run(
        patched_env,
        model,
        [],
        ["--kv-cache-manager", "kvplug", "--kv-cache-manager-config.eviction", "lru"],
        [
            "--kv-cache-manager",
            "toy",
            "--kv-cache-manager-config",
            json.dumps({"reuse": "newest", "trace": str(trace)}),
        ],
        ["--additional-config", '{"kv_cache_manager": "kvplug", "other": 1}'],
        ["--kv-cache-manager", "upstream"],
        ["--kv-cache-manager", "made", "--kv-cache-manager-config.reuse", "newest"],
    )
    assert [answer["manager"] for answer in answers] == [UPSTREAM, OURS, TOY, OURS, UPSTREAM, TOY]
    plain = answers[0]
    hashers = [UPSTREAM_HASHER, "vllm_kvplug.hashing", UPSTREAM_HASHER, "vllm_kvplug.hashing", UPSTREAM_HASHER]
    assert [answer["hasher"] for answer in answers] == [*hashers, UPSTREAM_HASHER]
    for answer in answers:
        assert answer["token_ids"] == plain["token_ids"]
        assert answer["num_cached_tokens"] == [48, 48]
        assert answer["get_scheduler_cls"] == "ABCMeta"  # vLLM's own class, no builder of ours
        assert {"kv_cache_manager", "kv_cache_manager_config"} & set(answer["metrics_info"]) == {"kv_cache_manager"}
    assert [answer["fields"] for answer in answers] == [
        [None, {}],
        ["kvplug", {"eviction": "lru"}],
        ["toy", {"reuse": "newest", "trace": str(trace)}],
        ["kvplug", {}],
        [None, {}],
        ["made", {"reuse": "newest"}],
    ]
    assert [answer["additional_config"] for answer in answers] == [{}, {}, {}, {"other": 1}, {}, {}]
    assert len({answer["compile_hash"] for answer in answers}) == 1
    assert [line.split()[0] for line in lines] == ["kvplug", "toy", "kvplug"]
    assert all(line.endswith(WAY) for line in lines)
    assert trace.stat().st_size > 0


def test_the_patch_alone(patched_env: dict[str, str], model: str, tmp_path: Path) -> None:
    """No code of ours runs in this process: names come from a call, an entry point, or are a class."""
    package = tmp_path / "toys-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[vllm.kv_cache_managers]\noffered = {TOY}\n")
    env = patched_env | {"VLLM_PLUGINS": "", "PYTHONPATH": f"{patched_env['PYTHONPATH']}{os.pathsep}{tmp_path}"}
    answers, lines = run(
        env,
        model,
        ["--kv-cache-manager", "toy", "--kv-cache-manager-config.reuse", "newest"],
        ["--kv-cache-manager", "offered"],
        ["--kv-cache-manager", TOY],
        ["--kv-cache-manager", OURS],
        ["--kv-cache-manager", "kvplug"],
    )
    assert [answer.get("manager") for answer in answers] == [TOY, TOY, TOY, OURS, None]
    assert [answer.get("num_cached_tokens") for answer in answers] == [[48, 48]] * 4 + [None]
    assert answers[0]["fields"] == ["toy", {"reuse": "newest"}]
    assert [answer["hasher"] for answer in answers[:4]] == [UPSTREAM_HASHER] * 3 + ["vllm_kvplug.hashing"]
    assert answers[4]["refused"] == (
        "ValueError: Unknown KV cache manager 'kvplug'. Expected one of ['made', 'offered', 'toy'], "
        "or a class as 'module:Class'."
    )
    assert lines == []
