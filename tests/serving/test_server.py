"""A real server with kvplug: streaming, many clients, aborts, resets, pauses, sleep.

Effects are judged by the next request's cached tokens and by the pool's usage, not by status 200.
"""

from __future__ import annotations

import itertools
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import vllm_kvplug
from tests.serving.client import Client, RunningRequest, wait_until
from tests.serving.conftest import NUM_BLOCKS, SERVER_ARGS, SERVER_ENV
from vllm_kvplug.cli.server_process import ServerProcess

pytestmark = pytest.mark.serving

COUNT = "Count: one, two, three,"
# Nearly all that max_model_len leaves: no machine comes to the end of it during a test.
NUM_LONG_TOKENS = 1900

_numbers = itertools.count(1000)


def fresh_prompt() -> str:
    """A prompt of about 200 tokens that no test has sent before: its first words are new."""
    return f"Report number {next(_numbers)}. " + "The quick brown fox jumps over the lazy dog. " * 18


def cached_tokens(client: Client, prompt: str) -> int:
    return client.complete(prompt, max_tokens=1).num_cached_tokens


def wait_until_idle(client: Client) -> None:
    """Wait for the end of those that were hung up."""
    wait_until(lambda: client.metric("vllm:num_requests_running") == 0, "no request runs")


def warm(client: Client) -> str:
    """A prompt that is in the prefix cache."""
    prompt = fresh_prompt()
    client.complete(prompt, max_tokens=1)
    assert cached_tokens(client, prompt) > 100
    return prompt


def running_request(client: Client, max_tokens: int = NUM_LONG_TOKENS) -> RunningRequest:
    """A request that has begun to generate, by default one that is hung up long before its end."""
    return RunningRequest(client, COUNT, max_tokens)


def test_the_server_says_what_is_in_force(client: Client) -> None:
    labels = client.labels("kvplug_info")
    assert labels["manager"] == "kvplug"
    assert labels["version"] == vllm_kvplug.__version__
    assert (labels["eviction"], labels["groups"], labels["num_blocks"]) == ("lru", "full", str(NUM_BLOCKS))


def test_the_log_says_it_once(server: ServerProcess, client: Client) -> None:
    (line,) = [line for line in server.read_log().splitlines() if "KV cache manager in force" in line]
    for expected in (f"kvplug {vllm_kvplug.__version__}", "lru", "full", f"{NUM_BLOCKS} blocks"):
        assert expected in line


def test_streaming_gives_the_same_text_and_the_cached_tokens(client: Client) -> None:
    prompt = warm(client)
    whole = client.complete(prompt, max_tokens=64, ignore_eos=True)
    events = list(client.stream(prompt, max_tokens=64, ignore_eos=True))
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == whole.text
    assert len(events) > 10
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == whole.num_cached_tokens > 100


def test_many_clients_at_once_share_a_prefix_and_leave_the_pool_empty(client: Client) -> None:
    prefix = warm(client)
    prompts = [f"{prefix} Question {number}:" for number in range(32)]
    alone = {prompt: client.complete(prompt, max_tokens=16) for prompt in prompts[:4]}
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda prompt: client.complete(prompt, max_tokens=16), prompts))
    assert all(answer.num_cached_tokens >= 160 for answer in answers)
    assert all(answer.finish_reason in ("length", "stop") for answer in answers)
    # Batches differ, so rounding may; most greedy texts are still those of the request alone.
    same = sum(answers[number].text == alone[prompt].text for number, prompt in enumerate(alone))
    assert same >= 3, (answers[:4], alone)
    assert client.usage_after_a_step() == 0.0


def test_aborted_requests_give_their_blocks_back(client: Client) -> None:
    def start_and_hang_up(number: int) -> None:
        stream = client.stream(f"{fresh_prompt()} {number}", max_tokens=800, ignore_eos=True)
        for _ in range(1 + number % 7):
            next(stream)
        stream.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(start_and_hang_up, range(20)))
    wait_until_idle(client)
    assert client.usage_after_a_step() == 0.0
    assert client.complete("The capital of France is", max_tokens=4).text.strip().startswith("Paris")


def test_reset_of_an_idle_server_drops_the_cache(client: Client) -> None:
    prompt = warm(client)
    client.post("/reset_prefix_cache")
    assert cached_tokens(client, prompt) == 0
    assert cached_tokens(client, prompt) > 100


def test_reset_while_a_request_runs_is_refused_and_drops_nothing(client: Client) -> None:
    prompt = warm(client)
    with running_request(client) as request:
        client.post("/reset_prefix_cache")
        assert cached_tokens(client, prompt) > 100
        request.still_runs()
    wait_until_idle(client)


