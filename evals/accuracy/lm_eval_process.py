"""lm-eval's process, from the side that starts it."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from vllm_kvplug.evals.errors import EvalError, EvalUsageError
from vllm_kvplug.evals.worker_process import WorkerProcess

_EXTRA = "pip install 'vllm-kvplug[ab]'"
_LOG_LIKELIHOOD_TYPES = ("loglikelihood", "loglikelihood_rolling", "multiple_choice")
# A hub that does not answer is asked again and again.
LOAD_TIMEOUT_S = 600.0
# It shares the machine with the server: no accelerator, one thread.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


@dataclass(frozen=True)
class LoadedTask:
    """One task that lm-eval has found, and how much it asks."""

    name: str
    output_type: str
    num_samples: int
    num_requests: int

    @property
    def reads_the_prefix_cache(self) -> bool:
        """Whether vLLM looks its prompts up: not where it must give their log-likelihoods."""
        return self.output_type not in _LOG_LIKELIHOOD_TYPES


class LmEvalProcess:
    """lm-eval, as a context manager. Its log is `log_path`.

    Args:
        command: what to run in place of our worker (tests).
    """

    def __init__(self, log_path: Path, command: Sequence[str] | None = None) -> None:
        self.log_path = log_path
        command = command or (sys.executable, "-m", "vllm_kvplug.evals.accuracy.lm_eval_worker")
        self._worker = WorkerProcess("lm-eval's process", command, log_path, _ENVIRONMENT)

    def __enter__(self) -> LmEvalProcess:
        if importlib.util.find_spec("lm_eval") is None:
            raise EvalUsageError(f"lm_eval cannot be imported: {_EXTRA}")
        self._worker.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.stop()

    @property
    def pid(self) -> int:
        return self._worker.pid

    def load(
        self,
        tasks: Sequence[str],
        include_paths: Sequence[Path],
        limit: int | None = None,
        while_waiting: Callable[[], None] = lambda: None,
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> list[LoadedTask]:
        """Find the tasks and load their data.

        Raises:
            EvalUsageError: an unknown task, or one whose data cannot be had.
            EvalError: lm-eval ended, or took longer than `timeout_s`.
        """
        job = {
            "tasks": list(tasks),
            "include_paths": [str(path) for path in include_paths],
            "limit": limit,
        }
        what = f"--tasks {','.join(tasks)}: loading them, and their data from a hub if it lies there"
        return [LoadedTask(**task) for task in self._do({"load": job}, what, while_waiting, timeout_s)["tasks"]]

    def evaluate(self, job: dict[str, Any], while_waiting: Callable[[], None]) -> dict[str, Any]:
        """Run the loaded tasks; lm-eval's results, with samples. `job`: the arguments of Worker.evaluate.

        `while_waiting` is called about twice a second; what it raises ends the wait.
        """
        answer = self._do({"evaluate": job}, "the tasks", while_waiting, None)
        results: dict[str, Any] = json.loads(Path(answer["samples_path"]).read_text())
        return results

    def _do(
        self, job: dict[str, Any], what: str, while_waiting: Callable[[], None], timeout_s: float | None
    ) -> dict[str, Any]:
        answer = self._worker.ask(job, what, check=while_waiting, timeout_s=timeout_s)
        if "error" in answer:
            raise (EvalUsageError if answer["usage"] else EvalError)(answer["error"])
        return answer
