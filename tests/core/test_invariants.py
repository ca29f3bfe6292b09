"""The check finds each kind of contradiction, names the block or request, and tells its story."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.core.support import FakeRequest, make_hybrid_manager, make_manager, run_prefill
from vllm_kvplug.errors import KVPlugError
from vllm_kvplug.eviction.lru import LRUEviction
from vllm_kvplug.geometry import AttentionKind, GroupGeometry, MambaMode
from vllm_kvplug.invariants import MAX_FINDINGS_PER_CHECK, InvariantError, check_invariants, find_contradictions
from vllm_kvplug.manager import CacheManager
from vllm_kvplug.settings import Settings

FULL = GroupGeometry(AttentionKind.FULL, 4)
WINDOW = GroupGeometry(AttentionKind.SLIDING_WINDOW, 4, window_tokens=6)
SINK = GroupGeometry(AttentionKind.SINK, 4, num_sink_blocks=2)
CROSS = GroupGeometry(AttentionKind.CROSS, 4)
ALIGNED = GroupGeometry(AttentionKind.MAMBA, 4, mamba_mode=MambaMode.ALIGN, num_speculative_blocks=1)

# Blocks as `filled` gives them out. Full attention: request a holds 1 2 3, b had 4 5 6 and is gone, 7 to 10 are unused.
# Full and window: a holds 1 2 3 and [null] 5 6. Sinks: 1 and 2 are reserved, a holds 3 4 5.
Damage = Callable[[CacheManager], object]


def filled(*groups: GroupGeometry, enable_caching: bool = True) -> CacheManager:
    """A holds nine tokens, b had nine and is gone; the events are recorded, no check runs by itself."""
    settings = Settings(check_invariants="stop", check_invariants_every=10**6)
    manager = make_hybrid_manager(
        11 if len(groups) == 1 else 31, groups=groups, enable_caching=enable_caching, settings=settings
    )
    kept, freed = FakeRequest("a", list(range(9))), FakeRequest("b", list(range(50, 59)))
    run_prefill(manager, kept)
    run_prefill(manager, freed)
    manager.free(freed)
    manager.remove_skipped_blocks("a", 9)
    check_invariants(manager)
    return manager


def table(manager: CacheManager, group_id: int = 0) -> object:
    return manager.groups[group_id].tables["a"]


def lru(manager: CacheManager) -> LRUEviction:
    assert isinstance(manager.pool.free_blocks, LRUEviction)
    return manager.pool.free_blocks


def message_of(manager: CacheManager, damage: Damage) -> str:
    damage(manager)
    with pytest.raises(InvariantError) as caught:
        check_invariants(manager)
    return str(caught.value)


def put(row: list, position: int, value: object) -> None:
    row[position] = value


def swap(row: list[int]) -> None:
    row[0], row[-1] = row[-1], row[0]


POOL_DAMAGES = {
    "reference lost": (lambda m: put(m.pool.reference_counts, 2, 2), "block 2: references: expected 1, found 2"),
    "negative references": (lambda m: put(m.pool.reference_counts, 5, -1), "block 5: references: expected 0, found -1"),
    "held block freed": (
        lambda m: lru(m).push([2]),
        "block 2: free: expected not, with 1 references, found it in the free order",
    ),
    "free block lost": (lambda m: lru(m).remove(5), "block 5: free or held: expected one of them, found neither"),
    "freed twice": (lambda m: lru(m).push([5]), "block 5: places in the order of free blocks: expected 1, found 2"),
    "null block freed": (
        lambda m: lru(m).push([0]),
        "null block 0: in the order of free blocks: expected never, found it there",
    ),
    "foreign block freed": (
        lambda m: lru(m).push([77]),
        "foreign block 77: in the order of free blocks: expected never, found it there",
    ),
    "null block cached": (
        lambda m: put(m.pool.block_hashes, 0, b"z" * 32),
        "null block 0: hash: expected None, found ",
    ),
    "hash forgotten": (
        lambda m: put(m.pool.block_hashes, 1, None),
        "block 1: group and hash, as indexed: expected group 0, hash ",
    ),
    "hash changed": (
        lambda m: put(m.pool.block_hashes, 1, b"z" * 32),
        "found group 0, hash 7a7a7a7a7a7a7a7a",
    ),
    "index entry lost": (
        lambda m: m.pool.indexes[0].remove(m.pool.block_hashes[1], 1),
        "block 1: cached: expected in the index of group 0 under hash ",
    ),
    "index knows a block twice": (
        lambda m: m.pool.indexes[0].insert(b"z" * 32, 1),
        "block 1: places in the prefix index: expected 1, found more",
    ),
    "duplicate of itself": (
        lambda m: m.pool.indexes[0]._duplicates.update({m.pool.block_hashes[1]: {1: None}}),
        "block 1: places in the prefix index: expected 1, found more",
    ),
    "duplicate of nothing": (
        lambda m: m.pool.indexes[0]._duplicates.update({b"z" * 32: {7: None}}),
        "group 0, hash 7a7a7a7a7a7a7a7a: blocks in the prefix index: expected an answering one and others, "
        "found None and [7]",
    ),
    "index has a foreign block": (
        lambda m: m.pool.indexes[0].insert(b"z" * 32, 77),
        "group 0: block ids in its prefix index: expected the pool's, found 77",
    ),
}
TABLE_DAMAGES = {
    "foreign block in a table": (
        lambda m: put(table(m).block_ids, 2, 77),
        "request 'a', group 0: block ids in its table: expected 1 to 10, or the null block, found 77",
    ),
    "block twice in a table": (
        lambda m: (put(table(m).block_ids, 2, 1), put(m.pool.reference_counts, 1, 2), release(m, 3)),
        "request 'a', group 0: positions of block 1: expected 1, found 2",
    ),
    "too many cached": (
        lambda m: setattr(table(m), "num_cached_blocks", 7),
        "request 'a', group 0: cached blocks: expected at most 3, found 7",
    ),
    "too few cached": (
        lambda m: setattr(table(m), "num_cached_blocks", 1),
        "group 0, position 1: block 2 in the prefix cache: expected only before position 1, found it there",
    ),
    "published after a failed load": (
        lambda m: setattr(table(m), "first_unpublished", 1),
        "group 0, position 1: block 2 in the prefix cache: expected only before position 1, found it there",
    ),
    "leading nulls that are none": (
        lambda m: setattr(table(m), "num_leading_nulls", 1),
        "leading null blocks, 1 counted, position 0: expected the null block, found block 1",
    ),
    "leading nulls beyond the table": (
        lambda m: setattr(table(m), "num_leading_nulls", 4),
        "request 'a', group 0: leading null blocks: expected 0 to 3, found 4",
    ),
    "full attention with a null block": (
        lambda m: (put(table(m).block_ids, 2, 0), release(m, 3)),
        "request 'a', group 0: null blocks in a table of full attention: expected 0, found 1",
    ),
    "shortcut too wide": (
        lambda m: m._quiet_limits_tokens.update(a=12),
        "request 'a': decode shortcut's limit in tokens: expected 11, found 12",
    ),
    "shortcut of nobody": (
        lambda m: m._quiet_limits_tokens.update(ghost=3),
        "request 'ghost': a block table in each group, as the decode shortcut takes it: expected one, "
        "found none in groups [0]",
    ),
}
LRU_DAMAGES = {
    "freed miscounted": (lambda m: bump(lru(m), "_num_freed"), "lru: freed blocks: expected 3 by its entries, found 4"),
    "unused lost": (
        lambda m: bump(lru(m), "_next_unused"),
        "block 7: free or held: expected one of them, found neither",
    ),
    "stale without an entry": (
        lambda m: lru(m)._num_stale.update({8: 1}),
        "lru: block 8: stale entries: expected 1 to its 0 entries, found 1",
    ),
    "stale count of none": (
        lambda m: lru(m)._num_stale.update({5: 0}),
        "lru: block 5: stale entries: expected 1 to its 1 entries, found 0",
    ),
    "worthless and free": (
        lambda m: lru(m).push_first([5]),
        "lru: worthless block 5: expected 1 place, found 2",
    ),
    "freed before it was used": (
        lambda m: lru(m).push([9]),
        "lru: block 9 among the freed: expected an id from 1 to 6, once used, found it",
    ),
    "two fresh entries": (
        lambda m: lru(m).push([5]),
        "lru: block 5: entries that are not stale: expected at most 1, found 2",
    ),
    "unused beyond the pool": (
        lambda m: setattr(lru(m), "_next_unused", 12),
        "lru: first unused block: expected 1 to 11, found 12",
    ),
}


def bump(owner: object, name: str) -> None:
    setattr(owner, name, getattr(owner, name) + 1)


def release(manager: CacheManager, block_id: int) -> None:
    """So that nothing but the table is wrong."""
    manager.pool.release([block_id])


@pytest.mark.parametrize("name", POOL_DAMAGES)
def test_damage_to_the_pool_is_found_and_the_block_tells_its_story(name: str) -> None:
    damage, expected = POOL_DAMAGES[name]
    message = message_of(filled(FULL), damage)
    first_line, *story = message.splitlines()
    assert expected in first_line
    block_id = int(story[0].split()[1])
    assert f"block {block_id}" in first_line or f"found {block_id}" in first_line or f"[{block_id}]" in first_line
    if block_id in {1, 2}:
        assert "held by request 'a' (group 0, position " in story[0]
        assert story[1:] == [
            "  last owners, oldest first: request 'a' (call 2)",
            "  last events, oldest first:",
            "    call 2, allocate_slots of request 'a': taken",
            "    call 2, allocate_slots of request 'a': cached in group 0",
        ]
    elif block_id == 5:
        assert "held by nobody; " in story[0]
        assert story[1:] == [
            "  last owners, oldest first: request 'b' (call 5)",
            "  last events, oldest first:",
            "    call 5, allocate_slots of request 'b': taken",
            "    call 5, allocate_slots of request 'b': cached in group 0",
            "    call 7, free of request 'b': released",
        ]


@pytest.mark.parametrize("name", TABLE_DAMAGES)
def test_damage_to_a_table_is_found(name: str) -> None:
    damage, expected = TABLE_DAMAGES[name]
    message = message_of(filled(FULL), damage)
    first_line, *story = message.splitlines()
    assert expected in first_line
    owner = "ghost" if "ghost" in expected else "a"
    assert any(line.startswith(f"  request '{owner}' now, group 0: ") for line in story)


@pytest.mark.parametrize("name", LRU_DAMAGES)
def test_damage_to_the_policy_is_found(name: str) -> None:
    damage, expected = LRU_DAMAGES[name]
    manager = filled(FULL)
    damage(manager)
    messages = [finding.message for finding in find_contradictions(manager)]
    assert expected in messages


def test_free_and_held_are_all_usable_blocks() -> None:
    manager = filled(FULL)
    lru(manager)._num_freed += 2
    messages = [finding.message for finding in find_contradictions(manager)]
    assert messages == [
        "free blocks: length of the order: expected 7, found 9",
        "conservation: free and held blocks: expected 10, 11 less 1 reserved, found 12, 9 and 3",
        "lru: freed blocks: expected 3 by its entries, found 5",
    ]


def share_a_block(manager: CacheManager) -> None:
    """The fault F1: what one group was handed is what the other has hit."""
    put(table(manager, 1).block_ids, 2, 3)
    manager.pool.reference_counts[3] = 2
    release(manager, 6)


@pytest.mark.parametrize(
    ("groups", "damage", "expected"),
    [
        ((FULL, WINDOW), share_a_block, "block 3: groups whose tables have it: expected one, found groups 0 and 1"),
        (
            (FULL, WINDOW),
            lambda m: (setattr(table(m, 1), "num_leading_nulls", 0), swap(table(m, 1).block_ids)),
            "request 'a', group 1: null blocks: expected before all others, found block 6 before one",
        ),
        (
            (FULL, WINDOW),
            lambda m: put(m.pool.block_group_ids, 1, 1),
            "block 1: group and hash, as indexed: expected group 0, hash ",
        ),
        (
            (FULL, WINDOW),
            lambda m: setattr(table(m, 1), "first_unpublished", 1),
            "request 'a', group 1, position 1: block 5 in the prefix cache: expected only before position 1",
        ),
        ((SINK,), lambda m: lru(m).push([2]), "reserved block 2: in the order of free blocks: expected never"),
        ((SINK,), lambda m: put(m.pool.reference_counts, 1, 1), "reserved block 1: references: expected 0, found 1"),
        ((SINK,), lambda m: put(m.pool.block_hashes, 1, b"z" * 32), "reserved block 1: hash: expected None, found "),
        (
            (SINK,),
            lambda m: put(table(m).block_ids, 0, 1),
            "request 'a', group 0: block ids in its table: expected 3 to 10, or the null block, found 1",
        ),
        (
            (FULL, ALIGNED),
            lambda m: setattr(table(m, 1), "previous_state_position", 9),
            "request 'a', group 1: position of the previous state: expected 0 to 3, found 9",
        ),
        (
            (FULL, ALIGNED),
            lambda m: (release(m, table(m, 1).block_ids[3]), put(table(m, 1).block_ids, 3, 0)),
            "group 1: the last 2 positions, which hold the running states: expected no null block, found [",
        ),
    ],
)  # fmt: skip
def test_damage_to_other_kinds_of_attention_is_found(
    groups: tuple[GroupGeometry, ...], damage: Damage, expected: str
) -> None:
    assert expected in message_of(filled(*groups), damage).splitlines()[0]


def test_a_block_cached_by_another_group_than_holds_it() -> None:
    manager = filled(FULL, WINDOW)
    pool, block_hash = manager.pool, manager.pool.block_hashes[1]
    assert block_hash is not None
    pool.uncache([1])
    pool.cache(1, [1], [b"z" * 32])
    expected = (
        "request 'a', group 0, position 0: block 1 in the prefix cache: expected as group 0's, found it as group 1's"
    )
    assert [finding.message for finding in find_contradictions(manager)] == [expected]


def test_cross_attention_and_caching_switched_off() -> None:
    manager = make_hybrid_manager(groups=(FULL, CROSS), enable_caching=False)
    request = FakeRequest("a", list(range(9)))
    manager.allocate_slots(request, 9, num_encoder_tokens=7)
    check_invariants(manager)
    manager.pool.cache(0, [1], [b"z" * 32])
    messages = [finding.message for finding in find_contradictions(manager)]
    assert messages[0] == "block 1: hash, prefix caching being off: expected None, found hash 7a7a7a7a7a7a7a7a"
    manager.pool.uncache([1])
    lost = table(manager, 1).block_ids
    release(manager, lost[0])
    lost[0] = 0
    assert "request 'a', group 1: null blocks in a table of cross attention: expected 0, found 1" in message_of(
        manager, lambda _: None
    )


def test_without_the_setting_the_state_is_told_and_that_there_is_no_story() -> None:
    manager = make_manager()
    run_prefill(manager, FakeRequest("a", list(range(9))))
    message = message_of(manager, lambda m: put(m.pool.reference_counts, 3, 4))
    assert message.splitlines() == [
        "block 3: references: expected 1, found 4",
        "  block 3 now: references 4, held by request 'a' (group 0, position 2); not free; not cached",
        "  its events were not recorded: setting check_invariants is off",
    ]


def test_the_null_block_may_count_what_it_likes() -> None:
    manager = filled(FULL)
    manager.pool.reference_counts[0] = -24
    check_invariants(manager)


def test_one_fault_that_touches_everything_is_told_in_part() -> None:
    manager = make_manager(500)
    manager.pool.reference_counts[1:] = [1] * 499
    assert len(list(find_contradictions(manager))) == MAX_FINDINGS_PER_CHECK


def test_it_is_one_of_the_packages_errors_and_a_failed_assertion() -> None:
    assert issubclass(InvariantError, KVPlugError)
    assert issubclass(InvariantError, AssertionError)
