"""Two lm-eval results put side by side: scores, agreement of answers, and the answers that differ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvplug.evals.errors import EvalError
from vllm_kvplug.evals.results import DifferingAnswer, TaskAgreement, TaskScore

_PROMPT_END_LEN = 200
# lm-eval's name for "no filter".
_NO_FILTER = "none"


@dataclass(frozen=True)
class Sample:
    """One side's answer to one sample. `score` is of the task's first metric that samples have; None: there is none."""

    sample_id: str
    prompt: str
    target: str
    answer: str
    score: float | None
    higher_is_better: bool = True


@dataclass(frozen=True)
class TaskComparison:
    """The samples of one task on both sides, in the task's order.

    `aggregate_metrics`: those (by the names that `scores` gives them) whose value is not the mean of numbers that the
    samples have, such as bleu and perplexity.
    """

    task: str
    pairs: list[tuple[Sample, Sample]]
    aggregate_metrics: list[str]

    def num_better_and_worse(self) -> tuple[int, int]:
        """Samples on which the candidate scores better, and worse, than the baseline."""
        better = worse = 0
        for first, second in self.pairs:
            if first.score is None or second.score is None:
                continue
            sign = change((first.score, second.score), first.higher_is_better)
            better += sign > 0
            worse += sign < 0
        return better, worse

    def agreement(self) -> TaskAgreement:
        """How many answers differ, with the exact test of right against wrong."""
        return TaskAgreement(
            task=self.task,
            num_samples=len(self.pairs),
            num_differing=len(self.differing()),
            p_value=exact_p_value(*self.num_better_and_worse()),
        )

    def differing(self) -> list[DifferingAnswer]:
        """The samples with another answer."""
        return [
            DifferingAnswer(
                task=self.task,
                sample_id=first.sample_id,
                prompt_end=first.prompt[-_PROMPT_END_LEN:],
                target=first.target,
                answers=(first.answer, second.answer),
                scores=(first.score, second.score),
            )
            for first, second in self.pairs
            if first.answer != second.answer
        ]


def change(values: tuple[float, float], higher_is_better: bool) -> int:
    """1: the candidate's value is better, -1: worse, 0: equal. Not a number is as bad as can be, and equals itself."""
    nan = (math.isnan(values[0]), math.isnan(values[1]))
    if any(nan):
        return nan[0] - nan[1]
    difference = values[1] - values[0] if higher_is_better else values[0] - values[1]
    return (difference > 0) - (difference < 0)


def exact_p_value(num_better: int, num_worse: int) -> float | None:
    """McNemar's exact test, two-sided: were samples that changed equally likely to get better and worse?

    For scores that are not 0 or 1 the same is the sign test. None where no score changed.
    """
    from scipy.stats import binomtest

    num_changed = num_better + num_worse
    return float(binomtest(num_worse, num_changed, 0.5).pvalue) if num_changed else None


@dataclass(frozen=True)
class _Metric:
    """One of lm-eval's values of a task."""

    name: str
    filter_name: str
    value: float

    @property
    def label(self) -> str:
        return self.name if self.filter_name == _NO_FILTER else f"{self.name} ({self.filter_name})"

    @property
    def key(self) -> str:
        return f"{self.name},{self.filter_name}"


def _metrics(result: dict[str, Any], task: str) -> Iterator[_Metric]:
    for key, value in result["results"][task].items():
        name, comma, filter_name = key.partition(",")
        if comma and not name.endswith("_stderr") and isinstance(value, int | float):
            yield _Metric(name, filter_name, float(value))


def scores(results: tuple[dict[str, Any], dict[str, Any]]) -> list[TaskScore]:
    """Every metric of every task, as lm-eval aggregates it; groups are left out."""
    first, second = results
    found = []
    for task in first["samples"]:
        of_task, others = first["results"][task], second["results"][task]
        directions = first.get("higher_is_better", {}).get(task, {})
        for metric in _metrics(first, task):
            error_key = f"{metric.name}_stderr,{metric.filter_name}"
            values = (metric.value, float(others[metric.key]))
            found.append(
                TaskScore(
                    task=task,
                    metric=metric.label,
                    higher_is_better=directions.get(metric.name) is not False,
                    num_samples=of_task["sample_len"],
                    values=values,
                    standard_errors=(_number(of_task.get(error_key)), _number(others.get(error_key))),
                    difference=values[1] - values[0],
                )
            )
    return found


