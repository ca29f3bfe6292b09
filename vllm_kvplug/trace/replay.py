"""Drives managers through a trace, side by side, and tells of each how it answered and how long its calls took."""

from __future__ import annotations

import statistics
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm_kvplug.trace.comparison import Difference, compare
from vllm_kvplug.trace.driver import ManagerDriver
from vllm_kvplug.trace.operations import Answer, Operation


class MethodTimes:
    """The times of one method's calls, in nanoseconds."""

    def __init__(self) -> None:
        self.durations_ns = array("q")

    @property
    def total_ms(self) -> float:
        return sum(self.durations_ns) / 1e6

    @property
    def median_us(self) -> float:
        return statistics.median(self.durations_ns) / 1e3


class ReplayedManager:
    """One manager in a replay.

    Args:
        name: as it was asked for.
        manager: fresh.
        is_compared: its answers should be the recorded ones.
        same_class: it is of the recorded manager's class.

    Attributes:
        differences: by method, answers that differ and are not excused. Behind the first one, others follow from it.
        first_difference: the first of them.
        excused: differences that are known ones, by their ids.
        error: what it raised, where the recorded manager did not; it is driven no further then.
        times: by method.
        driver: has the counts of hits, preemptions and refusals.
    """

    def __init__(self, name: str, manager: Any, *, is_compared: bool, same_class: bool) -> None:
        self.name = name
        self.is_compared = is_compared
        self.driver = ManagerDriver(manager, readmits_refused=True, takes_block_ids=is_compared)
        self.differences: Counter[str] = Counter()
        self.first_difference: Difference | None = None
        self.excused: Counter[str] = Counter()
        self.error: str | None = None
        self.times: dict[str, MethodTimes] = {}
        self._same_class = same_class

    @property
    def is_equal(self) -> bool:
        """Whether nothing speaks against it."""
        return self.first_difference is None and self.error is None

    def apply(self, operation: Operation) -> Answer | None:
        """Drive it one operation on; its answer."""
        outcome = self.driver.apply(operation)
        if outcome.skipped is None:
            times = self.times.get(operation.method)
            if times is None:
                times = self.times[operation.method] = MethodTimes()
            times.durations_ns.append(outcome.duration_ns)
        if outcome.error is not None and operation.answer.error is None:
            message = " ".join(f"{type(outcome.error).__name__}: {outcome.error}".split())
            self.error = f"operation {operation.number}, {operation}: raised {message}"
        elif self.is_compared:
            self._compare(operation, outcome.answer, outcome.skipped)
        return outcome.answer

    def _compare(self, operation: Operation, answer: Answer | None, skipped: str | None) -> None:
        if answer is None:
            difference: Difference | None = Difference(operation, "the recorded call", f"none ({skipped})")
        else:
            difference = compare(operation, answer, same_class=self._same_class)
        if difference is None:
            return
        if difference.excuse is not None:
            self.excused[difference.excuse] += 1
            return
        self.differences[operation.method] += 1
        if self.first_difference is None:
            self.first_difference = difference


class Replay:
    """Managers that are driven together.

    Attributes:
        managers: in the order given.
        num_operations: driven so far.
        num_apart: operations at which a manager answered otherwise than the first one, by its name. Known deviations
            do not count.
        first_apart: the first of them, by name: expected is the first manager's answer.
    """

    def __init__(self, managers: Sequence[ReplayedManager], classes: Sequence[type]) -> None:
        self.managers = list(managers)
        self.num_operations = 0
        self.num_apart: Counter[str] = Counter()
        self.first_apart: dict[str, Difference] = {}
        self._classes = list(classes)

    def run(self, operations: Iterable[Operation], progress: Callable[[int], None] = lambda _: None) -> None:
        """Drive all managers through all operations. `progress` is called now and then with their number.

        Managers take turns in going first, so that neither always finds the caches of the processor cold.
        """
        answers: list[Answer | None] = [None] * len(self.managers)
        forth = list(range(len(self.managers)))
        back = forth[::-1]
        for operation in operations:
            for index in forth if self.num_operations % 2 else back:
                manager = self.managers[index]
                answers[index] = manager.apply(operation) if manager.error is None else None
            self._compare_with_first(operation, answers)
            self.num_operations += 1
            if self.num_operations % 1000 == 0:
                progress(self.num_operations)
        progress(self.num_operations)

    def _compare_with_first(self, operation: Operation, answers: list[Answer | None]) -> None:
        first = answers[0]
        for index in range(1, len(answers)):
            other = answers[index]
            if first is None and other is None:
                continue
            if first is None or other is None:
                sides = ["not called" if answer is None else "called" for answer in (first, other)]
                difference: Difference | None = Difference(operation, *sides)
            else:
                as_expected = Operation(
                    operation.method,
                    operation.arguments,
                    operation.request,
                    operation.request_number,
                    first,
                    operation.number,
                )
                same_class = self._classes[0] is self._classes[index]
                difference = compare(as_expected, other, same_class=same_class)
            if difference is not None and difference.excuse is None:
                name = self.managers[index].name
                self.num_apart[name] += 1
                self.first_apart.setdefault(name, difference)
