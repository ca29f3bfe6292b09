"""What a comparison of accuracy shows, in sentences, and its exit status: 0 no loss, 1 a loss, 3 not tested."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm_kvplug.evals.accuracy.compare import TaskComparison, change, exact_p_value
from vllm_kvplug.evals.accuracy.lm_eval_process import LoadedTask
from vllm_kvplug.evals.results import UNTESTED_STATUS, CacheUse, TaskScore

LOSS_STATUS = 1
# A loss is shown where chance gives one like it this rarely: over all tasks together, and by task (divided by their
# number).
SIGNIFICANCE = 0.01
# Of a metric that samples have no numbers of: worse by more than so many standard errors of both sides is a loss.
MAX_STANDARD_ERRORS = 3


def verdict(
    labels: tuple[str, str],
    tasks: Sequence[LoadedTask],
    compared: Sequence[TaskComparison],
    scores: Sequence[TaskScore],
    cache: tuple[CacheUse, CacheUse],
) -> tuple[list[str], int]:
    """(sentences, exit status). A loss counts more than a part that was not tested."""
    losses, gains = _changes(labels, compared)
    aggregate_losses, aggregate_notes = _by_aggregate(labels, compared, scores)
    losses += aggregate_losses
    untested = _untested(labels, cache)
    sentences = [*losses, *untested, *gains]
    if not losses:
        sentences.append(_no_loss(labels, compared))
    sentences += [*aggregate_notes, *_notes(labels, tasks, scores)]
    status = LOSS_STATUS if losses else UNTESTED_STATUS if untested else 0
    return sentences, status


def _changes(labels: tuple[str, str], compared: Sequence[TaskComparison]) -> tuple[list[str], list[str]]:
    """(losses, gains) that chance does not explain."""
    losses: list[str] = []
    gains: list[str] = []
    total = [0, 0]
    for task in compared:
        better, worse = task.num_better_and_worse()
        total = [total[0] + better, total[1] + worse]
        _judge(labels, f"{task.task}", better, worse, SIGNIFICANCE / len(compared), losses, gains)
    if not losses and not gains and len(compared) > 1:
        _judge(labels, "all tasks together", total[0], total[1], SIGNIFICANCE, losses, gains)
    return losses, gains


def _judge(
    labels: tuple[str, str], what: str, better: int, worse: int, threshold: float, losses: list[str], gains: list[str]
) -> None:
    p_value = exact_p_value(better, worse)
    if p_value is None or p_value >= threshold:
        return
    counts = f"{worse} samples worse and {better} better than {labels[0]} (exact McNemar p = {p_value:.2g})"
    if worse > better:
        losses.append(f"{labels[1]} loses accuracy on {what}: {counts}")
    else:
        gains.append(f"{labels[1]} gains accuracy on {what}: {counts}; a manager should change no answer")


def _by_aggregate(
    labels: tuple[str, str], compared: Sequence[TaskComparison], scores: Sequence[TaskScore]
) -> tuple[list[str], list[str]]:
    """(losses, notes) of metrics that no sample has a number of."""
    losses: list[str] = []
    notes: list[str] = []
    for task in compared:
        judged = [score for score in scores if score.task == task.task and score.metric in task.aggregate_metrics]
        for score in judged:
            measure = _loss_measure(score, len(task.differing()))
            if measure is not None:
                values = f"{score.metric} {score.values[1]:.4g} against {score.values[0]:.4g} of {labels[0]}"
                losses.append(f"{labels[1]} loses accuracy on {task.task}: {values}, {measure}")
        if judged:
            told = "; ".join(f"{score.metric} {score.values[0]:.4g} and {score.values[1]:.4g}" for score in judged)
            notes.append(f"{task.task}: not judged by sample, only by the value of all of them: {told}")
    return losses, notes


def _loss_measure(score: TaskScore, num_differing: int) -> str | None:
    """How much worse the candidate is, where that is a loss."""
    if change(score.values, score.higher_is_better) >= 0:
        return None
    if not math.isfinite(score.difference):
        return "which is no finite number on one side"
    errors = [error for error in score.standard_errors if error is not None and math.isfinite(error)]
    if len(errors) == 2 and any(errors):
        multiple = abs(score.difference) / math.hypot(*errors)
        return f"{multiple:.1f} standard errors worse" if multiple > MAX_STANDARD_ERRORS else None
    return f"worse, with {num_differing} other answers and no standard error" if num_differing else None


def _untested(labels: tuple[str, str], cache: tuple[CacheUse, CacheUse]) -> list[str]:
    sentences = []
    for what, noun, counts in (
        ("the prefix cache", "hit tokens", tuple(use.num_hit_tokens for use in cache)),
        ("preemption", "preemptions", tuple(use.num_preemptions for use in cache)),
    ):
        if 0 in counts:
            told = ", ".join(f"{label} {count}" for label, count in zip(labels, counts, strict=True))
            sentences.append(f"this run does not test {what} ({noun}: {told})")
    return sentences


def _no_loss(labels: tuple[str, str], compared: Sequence[TaskComparison]) -> str:
    num_samples = sum(len(task.pairs) for task in compared)
    num_differing = sum(len(task.differing()) for task in compared)
    better, worse = (sum(counts) for counts in zip(*(task.num_better_and_worse() for task in compared), strict=True))
    if not num_differing:
        return f"{labels[0]} and {labels[1]} give the same answer to all of {num_samples} samples"
    shown = f"no loss of accuracy shown: {num_differing} of {num_samples} answers differ"
    if all(sample.score is None for task in compared for pair in task.pairs for sample in pair):
        return shown
    return f"{shown}, {labels[1]} scores better on {better} and worse on {worse}"


def _notes(labels: tuple[str, str], tasks: Sequence[LoadedTask], scores: Sequence[TaskScore]) -> list[str]:
    notes = []
    blind = [task.name for task in tasks if not task.reads_the_prefix_cache]
    if blind:
        notes.append(
            f"{', '.join(blind)}: log-likelihoods of prompts, which vLLM computes without looking into the prefix cache"
        )
    for score in scores:
        if score.higher_is_better and score.values[0] == 0.0:
            notes.append(f"{score.task}: {labels[0]} scores 0 in {score.metric}, which cannot get worse")
    return notes
