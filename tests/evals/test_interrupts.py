"""Ctrl-C in `kvplug ab` while its clients wait for a server: exit status 130, and no process is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.evals.ended_runs import left_over, marked_environment
from tests.evals.throughput_support import FAKE_SERVER
from vllm_kvplug.cli.models.store import ensure_model

# The command with another program in place of `vllm`: its answers take so long that they are interrupted.
COMMAND = f"""
import sys
from vllm_kvplug.cli import main, server_process
server_process.vllm_command = lambda: {[*FAKE_SERVER, "--first-s", "600"]!r}
main.main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", "--chat", "--tasks", "kvplug_sums", "--limit", "4"],
        ["bench", "--workload", "multi-turn", "--num-requests", "8"],
    ],
    ids=["eval", "bench"],
)
def test_an_interrupt_is_130_and_leaves_nothing(arguments: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    environment = marked_environment()
    options = ["--model", ensure_model("tiny-qwen2"), "--candidate", "upstream", "--out", str(out)]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "ab", *arguments, *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            log_path = out / "server-upstream__1_.log"
            deadline = time.monotonic() + 300
            while not (log_path.exists() and "asked /v1" in log_path.read_text()):
                assert process.poll() is None, (tmp_path / "output").read_text()
                assert time.monotonic() < deadline, "no request has come"
                time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            status = process.wait(120)
        finally:
            process.kill()
            process.wait()
    told = (tmp_path / "output").read_text()
    assert status == 130, told
    assert told.splitlines()[-1] == "kvplug: error: interrupted"
    assert left_over(environment) == []
