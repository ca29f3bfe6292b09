"""Runs of the command in a process of their own, and whether anything of them is left."""

from __future__ import annotations

import contextlib
import os
import time
import uuid

import psutil

_MARK = "KVPLUG_TEST_RUN"


def marked_environment() -> dict[str, str]:
    """An environment by which a process and all that it starts are known."""
    return {**os.environ, _MARK: uuid.uuid4().hex}


def left_over(environment: dict[str, str], timeout_s: float = 20.0) -> list[str]:
    """Command lines of those that still run; they may take a moment to end."""
    deadline = time.monotonic() + timeout_s
    while (found := _marked(environment[_MARK])) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _marked(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found
