"""`kvplug ab bench` as it is typed, on two real servers of the same manager: they do the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.evals.ended_runs import left_over, marked_environment
from vllm_kvplug.evals.results import Report

NUM_PAIRS = 5
NUM_REQUESTS = 8
# A quarter of the workload's 384 tokens: six blocks.
NUM_PREFIX_TOKENS = 96


@pytest.mark.serving
def test_upstream_against_itself_shows_no_difference(tmp_path: Path) -> None:
    out = tmp_path / "out"
    kvplug = Path(sys.executable).with_name("kvplug")
    arguments = ["--model", "tiny-qwen2", "--candidate", "upstream", "--workload", "shared-prefixes"]
    arguments += ["--pairs", str(NUM_PAIRS), "--num-requests", str(NUM_REQUESTS), "--length-scale", "0.25"]
    # One after the other: which of two that arrive together finds the other's blocks is a matter of time.
    arguments += ["--max-concurrency", "1", "--out", str(out)]
    environment = marked_environment()
    done = subprocess.run(
        [str(kvplug), "ab", "bench", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert left_over(environment) == []
    assert {"report.html", "report.md", "results.json", "bench.log", "runs"} <= {path.name for path in out.iterdir()}

    report = Report.read(out / "results.json")
    assert report.throughput is not None
    assert [side.label for side in report.sides] == ["upstream (1)", "upstream (2)"]
    assert [side.in_force for side in report.sides] == [{}, {}]
    # Each of four prefixes comes twice or more, and all but the first find it.
    hits = [[use.num_hit_tokens for use in pair] for pair in report.throughput.runs]
    assert all(first == second >= (NUM_REQUESTS - 4) * NUM_PREFIX_TOKENS for first, second in hits), hits
    by_name = {metric.name: metric.verdict for metric in report.throughput.metrics}
    assert by_name["hit tokens"] == "no difference shown"
    assert by_name["preemptions"] == "no difference shown: zero on both sides"
