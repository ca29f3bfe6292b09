"""vLLM's own tests: fetched from the package registry at run time and laid out so that they run offline without a GPU.

Nothing of them is ever committed. They run from their own folder, because the suite is itself a package called `tests`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from vllm_kvplug.cli.models import store

# The installed one, whose own tests are run.
VLLM_VERSION = importlib.metadata.version("vllm").partition("+")[0]
# By version; tests/patches takes some of the others, tests/matrix all.
SDIST_SHA256 = {
    "0.17.0": "b0b62e58ef4eb633ef371f2726976372cf6dfcb7ff2ea9ddf7194c1930d5629a",
    "0.17.1": "d26a95dcb92e2ff78ed4b48bff247d845b0c768edf6c0acf2401376a56c57b61",
    "0.18.0": "9a1bee091db8dbb4664a2a09cd9c61912e9912a44af1ce12b8593a231d05971c",
    "0.18.1": "8d18eff1c4ed21eb8cf7a45a1d1b34752d5ec287e79186e451d5c2f797cacdb7",
    "0.19.0": "81e59cf87175e7a62eb8d9acf5989484bbd17089d5eface353f89067bda282d9",
    "0.19.1": "9fb88ce6b50991eba41d183584f65f51d7f6015d86a42cdabf79c1c8bd5d66fa",
}

# Marks that upstream declares in its own pyproject.toml, which is left in the archive.
_MARKS = (
    "core_model",
    "cpu_model",
    "cpu_test",
    "distributed",
    "hybrid_model",
    "optional",
    "skip_global_cleanup",
    "slow_test",
    "split",
)

# file -> (text, replacement): what keeps a test from running on a machine without a GPU, plain upstream included.
_EDITS = {
    # The fixture that starts a process group asks for the GPU's backend.
    "tests/conftest.py": ('backend="nccl"', 'backend="gloo"'),
    # A mocked attribute is truthy: unless it is set, all tests of the file take the model for an encoder-decoder.
    "tests/v1/streaming_input/test_scheduler_streaming.py": (
        "model_config.is_multimodal_model = False\n",
        "model_config.is_multimodal_model = False\n    vllm_config.model_config.is_encoder_decoder = False\n",
    ),
}


class SuiteError(RuntimeError):
    """The suite cannot be had or laid out: one line that says what to do."""


def cache_folder() -> Path:
    """Where downloads, the suite and the hub are kept: beside the models, see `kvplug model list`."""
    return store.cache_folder().parent / "conformance"


def sdist_path(version: str = VLLM_VERSION) -> Path:
    """The source distribution in the cache, fetched with pip if it is not there, checked by its sha256 in any case."""
    path = cache_folder() / f"vllm-{version}.tar.gz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            fetched = _download(version, Path(folder))
            _check(fetched, version)
            fetched.replace(path)
    _check(path, version)
    return path


def _check(path: Path, version: str) -> None:
    found, expected = hashlib.sha256(path.read_bytes()).hexdigest(), _sha256(version)
    if found != expected:
        raise SuiteError(f"{path}: expected sha256 {expected}, found {found}; remove the file and try again")


def _sha256(version: str) -> str:
    if version not in SDIST_SHA256:
        raise SuiteError(f"the tests of vLLM {version}: expected one of {', '.join(SDIST_SHA256)}")
    return SDIST_SHA256[version]


def _download(version: str, folder: Path) -> Path:
    # pip asks a source distribution for its metadata even when only told to download it. The variables keep vLLM's
    # build script quick (no compiler, no CUDA); it needs setuptools-scm and torch, which the environment has.
    environ = {**os.environ, "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
    requirements = folder / "requirements.txt"
    requirements.write_text(f"vllm=={version} --hash=sha256:{_sha256(version)}\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary=vllm",
        "--no-build-isolation",
    ]
    command += ["--require-hashes", "--requirement", str(requirements), "--dest", str(folder)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    path = folder / f"vllm-{version}.tar.gz"
    if done.returncode or not path.exists():
        lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        raise SuiteError(f"could not download {path.name} with pip (exit status {done.returncode}): {lines[-1]}")
    return path


def suite_folder() -> Path:
    """The suite, laid out: the folder that holds upstream's `tests`. Made once for each version of this file."""
    archive = sdist_path()
    layout = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = cache_folder() / f"suite-{VLLM_VERSION}-{layout}"
    if not folder.exists():
        scratch = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _lay_out(archive, scratch)
            # A second run may have been quicker: its folder is as good.
            with contextlib.suppress(OSError):
                scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _lay_out(archive: Path, folder: Path) -> None:
    prefix = f"vllm-{VLLM_VERSION}/"
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix(prefix)
            source = tar.extractfile(member) if name.startswith("tests/") and member.isfile() else None
            if source is not None:
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(source.read())
    for name, (text, replacement) in _EDITS.items():
        path = folder / name
        code = path.read_text()
        if code.count(text) != 1:
            raise SuiteError(
                f"{name} of vLLM {VLLM_VERSION}: expected {text.strip()!r} once, found it {code.count(text)} times"
            )
        path.write_text(code.replace(text, replacement))
    marks = "".join(f"    {mark}: upstream's\n" for mark in _MARKS)
    (folder / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{marks}")
