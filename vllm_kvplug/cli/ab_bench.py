"""`kvplug ab bench`: throughput and latency of two KV cache managers, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vllm_kvplug.evals.throughput.options import ThroughputOptions

WORKLOADS_HELP = "random, shared-prefixes, multi-turn, long-documents or mooncake (replays --trace)."


def command(
    model: Annotated[
        str, typer.Option(help="A model of `kvplug model list`, a hub name, or a local path.")
    ] = "default",
    workload: Annotated[str, typer.Option(help=WORKLOADS_HELP)] = "shared-prefixes",
    pairs: Annotated[int | None, typer.Option(help="Runs of each side (default: 6; 5 with --quick).")] = None,
    num_requests: Annotated[int | None, typer.Option(help="Requests of a run (default: 32; 16 with --quick).")] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(help="Requests (multi-turn: conversations) that start in a second (default: no limit)."),
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Requests or conversations under way at once (default: 8; mooncake: no limit).")
    ] = None,
    length_scale: Annotated[
        float, typer.Option(help="Factor of all lengths; 1 suits 2048 tokens, 32 is the mooncake trace's own.")
    ] = 1.0,
    think_time: Annotated[float, typer.Option(help="Mean seconds between an answer and the next turn.")] = 0.5,
    trace: Annotated[Path | None, typer.Option(help="A file of Mooncake's JSON lines.")] = None,
    time_scale: Annotated[float, typer.Option(help="Factor of the trace's times: 0.5 is twice as fast.")] = 1.0,
    trace_sample: Annotated[
        float, typer.Option(help="Part of the trace's conversations; scale its times alike for an equal load.")
    ] = 1.0,
    baseline: Annotated[str, typer.Option(help="KV cache manager of the first side.")] = "upstream",
    candidate: Annotated[str, typer.Option(help="KV cache manager of the second side.")] = "kvplug",
    baseline_config: Annotated[str | None, typer.Option(help="Its settings, a JSON object.")] = None,
    candidate_config: Annotated[str | None, typer.Option(help="Its settings, a JSON object.")] = None,
    server_args: Annotated[str | None, typer.Option(help="Further arguments of `vllm serve`, for both sides.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed makes the same requests.")] = 0,
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="Never both servers up (default: if memory allows).")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer pairs and requests.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the results (default: a new one in kvplug-ab/).")] = None,
) -> None:
    """Load two servers in turn with the same requests and compare them pair by pair."""
    from vllm_kvplug.evals.sides import choices, split_server_args
    from vllm_kvplug.evals.throughput.options import ThroughputOptions

    options = ThroughputOptions(
        model=model,
        workload=workload,
        num_pairs=pairs,
        num_requests=num_requests,
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        length_scale=length_scale,
        think_time_s=think_time,
        trace=trace,
        time_scale=time_scale,
        trace_sample=trace_sample,
        seed=seed,
        one_at_a_time=one_at_a_time,
        quick=quick,
        server_args=tuple(split_server_args(server_args)),
        sides=choices(baseline, candidate, baseline_config, candidate_config),
        out=out,
    )
    raise typer.Exit(run(options))


def run(options: ThroughputOptions) -> int:
    """Measure, write the report's files, print the tables; the exit status."""
    from rich.console import Console

    from vllm_kvplug.cli.console import say, signals_as_interrupts
    from vllm_kvplug.evals.report import print_summary, write_report
    from vllm_kvplug.evals.setting import run_folder
    from vllm_kvplug.evals.throughput.pairs import FOLDER_KIND, Comparison

    with signals_as_interrupts():
        comparison = Comparison(options)
        folder = run_folder(options.out, FOLDER_KIND)
        report = comparison.measure(folder)
        write_report(report, folder)
    print_summary(report, Console())
    say(f"report     {folder / 'report.html'}")
    return report.exit_status
