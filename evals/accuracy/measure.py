"""`kvplug ab eval`: lm-eval against one server after the other."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_kvplug.cli import console, server_metrics
from vllm_kvplug.evals import setting
from vllm_kvplug.evals.accuracy import compare
from vllm_kvplug.evals.accuracy.lm_eval_process import LmEvalProcess, LoadedTask
from vllm_kvplug.evals.accuracy.options import AccuracyOptions
from vllm_kvplug.evals.accuracy.verdict import verdict
from vllm_kvplug.evals.errors import EvalError, EvalUsageError
from vllm_kvplug.evals.observe import Observation
from vllm_kvplug.evals.results import Accuracy, CacheUse, Report, Side
from vllm_kvplug.evals.serving import RunningSide, max_model_len, running_side
from vllm_kvplug.evals.sides import SideChoice
from vllm_kvplug.evals.tasks.generate import GENERATORS
from vllm_kvplug.evals.tasks.suite import write_tasks

# One request may wait long in a full server on a slow machine.
_REQUEST_TIMEOUT_S = 1800
_LOADING_PERIOD_S = 30.0


def measure(options: AccuracyOptions) -> Report:
    """Serve the model with each manager in turn, run lm-eval against it, and compare.

    `options.folder` gets the servers' and lm-eval's logs, lm-eval's results with samples, and the bundled tasks as they
    were asked; nothing before the tasks have been found.

    Raises:
        EvalUsageError: an unknown task, or an option that cannot be.
        EvalError, ServerError: a side could not be measured; with the last lines of who failed.
    """
    options.check()
    started = time.monotonic()
    created = setting.now()
    with tempfile.TemporaryDirectory(prefix="kvplug-eval-") as name:
        scratch = Path(name)
        write_tasks(scratch / "tasks", options.seed, scratch / "datasets")
        include_paths = [scratch / "tasks", *(path.resolve() for path in options.include_paths)]
        with LmEvalProcess(scratch / "lm_eval.log") as lm_eval, _log_kept(lm_eval.log_path, options.folder):
            tasks = _load(lm_eval, options, include_paths)
            if any(task.name in GENERATORS for task in tasks):
                write_tasks(options.folder / "tasks", options.seed)
            measured = [_measure_side(choice, options, lm_eval, tasks) for choice in options.choices]
    return _report(options, tasks, measured, created, time.monotonic() - started)


def _load(lm_eval: LmEvalProcess, options: AccuracyOptions, include_paths: Sequence[Path]) -> list[LoadedTask]:
    console.say(f"tasks      {', '.join(options.tasks)}")
    with _loading() as tell:
        tasks = lm_eval.load(options.tasks, include_paths, options.limit, tell)
    unanswerable = [task.name for task in tasks if not task.reads_the_prefix_cache]
    if options.chat and unanswerable:
        raise EvalUsageError(
            f"--chat: expected tasks that generate, found {', '.join(unanswerable)}: chat completions give no "
            "log-likelihoods of prompts"
        )
    return tasks


def _measure_side(
    choice: SideChoice, options: AccuracyOptions, lm_eval: LmEvalProcess, tasks: Sequence[LoadedTask]
) -> tuple[dict[str, Any], Side, CacheUse]:
    with running_side(
        choice, options.model, options.full_server_args(), options.folder, command=options.server_command
    ) as running:
        num_requests = sum(task.num_requests for task in tasks)
        try:
            job = _job(options, running)
            with (
                Observation(running.url, running.engine_pids(), label=choice.label) as observation,
                _progress(running, observation, num_requests) as advance,
            ):
                results = lm_eval.evaluate(job, advance)
        except (EvalError, server_metrics.MetricsError) as error:
            running.raise_if_dead("the evaluation")
            message = str(error)
            raise EvalError(
                message if message.startswith(f"{choice.label}: ") else f"{choice.label}: {message}"
            ) from error
        return results, running.side, observation.cache_use()


def _job(options: AccuracyOptions, running: RunningSide) -> dict[str, Any]:
    """The arguments of lm-eval for this server."""
    model_args: dict[str, Any] = {
        "model": running.served_name,
        "base_url": f"{running.url}/v1/{'chat/completions' if options.chat else 'completions'}",
        "num_concurrent": options.num_concurrent,
        # A request asked again would count twice, and a server that fails is to be seen.
        "max_retries": 1,
        "timeout": _REQUEST_TIMEOUT_S,
        "max_length": max_model_len(running.url),
    }
    if not options.chat:
        # Token ids: lm-eval then shortens a prompt that would not fit, and no side tokenizes in another way.
        model_args |= {"tokenizer": options.model, "tokenizer_backend": "huggingface", "tokenized_requests": True}
    return {
        "model": "local-chat-completions" if options.chat else "local-completions",
        "model_args": {**model_args, **options.lm_eval_model_args},
        "limit": options.limit,
        "num_fewshot": options.num_fewshot,
        "chat": options.chat,
        "samples_path": str(running.server.log_path.with_name(running.server.log_path.stem + "-lm_eval.json")),
    }


@contextmanager
def _loading() -> Iterator[Callable[[], None]]:
    """A spinner while lm-eval loads tasks; where no terminal is, what is yielded says a line now and then."""
    shown = Console(stderr=True)
    started = time.monotonic()
    next_line_s = _LOADING_PERIOD_S

    def tell() -> None:
        nonlocal next_line_s
        elapsed_s = time.monotonic() - started
        if elapsed_s >= next_line_s and not shown.is_terminal:
            console.say(f"tasks      still being loaded after {elapsed_s:.0f} s")
            next_line_s += _LOADING_PERIOD_S

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as bar:
        bar.add_task("loading the tasks")
        yield tell


@contextmanager
def _progress(running: RunningSide, observation: Observation, num_requests: int) -> Iterator[Callable[[], None]]:
    """A bar of answered requests; what is yielded moves it, and raises EvalError once the server is gone."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        line = bar.add_task(f"{running.choice.label}: requests", total=num_requests)

        def advance() -> None:
            bar.update(line, completed=observation.num_finished_requests)
            if running.server.returncode is not None:
                running.raise_if_dead("the evaluation")

        yield advance
        bar.update(line, completed=num_requests)


@contextmanager
def _log_kept(log_path: Path, folder: Path) -> Iterator[None]:
    """Copy lm-eval's log into the run's folder if anything else got there."""
    try:
        yield
    finally:
        if log_path.exists() and any(folder.iterdir()):
            shutil.copy(log_path, folder / log_path.name)


def _report(
    options: AccuracyOptions,
    tasks: Sequence[LoadedTask],
    measured: Sequence[tuple[dict[str, Any], Side, CacheUse]],
    created: str,
    duration_s: float,
) -> Report:
    (first, first_side, first_cache), (second, second_side, second_cache) = measured
    labels = (first_side.label, second_side.label)
    compared = compare.comparisons((first, second), labels)
    scores = compare.scores((first, second))
    sentences, status = verdict(labels, tasks, compared, scores, (first_cache, second_cache))
    return Report(
        kind="accuracy",
        created=created,
        duration_s=round(duration_s, 1),
        command=setting.command_line(),
        model=options.model_name or options.model,
        machine=setting.machine(),
        versions=setting.versions(),
        sides=(first_side, second_side),
        cache=(first_cache, second_cache),
        accuracy=Accuracy(
            tasks=[task.name for task in tasks],
            limit=options.limit,
            num_concurrent=options.num_concurrent,
            scores=scores,
            agreement=[task.agreement() for task in compared],
            differing=[answer for task in compared for answer in task.differing()],
        ),
        verdict=sentences,
        exit_status=status,
    )
