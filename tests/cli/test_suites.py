"""`make test` fails if a suite fails, if it runs no test, and does not stop at the first failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import suites


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, body in {"good": "assert True", "bad": "assert False", "empty": None}.items():
        (tmp_path / name).mkdir()
        if body is not None:
            (tmp_path / name / f"test_{name}.py").write_text(f"def test_it():\n    {body}\n")
    monkeypatch.setattr(suites, "TESTS", tmp_path)
    found = {name: suites.Suite(name, "loadfile" if name == "good" else None) for name in ("bad", "empty", "good")}
    monkeypatch.setattr(suites, "SUITES", found)
    monkeypatch.setattr(suites, "NAMES", ("bad", "empty", "good"))
    return tmp_path


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize(
    ("names", "status", "last_line"),
    [
        (["good"], 0, "1 passed, 0 failed, 0 skipped"),
        (["bad"], 1, "0 passed, 1 failed, 0 skipped"),
        (["empty"], 1, "0 passed, 1 failed, 0 skipped"),
        ([], 1, "1 passed, 2 failed, 0 skipped"),
    ],
)
def test_status_and_sum(names: list[str], status: int, last_line: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert suites.main(names) == status
    assert capfd.readouterr().out.splitlines()[-1] == last_line


@pytest.mark.usefixtures("folders")
def test_an_unknown_suite_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        suites.main(["fast"])
    assert caught.value.code == 2
    assert "no suite 'fast'; suites: bad, empty, good" in capsys.readouterr().err
