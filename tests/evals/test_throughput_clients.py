"""Both clients against a streaming server: what they count and send, and what they say of a server that fails."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.evals.throughput_support import VOCABULARY, asked_of, options, streaming
from vllm_kvplug.evals.errors import EvalError
from vllm_kvplug.evals.serving import RunningSide
from vllm_kvplug.evals.throughput.bench_client import VllmBench
from vllm_kvplug.evals.throughput.loads import Session, SessionLoad, Turn
from vllm_kvplug.evals.throughput.run_result import RunResult
from vllm_kvplug.evals.throughput.stream_client import StreamClient
from vllm_kvplug.evals.throughput.workloads import Recipe

# Answers a command line by writing the path that follows --result-filename, or as its first argument says.
FAKE_WORKER = """
import json, sys
print(json.dumps({"error": None}), flush=True)
for line in sys.stdin:
    arguments = json.loads(line)["arguments"]
    if arguments[0] == "die":
        sys.exit("the client is dead")
    if arguments[0] == "wait":
        import time
        time.sleep(600)
    error = "ValueError: wrong" if arguments[0] == "fail" else None
    if error is None:
        names = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")
        json.dump({"duration": 2.0} | dict.fromkeys(names, []), open(arguments[1], "w"))
    print(json.dumps({"error": error}), flush=True)
