"""Public faults of allocation: F1 (#33775, #44409), F2 (#47728), F3 (#43382), F8, F11 (#42571) and F12
(vllm-ascend#14301).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.pools import free_ids
from tests.core.pools import snapshot as pool_snapshot
from tests.faults.support import FULL, check, mamba, on_both, ours, prompt, request, run, sliding_window, upstream
from vllm_kvplug.errors import BlockError
from vllm_kvplug.vllm_glue.upstream_views import KVCacheBlock

# F1: external tokens of one group must not be given blocks that a later group's lookup has just hit.


def admit_with_external_tokens(manager: Any) -> list[int]:
    """The reproduction: the ids of b's blocks, null blocks left out."""
    first, other = request("a", prompt(48)), request("z", range(1000, 1032))
    run(manager, first)
    run(manager, other)
    manager.free(first)
    manager.free(other)
    second = request("b", prompt(128))
    hits, num_hit_tokens = manager.get_computed_blocks(second)
    assert num_hit_tokens == 48
    assert manager.allocate_slots(second, 1, 48, hits, num_external_computed_tokens=16) is not None
    check(manager)
    return [block_id for row in manager.get_block_ids("b") for block_id in row if block_id]


def test_f1_33775_44409_no_block_is_in_two_groups() -> None:
    by_upstream, by_ours = on_both(admit_with_external_tokens, [FULL, sliding_window(1024)], 11)
    assert len(by_upstream) > len(set(by_upstream))  # silent corruption
    assert len(by_ours) == len(set(by_ours)) == 10


@pytest.mark.parametrize("num_external_tokens", [16, 40, 80])
@pytest.mark.parametrize("other", [sliding_window(1024), sliding_window(40), mamba("all"), FULL])
def test_f1_neighbours_any_second_group_and_length(other: Any, num_external_tokens: int) -> None:
    manager = ours([FULL, other, sliding_window(64)], 40)
    for name in ("a", "z"):
        first = request(name, prompt(48) if name == "a" else range(1000, 1032))
        run(manager, first)
        manager.free(first)
    manager.new_step_starts()
    for number in range(3):
        second = request(f"b{number}", [*prompt(48), *range(2000 + number * 100, 2090 + number * 100)])
        hits, num_hit_tokens = manager.get_computed_blocks(second)
        external = {"num_external_computed_tokens": num_external_tokens}
        if manager.allocate_slots(second, 1, num_hit_tokens, hits, **external) is None:
            break
        check(manager)  # names a block that two tables hold without two references
        rows = manager.get_block_ids(second.request_id)
        held = [block_id for row in rows for block_id in row if block_id]
        assert len(held) == len(set(held))
    assert number


def test_f1_neighbour_hits_that_would_be_overrun_refuse_and_change_nothing() -> None:
    manager = ours([FULL, sliding_window(1024)], 9)  # a's six blocks and two more
    first = request("a", prompt(48))
    run(manager, first)
    manager.free(first)
    second = request("b", prompt(128))
    hits, num_hit_tokens = manager.get_computed_blocks(second)
    before = pool_snapshot(manager.pool)
    assert manager.allocate_slots(second, 1, num_hit_tokens, hits, num_external_computed_tokens=16) is None
    assert pool_snapshot(manager.pool) == before
    check(manager)


# F2: what a window gives back while drafts are under way.


def decode_with_drafts(manager: Any, num_drafts: int = 8) -> tuple[int, ...]:
    """The reproduction: 40 tokens computed, 8 drafts under way, then all rejected. The table's first row."""
    running = request("a", prompt(40))
    run(manager, running)
    running.append_output_token_ids(40)
    assert manager.allocate_slots(running, 1 + num_drafts) is not None
    running.num_computed_tokens = 41 + num_drafts  # as the scheduler counts while the step is under way
    running.num_output_placeholders = 1 + num_drafts
    assert manager.allocate_slots(running, 1 + num_drafts) is not None
    check(manager)
    return tuple(manager.get_block_ids("a")[0])


