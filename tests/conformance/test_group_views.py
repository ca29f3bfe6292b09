"""The views of groups and coordinators, constructed and of a manager, where upstream's own tests do not reach."""

from __future__ import annotations

import pytest
from vllm.v1.kv_cache_interface import KVCacheSpec

from tests.conformance.cache_shapes import (
    CHUNKED,
    CROSS,
    FULL,
    MAMBA,
    MLA,
    SINK,
    WINDOW,
    Request,
    make_config,
    make_manager,
)
from vllm_kvplug.errors import CallError, UnsupportedError
from vllm_kvplug.invariants import check_invariants
from vllm_kvplug.vllm_glue import upstream_views as views

# Each group by itself


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (FULL, "FullAttentionManager"),
        (MLA, "FullAttentionManager"),
        (SINK, "SinkFullAttentionManager"),
        (WINDOW, "SlidingWindowManager"),
        (CHUNKED, "ChunkedLocalAttentionManager"),
        (MAMBA, "MambaManager"),
    ],
)
def test_a_group_of_its_own(spec: KVCacheSpec, name: str) -> None:
    pool = views.BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=4)
    group = views.get_manager_for_kv_cache_spec(spec, block_pool=pool, enable_caching=True, kv_cache_group_id=3)
    assert type(group) is getattr(views, name)
    assert group.get_num_blocks_to_allocate("r", 8, [], 0, 8) == 2
    assert [block.block_id for block in group.allocate_new_blocks("r", 8, 8)] == [1, 2]
    group.cache_blocks(Request(), 8)
    assert group.num_cached_block == {"r": 2}
    group.new_step_starts()
    hit = group.find_longest_cache_hit(Request.block_hashes, 8, [3], pool, spec, use_eagle=False, alignment_tokens=4)
    assert hit[0][-1].block_id == 2
    group.free("r")
    assert "r" not in group.req_to_blocks

    # The hit's last block is free: holding it uses up a free block.
    hits = pool.get_cached_block(b"hash 1", [3])
    row = [*hit[0][:-1], *hits]
    assert group.get_num_blocks_to_allocate("s", 12, row, 8, 12) == 1 + sum(not block.is_null for block in row)
    group.allocate_new_computed_blocks("s", row, 8, 0)
    assert [block.block_id for block in group.allocate_new_blocks("s", 12, 12)] == [3]
    assert group.req_to_blocks["s"][1].ref_cnt == 1
    assert pool.get_num_free_blocks() == 7 - 1 - sum(not block.is_null for block in row)


def test_a_group_takes_blocks_for_external_tokens() -> None:
    pool = views.BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=4)
    group = views.SlidingWindowManager(WINDOW, block_pool=pool, enable_caching=True, kv_cache_group_id=0)
    # 12 tokens come from outside; the next one looks at tokens 8 to 12.
    group.allocate_new_computed_blocks("r", [], 0, 12)
    assert [block.block_id for block in group.req_to_blocks["r"]] == [0, 0, 1]
    assert group.get_num_skipped_tokens(12) == 8


def test_a_mamba_group_cannot_serve_what_was_cached_in_this_step() -> None:
    pool = views.BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=4)
    group = views.MambaManager(MAMBA, block_pool=pool, enable_caching=True, kv_cache_group_id=0)
    group.allocate_new_blocks("r", 8, 8)
    group.cache_blocks(Request(), 8)
    hit = [pool.null_block, *(pool.get_cached_block(b"hash 1", [0]) or [])]
    assert group.get_num_blocks_to_allocate("s", 12, hit, 8, 12) == 9
    group.new_step_starts()
    assert group.get_num_blocks_to_allocate("s", 12, hit, 8, 12) == 1


def test_a_cross_attention_group_counts_the_encoders_tokens() -> None:
    pool = views.BlockPool(num_gpu_blocks=8, enable_caching=False, hash_block_size=4)
    group = views.CrossAttentionManager(CROSS, block_pool=pool, enable_caching=False, kv_cache_group_id=0)
    assert group.get_num_blocks_to_allocate("r", 9, [], 0, 9) == 3
    assert len(group.allocate_new_blocks("r", 9, 9)) == 3
    assert group.get_num_blocks_to_allocate("r", 0, [], 9, 0) == 0


