"""Construction of a pool: time, memory, and what the garbage collector gets to see."""

from __future__ import annotations

import gc
import tracemalloc
from time import perf_counter_ns

from vllm_kvplug.evals.performance.measuring import Repeat, elapsed_us, frozen_heap
from vllm_kvplug.evals.performance.sides import BenchedSide


def construction(side: BenchedSide, num_blocks: int) -> Repeat:
    """A manager with such a pool, in microseconds. The collector runs and nothing is frozen: the engine freezes
    afterwards."""

    def repeat() -> float:
        gc.collect()
        started_ns = perf_counter_ns()
        manager = side.manager(num_blocks)
        duration_us = elapsed_us(started_ns)
        del manager
        return duration_us

    return repeat


def memory(side: BenchedSide, num_blocks: int) -> Repeat:
    """Bytes that a manager with such a pool takes from Python's allocator, as tracemalloc counts them."""

    def repeat() -> float:
        gc.collect()
        tracemalloc.start()
        manager = side.manager(num_blocks)
        num_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        del manager
        return num_bytes

    return repeat


def collectable_objects(side: BenchedSide, num_blocks: int) -> Repeat:
    """Objects that the collector follows because of a manager with such a pool."""

    def repeat() -> float:
        with frozen_heap():
            num_before = len(gc.get_objects())
            manager = side.manager(num_blocks)
            num_objects = len(gc.get_objects()) - num_before
            del manager
        gc.collect()
        return num_objects

    return repeat
