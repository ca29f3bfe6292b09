"""A process of one's own that answers a line of JSON with a line of JSON, over and over."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from vllm_kvplug.cli.server_process import signals_held_back
from vllm_kvplug.evals.errors import EvalError

_POLL_S = 0.5
_NUM_TAIL_LINES = 10
_LOCAL = "127.0.0.1,localhost"


class WorkerProcess:
    """A context in which the process can be asked; it and all that it started are gone afterwards.

    Args:
        name: what errors call it.
        command: its command line.
        log_path: where its standard error goes; truncated at the start.
        env: variables over the caller's environment.
    """

    def __init__(self, name: str, command: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None) -> None:
        self.log_path = log_path
        self._name = name
        self._command = list(command)
        self._env = {**os.environ, **_no_proxy(), **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""

    def __enter__(self) -> WorkerProcess:
        with self.log_path.open("wb") as log, signals_held_back():
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=self._env,
                start_new_session=True,  # the terminal's Ctrl-C reaches only us, who end it
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._running().pid

    def stop(self) -> None:
        """Kill the process and its group; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        # Before it is waited for: until then nobody else can have its id.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def ask(
        self,
        job: Mapping[str, Any] | None,
        what: str,
        *,
        check: Callable[[], None] = lambda: None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Send `job` (None: nothing, it speaks first) and wait for the answer.

        Args:
            what: errors begin with it.
            check: called about twice a second; what it raises ends the wait.

        Raises:
            EvalError: the process ended, or did not answer in time; with its last lines.

        Whatever is raised, the process is gone then: nobody would read its answer.
        """
        try:
            if job is not None:
                self._send(job, what)
            return self._answer(what, check, timeout_s)
        except BaseException:
            self.stop()
            raise

    def with_log_tail(self, message: str) -> str:
        """`message`, followed by the log's last lines."""
        try:
            lines = [line for line in self.log_path.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        return "\n".join([f"{message}; its last lines:", *lines[-_NUM_TAIL_LINES:]])

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise EvalError(f"{self._name} is not running")
        return self._process

    def _send(self, job: Mapping[str, Any], what: str) -> None:
        stream = self._running().stdin
        assert stream is not None
        rest = memoryview(json.dumps(job).encode() + b"\n")
        try:
            while rest:
                rest = rest[stream.write(rest) :]
        except OSError:
            raise self._ended(what) from None

    def _answer(self, what: str, check: Callable[[], None], timeout_s: float | None) -> dict[str, Any]:
        stream = self._running().stdout
        assert stream is not None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if selector.select(_POLL_S):
                    part = os.read(stream.fileno(), 65536)
                    if not part:
                        raise self._ended(what)
                    self._received += part
                elif self._has_ended():  # though a process that it started may hold its output open
                    raise self._ended(what)
                elif deadline is not None and time.monotonic() > deadline:
                    raise EvalError(self.with_log_tail(f"{what}: {self._name} has not answered for {timeout_s:.0f} s"))
                else:
                    check()
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _has_ended(self) -> bool:
        """Leaves its id taken, unlike poll()."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _ended(self, what: str) -> EvalError:
        return EvalError(self.with_log_tail(f"{what}: {self._name} ended before it answered"))


def _no_proxy() -> dict[str, str]:
    """The servers are on this machine, whatever proxy the environment names."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    names = f"{given},{_LOCAL}" if given else _LOCAL
    return {"NO_PROXY": names, "no_proxy": names}