def test_f2_47728_the_window_keeps_what_a_rejection_brings_back() -> None:
    by_upstream, by_ours = on_both(decode_with_drafts, [sliding_window(16)], 20)
    assert by_upstream[1] == 0  # tokens 16 to 31: lost, though token 41 looks at 26 to 41
    assert by_ours[0] == 0
    assert by_ours[1] != 0


@pytest.mark.parametrize("num_drafts", [1, 3, 7, 15, 16, 40])
@pytest.mark.parametrize("window", [2, 16, 24, 33])
def test_f2_neighbours_every_token_that_can_be_looked_at_is_held(window: int, num_drafts: int) -> None:
    manager = ours([sliding_window(window)], 40)
    row = decode_with_drafts(manager, num_drafts)
    # All drafts rejected: 41 tokens are certain, 40 computed surely, and the next one looks at `window` tokens.
    first_looked_at = max(41 - window, 0)
    assert all(row[position // 16] for position in range(first_looked_at, 41))


def test_f2_neighbour_many_steps_inside_one_block_count_as_drafts_too() -> None:
    manager = ours([sliding_window(4)], 40)
    running = request("a", prompt(33))
    run(manager, running)
    running.append_output_token_ids(33)
    for num_in_flight in (1, 2, 3):  # 1 + 3 drafts each, all inside the block of tokens 32 to 47
        assert manager.allocate_slots(running, 4) is not None
        running.num_computed_tokens = 33 + 4 * num_in_flight
        running.num_output_placeholders = 4 * num_in_flight
    assert manager.allocate_slots(running, 4) is not None  # computed counts as 45, but 33 may be all
    assert manager.get_block_ids("a")[0][1] != 0  # token 33 looks at 30 to 33
    check(manager)


def test_f2_without_drafts_nothing_changes() -> None:
    def decode_asynchronously(manager: Any) -> list[Any]:
        running = request("a", prompt(40))
        run(manager, running)
        rows = []
        for token in range(40, 80):  # each step is scheduled before the token of the last one is known
            running.num_output_placeholders = 1
            assert manager.allocate_slots(running, 1) is not None
            running.num_computed_tokens += 1
            running.append_output_token_ids(token)
            rows.append(manager.get_block_ids("a"))
        return rows

    by_upstream, by_ours = on_both(decode_asynchronously, [sliding_window(16)], 20)
    assert by_upstream == by_ours


# F3: Mamba `align` with speculative blocks after a rejection.


def reject_and_go_on(manager: Any) -> list[tuple[list[int], ...]]:
    running = request("a", prompt(52))
    rows = []
    for num_tokens, num_computed in ((52, 52), (14, 60), (1, 61), (5, 66), (20, 86), (30, 116)):
        while running.num_tokens < running.num_computed_tokens + min(num_tokens, 1):
            running.append_output_token_ids(running.num_tokens)
        assert manager.allocate_slots(running, num_tokens) is not None
        running.num_computed_tokens = num_computed
        rows.append(manager.get_block_ids("a"))
        check(manager)
    manager.free(running)
    return rows


def test_f3_43382_a_rejection_leaves_a_longer_table_and_it_goes_on() -> None:
    specs = [FULL, mamba("align", num_speculative_blocks=1)]
    with pytest.raises(AssertionError):
        reject_and_go_on(upstream(specs, 40))
    manager = ours(specs, 40)
    rows = reject_and_go_on(manager)
    assert [len(row[1]) for row in rows] == [5, 6, 6, 6, 7, 9]
    assert rows[2] == rows[1]  # nothing new for token 61
    assert manager.pool.num_held_blocks == 0


@pytest.mark.parametrize("num_speculative_blocks", [1, 2, 4])
@pytest.mark.parametrize("num_rejected", [1, 15, 16, 17, 40])
def test_f3_neighbours_any_rejection_at_any_depth(num_speculative_blocks: int, num_rejected: int) -> None:
    manager = ours([FULL, mamba("align", num_speculative_blocks)], 80)
    running = request("a", prompt(52))
    run(manager, running)
    for _ in range(6):
        running.append_output_token_ids(running.num_tokens)
        assert manager.allocate_slots(running, 1 + num_rejected) is not None
        running.num_computed_tokens += 1  # all drafts rejected
        check(manager)
        row = manager.get_block_ids("a")[1]
        # The state that the next token starts from is there.
        assert row[(running.num_computed_tokens - 1) // 16] != 0


# F8: groups of equal specs.


@pytest.mark.parametrize("specs", [[FULL, FULL], [sliding_window(32), sliding_window(32)], [mamba("all")] * 3])
def test_f8_groups_of_equal_specs_are_served(specs: list[Any]) -> None:
    with pytest.raises(AssertionError):
        upstream(specs, 40)
    manager = ours(specs, 40)
    first = request("a", prompt(70))
    assert run(manager, first) == 0
    manager.free(first)
    manager.new_step_starts()
    assert run(manager, request("b", prompt(70))) == 64


def test_f8_neighbour_no_group_at_all() -> None:
    manager = ours([], 1)
    assert run(manager, request("a", prompt(70))) == 0
    assert manager.get_block_ids("a") == ()
    assert manager.reset_prefix_cache() is True


# F11, F12: blocks freed more often than they are held.


def test_f11_42571_a_block_named_twice_while_held_twice_is_freed_once() -> None:
    theirs = upstream([FULL], 5).block_pool
    (block,) = theirs.get_new_blocks(1)
    theirs.touch([block])
    theirs.free_blocks([block, block])
    assert theirs.get_num_free_blocks() == 5  # of four

    manager = ours([FULL], 5)
    (block,) = manager.block_pool.get_new_blocks(1)
    manager.block_pool.touch([block])
    assert block.ref_cnt == 2
    manager.block_pool.free_blocks([block, block])
    assert manager.pool.num_free_blocks == 4
    assert sorted(free_ids(manager.pool)) == [1, 2, 3, 4]
    check(manager)

    # The same where a run of blocks is what is held twice.
    pool = manager.pool
    run_of_two = pool.cache(0, 0, pool.take(2), [b"a", b"b"])
    pool.acquire(run_of_two, 0, 2)
    pool.release([run_of_two, run_of_two])
    assert (pool.num_free_blocks, len(free_ids(pool))) == (4, 4)
    check(manager)


def test_f12_vllm_ascend_14301_a_block_freed_twice_is_an_error_and_nothing_changes() -> None:
    theirs = upstream([FULL], 5).block_pool
    blocks = theirs.get_new_blocks(1)
    theirs.free_blocks(blocks)
    theirs.free_blocks(blocks)
    assert blocks[0].ref_cnt == -1

    manager = ours([FULL], 5)
    our_blocks = manager.block_pool.get_new_blocks(1)
    manager.block_pool.free_blocks(our_blocks)
    before = pool_snapshot(manager.pool)
    with pytest.raises(BlockError, match=f"cannot free block {our_blocks[0].block_id}: expected it held"):
        manager.block_pool.free_blocks(our_blocks)
    assert pool_snapshot(manager.pool) == before

    run_of_two = manager.pool.cache(0, 0, manager.pool.take(2), [b"a", b"b"])
    manager.pool.release([run_of_two])
    before = pool_snapshot(manager.pool)
    with pytest.raises(BlockError, match=r"cannot free BlockRun.*nobody holds"):
        manager.pool.release([run_of_two])
    assert pool_snapshot(manager.pool) == before


@pytest.mark.parametrize("foreign", [-1, 5, 1000])
def test_f12_neighbours_a_foreign_block_and_an_error_half_way_change_nothing(foreign: int) -> None:
    manager = ours([FULL], 5)
    held = manager.block_pool.get_new_blocks(2)
    before = pool_snapshot(manager.pool)
    with pytest.raises(BlockError, match=f"cannot free block {foreign}: expected one of this pool, 1 to 4"):
        manager.block_pool.free_blocks([*held, KVCacheBlock(foreign)])
    assert pool_snapshot(manager.pool) == before


def test_f12_neighbour_more_blocks_than_are_free_is_an_error_and_nothing_changes() -> None:
    pool = ours([FULL], 5).pool
    pool.take(2)
    before = pool_snapshot(pool)
    with pytest.raises(BlockError, match="cannot take 3 blocks from the pool: 2 of 5 are free"):
        pool.take(3)
    assert pool_snapshot(pool) == before
