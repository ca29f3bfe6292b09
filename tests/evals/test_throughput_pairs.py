"""The comparison as a whole, with stand-ins for `vllm`: order, states, what is reported, and what ends it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.evals.throughput_support import FAKE_SERVER, VOCABULARY, options, write_trace
from vllm_kvplug.cli.console import signals_as_interrupts
from vllm_kvplug.evals.errors import EvalError, EvalUsageError
from vllm_kvplug.evals.results import CacheUse, Report, UsageSample
from vllm_kvplug.evals.sides import choices
from vllm_kvplug.evals.throughput import bench_runs, pairs
from vllm_kvplug.evals.throughput.memory import obstacle
from vllm_kvplug.evals.throughput.run_result import RunResult
from vllm_kvplug.evals.throughput.summary import Run, metrics_of, order_of_runs, summed, thinned, verdict
from vllm_kvplug.evals.throughput.vocabulary import Vocabulary

GIB = 2**30


@pytest.fixture(autouse=True)
def _words_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Vocabulary, "of_model", classmethod(lambda cls, path: VOCABULARY))


def measure(folder: Path, *server_options: str, **changes: object) -> Report:
    asked = options(
        num_requests=8,
        think_time_s=0.0,
        sides=choices("upstream", "upstream"),
        server_command=[*FAKE_SERVER, *server_options],
        **changes,
    )
    folder.mkdir(exist_ok=True)
    return pairs.Comparison(asked).measure(folder)


def num_children() -> int:
    return len(psutil.Process().children(recursive=True))


def test_sides_take_turns_so_that_drift_cancels() -> None:
    assert order_of_runs(5) == [0, 1, 1, 0, 0, 1, 1, 0, 0, 1]
    for num_pairs in (2, 4, 6):
        places = [index for index, side in enumerate(order_of_runs(num_pairs)) if side == 0]
        assert sum(places) == sum(range(2 * num_pairs)) / 2


def test_a_comparison_reports_every_pair(tmp_path: Path) -> None:
    report = measure(tmp_path / "run", num_pairs=5, seed=3)
    assert num_children() == 0
    measured = report.throughput
    assert measured is not None
    assert (measured.num_pairs, measured.order, measured.both_up) == (5, order_of_runs(5), True)
    assert measured.parameters["client"] == "kvplug's own streaming client"
    assert [side.label for side in report.sides] == ["upstream (1)", "upstream (2)"]
    for pair in measured.runs:
        assert [side.num_finished_requests for side in pair] == [8, 8]
    assert [side.num_output_tokens for side in report.cache] == [5 * 8 * 32] * 2
    by_name = {metric.name: metric for metric in measured.metrics}
    assert by_name["hit tokens"].ratio == 1.0
    assert by_name["hit tokens"].verdict == "no difference shown"
    assert by_name["preemptions"].verdict == "no difference shown: zero on both sides"
    assert all(len(metric.values[0]) == 5 for metric in measured.metrics)
    assert {name: len(values[0]) for name, values in measured.latencies_ms.items()} == {
        "ttft": 40,
        "itl": 40 * 31,
        "e2el": 40,
    }
    assert any("about 1 in 20 misses 1 by chance" in sentence for sentence in report.verdict)
    assert Report.model_validate_json(report.model_dump_json()) == report


def test_both_sides_of_a_pair_are_asked_the_same_and_pairs_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, str, object]] = []

    class Noting(bench_runs.StreamClient):
        def run(self, load: object) -> RunResult:  # type: ignore[override]
            sent.append((self._label, self._salt, load))
            return super().run(load)  # type: ignore[arg-type]

    monkeypatch.setattr(bench_runs, "StreamClient", Noting)
    measure(tmp_path / "run", num_pairs=2)
    labels = [label for label, _, _ in sent]
    assert labels == [f"upstream ({number})" for number in (1, 2, 1, 2, 2, 1)]  # warm-ups first
    by_side = {side: [(salt, load) for label, salt, load in sent if label == side] for side in labels}
    assert by_side["upstream (1)"] == by_side["upstream (2)"]
    assert len({salt for _, salt, _ in sent}) == 3
    files = sorted(path.name for path in (tmp_path / "run" / "runs").iterdir())
    assert files == [f"{name}-{side}.json" for name in ("pair-01", "pair-02", "warm-up") for side in (1, 2)]


def test_one_server_at_a_time_starts_each_run_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    original = bench_runs.running_side

    def noting(choice: object, *args: object, **kwargs: object) -> object:
        assert num_children() == 0, "another server is still up"
        started.append(choice.label)  # type: ignore[attr-defined]
        return original(choice, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(bench_runs, "running_side", noting)
    report = measure(tmp_path / "run", num_pairs=2, one_at_a_time=True)
    assert started == ["upstream (1)", "upstream (2)", "upstream (2)", "upstream (1)"]
    assert report.throughput is not None
    assert not report.throughput.both_up
    assert any("One server ran at a time" in sentence for sentence in report.verdict)
    assert any("2 pairs give no interval" in sentence for sentence in report.verdict)


def test_memory_that_holds_one_server_alone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_runs, "obstacle_to_second", lambda pid: "a second server needs too much")
    report = measure(tmp_path / "run", num_pairs=1)
    assert report.throughput is not None
    assert not report.throughput.both_up
    assert report.verdict[-1].endswith("a second server needs too much.")


def test_a_second_server_must_fit_beside_the_first() -> None:
    assert obstacle(4 * GIB, 16 * GIB, []) is None
    assert "a second server needs about 5.4 GiB of memory and 5.0 GiB are available" in str(
        obstacle(4 * GIB, 5 * GIB, [])
    )
    assert obstacle(GIB, 16 * GIB, [(60_000, 80_000)]) is None
    assert "GPU 1 has 120000 MiB in use and 20000 MiB free" in str(
        obstacle(GIB, 16 * GIB, [(0, 140_000), (120_000, 20_000)])
    )


def test_a_server_that_dies_half_way_is_told_with_its_last_lines(tmp_path: Path) -> None:
    # Requests 0 to 3 are the warm-up.
    with pytest.raises(EvalError, match=r"(?s)upstream \(1\): the server ended with exit status 7.*the engine is dead"):
        measure(tmp_path / "run", "--die-at", "6", num_pairs=1)
    assert num_children() == 0


def test_a_workload_longer_than_the_servers_take_is_refused_once_they_say_so(tmp_path: Path) -> None:
    with pytest.raises(EvalUsageError, match="at most 256 tokens"):
        measure(tmp_path / "run", "--max-len", "256", num_pairs=1)
    with pytest.raises(EvalUsageError, match="at most 128 tokens"):
        pairs.Comparison(options(server_args=("--max-model-len", "128")))
    assert num_children() == 0


def test_the_load_that_is_told_is_the_one_that_was_sent(tmp_path: Path) -> None:
    """The limit that only the servers tell cuts a request of the trace."""
    trace = write_trace(tmp_path / "trace.jsonl", [(0.0, 64, 8, [0]), (1.0, 1600, 8, [0, 1, 2, 3])])
    changes = {"num_requests": 2, "server_args": ("--max-model-len", "2k", "--hf-token", "hidden")}
    asked = options("mooncake", trace=trace, sides=choices("upstream", "upstream"), num_pairs=1, **changes)
    asked = replace(asked, server_command=[*FAKE_SERVER, "--max-len", "48"])
    (tmp_path / "run").mkdir()
    report = pairs.Comparison(asked).measure(tmp_path / "run")
    assert report.throughput is not None
    parameters = report.throughput.parameters
    longest = [side.num_prompt_tokens + side.num_output_tokens for side in report.throughput.runs[0]]
    assert parameters["num_requests_cut_to_max_model_len"] >= 1
    assert parameters["max_tokens_of_a_request"] <= 48 <= min(longest)
    assert "hidden" not in report.model_dump_json()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_running(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(bench_runs.StreamClient):
        async def _send(self, *args: object, **kwargs: object) -> None:
            os.kill(os.getpid(), number)
            await asyncio.sleep(60)

    monkeypatch.setattr(bench_runs, "StreamClient", Interrupted)
    with signals_as_interrupts(), pytest.raises(KeyboardInterrupt):
        measure(tmp_path / "run", num_pairs=1)
    assert num_children() == 0


def cache_use(hits: int = 0, preemptions: int = 0, cpu_s: float | None = 2.0) -> CacheUse:
    sample = UsageSample(
        elapsed_s=3.0, usage=0.5, num_running=1, num_waiting=0, num_hit_tokens=1, num_prompt_tokens=2, num_preemptions=0
    )
    return CacheUse(
        num_finished_requests=2,
        num_prompt_tokens=100,
        num_hit_tokens=hits,
        num_output_tokens=8,
        num_preemptions=preemptions,
        peak_usage=0.5 + hits / 1000,
        engine_cpu_s=cpu_s,
        num_counted_lookup_tokens=0,
        num_counted_lookup_hit_tokens=0,
        samples=[sample],
    )


def test_metrics_are_taken_from_client_and_server() -> None:
    result = RunResult(4.0, [50, 50], [4, 4], [0.1, 0.3], [[0.01, 0.02, 0.03], [0.05, 0.05, 0.05]], errors=["", ""])
    metrics = {m.name: m.values[0][0] for m in metrics_of([(Run(result, cache_use(64, 3)),) * 2], seed=0)}
    assert metrics["request throughput"] == 0.5
    assert metrics["output token throughput"] == 2
    assert metrics["total token throughput"] == 27
    assert metrics["TTFT median"] == pytest.approx(200)
    assert metrics["TTFT p99"] == pytest.approx(298)
    assert metrics["inter-token latency median"] == pytest.approx(40)
    assert metrics["end-to-end latency p99"] == pytest.approx(450 - 0.01 * 290)
    assert (metrics["hit tokens"], metrics["preemptions"]) == (64, 3)
    assert metrics["engine CPU per 1000 output tokens"] == 250
    without = metrics_of([(Run(result, cache_use(cpu_s=None)),) * 2], seed=0)
    assert "engine CPU per 1000 output tokens" not in {metric.name for metric in without}


def test_runs_of_a_side_are_summed_one_after_the_other() -> None:
    total = summed([cache_use(10), cache_use(30)])
    assert (total.num_hit_tokens, total.num_finished_requests, total.engine_cpu_s) == (40, 4, 4.0)
    assert total.peak_usage == pytest.approx(0.53)
    assert [sample.elapsed_s for sample in total.samples] == [3.0, 6.0]
    assert summed([cache_use(cpu_s=None), cache_use()]).engine_cpu_s is None


def test_latencies_are_thinned_evenly() -> None:
    values = thinned([float(value) for value in reversed(range(10_000))], 5)
    assert values == [0, 2500, 5000, 7499, 9999]
    assert thinned([2.0, 1.0], 5) == [1.0, 2.0]


def test_the_verdict_names_the_differences_and_the_number_of_metrics() -> None:
    slow = RunResult(8.0, [50], [4], [0.2], [[0.02] * 3], errors=[""])
    fast = RunResult(4.0, [50], [4], [0.2], [[0.02] * 3], errors=[""])
    runs = [(Run(slow, cache_use(64, 3)), Run(fast, cache_use(64, 3)))] * 6
    found = verdict(metrics_of(runs, 0), ("upstream", "kvplug"), None)
    assert found[0] == (
        "kvplug (candidate) against upstream (baseline), 6 pairs of runs: a difference in 3 of 12 metrics."
    )
    assert "request throughput: candidate 100.0 % higher (better), ratio 2.000 [2.000, 2.000]." in found
    assert len(found) == 5


def test_the_results_of_a_run_are_json(tmp_path: Path) -> None:
    report = measure(tmp_path / "run", num_pairs=1)
    report.write(tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text())["throughput"]["workload"] == "multi-turn"
