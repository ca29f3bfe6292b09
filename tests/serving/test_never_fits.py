"""F18 through a real server with two front ends: what can never fit the pool is refused, or ends with an error.

The pool has 19 usable blocks of 16 tokens, 304 computed tokens; max_model_len is 1024.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.client import TIMEOUT_S, Client, wait_until
from tests.serving.conftest import SERVER_ENV
from vllm_kvplug.cli.model import ensure_model
from vllm_kvplug.cli.server_process import ServerProcess

pytestmark = pytest.mark.serving

NUM_FITTING_TOKENS = 304
ARGS = [
    "--kv-cache-manager=kvplug",
    "--served-model-name=tiny",
    "--enforce-eager",
    "--block-size=16",
    "--num-gpu-blocks-override=20",
    "--max-model-len=1024",
    "--max-num-seqs=16",
    "--api-server-count=2",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log_path = Path(tmp_path_factory.mktemp("server")) / "server.log"
    with ServerProcess(ensure_model("tiny-qwen2"), ARGS, SERVER_ENV, log_path) as process:
        process.wait_ready(timeout_s=300)
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Client:
    return Client(server.url, "tiny")


def prompt_of(num_tokens: int) -> list[int]:
    return [1000 + 7 * position % 5000 for position in range(num_tokens)]


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    """A request on a connection of its own: either front end may get it."""
    body = {"model": "tiny", "max_tokens": 4, **body}
    return httpx.post(server.url + path, json=body, timeout=TIMEOUT_S, trust_env=False)


def completion(server: ServerProcess, num_tokens: int, **extra: Any) -> httpx.Response:
    return post(server, "/v1/completions", prompt=prompt_of(num_tokens), ignore_eos=True, **extra)


def chat(server: ServerProcess, num_words: int, **extra: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "word " * num_words}]
    return post(server, "/v1/chat/completions", messages=messages, ignore_eos=True, **extra)


def assert_serves(client: Client) -> None:
    """A prompt that just fits is answered, and then no block is held."""
    found = client.complete(prompt_of(NUM_FITTING_TOKENS), max_tokens=1)  # type: ignore[arg-type]
    assert (found.num_prompt_tokens, found.finish_reason) == (NUM_FITTING_TOKENS, "length")
    assert client.usage_after_a_step() == 0.0


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_can_never_fit_is_a_bad_request(server: ServerProcess, client: Client, stream: bool) -> None:
    # A dozen connections: both front ends know.
    for num_tokens in (NUM_FITTING_TOKENS + 1, 1000) * 6:
        answer = completion(server, num_tokens, stream=stream)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        needed = f"prompt of {num_tokens} tokens needs {-(-num_tokens // 16)} KV cache blocks, and the engine has 19"
        assert needed in error["message"]
        assert f"Prompts that fit have at most {NUM_FITTING_TOKENS} tokens" in error["message"]
        assert error["type"] == "BadRequestError"
    assert_serves(client)


@pytest.mark.parametrize("stream", [False, True])
def test_so_is_a_long_chat(server: ServerProcess, client: Client, stream: bool) -> None:
    answer = chat(server, 400, stream=stream)
    assert answer.status_code == 400, answer.text
    assert "KV cache blocks, and the engine has 19" in answer.json()["error"]["message"]
    assert chat(server, 100, stream=stream).status_code == 200
    assert_serves(client)


def test_one_of_several_prompts_refuses_the_call_before_any_is_queued(server: ServerProcess, client: Client) -> None:
    before = client.metric("vllm:prompt_tokens_total")
    answer = post(server, "/v1/completions", prompt=[prompt_of(40), prompt_of(305), prompt_of(20)])
    assert answer.status_code == 400, answer.text
    assert client.metric("vllm:prompt_tokens_total") == before
    assert_serves(client)


def test_a_request_that_outgrows_the_pool_ends_with_an_error(server: ServerProcess, client: Client) -> None:
    with ThreadPoolExecutor(6) as pool:
        outgrowing = pool.submit(completion, server, 10, max_tokens=900)
        others = [pool.submit(completion, server, 20 + n, max_tokens=60) for n in range(5)]
        answer = outgrowing.result()
        assert answer.status_code == 500, answer.text
        assert answer.json()["error"]["type"] == "InternalServerError"
        for other in others:
            assert other.result().json()["usage"]["completion_tokens"] == 60
    assert_serves(client)


def test_so_does_a_chat_and_one_with_several_answers(server: ServerProcess, client: Client) -> None:
    for answer in (chat(server, 10, max_tokens=900), completion(server, 10, max_tokens=900, n=2)):
        assert answer.status_code == 500, answer.text
    assert_serves(client)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_gets_its_tokens_and_then_the_error(server: ServerProcess, client: Client, path: str) -> None:
    say = completion if path == "/v1/completions" else chat
    answer = say(server, 10, max_tokens=900, stream=True)
    assert answer.status_code == 200
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == 500
    assert all("error" not in json.loads(event) for event in events[:-2])
    if path == "/v1/completions":
        assert len(events) - 2 >= (NUM_FITTING_TOKENS - 10) // 2
    assert_serves(client)


def test_the_log_names_each_and_the_start_warned(server: ServerProcess, client: Client) -> None:
    before = server.read_log().count("ended with an error")
    assert completion(server, 10, max_tokens=900).status_code == 500
    wait_until(lambda: server.read_log().count("ended with an error") == before + 1, "the log has the line")
    line = [line for line in server.read_log().splitlines() if "ended with an error" in line][-1]
    assert "with 305 tokens it needs 20 KV cache blocks at one time, and the engine has 19 for all requests" in line
    (warning,) = [line for line in server.read_log().splitlines() if "does not fit the KV cache" in line]
    assert "max_model_len 1024 does not fit the KV cache: it needs 64 blocks, and there are 19" in warning
    assert client.metric("vllm:request_success_total") > 0
