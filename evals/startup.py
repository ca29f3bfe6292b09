"""Does an installed but unused kvplug slow vLLM's start? `python -m evals.startup [--pairs 5] [--model tiny-qwen2]`

Starts `vllm serve` with the plugin kept out (VLLM_PLUGINS empty) and with it loaded but nothing chosen, in turn, and
prints for both the seconds until /health answers and the CPU seconds of all processes, minimum and median, and their
ratios. It does not show what choosing kvplug costs.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_kvplug.cli.model import ensure_model
from vllm_kvplug.cli.server_process import ServerProcess

SERVER_ARGS = ("--enforce-eager", "--block-size", "16", "--max-model-len", "512")
SIDES = {"plugin kept out": {"VLLM_PLUGINS": ""}, "installed, not chosen": {"VLLM_PLUGINS": "kvplug"}}


@dataclass(frozen=True)
class Start:
    """One start: seconds until ready, and CPU seconds until the server was stopped again."""

    ready_s: float
    cpu_s: float


def start_once(model: str, env: dict[str, str]) -> Start:
    """Start a server, wait until it answers, stop it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(prefix="kvplug-startup-") as folder:
        with ServerProcess(model, SERVER_ARGS, env, Path(folder) / "server.log") as server:
            ready_s = server.wait_ready(timeout_s=600)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Start(ready_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main(
    pairs: Annotated[int, typer.Option(min=1, help="Starts of each side.")] = 5,
    model: Annotated[
        str, typer.Option(help="A model of `kvplug model list`, a hub name, or a local path.")
    ] = "tiny-qwen2",
) -> None:
    """Compare the start of `vllm serve` with and without the plugin loaded."""
    path = ensure_model(model)
    start_once(path, {})  # fills the file caches, counts for nobody
    starts: dict[str, list[Start]] = {side: [] for side in SIDES}
    for number in track(range(pairs), description="pairs of starts", console=Console(stderr=True)):
        # Who goes first changes, so that a drift of the machine falls on both.
        for side in sorted(SIDES, reverse=bool(number % 2)):
            starts[side].append(start_once(path, SIDES[side]))
    print_table(starts)


def print_table(starts: dict[str, list[Start]]) -> None:
    """Minimum and median of each side, and the ratio of the second side to the first."""
    table = Table(title=f"start of vllm serve, {len(next(iter(starts.values())))} starts of each side")
    for column in ("", "ready min s", "ready median s", "CPU min s", "CPU median s"):
        table.add_column(column, justify="right" if column else "left")
    rows = []
    for side, found in starts.items():
        ready_s, cpu_s = [start.ready_s for start in found], [start.cpu_s for start in found]
        rows.append((min(ready_s), statistics.median(ready_s), min(cpu_s), statistics.median(cpu_s)))
        table.add_row(side, *(f"{value:.2f}" for value in rows[-1]))
    table.add_row("ratio", *(f"{second / first:.3f}" for first, second in zip(*rows, strict=True)))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
