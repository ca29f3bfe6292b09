"""F5 and F6 through a running engine: two adapters of one name, and a salt that is an adapter's name.

Upstream serves one adapter's cache to the other beside it, which shows that the test could tell.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from vllm_kvplug.cli.model import ensure_model

pytestmark = pytest.mark.serving


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By manager: each request's cached tokens and output."""
    model = ensure_model("tiny-qwen2")
    found = {}
    for manager in ("upstream", "kvplug"):
        output = tmp_path_factory.mktemp(manager) / "answers.json"
        command = [sys.executable, "-m", "tests.serving.keys_run", manager, model, str(output)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        found[manager] = json.loads(output.read_text())
    return found


def test_the_engine_hashes_with_its_managers_hasher(answers: dict[str, dict[str, Any]]) -> None:
    assert answers["upstream"]["hasher_module"] == "vllm.v1.core.kv_cache_utils"
    assert answers["kvplug"]["hasher_module"] == "vllm_kvplug.hashing"
    assert all(answer["name_is_vllms"] for answer in answers.values())


def cached(answers: dict[str, Any], *names: str) -> list[int]:
    return [answers[name]["num_cached_tokens"] for name in names]


def test_alone_both_managers_answer_alike(answers: dict[str, dict[str, Any]]) -> None:
    names = [name for name in answers["kvplug"] if name.endswith(" alone")]
    assert len(names) == 4
    for name in names:
        assert answers["kvplug"][name] == answers["upstream"][name]
        assert answers["kvplug"][name]["num_cached_tokens"] == 0
    outputs = {tuple(answers["kvplug"][name]["token_ids"]) for name in names}
    assert len(outputs) == 4  # adapters and prompts change what is said, or equal outputs would show nothing


def test_f6_30931_two_adapters_of_one_name(answers: dict[str, dict[str, Any]]) -> None:
    assert cached(answers["upstream"], "second adapter") == [48]
    assert (
        answers["upstream"]["second adapter"]["token_ids"] != answers["upstream"]["second adapter alone"]["token_ids"]
    )

    kvplug = answers["kvplug"]
    assert kvplug["second adapter"] == kvplug["second adapter alone"]
    assert cached(kvplug, "second adapter again", "first adapter again") == [48, 48]
    assert kvplug["second adapter again"]["token_ids"] == kvplug["second adapter alone"]["token_ids"]
    assert kvplug["first adapter again"]["token_ids"] == kvplug["first adapter alone"]["token_ids"]


def test_f5_44701_a_salt_that_is_an_adapters_name(answers: dict[str, dict[str, Any]]) -> None:
    upstream, kvplug = answers["upstream"], answers["kvplug"]
    assert cached(upstream, "salt", "salt again", "other salt") == [16, 48, 0]
    assert upstream["salt"]["token_ids"] != upstream["salt alone"]["token_ids"]

    assert kvplug["salt"] == kvplug["salt alone"]
    assert cached(kvplug, "salt again", "other salt") == [48, 0]
    assert kvplug["salt again"]["token_ids"] == kvplug["salt alone"]["token_ids"]
