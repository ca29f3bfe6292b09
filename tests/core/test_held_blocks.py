"""What a request holds, over its life: failed loads, prefixes that go from hand to hand, and who looks at its
blocks.
"""

from __future__ import annotations

from typing import Any

from tests.core.support import FakeRequest, make_manager, run_prefill
from vllm_kvplug.block_pool import BlockPool
from vllm_kvplug.invariants import check_invariants
from vllm_kvplug.manager import CacheManager


def decode(manager: CacheManager, request: FakeRequest, num_steps: int) -> None:
    for _ in range(num_steps):
        request.num_computed_tokens = request.num_tokens
        request.tokens.append(1000 + request.num_tokens)
        assert manager.allocate_slots(request, 1) is not None
        check_invariants(manager)


def test_nothing_is_published_behind_a_failed_load_after_the_blocks_before_it() -> None:
    manager = make_manager(40)
    request = FakeRequest("r", list(range(57)))
    assert manager.allocate_slots(request, 1, num_external_computed_tokens=40, delay_cache_blocks=True) is not None
    (row,) = manager.get_block_ids("r")
    manager.evict_blocks([row[6]])
    manager.cache_blocks(request, 24)  # the six blocks before it
    check_invariants(manager)
    request.num_computed_tokens = 40
    assert manager.allocate_slots(request, 17) is not None
    check_invariants(manager)
    decode(manager, request, 12)
    manager.free(request)
    check_invariants(manager)
    again = FakeRequest("again", list(range(57)))
    assert manager.get_computed_blocks(again)[1] == 24


def test_a_prefix_that_goes_from_hand_to_hand_leaves_no_trail() -> None:
    manager = make_manager(60)
    previous = None
    for number in range(60):
        request = FakeRequest(f"r{number}", [*range(16), 500 + number])
        run_prefill(manager, request)
        if previous is not None:
            manager.free(previous)
        decode(manager, request, 6)
        previous = request
    (hold, *_) = manager.groups[0].tables["r59"].holds
    num_parts, run = 1, hold.run
    while run.rest is not None:
        num_parts, run = num_parts + 1, run.rest
    assert num_parts <= 2


def test_the_blocks_of_a_request_know_their_hashes_without_a_look_at_the_pool(monkeypatch: Any) -> None:
    manager = make_manager(40)
    request, other = FakeRequest("r", list(range(30))), FakeRequest("s", [*range(12), *range(100, 120)])
    run_prefill(manager, request)
    run_prefill(manager, other)  # splits the run of the first
    blocks = manager.get_blocks("r")
    expected = [block.block_hash for block in manager._answer(manager._coordinator.block_ids("r")).blocks[0]]
    assert [block_hash is not None for block_hash in expected] == [True] * 7 + [False]

    def places(pool: BlockPool) -> Any:
        raise AssertionError("looked at all runs")

    monkeypatch.setattr(BlockPool, "places", places)
    assert [block.block_hash for block in blocks.blocks[0]] == expected
    assert [blocks.blocks[0][position].block_hash for position in range(8)] == expected
    assert [block.block_hash for block in blocks.blocks[0][2:4]] == expected[2:4]
    assert blocks.get_unhashed_block_ids() == [blocks.block_ids[0][7]]


def test_blocks_that_are_kept_beyond_their_request_are_what_they_are_now() -> None:
    manager = make_manager(11)
    request = FakeRequest("r", list(range(30)))
    run_prefill(manager, request)
    blocks = manager.get_blocks("r")
    (row,) = manager.get_block_ids("r")
    manager.free(request)
    assert blocks.get_unhashed_block_ids() == [row[7]]
    assert [block.ref_cnt for block in blocks.blocks[0]] == [0] * 8
    run_prefill(manager, FakeRequest("s", list(range(200, 238))))  # takes all ten blocks
    assert [block.ref_cnt for block in blocks.blocks[0]] == [1] * 8
    hashed = [block.block_hash is not None for block in blocks.blocks[0]]
    assert blocks.get_unhashed_block_ids() == [id for id, is_hashed in zip(row, hashed, strict=True) if not is_hashed]


def test_a_copy_whose_older_twin_is_gone_is_found_at_once_again() -> None:
    manager = make_manager(40)
    first, second = FakeRequest("r", list(range(24))), FakeRequest("s", list(range(24)))
    for request in (first, second):  # neither sees the other's blocks
        manager.allocate_slots(request, 24)
        request.num_computed_tokens = 24
    copy = manager.groups[0].tables["s"].holds[0].run
    assert not copy.is_intact
    manager.free(first)
    manager.free(second)
    # Takes the unused blocks and all of the first's.
    run_prefill(manager, FakeRequest("t", list(range(300, 300 + 4 * 33))))
    third = FakeRequest("u", [*range(16), 7])
    assert manager.get_computed_blocks(third)[1] == 16
    run_prefill(manager, third)
    check_invariants(manager)
    rest = manager.pool.indexes[0].run(second.block_hashes[4])  # what the third's hit was split from
    assert rest is not None
    assert rest is not copy
    assert rest.is_intact
