"""The stand-in for vLLM, and the processes that it leaves or not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

FAKE_VLLM = str(Path(__file__).with_name("fake_vllm.py"))


def fake(behaviour: str) -> list[str]:
    return [sys.executable, FAKE_VLLM, behaviour]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def child_pid(log: str) -> int:
    found = re.search(r"CHILD (\d+)", log)
    assert found, log
    return int(found[1])
