"""The scheduler's calls on one group: lookups, slots, caching, refusals. What is meant; lockstep is elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.pools import snapshot as pool_snapshot
from tests.core.support import FakeRequest, make_manager, run_decode, run_prefill
from vllm_kvplug.block import KVCacheBlocks
from vllm_kvplug.errors import CallError
from vllm_kvplug.invariants import check_invariants
from vllm_kvplug.manager import CacheManager
from vllm_kvplug.observers import Observer


def snapshot(manager: CacheManager) -> Any:
    tables = {
        request_id: (list(table.block_ids), table.num_cached_blocks, table.is_admitted)
        for request_id, table in manager.groups[0].tables.items()
    }
    return tables, pool_snapshot(manager.pool)


def test_a_lookup_leaves_the_last_token_to_compute_and_changes_nothing() -> None:
    manager = make_manager()
    manager.free(prefilled(manager, "a", list(range(8))))
    before = snapshot(manager)
    blocks, num_hit_tokens = manager.get_computed_blocks(FakeRequest("b", list(range(8))))
    assert (blocks.get_block_ids(), num_hit_tokens) == (([1],), 4)
    blocks, num_hit_tokens = manager.get_computed_blocks(FakeRequest("b", list(range(9))))
    assert (blocks.get_block_ids(), num_hit_tokens) == (([1, 2],), 8)
    assert snapshot(manager) == before


def prefilled(manager: CacheManager, request_id: str, tokens: list[int]) -> FakeRequest:
    request = FakeRequest(request_id, tokens)
    assert run_prefill(manager, request)[1] is not None
    return request


def test_requests_that_do_not_read_the_cache_still_write_it() -> None:
    manager = make_manager()
    prefilled(manager, "a", list(range(9)))
    reader = FakeRequest("b", list(range(9)), skip_reading_prefix_cache=True)
    assert run_prefill(manager, reader) == (0, [4, 5, 6])
    assert manager.pool.indexes[0].block_ids(reader.block_hashes[0]) == [1, 4]


def test_without_prefix_caching_nothing_is_cached_or_common() -> None:
    manager = make_manager(enable_caching=False)
    prefilled(manager, "a", list(range(9)))
    assert run_prefill(manager, FakeRequest("b", list(range(9))))[0] == 0
    assert len(manager.pool.indexes[0]) == 0
    assert manager.get_num_common_prefix_blocks("a") == [0]
    manager.cache_blocks(FakeRequest("a", list(range(9))), 9)
    assert len(manager.pool.indexes[0]) == 0


def test_eagle_computes_the_last_matched_block_again() -> None:
    manager = make_manager(use_eagle=True)
    prefilled(manager, "a", list(range(13)))
    blocks, num_hit_tokens = manager.get_computed_blocks(FakeRequest("b", list(range(13))))
    assert (blocks.get_block_ids(), num_hit_tokens) == (([1, 2],), 8)
    blocks, num_hit_tokens = manager.get_computed_blocks(FakeRequest("c", [*range(3), 77, 78]))
    assert (blocks, num_hit_tokens) == (manager.empty_kv_cache_blocks, 0)


def test_refused_where_hits_and_new_blocks_together_exceed_the_free_blocks() -> None:
    manager = make_manager(num_blocks=5)
    manager.free(prefilled(manager, "a", list(range(12))))
    # Three cached blocks are free, and one more: 12 hit tokens take three of the four, 5 new tokens need two.
    request = FakeRequest("b", list(range(17)))
    blocks, num_hit_tokens = manager.get_computed_blocks(request)
    before = snapshot(manager)
    assert num_hit_tokens == 12
    assert manager.allocate_slots(request, 5, 12, blocks) is None
    assert snapshot(manager) == before
    assert manager.allocate_slots(request, 4, 12, blocks).get_block_ids() == ([4],)
    check_invariants(manager)


def test_a_full_sequence_fits_where_all_its_blocks_are_free() -> None:
    manager = make_manager(num_blocks=7)
    prefilled(manager, "a", list(range(8)))  # two of six
    before = snapshot(manager)
    assert manager.can_fit_full_sequence(FakeRequest("b", list(range(100, 116))))
    assert not manager.can_fit_full_sequence(FakeRequest("b", list(range(100, 117))))
    # Two blocks of a prefix that "a" holds are no new ones.
    longer = FakeRequest("c", list(range(24)))
    blocks, num_hit_tokens = manager.get_computed_blocks(longer)
    assert num_hit_tokens == 8
    assert manager.can_fit_full_sequence(longer, num_hit_tokens, blocks)
    assert not manager.can_fit_full_sequence(longer)
    assert not manager.can_fit_full_sequence(FakeRequest("d", list(range(25))), num_hit_tokens, blocks)
    # Tokens from outside need blocks as well.
    assert not manager.can_fit_full_sequence(
        FakeRequest("d", list(range(25))), 8, blocks, num_external_computed_tokens=8
    )
    assert snapshot(manager) == before


def test_free_hits_use_up_free_blocks_of_a_full_sequence() -> None:
    manager = make_manager(num_blocks=7)
    manager.free(prefilled(manager, "a", list(range(8))))
    prefilled(manager, "b", list(range(100, 108)))
    longer = FakeRequest("c", list(range(17)))
    blocks, num_hit_tokens = manager.get_computed_blocks(longer)
    assert num_hit_tokens == 8
    assert not manager.can_fit_full_sequence(longer, num_hit_tokens, blocks)  # two hits and three more of four
    assert manager.can_fit_full_sequence(FakeRequest("c", list(range(16))), num_hit_tokens, blocks)


def test_whom_nobody_else_keeps_from_fitting_is_let_in() -> None:
    """Refused for ever otherwise: no other's end makes room. What it can do in steps, `allocate_slots` tells."""
    manager = make_manager(num_blocks=4)
    request = FakeRequest("a", list(range(20)))
    assert manager.can_fit_full_sequence(request)
    assert manager.allocate_slots(request, 8) is not None
    request.num_computed_tokens = 8
    assert manager.can_fit_full_sequence(request)
    prefilled(manager, "b", [1, 2, 3])
    assert not manager.can_fit_full_sequence(request)


