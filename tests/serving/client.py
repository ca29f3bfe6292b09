"""A small client of a vLLM server: completions with their cached tokens, and readings of `/metrics`."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Completion:
    """One answer: its text, why it ended, and how many prompt tokens came from the prefix cache."""

    text: str
    finish_reason: str | None
    num_prompt_tokens: int
    num_cached_tokens: int


class Client:
    """Blocking client of one server. Greedy throughout, so that texts can be compared."""

    def __init__(self, url: str, model: str) -> None:
        self.model = model
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False)

    def complete(self, prompt: str, max_tokens: int = 4, **extra: Any) -> Completion:
        """A completion, at once."""
        answer = self._http.post("/v1/completions", json=self._body(prompt, max_tokens, **extra))
        answer.raise_for_status()
        body = answer.json()
        choice, usage = body["choices"][0], body["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return Completion(
            choice["text"], choice["finish_reason"], usage["prompt_tokens"], details.get("cached_tokens") or 0
        )

    def stream(self, prompt: str, max_tokens: int, **extra: Any) -> Generator[dict[str, Any]]:
        """The server-sent events of a streamed completion. Closing the iterator closes the connection."""
        # The tokens so far come with every event: an event may have several.
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = self._body(prompt, max_tokens, stream=True, stream_options=options, **extra)
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def post(self, path: str, **params: Any) -> None:
        """POST without a body; anything but 2xx raises."""
        self._http.post(path, params=params).raise_for_status()

    def get(self, path: str) -> Any:
        """GET, JSON."""
        answer = self._http.get(path)
        answer.raise_for_status()
        return answer.json()

    def text(self, path: str) -> str:
        """GET, as it is."""
        answer = self._http.get(path)
        answer.raise_for_status()
        return answer.text

    def metric(self, name: str) -> float:
        """The sum of a metric over all its label sets."""
        found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", self._http.get("/metrics").text, re.MULTILINE)
        if not found:
            raise LookupError(f"/metrics has no {name}")
        return sum(map(float, found))

    def labels(self, name: str) -> dict[str, str]:
        """The labels of a metric that has one label set."""
        text = self._http.get("/metrics").text
        (labels,) = re.findall(rf"^{re.escape(name)}\{{(.*)\}} 1(?:\.0)?$", text, re.MULTILINE)
        return dict(re.findall(r'(\w+)="([^"]*)"', labels))

    def usage_after_a_step(self) -> float:
        """The pool's usage once all else has ended: the gauge moves only with a step, so a tiny request is sent."""
        self.complete("Hi", max_tokens=1)
        return self.metric("vllm:kv_cache_usage_perc")

    def _body(self, prompt: str, max_tokens: int, **extra: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **extra}


class RunningRequest:
    """A streamed request that has begun to generate; a thread reads it until it ends, or until the `with` does.

    What shows something only of a running request needs one that is far from its end, however slow the machine is:
    give it many tokens, see that `still_runs`, and let it be hung up.

    Attributes:
        text, num_tokens: what came until now.
        finish_reason: None until it has ended, and after it was hung up.
    """

    def __init__(self, client: Client, prompt: str, max_tokens: int) -> None:
        self.text, self.num_tokens, self.finish_reason = "", 0, None
        self._client, self._prompt, self._max_tokens = client, prompt, max_tokens
        self._num_before = self._num_served()
        self._hang_up = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> RunningRequest:
        self._thread.start()
        self.wait_for_tokens(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hang_up.set()
        self._thread.join()

    def wait_for_tokens(self, num_tokens: int) -> None:
        """Wait until so many have come; AssertionError if it ends before."""
        wait_until(lambda: self.num_tokens >= num_tokens or self._has_ended(), f"{num_tokens} tokens came", TIMEOUT_S)
        found = f"ended ({self.finish_reason}) after {self.num_tokens} tokens, expected at least {num_tokens}"
        assert self.num_tokens >= num_tokens, found

    def wait_for_end(self) -> None:
        """Wait for its last token."""
        wait_until(self._has_ended, "the request has ended", TIMEOUT_S)

    def still_runs(self) -> None:
        """AssertionError unless it goes on: more tokens come of it than the server has made since before it."""
        self.wait_for_tokens(int(self._num_served() - self._num_before) + 1)
        assert self.finish_reason is None, self.finish_reason

    def _has_ended(self) -> bool:
        return not self._thread.is_alive()

    def _num_served(self) -> float:
        return self._client.metric("vllm:generation_tokens_total")

    def _read(self) -> None:
        events = self._client.stream(self._prompt, self._max_tokens, ignore_eos=True)
        for event in events:
            for choice in event["choices"]:
                self.text += choice["text"]
                self.finish_reason = choice["finish_reason"]
            self.num_tokens = event["usage"]["completion_tokens"]
            if self._hang_up.is_set():
                break
        events.close()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not so after {timeout_s:.0f} s: {what}")
        time.sleep(0.05)
