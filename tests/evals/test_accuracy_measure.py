"""`measure` with the real lm-eval, against servers that answer without a model; and options that are refused."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.evals.accuracy_support import FakeSide, answering
from tests.evals.throughput_support import FAKE_SERVER
from vllm_kvplug.evals.accuracy import measure as measure_module
from vllm_kvplug.evals.accuracy.lm_eval_process import LmEvalProcess, LoadedTask
from vllm_kvplug.evals.accuracy.options import AccuracyOptions, parse_model_args
from vllm_kvplug.evals.errors import EvalError, EvalUsageError
from vllm_kvplug.evals.observe import Observation
from vllm_kvplug.evals.sides import choices
from vllm_kvplug.evals.tasks.generate import counted_rows, sums

TARGETS = {item["prompt"]: item["target"] for item in [*counted_rows(1), *sums(1)]}
OWN_TASK = """
task: own_task
dataset_path: json
dataset_kwargs: {data_files: {test: %s}, cache_dir: %s}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def wrong_every_third() -> Callable[[str], str]:
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return "wrong" if len(asked) % 3 == 0 else f" {TARGETS[prompt]} "

    return answer


@contextmanager
def served_by(monkeypatch: pytest.MonkeyPatch, **answers: Callable[[str], str]) -> Iterator[list[FakeSide]]:
    """`measure` gets these instead of real servers: a function of the prompt for each side."""
    sides: list[FakeSide] = []

    @contextmanager
    def running_side(
        choice: Any, model: str, server_args: list[str], folder: Path, command: None
    ) -> Iterator[FakeSide]:
        with answering(answers[choice.label]) as url:
            sides.append(FakeSide(url, choice, folder))
            yield sides[-1]

    monkeypatch.setattr(measure_module, "running_side", running_side)
    yield sides


def options(folder: Path, **changed: Any) -> AccuracyOptions:
    values: dict[str, Any] = {
        "model": "model",
        "folder": folder,
        "tasks": ["kvplug_counted_rows", "kvplug_sums"],
        "limit": 30,
        "num_concurrent": 4,
        "chat": True,
        "choices": choices(),
    }
    return AccuracyOptions(**(values | changed))


@pytest.mark.slow
def test_a_comparison_from_the_tasks_to_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with served_by(monkeypatch, upstream=TARGETS.__getitem__, kvplug=wrong_every_third()):
        report = measure_module.measure(options(tmp_path))
    accuracy = report.accuracy
    assert accuracy is not None
    assert accuracy.tasks == ["kvplug_counted_rows", "kvplug_sums"]
    assert [score.num_samples for score in accuracy.scores] == [30, 30]
    assert [score.values[0] for score in accuracy.scores] == [1.0, 1.0]
    assert sum(score.values[1] for score in accuracy.scores) == pytest.approx(2 * 2 / 3)
    assert len(accuracy.differing) == 60  # the candidate's are of other spaces, or wrong
    assert sum(answer.answers[1] == "wrong" for answer in accuracy.differing) == 20
    assert report.exit_status == 1
    assert "kvplug loses accuracy" in report.verdict[0]
    assert [use.num_finished_requests for use in report.cache] == [60, 60]
    assert [use.num_hit_tokens for use in report.cache] == [600, 600]
    kept = {path.name for path in tmp_path.iterdir()}
    assert {"tasks", "lm_eval.log", "server-upstream-lm_eval.json", "server-kvplug-lm_eval.json"} <= kept
    assert "upstream: requests" in capfd.readouterr().err


@pytest.mark.slow
def test_a_server_that_fails_ends_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        served_by(monkeypatch, upstream={}.__getitem__) as sides,
        pytest.raises(EvalError, match="upstream: ClientResponseError: 500"),
    ):
        measure_module.measure(options(tmp_path, limit=2))
    assert sides[0].deaths == ["the evaluation"]


@pytest.mark.slow
def test_a_task_of_ones_own_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"{n}?", "answer": str(n)}) + "\n" for n in range(5)))
    (tmp_path / "own.yaml").write_text(OWN_TASK % (data, tmp_path / "cache"))
    out = tmp_path / "out"
    out.mkdir()
    echo = lambda prompt: prompt.rstrip("?")  # noqa: E731
    with served_by(monkeypatch, upstream=echo, kvplug=echo):
        report = measure_module.measure(
            options(out, tasks=["own_*"], include_paths=[tmp_path], limit=None, num_concurrent=1)
        )
    assert report.accuracy is not None
    assert report.accuracy.scores[0].values == (1.0, 1.0)
    assert report.exit_status == 0
    assert not (out / "tasks").exists()


