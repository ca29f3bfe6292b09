"""The views of upstream's private structure, where upstream's own tests do not reach, and what the tests check that
open.toml leaves out: the order of the free blocks (there without a linked list) and an adapter's key.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector

from tests.conformance.cache_shapes import FULL, WINDOW, Request, make_manager
from vllm_kvplug.errors import BlockError, CallError
from vllm_kvplug.invariants import check_invariants
from vllm_kvplug.vllm_glue import upstream_views as views


def test_views_follow_the_manager() -> None:
    manager = make_manager()
    pool, (group,) = manager.block_pool, manager.coordinator.single_type_managers
    assert type(manager.coordinator) is views.UnitaryKVCacheCoordinator
    assert (pool.num_gpu_blocks, pool.get_num_free_blocks(), pool.get_usage()) == (6, 5, 0.0)
    assert (len(group.req_to_blocks), group.num_cached_block) == (0, {})

    manager.allocate_slots(Request(), 8)
    assert [block.block_id for block in group.req_to_blocks["r"]] == [1, 2]
    assert group.num_cached_block == {"r": 2}
    assert [block.ref_cnt for block in pool.blocks] == [0, 1, 1, 0, 0, 0]
    assert pool.blocks[1] is pool.blocks[1]
    assert pool.blocks[1] == group.req_to_blocks["r"][0] == manager.get_blocks("r").blocks[0][0]
    assert list(pool.cached_block_hash_to_block._cache) == [b"hash 0\0\0\0\0", b"hash 1\0\0\0\0"]

    manager.free(Request())
    assert [block.block_id for block in pool.free_block_queue.get_all_free_blocks()] == [3, 4, 5, 2, 1]
    assert "r" not in group.req_to_blocks
    assert pool.reset_prefix_cache()
    assert not pool.cached_block_hash_to_block
    check_invariants(manager)


def test_no_view_is_made_unless_it_is_asked_for() -> None:
    manager = make_manager(FULL, WINDOW, num_blocks=10)
    for _ in range(2):
        hits, num_hit_tokens = manager.get_computed_blocks(Request())
        assert manager.allocate_slots(Request(), 8 - num_hit_tokens, num_hit_tokens, hits) is not None
        manager.free(Request())
    assert manager.reset_prefix_cache()
    assert not {"block_pool", "coordinator"} & set(vars(manager))
    assert manager.coordinator.block_pool is manager.block_pool


def test_a_wrong_number_of_free_blocks_is_believed_until_it_is_right_again() -> None:
    manager = make_manager()
    queue = manager.block_pool.free_block_queue
    queue.num_free_blocks = 0
    assert manager.allocate_slots(Request(), 8) is None
    queue.num_free_blocks = 5
    assert manager.allocate_slots(Request(), 8) is not None
    check_invariants(manager)


def test_a_pool_of_its_own() -> None:
    pool = views.BlockPool(num_gpu_blocks=5, enable_caching=True, hash_block_size=4)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(Request(), blocks, 0, 2, 4, kv_cache_group_id=7)  # type: ignore[arg-type]
    assert pool.get_cached_block(b"hash 1", [7]) == [blocks[1]]
    assert pool.get_cached_block(b"hash 1", [7, 8]) is None
    pool.touch(blocks[:1])
    pool.free_blocks(reversed(blocks))
    assert [block.ref_cnt for block in blocks] == [1, 0]
    pool.evict_blocks({blocks[1].block_id})
    assert len(pool.cached_block_hash_to_block) == 1
    assert not pool.reset_prefix_cache()
    with pytest.raises(BlockError, match="cannot take 4 blocks"):
        pool.get_new_blocks(4)


def test_a_pool_whose_blocks_are_larger_than_its_hashes() -> None:
    pool = views.BlockPool(num_gpu_blocks=5, enable_caching=True, hash_block_size=2, enable_kv_cache_events=True)
    request: Any = Request()
    request.block_hashes = (b"0", b"1", b"2", b"3")
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 1, 4, 0)
    pool.cache_full_blocks(request, blocks, 1, 2, 4, 0)
    assert pool.get_cached_block(b"23", [0]) == [blocks[1]]
    stored: list[Any] = pool.take_events()
    assert [(event.block_size, len(event.token_ids), event.block_hashes) for event in stored] == [
        (4, 4, [kv_cache_utils.maybe_convert_block_hash(b"01")]),
        (4, 4, [kv_cache_utils.maybe_convert_block_hash(b"23")]),
    ]
    assert [event.parent_block_hash for event in stored] == [None, stored[0].block_hashes[0]]
    with pytest.raises(CallError, match="block_size: expected a multiple of hash_block_size, 2 tokens; found 3"):
        pool.cache_full_blocks(request, blocks, 0, 1, 3, 0)


def test_a_pool_feeds_the_metrics_collector() -> None:
    collector = KVCacheMetricsCollector(sample_rate=1.0)
    pool = views.BlockPool(5, enable_caching=True, hash_block_size=4, metrics_collector=collector)
    blocks = pool.get_new_blocks(2)
    pool.touch(blocks[:1])
    assert {block_id: len(kept.access_history) for block_id, kept in collector.block_metrics.items()} == {1: 1, 2: 0}
    pool.evict_blocks({1})
    assert [event.reuse_gaps_seconds for event in collector.drain_events()] == [()]


# What the tests check that are left out


def ids(queue: views.FreeKVCacheBlockQueue) -> list[int]:
    """The free blocks by id, checked at both ends and against their number."""
    blocks = queue.get_all_free_blocks()
    first, last = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail.prev_free_block
    if blocks:
        assert (first, last) == (blocks[0], blocks[-1])
    else:
        assert (first, last) == (queue.fake_free_list_tail, queue.fake_free_list_head)
    assert queue.num_free_blocks == len(blocks)
    return [block.block_id for block in blocks]


def test_free_queue_operations() -> None:
    blocks = [views.KVCacheBlock(block_id) for block_id in range(5)]
    queue = views.FreeKVCacheBlockQueue(blocks)
    assert ids(queue) == [0, 1, 2, 3, 4]
    assert queue.popleft() is blocks[0]
    assert ids(queue) == [1, 2, 3, 4]
    queue.remove(blocks[2])
    assert ids(queue) == [1, 3, 4]
    queue.append(blocks[2])
    assert ids(queue) == [1, 3, 4, 2]
    assert [queue.popleft() for _ in range(4)] == [blocks[1], blocks[3], blocks[4], blocks[2]]
    assert ids(queue) == []
    with pytest.raises(ValueError, match="empty"):
        queue.popleft()


def test_free_queue_appends_in_order() -> None:
    blocks = [views.KVCacheBlock(block_id) for block_id in range(6)]
    queue = views.FreeKVCacheBlockQueue([])
    for appended, expected in (
        ([], []),
        (blocks[:1], [0]),
        (blocks[4:], [0, 4, 5]),
        (blocks[1:4], [0, 4, 5, 1, 2, 3]),
    ):
        queue.append_n(appended)
        assert ids(queue) == expected


def test_free_queue_pops_in_order() -> None:
    blocks = {block_id: views.KVCacheBlock(block_id) for block_id in range(6)}
    queue = views.FreeKVCacheBlockQueue([blocks[block_id] for block_id in (1, 3, 5, 4, 0, 2)])
    for num_blocks, popped, left in (
        (0, [], [1, 3, 5, 4, 0, 2]),
        (1, [1], [3, 5, 4, 0, 2]),
        (2, [3, 5], [4, 0, 2]),
        (3, [4, 0, 2], []),
    ):
        taken = queue.popleft_n(num_blocks)
        assert all(block is blocks[block_id] for block, block_id in zip(taken, popped, strict=True))
        assert ids(queue) == left


def test_an_adapters_key_is_its_name_and_path() -> None:
    request: Any = Request()
    request.lora_request = LoRARequest(lora_name="french", lora_int_id=1, lora_path="/adapters/french")
    keys, num_images = views.generate_block_hash_extra_keys(request, 0, 4, 0)
    assert (keys, num_images) == ((("lora", "french", "/adapters/french"),), 0)
