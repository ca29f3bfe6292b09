"""A stand-in for the `vllm` command: answers what the demonstration asks, or misbehaves as its first argument says.

Called as `python fake_vllm.py BEHAVIOUR serve MODEL --host HOST --port PORT ...`. It starts a child process, as vLLM
does, and prints that child's id.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

INFO = 'kvplug_info{manager="%s",version="0.1.0",eviction="lru",groups="full",num_blocks="9",block_size="16"} 1.0'
BEHAVIOURS = (
    "good",
    "dies",
    "hangs",
    "ignores_signals",
    "dies_on_request",
    "other_manager",
    "no_metric",
    "http_error",
    "no_json",
    "nothing_cached",
)


class Handler(http.server.BaseHTTPRequestHandler):
    """The four things that are asked: health, metrics, and two chat completions."""

    behaviour = "good"
    num_chats = 0

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            manager = "upstream" if self.behaviour == "other_manager" else "kvplug"
            info = "" if self.behaviour == "no_metric" else f"# TYPE kvplug_info gauge\n{INFO % manager}\n"
            self._answer(200, f"# TYPE process_open_fds gauge\nprocess_open_fds 3.0\n{info}")
        else:
            self._answer(200, "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.behaviour == "dies_on_request":
            print("ERROR the engine is dead", flush=True)
            os._exit(3)
        if self.behaviour == "http_error":
            self._answer(500, '{"error": "out of blocks"}')
        elif self.behaviour == "no_json":
            self._answer(200, "<html>")
        else:
            num_cached = 208 if Handler.num_chats and self.behaviour != "nothing_cached" else 0
            Handler.num_chats += 1
            usage = {"prompt_tokens": 230, "prompt_tokens_details": {"cached_tokens": num_cached}}
            message = {"content": f"Answer to {body['messages'][-1]['content']}"}
            self._answer(200, json.dumps({"choices": [{"message": message}], "usage": usage}))


def main() -> None:
    behaviour, port = sys.argv[1], int(sys.argv[sys.argv.index("--port") + 1])
    print("INFO vLLM API server version 0.17.1", flush=True)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"CHILD {child.pid}", flush=True)
    if behaviour == "dies":
        child.terminate()
        sys.exit("ERROR the model has no config.json")
    if behaviour == "ignores_signals":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if behaviour in ("hangs", "ignores_signals"):
        time.sleep(600)
    Handler.behaviour = behaviour
    signal.signal(signal.SIGTERM, lambda number, frame: (child.terminate(), os._exit(0)))
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
