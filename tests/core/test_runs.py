"""Runs of blocks: how they are split, hit, shared, left behind by windows and eaten, seen block by block.

Managers here have one group of full attention and blocks of 4 tokens; a request's tokens are their own values, so that
two requests that begin with the same tokens share a prefix.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.pools import cached_run, chain, free_ids, loose_run, make_pool, match_ids
from tests.core.support import FakeRequest, make_hybrid_manager, make_manager, run_decode, run_prefill
from vllm_kvplug.block import KVCacheBlocks
from vllm_kvplug.block_pool import BlockPool
from vllm_kvplug.block_run import Hit, RunPart
from vllm_kvplug.block_states import BlockStates, find_hit
from vllm_kvplug.errors import CallError
from vllm_kvplug.geometry import AttentionKind, GroupGeometry
from vllm_kvplug.groups.holding import take_out
from vllm_kvplug.groups.table import BlockTable, Hold
from vllm_kvplug.invariants import check_invariants
from vllm_kvplug.manager import CacheManager
from vllm_kvplug.observers import Observer

HASHES = [bytes([letter]) * 32 for letter in b"abcdefgh"]
FULL = GroupGeometry(AttentionKind.FULL, 4)
WINDOW = GroupGeometry(AttentionKind.SLIDING_WINDOW, 4, window_tokens=9)


@pytest.fixture
def pool() -> BlockPool:
    return make_pool(12)


def counts(pool: BlockPool) -> list[int]:
    """The references of blocks 1, 2, ..."""
    return BlockStates.of(pool).reference_counts[1:]


def request(request_id: str, num_tokens: int, *others: int) -> FakeRequest:
    """So many tokens that all requests begin with, then others."""
    return FakeRequest(request_id, [*range(num_tokens), *others])


def prefill(manager: CacheManager, new_request: FakeRequest) -> list[int]:
    _, block_ids = run_prefill(manager, new_request)
    check_invariants(manager)
    assert block_ids is not None
    return block_ids


def free(manager: CacheManager, *requests: FakeRequest) -> None:
    for ended in requests:
        manager.free(ended)
        check_invariants(manager)


def runs_of(manager: CacheManager, request_id: str, group_id: int = 0) -> list[tuple[int, list[int]]]:
    """A table's holds, piece by piece: the position of each, and its blocks."""
    holds = manager.groups[group_id].tables[request_id].holds
    return [(piece.position, list(piece.run.block_ids)) for hold in holds for piece in hold.pieces()]


# Splitting


def test_a_free_run_is_split_where_a_hit_ends_and_keeps_its_place(pool: BlockPool) -> None:
    run = cached_run(pool, HASHES[:4])
    pool.release([run, loose_run(*pool.take(1))])
    order = free_ids(pool)
    rest = pool.split(run, 1)
    assert chain(run) == [[1], [2, 3, 4]]
    assert free_ids(pool) == order
    assert (rest.first_position, rest.num_holders, list(rest.block_hashes)) == (1, 0, HASHES[1:4])
    assert match_ids(pool, HASHES) == [1, 2, 3, 4]
    assert pool.indexes[0].run(HASHES[2]) is rest


@pytest.mark.parametrize("num_holders", [1, 2, 3])
def test_a_held_run_is_split_for_all_its_holders(pool: BlockPool, num_holders: int) -> None:
    run = cached_run(pool, HASHES[:4])
    for _ in range(num_holders - 1):
        pool.acquire(run, 0, 4)
    rest = pool.split(run, 3)
    assert rest.num_holders == run.num_holders == num_holders
    assert rest in pool.held_runs
    for _ in range(num_holders):
        assert counts(pool)[:4] == [run.num_holders] * 4
        pool.release([rest, run])
    assert free_ids(pool)[-4:] == [4, 3, 2, 1]


def test_a_part_in_the_middle_is_split_off_at_both_ends(pool: BlockPool) -> None:
    run = cached_run(pool, HASHES[:5])
    part = pool.acquire(run, 1, 2)
    assert chain(run) == [[1], [2, 3], [4, 5]]
    assert part is run.rest
    assert counts(pool)[:5] == [1, 2, 2, 1, 1]
    pool.release([part])
    pool.release([piece.run for piece in Hold(0, run, 5).pieces()][::-1])
    assert free_ids(pool)[-5:] == [5, 4, 3, 2, 1]


