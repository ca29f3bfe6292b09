"""The default model with two adapters and with salts in some requests, behind both managers: the same answers.

Their keys are what kvplug makes otherwise than upstream; where no name is used twice, the hits are the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.engine_run import ADAPTERS, run_both
from tests.serving.lora_adapter import write_adapter

pytestmark = pytest.mark.serving


def test_both_managers_give_the_same_answers(model_path: str, tmp_path: Path) -> None:
    for seed, name in enumerate(ADAPTERS):
        write_adapter(tmp_path / name, model_path, seed)
    upstream, kvplug = run_both(model_path, "keys", tmp_path)
    num_requests = len(kvplug["requests"])
    assert num_requests == 24

    assert kvplug["num_hit_tokens"] > 0
    assert kvplug["num_preemptions"] > 0
    assert len({request["text"] for request in kvplug["requests"]}) > num_requests // 2

    assert kvplug == upstream
    assert kvplug["usage_after"] == 0.0
    print(
        f"{num_requests} requests: {kvplug['num_preemptions']} preemptions, "
        f"{kvplug['num_hit_tokens']} of {kvplug['num_queried_tokens']} tokens hit, on both sides"
    )
