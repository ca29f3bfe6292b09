"""`KVCacheBlocks` and the views of blocks."""

from __future__ import annotations

import pytest

from tests.core.support import FakeRequest, make_hybrid_manager, make_manager, run_prefill
from vllm_kvplug.block import BlockView, KVCacheBlocks


class ForeignBlock:
    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.block_hash = None if block_id % 2 else b"x"


def test_views_show_the_pool_as_it_is_now() -> None:
    manager = make_manager()
    request = FakeRequest("a", list(range(6)))
    run_prefill(manager, request)
    full, partial = manager.get_blocks("a").blocks[0]
    assert (full.block_id, full.ref_cnt, full.is_null) == (1, 1, False)
    assert full.block_hash == request.block_hashes[0] + b"\0\0\0\0"
    assert partial.block_hash is None
    manager.free(request)
    assert full.ref_cnt == 0
    assert full == BlockView(manager.pool, 1)
    assert full != partial
    assert len({full, BlockView(manager.pool, 1), partial}) == 2


def test_rows_behave_as_lists_of_blocks() -> None:
    manager = make_manager()
    run_prefill(manager, FakeRequest("a", list(range(9))))
    row = manager.get_blocks("a").blocks[0]
    assert len(row) == 3
    assert [block.block_id for block in row[1:]] == [2, 3]
    assert row[-1].block_id == 3
    assert row == list(row)
    assert row != list(row)[:2]
    assert manager.empty_kv_cache_blocks.blocks == ((),)


def test_ids_are_copies_and_none_means_no_block_in_any_group() -> None:
    manager = make_manager()
    run_prefill(manager, FakeRequest("a", list(range(9))))
    blocks = manager.get_blocks("a")
    blocks.get_block_ids()[0].append(99)
    assert blocks.get_block_ids() == ([1, 2, 3],)
    assert blocks.get_block_ids(allow_none=True) == ([1, 2, 3],)
    assert manager.get_blocks("unknown").get_block_ids(allow_none=True) is None
    assert manager.get_blocks("unknown").get_block_ids() == ([],)
    assert manager.get_blocks("unknown") is manager.empty_kv_cache_blocks


def test_unhashed_ids_are_the_blocks_outside_the_prefix_cache() -> None:
    manager = make_manager()
    run_prefill(manager, FakeRequest("a", list(range(9))))
    assert manager.get_blocks("a").get_unhashed_block_ids() == [3]
    with pytest.raises(AssertionError, match="expected one KV cache group, found 2"):
        KVCacheBlocks(((), ())).get_unhashed_block_ids()


def test_unhashed_ids_by_group_leave_null_blocks_out() -> None:
    manager = make_hybrid_manager()  # full attention beside a window of 6 tokens
    request = FakeRequest("a", list(range(14)))
    run_prefill(manager, request)
    manager.remove_skipped_blocks("a", 13)
    blocks = manager.get_blocks("a")
    full, window = blocks.get_block_ids()
    assert window[0] == 0
    assert blocks.get_unhashed_block_ids_all_groups() == [full[3:], window[3:]]


def test_built_from_anything_with_a_block_id() -> None:
    blocks = KVCacheBlocks(([ForeignBlock(3), ForeignBlock(4)], ()))
    assert blocks.get_block_ids() == ([3, 4], [])
    assert blocks.new_empty().get_block_ids() == ([], [])
    assert KVCacheBlocks(([ForeignBlock(3), ForeignBlock(4)],)).get_unhashed_block_ids() == [3]
    total = blocks + KVCacheBlocks(([ForeignBlock(5)], [ForeignBlock(6)]))
    assert total.get_block_ids() == ([3, 4, 5], [6])


def test_adding_keeps_group_and_order() -> None:
    manager = make_manager()
    run_prefill(manager, FakeRequest("a", list(range(5))))
    run_prefill(manager, FakeRequest("b", list(range(50, 55))))
    total = manager.get_blocks("a") + manager.get_blocks("b")
    assert total.get_block_ids() == ([1, 2, 3, 4],)
    assert total == KVCacheBlocks.of_ids(manager.pool, ([1, 2, 3, 4],))
    assert total != manager.get_blocks("a")