def test_a_decode_step_inside_its_block_gets_the_shared_empty_answer() -> None:
    manager = make_manager()
    request = prefilled(manager, "a", list(range(5)))
    assert run_decode(manager, request, 50) is manager.empty_kv_cache_blocks
    assert run_decode(manager, request, 51) is manager.empty_kv_cache_blocks
    # The eighth token fills block 2: no new block, but one more cached.
    assert run_decode(manager, request, 52) is manager.empty_kv_cache_blocks
    assert len(manager.pool.indexes[0]) == 2
    assert run_decode(manager, request, 53).get_block_ids() == ([3],)
    check_invariants(manager)


def test_without_caching_the_decode_shortcut_serves_up_to_the_last_slot() -> None:
    manager = make_manager(enable_caching=False)
    request = prefilled(manager, "a", list(range(9)))
    table = manager.groups[0].tables.pop("a")  # whatever looks at more than the shortcut's limit misses it
    for token in (50, 51, 52):
        assert run_decode(manager, request, token) is manager.empty_kv_cache_blocks
    assert manager.groups[0].tables == {}
    manager.groups[0].tables["a"] = table
    assert run_decode(manager, request, 53).get_block_ids() == ([4],)


def test_lookahead_slots_are_taken_and_not_cached() -> None:
    manager = make_manager()
    request = FakeRequest("a", list(range(4)))
    assert manager.allocate_slots(request, 4, num_lookahead_tokens=5).get_block_ids() == ([1, 2, 3],)
    assert len(manager.pool.indexes[0]) == 1


def test_drafts_are_not_cached_before_they_are_the_requests_own_tokens() -> None:
    manager = make_manager()
    request = FakeRequest("a", list(range(6)))
    assert manager.allocate_slots(request, 10).get_block_ids() == ([1, 2, 3],)
    assert len(manager.pool.indexes[0]) == 1
    request.num_computed_tokens = 6
    request.tokens += [50, 51]
    manager.cache_blocks(request, 8)
    assert len(manager.pool.indexes[0]) == 2
    check_invariants(manager)


def test_slots_end_at_max_model_len() -> None:
    manager = make_manager(max_model_len=10)
    request = FakeRequest("a", list(range(9)))
    assert manager.allocate_slots(request, 9, num_lookahead_tokens=20).get_block_ids() == ([1, 2, 3],)