@pytest.mark.slow
def test_an_unknown_task_is_one_line_before_any_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        served_by(monkeypatch) as sides,
        pytest.raises(
            EvalUsageError, match=r"^--tasks: expected .*found 'kvplug_sum'; close to it: kvplug_sums"
        ) as got,
    ):
        measure_module.measure(options(tmp_path, tasks=["kvplug_sum"]))
    assert "\n" not in str(got.value)
    assert sides == []
    assert list(tmp_path.iterdir()) == []


def test_chat_refuses_log_likelihoods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        LoadedTask("kvplug_sums", "generate_until", 2, 2),
        LoadedTask("kvplug_capital_choice", "multiple_choice", 2, 8),
    ]
    monkeypatch.setattr(LmEvalProcess, "__enter__", lambda process: process)
    monkeypatch.setattr(LmEvalProcess, "load", lambda *arguments: found)
    with pytest.raises(EvalUsageError, match="--chat: expected tasks that generate, found kvplug_capital_choice"):
        measure_module.measure(options(tmp_path, tasks=["kvplug_suite"]))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"limit": 0}, "--limit: expected 1 or more, found 0"),
        ({"num_concurrent": -1}, "--num-concurrent: expected 1 or more, found -1"),
        ({"tasks": ()}, "--tasks: expected names of lm-eval tasks, found none"),
        ({"include_paths": [Path("/no/such")]}, "--include-path: expected a folder with YAML task files"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(EvalUsageError, match=re.escape(message)):
        options(tmp_path, **changed).check()


def test_the_default_pool_is_small_and_holds_one_long_request(tmp_path: Path) -> None:
    def flags(*args: str) -> dict[str, str]:
        full = options(tmp_path, server_args=args).full_server_args()
        joined = " ".join(full).replace("=", " ").split()
        return dict(zip(joined[::2], joined[1::2], strict=True))

    assert flags() == {"--max-model-len": "1024", "--num-gpu-blocks-override": "96", "--max-num-seqs": "4"}
    assert flags("--max-model-len=4096")["--num-gpu-blocks-override"] == "288"
    assert flags("--num-gpu-blocks-override", "500")["--num-gpu-blocks-override"] == "500"
    assert flags("--max_num_seqs", "9") == {
        "--max-model-len": "1024",
        "--num-gpu-blocks-override": "96",
        "--max_num_seqs": "9",
    }


def test_model_args_are_names_and_values() -> None:
    assert parse_model_args("add_bos_token=True, eos_string=<|end|>") == {
        "add_bos_token": "True",
        "eos_string": "<|end|>",
    }
    assert parse_model_args(None) == {}
    with pytest.raises(EvalUsageError, match="--lm-eval-args: expected name=value,name=value, found 'bos'"):
        parse_model_args("bos")


@pytest.mark.slow
def test_a_server_that_dies_half_way_is_told_with_its_last_lines(tmp_path: Path) -> None:
    command = [*FAKE_SERVER, "--die-at", "3"]
    with pytest.raises(EvalError, match=r"(?s)^upstream: the server ended with exit status 7 during.*engine is dead"):
        measure_module.measure(options(tmp_path, limit=4, num_concurrent=1, server_command=command))
    assert psutil.Process().children(recursive=True) == []


def test_an_evaluation_goes_on_while_its_server_runs_and_not_longer(tmp_path: Path) -> None:
    side = FakeSide("http://127.0.0.1:9", choices()[0], tmp_path)  # nothing listens there: a failed look is no end
    observation = Observation(side.url)
    with measure_module._progress(side, observation, 1) as advance:  # type: ignore[arg-type]
        advance()
        assert side.deaths == []
        side.returncode = 7
        advance()
    assert side.deaths == ["the evaluation"]


def test_tasks_that_are_not_loaded_in_time_end_the_wait(tmp_path: Path) -> None:
    with (
        LmEvalProcess(tmp_path / "log", [sys.executable, "-c", "import time; time.sleep(600)"]) as process,
        pytest.raises(EvalError, match=r"^--tasks gsm8k: loading them, .* has not answered for 1 s"),
    ):
        process.load(["gsm8k"], [], timeout_s=1.0)


def test_loading_tells_how_long_it_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(measure_module, "_LOADING_PERIOD_S", 0.0)
    with measure_module._loading() as tell:
        tell()
    assert "tasks      still being loaded after 0 s" in capsys.readouterr().err


@pytest.mark.slow
def test_the_process_is_gone_after_an_error(tmp_path: Path) -> None:
    pids = []

    def interrupted() -> None:
        with LmEvalProcess(tmp_path / "log") as process:
            pids.append(process.pid)
            process.load(["kvplug_suite"], [], while_waiting=signal_interrupt)

    def signal_interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