"""


def run(running: RunningSide, load: SessionLoad, salt: str = "salt") -> RunResult:
    def check() -> None:
        if running.server.returncode is not None:
            running.raise_if_dead("the run")

    return StreamClient(running.url, running.served_name, "side", salt, check).run(load)


def single(num_output_tokens: int, num_requests: int = 1) -> SessionLoad:
    return SessionLoad(tuple(Session((Turn((1, 2, 3), num_output_tokens),)) for _ in range(num_requests)))


def test_latencies_are_those_of_the_chunks(tmp_path: Path) -> None:
    with streaming(tmp_path, "--first-s", "0.3", "--next-s", "0.1") as running:
        result = run(running, single(4))
    assert (result.input_lens, result.output_lens, result.num_completed) == ([3], [4], 1)
    assert [len(itls) for itls in result.itls_s] == [3]
    latencies_ms = result.latencies_ms()
    # The server waits so long at least; how much longer the machine takes is not asserted.
    assert latencies_ms["ttft"][0] >= 300
    assert sum(latencies_ms["itl"]) + latencies_ms["ttft"][0] >= 600
    assert latencies_ms["e2el"][0] == pytest.approx(latencies_ms["ttft"][0] + sum(latencies_ms["itl"]))
    assert result.duration_s * 1000 >= latencies_ms["e2el"][0]
    assert result.throughput()["output token throughput"] == pytest.approx(4 / result.duration_s)
    assert result.throughput()["total token throughput"] == pytest.approx(7 / result.duration_s)


def test_each_turn_begins_with_all_that_was_said_before(tmp_path: Path) -> None:
    load = Recipe(options(num_requests=8, think_time_s=0.0), VOCABULARY).load(0)
    assert isinstance(load, SessionLoad)
    with streaming(tmp_path) as running:
        result = run(running, load, "pair-1")
        asked = asked_of(running)
    assert result.num_completed == 8
    assert {body["cache_salt"] for body in asked} == {"pair-1"}
    assert all(body["temperature"] == 0 and body["ignore_eos"] for body in asked)
    for session in load.sessions:
        said: list[int] = []
        for turn in session.turns:
            said += turn.token_ids
            # The server's answers are 1000 * number of the request and up, so each is recognised.
            (number,) = (index for index, body in enumerate(asked) if body["prompt"] == said)
            said += [1000 * number + index for index in range(turn.num_output_tokens)]


def test_open_sessions_are_limited(tmp_path: Path) -> None:
    load = SessionLoad(single(2, 6).sessions, max_sessions=1)
    with streaming(tmp_path, "--first-s", "0.02") as running:
        result = run(running, load)
    ends = [start + ttft + sum(itls) for start, ttft, itls in _times(result)]
    starts = sorted(result.start_times_s)
    assert all(start >= end for start, end in zip(starts[1:], sorted(ends), strict=False))


def test_requests_wait_for_their_time(tmp_path: Path) -> None:
    load = SessionLoad(tuple(Session((Turn((1,), 1),), start_s) for start_s in (0.0, 0.4)))
    with streaming(tmp_path) as running:
        starts = run(running, load).start_times_s
    assert starts[1] - starts[0] >= 0.35


def _times(result: RunResult) -> list[tuple[float, float, list[float]]]:
    return list(zip(result.start_times_s, result.ttfts_s, result.itls_s, strict=True))


def test_a_server_that_dies_half_way_is_an_error_that_names_the_side(tmp_path: Path) -> None:
    with (
        streaming(tmp_path, "--die-at", "1", "--next-s", "0.05") as running,
        pytest.raises(EvalError, match=r"^side: (a request failed|the server ended with exit status 7)"),
    ):
        run(running, SessionLoad(single(3, 4).sessions, max_sessions=1))


def test_a_refused_request_is_told_in_the_servers_words(tmp_path: Path) -> None:
    with (
        streaming(tmp_path, "--refuse-at", "0") as running,
        pytest.raises(EvalError, match=r"side: expected HTTP 200, found 400: .*this prompt is too long"),
    ):
        run(running, single(2))


def test_a_server_without_token_ids_cannot_hold_a_conversation(tmp_path: Path) -> None:
    load = SessionLoad((Session((Turn((1,), 2), Turn((2,), 2))),))
    with streaming(tmp_path, "--no-ids") as running, pytest.raises(EvalError, match="expected the ids of 2 tokens"):
        run(running, load)


def test_results_are_read_as_written(tmp_path: Path) -> None:
    result = RunResult(2.0, [3], [2], [0.5], [[0.25]], [1.0], [""])
    result.write(tmp_path / "run.json")
    assert RunResult.read(tmp_path / "run.json") == result
    (tmp_path / "run.json").write_text('{"duration": 1}')
    with pytest.raises(EvalError, match=r"run\.json: expected a detailed result"):
        RunResult.read(tmp_path / "run.json")


def test_failed_requests_end_the_comparison() -> None:
    failed = RunResult(
        1.0, [1, 1], [1, 0], [0.1, 0.0], [[], []], [0.0, 0.0], ["", "Traceback\n  File x\nTimeoutError: y\n"]
    )
    with pytest.raises(EvalError, match="upstream: 1 of 2 requests failed; the first: TimeoutError: y"):
        failed.raise_if_failed("upstream")


def fake_bench(folder: Path) -> VllmBench:
    return VllmBench(folder / "bench.log", [sys.executable, "-c", FAKE_WORKER])


def test_the_worker_runs_command_lines_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with fake_bench(tmp_path) as bench:
        for _ in range(2):
            assert bench.run(["good", str(path)], path, lambda: None, "side").duration_s == 2.0
        with pytest.raises(EvalError, match=r"side: vllm bench serve failed \(ValueError: wrong\); fail"):
            bench.run(["fail"], path, lambda: None, "side")
        assert bench.run(["good", str(path)], path, lambda: None, "side").num_completed == 0


def test_a_worker_that_dies_is_told_with_its_last_lines(tmp_path: Path) -> None:
    with (
        fake_bench(tmp_path) as bench,
        pytest.raises(EvalError, match=r"(?s)side: the process of vllm bench serve ended before.*the client is dead"),
    ):
        bench.run(["die"], tmp_path / "run.json", lambda: None, "side")


def test_waiting_for_a_dead_server_ends_the_worker(tmp_path: Path) -> None:
    def check() -> None:
        raise EvalError("the server is dead")

    with fake_bench(tmp_path) as bench:
        bench.wait_ready()
        pid = bench._worker.pid
        with pytest.raises(EvalError, match="the server is dead"):
            bench.run(["wait"], tmp_path / "run.json", check, "side")
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_result_is_shaped_as_vllms(tmp_path: Path) -> None:
    RunResult(2.0, [3], [2], [0.5], [[0.25]], [1.0], [""]).write(tmp_path / "run.json")
    data = json.loads((tmp_path / "run.json").read_text())
    assert (data["ttfts"], data["itls"], data["completed"], data["failed"]) == ([0.5], [[0.25]], 1, 0)
