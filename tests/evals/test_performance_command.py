"""`kvplug bench manager` as it is typed: a short run's files and table, upstream against itself, and refusals."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from tests.evals.refusals import check_refusal
from vllm_kvplug.cli import main
from vllm_kvplug.evals.performance import catalogue
from vllm_kvplug.evals.performance.results import BenchReport


@pytest.fixture(autouse=True)
def _few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_REPEATS", dict.fromkeys(catalogue._SIZES, (4, 2)))
    # Which the command would set for the rest of the process.
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.main(["bench", "manager", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "no-such"], "--rows no-such: expected part of a row's name or a pattern"),
        (["--rows", "no-such"], "found no row; rows: decode-nothing-new, decode-new-block,"),
        (["--candidate", "kvplgu"], "unknown manager 'kvplgu' (did you mean 'kvplug'?)"),
        (["--baseline", ""], "--baseline: expected a KV cache manager's name or module:Class, found ''"),
        (["--candidate", "no_such_module:Manager"], "--candidate: expected a class that can be imported"),
        (["--candidate-config", "lru"], "--candidate-config: expected a JSON object, found 'lru'"),
        (["--baseline-config", "[1]"], "--baseline-config: expected a JSON object, found '[1]'"),
        (["--candidate-config", '{"evicton": "lru"}'], "evicton"),
        (["--repeats", "3"], "--repeats"),
    ],
)
def test_a_wrong_value_is_one_line_and_status_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_refusal(["bench", "manager", *arguments], message, tmp_path, capsys, monkeypatch)


def test_a_folder_with_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text("older")
    assert run("--rows", "lookup-2k", "--output", str(tmp_path)) == 2
    assert "expected a new or empty folder, found files in it" in capsys.readouterr().err
    assert (tmp_path / "results.json").read_text() == "older"


def test_a_run_writes_its_files_and_prints_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run("--rows", "lookup-?k", "--output", str(out)) == 0
    shown = capsys.readouterr()
    assert {path.name for path in out.iterdir()} == {"results.json", "report.md", "context.png", "context.svg"}

    report = BenchReport.read(out / "results.json")
    assert (report.kind, report.quick, report.shares) == ("manager", False, [])
    assert [side.manager for side in report.sides] == ["upstream", "kvplug"]
    assert [(row.name, row.in_table, len(row.samples[0]), len(row.samples[1])) for row in report.rows] == [
        ("lookup-2k", True, 4, 4),
        ("lookup-8k", False, 4, 4),
    ]
    assert all(min(sample) > 0 for row in report.rows for sample in row.samples)
    assert {"vllm", "vllm_kvplug"} <= report.versions.keys()
    assert gc.get_freeze_count() < 10_000

    # A point that is not in the table is in the plot only.
    (line,) = [line for line in shown.out.splitlines() if line.startswith(" lookup-")]
    assert line.split()[0] == "lookup-2k"
    assert "of 1 rows with a target reach it" in shown.out
    assert shown.err.splitlines()[-1] == f"report     {out / 'report.md'}"
    text = (out / "report.md").read_text()
    assert "| lookup-2k" in text
    assert "(context.png)" in text


def test_upstream_against_itself_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run("--rows", "lookup-2k", "--quick", "--candidate", "upstream", "--json", "--output", str(out)) == 0
    printed = capsys.readouterr().out
    report = BenchReport.read(out / "results.json")
    assert BenchReport.model_validate(json.loads(printed)) == report
    assert [(side.label, side.manager) for side in report.sides] == [
        ("upstream (1)", "upstream"),
        ("upstream (2)", "upstream"),
    ]
    assert report.quick
    assert [len(samples) for samples in report.rows[0].samples] == [2, 2]
    # One point makes no line.
    assert {path.name for path in out.iterdir()} == {"results.json", "report.md"}
