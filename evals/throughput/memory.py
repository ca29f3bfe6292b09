"""Whether a second server like the first still fits beside it."""

from __future__ import annotations

import subprocess

from vllm_kvplug.evals.errors import EvalError

# The second may need a little more than the first, and the machine something to breathe.
_SPARE_FACTOR = 1.1
_SPARE_BYTES = 2**30


def obstacle_to_second(first_pid: int) -> str | None:
    """Why a second server does not fit, or None. `first_pid` is the process of the first, all started up.

    Raises:
        EvalError: the first is gone.
    """
    import psutil

    return obstacle(_resident_bytes(first_pid), psutil.virtual_memory().available, _gpu_memory_mib())


def obstacle(first_bytes: int, available_bytes: int, gpus_mib: list[tuple[int, int]]) -> str | None:
    """The decision: from the first server's memory, what is left, and (used, free) of each GPU.

    A GPU is taken to hold nothing but the first server.
    """
    needed_bytes = int(first_bytes * _SPARE_FACTOR) + _SPARE_BYTES
    if needed_bytes > available_bytes:
        return f"a second server needs about {_gib(needed_bytes)} of memory and {_gib(available_bytes)} are available"
    for number, (used_mib, free_mib) in enumerate(gpus_mib):
        if used_mib > free_mib:
            return (
                f"GPU {number} has {used_mib} MiB in use and {free_mib} MiB free (--gpu-memory-utilization below 0.45?)"
            )
    return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _resident_bytes(pid: int) -> int:
    """Of a process and all that it started; memory that they share counts once where the system tells."""
    import psutil

    total = 0
    try:
        server = psutil.Process(pid)
        processes = [server, *server.children(recursive=True)]
    except psutil.NoSuchProcess:
        raise EvalError(f"the server's process {pid} is gone") from None
    for process in processes:
        try:
            memory = process.memory_full_info()
            total += getattr(memory, "pss", 0) or memory.rss
        except psutil.AccessDenied:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def _gpu_memory_mib() -> list[tuple[int, int]]:
    command = ["nvidia-smi", "--query-gpu=memory.used,memory.free", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        rows = [line.split(",") for line in text.splitlines() if line.strip()]
        return [(int(used), int(free)) for used, free in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
