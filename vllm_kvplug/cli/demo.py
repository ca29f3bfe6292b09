"""`kvplug demo`: a real server with kvplug in force, asked two questions that share a long prefix."""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from vllm_kvplug.cli import console, server_metrics
from vllm_kvplug.cli.models.catalogue import DEFAULT_NAME
from vllm_kvplug.cli.models.store import ensure_model
from vllm_kvplug.cli.server_process import ServerError, ServerProcess
from vllm_kvplug.errors import KVPlugError

MANAGER = "kvplug"
SERVED_NAME = "demo"
BLOCK_SIZE_TOKENS = 16
SERVER_ARGS = (
    *("--kv-cache-manager", MANAGER),
    # With torch.compile the CPU build's bfloat16 gives wrong text.
    "--enforce-eager",
    *("--block-size", str(BLOCK_SIZE_TOKENS)),
    *("--max-model-len", "2048"),
    *("--served-model-name", SERVED_NAME),
    "--enable-prompt-tokens-details",
)
REQUEST_TIMEOUT_S = 120.0

# The prefix that both requests share: more than 200 tokens, so more than ten full blocks.
SYSTEM_PROMPT = (
    "You are a friendly and careful assistant at the information desk of a large railway station. Travellers from "
    "many countries ask you short questions about places, history and daily life. Answer each question in one "
    "short sentence, in plain English, and name the thing that was asked for first. Do not invent facts: when you "
    "do not know something, say so. Do not repeat the question. Do not give advice that nobody asked for, and do "
    "not talk about yourself. Names of cities, rivers and mountains are written as they are in English. Distances "
    "are given in kilometres, temperatures in degrees Celsius and prices in euros. If a traveller is in a hurry, "
    "be even shorter. If a traveller asks about a train, tell them to look at the departure board in the main "
    "hall, because the times change during the day. If somebody has lost something, send them to the office "
    "beside platform one, which is open from six in the morning until ten in the evening. Always stay polite, "
    "also when a question is asked twice."
)
QUESTIONS = ("What is the capital of France?", "Which river flows through Paris?")


class DemoError(KVPlugError, RuntimeError):
    """The demonstration failed: what was expected, what was found, and the server's last log lines."""


@dataclass(frozen=True)
class Answer:
    """One answer of the server, with the token counts that it reports."""

    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    duration_s: float


def command(
    model: Annotated[
        str, typer.Option(help="A model of `kvplug model list`, a hub name, or a local path.")
    ] = DEFAULT_NAME,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the server until Ctrl-C and print a curl line.")] = False,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port to listen on (default: a free one).")] = None,
) -> None:
    """Serve MODEL with `--kv-cache-manager kvplug` and send two requests that share a long prefix."""
    run(model, keep=keep, port=port)


def run(
    model: str = DEFAULT_NAME,
    *,
    keep: bool = False,
    port: int | None = None,
    server_command: Sequence[str] | None = None,
    ready_timeout_s: float = console.READY_TIMEOUT_S,
) -> None:
    """The demonstration, told on standard output and its progress on standard error.

    Raises:
        KVPlugError: anything that failed. No process of the server is left then.
    """
    with console.signals_as_interrupts(), tempfile.TemporaryDirectory(prefix="kvplug-demo-") as folder:
        console.say(f"model      {model}")
        path = ensure_model(model, report=console.say)
        log_path = Path(folder) / "server.log"
        with ServerProcess(path, SERVER_ARGS, None, log_path, port=port, command=server_command) as server:
            console.say(f"starting   {server}")
            seconds = console.wait_ready(server, ready_timeout_s)
            print(f"ready      {server.url} after {seconds:.0f} s", flush=True)
            _show_requests(server)
            if keep:
                _keep(server)
            console.say("stopping   the server")
            _stop(server)