def test_external_tokens_get_blocks_that_are_not_this_steps_answer() -> None:
    manager = make_manager()
    request = FakeRequest("a", list(range(14)))
    answer = manager.allocate_slots(request, 6, num_external_computed_tokens=8)
    assert answer.get_block_ids() == ([3, 4],)
    assert manager.get_block_ids("a") == ([1, 2, 3, 4],)
    assert manager.take_new_block_ids() == [1, 2, 3, 4]
    assert len(manager.pool.indexes[0]) == 3


def test_delayed_caching_caches_nothing_until_it_is_told() -> None:
    manager = make_manager()
    request = FakeRequest("a", list(range(9)))
    manager.allocate_slots(request, 0, num_external_computed_tokens=8, delay_cache_blocks=True)
    assert len(manager.pool.indexes[0]) == 0
    manager.cache_blocks(request, 8)
    assert len(manager.pool.indexes[0]) == 2
    check_invariants(manager)


def test_common_prefix_is_what_every_request_holds() -> None:
    manager = make_manager()
    request = prefilled(manager, "a", list(range(9)))
    assert manager.get_num_common_prefix_blocks("a") == [3]
    prefilled(manager, "b", [*range(8), 60, 61])
    assert manager.get_num_common_prefix_blocks("a") == [2]
    assert manager.get_num_common_prefix_blocks("b") == [2]
    # As in 0.17.1, asking for an unknown request counts it as one that shares nothing.
    assert manager.get_num_common_prefix_blocks("unknown") == [0]
    assert manager.get_num_common_prefix_blocks("a") == [0]
    manager.free(FakeRequest("unknown", []))
    manager.free(request)
    assert manager.get_num_common_prefix_blocks("b") == [3]


def test_preempted_requests_find_their_blocks_again() -> None:
    manager = make_manager()
    request = prefilled(manager, "a", list(range(9)))
    manager.free(request)
    request.num_computed_tokens = 0
    assert run_prefill(manager, request) == (8, [1, 2, 4])
    check_invariants(manager)


def test_a_block_evicted_while_held_is_not_found_and_stays_held() -> None:
    manager = make_manager()
    request = prefilled(manager, "a", list(range(9)))
    manager.evict_blocks({1})
    assert manager.get_computed_blocks(FakeRequest("b", list(range(9))))[1] == 0
    assert manager.get_block_ids("a") == ([1, 2, 3],)
    manager.free(request)
    assert manager.usage == 0.0
    check_invariants(manager)


def test_reset_drops_the_cache_only_when_no_block_is_held() -> None:
    manager = make_manager()
    request = prefilled(manager, "a", list(range(9)))
    assert manager.reset_prefix_cache() is False
    assert manager.get_computed_blocks(FakeRequest("b", list(range(9))))[1] == 8
    manager.free(request)
    assert manager.reset_prefix_cache() is True
    assert manager.get_computed_blocks(FakeRequest("b", list(range(9))))[1] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_new_tokens": 0}, "num_new_tokens: expected more than 0.*found 0"),
        ({"num_new_tokens": -1}, "num_new_tokens: expected more than 0.*found -1"),
        ({"num_new_tokens": 20, "num_lookahead_tokens": -9}, "num_lookahead_tokens: expected at least 0, found -9"),
        ({"num_new_tokens": 1, "num_new_computed_tokens": -4}, "num_hit_tokens: expected at least 0, found -4"),
        (
            {"num_new_tokens": 1, "num_external_computed_tokens": -4},
            "num_external_tokens: expected at least 0, found -4",
        ),
        ({"num_new_tokens": 1, "num_external_computed_tokens": 4}, "external tokens come before its first block"),
    ],
)
def test_calls_that_cannot_be_right_are_refused_whole(arguments: dict[str, int], message: str) -> None:
    manager = make_manager()
    request = FakeRequest("a", list(range(3)))
    manager.allocate_slots(request, 3)
    before = snapshot(manager)
    with pytest.raises(CallError, match=f"request 'a'.*{message}"):
        manager.allocate_slots(request, **arguments)
    assert snapshot(manager) == before


def test_hits_for_a_request_with_blocks_are_refused_whole() -> None:
    manager = make_manager()
    prefilled(manager, "a", list(range(8)))
    request = prefilled(manager, "b", list(range(50, 58)))
    hits, num_hit_tokens = manager.get_computed_blocks(FakeRequest("c", list(range(8))))
    before = snapshot(manager)
    with pytest.raises(CallError, match="'b': expected no prefix hits for a request with blocks, found 1"):
        manager.allocate_slots(request, 1, num_hit_tokens, hits)
    assert snapshot(manager) == before


