"""How far a run is: a bar on a terminal, a line for each row elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vllm_kvplug.cli.console import say
from vllm_kvplug.evals.performance import numbers
from vllm_kvplug.evals.performance.results import RowResult


class RowProgress:
    """A context; standard error is where it is shown.

    Args:
        num_repeats: of all rows.
    """

    def __init__(self, num_repeats: int) -> None:
        console = Console(stderr=True)
        self._is_terminal = console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not self._is_terminal,
        )
        self._task = self._bar.add_task("", total=num_repeats)

    def __enter__(self) -> RowProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def begin(self, name: str) -> None:
        """A row's set-up begins."""
        self._bar.update(self._task, description=name, refresh=True)

    def advance(self) -> None:
        """One repeat of both sides is done."""
        self._bar.advance(self._task)

    def end(self, row: RowResult) -> None:
        """A row is done."""
        if not self._is_terminal:
            say(f"{row.name}: {numbers.ratio(row.ratio_of_minima)}, {numbers.ratio(row.ratio_of_medians)}")
