"""What upstream's structure allows to do to single blocks of a pool, done to a pool that keeps its blocks in runs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.conformance.cache_shapes import FULL, WINDOW, Request, make_manager
from vllm_kvplug.block import make_key
from vllm_kvplug.errors import BlockError, CallError
from vllm_kvplug.invariants import check_invariants
from vllm_kvplug.vllm_glue import upstream_views as views


def make_pool(num_blocks: int = 6) -> views.BlockPool:
    return views.BlockPool(num_gpu_blocks=num_blocks, enable_caching=True, hash_block_size=4)


def free_ids(pool: views.BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


def ref_counts(pool: views.BlockPool) -> list[int]:
    return [block.ref_cnt for block in pool.blocks]


def test_touching_one_block_of_a_freed_request_leaves_the_others() -> None:
    manager = make_manager(num_blocks=8)
    pool, blocks = manager.block_pool, manager.block_pool.blocks
    manager.allocate_slots(Request(), 8)
    manager.free(Request())
    assert free_ids(pool) == [3, 4, 5, 6, 7, 2, 1]
    pool.touch([blocks[2], pool.null_block])
    assert (free_ids(pool), ref_counts(pool)[1:3]) == ([3, 4, 5, 6, 7, 1], [0, 1])
    pool.touch([blocks[2], blocks[5]])
    assert (free_ids(pool), ref_counts(pool)[:6]) == ([3, 4, 6, 7, 1], [0, 0, 2, 0, 0, 1])
    assert manager.get_computed_blocks(Request())[0].get_block_ids() == ([1],)
    pool.free_blocks([blocks[2], blocks[5], pool.null_block, blocks[2]])
    assert (free_ids(pool), ref_counts(pool)) == ([3, 4, 6, 7, 1, 5, 2], [0] * 8)
    assert manager.allocate_slots(Request(), 8) is not None
    check_invariants(manager)


def test_touching_a_block_of_a_running_request_outlives_it() -> None:
    manager = make_manager(num_blocks=8)
    pool, blocks = manager.block_pool, manager.block_pool.blocks
    manager.allocate_slots(Request(), 8)
    pool.touch(blocks[1:2])
    assert ref_counts(pool)[1:3] == [2, 1]
    assert [block.block_id for block in manager.coordinator.get_blocks("r")[0]] == [1, 2]
    manager.free(Request())
    assert (ref_counts(pool)[1:3], free_ids(pool)[-1]) == ([1, 0], 2)
    pool.free_blocks(blocks[1:2])
    assert free_ids(pool)[-2:] == [2, 1]
    check_invariants(manager)


def test_freeing_more_often_than_held_changes_nothing() -> None:
    pool = make_pool()
    blocks = pool.get_new_blocks(2)
    before = free_ids(pool), ref_counts(pool)
    with pytest.raises(BlockError, match="cannot free block 1: expected it held, found one that nobody holds"):
        pool.free_blocks([blocks[1], blocks[0], blocks[0]])
    with pytest.raises(BlockError, match="cannot free block 9: expected one of this pool, 1 to 5"):
        pool.free_blocks([blocks[1], views.KVCacheBlock(9)])
    assert (free_ids(pool), ref_counts(pool)) == before


def test_a_block_that_a_request_has_not_cached_is_its_own() -> None:
    manager = make_manager()
    request: Any = Request()
    manager.allocate_slots(request, 8, delay_cache_blocks=True)
    pool, (group,) = manager.block_pool, manager.coordinator.single_type_managers
    block = pool.blocks[1]
    assert (block.ref_cnt, block.block_hash) == (1, None)
    for change in (
        lambda: pool.touch([block]),
        lambda: pool.free_blocks([block]),
        lambda: setattr(block, "ref_cnt", 2),
        lambda: setattr(block, "block_hash", make_key(b"x", 0)),
        lambda: pool.free_block_queue.append(block),
        lambda: group.req_to_blocks.update({"other": [block]}),
    ):
        with pytest.raises(BlockError, match="block 1: expected it cached or free, found it a request's own"):
            change()
        assert "other" not in group.req_to_blocks
        check_invariants(manager)
    block.ref_cnt = 1  # as it is
    manager.cache_blocks(request, 8)
    pool.touch([block])
    assert block.ref_cnt == 2


def test_references_and_the_queue_are_set_by_hand_as_upstream_does() -> None:
    manager = make_manager(num_blocks=8)
    pool, queue = manager.block_pool, manager.block_pool.free_block_queue
    manager.allocate_slots(Request(), 8)
    manager.free(Request())
    # What upstream's touch does, ...
    block = pool.blocks[2]
    queue.remove(block)
    assert (queue.num_free_blocks, free_ids(pool)) == (6, [3, 4, 5, 6, 7, 1])
    block.ref_cnt += 1
    assert block.block_hash is not None
    # ... its taking of new blocks, ...
    taken = queue.popleft_n(2)
    for new in taken:
        new.ref_cnt += 1
    assert ([new.block_id for new in taken], pool.get_num_free_blocks()) == ([3, 4], 4)
    with pytest.raises(BlockError, match="cannot take block 3 out of the free blocks"):
        queue.remove(taken[0])
    # ... and its giving back.
    for old in (*taken, block, pool.null_block):
        old.ref_cnt -= 1
    queue.append_n([*taken, block])
    assert free_ids(pool) == [5, 6, 7, 1, 3, 4, 2]
    with pytest.raises(BlockError, match="cannot free block 3: expected it not among the free blocks"):
        queue.append(taken[0])
    with pytest.raises(ValueError, match="cannot take 8 blocks: expected as many free ones, found 7"):
        queue.popleft_n(8)
    check_invariants(manager)
    assert manager.get_computed_blocks(Request())[1] == 4


def test_a_hash_set_by_hand_is_found_and_forgotten() -> None:
    manager = make_manager()
    block: Any = manager.block_pool.blocks[4]  # never used
    block.block_hash = make_key(b"hash 0", 0)
    assert free_ids(manager.block_pool) == [1, 2, 3, 4, 5]
    hits, num_hit_tokens = manager.get_computed_blocks(Request())
    assert (hits.get_block_ids(), num_hit_tokens) == (([4],), 4)
    block.block_hash = make_key(b"hash 0", 0)  # the same
    with pytest.raises(AssertionError, match="block 4: expected no hash before one is set"):
        block.block_hash = make_key(b"other", 0)
    assert manager.allocate_slots(Request(), 4, num_hit_tokens, hits) is not None
    assert manager.get_block_ids("r") == ([4, 1],)
    block.reset_hash()
    assert block.block_hash is None
    assert manager.get_computed_blocks(Request())[1] == 0
    manager.free(Request())
    assert manager.usage == 0.0


def test_an_entry_is_taken_out_of_the_cache_and_put_back() -> None:
    manager = make_manager(num_blocks=8)
    cached = manager.block_pool.cached_block_hash_to_block
    manager.allocate_slots(Request(), 8)
    keys = [make_key(block_hash, 0) for block_hash in Request.block_hashes]
    kept = dict(cached._cache)
    assert cached._cache.pop(keys[0]) == kept[keys[0]]
    assert (len(cached), cached.get_one_block(keys[0])) == (1, None)
    assert manager.get_computed_blocks(Request())[1] == 0
    check_invariants(manager)
    cached._cache[keys[0]] = kept[keys[0]]
    assert manager.get_computed_blocks(Request())[1] == 4
    assert cached.pop(keys[1], 1) is None
    assert cached.pop(keys[1], 2) == manager.block_pool.blocks[2]
    with pytest.raises(KeyError):
        del cached._cache[keys[1]]
    with pytest.raises(BlockError, match="block 1: it is cached already, in group 0"):
        cached.insert(keys[1], manager.block_pool.blocks[1])
    manager.free(Request())
    check_invariants(manager)


def test_blocks_of_somebody_else_are_for_pools_of_their_own() -> None:
    key, pool = make_key(b"x", 0), make_pool()
    pool.cached_block_hash_to_block.insert(key, views.KVCacheBlock(3))
    assert pool.get_cached_block(b"x", [0]) == [pool.blocks[3]]
    assert pool.blocks[3].block_hash is None
    assert pool.cached_block_hash_to_block.pop(key, 3) == pool.blocks[3]
    assert not pool.cached_block_hash_to_block
    manager = make_manager()
    with pytest.raises(BlockError, match="cannot cache block 3: expected one of this manager's pool"):
        manager.block_pool.cached_block_hash_to_block.insert(key, views.KVCacheBlock(3))
    with pytest.raises(CallError, match="block 9"):
        manager.block_pool.single_blocks.run(9)


def test_a_row_set_by_hand_of_blocks_of_every_kind() -> None:
    """A cached free one, one of a running request, one handed out to nobody, a free one that is not cached."""
    manager = make_manager(num_blocks=10)
    pool, (group,) = manager.block_pool, manager.coordinator.single_type_managers
    manager.allocate_slots(Request(), 8)
    (nobodys,) = pool.get_new_blocks(1)
    pool.free_blocks(pool.get_new_blocks(1))
    assert nobodys.block_id == 3
    group.req_to_blocks["s"] = [pool.blocks[block_id] for block_id in (1, 2, 3, 4)]
    assert ref_counts(pool)[1:5] == [2, 2, 1, 1]
    assert free_ids(pool) == [5, 6, 7, 8, 9]
    check_invariants(manager)
    manager.free(Request())
    request: Any = Request()
    request.request_id, request.num_tokens, request.block_hashes = "s", 16, (b"hash 0", b"hash 1", b"2", b"3")
    group.cache_blocks(request, 16)
    assert [block.block_hash for block in pool.blocks[1:5]] == [
        make_key(block_hash, 0) for block_hash in request.block_hashes
    ]
    assert group.req_to_blocks["s"][2] == nobodys
    check_invariants(manager)
    manager.free(request)
    assert free_ids(pool) == [5, 6, 7, 8, 9, 4, 3, 2, 1]


@pytest.mark.parametrize("seed", range(5))
def test_single_blocks_in_any_order_beside_a_running_manager(seed: int) -> None:
    """Blocks are touched, freed, cached and evicted one by one while requests come and go: the pool stays in order."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    manager = make_manager(FULL, WINDOW, num_blocks=20)
    pool = manager.block_pool
    mine: list[Any] = []
    num_running = 0
    for _ in range(200):
        action = rng.random()
        if action < 0.25 and not num_running:
            hits, num_hit_tokens = manager.get_computed_blocks(Request())
            num_running += (
                manager.allocate_slots(Request(), rng.randint(1, 8 - num_hit_tokens), num_hit_tokens, hits) is not None
            )
        elif action < 0.4:
            manager.free(Request())
            num_running = 0
        elif action < 0.6 and pool.get_num_free_blocks() > 4:
            block = rng.choice([*pool.free_block_queue.get_all_free_blocks(), *mine])
            pool.touch([block])
            mine.append(block)
        elif action < 0.8 and mine:
            rng.shuffle(mine)
            pool.free_blocks([mine.pop() for _ in range(rng.randint(1, len(mine)))])
        elif action < 0.9:
            pool.evict_blocks({rng.randrange(20)})
        elif pool.get_num_free_blocks() > 4:
            mine += pool.get_new_blocks(1)
        order = free_ids(pool)
        assert len(order) == len(set(order)) == pool.get_num_free_blocks()
        assert all((block.ref_cnt == 0) == (block.block_id in order) for block in pool.blocks[1:])
        assert all(pool.blocks[block.block_id].ref_cnt >= mine.count(block) for block in mine)
    manager.free(Request())
    pool.free_blocks(mine)
    check_invariants(manager)
    assert manager.usage == 0.0
