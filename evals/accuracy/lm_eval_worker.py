"""lm-eval in a process of its own: it changes global state, takes seconds to import, and blocks while it runs.

One JSON object a line comes on standard input, one goes back for each on standard output. Everything that libraries
print goes to standard error. The first is {"load": ...}, each later one {"evaluate": ...}; lm_eval_process.py is the
other end.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any


class JobError(Exception):
    """A job that cannot be done: the text is for the user. `usage`: what was asked for is to blame."""

    def __init__(self, message: str, usage: bool = False) -> None:
        super().__init__(message)
        self.usage = usage


class Worker:
    """What stays between jobs: lm-eval's index of tasks."""

    def __init__(self) -> None:
        self._manager: Any = None
        self._names: list[str] = []

    def load(self, tasks: list[str], include_paths: list[str], limit: int | None) -> dict[str, Any]:
        """Find and load the tasks, data included, and say how many requests they make."""
        self._manager, self._names = _find(tasks, include_paths)
        try:
            loaded = self._manager.load(list(self._names))["tasks"]
        except Exception as error:  # whatever a task's own code, a hub or a file may raise
            raise JobError(
                f"--tasks {','.join(self._names)}: cannot be loaded: {_one_line(error)}", usage=True
            ) from error
        return {"tasks": [_summary(name, task, limit) for name, task in loaded.items()]}

    def evaluate(
        self,
        model: str,
        model_args: dict[str, Any],
        limit: int | None,
        num_fewshot: int | None,
        chat: bool,
        samples_path: str,
    ) -> dict[str, Any]:
        """Run the loaded tasks against a server; results and samples are written to `samples_path` as JSON."""
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.utils import handle_non_serializable

        results = simple_evaluate(
            model=model,
            model_args=model_args,
            # By name: tasks that ran keep their requests and the state of their random numbers.
            tasks=list(self._names),
            task_manager=self._manager,
            limit=limit,
            num_fewshot=num_fewshot,
            apply_chat_template=chat,
            log_samples=True,
            bootstrap_iters=1000,
        )
        text = json.dumps(results, default=handle_non_serializable, ensure_ascii=False)
        Path(samples_path).write_text(text + "\n")
        return {"samples_path": samples_path}


def _find(tasks: list[str], include_paths: list[str]) -> tuple[Any, list[str]]:
    """lm-eval's index and the names in it. Reading all of its own tasks takes long: only if others do not suffice."""
    from lm_eval.tasks import TaskManager

    unknown: list[str] = []
    manager: Any = None
    for include_defaults in (False, True):
        manager = TaskManager(include_path=include_paths, include_defaults=include_defaults)
        names, unknown = _resolve(manager, tasks)
        if not unknown:
            return manager, names
    close = difflib.get_close_matches(unknown[0], manager.all_tasks, n=3)
    hint = f"; close to it: {', '.join(close)}" if close else ""
    raise JobError(
        f"--tasks: expected names of lm-eval tasks (further ones with --include-path), found {unknown[0]!r}{hint}",
        usage=True,
    )


def _resolve(manager: Any, tasks: list[str]) -> tuple[list[str], list[str]]:
    """(names, what is unknown): names as they are, patterns, and paths of YAML files."""
    known = set(manager.all_tasks)
    names: list[str] = []
    unknown = []
    for task in tasks:
        if task in known or (task.endswith(".yaml") and Path(task).is_file()):
            names.append(task)
        elif matches := [name for name in manager.match_tasks([task]) if "*" in task]:
            names += matches
        else:
            unknown.append(task)
    return list(dict.fromkeys(names)), unknown


def _summary(name: str, task: Any, limit: int | None) -> dict[str, Any]:
    """What a task will ask; the number of requests of a multiple choice is read from its first sample."""
    num_samples = len(task.eval_docs)
    if limit is not None:
        num_samples = min(limit, num_samples)
    output_type = task.get_config("output_type") or getattr(task, "OUTPUT_TYPE", "") or "generate_until"
    num_choices = 1
    if output_type == "multiple_choice" and num_samples:
        num_choices = len(task.doc_to_choice(task.eval_docs[0]))
    return {
        "name": name,
        "output_type": output_type,
        "num_samples": num_samples,
        "num_requests": num_samples * num_choices,
    }


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:500]}"


def main() -> None:
    """Do jobs until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    logging.basicConfig(level=logging.WARNING)
    worker = Worker()
    for line in sys.stdin:
        ((kind, arguments),) = json.loads(line).items()
        try:
            answer = worker.load(**arguments) if kind == "load" else worker.evaluate(**arguments)
        except JobError as error:
            answer = {"error": str(error), "usage": error.usage}
        except Exception as error:
            logging.exception("%s", kind)
            answer = {"error": _one_line(error), "usage": False}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
