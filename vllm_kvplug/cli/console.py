"""What long-running commands share: lines on standard error, a server's start told as it goes, signals as Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_kvplug.cli.server_process import ServerProcess

READY_TIMEOUT_S = 300.0


def say(text: str) -> None:
    """One line on standard error, at once."""
    print(text, file=sys.stderr, flush=True)


def wait_ready(server: ServerProcess, timeout_s: float = READY_TIMEOUT_S, label: str = "") -> float:
    """Wait for the server; a terminal sees one line that changes, a log one line a stage. Returns the seconds."""
    console = Console(stderr=True)
    prefix = f"{label}: " if label else ""
    if not console.is_terminal:
        return server.wait_ready(timeout_s, on_progress=lambda stage: say(f"           {prefix}{stage}"))
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(f"{prefix}importing vLLM")
        return server.wait_ready(timeout_s, on_progress=lambda stage: progress.update(task, description=prefix + stage))


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP end the command as Ctrl-C does, so that servers are stopped then too."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
