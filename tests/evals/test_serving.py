"""One side's server: what is in force is checked, its counters are read, and its death is told with its last lines."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from vllm_kvplug.cli.server_process import ServerError
from vllm_kvplug.evals.errors import EvalError
from vllm_kvplug.evals.observe import Observation
from vllm_kvplug.evals.serving import RunningSide, max_model_len, running_side
from vllm_kvplug.evals.sides import SideChoice
from vllm_kvplug.evals.throughput.memory import obstacle_to_second

FAKE = [sys.executable, str(Path(__file__).with_name("streaming_server.py"))]


@contextlib.contextmanager
def running(folder: Path, manager: str, *further: str) -> Iterator[RunningSide]:
    with running_side(SideChoice(manager, manager), "model", [], folder, command=[*FAKE, *further]) as side:
        yield side


def count(side: RunningSide, **counts: float) -> None:
    httpx.post(f"{side.url}/count", json=counts)


def test_the_side_says_what_serves_and_how(tmp_path: Path) -> None:
    with running(tmp_path, "kvplug") as side:
        assert side.side.in_force == {"manager": "kvplug", "num_blocks": "9"}
        assert side.side.command.endswith("--kv-cache-manager kvplug")
        pid = side.server.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_another_manager_in_force_ends_the_comparison(tmp_path: Path) -> None:
    with (
        pytest.raises(EvalError, match="expected manager false-kvplug in force, found"),
        running(tmp_path, "false-kvplug"),
    ):
        pass


def test_a_server_that_does_not_start_is_told_with_its_last_lines(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match=r"(?s)exit status 1.*no config\.json"),
        running(tmp_path, "upstream", "--dies"),
    ):
        pass


def test_a_death_while_measuring_is_told_with_its_last_lines(tmp_path: Path) -> None:
    with running(tmp_path, "upstream") as side:
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{side.url}/die")
        with pytest.raises(EvalError, match=r"(?s)upstream: .* exit status 7 during the tasks.*no more blocks"):
            side.raise_if_dead("the tasks")


def test_an_observation_counts_what_happened_inside_it(tmp_path: Path) -> None:
    with running(tmp_path, "upstream") as side:
        count(
            side,
            request_success_total=5,
            request_prompt_tokens_sum=1000,
            request_prefill_kv_computed_tokens_sum=900,
            num_preemptions_total=2,
        )
        with Observation(side.url, [os.getpid()], sample_period_s=0.02) as seen:
            count(side, kv_cache_usage_perc=0.75, num_requests_running=3)
            time.sleep(0.3)
            count(
                side,
                kv_cache_usage_perc=0.25,
                num_requests_running=0,
                request_success_total=8,
                request_prompt_tokens_sum=1600,
                request_prefill_kv_computed_tokens_sum=1100,
                request_generation_tokens_sum=70,
                num_preemptions_total=6,
                prefix_cache_queries_total=5000,
                prefix_cache_hits_total=4000,
            )
        use = seen.cache_use()
    assert (use.num_finished_requests, use.num_prompt_tokens, use.num_hit_tokens) == (3, 600, 400)
    assert (use.num_output_tokens, use.num_preemptions, use.peak_usage) == (70, 4, 0.75)
    assert (use.num_counted_lookup_tokens, use.num_counted_lookup_hit_tokens) == (5000, 4000)
    assert use.engine_cpu_s is not None
    assert use.engine_cpu_s >= 0
    assert use.samples[-1].num_hit_tokens == 400
    assert max(sample.num_running for sample in use.samples) == 3


def test_a_failed_look_at_the_metrics_is_noted_and_sampling_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, "upstream") as side:
        with Observation(side.url, sample_period_s=0.02, label="upstream") as seen:
            httpx.post(f"{side.url}/fail", json={"num_times": 2})
            deadline = time.monotonic() + 30
            while seen._num_missed_samples != 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            num_samples = len(seen._samples)
            while len(seen._samples) <= num_samples and time.monotonic() < deadline:
                time.sleep(0.02)
        use = seen.cache_use()
    assert use.num_missed_samples == 2
    assert len(use.samples) >= num_samples + 2  # a further look, and the last
    assert "upstream: /metrics could not be read 2 times" in capsys.readouterr().err


def test_a_key_in_the_callers_environment_is_not_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with running(tmp_path, "upstream", "--max-len", "77") as side:
        assert max_model_len(side.url) == 77


def test_a_server_that_does_not_tell_its_limit_is_an_error(tmp_path: Path) -> None:
    with (
        running(tmp_path, "upstream") as side,
        pytest.raises(EvalError, match=r"/none/v1/models: expected the model's"),
    ):
        max_model_len(f"{side.url}/none")
    with pytest.raises(EvalError, match=r"/v1/models: expected the model's max_model_len, found .*refused"):
        max_model_len(side.url)


def test_a_server_that_is_gone_has_no_engines_and_no_memory(tmp_path: Path) -> None:
    with running(tmp_path, "upstream") as side:
        pid = side.server.pid
    with pytest.raises(EvalError, match=f"^upstream: the server's process {pid} is gone"):
        side.engine_pids()
    with pytest.raises(EvalError, match=f"the server's process {pid} is gone"):
        obstacle_to_second(pid)


def test_an_engine_that_is_gone_is_an_error_that_names_the_side(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with (
        running(tmp_path, "upstream") as side,
        pytest.raises(EvalError, match=r"^upstream: expected its engine processes, found"),
        Observation(side.url, [child.pid], label="upstream"),
    ):
        child.communicate(b"\n")


def test_the_side_is_told_without_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choice = SideChoice("kvplug", "kvplug", {"connector": {"auth_token": "hidden", "size": 3}})
    with running_side(choice, "model", ["--hf-token", "hidden", "--seed", "5"], tmp_path, command=FAKE) as side:
        found = side.side
    assert "hidden" not in found.model_dump_json() + capsys.readouterr().err
    assert found.settings["connector"]["size"] == 3
    assert "--seed 5" in found.command
