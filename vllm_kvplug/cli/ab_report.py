"""`kvplug ab report`: render a run's results again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    results: Annotated[Path, typer.Argument(help="results.json of a run, or the folder that holds it.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to (default: where the results are).")] = None,
) -> None:
    """Write report.html and report.md from RESULTS again, and print its summary."""
    from rich.console import Console

    from vllm_kvplug.evals.errors import EvalUsageError
    from vllm_kvplug.evals.report import print_summary, read_report, write_report

    report = read_report(results)
    folder = out or (results if results.is_dir() else results.parent)
    try:
        write_report(report, folder)
    except OSError as error:
        raise EvalUsageError(f"--out {folder}: expected a folder to write to, found: {error.strerror}") from None
    print_summary(report, Console())
    typer.echo(f"report     {folder / 'report.html'}")