def test_a_row_that_is_set_is_the_requests_and_the_given_list_follows() -> None:
    pool = views.BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=4)
    group = views.SlidingWindowManager(WINDOW, block_pool=pool, enable_caching=True, kv_cache_group_id=0)
    given = [views.KVCacheBlock(block_id) for block_id in (5, 6, 7)]
    group.req_to_blocks["r"] = given
    assert [block.block_id for block in pool.free_block_queue.get_all_free_blocks()] == [1, 2, 3, 4]
    group.remove_skipped_blocks("r", 9)
    assert [block.block_id for block in given] == [0, 6, 7]
    assert given[0] == pool.null_block
    group.allocate_new_blocks("r", 16, 16)
    assert group.req_to_blocks["r"] is given
    assert [block.block_id for block in given] == [0, 6, 7, 1]
    del group.req_to_blocks["r"]
    assert [block.block_id for block in pool.free_block_queue.get_all_free_blocks()] == [2, 3, 4, 5, 1, 7, 6]
    with pytest.raises(KeyError):
        del group.req_to_blocks["r"]
    with pytest.raises(CallError, match="block 8"):
        group.req_to_blocks["r"] = [views.KVCacheBlock(8)]
    assert "r" not in group.req_to_blocks
    group.allocate_new_blocks("r", 4, 4)
    assert [block.block_id for block in group.req_to_blocks["r"]] == [2]


def test_groups_of_one_spec_share_the_shortest_hit() -> None:
    pool = views.BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=4)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(Request(), blocks, 0, 2, 4, kv_cache_group_id=0)  # type: ignore[arg-type]
    pool.cache_full_blocks(Request(), blocks[2:], 0, 1, 4, kv_cache_group_id=1)  # type: ignore[arg-type]
    rows = views.SlidingWindowManager.find_longest_cache_hit(
        Request.block_hashes, 8, [0, 1], pool, WINDOW, use_eagle=False, alignment_tokens=4
    )
    assert [[block.block_id for block in row] for row in rows] == [[1], [3]]


# The coordinator


@pytest.mark.parametrize(
    ("specs", "enable_caching", "name"),
    [
        ([FULL], False, "KVCacheCoordinatorNoPrefixCache"),
        ([FULL, CROSS], False, "KVCacheCoordinatorNoPrefixCache"),
        ([WINDOW], True, "UnitaryKVCacheCoordinator"),
        ([FULL, WINDOW, MAMBA], True, "HybridKVCacheCoordinator"),
    ],
)
def test_the_coordinator_by_its_groups(specs: list[KVCacheSpec], enable_caching: bool, name: str) -> None:
    coordinator = views.get_kv_cache_coordinator(
        make_config(*specs), 64, False, enable_caching, False, 1, 1, hash_block_size=4
    )
    assert type(coordinator) is getattr(views, name)
    assert [type(group) for group in coordinator.single_type_managers] == [
        views.spec_manager_map[type(s)] for s in specs
    ]
    assert coordinator.find_longest_cache_hit(Request.block_hashes, 7) == (tuple([] for _ in specs), 0)
    with pytest.raises(UnsupportedError, match=name):
        getattr(views, name)(make_config(*specs))


def test_a_hybrid_coordinator_follows_its_manager() -> None:
    manager = make_manager(FULL, WINDOW, num_blocks=10)
    manager.allocate_slots(Request(), 8)
    coordinator = manager.coordinator
    assert [[b.block_id for b in row] for row in coordinator.get_blocks("r")] == [[1, 2], [3, 4]]
    rows, num_hit_tokens = coordinator.find_longest_cache_hit(Request.block_hashes, 7)
    assert ([[b.block_id for b in row] for row in rows], num_hit_tokens) == ([[1], [3]], 4)
    assert [b"hash 1" + group for group in (b"\0\0\0\0", b"\0\0\0\1")] == [
        row[-1].block_hash for row in coordinator.get_blocks("r")
    ]
    check_invariants(manager)