def comparisons(results: tuple[dict[str, Any], dict[str, Any]], labels: Sequence[str]) -> list[TaskComparison]:
    """The samples of each task, paired.

    Raises:
        EvalError: the sides were not asked the same.
    """
    compared = []
    for task in results[0]["samples"]:
        directions = results[0].get("higher_is_better", {}).get(task, {})
        aggregate = [
            metric
            for metric in _metrics(results[0], task)
            if not all(_is_mean_of_samples(metric, result, task) for result in results)
        ]
        keys = {metric.key for metric in aggregate}
        sides = [_samples(result["samples"].get(task, []), directions, keys) for result in results]
        asked = [[(sample.sample_id, sample.prompt) for sample in side] for side in sides]
        if asked[0] != asked[1]:
            raise EvalError(
                f"{task}: expected equal prompts on both sides, found others on {labels[1]} than on {labels[0]}: "
                "its prompts depend on more than its data"
            )
        pairs = list(zip(*sides, strict=True))
        compared.append(TaskComparison(task, pairs, [metric.label for metric in aggregate]))
    return compared


def _is_mean_of_samples(metric: _Metric, result: dict[str, Any], task: str) -> bool:
    """Whether samples have this metric's own numbers. Those of perplexity, say, are something else by the same name."""
    logged = [entry for entry in result["samples"].get(task, []) if entry["filter"] == metric.filter_name]
    numbers = [number for entry in logged if (number := _number(entry.get(metric.name))) is not None]
    value = _number(result["results"][task].get(metric.key))
    if value is None or not numbers or len(numbers) < len(logged):
        return False
    mean = sum(numbers) / len(numbers)
    return (math.isnan(mean) and math.isnan(value)) or math.isclose(mean, value, rel_tol=1e-6, abs_tol=1e-9)


def _samples(logged: Sequence[dict[str, Any]], directions: dict[str, Any], aggregate_keys: set[str]) -> list[Sample]:
    """lm-eval's logged samples, each once: it logs one entry a filter, the first is taken."""
    by_id: dict[str, dict[str, Any]] = {}
    for entry in logged:
        by_id.setdefault(str(entry["doc_id"]), entry)
    return [_sample(sample_id, by_id[sample_id], directions, aggregate_keys) for sample_id in sorted(by_id, key=int)]


def _sample(sample_id: str, entry: dict[str, Any], directions: dict[str, Any], aggregate_keys: set[str]) -> Sample:
    metric = next((name for name in entry["metrics"] if f"{name},{entry['filter']}" not in aggregate_keys), "")
    return Sample(
        sample_id=sample_id,
        prompt=_prompt(entry),
        target=str(entry["target"]),
        answer=_answer(entry),
        score=_number(entry.get(metric)),
        higher_is_better=directions.get(metric) is not False,
    )


def _prompt(entry: dict[str, Any]) -> str:
    arguments = entry["arguments"]
    # A list of the requests' arguments, or a mapping in files that lm-eval wrote itself.
    request = arguments[0] if isinstance(arguments, list) else next(iter(arguments.values()))
    prompt = request[0] if isinstance(request, list) else next(iter(request.values()))
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


def _answer(entry: dict[str, Any]) -> str:
    """The generated text; of a multiple choice the number of the likeliest; else the likelihoods' greedy marks.

    Likelihoods themselves are left out: they vary in their last digits with what runs beside a request.
    """
    responses = [request[0] for request in entry["resps"]]
    if all(isinstance(response, str) for response in responses):
        return "\n".join(responses)
    if not all(isinstance(response, list) and len(response) == 2 for response in responses):
        return ""
    likelihoods = [float(response[0]) for response in responses]
    if len(likelihoods) > 1:
        return f"choice {likelihoods.index(max(likelihoods))}"
    return "greedy" if str(responses[0][1]) == "True" else "not greedy"


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
