"""An environment for another vLLM version: the project's lock with that one version replaced, in `.matrix/VERSION`."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import re
import shutil
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".matrix"
_METADATA = "packaging/vllm-cpu-metadata"


def _project_environment() -> ModuleType:
    """packaging/environment.py, which is a script and no package: it finds uv and calls it."""
    spec = importlib.util.spec_from_file_location("kvplug_environment", ROOT / "packaging" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python_of(version: str) -> Path:
    """The interpreter of this version's environment."""
    return FOLDER / version / "venv" / "bin" / "python"


class EnvironmentFailedError(RuntimeError):
    """A version's environment cannot be had: one line that says why."""


class MissingLibraryError(EnvironmentFailedError):
    """A version needs a library that this machine does not have: one line that says which."""


def variables(version: str) -> dict[str, str]:
    """The environment variables of what runs in this version's environment.

    0.18's CPU worker does not start unless two libraries are preloaded; the second one is the environment's own.

    Raises:
        MissingLibraryError: the first one is not there.
    """
    environ = dict(os.environ)
    if version.startswith("0.18."):
        allocator = ctypes.util.find_library("tcmalloc_minimal")
        if allocator is None:
            raise MissingLibraryError(
                f"vLLM {version}: expected libtcmalloc_minimal, found none; "
                "Debian: apt-get install libtcmalloc-minimal4"
            )
        environ["LD_PRELOAD"] = f"{allocator}:{FOLDER / version / 'venv' / 'lib' / 'libiomp5.so'}"
    return environ


def make(version: str) -> None:
    """Make the environment, if it is missing or was made from something else.

    uv keeps every version of the project's lock that still fits.

    Raises:
        EnvironmentFailedError: uv could not resolve or install it.
    """
    script = _project_environment()
    try:
        _make(version, script)
    except script.SetupError as error:
        raise EnvironmentFailedError(f"vLLM {version}: {error}") from error


def _make(version: str, script: ModuleType) -> None:
    folder, python = FOLDER / version, python_of(version)
    stamp = folder / "made-from.txt"
    if python.exists() and stamp.exists() and stamp.read_text() == script.inputs_digest():
        return
    stamp.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    wanted, lock = folder / "dependencies.in", folder / "requirements.lock"
    wanted.write_text(with_version((ROOT / "packaging" / "dependencies.in").read_text(), version))
    shutil.copy(ROOT / "requirements.lock", lock)
    metadata = folder / "vllm-cpu-metadata"
    shutil.copytree(ROOT / _METADATA, metadata, dirs_exist_ok=True)
    project = metadata / "pyproject.toml"
    project.write_text(with_version((ROOT / _METADATA / "pyproject.toml").read_text(), version))

    uv = script.find_or_install_uv()
    script.make_virtual_environment(folder / "venv", uv, None)
    here = ["--python", str(python)]
    script.say(f"vLLM {version}: resolving from the project's lock")
    script.run_uv(uv, ["pip", "compile", "--quiet", *here, "--generate-hashes", "--no-emit-index-url", "--override",
                       "packaging/overrides.in", str(wanted), "-o", str(lock)])  # fmt: skip
    script.say(f"vLLM {version}: installing")
    script.run_uv(uv, ["pip", "sync", "--quiet", *here, "--require-hashes", str(lock)])
    script.run_uv(uv, ["pip", "install", "--quiet", *here, "--no-deps", "--no-build-isolation", str(metadata),
                       "-e", "."])  # fmt: skip
    stamp.write_text(script.inputs_digest())


def with_version(text: str, version: str) -> str:
    """The text of a project or requirements file with vLLM's version in it replaced.

    Raises:
        ValueError: it names no version of vLLM.
    """
    baseline = re.search(r"vllm-cpu==([0-9.]+[0-9])", text)
    if baseline is None:
        raise ValueError(f"expected a line with vllm-cpu==VERSION, found none in {text[:60]!r}")
    return text.replace(baseline.group(1), version)
