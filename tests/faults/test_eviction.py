"""Public faults of what leaves the prefix cache: F13 (#55092) and F15 (evict on a running request)."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.core.pools import free_ids
from tests.faults.support import (
    BLOCK,
    FULL,
    check,
    mamba,
    on_both,
    ours,
    prompt,
    request,
    run,
    sliding_window,
    upstream,
)
from vllm_kvplug.block_states import hash_and_group
from vllm_kvplug.errors import CallError

# F13: a subscriber to KV events counts hashes.


def removed_hashes(manager: Any) -> list[Any]:
    return [h for event in manager.take_events() if isinstance(event, BlockRemoved) for h in event.block_hashes]


def fill_with_duplicates(manager: Any) -> tuple[list[Any], int | None]:
    """The reproduction, up to the events of the filling request; and what P(32) and a token then hit."""
    first, second = request("a", prompt(32)), request("b", prompt(32))
    run(manager, first)
    run(manager, second)  # recomputes its last block: the block of tokens 16 to 31 is there twice
    manager.free(first)
    manager.free(second)
    manager.take_events()
    filler = request("c", range(1000, 1064))
    run(manager, filler)
    manager.free(filler)
    return removed_hashes(manager), manager.get_computed_blocks(request("d", prompt(33)))[1]


def test_f13_55092_removed_is_sent_when_the_last_copy_goes() -> None:
    by_upstream, by_ours = on_both(fill_with_duplicates, [FULL], 7, enable_kv_cache_events=True)
    assert len(by_upstream[0]) == 1
    assert by_upstream[1] == 32  # and yet it can be hit
    assert by_ours == ([], 32)


def test_f13_neighbour_what_was_removed_cannot_be_hit_and_what_was_not_can() -> None:
    manager = ours([FULL], 9, enable_kv_cache_events=True)
    stored: set[Any] = set()
    for number in range(40):
        one = request(str(number), [*prompt(32 + number % 3), *range(number * 50, number * 50 + number % 40)])
        twin = request(f"{number} again", one.prompt_token_ids or [])
        for each in (one, twin):
            run(manager, each)
        for each in (twin, one):
            manager.free(each)
        for event in manager.take_events():
            if isinstance(event, BlockStored):
                stored.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                stored.difference_update(event.block_hashes)
        found = {maybe_convert_block_hash(block_hash) for block_hash, _ in manager.pool.indexes[0].items()}
        assert stored == found


def test_f13_neighbour_the_copies_go_in_any_order() -> None:
    manager = ours([FULL], 12, enable_kv_cache_events=True)
    requests = [request(name, prompt(32)) for name in "abc"]
    for each in requests:
        run(manager, each)
    manager.take_events()
    last_blocks = [manager.get_block_ids(name)[0][1] for name in "abc"]
    for block_id in (last_blocks[0], last_blocks[2]):
        manager.evict_blocks({block_id})
        assert removed_hashes(manager) == []
    manager.evict_blocks({last_blocks[1]})
    assert removed_hashes(manager) == [maybe_convert_block_hash(requests[0].block_hashes[1])]


# F15: loads into blocks of a running request failed.


def evict_go_on_and_send_again(manager: Any) -> tuple[int, int]:
    """The reproduction: hit tokens of the same prompt sent again, and cached blocks that nothing can hit."""
    running = request("a", prompt(96))
    run(manager, running)
    manager.evict_blocks({manager.get_block_ids("a")[0][0]})
    for token in range(96, 130):
        running.append_output_token_ids(token)
        assert manager.allocate_slots(running, 1) is not None
        running.num_computed_tokens += 1
    manager.free(running)
    check(manager)
    hit = manager.get_computed_blocks(request("b", prompt(130)))[1]
    return hit, sum(block.block_hash is not None for block in manager.block_pool.blocks)


def test_f15_a_failed_block_takes_what_was_computed_from_it_out_of_the_cache() -> None:
    by_upstream, by_ours = on_both(evict_go_on_and_send_again, [FULL], 30)
    assert by_upstream == (0, 7)  # five orphans, and two more that were cached while it went on
    assert by_ours == (0, 0)


def test_f15_its_memory_is_reused_first() -> None:
    manager = ours([FULL], 30)
    kept, failed = request("kept", range(1000, 1064)), request("a", prompt(96))
    run(manager, kept)
    run(manager, failed)
    manager.evict_blocks({manager.get_block_ids("a")[0][2]})
    failed_ids = manager.get_block_ids("a")[0]
    manager.free(kept)
    manager.free(failed)
    check(manager)
    order = free_ids(manager.pool)
    assert order[:4] == failed_ids[2:][::-1]
    assert order[-2:] == failed_ids[:2][::-1]  # what lies before the failed block is good, and freed last
    assert manager.get_computed_blocks(request("b", prompt(96)))[1] == 32


def test_f15_a_failed_block_is_recomputed_and_stays_unpublished() -> None:
    """The scheduler cuts the computed tokens and computes them again in the same blocks."""
    manager = ours([FULL], 30)
    running = request("a", prompt(96))
    run(manager, running)
    manager.evict_blocks({manager.get_block_ids("a")[0][3]})
    running.num_computed_tokens = 48
    assert manager.allocate_slots(running, 48) is manager.empty_kv_cache_blocks
    check(manager)
    assert manager.get_computed_blocks(request("b", prompt(96)))[1] == 48


def test_f15_every_holder_stops_and_others_do_not() -> None:
    manager = ours([FULL], 40)
    first = request("a", prompt(96))
    run(manager, first)
    sharer = request("b", [*prompt(64), *range(500, 540)])
    bystander = request("c", [*prompt(16), *range(700, 740)])
    assert (run(manager, sharer), run(manager, bystander)) == (64, 16)
    manager.evict_blocks({manager.get_block_ids("a")[0][2]})
    check(manager)
    for again, hit in ((first, 32), (sharer, 32), (bystander, 48)):
        assert manager.get_computed_blocks(request("x", [*(again.prompt_token_ids or []), 1]))[1] == hit


def test_f15_another_groups_blocks_were_computed_from_it_too() -> None:
    manager = ours([FULL, sliding_window(40), mamba("all")], 60)
    running = request("a", prompt(96))
    run(manager, running)
    manager.evict_blocks({manager.get_block_ids("a")[1][4]})  # tokens 64 to 79, in the sliding window's layers
    check(manager)
    cached = [
        [hash_and_group(manager.pool, block_id) is not None for block_id in row if block_id]
        for row in manager.get_block_ids("a")
    ]
    assert cached[0] == [True] * 4 + [False] * 2
    assert not any(any(row[-2:]) for row in cached)
    manager.free(running)
    manager.new_step_starts()
    assert manager.get_computed_blocks(request("b", prompt(97)))[1] == 64


def test_f15_a_free_block_leaves_the_cache_alone_as_before() -> None:
    def evict_free(manager: Any) -> Any:
        one = request("a", prompt(96))
        run(manager, one)
        block_ids = manager.get_block_ids("a")[0]
        manager.free(one)
        manager.evict_blocks({block_ids[2]})
        cached = [block.block_id for block in manager.block_pool.blocks if block.block_hash is not None]
        return cached, manager.get_computed_blocks(request("b", prompt(96)))[1]

    by_upstream, by_ours = on_both(evict_free, [FULL], 30)
    assert by_upstream == by_ours
    assert by_ours[1] == 2 * BLOCK


@pytest.mark.parametrize("foreign", [30, -1, 10**6])
def test_f15_neighbour_a_foreign_block_is_an_error_and_nothing_changes(foreign: int) -> None:
    manager = ours([FULL], 30)
    run(manager, request("a", prompt(96)))
    with pytest.raises(CallError, match=f"block {foreign}: expected an id from 0 to 29"):
        manager.evict_blocks({1, foreign})
    check(manager)
    assert manager.get_computed_blocks(request("b", prompt(97)))[1] == 96
    assert upstream([FULL], 30).block_pool.get_num_free_blocks() == 29
