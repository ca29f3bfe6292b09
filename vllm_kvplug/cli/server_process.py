"""A `vllm serve` of one's own: started, watched through its log, stopped with all that it started.

For the demonstration, the serving tests and the A/B tools. Imports no vLLM: the server is another process.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx

from vllm_kvplug.errors import KVPlugError

HOST = "127.0.0.1"
_POLL_S = 0.2
_NUM_TAIL_LINES = 15
# What the log says when a part of the start is over -> what the server does next.
_STAGES = (
    ("vLLM API server version", "reading the model's configuration"),
    ("Initializing a V1 LLM engine", "starting the engine"),
    ("Starting to load model", "loading the weights"),
    ("Loading weights took", "preparing the KV cache"),
    ("GPU KV cache size", "starting the web server"),
    ("Application startup complete", "answering"),
)
# Settings of the server's environment that a caller may still override.
_ENVIRONMENT = {
    # GiB for the KV cache: the CPU build would else take half of the machine.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
}

Progress = Callable[[str], None]


class ServerError(KVPlugError, RuntimeError):
    """The server could not be started, died, or did not get ready in time. The message ends with its last log lines."""


def vllm_command() -> list[str]:
    """The `vllm` that belongs to this interpreter's environment, else the one on PATH."""
    beside = Path(sys.executable).parent / "vllm"
    found = str(beside) if beside.exists() else shutil.which("vllm")
    if found is None:
        raise ServerError(f"the vllm command is neither beside {sys.executable} nor on PATH: install vLLM there")
    return [found]


def free_port() -> int:
    """A TCP port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def check_port_is_free(port: int) -> None:
    """Raises ServerError if another process listens on `port`."""
    with socket.socket() as probe:
        # As the server itself binds: a connection that was closed lately does not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ServerError(
                f"port {port} of {HOST} cannot be used ({error.strerror}): choose another with --port"
            ) from None


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Deliver signals that have a Python handler only afterwards: raised inside Popen, the new process's id is lost.

    Not by a signal mask, which the new process would inherit. Handlers run in the main thread alone.
    """
    held: list[int] = []

    def deliver() -> None:
        if held:
            signal.raise_signal(held[0])

    with contextlib.ExitStack() as restore:
        restore.callback(deliver)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            handler = signal.getsignal(number)
            if callable(handler) and threading.current_thread() is threading.main_thread():
                restore.callback(signal.signal, number, handler)
                signal.signal(number, lambda number, frame: held.append(number))
        yield