def test_too_few_block_hashes_are_refused_whole() -> None:
    manager = make_manager()
    request = FakeRequest("a", list(range(12)), num_hidden_hashes=1)
    before = snapshot(manager)
    with pytest.raises(CallError, match="'a': expected 3 block hashes for 12 tokens, found 2"):
        manager.allocate_slots(request, 12)
    assert snapshot(manager) == before


def test_hits_while_caching_is_off_are_refused() -> None:
    manager = make_manager(enable_caching=False)
    prefilled(manager, "a", list(range(8)))
    with pytest.raises(CallError, match="expected no prefix hits while prefix caching is off, found 2 blocks"):
        manager.allocate_slots(FakeRequest("b", list(range(8))), 4, 4, manager.get_blocks("a"))


@pytest.mark.parametrize("bad_id", [11, -1])
def test_hits_outside_the_pool_are_refused_whole(bad_id: int) -> None:
    manager = make_manager()
    before = snapshot(manager)
    hits = KVCacheBlocks.of_ids(manager.pool, ([1, bad_id],))
    with pytest.raises(CallError, match=f"block {bad_id}: expected an id from 0 to 10"):
        manager.allocate_slots(FakeRequest("b", list(range(9))), 1, 8, hits)
    assert snapshot(manager) == before


def test_new_block_ids_that_nobody_takes_stay_bounded() -> None:
    manager = make_manager()
    for number in range(50):
        manager.free(prefilled(manager, str(number), list(range(number, number + 9))))
    assert sorted(manager.take_new_block_ids()) == list(range(1, 11))
    assert manager.take_new_block_ids() == []


class Recorder(Observer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_admit(self, request: Any, num_hit_tokens: int) -> None:
        self.seen.append(("admit", request.request_id, num_hit_tokens))

    def on_take(self, block_ids: Any) -> None:
        self.seen.append(("take", list(block_ids)))

    def on_acquire(self, block_ids: Any) -> None:
        self.seen.append(("acquire", list(block_ids)))

    def on_release(self, block_ids: Any) -> None:
        self.seen.append(("release", list(block_ids)))

    def on_withdraw(self, block_ids: Any) -> None:
        self.seen.append(("withdraw", sorted(block_ids)))

    def on_cache(
        self,
        request: Any,
        group_id: int,
        num_tokens_per_block: int,
        block_ids: Any,
        block_hashes: Any,
        first_block: int,
        end_block: int,
    ) -> None:
        assert list(block_hashes) == request.block_hashes
        self.seen.append(("cache", request.request_id, group_id, block_ids[first_block:end_block]))

    def on_evict(self, block_id: int, group_id: int, block_hash: bytes, is_last_copy: bool) -> None:
        self.seen.append(("evict", block_id, is_last_copy))


def test_observers_hear_of_everything_in_order() -> None:
    recorder = Recorder()
    manager = make_manager(num_blocks=4, observers=[recorder, Observer()])
    manager.free(prefilled(manager, "a", list(range(8))))
    prefilled(manager, "b", [*range(4), 70, 71, 72, 73, 74])
    manager.evict_blocks([1])
    assert recorder.seen == [
        ("take", [1, 2]),
        ("cache", "a", 0, [1, 2]),
        ("admit", "a", 0),
        ("release", [2, 1]),
        ("acquire", [1]),
        ("evict", 2, True),
        ("take", [3, 2]),
        ("cache", "b", 0, [3]),
        ("admit", "b", 4),
        ("withdraw", [1]),
        ("evict", 1, True),
        ("evict", 3, True),  # it was computed from block 1
    ]


def test_a_new_request_with_a_negative_number_of_computed_tokens_is_refused() -> None:
    manager = make_manager(20)
    request = FakeRequest("r", list(range(20)), num_computed_tokens=-5)
    with pytest.raises(CallError, match="'r': num_computed_tokens: expected at least 0, found -5"):
        manager.allocate_slots(request, 10)
    assert manager.pool.num_held_blocks == 0
    assert not manager.groups[0].tables
    check_invariants(manager)
