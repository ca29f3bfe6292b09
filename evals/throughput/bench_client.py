"""`vllm bench serve` as a client that is started once and runs a command line as often as asked."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from vllm_kvplug.evals.errors import EvalError
from vllm_kvplug.evals.throughput.loads import BenchLoad
from vllm_kvplug.evals.throughput.run_result import RunResult
from vllm_kvplug.evals.worker_process import WorkerProcess

_START_TIMEOUT_S = 300.0


def bench_arguments(
    load: BenchLoad,
    *,
    url: str,
    served_name: str,
    model_path: str,
    seed: int,
    salt: str,
    request_rate: float | None,
    max_concurrency: int | None,
    result_path: Path,
    data_set_path: Path,
) -> list[str]:
    """The arguments of `vllm bench serve` for one run; its prompts must lie in `data_set_path` if it has any."""
    args = ["--backend", "openai", "--base-url", url, "--model", model_path, "--served-model-name", served_name]
    args += ["--tokenizer", model_path, *load.data_set_args, "--num-prompts", str(load.num_requests)]
    if load.prompts:
        args += ["--dataset-path", str(data_set_path)]
    args += ["--seed", str(seed), "--temperature", "0", "--ignore-eos"]
    # With a salt of its own a run finds nothing in the cache that an earlier one left.
    args += ["--extra-body", json.dumps({"cache_salt": salt})]
    args += ["--request-rate", "inf" if request_rate is None else f"{request_rate:g}"]
    if max_concurrency is not None:
        args += ["--max-concurrency", str(max_concurrency)]
    args += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99", "--disable-tqdm"]
    return [*args, "--save-result", "--save-detailed", "--result-filename", str(result_path)]


def write_data_set(load: BenchLoad, path: Path) -> None:
    """The load's prompts as vLLM's `custom` data set reads them."""
    lines = [json.dumps({"prompt": prompt.text, "output_tokens": prompt.num_output_tokens}) for prompt in load.prompts]
    path.write_text("\n".join(lines) + "\n")


class VllmBench:
    """A context in which `vllm bench serve` can be run; its process is gone afterwards.

    Args:
        log_path: where all goes that it prints.
        command: what to run in place of our worker (tests).
    """

    def __init__(self, log_path: Path, command: Sequence[str] | None = None) -> None:
        command = command or (sys.executable, "-m", "vllm_kvplug.evals.throughput.bench_worker")
        self._worker = WorkerProcess("the process of vllm bench serve", command, log_path)
        self._is_ready = False

    def __enter__(self) -> VllmBench:
        self._worker.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.stop()

    def wait_ready(self) -> None:
        """Wait until it has imported vLLM, so that this falls into nobody's measurement."""
        if not self._is_ready:
            self._worker.ask(None, "vllm bench serve", timeout_s=_START_TIMEOUT_S)
            self._is_ready = True

    def run(self, arguments: Sequence[str], result_path: Path, check: Callable[[], None], label: str) -> RunResult:
        """Run one command line.

        Args:
            check: called twice a second; raises if waiting is of no use (the server died), which ends the process.
            label: whom errors are about.

        Raises:
            EvalError: it failed.
        """
        self.wait_ready()
        error = self._worker.ask({"arguments": list(arguments)}, label, check=check)["error"]
        if error is not None:
            message = f"{label}: vllm bench serve failed ({error}); {shlex.join(arguments)}"
            raise EvalError(self._worker.with_log_tail(message))
        return RunResult.read(result_path)
