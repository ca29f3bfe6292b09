"""A server of one's own leaves nothing behind: no process, no open file."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import child_pid, fake, is_alive
from vllm_kvplug.cli import server_process
from vllm_kvplug.cli.server_process import ServerError, ServerProcess

# As a hub name: nothing is looked for on the disk.
MODEL = "some/model"


class Interrupted(BaseException):
    """What the test's signal handler raises."""


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that raises, as Ctrl-C does."""

    def interrupt(number: int, frame: Any) -> None:
        raise Interrupted

    before = signal.signal(request.param, interrupt)
    yield request.param
    assert signal.getsignal(request.param) is interrupt
    signal.signal(request.param, before)


def make_server(tmp_path: Path, behaviour: str = "hangs") -> ServerProcess:
    return ServerProcess(MODEL, [], None, tmp_path / "log", command=fake(behaviour))


def nothing_is_left_of(server: ServerProcess) -> bool:
    assert server._log is not None
    return server._log.closed and not is_alive(server.pid) and not server.group_is_alive()


def test_a_server_that_ignores_signals_is_killed_with_its_children(tmp_path: Path) -> None:
    with make_server(tmp_path, "ignores_signals") as server:
        while "CHILD" not in server.read_log():
            time.sleep(0.05)
        assert server.stop(grace_s=0.2) == -signal.SIGKILL
        assert not server.group_is_alive() or not is_alive(child_pid(server.read_log()))
        assert server.stop() == -signal.SIGKILL


def test_a_command_that_cannot_be_started_leaves_no_open_file(tmp_path: Path) -> None:
    server = ServerProcess(MODEL, [], None, tmp_path / "log", command=["/no/such/vllm"])
    with pytest.raises(ServerError, match="/no/such/vllm cannot be started: No such file"):
        server.start()
    assert server._log is not None
    assert server._log.closed
    assert server.stop() is None


def test_a_signal_inside_popen_leaves_no_process(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self.pid)
            os.kill(os.getpid(), number)
            time.sleep(0)  # where the handler would run

    monkeypatch.setattr(server_process.subprocess, "Popen", Popen)
    server = make_server(tmp_path)
    with pytest.raises(Interrupted):
        server.start()
    assert not is_alive(started[0])
    assert nothing_is_left_of(server)


def test_a_signal_at_the_end_of_the_entry_leaves_no_process(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ServerProcess.start

    def start_and_interrupt(self: ServerProcess) -> None:
        start(self)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(ServerProcess, "start", start_and_interrupt)
    server = make_server(tmp_path)
    with pytest.raises(Interrupted), server:
        pytest.fail("entered")
    assert nothing_is_left_of(server)


def test_a_signal_that_is_ignored_stays_ignored_in_the_server(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with make_server(tmp_path) as server:
            ignored = next(
                line
                for line in Path(f"/proc/{server.pid}/status").read_text().splitlines()
                if line.startswith("SigIgn")
            )
            assert int(ignored.split()[1], 16) & 1 << (signal.SIGHUP - 1)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_thread_starts_a_server_too(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    assert server.returncode is None
    server.stop()
    assert nothing_is_left_of(server)


def test_progress_comes_from_the_log(tmp_path: Path) -> None:
    server = make_server(tmp_path, "good")
    assert server.stage() == "importing vLLM"
    server.log_path.write_text("INFO vLLM API server version 0.17.1\nINFO Initializing a V1 LLM engine (v0.17.1)\n\n")
    assert server.stage() == "starting the engine"
    assert server.log_tail(1) == "INFO Initializing a V1 LLM engine (v0.17.1)"
