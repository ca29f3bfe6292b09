"""`kvplug ab bench` as it is typed: wrong values are one line and exit status 2, and no server starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evals.refusals import check_refusal
from tests.evals.throughput_support import write_trace
from vllm_kvplug.cli import main
from vllm_kvplug.evals.errors import EvalError
from vllm_kvplug.evals.throughput import bench_runs, pairs


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a server was to be started")

    monkeypatch.setattr(bench_runs, "running_side", refuse)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "chat"], "--workload: expected one of random, shared-prefixes,"),
        (["--pairs", "0"], "--pairs: expected 1 or more, found 0"),
        (["--pairs", "many"], "'--pairs'"),
        (["--num-requests", "30"], "expected a multiple of 4, found 30"),
        (["--workload", "mooncake"], "expected --trace PATH"),
        (["--candidate-config", "[1]"], "--candidate-config: expected a JSON object"),
        (["--server-args", "--port 80"], "--server-args: --port is set"),
        (["--server-args", "--max-model-len 64"], "expected requests of at most 64 tokens"),
        (["--seed", "-1"], "--seed: expected 0 to"),
    ],
)
def test_a_wrong_value_is_one_line_and_status_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_refusal(["ab", "bench", "--model", str(tmp_path), *arguments], message, tmp_path, capsys, monkeypatch)


def test_a_model_without_a_tokenizer_is_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    trace = write_trace(tmp_path / "trace.jsonl", [(0.0, 512, 512, [0])])
    with pytest.raises(SystemExit) as ended:
        main.main(["ab", "bench", "--model", str(tmp_path), "--workload", "mooncake", "--trace", str(trace)])
    assert ended.value.code == 2
    assert "its tokenizer cannot be read" in capsys.readouterr().err


def test_a_library_that_is_missing_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.evals.throughput_support import options

    monkeypatch.setattr(pairs, "find_spec", lambda name: None if name == "scipy" else object())
    with pytest.raises(EvalError, match=r"scipy is not installed; pip install 'vllm-kvplug\[ab\]'"):
        pairs.Comparison(options())
