"""Where a run writes, and what it says of the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_kvplug.evals import setting
from vllm_kvplug.evals.errors import EvalUsageError


def test_a_run_writes_into_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert setting.run_folder(None, "eval").parent == tmp_path / "kvplug-ab"
    assert setting.run_folder("here/there", "eval") == tmp_path / "here" / "there"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(EvalUsageError, match="expected a new or empty folder, found files"):
        setting.run_folder(tmp_path, "eval")
    with pytest.raises(EvalUsageError, match="cannot be made"):
        setting.run_folder(tmp_path / "results.json" / "x", "eval")


def test_the_machine_and_the_versions_can_be_written() -> None:
    assert json.loads(setting.machine().model_dump_json())["num_cores"] >= 1
    assert {"vllm_kvplug", "vllm"} <= setting.versions().keys()
