"""`vllm bench serve` as a client that is started once and runs a command line as often as asked."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from vllm_kvplug.evals.errors import EvalError
from vllm_kvplug.evals.throughput.loads import BenchLoad
from vllm_kvplug.evals.throughput.run_result import RunResult

_POLL_S = 0.5
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 2.0
_NUM_TAIL_LINES = 8


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
        self._log_path = log_path
        self._command = list(command or (sys.executable, "-m", "vllm_kvplug.evals.throughput.bench_worker"))
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""
        self._is_ready = False

    def __enter__(self) -> VllmBench:
        # vLLM's client asks the environment for proxies; the servers are on this machine.
        env = os.environ | {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                start_new_session=True,  # the terminal's Ctrl-C reaches only us
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process; idempotent."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            if not self._is_ready:
                raise subprocess.TimeoutExpired(self._command, 0)
            process.wait(_STOP_TIMEOUT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
        self._process = None

    def wait_ready(self) -> None:
        """Wait until it has imported vLLM, so that this falls into nobody's measurement."""
        if not self._is_ready:
            self._answer("its start", lambda: None, time.monotonic() + _START_TIMEOUT_S)
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
        assert self._process is not None
        assert self._process.stdin is not None
        line = json.dumps({"arguments": list(arguments)}).encode() + b"\n"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError:
            raise EvalError(self._with_log_tail(f"{label}: vllm bench serve has ended")) from None
        try:
            error = self._answer(label, check)
        except BaseException:
            self._is_ready = False  # nobody will read the answer: end it at once
            self.stop()
            raise
        if error is not None:
            raise EvalError(self._with_log_tail(f"{label}: vllm bench serve failed ({error}); {shlex.join(arguments)}"))
        return RunResult.read(result_path)

    def _answer(self, label: str, check: Callable[[], None], deadline: float | None = None) -> str | None:
        """Wait for one line of the process: its error, or None."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._received:
            if select.select([descriptor], [], [], _POLL_S)[0]:
                part = os.read(descriptor, 65536)
                if not part:
                    raise EvalError(self._with_log_tail(f"{label}: the process of vllm bench serve has ended"))
                self._received += part
            elif deadline is not None and time.monotonic() > deadline:
                raise EvalError(self._with_log_tail(f"{label}: vllm bench serve is not ready in time"))
            check()
        line, _, self._received = self._received.partition(b"\n")
        error: str | None = json.loads(line)["error"]
        return error

    def _with_log_tail(self, message: str) -> str:
        try:
            lines = [line for line in self._log_path.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        return "\n".join([f"{message}; the last lines of {self._log_path}:", *lines[-_NUM_TAIL_LINES:]])
