"""A process that answers lines: its answers, its ends, and that nothing of it is left."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from vllm_kvplug.evals.errors import EvalError
from vllm_kvplug.evals.worker_process import WorkerProcess

WORKER = """
import json, os, subprocess, sys, time
for line in sys.stdin:
    job = json.loads(line)
    if "die" in job:
        sys.exit("it is dead")
    if "child" in job:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(json.dumps({"pid": child.pid}), flush=True)
    elif "wait" in job:
        time.sleep(600)
    else:
        names = {name: os.environ.get(name) for name in ("NO_PROXY", "no_proxy")}
        print(json.dumps({"job": job, **names}), flush=True)
"""


def worker(folder: Path) -> WorkerProcess:
    return WorkerProcess("the worker", [sys.executable, "-c", WORKER], folder / "log")


def wait_until_gone(pid: int) -> None:
    """Orphans are reaped by whoever has taken them over, a moment later."""
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{pid} still runs"
        time.sleep(0.05)


def test_it_answers_again_and_again_whatever_the_length(tmp_path: Path) -> None:
    with worker(tmp_path) as process:
        for job in ({"a": 1}, {"b": "x" * 300_000}):
            assert process.ask(job, "side")["job"] == job


def test_it_reaches_servers_here_beside_those_without_proxy_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "example.org")
    with worker(tmp_path) as process:
        answer = process.ask({}, "side")
    assert answer["NO_PROXY"] == answer["no_proxy"] == "example.org,127.0.0.1,localhost"


def test_all_that_it_started_is_killed_with_it(tmp_path: Path) -> None:
    with worker(tmp_path) as process:
        pids = [process.pid, process.ask({"child": 1}, "side")["pid"]]
    for pid in pids:
        wait_until_gone(pid)


def test_all_that_it_started_is_killed_after_it_died(tmp_path: Path) -> None:
    with worker(tmp_path) as process:
        pid = process.ask({"child": 1}, "side")["pid"]
        with pytest.raises(EvalError, match=r"(?s)^side: the worker ended before it answered.*\nit is dead"):
            process.ask({"die": 1}, "side")
        wait_until_gone(pid)
        with pytest.raises(EvalError, match="the worker is not running"):
            process.ask({}, "side")


def test_a_deadline_ends_it(tmp_path: Path) -> None:
    checks: list[int] = []
    with worker(tmp_path) as process:
        pid = process.pid
        with pytest.raises(EvalError, match=r"^side: the worker has not answered for 1 s"):
            process.ask({"wait": 1}, "side", check=lambda: checks.append(1), timeout_s=1.0)
        wait_until_gone(pid)
    assert checks


def test_what_a_check_raises_ends_it(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with worker(tmp_path) as process:
        pid = process.pid
        with pytest.raises(KeyboardInterrupt):
            process.ask({"wait": 1}, "side", check=interrupt)
        wait_until_gone(pid)


def test_it_may_speak_first(tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"print({json.dumps(json.dumps({'ready': True}))}, flush=True); input()"]
    with WorkerProcess("the worker", command, tmp_path / "log") as process:
        assert process.ask(None, "side") == {"ready": True}
