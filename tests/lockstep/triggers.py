"""Counting the deviations that a call triggered, and replacing a method of one object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any


class Triggers:
    """The deviations that the present call triggered, by id."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._ids: set[str] = set()

    def call_starts(self) -> None:
        """Forget those of the call before."""
        self._ids.clear()

    def note(self, deviation_id: str) -> None:
        """The present call triggers this one."""
        self._ids.add(deviation_id)

    def has(self, deviation_id: str) -> bool:
        """Whether the call did, until the next one starts."""
        return deviation_id in self._ids

    def call_ends(self) -> None:
        """Count the call: compared with upstream as it is, or under each id."""
        self._counts["calls compared with upstream as it is"] += not self._ids
        self._counts.update(f"excused {deviation_id}" for deviation_id in self._ids)


def wrap(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method of one object by `replacement(original, *args)`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: replacement(original, *args, **kwargs))
