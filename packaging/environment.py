#!/usr/bin/env python3
"""Make the project's environment `.venv` from requirements.lock, or do nothing when it is there and up to date.

Run by the Makefile with whatever `python3` the machine has (this file keeps to what Python 3.8 can run, so that an old
one can still say what is missing). The environment itself gets Python 3.12 if one is found that runs, else the newest
of 3.10 to 3.13; no interpreter is ever downloaded. uv does the work; where it is not on PATH, pip puts a pinned one
into `.uv/`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PREFERRED_VERSIONS: list[tuple[int, int]] = [(3, 12), (3, 13), (3, 11), (3, 10)]
# What the environment is made from; a change in any of them makes it again.
INPUTS = ["requirements.lock", "pyproject.toml", "packaging/vllm-cpu-metadata/pyproject.toml"]
STAMP_NAME = "kvplug-environment.json"
MINIMUM_UV_VERSION = (0, 5)


class SetupError(Exception):
    """The environment cannot be made; the message is one line for the user."""


def say(text: str) -> None:
    print(f"environment: {text}", file=sys.stderr, flush=True)


def python_version(executable: str) -> tuple[int, int] | None:
    """(major, minor) of an interpreter that runs, else None: a pyenv shim on PATH can be there and refuse to start."""
    probe = "import sys; print(sys.implementation.name, *sys.version_info[:2])"
    try:
        answer = subprocess.run(
            [executable, "-I", "-c", probe],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = answer.stdout.split()
    if answer.returncode != 0 or len(words) != 3 or words[0] != "cpython":
        return None
    return int(words[1]), int(words[2])


def python_candidates(uv: str | None = None) -> Iterator[str]:
    """Interpreters worth trying, likeliest first: names on PATH, pyenv's own folders, then what uv knows of."""
    for major, minor in PREFERRED_VERSIONS:
        yield f"python{major}.{minor}"
    yield from ["python3", "python", sys.executable]
    pyenv_root = os.environ.get("PYENV_ROOT") or os.path.join(os.path.expanduser("~"), ".pyenv")
    for major, minor in PREFERRED_VERSIONS:
        yield from sorted(
            glob.glob(os.path.join(glob.escape(pyenv_root), "versions", f"{major}.{minor}.*", "bin", "python"))
        )
    if uv is not None:
        for major, minor in PREFERRED_VERSIONS:
            found = subprocess.run(
                [uv, "python", "find", "--no-project", "--system", f"{major}.{minor}"],
                env=uv_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if found.returncode == 0 and found.stdout.strip():
                yield found.stdout.strip()


def choose_python(requested: str | None, uv: str | None = None) -> str:
    """The interpreter for `.venv`: the one asked for (PYTHON=...), else the most preferred version that runs."""
    allowed = "3.10, 3.11, 3.12 or 3.13"
    if requested:
        version = python_version(requested)
        if version is None:
            raise SetupError(f"PYTHON={requested}: expected a CPython {allowed} that runs, found none there")
        if version not in PREFERRED_VERSIONS:
            raise SetupError(f"PYTHON={requested}: expected CPython {allowed}, found {version[0]}.{version[1]}")
        return requested
    best: dict[tuple[int, int], str] = {}
    for executable in python_candidates(uv):
        version = python_version(executable)
        if version == PREFERRED_VERSIONS[0]:
            return executable
        if version in PREFERRED_VERSIONS:
            best.setdefault(version, executable)
    for version in PREFERRED_VERSIONS:
        if version in best:
            return best[version]
    raise SetupError(
        f"no Python found: expected CPython {allowed} on PATH or under pyenv; install one or give PYTHON=..."
    )


@functools.lru_cache(maxsize=1)
def uv_environment() -> dict[str, str]:
    """uv's environment: no Python is downloaded; a registry or certificate that pip knows of serves uv too."""
    env = dict(os.environ, UV_PYTHON_DOWNLOADS="never")
    env.pop("VIRTUAL_ENV", None)
    if not any(name in env for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_CONFIG_FILE")):
        env.update(pip_setting("index-url", "UV_DEFAULT_INDEX"))
    if "SSL_CERT_FILE" not in env:
        env.update(pip_setting("cert", "SSL_CERT_FILE"))
    return env


def pip_setting(name: str, variable: str) -> dict[str, str]:
    """{variable: value of pip's setting} from pip's environment variable or its files; {} where pip has none."""
    value = os.environ.get("PIP_" + name.upper().replace("-", "_"), "")
    for section in ("install", "global"):
        if not value:
            command = [sys.executable, "-m", "pip", "config", "get", f"{section}.{name}"]
            answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            value = answer.stdout.strip() if answer.returncode == 0 else ""
    return {variable: value} if value else {}


def uv_version(executable: str) -> tuple[int, ...] | None:
    """The version of a uv that runs, else None."""
    try:
        answer = subprocess.run([executable, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    words = answer.stdout.split()
    if answer.returncode != 0 or len(words) < 2 or words[0] != "uv":
        return None
    return tuple(int(part) for part in words[1].split(".")[:2])


def find_or_install_uv() -> str:
    """uv from PATH, else from `.uv/`, where pip puts the pinned one.

    `pip install --target` needs neither ensurepip (Debian's python3 has none) nor a writable system.
    """
    own = ROOT / ".uv" / "bin" / "uv"
    for candidate in (shutil.which("uv"), str(own)):
        version = uv_version(candidate) if candidate else None
        if candidate and version is not None and version >= MINIMUM_UV_VERSION:
            return candidate
    say("uv is not on PATH: installing it with pip into .uv/")
    lock = str(ROOT / "packaging" / "uv-bootstrap.lock")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--require-hashes", "--upgrade", "--target", str(ROOT / ".uv"), "-r", lock]  # fmt: skip
    env = dict(os.environ, PIP_ROOT_USER_ACTION="ignore")
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0 or uv_version(str(own)) is None:
        raise SetupError(
            f"uv could not be installed with {sys.executable} -m pip (its message is above): "
            "install pip (Debian: apt-get install python3-pip) or put uv on PATH"
        )
    return str(own)


def inputs_digest() -> str:
    """One digest over the content of everything that the environment is made from."""
    digest = hashlib.sha256()
    for name in INPUTS:
        content = (ROOT / name).read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def is_up_to_date(venv: Path, requested: str | None) -> bool:
    """Whether `venv` runs, was finished from the present inputs and, if a Python was asked for, is of that version."""
    try:
        stamp = json.loads((venv / STAMP_NAME).read_text())
    except (OSError, ValueError):
        return False
    if stamp.get("inputs") != inputs_digest():
        return False
    version = python_version(str(venv / "bin" / "python"))
    return version is not None and (not requested or version == python_version(requested))


def make_virtual_environment(venv: Path, uv: str, requested: str | None) -> None:
    """An empty environment at `venv`; one that is there and usable is kept, and filled anew by the caller."""
    version = python_version(str(venv / "bin" / "python"))
    wanted = python_version(choose_python(requested)) if requested else version
    if version in PREFERRED_VERSIONS and version == wanted:
        return
    if venv.exists():
        if not (venv / "pyvenv.cfg").exists() and any(venv.iterdir()):
            raise SetupError(f"{venv} exists and is no virtual environment: move it away")
        shutil.rmtree(venv)
    python = choose_python(requested, uv)
    say(f"Python {'.'.join(map(str, python_version(python) or ()))} from {python}")
    run_uv(uv, ["venv", "--quiet", "--no-project", "--python", shutil.which(python) or python, str(venv)])


def run_uv(uv: str, arguments: list[str]) -> None:
    """Run uv in the repository's root; its own messages go to the user."""
    if (
        subprocess.run(
            [uv, *arguments], cwd=ROOT, env=uv_environment(), stdin=subprocess.DEVNULL, check=False
        ).returncode
        != 0
    ):
        raise SetupError(f"`uv {' '.join(arguments[:2])}` failed (its message is above)")


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """`make demo` and `make test` may start together; the second waits and then finds the work done."""
    folder = ROOT / ".uv"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_environment(venv: Path, requested: str | None) -> None:
    """Bring `venv` up to date. The stamp is written last, so an interrupted run is done again."""
    if is_up_to_date(venv, requested):
        return
    with one_at_a_time():
        if is_up_to_date(venv, requested):
            return
        uv = find_or_install_uv()
        make_virtual_environment(venv, uv, requested)
        with contextlib.suppress(FileNotFoundError):
            (venv / STAMP_NAME).unlink()
        python = str(venv / "bin" / "python")
        say("installing the locked packages (a few minutes with an empty cache)")
        # A terminal sees the progress of the downloads; a log needs no line for each of 200 packages.
        quiet = [] if sys.stderr.isatty() else ["--quiet"]
        run_uv(uv, ["pip", "sync", *quiet, "--python", python, "--require-hashes", "requirements.lock"])
        # Both builds use the locked setuptools: with build isolation they would fetch another one, unlocked.
        run_uv(uv, ["pip", "install", "--quiet", "--python", python, "--no-deps", "--no-build-isolation",
                    "./packaging/vllm-cpu-metadata", "-e", "."])  # fmt: skip
        (venv / STAMP_NAME).write_text(json.dumps({"inputs": inputs_digest()}) + "\n")
        say(f"ready in {venv}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the project's environment, or print the uv that makes it.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where it goes (default: .venv)")
    parser.add_argument(
        "--python", default="", help="the interpreter to use (default: 3.12, else the newest of 3.10 to 3.13)"
    )
    parser.add_argument(
        "--print-uv", action="store_true", help="print uv's path, installing it if missing, and do nothing else"
    )
    options = parser.parse_args(arguments)
    try:
        if options.print_uv:
            with one_at_a_time():
                print(find_or_install_uv())
        else:
            make_environment(options.venv, options.python or None)
    except SetupError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted; the next run goes on from here")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
