"""The runs of `kvplug ab bench`: servers and clients, started and loaded in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from vllm_kvplug.cli import console
from vllm_kvplug.evals.errors import EvalError
from vllm_kvplug.evals.observe import Observation
from vllm_kvplug.evals.results import CacheUse, Side
from vllm_kvplug.evals.serving import RunningSide, max_model_len, running_side
from vllm_kvplug.evals.sides import SideChoice
from vllm_kvplug.evals.throughput import summary
from vllm_kvplug.evals.throughput.bench_client import VllmBench, bench_arguments, write_data_set
from vllm_kvplug.evals.throughput.loads import BenchLoad, Load
from vllm_kvplug.evals.throughput.memory import obstacle_to_second
from vllm_kvplug.evals.throughput.options import ThroughputOptions
from vllm_kvplug.evals.throughput.run_progress import RunProgress
from vllm_kvplug.evals.throughput.run_result import RunResult
from vllm_kvplug.evals.throughput.stream_client import StreamClient
from vllm_kvplug.evals.throughput.workloads import Recipe

_WARM_UP = "warm-up"


class BenchRuns:
    """The servers and clients of one comparison.

    Attributes:
        recipe: what runs are made from; with the servers' own limit once one of them has started.
    """

    def __init__(
        self, options: ThroughputOptions, model_path: str, server_args: Sequence[str], recipe: Recipe, folder: Path
    ) -> None:
        self._options = options
        self._model_path = model_path
        self._server_args = server_args
        self.recipe = recipe
        self._folder = folder
        self._runs_folder = folder / "runs"
        self._runs_folder.mkdir()
        self._sides: dict[int, Side] = {}
        self._vllm_bench: VllmBench | None = None
        self._progress = RunProgress(2 * options.pairs)

    def sides(self) -> tuple[Side, Side]:
        """As they were started last."""
        return (self._sides[0], self._sides[1])

    def run(self) -> tuple[list[tuple[summary.Run, summary.Run]], str | None]:
        """All pairs, and why one server ran at a time (None: both were up)."""
        with ExitStack() as stack:
            if isinstance(self.recipe.load(0), BenchLoad):
                self._vllm_bench = stack.enter_context(VllmBench(self._folder / "bench.log"))
            if self._options.one_at_a_time:
                return self._run_in_turn(), "asked for with --one-at-a-time"
            with ExitStack() as servers:
                first = servers.enter_context(self._server(0))
                self._started(0, first)
                with first.death_told("its start"):
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
        name = f"{_WARM_UP}-{side + 1}"
        with running.death_told(f"run {name}"):
            self.recipe = Recipe(self._options, self.recipe.vocabulary, max_model_len(running.url))
            if self._vllm_bench is not None:
                self._vllm_bench.wait_ready()
            with self._progress.running(f"{_WARM_UP}, {running.choice.label}"):
                self._load(running, -1, self.recipe.warm_up(), name)

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
        name = f"pair-{pair + 1:02d}-{side + 1}"
        with self._progress.running(f"pair {pair + 1} of {self._options.pairs}, {label}", counts=True):
            load = self.recipe.load(pair)
            with running.death_told(f"run {name}"):
                with Observation(running.url, running.engine_pids(), label=label) as observation:
                    result = self._load(running, pair, load, name)
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

        def check() -> None:
            if running.server.returncode is not None:
                running.raise_if_dead(f"run {name}")

        if isinstance(load, BenchLoad):
            result = self._run_vllm_bench(running, load, seed, salt, path, check)
        else:
            result = StreamClient(running.url, running.served_name, label, salt, check).run(load)
            result.write(path)
        result.raise_if_failed(f"{label}, run {name}")
        return result

    def _run_vllm_bench(
        self, running: RunningSide, load: BenchLoad, seed: int, salt: str, path: Path, check: Callable[[], None]
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
