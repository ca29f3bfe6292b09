"""Public faults of the lookup and of what is told of it: F7 (#32802, #40624, #51771), F9, F10 (#43736), F14 (#44490,
#47723).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.faults.support import (
    FULL,
    check,
    mamba,
    on_both,
    ours,
    prompt,
    request,
    run,
    sink,
    sliding_window,
    upstream,
)
from vllm_kvplug.errors import UnsupportedError
from vllm_kvplug.vllm_glue.version import is_since

# F7: the block that a drafter needs computed again is dropped once, not once for each group and round.


def hit_of_the_second(manager: Any, num_tokens: int = 320) -> int | None:
    run(manager, request("a", prompt(num_tokens)))
    manager.new_step_starts()
    return run(manager, request("b", prompt(num_tokens)))


@pytest.mark.parametrize(
    ("specs", "by_0_17_1"),
    [([FULL, sliding_window(32), sliding_window(48)], 0), ([FULL, sliding_window(32)], 272)],
)
def test_f7_32802_40624_51771_eagle_drops_one_block(specs: list[Any], by_0_17_1: int) -> None:
    assert on_both(hit_of_the_second, specs, 200, use_eagle=True) == (by_0_17_1, 288)


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 32, 33, 48, 100, 321])
@pytest.mark.parametrize(
    ("specs", "num_full_drops"),
    [
        ([FULL], 1),
        ([FULL, FULL], 1),
        ([FULL, mamba("all")], 1),
        ([sliding_window(32), sliding_window(48)], 1),
        ([sliding_window(32), sliding_window(48), mamba("all")], 1),
        ([sliding_window(1), FULL], 2),
        ([FULL, sliding_window(17), sliding_window(160), sliding_window(1000)], 2),
        ([FULL, sliding_window(64), mamba("all")], 2),
    ],
)
def test_f7_neighbours_no_mix_drops_more(specs: list[Any], num_full_drops: int, num_tokens: int) -> None:
    num_allowed_blocks, num_cached_blocks = (num_tokens - 1) // 16, num_tokens // 16
    expected = max(min(num_allowed_blocks - 1, num_cached_blocks - num_full_drops), 0) * 16
    assert hit_of_the_second(ours(specs, 400, use_eagle=True), num_tokens) == expected


@pytest.mark.parametrize("specs", [[FULL, sliding_window(32)], [FULL, sliding_window(48), sliding_window(48)]])
def test_f7_where_no_more_is_cached_than_allowed_nothing_changes(specs: list[Any]) -> None:
    def hit(manager: Any) -> int | None:
        run(manager, request("a", [*prompt(96), *range(1000, 1007)]))
        return run(manager, request("b", [*prompt(96), *range(2000, 2005)]))

    assert on_both(hit, specs, 200, use_eagle=True) == (64, 64)


@pytest.mark.skipif(not is_since("0.19.1"), reason="from vLLM 0.19.1 on; an AssertionError before")
def test_d4_a_windows_hit_keeps_the_blocks_that_the_next_token_looks_at() -> None:
    """A full group of larger blocks beside it. 0.19.1 drops a block, then cuts to the larger block's end, and has
    nothing but null blocks left: the request would read what is not there.
    """

    def hit(manager: Any) -> tuple[int, bool]:
        run(manager, request("a", prompt(320)))
        manager.new_step_starts()
        blocks, num_hit_tokens = manager.get_computed_blocks(request("b", prompt(320)))
        return num_hit_tokens, all(blocks.get_block_ids()[1][-2:])

    specs = [dataclasses.replace(FULL, block_size=48), sliding_window(32)]
    assert on_both(hit, specs, 200, use_eagle=True) == ((192, False), (192, True))


def test_f7_without_eagle_or_with_one_group_nothing_changes() -> None:
    for specs, use_eagle in (([FULL, sliding_window(32), sliding_window(48)], False), ([sliding_window(32)], True)):
        by_upstream, by_ours = on_both(hit_of_the_second, specs, 200, use_eagle=use_eagle)
        assert by_upstream == by_ours == (288 if use_eagle else 304)


# F9: the blocks that hold the sinks.


def test_f9_sinks_are_reserved_not_used() -> None:
    theirs = upstream([sink(16)], 10)
    assert (round(theirs.usage, 2), theirs.reset_prefix_cache()) == (0.11, False)
    manager = ours([sink(16)], 10)
    assert (manager.usage, manager.reset_prefix_cache()) == (0.0, True)


def test_f9_no_request_gets_a_sink_block_and_eight_blocks_are_all() -> None:
    manager = ours([sink(16)], 10)
    first = request("a", prompt(128))
    assert run(manager, first) == 0
    assert manager.usage == 1.0
    assert manager.get_block_ids("a") == ([2, 3, 4, 5, 6, 7, 8, 9],)  # as upstream: the layer reads its sinks from 1
    manager.free(first)
    assert run(manager, request("b", [*prompt(64), *range(500, 564)])) == 64
    assert 1 not in manager.get_block_ids("b")[0]
    assert manager.never_fits(request("c", prompt(129))) is not None


def test_f9_a_second_sink_group_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="several KV cache groups of sink attention"):
        ours([sink(16), sink(32)], 10)


# F10: what the statistics count.


def refuse_and_admit(manager: Any) -> tuple[int, int, int]:
    """The reproduction: requests, queried tokens and hit tokens that the statistics count for two requests."""
    first = request("a", prompt(64))
    run(manager, first)
    second = request("b", [*prompt(32), *range(1000, 1060)])
    for _ in range(3):
        assert run(manager, second) is None
    stats = manager.make_prefix_cache_stats()
    manager.free(first)
    assert run(manager, second) == 32
    later = manager.make_prefix_cache_stats()
    return tuple(getattr(stats, name) + getattr(later, name) for name in ("requests", "queries", "hits"))  # type: ignore[return-value]


def test_f10_43736_a_request_counts_once_when_it_is_admitted() -> None:
    manager = ours([FULL], 6)
    first = request("a", prompt(64))
    second = request("b", [*prompt(32), *range(1000, 1060)])
    for each in (upstream([FULL], 6), manager):
        run(each, first)
        first.num_computed_tokens = 0
        for _ in range(3):
            assert run(each, second) is None
    stats = manager.make_prefix_cache_stats()
    assert stats is not None
    assert (stats.requests, stats.queries, stats.hits) == (1, 64, 0)  # b waits, and is not counted

    by_upstream, by_ours = on_both(refuse_and_admit, [FULL], 7)
    assert by_upstream == (5, 64 + 4 * 92, 4 * 32)
    assert by_ours == (2, 64 + 92, 32)


def test_f10_neighbours_aborted_while_waiting_and_preempted() -> None:
    manager = ours([FULL], 7)
    first, waiting = request("a", prompt(64)), request("b", range(1000, 1060))
    run(manager, first)
    assert run(manager, waiting) is None
    manager.free(waiting)  # aborted: it is never counted
    manager.free(first)  # preempted: the lookup of its next admission counts as a preempted request's
    first.num_preemptions, first.num_computed_tokens = 1, 0
    assert run(manager, first) == 48
    stats = manager.make_prefix_cache_stats()
    assert stats is not None
    assert (stats.requests, stats.queries, stats.hits) == (1, 64, 0)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 64, 48)
    assert manager._lookups == {}


# F14: ids that nobody asks for.


@pytest.mark.skipif(not is_since("0.17.1"), reason="vLLM 0.17.0 names no new blocks")
def test_f14_44490_47723_new_block_ids_stay_bounded() -> None:
    def serve_many(manager: Any) -> int:
        for number in range(200):
            one = request(str(number), range(number * 64, number * 64 + 64))
            run(manager, one)
            manager.free(one)
        return len(manager.take_new_block_ids())

    by_upstream, by_ours = on_both(serve_many, [FULL], 20)
    assert (by_upstream, by_ours) == (800, 19)


def test_f14_neighbour_several_groups_and_nothing_is_named_twice() -> None:
    manager = ours([FULL, FULL, sliding_window(32)], 60)
    for number in range(50):
        one = request(str(number), range(number * 64, number * 64 + 64))
        run(manager, one)
        manager.free(one)
        check(manager)
    block_ids = manager.take_new_block_ids()
    assert len(block_ids) == len(set(block_ids)) <= 59
    assert manager.take_new_block_ids() == []
