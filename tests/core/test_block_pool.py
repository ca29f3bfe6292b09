"""References, the life of a block, and calls that would corrupt the pool: refused, and nothing changed.

How runs are split, and what is hit and evicted inside them, is in `test_runs.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.pools import cached_run, free_ids, loose_run, make_pool, match_ids, snapshot
from vllm_kvplug.block_pool import BlockPool
from vllm_kvplug.block_states import BlockStates, hash_and_group, num_holders
from vllm_kvplug.errors import BlockError, CallError
from vllm_kvplug.observers import Observer

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


class Recorder(Observer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_evict(self, block_id: int, group_id: int, block_hash: bytes, is_last_copy: bool) -> None:
        self.seen.append(("evict", block_id, group_id, block_hash, is_last_copy))

    def on_reset(self) -> None:
        self.seen.append("reset")


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def pool(recorder: Recorder) -> BlockPool:
    return make_pool(6, recorder)


def test_usage_counts_held_blocks_and_never_the_null_block(pool: BlockPool) -> None:
    assert (pool.usage, pool.num_free_blocks, pool.num_held_blocks) == (0.0, 5, 0)
    assert pool.take(2) == [1, 2]
    assert (pool.usage, pool.num_free_blocks, pool.num_held_blocks) == (pytest.approx(0.4), 3, 2)
    assert make_pool(1).usage == 0.0


def test_unused_blocks_come_first_by_id_then_freed_ones_in_their_order(pool: BlockPool) -> None:
    assert pool.take(3) == [1, 2, 3]
    pool.release([loose_run(3), loose_run(1)])
    assert free_ids(pool) == [4, 5, 3, 1]
    assert pool.take(1) == [4]
    assert pool.take(2) == [5, 3]
    assert free_ids(pool) == [1]


def test_a_freed_block_stays_cached_until_it_is_taken_again(pool: BlockPool, recorder: Recorder) -> None:
    run = cached_run(pool, [A, B])
    pool.release([loose_run(*pool.take(3)), run])
    assert match_ids(pool, [A, B]) == [1, 2]
    assert pool.take(4) == [5, 4, 3, 2]
    assert match_ids(pool, [A, B]) == [1]
    assert recorder.seen == [("evict", 2, 0, B, True)]


@pytest.mark.parametrize("num_at_once", [1, 2, 5])
def test_what_is_evicted_is_the_same_however_many_are_taken_at_once(
    pool: BlockPool, recorder: Recorder, num_at_once: int
) -> None:
    runs = [cached_run(pool, [A]), cached_run(pool, [B, C])]
    runs.append(loose_run(*pool.take(2)))
    pool.release(runs)
    taken: list[int] = []
    while pool.num_free_blocks:
        taken += pool.take(min(num_at_once, pool.num_free_blocks))
    assert taken == [1, 3, 2, 5, 4]
    assert recorder.seen == [("evict", 1, 0, A, True), ("evict", 3, 0, C, True), ("evict", 2, 0, B, True)]
    assert list(pool.free_runs()) == []


def test_a_hit_takes_a_free_block_out_of_the_order(pool: BlockPool) -> None:
    run = cached_run(pool, [A])
    pool.release([run, loose_run(*pool.take(2)[::-1])])
    assert pool.num_free_blocks == 5
    assert pool.acquire(run, 0, 1) is run
    assert free_ids(pool) == [4, 5, 2, 3]
    assert pool.num_free_blocks == 4
    pool.acquire(run, 0, 1)
    assert num_holders(pool, 1) == 2
    pool.release([run])
    assert 1 not in free_ids(pool)


def test_a_run_released_twice_in_one_call_is_freed_once(pool: BlockPool) -> None:
    run = cached_run(pool, [A])
    pool.acquire(run, 0, 1)
    pool.release([run, run])
    assert free_ids(pool) == [2, 3, 4, 5, 1]
    assert pool.num_free_blocks == 5


@pytest.mark.parametrize("names", ["aba", "c", "ac", "bca"])
def test_a_release_that_would_corrupt_is_refused_whole(pool: BlockPool, names: str) -> None:
    runs = {"a": cached_run(pool, [A]), "b": cached_run(pool, [B]), "c": cached_run(pool, [C])}
    pool.release([runs["c"]])
    before = snapshot(pool)
    with pytest.raises(BlockError, match="nobody holds"):
        pool.release([runs[name] for name in names])
    assert snapshot(pool) == before
    pool.release([runs["b"], runs["a"]])
    assert free_ids(pool) == [4, 5, 3, 2, 1]


def test_more_blocks_than_are_free_cannot_be_taken(pool: BlockPool) -> None:
    pool.take(3)
    before = snapshot(pool)
    for num_blocks in (3, -1):
        with pytest.raises(BlockError, match=rf"cannot take {num_blocks} blocks.*: 2 of 6 are free"):
            pool.take(num_blocks)
    assert snapshot(pool) == before


def test_evict_takes_held_and_free_blocks_out_of_the_cache(pool: BlockPool, recorder: Recorder) -> None:
    held, freed = cached_run(pool, [A]), cached_run(pool, [B])
    pool.take(1)
    pool.release([freed])
    pool.evict([0, 1, 2, 3])
    assert recorder.seen == [("evict", 1, 0, A, True), ("evict", 2, 0, B, True)]
    assert match_ids(pool, [A]) == []
    assert held.num_holders == num_holders(pool, 1) == 1
    assert free_ids(pool) == [4, 5, 2]


@pytest.mark.parametrize("bad", [6, -1])
def test_evicting_an_id_outside_the_pool_is_refused_whole(pool: BlockPool, bad: int) -> None:
    cached_run(pool, [A])
    before = snapshot(pool)
    with pytest.raises(CallError, match=f"block {bad}: expected an id from 0 to 5"):
        pool.evict([1, bad])
    assert snapshot(pool) == before


def test_reset_waits_for_held_blocks_and_keeps_the_order(pool: BlockPool, recorder: Recorder) -> None:
    runs = [cached_run(pool, [A, B]), cached_run(pool, [A])]
    pool.evict([1])  # a hole, and the second run answers for A
    recorder.seen.clear()
    before = snapshot(pool)
    version = pool.version
    assert pool.reset() is False
    assert (snapshot(pool), pool.version) == (before, version)
    pool.release(runs[::-1])
    assert pool.reset() is True
    assert pool.version > version
    assert match_ids(pool, [A]) == []
    assert all(run.is_intact and not run.block_hashes for run in runs)
    assert free_ids(pool) == [4, 5, 3, 2, 1]
    assert recorder.seen == ["reset"]
    pool.take(5)
    assert recorder.seen == ["reset"], "nothing was cached any more, so nothing can be evicted"


def test_only_the_last_copy_of_a_hash_is_the_last(pool: BlockPool, recorder: Recorder) -> None:
    for _ in range(3):
        cached_run(pool, [A])
    for block_id in (2, 1, 3):
        pool.evict([block_id])
    assert recorder.seen == [("evict", 2, 0, A, False), ("evict", 1, 0, A, False), ("evict", 3, 0, A, True)]


def test_reserved_blocks_are_nobodys(recorder: Recorder) -> None:
    pool = make_pool(6, recorder, num_reserved_blocks=3)
    assert (pool.num_usable_blocks, pool.num_free_blocks, pool.usage) == (3, 3, 0.0)
    assert pool.reset() is True
    assert pool.take(3) == [3, 4, 5]
    assert pool.usage == 1.0
    pool.evict([1, 2])
    assert (pool.num_free_blocks, BlockStates.of(pool).reference_counts) == (0, [0, 0, 0, 1, 1, 1])
    assert [num_holders(pool, block_id) for block_id in range(6)] == [0, 0, 0, 1, 1, 1]


def test_worthless_blocks_are_reused_before_all_others(pool: BlockPool) -> None:
    pool.take(3)
    pool.release([loose_run(1)])
    pool.release([loose_run(3), loose_run(2)], is_worthless=True)
    assert free_ids(pool) == [3, 2, 4, 5, 1]
    assert pool.take(1) == [3]
    assert pool.take(3) == [2, 4, 5]
    assert free_ids(pool) == [1]


def test_later_worthless_blocks_come_before_earlier_ones_and_a_run_can_be_taken_in_part(pool: BlockPool) -> None:
    pool.take(5)
    pool.release([loose_run(1, 2, 3)], is_worthless=True)
    pool.release([loose_run(5)], is_worthless=True)
    assert free_ids(pool) == [5, 3, 2, 1]
    assert pool.take(2) == [5, 3]
    assert free_ids(pool) == [2, 1]


def test_single_blocks_are_read_as_they_are_now(pool: BlockPool) -> None:
    run = cached_run(pool, [A, B])
    pool.take(1)
    pool.acquire(run, 0, 1)
    pool.uncache(run.rest, 0, 1)  # block 2
    states = BlockStates.of(pool)
    assert states.reference_counts == [0, 2, 1, 1, 0, 0]
    assert states.block_hashes == [None, A, None, None, None, None]
    assert [num_holders(pool, block_id) for block_id in range(6)] == states.reference_counts
    assert [hash_and_group(pool, block_id) for block_id in range(6)] == [None, (A, 0), None, None, None, None]
    assert pool.places()[2] == (run.rest, 0)
    assert 3 not in pool.places()
    assert 4 not in pool.places()
