"""A stand-in for the `vllm` command whose counters a test sets: POST /count {"name": value, ...} changes /metrics.

Called as `python fake_server.py [--dies] serve MODEL --host HOST --port PORT ...`.
"""

from __future__ import annotations

import http.server
import json
import os
import sys
from typing import Any, ClassVar


class Handler(http.server.BaseHTTPRequestHandler):
    counts: ClassVar[dict[str, float]] = {}

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        if self.path != "/metrics":
            return self._answer("")
        lines = [f"{name} {value}" for name, value in self.counts.items()]
        if "--kv-cache-manager" in sys.argv:
            manager = sys.argv[sys.argv.index("--kv-cache-manager") + 1].removeprefix("false-")
            lines.append(f'kvplug_info{{manager="{manager}",num_blocks="9"}} 1.0')
        return self._answer("\n".join(lines) + "\n")

    def do_POST(self) -> None:
        if self.path == "/die":
            print("ERROR no more blocks", flush=True)
            os._exit(7)
        self.counts.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer("")


if __name__ == "__main__":
    if "--dies" in sys.argv:
        sys.exit("ERROR the model has no config.json")
    address = ("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1]))
    http.server.ThreadingHTTPServer(address, Handler).serve_forever()