def test_the_head_of_a_free_run_leaves_the_rest_where_it_is(pool: BlockPool) -> None:
    run = cached_run(pool, HASHES[:3])
    pool.release([run, loose_run(*pool.take(8))])
    held = pool.acquire(run, 0, 1)
    assert held is run
    assert free_ids(pool) == [3, 2, 11, 10, 9, 8, 7, 6, 5, 4]
    pool.release([held])
    assert free_ids(pool)[-1] == 1


def test_splits_of_splits_stay_in_the_order_of_positions(pool: BlockPool) -> None:
    run = cached_run(pool, HASHES[:6])
    hold = Hold(0, run, 6)
    pool.split(run, 4)
    pool.split(run, 2)
    pool.split(run.rest.rest, 1)
    pool.split(run, 1)
    assert chain(run) == [[1], [2], [3, 4], [5], [6]]
    assert [piece.position for piece in hold.pieces()] == [0, 1, 2, 4, 5]
    assert [piece.run.first_position for piece in hold.pieces()] == [0, 1, 2, 4, 5]
    assert [pool.places()[block_id][1] for block_id in range(1, 7)] == [0, 0, 0, 1, 0, 0]


def test_a_worthless_run_is_split_in_its_place(pool: BlockPool) -> None:
    run = cached_run(pool, HASHES[:3])
    pool.uncache(run, 0, 3)
    pool.release([run], is_worthless=True)
    pool.split(run, 1)
    assert chain(run) == [[1], [2, 3]]
    assert free_ids(pool)[:4] == [3, 2, 1, 4]
    assert pool.take(4) == [3, 2, 1, 4]


def test_hits_in_what_was_split_off_since_the_lookup_count_on_in_the_rest(pool: BlockPool) -> None:
    run = cached_run(pool, HASHES[:5])
    pool.release([run])
    parts = [RunPart(0, run, 0, 2), RunPart(2, run, 2, 1), RunPart(4, run, 4, 1)]
    held = [pool.acquire(part.run, part.offset, part.num_blocks) for part in parts]
    assert [part.block_ids for part in held] == [[1, 2], [3], [5]]
    assert counts(pool)[:5] == [1, 1, 1, 0, 1]


def test_a_head_cut_off_is_a_run_of_its_own_and_the_run_goes_on(pool: BlockPool) -> None:
    run = cached_run(pool, HASHES[:5])
    head = pool.cut_head(run, 2)
    assert (head.block_ids, head.first_position, list(head.block_hashes)) == ([1, 2], 0, HASHES[:2])
    assert (run.block_ids, run.first_position, list(run.block_hashes)) == ([3, 4, 5], 2, HASHES[2:5])
    assert (head.rest, head.num_holders, head in pool.held_runs) == (None, 1, True)
    assert match_ids(pool, HASHES) == [1, 2, 3, 4, 5]
    pool.release([head])
    assert free_ids(pool)[-2:] == [2, 1]
    assert counts(pool)[:5] == [0, 0, 1, 1, 1]


def test_each_change_of_what_a_lookup_found_is_another_version(pool: BlockPool) -> None:
    versions = [pool.version]

    def note() -> None:
        versions.append(pool.version)

    run = cached_run(pool, HASHES[:3])
    note()
    pool.cache_more(run, pool.take(1), HASHES[3:4])
    note()
    pool.split(run, 2)
    note()
    pool.cut_head(run, 1)
    note()
    pool.uncache(run, 0, 1)
    note()
    pool.release([run.rest])
    pool.take(pool.num_free_blocks)
    note()
    assert len(set(versions)) == len(versions)


# Reuse


def test_a_free_run_is_eaten_from_its_end_and_its_head_is_still_hit(pool: BlockPool) -> None:
    run = cached_run(pool, HASHES[:4])
    pool.release([run])
    pool.take(7)
    assert pool.take(3) == [4, 3, 2]
    assert match_ids(pool, HASHES) == [1]
    assert pool.take(1) == [1]
    assert (match_ids(pool, HASHES), len(pool.indexes[0])) == ([], 0)


