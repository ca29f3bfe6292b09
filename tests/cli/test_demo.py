"""The demonstration against a stand-in for vLLM: what a user sees when all is well, and the message of each failure."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.support import FAKE_VLLM, child_pid, fake, is_alive
from vllm_kvplug.cli import demo
from vllm_kvplug.cli.models.catalogue import UnknownModelError
from vllm_kvplug.cli.server_process import ServerError
from vllm_kvplug.errors import KVPlugError

# As a hub name: nothing is looked for on the disk.
MODEL = "some/model"
ROOT = Path(__file__).parents[2]


def test_it_shows_the_manager_the_answers_and_the_cached_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    demo.run(MODEL, server_command=fake("good"))
    out = capsys.readouterr().out
    assert "served by  kvplug 0.1.0 (eviction lru, groups full, num_blocks 9, block_size 16)" in out
    assert "answer     Answer to What is the capital of France?" in out
    assert out.index("230 prompt tokens, 0 of them cached") < out.index("230 prompt tokens, 208 of them cached")
    assert "stopped    the server, cleanly (exit status 0)" in out


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ("dies", "the server ended with exit status 1 before it was ready; its last log lines:"),
        ("hangs", "the server was not ready after 1 s; its last log lines:"),
        ("dies_on_request", "the server ended with exit status 3 during the requests"),
        ("other_manager", "expected manager kvplug in force, found upstream"),
        ("no_metric", "expected kvplug_info on the server's /metrics, found none: vLLM's own manager serves"),
        ("http_error", 'POST /v1/chat/completions: expected HTTP 200, found 500: {"error": "out of blocks"}'),
        ("no_json", "expected a chat completion, found <html>"),
        ("nothing_cached", "expected cached tokens, found none"),
    ],
)
def test_a_failure_is_one_message_and_leaves_no_process(behaviour: str, expected: str) -> None:
    with pytest.raises(KVPlugError) as failure:
        demo.run(MODEL, server_command=fake(behaviour), ready_timeout_s=1.0 if behaviour == "hangs" else 30.0)
    message = str(failure.value)
    assert expected in message.splitlines()[0]
    assert "INFO vLLM API server version" in message
    assert not is_alive(child_pid(message))


def test_a_taken_port_is_named_before_anything_is_started() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} of 127.0.0.1 cannot be used"):
            demo.run(MODEL, server_command=fake("good"), port=port)


def test_a_path_that_is_not_there_is_named_before_anything_is_started() -> None:
    with pytest.raises(UnknownModelError, match="model /no/such/model: expected a checkpoint's folder, found nothing"):
        demo.run("/no/such/model", server_command=fake("good"))


def test_a_command_that_is_not_there_is_named() -> None:
    with pytest.raises(ServerError, match="/no/such/vllm cannot be started: No such file"):
        demo.run(MODEL, server_command=["/no/such/vllm"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_during_start_up_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    """The whole command in a process of its own, with a `vllm` on PATH that never gets ready."""
    pid_file = tmp_path / "pid"
    fake_command = tmp_path / "vllm"
    fake_command.write_text(f'#!/bin/sh\necho $$ > {pid_file}\nexec "{sys.executable}" "{FAKE_VLLM}" hangs "$@"\n')
    fake_command.chmod(0o755)
    script = (
        "import sys; from vllm_kvplug.cli import demo, main, server_process; "
        f"server_process.vllm_command = lambda: ['{fake_command}']; main.main(['demo', '--model', 'some/model'])"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "kvplug: error: interrupted"
    assert not is_alive(int(pid_file.read_text()))


def test_keep_prints_a_curl_line_and_stops_on_an_interrupt(tmp_path: Path) -> None:
    script = (
        "import sys; from vllm_kvplug.cli import main, server_process; "
        f"server_process.vllm_command = lambda: {fake('good')!r}; "
        "main.main(['demo', '--model', 'some/model', '--keep'])"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    while not lines or not lines[-1].startswith("keeping the server up"):
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    curl = next(line for line in lines if line.startswith("try it     curl http://127.0.0.1:"))
    answer = subprocess.run(["sh", "-c", curl.removeprefix("try it     ") + " -s"], capture_output=True, check=False)
    assert answer.returncode == 127 or b"Answer to What is the capital of France?" in answer.stdout
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "stopped    the server, cleanly" in out
