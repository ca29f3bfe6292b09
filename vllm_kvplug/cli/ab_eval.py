"""`kvplug ab eval`: accuracy of two KV cache managers, side by side."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vllm_kvplug.evals.accuracy.options import AccuracyOptions


def command(
    model: Annotated[
        str, typer.Option(help="A model of `kvplug model list`, a hub name, or a local path.")
    ] = "default",
    tasks: Annotated[
        str,
        typer.Option(help="lm-eval's tasks, groups, tags, patterns or YAML files, with commas between them."),
    ] = "kvplug_suite",
    limit: Annotated[int | None, typer.Option(help="The first so many samples of each task (default: all).")] = None,
    num_concurrent: Annotated[
        int | None, typer.Option(help="Requests at once (default: 24, which the default pool cannot hold).")
    ] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples before each sample (default: the task's).")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask through chat completions, with the model's chat template.")
    ] = False,
    include_path: Annotated[
        list[Path] | None, typer.Option(help="Folder with YAML task files of your own; may be repeated.")
    ] = None,
    lm_eval_args: Annotated[
        str | None, typer.Option(help="Further arguments of lm-eval's model class: name=value,name=value.")
    ] = None,
    baseline: Annotated[str, typer.Option(help="KV cache manager of the first side.")] = "upstream",
    candidate: Annotated[str, typer.Option(help="KV cache manager of the second side.")] = "kvplug",
    baseline_config: Annotated[str | None, typer.Option(help="Its settings, a JSON object.")] = None,
    candidate_config: Annotated[str | None, typer.Option(help="Its settings, a JSON object.")] = None,
    server_args: Annotated[str | None, typer.Option(help="Further arguments of `vllm serve`, for both sides.")] = None,
    seed: Annotated[int, typer.Option(help="Of the bundled tasks: the same seed makes the same items.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the results (default: a new one in kvplug-ab/).")] = None,
) -> None:
    """Run lm-eval against each manager's server and compare scores and answers.

    Exit status: 0 no loss of accuracy shown, 1 a loss (or an error), 2 wrong usage, 3 prefix cache or preemption not
    tested.
    """
    from vllm_kvplug.cli.model import ensure_model
    from vllm_kvplug.evals.accuracy.options import DEFAULT_NUM_CONCURRENT, AccuracyOptions, parse_model_args
    from vllm_kvplug.evals.setting import run_folder
    from vllm_kvplug.evals.sides import choices, split_server_args

    options = AccuracyOptions(
        model=model,
        folder=out or Path(),
        tasks=tuple(name.strip() for name in tasks.split(",") if name.strip()),
        limit=limit,
        num_concurrent=DEFAULT_NUM_CONCURRENT if num_concurrent is None else num_concurrent,
        num_fewshot=num_fewshot,
        chat=chat,
        include_paths=tuple(include_path or ()),
        lm_eval_model_args=parse_model_args(lm_eval_args),
        server_args=tuple(split_server_args(server_args)),
        choices=choices(baseline, candidate, baseline_config, candidate_config),
        seed=seed,
    )
    options.check()
    folder = run_folder(out, "accuracy")
    try:
        status = run(options.placed(ensure_model(model), folder))
    except BaseException:
        with contextlib.suppress(OSError):  # keeps a folder that has anything in it
            folder.rmdir()
        raise
    raise typer.Exit(status)


def run(options: AccuracyOptions) -> int:
    """Measure, write the report's files, print the tables; the exit status."""
    from rich.console import Console

    from vllm_kvplug.cli.console import say, signals_as_interrupts
    from vllm_kvplug.evals.accuracy.measure import measure
    from vllm_kvplug.evals.report import print_summary, write_report

    with signals_as_interrupts():
        report = measure(options)
        write_report(report, options.folder)
    print_summary(report, Console())
    say(f"report     {options.folder / 'report.html'}")
    return report.exit_status