def _show_requests(server: ServerProcess) -> None:
    """Ask which manager serves, then both questions; the second must find the shared prefix in the cache."""
    try:
        labels = manager_in_force(server.url)
        told = ", ".join(f"{name} {value}" for name, value in labels.items() if name not in ("manager", "version"))
        print(f"served by  {labels['manager']} {labels.get('version', '')} ({told})", flush=True)
        answers = []
        for question in QUESTIONS:
            answer = ask(server.url, question)
            answers.append(answer)
            print(f"question   {question}\nanswer     {answer.text}", flush=True)
            counts = f"{answer.num_prompt_tokens} prompt tokens, {answer.num_cached_tokens} of them cached"
            print(f"           {counts}, {answer.duration_s:.1f} s", flush=True)
        if answers[-1].num_cached_tokens < BLOCK_SIZE_TOKENS:
            raise DemoError(
                "the second request shares a long prefix with the first: expected cached tokens, found none"
            )
    except (httpx.HTTPError, DemoError) as error:
        message = str(error)
        if isinstance(error, httpx.HTTPError):
            message = f"a request failed: {str(error) or type(error).__name__}"
            # A server that dies closes its connections a moment before it has an exit status.
            with contextlib.suppress(ServerError):
                server.wait(2.0)
        if server.returncode is not None:
            message = f"the server ended with exit status {server.returncode} during the requests ({message})"
        raise DemoError(server.with_log_tail(message)) from None


def manager_in_force(url: str) -> dict[str, str]:
    """The labels of `kvplug_info` on the running server's /metrics, among them `manager` and `version`.

    Raises:
        DemoError: there is no such metric (so vLLM's own manager serves), or it names another manager.
    """
    try:
        labels = server_metrics.manager_in_force(server_metrics.read_samples(url))
    except server_metrics.MetricsError as error:
        raise DemoError(str(error)) from None
    if not labels:
        raise DemoError("expected kvplug_info on the server's /metrics, found none: vLLM's own manager serves")
    if labels.get("manager") != MANAGER:
        raise DemoError(f"expected manager {MANAGER} in force, found {labels.get('manager', '?')}")
    return labels


def request_body(question: str) -> dict[str, Any]:
    """The chat request for one question behind the shared prefix."""
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    return {"model": SERVED_NAME, "messages": messages, "max_tokens": 48, "temperature": 0}


def ask(url: str, question: str) -> Answer:
    """Send one chat request and wait for its answer."""
    started = time.monotonic()
    response = httpx.post(
        f"{url}/v1/chat/completions", json=request_body(question), timeout=REQUEST_TIMEOUT_S, trust_env=False
    )
    try:
        body = _checked(response).json()
        usage = body["usage"]
        return Answer(
            text=body["choices"][0]["message"]["content"].strip(),
            num_prompt_tokens=usage["prompt_tokens"],
            num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            duration_s=time.monotonic() - started,
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        raise DemoError(f"expected a chat completion, found {_shortened(response.text)}") from None


def _checked(response: httpx.Response) -> httpx.Response:
    if response.status_code != 200:
        where = f"{response.request.method} {response.request.url.path}"
        raise DemoError(f"{where}: expected HTTP 200, found {response.status_code}: {_shortened(response.text)}")
    return response


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:200] + "..."


def _keep(server: ServerProcess) -> None:
    """Leave the server up until Ctrl-C; that it ends by itself is a failure."""
    body = json.dumps(request_body(QUESTIONS[0]) | {"messages": [{"role": "user", "content": QUESTIONS[0]}]})
    print(f"try it     curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    print("keeping the server up; Ctrl-C stops it", flush=True)
    try:
        while server.returncode is None:
            time.sleep(0.5)
    except KeyboardInterrupt:
        return
    raise DemoError(server.with_log_tail(f"the server ended by itself with exit status {server.returncode}"))


def _stop(server: ServerProcess) -> None:
    status = server.stop()
    if status not in (0, -signal.SIGTERM):
        raise DemoError(server.with_log_tail(f"the server did not end cleanly: exit status {status}"))
    print(f"stopped    the server, cleanly (exit status {status})", flush=True)