def test_a_run_with_uncached_blocks_at_its_end_loses_its_hashes_last(pool: BlockPool) -> None:
    run = cached_run(pool, HASHES[:2])
    run.block_ids += pool.take(3)  # as a request gives back its last, unfinished blocks together with the others
    pool.release([run])
    pool.take(6)
    assert pool.take(4) == [5, 4, 3, 2]
    assert match_ids(pool, HASHES) == [1]


class Evictions(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []

    def on_evict(self, block_id: int, group_id: int, block_hash: bytes, is_last_copy: bool) -> None:
        self.seen.append((block_id, is_last_copy))


@pytest.mark.parametrize("is_observed", [True, False])
def test_eating_a_run_lets_duplicates_answer(is_observed: bool) -> None:
    evictions = Evictions()
    pool = make_pool(7, *([evictions] if is_observed else []))
    first, second = cached_run(pool, HASHES[:3]), cached_run(pool, HASHES[:2])
    pool.release([first])
    pool.take(1)
    assert pool.take(2) == [3, 2]
    assert match_ids(pool, HASHES) == [1, 5]
    assert pool.take(1) == [1]
    assert match_ids(pool, HASHES) == [4, 5]
    assert evictions.seen == ([(3, True), (2, False), (1, False)] if is_observed else [])
    assert second.is_intact is False


# Holes


def test_an_evicted_block_leaves_a_hole_and_its_neighbours_are_hit(pool: BlockPool) -> None:
    run = cached_run(pool, HASHES[:4])
    pool.evict([2])
    assert (list(run.block_hashes), run.is_intact) == ([HASHES[0], None, *HASHES[2:4]], False)
    assert match_ids(pool, HASHES) == [1]
    assert list(pool.indexes[0].match(HASHES, 4, 2).block_ids) == [3, 4]
    pool.evict([4])
    assert list(run.block_hashes) == [HASHES[0], None, HASHES[2]]
    pool.evict([2, 4])  # not cached: passed over
    part = pool.acquire(run, 2, 1)
    assert (part.block_ids, list(part.block_hashes)) == ([3], HASHES[2:3])
    pool.release([part])
    pool.release([piece.run for piece in Hold(0, run, 4).pieces()][::-1])
    assert pool.take(11)[-4:] == [4, 3, 2, 1]
    assert len(pool.indexes[0]) == 0


def test_a_request_goes_on_caching_after_its_last_block_was_evicted() -> None:
    manager = make_manager()
    a = request("a", 8)
    prefill(manager, a)
    manager.pool.evict([2])  # the pool alone, as a view does it: the request publishes on
    for token in range(8, 13):
        run_decode(manager, a, token)
        check_invariants(manager)
    assert runs_of(manager, "a") == [(0, [1, 2]), (2, [3])]
    b = request("b", 13)
    assert manager.get_computed_blocks(b)[1] == 4
    free(manager, a)
    assert free_ids(manager.pool)[-4:] == [4, 3, 2, 1]


# Requests that share runs


def test_a_decoding_request_has_one_run_for_all_its_blocks() -> None:
    manager = make_manager()
    a = request("a", 9)
    prefill(manager, a)
    for token in range(9, 21):
        run_decode(manager, a, token)
        check_invariants(manager)
    assert runs_of(manager, "a") == [(0, [1, 2, 3, 4, 5])]
    assert manager.get_block_ids("a") == ([1, 2, 3, 4, 5, 6],)
    free(manager, a)
    assert free_ids(manager.pool) == [7, 8, 9, 10, 6, 5, 4, 3, 2, 1]


def test_two_requests_share_the_head_of_a_run_and_each_goes_on_alone() -> None:
    manager = make_manager(20)
    a, b = request("a", 17), request("b", 9, 50, 51, 52, 53)
    prefill(manager, a)
    prefill(manager, b)
    assert runs_of(manager, "a") == [(0, [1, 2]), (2, [3, 4])]
    assert runs_of(manager, "b") == [(0, [1, 2]), (2, [6])]
    for token in range(60, 66):
        for running in (a, b):
            run_decode(manager, running, token)
            check_invariants(manager)
    # What b cached first is a run of its own, which grows; a's was split, and its end grows.
    assert runs_of(manager, "a") == [(0, [1, 2]), (2, [3, 4, 5])]
    assert runs_of(manager, "b") == [(0, [1, 2]), (2, [6, 7])]
    free(manager, a)
    assert counts(manager.pool)[:9] == [1, 1, 0, 0, 0, 1, 1, 0, 1]
    free(manager, b)
    assert manager.usage == 0.0


def test_who_holds_a_whole_shared_run_alone_again_lets_it_grow() -> None:
    manager = make_manager(20)
    a, b = request("a", 9), request("b", 9)
    prefill(manager, a)
    prefill(manager, b)
    run_decode(manager, b, 70)
    free(manager, a)
    for token in (71, 72, 73):
        run_decode(manager, b, token)
        check_invariants(manager)
    assert runs_of(manager, "b") == [(0, [1, 2, 4])]


def test_a_run_that_is_shared_does_not_grow() -> None:
    manager = make_manager(20)
    a, b = request("a", 8), request("b", 9)
    prefill(manager, a)
    prefill(manager, b)
    for token in range(60, 65):
        run_decode(manager, a, token)
        check_invariants(manager)
    assert runs_of(manager, "a") == [(0, [1, 2]), (2, [4])]
    assert runs_of(manager, "b") == [(0, [1, 2])]


def test_a_third_hit_inside_the_shared_part_splits_it_for_both() -> None:
    manager = make_manager(30)
    requests = [request("a", 21), request("b", 17, 90), request("c", 9, 91), request("d", 5, 92)]
    for new_request in requests:
        prefill(manager, new_request)
    assert runs_of(manager, "a") == [(0, [1]), (1, [2]), (2, [3, 4]), (4, [5])]
    assert runs_of(manager, "b") == [(0, [1]), (1, [2]), (2, [3, 4])]
    assert counts(manager.pool)[:6] == [4, 3, 2, 2, 1, 1]
    assert manager.get_num_common_prefix_blocks("a") == [1]
    free(manager, requests[0])
    assert counts(manager.pool)[:6] == [3, 2, 1, 1, 0, 0]
    free(manager, *requests[1:])
    assert manager.usage == 0.0


def test_a_hit_of_a_run_eaten_at_its_end_and_one_freed_before() -> None:
    manager = make_manager(9)
    a = request("a", 17)
    prefill(manager, a)
    free(manager, a)
    b = FakeRequest("b", list(range(100, 120)))  # five blocks: three unused, then 5, which is not cached, and 4
    assert prefill(manager, b) == [6, 7, 8, 5, 4]
    c = request("c", 17)
    assert run_prefill(manager, c) == (12, None)
    free(manager, b)
    assert run_prefill(manager, c) == (12, [1, 2, 3, 4, 5])
    check_invariants(manager)


# Duplicates


def computed_twice(manager: CacheManager, num_tokens: int = 17) -> tuple[FakeRequest, FakeRequest]:
    """Two requests that compute the same prefix, the second without looking for it."""
    a, b = request("a", num_tokens), request("b", num_tokens)
    b.skip_reading_prefix_cache = True
    prefill(manager, a)
    prefill(manager, b)
    return a, b


def test_the_older_of_two_equal_runs_answers_until_it_is_gone() -> None:
    manager = make_manager(13)
    a, b = computed_twice(manager)
    assert manager.get_computed_blocks(request("c", 17))[0].get_block_ids() == ([1, 2, 3, 4],)
    free(manager, a)
    eater = FakeRequest("eater", list(range(100, 116)))
    assert prefill(manager, eater) == [11, 12, 5, 4]
    # Three blocks of the older run, then one of the younger.
    assert manager.get_computed_blocks(request("c", 17))[0].get_block_ids() == ([1, 2, 3, 9],)
    free(manager, eater)
    c = request("c", 18)
    assert prefill(manager, c) == [1, 2, 3, 9, 4]
    assert runs_of(manager, "c") == [(0, [1, 2, 3]), (3, [9])]
    assert runs_of(manager, "b") == [(0, [6, 7, 8]), (3, [9])]
    free(manager, b, c)
    assert manager.usage == 0.0


def test_a_duplicate_is_hit_where_its_original_has_a_hole() -> None:
    manager = make_manager(13)
    a, b = computed_twice(manager)
    manager.pool.evict([2])
    check_invariants(manager)
    c = request("c", 17, 80)
    assert prefill(manager, c)[:4] == [1, 7, 3, 4]
    assert runs_of(manager, "c") == [(0, [1]), (1, [7]), (2, [3, 4])]
    assert counts(manager.pool)[:9] == [2, 1, 2, 2, 1, 1, 2, 1, 1]
    free(manager, a, b, c)
    assert manager.usage == 0.0


def test_a_request_that_goes_on_beside_its_equal_makes_a_run_of_duplicates() -> None:
    manager = make_manager(20)
    a, b = request("a", 9), request("b", 9)
    prefill(manager, a)
    prefill(manager, b)
    for token in range(9, 21):
        for running in (a, b):
            run_decode(manager, running, token)
            check_invariants(manager)
    assert manager.pool.indexes[0].block_ids(a.block_hashes[3])[0] == manager.get_block_ids("a")[0][3]
    assert len(manager.pool.indexes[0].block_ids(a.block_hashes[3])) == 2
    free(manager, a)
    c = request("c", 21)
    assert manager.get_computed_blocks(c)[1] == 20
    free(manager, b)
    check_invariants(manager)


# Windows


def test_a_window_cuts_the_head_off_its_run_as_it_moves() -> None:
    manager = make_hybrid_manager(40, groups=(WINDOW,))
    a = request("a", 12)
    prefill(manager, a)
    for token in range(12, 41):
        run_decode(manager, a, token)
        check_invariants(manager)
    runs = runs_of(manager, "a")
    assert len(runs) == 1, "it is still one run"
    assert runs[0][0] == manager.get_block_ids("a")[0].count(0) == 8


def test_a_window_leaves_a_shared_run_to_the_other_holder() -> None:
    manager = make_hybrid_manager(60, groups=(FULL, WINDOW))
    a, b = request("a", 24), request("b", 24, 70, 71)
    prefill(manager, a)
    assert manager.get_computed_blocks(b)[1] == 24
    prefill(manager, b)
    a_before = manager.get_block_ids("a")[1]
    for token in range(80, 100):
        run_decode(manager, b, token)
        check_invariants(manager)
    assert manager.get_block_ids("a")[1] == a_before
    for token in range(80, 92):
        run_decode(manager, a, token)
        check_invariants(manager)
    free(manager, b, a)
    assert manager.usage == 0.0
    c = request("c", 25)
    assert manager.get_computed_blocks(c)[1] == 24


@pytest.mark.parametrize(
    ("first", "end", "taken", "left"),
    [
        (0, 8, [[8], [7], [5, 6], [3, 4], [1, 2]], []),
        (0, 2, [[1, 2]], [(2, [3, 4]), (4, [5, 6]), (7, [8])]),
        (1, 3, [[3], [2]], [(0, [1]), (3, [4]), (4, [5, 6]), (7, [8])]),
        (3, 4, [[4]], [(0, [1, 2]), (2, [3]), (4, [5, 6]), (7, [8])]),
        (2, 5, [[5], [3, 4]], [(0, [1, 2]), (5, [6]), (7, [8])]),
        (5, 8, [[8], [7], [6]], [(0, [1, 2]), (2, [3, 4]), (4, [5])]),
        (6, 7, [[7]], [(0, [1, 2]), (2, [3, 4]), (4, [5, 6]), (7, [8])]),
        (4, 4, [], [(0, [1, 2]), (2, [3, 4]), (4, [5, 6]), (7, [8])]),
    ],
)
@pytest.mark.parametrize("is_shared", [False, True])
def test_taking_positions_out_of_a_table(
    pool: BlockPool,
    first: int,
    end: int,
    taken: list[list[int]],
    left: list[tuple[int, list[int]]],
    is_shared: bool,
) -> None:
    """Its blocks: a run of six, split twice since, a loose one, another run."""
    table = BlockTable()
    run = cached_run(pool, HASHES[:6])
    loose = pool.take(1)
    last = cached_run(pool, HASHES[7:], 7)
    table.block_ids = [*run.block_ids, *loose, *last.block_ids]
    table.holds = [Hold(0, run, 6), Hold(7, last, 1)]
    for offset in (4, 2):
        pool.split(run, offset)
    if is_shared:
        for piece in Hold(0, run, 6).pieces():
            pool.acquire(piece.run, 0, piece.num_blocks)
    runs = take_out(pool, 0, table, first, end)
    assert [taken_run.block_ids for taken_run in runs] == taken
    assert [(piece.position, piece.run.block_ids) for hold in table.holds for piece in hold.pieces()] == left
    pool.release(runs)
    in_runs = {block_id for ids in taken for block_id in ids}
    num_free = len(in_runs & {7, 8}) if is_shared else len(in_runs)
    assert pool.num_free_blocks == 3 + num_free
    expected = [
        (block_id not in in_runs) + (is_shared and block_id <= 6) if block_id <= 8 else 0 for block_id in range(1, 12)
    ]
    assert counts(pool) == expected


# Hits by their ids


def test_an_old_answer_goes_by_its_ids() -> None:
    manager = make_manager(20)
    a = request("a", 17)
    prefill(manager, a)
    b = request("b", 17, 60)
    hits, num_hit_tokens = manager.get_computed_blocks(b)
    prefill(manager, request("c", 9, 61))  # splits the run that was found
    assert manager.allocate_slots(b, b.num_tokens - num_hit_tokens, num_hit_tokens, hits) is not None
    check_invariants(manager)
    assert manager.get_block_ids("b")[0][:4] == [1, 2, 3, 4]
    assert runs_of(manager, "b") == [(0, [1, 2]), (2, [3, 4])]
    assert counts(manager.pool)[:4] == [3, 3, 2, 2]


def test_an_old_answer_whose_blocks_are_gone_is_refused() -> None:
    manager = make_manager(6)
    a = request("a", 16)
    prefill(manager, a)
    free(manager, a)
    b = request("b", 17)
    hits, num_hit_tokens = manager.get_computed_blocks(b)
    prefill(manager, FakeRequest("eater", list(range(100, 107))))
    before = counts(manager.pool)
    with pytest.raises(CallError, match=r"block 4: expected a prefix hit.*found one that is not cached"):
        manager.allocate_slots(b, 1, num_hit_tokens, hits)
    assert counts(manager.pool) == before


def test_an_answer_put_together_by_hand_serves() -> None:
    manager = make_manager(20)
    prefill(manager, request("a", 17))
    b = request("b", 17)
    hits = KVCacheBlocks.of_ids(manager.pool, ([1, 2, 3],))
    assert manager.allocate_slots(b, 5, 12, hits) is not None
    check_invariants(manager)
    assert runs_of(manager, "b")[0] == (0, [1, 2, 3])


def test_a_row_of_ids_is_found_as_parts_of_runs(pool: BlockPool) -> None:
    first, second = cached_run(pool, HASHES[:3]), cached_run(pool, HASHES[3:5], 3)
    hit = find_hit(pool, 0, [0, 2, 3, 4, 5], may_be_null=True)
    assert list(hit.parts) == [RunPart(1, first, 1, 2), RunPart(3, second, 0, 2)]
    assert list(find_hit(pool, 0, [1, 3, 2], may_be_null=False).parts) == [
        RunPart(0, first, 0, 1),
        RunPart(1, first, 2, 1),
        RunPart(2, first, 1, 1),
    ]


def test_a_hit_is_shortened_and_its_beginning_left_out(pool: BlockPool) -> None:
    first, second = cached_run(pool, HASHES[:3]), cached_run(pool, HASHES[3:5], 3)
    hit = pool.indexes[0].match(HASHES, 5)
    assert hit.up_to(9) is hit
    assert list(hit.up_to(4).parts) == [RunPart(0, first, 0, 3), RunPart(3, second, 0, 1)]
    assert list(hit.up_to(3).parts) == [RunPart(0, first, 0, 3)]
    assert (list(hit.up_to(2).block_ids), list(hit.up_to(2).parts)) == ([1, 2], [RunPart(0, first, 0, 2)])
    assert (len(hit.up_to(0)), list(hit.up_to(0).parts)) == (0, [])
    assert list(hit.parts_from(0)) == list(hit.parts)
    assert list(hit.parts_from(2)) == [RunPart(2, first, 2, 1), RunPart(3, second, 0, 2)]
    assert list(hit.parts_from(4)) == [RunPart(4, second, 1, 1)]
    assert list(hit.parts_from(5)) == []
    assert len(Hit()) == 0


# A failed load, and resets


def test_what_was_computed_from_a_failed_load_is_given_back_before_all_else() -> None:
    manager = make_manager(20)
    a = request("a", 22)
    prefill(manager, a)
    manager.evict_blocks([3])
    check_invariants(manager)
    assert manager.get_computed_blocks(request("b", 22))[1] == 8
    free(manager, a)
    assert free_ids(manager.pool)[:4] == [6, 5, 4, 3]
    assert free_ids(manager.pool)[-2:] == [2, 1]


def start(manager: CacheManager, new_request: FakeRequest, num_tokens: int) -> int:
    """Look a request up and allocate so many tokens behind its hit, the answer."""
    blocks, num_hit_tokens = manager.get_computed_blocks(new_request)
    assert manager.allocate_slots(new_request, num_tokens, num_hit_tokens, blocks) is not None
    new_request.num_computed_tokens = num_hit_tokens + num_tokens
    return num_hit_tokens


def test_who_knows_nothing_of_a_failed_load_goes_on_caching_what_others_have_computed_anew() -> None:
    manager = make_manager(60)
    a, b, c, d, e = (
        request(name, 4 * num_blocks) for name, num_blocks in zip("abcde", (6, 11, 12, 13, 11), strict=True)
    )
    found = manager.get_computed_blocks(b)
    start(manager, a, 20)
    assert manager.allocate_slots(b, 20, found[1], found[0]) is not None  # the same five blocks, computed at once
    b.num_computed_tokens = 20
    assert manager.allocate_slots(b, 20) is not None
    assert start(manager, c, 2) == 40  # a's five blocks, and b's five behind its own copy of them
    manager.evict_blocks([manager.get_block_ids("b")[0][3]])
    assert start(manager, d, 31) == 20
    assert manager.allocate_slots(c, 2) is not None  # fills its eleventh block, which d has cached already
    check_invariants(manager)
    assert start(manager, e, 4) == 40
    check_invariants(manager)
    free(manager, a, b, c, d, e)
    assert manager.allocate_slots(request("f", 4 * 58), 4 * 58) is not None
    check_invariants(manager)


def test_a_failed_load_of_a_windows_block_leaves_other_holders_of_the_prefix_in_order() -> None:
    manager = make_hybrid_manager(90, groups=(FULL, WINDOW))
    a, b, c = request("a", 44), request("b", 48), request("c", 52)
    start(manager, a, 40)
    assert start(manager, b, 2) == 40
    failed = manager.get_block_ids("a")[1][4]
    assert failed not in manager.get_block_ids("b")[1]
    manager.evict_blocks([failed])
    assert start(manager, c, 35) == 16
    assert manager.allocate_slots(b, 2) is not None
    check_invariants(manager)


def test_another_requests_hit_is_taken_as_named_and_what_is_cached_behind_it_is_found_by_each_hash() -> None:
    manager = make_manager(60)
    a, b, other = request("a", 40), request("b", 40), FakeRequest("other", [*range(100, 113)])
    prefill(manager, other)
    prefill(manager, a)
    free(manager, other)
    manager.get_computed_blocks(b)
    answer: Any = manager.get_computed_blocks(other)
    assert manager.allocate_slots(b, 24, answer[1], answer[0]) is not None
    check_invariants(manager)


def test_after_a_reset_the_order_is_as_before_and_blocks_are_cached_afresh() -> None:
    manager = make_manager(20)
    a, b = computed_twice(manager)
    prefill(manager, request("c", 9, 70))
    free(manager, a, b, request("c", 0))
    order = free_ids(manager.pool)
    assert manager.reset_prefix_cache()
    check_invariants(manager)
    assert free_ids(manager.pool) == order
    assert prefill(manager, request("d", 17)) == order[:5]
    assert manager.get_computed_blocks(request("e", 17))[1] == 16


def test_an_answer_from_before_a_reset_is_refused() -> None:
    manager = make_manager(20)
    a = request("a", 17)
    prefill(manager, a)
    free(manager, a)
    answer: Any = manager.get_computed_blocks(request("b", 17))
    assert manager.reset_prefix_cache()
    with pytest.raises(CallError, match="block 1: expected a prefix hit"):
        manager.allocate_slots(request("b", 17), 1, answer[1], answer[0])
    assert manager.usage == 0.0
