"""A real server with a shadow: vLLM's manager serves, kvplug follows, nothing diverges under preemption and aborts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serving.client import Client, wait_until
from tests.serving.conftest import SERVER_ENV
from vllm_kvplug.cli.model import ensure_model
from vllm_kvplug.cli.server_process import ServerProcess
from vllm_kvplug.trace.reader import TraceReader

pytestmark = pytest.mark.serving

NUM_REQUESTS = 16
ARGS = [
    "--served-model-name=default",
    "--enforce-eager",
    "--block-size=16",
    "--num-gpu-blocks-override=40",
    "--max-model-len=600",
    "--max-num-seqs=16",
    "--kv-cache-manager=shadow",
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shadow") / "bundle"


@pytest.fixture(scope="module")
def shadow_server(bundle: Path) -> Iterator[ServerProcess]:
    args = [*ARGS, f"--kv-cache-manager-config={json.dumps({'bundle': str(bundle)})}"]
    with ServerProcess(ensure_model("tiny-qwen2"), args, SERVER_ENV, bundle.parent / "server.log") as process:
        process.wait_ready(timeout_s=300)
        yield process


def test_upstream_serves_and_kvplug_decides_alike(shadow_server: ServerProcess, bundle: Path) -> None:
    client = Client(shadow_server.url, "default")
    labels = client.labels("kvplug_shadow_info")
    assert labels == {"serving": "upstream", "follower": "kvplug", "level": "exact"}
    assert client.labels("kvplug_info")["manager"] == "shadow"
    prefix = "The quick brown fox jumps over the lazy dog. " * 15  # 150 tokens and some

    def ask(number: int) -> None:
        if number % 5 == 4:  # hang up
            stream = client.stream(f"{prefix} {number}", max_tokens=100, ignore_eos=True)
            for _ in range(3):
                next(stream)
            stream.close()
        else:
            assert client.complete(f"{prefix} {number}", max_tokens=50, ignore_eos=True).finish_reason == "length"

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        list(pool.map(ask, range(NUM_REQUESTS)))
    client.post("/reset_prefix_cache")
    client.complete(prefix, max_tokens=2)
    assert client.metric("vllm:num_preemptions_total") > 0
    assert client.metric("vllm:prompt_tokens_cached_total") > 0

    num_requests = NUM_REQUESTS + 1
    wait_until(
        lambda: client.metric("kvplug_shadow_requests") >= num_requests, "the front end has asked the engine again"
    )
    text = client.text("/metrics")
    assert f'kvplug_shadow_requests{{outcome="followed"}} {num_requests}.0' in text
    assert 'kvplug_shadow_requests{outcome="diverged"} 0.0' in text
    assert 'kvplug_shadow_engines{compares="exact"} 1.0' in text
    assert 'kvplug_shadow_calls{outcome="skipped"} 0.0' in text
    assert "kvplug_shadow_diverged_requests{" not in text
    assert client.metric("kvplug_shadow_overhead_seconds") > 0

    num_compared = client.metric("kvplug_shadow_calls")
    assert num_compared > 0
    wait_until(lambda: read_divergences(bundle)["num_calls_compared"] >= num_compared, "the counts are written")
    # The last calls since are written as the server ends.
    shadow_server.stop()
    written = read_divergences(bundle)
    assert (written["divergences"], written["compares"], written["num_requests_diverged"]) == ([], "exact", 0)
    num_operations = sum(1 for _ in TraceReader(bundle / "trace.jsonl.gz"))
    assert written["num_calls_compared"] == num_operations >= num_compared
    assert (written["trace"]["last_operation"], written["trace"]["stopped"]) == (num_operations - 1, None)
    assert "shadow: divergence" not in shadow_server.read_log()


def read_divergences(bundle: Path) -> dict[str, Any]:
    return json.loads((bundle / "divergences.json").read_text())
