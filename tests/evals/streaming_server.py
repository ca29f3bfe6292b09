"""A stand-in for the `vllm` command that streams completions and counts them on /metrics.

Called as `python streaming_server.py [OPTIONS] serve MODEL --host HOST --port PORT ...`. GET /requests answers what
was asked so far. Options:

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


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    lock: ClassVar[threading.Lock] = threading.Lock()
    asked: ClassVar[list[dict[str, Any]]] = []
    counts: ClassVar[dict[str, int]] = {}

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._answer("".join(f"vllm:{name} {value}\n" for name, value in self.counts.items()))
        elif self.path == "/v1/models":
            self._answer(json.dumps({"data": [{"id": "model", "max_model_len": int(option("--max-len", 2048))}]}))
        else:
            self._answer(json.dumps(self.asked) if self.path == "/requests" else "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            number = len(self.asked)
            self.asked.append(body)
        if number == option("--refuse-at", -1):
            return self._answer(json.dumps({"error": {"message": "this prompt is too long"}}), 400)
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


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
