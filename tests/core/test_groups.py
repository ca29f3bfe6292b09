"""Each kind of attention: which prefixes it can hit, what it gives back, what a step takes; and any mix of them."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from typing import Any

import pytest

from tests.core.pools import cached_run, free_ids, loose_run
from tests.core.pools import snapshot as pool_snapshot
from tests.core.support import FakeRequest, run_decode
from vllm_kvplug.allocation import Refusal
from vllm_kvplug.block import KVCacheBlocks
from vllm_kvplug.errors import CallError, UnsupportedError
from vllm_kvplug.geometry import AttentionKind, CacheGeometry, GroupGeometry, MambaMode
from vllm_kvplug.invariants import check_invariants
from vllm_kvplug.manager import CacheManager
from vllm_kvplug.settings import Settings

FULL = GroupGeometry(AttentionKind.FULL, 4)


def window(num_tokens: int, num_tokens_per_block: int = 4) -> GroupGeometry:
    return GroupGeometry(AttentionKind.SLIDING_WINDOW, num_tokens_per_block, window_tokens=num_tokens)


def chunked(num_tokens: int) -> GroupGeometry:
    return GroupGeometry(AttentionKind.CHUNKED_LOCAL, 4, chunk_tokens=num_tokens)


def mamba(mode: MambaMode, num_speculative_blocks: int = 0) -> GroupGeometry:
    return GroupGeometry(AttentionKind.MAMBA, 4, mamba_mode=mode, num_speculative_blocks=num_speculative_blocks)


def make(*groups: GroupGeometry, num_blocks: int = 100, max_model_len: int = 1000, **options: Any) -> CacheManager:
    num_tokens_per_hash = 4 if options.get("enable_caching", True) else None
    geometry = CacheGeometry(num_blocks, max_model_len, groups, num_tokens_per_hash)
    return CacheManager(geometry, Settings(), **options)


def request(request_id: str, num_tokens: int, first: int = 0) -> FakeRequest:
    return FakeRequest(request_id, list(range(first, first + num_tokens)))


def prefill(manager: CacheManager, new_request: FakeRequest, num_tokens: int | None = None) -> int | None:
    """Look up and allocate; the hit tokens or None."""
    blocks, num_hit_tokens = manager.get_computed_blocks(new_request)
    num_tokens = new_request.num_tokens - num_hit_tokens if num_tokens is None else num_tokens
    if manager.allocate_slots(new_request, num_tokens, num_hit_tokens, blocks) is None:
        return None
    new_request.num_computed_tokens = num_hit_tokens + num_tokens
    check_invariants(manager)
    return num_hit_tokens


def lookup(manager: CacheManager, num_tokens: int) -> tuple[list[list[int]], int]:
    blocks, num_hit_tokens = manager.get_computed_blocks(request("lookup", num_tokens))
    return [list(row) for row in blocks.block_ids], num_hit_tokens


# Sliding window


@pytest.mark.parametrize(
    ("cached", "num_window_tokens", "row"),
    [
        ([1, 1, 1, 1, 1], 9, [0, 0, 0, 4, 5]),
        ([1, 1, 1, 1, 0], 9, [0, 0, 3, 4]),
        ([1, 0, 1, 1, 0], 9, [0, 0, 3, 4]),
        ([1, 0, 1, 0, 1], 9, [1]),  # what touches the start serves, however short
        ([0, 1, 0, 1, 0], 9, []),
        ([0, 1, 0, 1, 0], 5, [0, 0, 0, 4]),
        ([0, 1, 0, 1, 0], 1, [0, 0, 0, 4]),  # as 0.17.1: one cached block is asked for
        ([1, 1, 0, 0, 0], 100, [1, 2]),
    ],
)
def test_a_window_hits_where_its_blocks_are(cached: list[int], num_window_tokens: int, row: list[int]) -> None:
    manager = make(window(num_window_tokens))
    hashes = request("a", 21).block_hashes
    runs = []
    for position, is_cached in enumerate(cached):
        if is_cached:
            runs.append(cached_run(manager.pool, [hashes[position]], position))
        else:
            runs.append(loose_run(*manager.pool.take(1)))
    manager.pool.release(runs[::-1])
    assert lookup(manager, 21) == ([row] if row else [[]], len(row) * 4)


def test_a_window_gives_back_what_it_has_left_behind_the_last_first() -> None:
    manager = make(window(6))
    a = request("a", 16)
    prefill(manager, a)
    for token in range(16, 30):
        assert run_decode(manager, a, token) is not None
        check_invariants(manager)
        first_looked_at = max(a.num_tokens - 6, 0)
        row = manager.get_block_ids("a")[0]
        assert [block_id == 0 for block_id in row] == [(i + 1) * 4 <= first_looked_at for i in range(len(row))]
    assert free_ids(manager.pool)[-6:] == [2, 1, 3, 4, 5, 6]


def test_a_window_is_released_even_where_the_answer_is_none() -> None:
    manager = make(window(6), num_blocks=6)
    a = request("a", 16)
    prefill(manager, a)
    a.tokens += range(16, 60)
    assert manager.allocate_slots(a, 44) is None
    assert manager.get_block_ids("a")[0] == [0, 0, 3, 4]
    check_invariants(manager)


def test_removing_skipped_blocks_by_hand() -> None:
    manager = make(window(4))
    prefill(manager, request("a", 17))
    manager.remove_skipped_blocks("a", 11)
    assert manager.get_block_ids("a")[0] == [0, 0, 3, 4, 5]
    manager.remove_skipped_blocks("unknown", 11)
    assert manager.get_block_ids("unknown") == ([],)
    check_invariants(manager)


# Chunked local attention


def test_a_chunk_hits_from_its_start_on() -> None:
    manager = make(chunked(8))
    assert lookup(manager, 16) == ([[0, 0]], 8)  # the next token begins no chunk, but tokens 0 to 7 are of another
    assert lookup(manager, 17) == ([[0, 0, 0, 0]], 16)
    prefill(manager, request("a", 16))
    assert lookup(manager, 16) == ([[0, 0, 1]], 12)
    assert lookup(manager, 8) == ([[]], 0)  # tokens 0 to 3 were never given a block: their chunk was over


def test_a_chunk_is_given_back_when_it_is_over() -> None:
    manager = make(chunked(8))
    a = request("a", 7)
    prefill(manager, a)
    for token in range(7, 25):
        assert run_decode(manager, a, token) is not None
        check_invariants(manager)
        # At the time of the call, all but this step's token is computed.
        num_null_blocks = (a.num_tokens - 1) // 8 * 2
        row = manager.get_block_ids("a")[0]
        assert row[:num_null_blocks] == [0] * num_null_blocks
        assert 0 not in row[num_null_blocks:]


# Mamba


def test_mamba_all_hits_at_a_state_and_keeps_the_last() -> None:
    manager = make(mamba(MambaMode.ALL))
    a = request("a", 18)
    prefill(manager, a)
    manager.new_step_starts()
    assert lookup(manager, 18) == ([[0, 0, 0, 4]], 16)
    assert lookup(manager, 16) == ([[0, 0, 3]], 12)
    manager.evict_blocks([2])  # of a running request: what was computed from it goes, too
    assert lookup(manager, 18) == ([[1]], 4)
    for token in range(18, 27):
        run_decode(manager, a, token)
        check_invariants(manager)
    assert manager.get_block_ids("a")[0][:5] == [0] * 5


def test_mamba_defers_a_hit_that_was_cached_in_this_step() -> None:
    manager = make(FULL, mamba(MambaMode.ALL))
    manager.new_step_starts()
    prefill(manager, request("a", 18))
    b = request("b", 20)
    num_free_blocks = manager.pool.num_free_blocks
    assert prefill(manager, b) is None
    assert manager.pool.num_free_blocks == num_free_blocks
    assert manager.take_refused_alone() == {}
    manager.new_step_starts()
    assert prefill(manager, b) == 16


def test_mamba_none_keeps_one_state_and_room_for_drafts() -> None:
    group = GroupGeometry(AttentionKind.MAMBA, 1000, mamba_mode=MambaMode.NONE, num_speculative_blocks=2)
    manager = make(group, enable_caching=False)
    a = request("a", 18)
    assert prefill(manager, a) == 0
    for token in range(18, 60):
        assert manager.get_block_ids("a") == ([1, 2, 3],)
        assert run_decode(manager, a, token) is manager.empty_kv_cache_blocks


def test_mamba_align_keeps_the_states_at_step_ends() -> None:
    manager = make(mamba(MambaMode.ALIGN))
    a = request("a", 22)
    prefill(manager, a, 8)
    assert manager.get_block_ids("a") == ([0, 1],)
    new_blocks = manager.allocate_slots(a, 8)
    assert new_blocks is not None
    assert new_blocks.get_block_ids() == ([0, 2],)  # the table's new positions
    a.num_computed_tokens = 16
    assert manager.get_block_ids("a") == ([0, 1, 0, 2],)  # the state before is copied from in this step
    manager.allocate_slots(a, 6)
    a.num_computed_tokens = 22
    check_invariants(manager)
    assert manager.get_block_ids("a") == ([0, 0, 0, 2, 0, 3],)
    manager.new_step_starts()
    assert lookup(manager, 22) == ([[0, 0, 0, 2]], 16)
    assert lookup(manager, 16) == ([[0, 1]], 8)


def test_mamba_align_uses_passed_speculative_blocks_again() -> None:
    manager = make(mamba(MambaMode.ALIGN, num_speculative_blocks=2))
    a = request("a", 8)
    prefill(manager, a)
    assert manager.get_block_ids("a") == ([0, 1, 2, 3],)
    a.tokens += range(8, 12)
    new_blocks = manager.allocate_slots(a, 4)
    assert new_blocks is not None
    assert new_blocks.get_block_ids() == ([4],)
    a.num_computed_tokens = 12
    a.tokens += range(12, 24)
    manager.allocate_slots(a, 12)
    check_invariants(manager)
    # The states of positions 3 and 4 were for drafts; the step ends beyond them, so they serve at its end.
    assert manager.get_block_ids("a") == ([0, 0, 2, 0, 0, 3, 4, 5],)


# Cross-attention


def test_cross_attention_takes_the_encoders_blocks_once() -> None:
    manager = make(FULL, GroupGeometry(AttentionKind.CROSS, 4), enable_caching=False)
    a = request("a", 3)
    new_blocks = manager.allocate_slots(a, 3, num_encoder_tokens=9)
    assert new_blocks is not None
    assert new_blocks.get_block_ids() == ([1], [2, 3, 4])
    a.num_computed_tokens = 3
    for token in range(3, 20):
        assert run_decode(manager, a, token) is not None
        check_invariants(manager)
    assert manager.get_block_ids("a")[1] == [2, 3, 4]
    assert manager.get_num_common_prefix_blocks("a") == [0, 0]
    manager.free(a)
    assert manager.pool.num_held_blocks == 0


def test_cross_attention_counts_before_anything_is_taken() -> None:
    manager = make(FULL, GroupGeometry(AttentionKind.CROSS, 4), num_blocks=4, enable_caching=False)
    assert manager.allocate_slots(request("a", 3), 3, num_encoder_tokens=9) is None
    assert manager.pool.num_held_blocks == 0


# Any mix


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="chunked local attention with EAGLE: expected prefix caching off"):
        make(FULL, chunked(8), use_eagle=True)
    make(FULL, chunked(8), use_eagle=True, enable_caching=False)


def test_the_hit_is_a_multiple_of_every_groups_block() -> None:
    large = GroupGeometry(AttentionKind.FULL, 12)
    manager = make(FULL, large, window(9, 8))
    assert prefill(manager, request("a", 60)) == 0
    assert prefill(manager, request("b", 60)) == 48
    assert [len(row) for row in manager.get_block_ids("b")] == [15, 5, 8]
    assert lookup(manager, 30)[1] == 24


def oracle(manager: CacheManager, hashes: list[bytes], num_tokens: int, use_eagle: bool) -> int:
    """The longest hit, straight from its definition: every length is tried, the longest first."""
    step = manager.geometry.hit_alignment_tokens
    for num_hit_tokens in range((num_tokens - 1) // step * step, 0, -step):
        if all(
            serves(manager, number, hashes, num_hit_tokens, num_tokens, use_eagle)
            for number in range(len(manager.groups))
        ):
            return num_hit_tokens
    return 0


def serves(
    manager: CacheManager, number: int, hashes: list[bytes], num_hit_tokens: int, num_tokens: int, use_eagle: bool
) -> bool:
    group = manager.geometry.groups[number]
    size = group.num_tokens_per_block
    end = num_hit_tokens // size
    if group.kind is AttentionKind.MAMBA:
        looked_at = range(end - 1, end)
    else:
        first = {
            AttentionKind.FULL: 0,
            AttentionKind.SLIDING_WINDOW: max(num_hit_tokens - group.window_tokens + 1, 0),
            AttentionKind.CHUNKED_LOCAL: num_hit_tokens // max(group.chunk_tokens, 1) * group.chunk_tokens,
        }[group.kind]
        if use_eagle and num_hit_tokens + size >= num_tokens:
            return False  # no room for the block that is dropped
        has_window = any(other.kind is AttentionKind.SLIDING_WINDOW for other in manager.geometry.groups)
        num_dropped = use_eagle + (use_eagle and has_window and group.kind is AttentionKind.FULL)
        looked_at = range(first // size, end + num_dropped)
        if group.kind is AttentionKind.SLIDING_WINDOW and not looked_at:
            looked_at = range(end - 1, end)
    per_block = size // 4
    joined = [b"".join(hashes[i : i + per_block]) for i in range(0, len(hashes) - per_block + 1, per_block)]
    return all(
        position < len(joined) and manager.pool.indexes[number].get(joined[position]) is not None
        for position in looked_at
    )


@pytest.mark.parametrize("use_eagle", [False, True])
def test_the_hit_of_any_mix_is_the_longest_there_is(use_eagle: bool) -> None:
    for seed in range(300):
        rng = random.Random(seed)
        kinds = [FULL, window(1), window(5), window(9), window(30), mamba(MambaMode.ALL), window(13, 8)]
        kinds += [GroupGeometry(AttentionKind.FULL, 8)] + ([] if use_eagle else [chunked(8), chunked(12), chunked(16)])
        manager = make(*rng.choices(kinds, k=rng.randint(1, 4)), use_eagle=use_eagle, num_blocks=200)
        longest = request("text", 61)
        for number, group in enumerate(manager.groups):
            row = group.hashes_of(longest.block_hashes)
            for position, block_hash in enumerate(itertools.islice(row, len(row))):
                if rng.random() < 0.8:
                    cached_run(manager.pool, [block_hash], position, number)
        for num_tokens in rng.sample(range(1, 62), 8):
            expected = oracle(manager, longest.block_hashes[: num_tokens // 4], num_tokens, use_eagle)
            assert lookup(manager, num_tokens)[1] == expected, f"seed {seed}, {num_tokens} tokens"


# Refused while nobody holds anything


def test_a_request_that_is_refused_alone_is_named_once() -> None:
    manager = make(FULL, window(6), num_blocks=8)
    a, b = request("a", 9), request("b", 60, first=500)
    assert prefill(manager, a) == 0
    assert prefill(manager, b) is None
    assert manager.take_refused_alone() == {}  # a may end
    manager.free(a)
    assert prefill(manager, b) is None
    assert manager.take_refused_alone() == {"b": Refusal(30, 7, 0)}
    assert manager.take_refused_alone() == {}
    assert prefill(manager, b) is None
    manager.new_step_starts()
    assert manager.take_refused_alone() == {}
    assert manager.never_fits(b) is not None
    assert manager.never_fits(a) is None


def test_a_request_that_holds_all_that_is_held_is_refused_alone() -> None:
    manager = make(FULL, window(6), num_blocks=12)
    a = request("a", 20)
    assert prefill(manager, a) == 0  # 5 blocks, and 3 of the window's 5 when its next tokens come
    a.tokens += range(20, 60)
    assert manager.allocate_slots(a, 40) is None
    assert manager.take_refused_alone() == {"a": Refusal(27, 11, 20)}
    b = request("b", 3, first=500)
    assert prefill(manager, b) == 0
    assert manager.allocate_slots(a, 40) is None
    assert manager.take_refused_alone() == {}


# Calls that cannot be right


def snapshot(manager: CacheManager) -> Any:
    tables = [{name: list(table.block_ids) for name, table in group.tables.items()} for group in manager.groups]
    return tables, pool_snapshot(manager.pool)


@pytest.mark.parametrize(
    ("rows", "num_hit_tokens", "message"),
    [
        (([1, 2],), 8, "expected blocks of 2 KV cache groups, found 1"),
        (([1, 2], [3, 4]), 4, "of num_new_computed_tokens 4, found those of 8 tokens in KV cache group 0"),
        (
            ([1, 2], [3]),
            8,
            "of num_new_computed_tokens 8, found those of 4 tokens in KV cache group 1",
        ),
        (([1, 1], [3, 4]), 8, "group 0: expected each hit once"),
        (([0, 2], [3, 4]), 8, "group 0: expected no null block among the hits, found 1"),
        (([1, 2], [1, 2]), 8, "block 1: expected a prefix hit of KV cache group 1, found one of group 0"),
        (([1, 2], [0, 9]), 8, "block 9: expected a prefix hit of KV cache group 1, found one that is not cached"),
        (([1, 99], [0, 4]), 8, "block 99: expected an id from 0 to 19"),
    ],
)
def test_hits_that_no_lookup_answered_are_refused_whole(
    rows: tuple[list[int], ...], num_hit_tokens: int, message: str
) -> None:
    manager = make(FULL, window(6), num_blocks=20)
    a = request("a", 8)
    prefill(manager, a)
    before = snapshot(manager)
    with pytest.raises(CallError, match=message):
        manager.allocate_slots(request("b", 12), 4, num_hit_tokens, KVCacheBlocks.of_ids(manager.pool, rows))
    assert snapshot(manager) == before


def test_another_pools_answer_is_refused() -> None:
    manager, other = make(FULL), make(FULL)
    for each in (manager, other):
        prefill(each, request("a", 8))
    blocks, num_hit_tokens = other.get_computed_blocks(request("b", 12))
    before = snapshot(manager)
    with pytest.raises(CallError, match="found blocks of another pool"):
        manager.allocate_slots(request("b", 12), 4, num_hit_tokens, blocks)
    assert snapshot(manager) == before


def test_caching_more_than_a_request_has_is_refused_whole() -> None:
    manager = make(FULL, window(6))
    a = request("a", 40)
    prefill(manager, a, 10)
    before = snapshot(manager)
    with pytest.raises(CallError, match="request 'a': expected 10 blocks for 40 tokens, found 3"):
        manager.cache_blocks(a, 40)
    with pytest.raises(CallError, match="request 'b': expected 3 blocks for 12 tokens, found 0"):
        manager.cache_blocks(request("b", 12), 12)
    assert snapshot(manager) == before


def test_evicting_what_is_no_block_id_is_refused_whole() -> None:
    manager = make(FULL)
    prefill(manager, request("a", 8))
    before = snapshot(manager)
    for odd in ([1, 2.5], ["1"], [1, 100], (block_id for block_id in (1, -1))):
        with pytest.raises(CallError):
            manager.evict_blocks(odd)  # type: ignore[arg-type]
        assert snapshot(manager) == before
    manager.evict_blocks(block_id for block_id in [1])
    assert lookup(manager, 9)[1] == 0


def test_a_manager_that_checks_itself_is_not_copied() -> None:
    geometry = CacheGeometry(9, 100, (FULL,), 4)
    manager = CacheManager(geometry, Settings(check_invariants="stop"))
    for copy_it in (copy.deepcopy, pickle.dumps):
        with pytest.raises(CallError, match="expected not to be copied or pickled"):
            copy_it(manager)
    assert copy.deepcopy(CacheManager(geometry, Settings())).pool.num_free_blocks == 8


@pytest.mark.parametrize("kind", AttentionKind)
def test_every_kind_has_a_class(kind: AttentionKind) -> None:
    group = GroupGeometry(kind, 4, window_tokens=6, chunk_tokens=8, num_sink_blocks=int(kind is AttentionKind.SINK))
    manager = make(group, enable_caching=False)
    assert manager.allocate_slots(request("a", 9), 9, num_encoder_tokens=9) is not None
    check_invariants(manager)
    assert manager.pool.num_held_blocks == 3