def test_reset_with_running_requests_drops_the_cache_and_they_go_on(client: Client) -> None:
    reference = client.complete(COUNT, 80, ignore_eos=True)
    assert len(reference.text) > 200
    prompt = warm(client)
    preemptions = client.metric("vllm:num_preemptions_total")
    with running_request(client) as request:
        client.post("/reset_prefix_cache", reset_running_requests="true")
        assert cached_tokens(client, prompt) == 0
        request.still_runs()
        request.wait_for_tokens(80)
    assert client.metric("vllm:num_preemptions_total") > preemptions
    assert request.text[:200] == reference.text[:200]
    wait_until_idle(client)
    assert client.usage_after_a_step() == 0.0


def test_pause_abort_ends_requests_and_clears_the_cache(client: Client) -> None:
    prompt = warm(client)
    with running_request(client) as request:
        client.post("/pause", mode="abort")
        assert client.get("/is_paused") == {"is_paused": True}
        request.wait_for_end()
    assert request.finish_reason == "abort"
    client.post("/resume")
    assert cached_tokens(client, prompt) == 0
    assert client.usage_after_a_step() == 0.0


def test_pause_wait_lets_requests_end_first(client: Client) -> None:
    prompt = warm(client)
    with running_request(client, max_tokens=100) as request:
        assert request.num_tokens < 100
        client.post("/pause", mode="wait")
        request.wait_for_end()
    assert (request.finish_reason, request.num_tokens) == ("length", 100)
    client.post("/resume")
    assert cached_tokens(client, prompt) == 0


def test_pause_keep_freezes_requests_and_they_go_on(client: Client) -> None:
    reference = client.complete(COUNT, 60, ignore_eos=True)
    prompt = warm(client)
    with running_request(client) as request:
        client.post("/pause", mode="keep", clear_cache="false")
        frozen = client.metric("vllm:generation_tokens_total")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(cached_tokens, client, prompt)
            time.sleep(1.5)
            assert not waiting.done()
            assert client.metric("vllm:generation_tokens_total") == frozen
            client.post("/resume")
            assert waiting.result() > 100
        request.still_runs()
        request.wait_for_tokens(60)
    assert request.text.startswith(reference.text)
    wait_until_idle(client)
    assert client.usage_after_a_step() == 0.0


def test_sleep_drops_the_cache_and_wake_up_serves_again(client: Client) -> None:
    prompt = warm(client)
    client.post("/sleep", level=1)
    assert client.get("/is_sleeping") == {"is_sleeping": True}
    client.post("/wake_up")
    wait_until(lambda: client.get("/is_sleeping") == {"is_sleeping": False}, "the server is awake")
    assert cached_tokens(client, prompt) == 0
    assert client.complete("The capital of France is", max_tokens=4).text.strip().startswith("Paris")


def test_sigterm_ends_every_process_cleanly(server: ServerProcess, client: Client) -> None:
    """Last in this module: it stops the server."""
    assert client.usage_after_a_step() == 0.0
    assert client.metric("kvplug_invariant_findings") == 0.0
    main_process = psutil.Process(server.pid)
    processes = [main_process, *main_process.children(recursive=True)]
    main_process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []
    assert server.wait(timeout_s=5) in (0, -signal.SIGTERM)
    log = Path(server.log_path).read_text()
    assert "Traceback" not in log
    assert "KV cache invariant broken" not in log


def test_a_pool_too_small_for_all_preempts_and_evicts(model_path: str, tmp_path: Path) -> None:
    args = [arg.replace(f"override={NUM_BLOCKS}", "override=50") for arg in SERVER_ARGS]
    args[args.index("--max-model-len=2048")] = "--max-model-len=900"
    with ServerProcess(model_path, args, SERVER_ENV, tmp_path / "server.log") as process:
        process.wait_ready(timeout_s=300)
        client = Client(process.url, "default")
        prefix = fresh_prompt()
        with ThreadPoolExecutor(16) as pool:
            answers = list(
                pool.map(lambda n: client.complete(f"{prefix} {n}", max_tokens=64, ignore_eos=True), range(16))
            )
        assert [answer.finish_reason for answer in answers] == ["length"] * 16
        assert client.metric("vllm:num_preemptions_total") > 0
        assert client.metric("vllm:prompt_tokens_cached_total") > 0
        assert client.usage_after_a_step() == 0.0
        assert "KV cache invariant broken" not in (tmp_path / "server.log").read_text()
