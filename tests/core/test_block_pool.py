"""References, the life of a block, and calls that would corrupt the pool: refused, and nothing changed."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_kvplug.block_pool import BlockPool
from vllm_kvplug.errors import BlockError, CallError
from vllm_kvplug.eviction.lru import LRUEviction
from vllm_kvplug.observers import Observer, ObserverSet

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
    return BlockPool(6, 1, LRUEviction(6), ObserverSet([recorder]))


def snapshot(pool: BlockPool) -> Any:
    return (
        list(pool.reference_counts),
        list(pool.block_hashes),
        list(pool.free_blocks),
        dict(pool.indexes[0].items()),
        pool.usage,
    )


def test_usage_counts_held_blocks_and_never_the_null_block(pool: BlockPool) -> None:
    assert (pool.usage, pool.num_free_blocks, pool.num_held_blocks) == (0.0, 5, 0)
    assert pool.take(2) == [1, 2]
    assert (pool.usage, pool.num_free_blocks, pool.num_held_blocks) == (pytest.approx(0.4), 3, 2)
    assert BlockPool(1, 1, LRUEviction(1), ObserverSet()).usage == 0.0


def test_a_freed_block_stays_cached_until_it_is_taken_again(pool: BlockPool, recorder: Recorder) -> None:
    block_ids = pool.take(5)
    pool.cache(0, block_ids[:2], [A, B])
    pool.release(block_ids[::-1])
    assert pool.match(0, [A, B], 2) == [1, 2]
    assert pool.take(4) == [5, 4, 3, 2]
    assert pool.match(0, [A, B], 2) == [1]
    assert recorder.seen == [("evict", 2, 0, B, True)]


def test_a_hit_takes_a_free_block_out_of_the_order(pool: BlockPool) -> None:
    block_ids = pool.take(3)
    pool.cache(0, [1], [A])
    pool.release(block_ids)
    assert pool.num_free_among([1, 2, 0]) == 2
    pool.acquire([1])
    assert list(pool.free_blocks) == [4, 5, 2, 3]
    pool.acquire([1])
    assert pool.reference_counts[1] == 2
    pool.release([1])
    assert 1 not in pool.free_blocks


def test_a_block_released_twice_in_one_call_is_freed_once(pool: BlockPool) -> None:
    pool.take(1)
    pool.acquire([1])
    pool.release([1, 1])
    assert list(pool.free_blocks) == [2, 3, 4, 5, 1]
    assert pool.num_free_blocks == 5


@pytest.mark.parametrize("bad", [[1, 2, 1], [3], [1, 6], [2, -1], [0, 1, 0, 4]], ids=str)
def test_a_release_that_would_corrupt_is_refused_whole(pool: BlockPool, bad: list[int]) -> None:
    pool.take(2)
    before = snapshot(pool)
    with pytest.raises(BlockError, match=rf"block {bad[-1] if bad != [0, 1, 0, 4] else 4}\b.*nobody holds"):
        pool.release(bad)
    assert snapshot(pool) == before


def test_more_blocks_than_are_free_cannot_be_taken(pool: BlockPool) -> None:
    pool.take(3)
    before = snapshot(pool)
    with pytest.raises(BlockError, match=r"cannot take 3 blocks.*: 2 of 6 are free"):
        pool.take(3)
    assert snapshot(pool) == before


def test_the_null_block_is_never_freed_or_cached(pool: BlockPool) -> None:
    pool.take(1)
    pool.cache(0, [0, 1], [A, B])
    pool.release([0, 1, 0])
    assert 0 not in list(pool.free_blocks)
    assert pool.match(0, [A], 1) == []
    assert pool.match(0, [B], 1) == [1]


def test_a_cached_block_cannot_be_cached_again(pool: BlockPool) -> None:
    pool.take(2)
    pool.cache(0, [2], [A])
    before = snapshot(pool)
    with pytest.raises(BlockError, match="block 2: it is cached already"):
        pool.cache(0, [1, 2], [B, C])
    assert snapshot(pool) == before


def test_evict_takes_held_and_free_blocks_out_of_the_cache(pool: BlockPool, recorder: Recorder) -> None:
    pool.take(3)
    pool.cache(0, [1, 2], [A, B])
    pool.release([2])
    pool.evict([0, 1, 2, 3])
    assert recorder.seen == [("evict", 1, 0, A, True), ("evict", 2, 0, B, True)]
    assert pool.match(0, [A], 1) == []
    assert pool.reference_counts[1] == 1
    assert list(pool.free_blocks) == [4, 5, 2]


@pytest.mark.parametrize("bad", [6, -1])
def test_evicting_an_id_outside_the_pool_is_refused_whole(pool: BlockPool, bad: int) -> None:
    pool.take(1)
    pool.cache(0, [1], [A])
    before = snapshot(pool)
    with pytest.raises(CallError, match=f"block {bad}: expected an id from 0 to 5"):
        pool.evict([1, bad])
    assert snapshot(pool) == before


def test_reset_waits_for_held_blocks_and_keeps_the_order(pool: BlockPool, recorder: Recorder) -> None:
    block_ids = pool.take(2)
    pool.cache(0, [1, 2], [A, A])
    before = snapshot(pool)
    assert pool.reset() is False
    assert snapshot(pool) == before
    pool.release(block_ids[::-1])
    assert pool.reset() is True
    assert pool.match(0, [A], 1) == []
    assert list(pool.free_blocks) == [3, 4, 5, 2, 1]
    assert recorder.seen == ["reset"]
    pool.take(5)
    assert recorder.seen == ["reset"], "nothing was cached any more, so nothing can be evicted"


def test_only_the_last_copy_of_a_hash_is_the_last(pool: BlockPool, recorder: Recorder) -> None:
    pool.cache(0, pool.take(3), [A, A, A])
    pool.evict([2])
    pool.evict([1])
    pool.evict([3])
    assert recorder.seen == [("evict", 2, 0, A, False), ("evict", 1, 0, A, False), ("evict", 3, 0, A, True)]


def test_reserved_blocks_are_nobodys(recorder: Recorder) -> None:
    pool = BlockPool(6, 1, LRUEviction(6), ObserverSet([recorder]), num_reserved_blocks=3)
    assert (pool.num_usable_blocks, pool.num_free_blocks, pool.usage) == (3, 3, 0.0)
    assert pool.reset() is True
    assert pool.take(3) == [3, 4, 5]
    assert pool.usage == 1.0
    with pytest.raises(BlockError, match=r"cannot free block 2: expected a held block of this pool \(3 to 5\)"):
        pool.release([3, 2])
    assert (pool.num_free_blocks, pool.reference_counts) == (0, [0, 0, 0, 1, 1, 1])


def test_worthless_blocks_are_reused_before_all_others(pool: BlockPool) -> None:
    pool.take(3)
    pool.release([1])
    pool.release([3, 2], is_worthless=True)
    assert list(pool.free_blocks) == [3, 2, 4, 5, 1]
    assert pool.take(4) == [3, 2, 4, 5]
    assert list(pool.free_blocks) == [1]
