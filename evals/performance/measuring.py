"""Taking turns, the garbage collector as the engine has it, and cold caches."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from time import perf_counter_ns

import numpy as np

# One repeat: prepares whatever it needs, untimed, and answers what it measured in the row's unit.
Repeat = Callable[[], float]

COLD_WALK_BYTES = 320 * 10**6
_CACHE_LINE_BYTES = 64


@contextmanager
def frozen_heap() -> Iterator[None]:
    """As in vLLM's engine: what was there at the start is frozen (`freeze_gc_heap`), then the collector runs as usual.

    Afterwards all is collectable again, so that one row's pools do not stay for the next.
    """
    from vllm.utils.gc_utils import freeze_gc_heap

    freeze_gc_heap()
    try:
        yield
    finally:
        gc.unfreeze()


def elapsed_us(started_ns: int) -> float:
    """Since `perf_counter_ns()` said `started_ns`."""
    return (perf_counter_ns() - started_ns) / 1e3


def take_turns(
    repeats: Sequence[Repeat], num_repeats: int, *, num_warm_up: int = 1, on_repeat: Callable[[], None] | None = None
) -> tuple[list[float], list[float]]:
    """Samples of two sides, taken as A B B A A B B A: drift of the machine hits both alike.

    Args:
        num_warm_up: repeats of each side before, which do not count.
    """
    first, second = repeats
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(num_warm_up):
        first(), second()
    for number in range(num_repeats):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        for side in order:
            samples[side].append(repeats[side]())
        if on_repeat is not None:
            on_repeat()
    return samples


@cache
def _ballast() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.ones(COLD_WALK_BYTES, dtype=np.uint8)


def cool_caches() -> None:
    """Read more memory than any cache holds, as whatever else the engine's process does between two steps might."""
    _ballast()[::_CACHE_LINE_BYTES].sum()
