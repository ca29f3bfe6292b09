"""The rule of hits by itself, on cases worked out by hand: what is compared with it is only as good as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from tests.lockstep.deviations import pops_a_later_groups_hit
from tests.lockstep.mixes import GroupSetup, Mix
from tests.lockstep.oracle import longest_hit
from tests.lockstep.trace import Setup

FULL = GroupSetup("full", 4)
WINDOW = GroupSetup("sliding", 4, window=9)  # the next token looks at 8 earlier ones: two blocks
CHUNKED = GroupSetup("chunked", 4, chunk=8)
MAMBA = GroupSetup("mamba", 4, mode="align")


def _hit(
    groups: Sequence[GroupSetup], cached: Sequence[Iterable[int]], num_tokens: int, *, eagle: bool = False
) -> tuple[tuple[list[int], ...], int]:
    """The answer where these positions of each group are cached, position i of group g in block 100 g + i + 1."""
    setup = Setup(
        mix=Mix(tuple(groups), 1, 1, 4),
        num_blocks=1000,
        max_model_len=1000,
        enable_caching=True,
        use_eagle=eagle,
        log_stats=False,
        enable_kv_cache_events=False,
        takes_each_call=False,
        async_scheduling=False,
        has_connector=False,
        num_draft_tokens=0,
        num_lookahead_tokens=0,
        num_families=1,
        evicts_held=False,
    )
    hashes = [bytes([i]) for i in range(num_tokens // 4)]
    cached_blocks = {}
    for group_id, positions in enumerate(cached):
        num_hashes = groups[group_id].block_size // 4
        for i in positions:
            key = b"".join(hashes[i * num_hashes : (i + 1) * num_hashes]) + group_id.to_bytes(4, "big")
            cached_blocks[key] = [100 * group_id + i + 1]
    hit = longest_hit(setup, hashes, num_tokens, cached_blocks)
    return hit.block_ids, hit.num_tokens


@pytest.mark.parametrize(
    ("groups", "cached", "num_tokens", "block_ids", "num_hit_tokens"),
    [
        # The last token is left to compute, and with it its block.
        ([FULL], [range(5)], 20, ([1, 2, 3, 4],), 16),
        ([FULL], [range(5)], 21, ([1, 2, 3, 4, 5],), 20),
        ([FULL], [[0, 1, 3, 4]], 21, ([1, 2],), 8),
        # A window needs its own blocks alone; without a whole window, the beginning.
        ([WINDOW], [[3, 4]], 21, ([0, 0, 0, 4, 5],), 20),
        ([WINDOW], [[2, 4]], 21, ([],), 0),
        ([WINDOW], [[0, 2, 4]], 21, ([1],), 4),
        # A chunk needs what it has begun; at its start nothing, cached or not.
        ([CHUNKED], [[4]], 21, ([0, 0, 0, 0, 5],), 20),
        ([CHUNKED], [[]], 21, ([0, 0, 0, 0],), 16),
        ([CHUNKED], [[]], 8, ([],), 0),
        # The state at the end.
        ([MAMBA], [[0, 3]], 21, ([0, 0, 0, 4],), 16),
        # Each group shortens the others.
        ([FULL, WINDOW], [range(5), [1, 2, 4]], 21, ([1, 2, 3], [0, 102, 103]), 12),
        ([MAMBA, FULL], [[1, 4], range(4)], 21, ([0, 2], [101, 102]), 8),
        ([FULL, WINDOW, MAMBA], [range(5), range(5), [2]], 21, ([1, 2, 3], [0, 102, 103], [0, 0, 203]), 12),
        # Whole blocks of every group.
        ([FULL, GroupSetup("mla", 8)], [range(5), range(2)], 23, ([1, 2, 3, 4], [101, 102]), 16),
        ([FULL, GroupSetup("mla", 12)], [range(5), range(2)], 23, ([1, 2, 3], [101]), 12),
    ],
)
def test_the_longest_hit(
    groups: list[GroupSetup],
    cached: list[Iterable[int]],
    num_tokens: int,
    block_ids: tuple[list[int], ...],
    num_hit_tokens: int,
) -> None:
    assert _hit(groups, cached, num_tokens) == (block_ids, num_hit_tokens)


@pytest.mark.parametrize(
    ("groups", "cached", "num_tokens", "num_hit_tokens"),
    [
        ([FULL], [range(5)], 21, 16),
        ([FULL], [range(5)], 20, 12),
        ([FULL], [range(1)], 20, 0),
        ([WINDOW], [[2, 3, 4]], 21, 16),
        ([WINDOW], [[3, 4]], 21, 0),
        ([MAMBA], [[3]], 21, 16),  # no drafter layers: nothing is dropped
        ([FULL, MAMBA], [range(5), [3]], 21, 16),
        ([FULL, MAMBA], [range(4), [3]], 21, 0),
        ([FULL, WINDOW], [range(6), range(5)], 25, 16),  # two blocks of full attention beyond
        ([FULL, WINDOW], [range(6), range(6)], 25, 16),
        ([FULL, WINDOW], [range(7), range(6)], 28, 20),
    ],
)
def test_with_a_drafter_blocks_beyond_the_hit_are_cached(
    groups: list[GroupSetup], cached: list[Iterable[int]], num_tokens: int, num_hit_tokens: int
) -> None:
    assert _hit(groups, cached, num_tokens, eagle=True)[1] == num_hit_tokens


def test_a_later_groups_hit_that_would_be_popped() -> None:
    free_ids = [3, 4, 5, 6, 7, 8]
    nothing = frozenset[int]()
    # Group 0 pops 3 and 4; group 1 has hit 4, or 5.
    assert pops_a_later_groups_hit(free_ids, [nothing, frozenset({4})], [2, 1])
    assert not pops_a_later_groups_hit(free_ids, [nothing, frozenset({5})], [2, 1])
    # Its own hits leave the free blocks first: group 0 pops 4 and 5.
    assert pops_a_later_groups_hit(free_ids, [frozenset({3}), frozenset({5})], [2, 0])
    # What an earlier group has hit is held by then.
    assert not pops_a_later_groups_hit(free_ids, [frozenset({3, 4}), nothing], [0, 2])
    # A group in the middle.
    assert pops_a_later_groups_hit(free_ids, [nothing, nothing, frozenset({4})], [1, 1, 0])
