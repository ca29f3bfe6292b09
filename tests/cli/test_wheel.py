"""The wheel: all of the package, both entry points, and no requirement that could pull a second vLLM."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy: building leaves folders beside the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("vllm_kvplug", "evals", "patches"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


def read(wheel: zipfile.ZipFile, suffix: str) -> str:
    (name,) = [name for name in wheel.namelist() if name.endswith(suffix)]
    return wheel.read(name).decode()


def test_it_holds_the_whole_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "vllm_kvplug").rglob("*.py")}
    # These are installed inside the package, with all that evals' tasks and reports, and `kvplug patch`, read.
    for name in ("evals", "patches"):
        found = {path for path in (ROOT / name).rglob("*") if path.is_file() and "__pycache__" not in path.parts}
        sources |= {f"vllm_kvplug/{path.relative_to(ROOT).as_posix()}" for path in found if path.suffix != ".md"}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == sources | {"vllm_kvplug/py.typed"}


def test_no_unconditional_requirement_can_pull_a_second_vllm(wheel: zipfile.ZipFile) -> None:
    metadata = message_from_string(read(wheel, ".dist-info/METADATA"))
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    always = {requirement.name for requirement in requirements if requirement.marker is None}
    assert always == {"httpx", "msgspec", "pydantic", "rich", "typer"}
    (cuda,) = [requirement for requirement in requirements if requirement.name == "vllm"]
    assert (str(cuda.specifier), str(cuda.marker)) == ("==0.17.1", 'extra == "cuda"')


def test_vllm_finds_the_plugin_and_a_shell_the_command(wheel: zipfile.ZipFile) -> None:
    entry_points = read(wheel, ".dist-info/entry_points.txt")
    assert "[vllm.general_plugins]\nkvplug = vllm_kvplug:register" in entry_points
    assert "[console_scripts]\nkvplug = vllm_kvplug.cli.main:main" in entry_points
