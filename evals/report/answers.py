"""Samples that the sides answered differently, cut to what a reader can take in. results.json holds all of each."""

from __future__ import annotations

import unicodedata
from collections import Counter
from dataclasses import dataclass

from vllm_kvplug.evals.report import numbers
from vllm_kvplug.evals.results import DifferingAnswer, Report

NUM_SHOWN = 100
NUM_SHOWN_PER_TASK = 20
_NUM_CHARS_BEFORE = 200
_NUM_CHARS_AFTER = 400
_ELLIPSIS = "…"
# Characters of other categories that no reader would see, or that would move the text around them.
_HIDDEN_CATEGORIES = ("Cc", "Cf", "Zl", "Zp", "Co", "Cs")


@dataclass(frozen=True)
class Excerpt:
    """One answer: what is the same on both sides up to the first difference, and what follows."""

    same: str
    other: str
    score: str


@dataclass(frozen=True)
class Sample:
    """One differing sample, ready to be shown."""

    task: str
    sample_id: str
    prompt_end: str
    target: str
    answers: tuple[Excerpt, Excerpt]
    scores_differ: bool


@dataclass(frozen=True)
class Shown:
    """The samples that the page lists, of how many."""

    samples: list[Sample]
    num_all: int
    num_per_task: int

    @property
    def note(self) -> str:
        """Which of them are shown, and how."""
        if not self.num_all:
            return "No sample has another answer on the other side."
        if len(self.samples) == self.num_all:
            listed = "All samples whose answer differs"
        else:
            listed = (
                f"{numbers.count(len(self.samples))} of {numbers.count(self.num_all)} samples whose answer differs, at "
                f"most {self.num_per_task} of a task, with preference for those whose score differs"
            )
        return (
            f"{listed}. Line ends and hidden characters are shown as signs (↵, \\u200b), long texts are cut "
            f"({_ELLIPSIS}); results.json has all samples in full."
        )


def shown(report: Report, num_shown: int = NUM_SHOWN, num_per_task: int = NUM_SHOWN_PER_TASK) -> Shown:
    """Some of each task, those whose score differs first; in the order of tasks and samples."""
    differing = report.accuracy.differing if report.accuracy is not None else []
    num_of_task: Counter[str] = Counter()
    kept: list[int] = []
    for index in sorted(range(len(differing)), key=lambda index: _has_equal_scores(differing[index])):
        task = differing[index].task
        num_of_task[task] += 1
        if num_of_task[task] <= num_per_task:
            kept.append(index)
    return Shown([_sample(differing[index]) for index in sorted(kept[:num_shown])], len(differing), num_per_task)


def _has_equal_scores(answer: DifferingAnswer) -> bool:
    return answer.scores[0] == answer.scores[1]


def _sample(answer: DifferingAnswer) -> Sample:
    first, second = answer.answers
    num_same = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    if num_same is None:
        num_same = min(len(first), len(second))
    excerpts = tuple(
        Excerpt(
            same=visible(_last(text[:num_same], _NUM_CHARS_BEFORE)),
            other=visible(_first(text[num_same:], _NUM_CHARS_AFTER)),
            score=numbers.short(score),
        )
        for text, score in zip(answer.answers, answer.scores, strict=True)
    )
    return Sample(
        task=answer.task,
        sample_id=answer.sample_id,
        prompt_end=visible(_last(answer.prompt_end, 300)),
        target=visible(_first(answer.target, 300)),
        answers=(excerpts[0], excerpts[1]),
        scores_differ=not _has_equal_scores(answer),
    )


def _last(text: str, num_chars: int) -> str:
    return text if len(text) <= num_chars else _ELLIPSIS + text[-num_chars:]


def _first(text: str, num_chars: int) -> str:
    return text if len(text) <= num_chars else text[:num_chars] + _ELLIPSIS


def visible(text: str) -> str:
    """With a sign for what cannot be seen: line ends keep breaking the line, other hidden characters are escaped."""
    return "".join(_visible_character(character) for character in text)


def printable(text: str) -> str:
    """With hidden characters escaped, but for line ends and tabs."""
    return "".join(c if c in "\n\t" else _visible_character(c) for c in text)


def _visible_character(character: str) -> str:
    if character == "\n":
        return "↵\n"
    if character == "\t":
        return "⇥"
    if unicodedata.category(character) in _HIDDEN_CATEGORIES:
        return f"\\u{ord(character):04x}"
    return character