class ServerProcess:
    """`vllm serve MODEL ARGS` as a context manager: started on entry, stopped on exit with all that it started.

    Args:
        model: hub name or path, as vLLM takes it.
        args: further arguments of `vllm serve`, without host and port.
        env: variables set over the caller's environment and over `_ENVIRONMENT`.
        log_path: where standard output and error go; truncated at the start.
        port: a port to listen on; None takes a free one.
        command: what to run in place of `vllm`.
    """

    def __init__(
        self,
        model: str,
        args: Sequence[str],
        env: Mapping[str, str] | None,
        log_path: str | Path,
        *,
        port: int | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        if port is not None:
            check_port_is_free(port)
        self.port = free_port() if port is None else port
        self.url = f"http://{HOST}:{self.port}"
        self.log_path = Path(log_path)
        self.command = [*(command or vllm_command()), "serve", model, "--host", HOST, "--port", str(self.port), *args]
        self._env = {**_ENVIRONMENT, **os.environ, **(env or {})}
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def __enter__(self) -> ServerProcess:
        try:
            self.start()
        except BaseException:  # a signal may arrive between the end of start() and here
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __str__(self) -> str:
        return shlex.join(self.command)

    @property
    def pid(self) -> int:
        """The process id of `vllm serve`, which is its process group's id too."""
        return self._started().pid

    @property
    def returncode(self) -> int | None:
        """The exit status, or None while the server runs."""
        return self._started().poll()

    def wait(self, timeout_s: float) -> int:
        """Wait for the server to end by itself and return its exit status.

        Raises:
            ServerError: it still runs after `timeout_s`.
        """
        if not self._wait_until_gone(timeout_s, group=False):
            raise ServerError(self.with_log_tail(f"the server still runs after {timeout_s:.0f} s"))
        return self._started().wait()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server has not been started")
        return self._process

    def start(self) -> None:
        """Start the server in a session of its own: the terminal's Ctrl-C reaches only us, who stop it in order.

        Leaves no process and no open file behind if it raises.
        """
        try:
            self._log = self.log_path.open("wb")
            with signals_held_back():
                self._process = self._popen()
        except BaseException:
            self.stop()
            raise

    def _popen(self) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        except OSError as error:
            raise ServerError(f"{self.command[0]} cannot be started: {error.strerror}") from None

    def wait_ready(self, timeout_s: float = 300.0, on_progress: Progress | None = None) -> float:
        """Wait until /health answers 200; `on_progress` gets each new stage. Returns the seconds it took.

        Raises:
            ServerError: the server ended, or was not ready in time.
        """
        started = time.monotonic()
        stage = ""
        while True:
            status = self.returncode
            if status is not None:
                raise ServerError(self.with_log_tail(f"the server ended with exit status {status} before it was ready"))
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).status_code == 200:
                    return time.monotonic() - started
            if time.monotonic() - started > timeout_s:
                raise ServerError(self.with_log_tail(f"the server was not ready after {timeout_s:.0f} s"))
            new_stage = self.stage()
            if on_progress is not None and new_stage != stage:
                on_progress(new_stage)
            stage = new_stage
            time.sleep(_POLL_S)

    def stage(self) -> str:
        """What the server is doing while it starts, told by its log."""
        log = self.read_log()
        return next((name for mark, name in reversed(_STAGES) if mark in log), "importing vLLM")

    def read_log(self) -> str:
        """All that the server has printed."""
        try:
            return self.log_path.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def log_tail(self, num_lines: int = _NUM_TAIL_LINES) -> str:
        """The last lines of the log that are not empty."""
        lines = [line.rstrip() for line in self.read_log().splitlines() if line.strip()]
        return "\n".join(lines[-num_lines:])

    def with_log_tail(self, message: str) -> str:
        """`message`, followed by the log's last lines."""
        tail = self.log_tail()
        return f"{message}; its last log lines:\n{tail}" if tail else f"{message}; it printed nothing"

    def stop(self, grace_s: float = 30.0) -> int | None:
        """Stop the server and its whole process group; idempotent. Returns the exit status (None: never started).

        First the signal that vLLM shuts down on, then the same to the whole group, at last SIGKILL. A Ctrl-C meanwhile
        goes straight to the last.
        """
        process = self._process
        if process is None:
            self._close_log()
            return None
        if self._stopped:  # the group's id may be another's by now
            return process.poll()
        try:
            # SIGTERM to the API server alone: it stops its engine processes itself.
            if process.poll() is None:
                process.terminate()
                self._wait_until_gone(grace_s, group=False)
            # Helpers of multiprocessing end a moment after their parent.
            if not self._wait_until_gone(2.0):
                self._signal_group(signal.SIGTERM)
                self._wait_until_gone(5.0)
        finally:
            if not self._wait_until_gone(0.0):
                self._signal_group(signal.SIGKILL)
                self._wait_until_gone(5.0)
            self._stopped = True
            self._close_log()
        return process.poll()

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()

    def group_is_alive(self) -> bool:
        """Whether any process of the server's group is left."""
        self._started().poll()  # reaps the leader, which would else count as alive
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _wait_until_gone(self, timeout_s: float, group: bool = True) -> bool:
        """Wait for the group (or the leader alone) to be gone; whether it is."""
        deadline = time.monotonic() + timeout_s
        while self.group_is_alive() if group else self.returncode is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
