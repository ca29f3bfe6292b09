"""Two comparisons on real servers: one request at a time gives the same bytes, and mixed-up blocks lose accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_kvplug.cli.model import ensure_model
from vllm_kvplug.evals.accuracy.measure import measure
from vllm_kvplug.evals.accuracy.options import AccuracyOptions
from vllm_kvplug.evals.results import UNTESTED_STATUS
from vllm_kvplug.evals.sides import choices

pytestmark = pytest.mark.serving

MIXED_UP = "tests.evals.mixed_up_manager:MixedUpManager"
# Fewer blocks than the eight prefixes of counted rows have: about 15 each.
SMALL_POOL = ["--max-model-len", "512", "--num-gpu-blocks-override", "88"]


def responses(folder: Path) -> list[list[Any]]:
    """By side, all that lm-eval was answered, in order."""
    found = []
    for path in sorted(folder.glob("server-*-lm_eval.json")):
        samples = json.loads(path.read_text())["samples"]
        found.append([entry["resps"] for task in samples.values() for entry in task])
    return found


def test_one_request_at_a_time_gives_the_same_bytes(tmp_path: Path) -> None:
    report = measure(
        AccuracyOptions(
            # Random weights: what it says means nothing, and is soon said.
            model=ensure_model("tiny-qwen2"),
            folder=tmp_path,
            tasks=["kvplug_counted_rows"],
            limit=32,
            num_concurrent=1,
            server_args=SMALL_POOL,
            choices=choices(candidate="kvplug", candidate_config='{"eviction": "lru"}'),
        )
    )
    first, second = responses(tmp_path)
    assert first == second
    assert len(first) == 32
    assert report.accuracy is not None
    assert report.accuracy.differing == []
    assert report.sides[1].in_force["eviction"] == "lru"
    upstream, kvplug = report.cache
    # Each prefix comes four times: not all of them can be there again in so small a pool.
    assert 0 < upstream.num_hit_tokens < upstream.num_prompt_tokens * 0.6
    assert kvplug.num_hit_tokens == upstream.num_hit_tokens
    # One request at a time preempts nobody, and the run says so.
    assert (report.exit_status, upstream.num_preemptions, kvplug.num_preemptions) == (UNTESTED_STATUS, 0, 0)
    assert any("does not test preemption" in sentence for sentence in report.verdict)


def test_mixed_up_blocks_lose_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    report = measure(
        AccuracyOptions(
            model=ensure_model("default"),
            folder=tmp_path,
            tasks=["kvplug_counted_rows"],
            limit=40,
            num_concurrent=8,
            # All prefixes stay: most requests hit, and every second of those is answered with foreign blocks.
            # bfloat16 takes a CPU without instructions for it about four times as long.
            server_args=["--dtype", "float32", "--max-model-len", "512", "--num-gpu-blocks-override", "300"],
            choices=choices(candidate=MIXED_UP),
        )
    )
    assert report.accuracy is not None
    (score,) = report.accuracy.scores
    assert score.values[0] > 0.7
    assert score.difference < -0.2
    assert report.exit_status == 1
    assert report.verdict[0].startswith(f"{MIXED_UP} loses accuracy on kvplug_counted_rows")
    assert len(report.accuracy.differing) >= 9
