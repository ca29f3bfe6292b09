"""`kvplug ab bench`: two servers, loaded in turn with the same work, compared pair by pair."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_kvplug.cli import console
from vllm_kvplug.cli.models.store import ensure_model
from vllm_kvplug.evals.errors import EvalError
from vllm_kvplug.evals.results import Report, Throughput
from vllm_kvplug.evals.setting import command_line, is_cpu_build, machine, now, versions
from vllm_kvplug.evals.sides import max_model_len_of, with_defaults
from vllm_kvplug.evals.throughput import summary
from vllm_kvplug.evals.throughput.bench_runs import BenchRuns
from vllm_kvplug.evals.throughput.loads import VLLM_CLIENT, BenchLoad, Load
from vllm_kvplug.evals.throughput.options import ThroughputOptions
from vllm_kvplug.evals.throughput.vocabulary import Vocabulary
from vllm_kvplug.evals.throughput.workloads import Recipe, describe, needs_vocabulary
from vllm_kvplug.redaction import redacted_args

# On the CPU build, unless --server-args says otherwise: the workloads' lengths, and a pool that is fought for.
_DEFAULTS_ON_CPU = (("--max-model-len", "2048"), ("--num-gpu-blocks-override", "384"))
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
        self._server_args = with_defaults(options.server_args, _DEFAULTS_ON_CPU if is_cpu_build() else ())
        self._model_path = ensure_model(options.model, report=console.say)
        vocabulary = Vocabulary.of_model(self._model_path) if needs_vocabulary(options.workload) else None
        self._recipe = Recipe(options, vocabulary, max_model_len_of(self._server_args))
        self._recipe.load(0)  # it is refused now rather than after minutes

    def measure(self, folder: Path) -> Report:
        """Run it; `folder` gets the logs and what the clients measured. No process is left afterwards.

        Raises:
            KVPlugError: a server or a client failed, or the servers take shorter requests than the workload has.
        """
        options = self.options
        started = time.monotonic()
        created = now()
        bench = BenchRuns(options, self._model_path, self._server_args, self._recipe, folder)
        runs, alone = bench.run()
        found = versions()
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
            versions=found,
            sides=bench.sides(),
            cache=cache,
            throughput=Throughput(
                workload=options.workload,
                # Of the recipe in force: servers may have told a limit that the arguments do not name.
                parameters=_parameters(options, bench.recipe.load(0), self._server_args, found.get("vllm", "")),
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


def _check_libraries() -> None:
    """Before minutes of measuring, not after."""
    for name in ("psutil", "scipy"):
        if find_spec(name) is None:
            raise EvalError(f"kvplug ab bench: {name} is not installed; pip install 'vllm-kvplug[ab]'")


def _parameters(
    options: ThroughputOptions, load: Load, server_args: Sequence[str], vllm_version: str
) -> dict[str, Any]:
    """What a reader needs to judge the load, and to send it again."""
    client = f"{VLLM_CLIENT} {vllm_version}".strip() if isinstance(load, BenchLoad) else load.client
    parameters: dict[str, Any] = {
        "client": client,
        "workload": describe(options.workload),
        "num_requests": load.num_requests,
        "max_tokens_of_a_request": load.max_tokens,
        "length_scale": options.length_scale,
        "server_args": redacted_args(server_args),
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
