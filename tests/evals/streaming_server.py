"""A stand-in for the `vllm` command that answers without a model and counts it on /metrics.

Called as `python streaming_server.py [OPTIONS] serve MODEL --host HOST --port PORT ...`. GET /requests answers what
was asked so far. POST /count {"name": value, ...} sets counters, POST /fail makes the next look at /metrics fail, POST
/die ends it with status 7. It wants the key of VLLM_API_KEY, as vLLM does. Options:

    --dies                    ends with an error instead of serving

    --first-s S, --next-s S   waits before the first chunk and before each further one
    --die-at N                exits with status 7 in the middle of answer N (from 0)
    --refuse-at N             answers request N with HTTP 400
    --no-ids                  leaves the token ids out of the answers
    --max-len N               what /v1/models says (default 2048)
"""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
import time
from typing import Any, ClassVar


def option(name: str, default: float) -> float:
    return float(sys.argv[sys.argv.index(name) + 1]) if name in sys.argv else default


class QuietHandler(http.server.BaseHTTPRequestHandler):
    """Answers in one piece, and says nothing on the terminal."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def answer_models(self, max_model_len: int) -> None:
        self.answer(json.dumps({"data": [{"id": "model", "max_model_len": max_model_len}]}))

    def answer_metrics(self, counts: dict[str, Any], further: str = "") -> None:
        self.answer("".join(f"vllm:{name} {value}\n" for name, value in counts.items()) + further)

    def answer_chat(self, text: str) -> None:
        self.answer(json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}))

    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return found


class Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    lock: ClassVar[threading.Lock] = threading.Lock()
    asked: ClassVar[list[dict[str, Any]]] = []
    counts: ClassVar[dict[str, Any]] = {}
    num_to_fail: ClassVar[list[int]] = [0]

    def _refused(self) -> bool:
        key = os.environ.get("VLLM_API_KEY")
        if key and self.path.startswith("/v1") and self.headers["Authorization"] != f"Bearer {key}":
            self.answer(json.dumps({"error": "Unauthorized"}), 401)
            return True
        return False

    def do_GET(self) -> None:
        if self._refused():
            return
        if self.path == "/metrics":
            if self.num_to_fail[0]:
                self.num_to_fail[0] -= 1
                return self.answer("busy", 503)
            self.answer_metrics(self.counts, in_force())
        elif self.path == "/v1/models":
            self.answer_models(int(option("--max-len", 2048)))
        else:
            self.answer(json.dumps(self.asked) if self.path == "/requests" else "")

    def do_POST(self) -> None:
        if self.path == "/die":
            print("ERROR no more blocks", flush=True)
            os._exit(7)
        body = self.body()
        if self.path == "/count":
            self.counts.update(body)
            return self.answer("")
        if self.path == "/fail":
            self.num_to_fail[0] = body["num_times"]
            return self.answer("")
        if self._refused():
            return
        print("asked", self.path, flush=True)
        with self.lock:
            number = len(self.asked)
            self.asked.append(body)
        if self.path == "/v1/chat/completions":
            return self._chat(number)
        if number == option("--refuse-at", -1):
            return self.answer(json.dumps({"error": {"message": "this prompt is too long"}}), 400)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for index in range(body["max_tokens"]):
            time.sleep(option("--next-s", 0) if index else option("--first-s", 0))
            if number == option("--die-at", -1) and index == 1:
                print("ERROR the engine is dead", flush=True)
                os._exit(7)
            ids = [] if "--no-ids" in sys.argv or not body.get("return_token_ids") else [1000 * number + index]
            self._event({"choices": [{"index": 0, "text": " word", "token_ids": ids}]})
        # Before the client knows of the end, as it may look at once.
        self._count(body)
        self._event({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chat(self, number: int) -> None:
        time.sleep(option("--first-s", 0))
        if number == option("--die-at", -1):
            print("ERROR the engine is dead", flush=True)
            os._exit(7)
        self.answer_chat(" word")

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(event)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _count(self, body: dict[str, Any]) -> None:
        prompt = body["prompt"]
        num_prompt_tokens = len(prompt.split() if isinstance(prompt, str) else prompt)
        with self.lock:
            for name, count in (
                ("request_success_total", 1),
                ("request_prompt_tokens_sum", num_prompt_tokens),
                ("request_prefill_kv_computed_tokens_sum", num_prompt_tokens // 2),
                ("request_generation_tokens_sum", body["max_tokens"]),
            ):
                self.counts[name] = self.counts.get(name, 0) + count


def in_force() -> str:
    """kvplug_info for the manager on the command line; for false-X it says X."""
    if "--kv-cache-manager" not in sys.argv:
        return ""
    manager = sys.argv[sys.argv.index("--kv-cache-manager") + 1].removeprefix("false-")
    return f'kvplug_info{{manager="{manager}",num_blocks="9"}} 1.0\n'


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    if "--dies" in sys.argv:
        sys.exit("ERROR the model has no config.json")
    Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
