"""`kvplug ab eval` as it is typed: wrong values are one line and exit status 2, and leave no folder behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evals.accuracy_support import cache_use
from tests.evals.refusals import check_refusal
from vllm_kvplug.cli import main
from vllm_kvplug.evals.accuracy import measure as measure_module
from vllm_kvplug.evals.accuracy.options import AccuracyOptions
from vllm_kvplug.evals.errors import EvalError, EvalUsageError
from vllm_kvplug.evals.results import Accuracy, Machine, Report, Side


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.main(["ab", "eval", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "--limit: expected 1 or more, found 0"),
        (["--limit", "few"], "'--limit'"),
        (["--num-concurrent", "0"], "--num-concurrent: expected 1 or more, found 0"),
        (["--tasks", " , "], "--tasks: expected names of lm-eval tasks, found none"),
        (["--include-path", "missing"], "--include-path: expected a folder with YAML task files, found 'missing'"),
        (["--lm-eval-args", "bos"], "--lm-eval-args: expected name=value,name=value, found 'bos'"),
        (["--server-args", "--kv-cache-manager kvplug"], "--server-args: --kv-cache-manager is set"),
        (["--server-args", "--host 0.0.0.0"], "--server-args: --host is set"),
        (["--server-args", "--port=80"], "--server-args: --port is set"),
        (["--server-args", "'--seed 1"], "--server-args: expected arguments as a shell reads them"),
        (["--candidate-config", "lru"], "--candidate-config: expected a JSON object"),
    ],
)
def test_a_wrong_value_is_one_line_and_status_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_refusal(["ab", "eval", "--model", str(tmp_path), *arguments], message, tmp_path, capsys, monkeypatch)


@pytest.mark.parametrize(("error", "status"), [(EvalUsageError("--tasks: no such"), 2), (EvalError("it died"), 1)])
def test_an_error_before_any_file_leaves_no_folder(
    error: Exception, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: AccuracyOptions) -> Report:
        raise error

    monkeypatch.setattr(measure_module, "measure", fail)
    assert run("--model", str(tmp_path), "--out", str(tmp_path / "out")) == status
    assert capsys.readouterr().err.strip() == f"kvplug: error: {error}"
    assert not (tmp_path / "out").exists()


def test_options_arrive_and_the_report_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[AccuracyOptions] = []

    def untested(options: AccuracyOptions) -> Report:
        seen.append(options)
        first, second = (
            Side(label=choice.label, manager=choice.manager, command="vllm serve", start_s=1.0)
            for choice in options.choices
        )
        return Report(
            kind="accuracy",
            created="2025-01-01T00:00:00+00:00",
            duration_s=1.0,
            command="kvplug ab eval",
            model=options.model,
            machine=Machine(cpu_model="any", num_cores=2, memory_gib=4.0, system="Linux", python="3.12"),
            versions={},
            sides=(first, second),
            cache=(cache_use(num_preemptions=0), cache_use(num_preemptions=0)),
            accuracy=Accuracy(tasks=["a"], limit=3, num_concurrent=2, scores=[], agreement=[], differing=[]),
            verdict=["this run does not test preemption"],
            exit_status=3,
        )

    monkeypatch.setattr(measure_module, "measure", untested)
    out = tmp_path / "out"
    arguments = ["--tasks", "a, b", "--limit", "3", "--num-concurrent", "2", "--chat", "--seed", "9"]
    arguments += ["--server-args", "--max-model-len 512", "--candidate", "tests.mine:Own", "--lm-eval-args", "a=1"]
    assert run("--model", str(tmp_path), "--out", str(out), "--include-path", str(tmp_path), *arguments) == 3
    (options,) = seen
    assert options.tasks == ("a", "b")
    assert (options.limit, options.num_concurrent, options.chat, options.seed) == (3, 2, True, 9)
    assert (options.server_args, options.include_paths) == (("--max-model-len", "512"), (tmp_path,))
    assert [choice.manager for choice in options.choices] == ["upstream", "tests.mine:Own"]
    assert options.lm_eval_model_args == {"a": "1"}
    assert {"report.html", "report.md", "results.json"} <= {path.name for path in out.iterdir()}
