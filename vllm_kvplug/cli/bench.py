"""`kvplug bench`: what a manager's calls cost, without a model or a server. What measures is in `vllm_kvplug.evals`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vllm_kvplug.evals.performance.results import BenchReport

app = typer.Typer(
    help="Measure what two KV cache managers cost vLLM's scheduler.", rich_markup_mode=None, no_args_is_help=True
)
_Baseline = Annotated[str, typer.Option(help="KV cache manager of the first side.")]
_Candidate = Annotated[str, typer.Option(help="KV cache manager of the second side.")]
_BaselineConfig = Annotated[str | None, typer.Option(help="Its settings, a JSON object.")]
_CandidateConfig = Annotated[str | None, typer.Option(help="Its settings, a JSON object.")]
_Quick = Annotated[bool, typer.Option("--quick", help="Fewer repeats and points: a look, not a claim.")]
_Output = Annotated[
    Path | None, typer.Option("--output", "--out", help="Folder of the results (default: a new one in kvplug-ab/).")
]
_Json = Annotated[bool, typer.Option("--json", help="Print results.json instead of the table.")]


@app.command("manager")
def manager(
    rows: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Rows whose name has this in it, or matches it (*, ?).")
    ] = None,
    quick: _Quick = False,
    output: _Output = None,
    as_json: _Json = False,
    baseline: _Baseline = "upstream",
    candidate: _Candidate = "kvplug",
    baseline_config: _BaselineConfig = None,
    candidate_config: _CandidateConfig = None,
) -> None:
    """Time each call of vLLM's scheduler on both managers, in turns in one process."""
    _quiet_vllm()
    from vllm_kvplug.evals.performance.catalogue import chosen_rows
    from vllm_kvplug.evals.performance.manager_bench import ManagerBench
    from vllm_kvplug.evals.sides import choices

    bench = ManagerBench(
        choices(baseline, candidate, baseline_config, candidate_config), chosen_rows(rows, quick=quick), quick=quick
    )
    _run(bench.run, "bench-manager", output, as_json=as_json)


@app.command("scheduler")
def scheduler(
    running: Annotated[str, typer.Option(metavar="N,...", help="Running requests.")] = "64,256,1024",
    quick: _Quick = False,
    output: _Output = None,
    as_json: _Json = False,
    baseline: _Baseline = "upstream",
    candidate: _Candidate = "kvplug",
    baseline_config: _BaselineConfig = None,
    candidate_config: _CandidateConfig = None,
) -> None:
    """Time vLLM's own scheduler with each manager and made-up model outputs."""
    _quiet_vllm()
    from vllm_kvplug.evals.performance.scheduler_bench import SchedulerBench, parse_running
    from vllm_kvplug.evals.sides import choices

    bench = SchedulerBench(
        choices(baseline, candidate, baseline_config, candidate_config), parse_running(running), quick=quick
    )
    _run(bench.run, "bench-scheduler", output, as_json=as_json)


def _quiet_vllm() -> None:
    # Before vLLM is imported.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def _run(measure: Callable[[], BenchReport], kind: str, output: Path | None, *, as_json: bool) -> None:
    from rich.console import Console

    from vllm_kvplug.cli.console import say
    from vllm_kvplug.evals.performance.report import print_summary, write_report
    from vllm_kvplug.evals.setting import run_folder

    folder = run_folder(output, kind)
    try:
        report = measure()
    except BaseException:
        with contextlib.suppress(OSError):  # it has something in it
            folder.rmdir()
        raise
    write_report(report, folder)
    if as_json:
        print(report.model_dump_json(indent=1))
    else:
        print_summary(report, Console())
    say(f"report     {folder / 'report.md'}")
