"""Least recently used: the exact order of vLLM 0.17.1's free queue.

Runs are reused in the order in which they were freed. They are in a queue of places; a run that is hit leaves its place
empty, to be passed over later, since taking a place out of the middle would cost more than all the rest. A place holds
several runs where one was split while it was free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from vllm_kvplug.block_run import BlockRun

# Empty places are swept out when there are more of them than of the others, and more than this.
_MIN_EMPTY_PLACES = 1024


class LRUEviction:
    """See the module. Every operation is O(1) for each run, sweeps included; in a place that was split, O(its runs)."""

    def __init__(self) -> None:
        self._places: deque[list[BlockRun]] = deque()
        self._num_empty = 0

    def __iter__(self) -> Iterator[BlockRun]:
        for place in self._places:
            yield from place

    def push(self, runs: Sequence[BlockRun]) -> None:
        for run in runs:
            run.place = [run]
            self._places.append(run.place)

    def next_run(self) -> BlockRun:
        places = self._places
        while not places[0]:
            places.popleft()
            self._num_empty -= 1
        return places[0][0]

    def remove(self, run: BlockRun) -> None:
        place, run.place = run.place, None
        place.remove(run)
        if place:
            return
        if self._places[0] is place:
            self._places.popleft()
        else:
            self._num_empty += 1
            if 2 * self._num_empty > len(self._places) + _MIN_EMPTY_PLACES:
                self._places = deque(filter(None, self._places))
                self._num_empty = 0

    def split(self, run: BlockRun, rest: BlockRun) -> None:
        place = rest.place = run.place
        place.insert(place.index(run), rest)

    def find_contradictions(self) -> Iterator[tuple[str, int | None]]:
        """What in here does not agree: a message and, where it is about one, a block's id. Slow, for checks."""
        num_empty = sum(not place for place in self._places)
        if num_empty != self._num_empty:
            yield f"lru: empty places: expected {num_empty}, found {self._num_empty} counted", None
        for place in self._places:
            for run in place:
                if run.place is not place:
                    block_id = run.block_ids[0] if run.block_ids else None
                    yield f"lru: {run!r}: expected it to know its place, found another", block_id
