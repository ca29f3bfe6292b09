"""A client for what `vllm bench serve` cannot send: given arrival times, think times, turns that hold earlier answers.

Times are taken as vLLM's client takes them (see run_result). Prompts are token ids, and answers come back as token ids,
so that the next turn begins with exactly the tokens that the server has already seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from vllm_kvplug.evals.errors import EvalError
from vllm_kvplug.evals.throughput.loads import Session, SessionLoad, Turn
from vllm_kvplug.evals.throughput.run_result import RunResult

_WATCH_S = 0.5
# Between two chunks of an answer; a request may wait long in the queue of an overloaded server.
_SILENCE_TIMEOUT_S = 1800.0


@dataclass
class _Sent:
    """One request: what was sent and when what came back."""

    num_input_tokens: int
    started_s: float = 0.0
    chunk_times_s: list[float] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)
    num_output_tokens: int = 0


class StreamClient:
    """Sends a load to one server.

    Args:
        label: whom errors are about.
        salt: of the prefix cache; runs with different salts share nothing.
        check: called twice a second; raises if there is no use in going on (the server died).
    """

    def __init__(self, url: str, served_name: str, label: str, salt: str, check: Callable[[], None]) -> None:
        self._url = f"{url}/v1/completions"
        self._served_name = served_name
        self._label = label
        self._salt = salt
        self._check = check

    def run(self, load: SessionLoad) -> RunResult:
        """Send all sessions and wait for the last answer.

        Raises:
            EvalError: a request failed; those under way are given up.
        """
        return asyncio.run(self._run(load))

    async def _run(self, load: SessionLoad) -> RunResult:
        sent: list[list[_Sent]] = [[] for _ in load.sessions]
        limit = asyncio.Semaphore(load.max_sessions or len(load.sessions))
        timeout = httpx.Timeout(_SILENCE_TIMEOUT_S, connect=60.0)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as client:
            run_started_s = time.perf_counter()

            async def serve(session: Session, requests: list[_Sent]) -> None:
                await _sleep_until(run_started_s + session.start_s)
                async with limit:
                    await self._session(client, session, requests)

            watch = asyncio.create_task(self._watch())
            tasks = [asyncio.create_task(serve(*pair)) for pair in zip(load.sessions, sent, strict=True)]
            try:
                await _all_or_first_error(tasks, watch)
            finally:
                for task in (watch, *tasks):
                    task.cancel()
                await asyncio.gather(watch, *tasks, return_exceptions=True)
            duration_s = time.perf_counter() - run_started_s
        return _result([request for requests in sent for request in requests], duration_s)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            self._check()

    async def _session(self, client: httpx.AsyncClient, session: Session, requests: list[_Sent]) -> None:
        said: list[int] = []
        for turn in session.turns:
            if turn.wait_s:
                await asyncio.sleep(turn.wait_s)
            said.extend(turn.token_ids)
            request = _Sent(len(said))
            requests.append(request)
            await self._send(client, said, turn, request, wants_ids=len(session.turns) > 1)
            said.extend(request.answer_ids)

    async def _send(
        self, client: httpx.AsyncClient, token_ids: list[int], turn: Turn, request: _Sent, wants_ids: bool
    ) -> None:
        body = {
            "model": self._served_name,
            "prompt": token_ids,
            "max_tokens": turn.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": wants_ids,
            "cache_salt": self._salt,
        }
        request.started_s = time.perf_counter()
        try:
            async with client.stream("POST", self._url, json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise EvalError(f"{self._label}: expected HTTP 200, found {response.status_code}: {text[:300]}")
                await self._receive(_events(response), request)
        except httpx.HTTPError as error:
            raise EvalError(f"{self._label}: a request failed: {str(error) or type(error).__name__}") from None
        if wants_ids and len(request.answer_ids) != request.num_output_tokens:
            raise EvalError(
                f"{self._label}: expected the ids of {request.num_output_tokens} tokens (return_token_ids), found "
                f"{len(request.answer_ids)}"
            )

    async def _receive(self, events: AsyncIterator[dict[str, Any]], request: _Sent) -> None:
        """Note when each chunk came; a stream that ends without its usage was broken off."""
        async for event in events:
            if event.get("error"):
                raise EvalError(f"{self._label}: a request failed: {str(event['error'])[:300]}")
            if event.get("choices"):
                request.chunk_times_s.append(time.perf_counter())
                request.answer_ids.extend(event["choices"][0].get("token_ids") or ())
            elif event.get("usage"):
                request.num_output_tokens = event["usage"]["completion_tokens"]
        if not request.chunk_times_s or not request.num_output_tokens:
            raise EvalError(f"{self._label}: expected a streamed answer with its usage, found one that was broken off")


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each `data:` line up to [DONE]."""
    async for line in response.aiter_lines():
        name, _, data = line.partition(":")
        if name == "data" and data.strip() != "[DONE]":
            try:
                event = json.loads(data)
            except ValueError:
                raise EvalError(f"expected JSON in a streamed answer, found {data.strip()[:200]!r}") from None
            yield event if isinstance(event, dict) else {"error": event}


async def _sleep_until(moment_s: float) -> None:
    delay_s = moment_s - time.perf_counter()
    if delay_s > 0:
        await asyncio.sleep(delay_s)


async def _all_or_first_error(tasks: list[asyncio.Task[None]], watch: asyncio.Task[None]) -> None:
    """Wait for all tasks; an error of one of them, or of the watch, is raised at once."""
    waiting: set[asyncio.Task[None]] = {*tasks}
    while waiting:
        done, _ = await asyncio.wait({*waiting, watch}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            with contextlib.suppress(asyncio.CancelledError):
                task.result()
        waiting -= done


def _result(requests: list[_Sent], duration_s: float) -> RunResult:
    return RunResult(
        duration_s=duration_s,
        input_lens=[request.num_input_tokens for request in requests],
        output_lens=[request.num_output_tokens for request in requests],
        ttfts_s=[request.chunk_times_s[0] - request.started_s for request in requests],
        itls_s=[
            [later - earlier for earlier, later in zip(r.chunk_times_s, r.chunk_times_s[1:], strict=False)]
            for r in requests
        ],
        start_times_s=[request.started_s for request in requests],
        errors=["" for _ in requests],
    )
