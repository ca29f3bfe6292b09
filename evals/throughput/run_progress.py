"""How far the runs of a comparison are, on standard error."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_kvplug.cli import console


class RunProgress:
    """A bar while a run lasts (a server's start has one of its own); one line a run where no terminal is."""

    def __init__(self, num_runs: int) -> None:
        self._num_runs = num_runs
        self._num_done = 0
        self._console = Console(stderr=True)

    def running(self, label: str, counts: bool = False) -> AbstractContextManager[Any]:
        """A context for one run; `counts` says whether it is one of the measured."""
        number = self._num_done
        self._num_done += counts
        if not self._console.is_terminal:
            console.say(f"run        {label}")
            return ExitStack()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        progress = Progress(*columns, console=self._console, transient=True)
        progress.add_task(label, total=self._num_runs, completed=number)
        return progress
