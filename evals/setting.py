"""What a result depends on besides the sides: machine, versions, command line; and the folder that a run writes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

from vllm_kvplug import __version__
from vllm_kvplug.evals.errors import EvalUsageError
from vllm_kvplug.evals.results import Machine

_DISTRIBUTIONS = ("vllm", "torch", "transformers", "lm_eval", "scipy")


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
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _commit()
    return found | ({"commit": commit} if commit else {})


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


def command_line() -> str:
    """The command that is running, as a shell would take it."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


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
