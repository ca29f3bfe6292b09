"""The views of upstream's private structure, where upstream's own tests do not reach."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from vllm_kvplug.errors import BlockError, UnsupportedError
from vllm_kvplug.invariants import check_invariants
from vllm_kvplug.vllm_glue import upstream_views as views


class Request:
    """As much of vLLM's request as the manager asks for: 8 tokens, 2 blocks."""

    request_id = "r"
    num_tokens = 8
    num_computed_tokens = 0
    block_hashes = (b"hash 0", b"hash 1")
    skip_reading_prefix_cache = False


def make_manager(enable_caching: bool = True) -> views.KVCacheManager:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(num_blocks=6, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return views.KVCacheManager(config, max_model_len=64, hash_block_size=4, enable_caching=enable_caching)


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


def test_without_caching_the_coordinator_has_the_other_name() -> None:
    assert type(make_manager(enable_caching=False).coordinator) is views.KVCacheCoordinatorNoPrefixCache


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


def test_what_kvplug_does_not_have_refuses_by_name() -> None:
    for name in ("SlidingWindowManager", "ChunkedLocalAttentionManager", "MambaManager", "CrossAttentionManager"):
        with pytest.raises(UnsupportedError, match=name):
            getattr(views, name)(None, block_pool=None)
    with pytest.raises(UnsupportedError, match="HybridKVCacheCoordinator"):
        views.HybridKVCacheCoordinator()
