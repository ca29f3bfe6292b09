"""The check finds each kind of contradiction, names the block or request, and tells its story."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.core.pools import isolate
from tests.core.support import FakeRequest, make_hybrid_manager, make_manager, run_prefill
from vllm_kvplug.block_run import BlockRun
from vllm_kvplug.errors import KVPlugError
from vllm_kvplug.eviction.lru import LRUEviction
from vllm_kvplug.geometry import AttentionKind, GroupGeometry, MambaMode
from vllm_kvplug.groups.table import BlockTable, Hold
from vllm_kvplug.invariants import (
    MAX_FINDINGS_PER_CHECK,
    InvariantError,
    check_invariants,
    find_contradictions,
    tell,
)
from vllm_kvplug.manager import CacheManager
from vllm_kvplug.settings import Settings

FULL = GroupGeometry(AttentionKind.FULL, 4)
WINDOW = GroupGeometry(AttentionKind.SLIDING_WINDOW, 4, window_tokens=6)
SINK = GroupGeometry(AttentionKind.SINK, 4, num_sink_blocks=2)
CROSS = GroupGeometry(AttentionKind.CROSS, 4)
ALIGNED = GroupGeometry(AttentionKind.MAMBA, 4, mamba_mode=MambaMode.ALIGN, num_speculative_blocks=1)
Z = b"z" * 32

# Blocks as `filled` gives them out. Full attention: request a holds 1 2 3, of which 1 2 are a run and 3 is loose; b had
# 4 5 6 and is gone, they are a free run, its last block not cached; 7 to 10 are unused.
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


def table(manager: CacheManager, group_id: int = 0) -> BlockTable:
    return manager.groups[group_id].tables["a"]


def lru(manager: CacheManager) -> LRUEviction:
    assert isinstance(manager.pool.policy, LRUEviction)
    return manager.pool.policy


def run_at(manager: CacheManager, block_id: int) -> BlockRun:
    runs: Iterator[BlockRun] = iter((*manager.pool.held_runs, *manager.pool.free_runs()))
    return next(run for run in runs if block_id in run.block_ids)


def hash_of(manager: CacheManager, block_id: int) -> bytes:
    run = run_at(manager, block_id)
    block_hash = run.block_hashes[run.block_ids.index(block_id)]
    assert block_hash is not None
    return block_hash


def forget_index_entry(manager: CacheManager, block_id: int) -> None:
    manager.pool.indexes[0].remove_one(hash_of(manager, block_id), run_at(manager, block_id))


def free_run(*block_ids: int) -> BlockRun:
    return BlockRun(list(block_ids), 0, 0, 0)


def put(row: list, position: int, value: object) -> None:
    row[position] = value


def bump(owner: object, name: str, by: int = 1) -> None:
    setattr(owner, name, getattr(owner, name) + by)


def remember_wrong_places(manager: CacheManager) -> None:
    manager.pool._places = {**manager.pool.places(), 3: (run_at(manager, 1), 0)}


def index_in_full(manager: CacheManager) -> None:
    manager.pool.indexes[0].index_all_in_full()


def let_hashes_be_equal(manager: CacheManager) -> None:
    index_in_full(manager)
    forget_index_entry(manager, 2)
    put(run_at(manager, 1).block_hashes, 1, hash_of(manager, 1))


def add_hash_beyond_the_blocks(manager: CacheManager) -> None:
    run_at(manager, 1).block_hashes.append(Z)
    manager.pool.indexes[0].add_more(run_at(manager, 1), [Z])


def make_a_hole_in_an_intact_run(manager: CacheManager) -> None:
    forget_index_entry(manager, 1)
    put(run_at(manager, 1).block_hashes, 0, None)


def let_a_worthless_run_keep_its_hashes(manager: CacheManager) -> None:
    run = run_at(manager, 5)
    lru(manager).remove(run)
    manager.pool._worthless.append(run)


def share_the_last_block(manager: CacheManager) -> None:
    other = manager.groups[0].tables["other"] = BlockTable()
    other.block_ids.append(3)


A_RUN = "block 1 and 1 more, a run: "
B_RUN = "block 4 and 2 more, a run: "
POOL_DAMAGES: dict[str, tuple[Damage, str]] = {
    "reference too many": (lambda m: bump(run_at(m, 1), "num_holders"), A_RUN + "references: expected 1, found 2"),
    "negative references": (
        lambda m: setattr(run_at(m, 5), "num_holders", -1),
        B_RUN + "references: expected 0, found -1",
    ),
    "of a run's blocks one counts another": (
        lambda m: bump(isolate(m.pool, 2), "num_holders"),
        "block 2: references: expected 1, found 2",
    ),
    "held run freed": (
        lambda m: lru(m).push([run_at(m, 1)]),
        A_RUN + "free: expected not, with 1 references, found it in the free order",
    ),
    "run that nobody holds among the held": (
        lambda m: m.pool.held_runs.update({free_run(9): None}),
        "block 9: held: expected not, with 0 references, found it among the held runs",
    ),
    "run without blocks": (
        lambda m: m.pool.held_runs.update({free_run(): None}),
        "0 cached, 0 holders): blocks of a run: expected at least one, found none",
    ),
    "free run lost": (
        lambda m: lru(m).remove(run_at(m, 5)),
        "block 5: free or held: expected one of them, found neither",
    ),
    "freed twice": (
        lambda m: lru(m).push([run_at(m, 5)]),
        B_RUN + "places in the order of free blocks: expected 1, found 2",
    ),
    "null block freed": (
        lambda m: lru(m).push([free_run(0)]),
        "null block 0: in the order of free blocks: expected never, found it there",
    ),
    "null block held": (
        lambda m: run_at(m, 1).block_ids.append(0),
        "null block 0: in a held run: expected never, found it there",
    ),
    "foreign block freed": (
        lambda m: lru(m).push([free_run(77)]),
        "foreign block 77: in the order of free blocks: expected never, found it there",
    ),
    "block in two runs": (
        lambda m: run_at(m, 1).block_ids.append(5),
        "block 5: runs that it is in, unused blocks being one: expected 1, found 2",
    ),
    "block twice in a run": (
        lambda m: run_at(m, 5).block_ids.append(5),
        "block 5: runs that it is in, unused blocks being one: expected 1, found 2",
    ),
    "unused block freed": (
        lambda m: lru(m).push([free_run(9)]),
        "block 9: runs that it is in, unused blocks being one: expected 1, found 2",
    ),
    "unused lost": (
        lambda m: bump(m.pool, "_next_unused"),
        "block 7: free or held: expected one of them, found neither",
    ),
    "unused that was used": (
        lambda m: bump(m.pool, "_next_unused", -1),
        "block 6: runs that it is in, unused blocks being one: expected 1, found 2",
    ),
    "loose block in a run": (
        lambda m: run_at(m, 5).block_ids.append(3),
        "block 3: a table's own, so in no run: expected none, found BlockRun(4 blocks",
    ),
    "loose block unused": (
        lambda m: bump(m.pool, "_next_unused", -4),
        "block 3: a table's own, so in no run: expected none, found it among the unused blocks",
    ),
    "loose block of two": (
        share_the_last_block,
        "block 3: tables that have it as their own: expected 1, found 2",
    ),
    "wrong places remembered": (remember_wrong_places, "block 3: remembered place: expected None, found (BlockRun("),
    "worthless and cached": (
        let_a_worthless_run_keep_its_hashes,
        B_RUN + "hashes of a worthless run: expected none, found 2",
    ),
    "hash forgotten": (
        lambda m: (index_in_full(m), run_at(m, 1).block_hashes.pop()),
        A_RUN + "group and hash, as indexed: expected group 0, hash ",
    ),
    "hash changed": (lambda m: put(run_at(m, 1).block_hashes, 0, Z), "found group 0, hash 7a7a7a7a7a7a7a7a, hash "),
    "group changed": (lambda m: setattr(run_at(m, 1), "group_id", 3), A_RUN + "group: expected 0 to 0, found 3"),
    "index entry lost": (
        lambda m: forget_index_entry(m, 1),
        "block 1: cached: expected in the index of group 0 under hash ",
    ),
    "index answers for more than a run has": (
        lambda m: (index_in_full(m), m.pool.indexes[0].add_more(run_at(m, 1), [Z])),
        A_RUN + "group and hash, as indexed: expected group 0, hash 7a7a7a7a7a7a7a7a, found group 0, hash ",
    ),
    "index has a run that is gone": (
        lambda m: m.pool.indexes[0].add_more(free_run(7), [Z]),
        "group 0, hash 7a7a7a7a7a7a7a7a: its run in the prefix index: expected one that is held or free, "
        "found BlockRun(",
    ),
    "duplicate of itself": (
        lambda m: m.pool.indexes[0]._duplicates.update({hash_of(m, 1): {run_at(m, 1): None}}),
        ": runs in the prefix index: expected an answering one and others, found BlockRun(2 blocks",
    ),
    "duplicate of nothing": (
        lambda m: m.pool.indexes[0]._duplicates.update({Z: {run_at(m, 5): None}}),
        "group 0, hash 7a7a7a7a7a7a7a7a: runs in the prefix index: expected an answering one and others, "
        "found None and [BlockRun(",
    ),
    "more hashes than blocks": (add_hash_beyond_the_blocks, A_RUN + "its hashes: expected at most 2, found 3"),
    "indexed by head, while another has one of its hashes": (
        lambda m: put(run_at(m, 5).block_hashes, 1, hash_of(m, 2)),
        A_RUN + "runs with its hash ",
    ),
    "indexed by head, while a later hash is in the index": (
        lambda m: m.pool.indexes[0].runs.update({hash_of(m, 2): run_at(m, 1)}),
        ", not the first, leads to: expected nothing, indexed by head, found BlockRun(2 blocks",
    ),
    "indexed by head, and not intact": (
        lambda m: setattr(run_at(m, 1), "is_intact", False),
        A_RUN + "indexed by head: expected an intact run, found one that is not",
    ),
    "indexed by head, in an index by each hash": (
        lambda m: setattr(m.pool.indexes[0], "by_head", False),
        A_RUN + "indexed by head, in an index by each hash: expected never, found it",
    ),
    "hash twice in a run": (
        let_hashes_be_equal,
        A_RUN + "hashes of the run: expected each once, found 2, of them 1 different",
    ),
    "intact with a hole": (
        make_a_hole_in_an_intact_run,
        "block 1: hash in an intact run: expected one, found none",
    ),
}  # fmt: skip
TABLE_DAMAGES: dict[str, tuple[Damage, str]] = {
    "foreign block in a table": (
        lambda m: put(table(m).block_ids, 2, 77),
        "request 'a', group 0: block ids in its table: expected 1 to 10, or the null block, found 77",
    ),
    "block twice in a table": (
        lambda m: put(table(m).block_ids, 2, 1),
        "request 'a', group 0: positions of block 1: expected 1, found 2",
    ),
    "too many cached": (
        lambda m: setattr(table(m), "num_cached_blocks", 7),
        "request 'a', group 0: cached blocks: expected at most 3, found 7",
    ),
    "more cached than in holds": (
        lambda m: setattr(table(m), "num_cached_blocks", 3),
        "group 0, position 2: block 3, counted as cached: expected it in a hold, found it the table's own",
    ),
    "too few cached": (
        lambda m: setattr(table(m), "num_cached_blocks", 1),
        "group 0, position 1: block 2 in the prefix cache: expected only before position 1, found it there",
    ),
    "fewer cached than in holds": (
        lambda m: setattr(table(m), "num_cached_blocks", 1),
        "group 0, hold of 2 blocks from position 0: its end: expected at most 1, as cached, found 2",
    ),
    "published after a failed load": (
        lambda m: setattr(table(m), "first_unpublished", 1),
        "group 0, position 1: block 2 in the prefix cache: expected only before position 1, found it there",
    ),
    "hold lost": (
        lambda m: table(m).holds.clear(),
        "group 0, position 0: block 1, counted as cached: expected it in a hold, found it the table's own",
    ),
    "hold too short": (
        lambda m: setattr(table(m).holds[0], "num_blocks", 1),
        "group 0, hold of 1 blocks from position 0: blocks of its runs: expected 1, found 2",
    ),
    "hold too long": (
        lambda m: setattr(table(m).holds[0], "num_blocks", 3),
        "group 0, hold of 3 blocks from position 0: blocks of its runs: expected 3, found 2",
    ),
    "rest of a split run lost": (
        lambda m: (m.pool.split(run_at(m, 1), 1), setattr(run_at(m, 1), "rest", None)),
        "group 0, hold of 2 blocks from position 0: blocks of its runs: expected 2, found 1",
    ),
    "hold elsewhere": (
        lambda m: setattr(table(m).holds[0], "position", 1),
        "group 0, position 1: blocks of its hold: expected [2, 3], found [1, 2]",
    ),
    "two holds of a position": (
        lambda m: table(m).holds.append(Hold(1, run_at(m, 5), 1)),
        "group 0, hold of 1 blocks from position 1: where it begins: expected 2 or later, found 1",
    ),
    "hold of nothing": (
        lambda m: table(m).holds.append(Hold(2, run_at(m, 5), 0)),
        "group 0, hold of 0 blocks from position 2: where it begins: expected 2 or later, found 2",
    ),
    "hold of a run that is none of the pool's": (
        lambda m: setattr(table(m).holds[0], "run", BlockRun([1, 2], 0, 0, 1)),
        "group 0, position 0: its run: expected one of the pool's held ones, found BlockRun(2 blocks",
    ),
    "blocks in another order than in the run": (
        lambda m: table(m).block_ids.__setitem__(slice(2), [2, 1]),
        "group 0, position 0: blocks of its hold: expected [2, 1], found [1, 2]",
    ),
    "run from another position": (
        lambda m: setattr(run_at(m, 1), "first_position", 5),
        "group 0, position 0: where its run begins: expected 0, found 5",
    ),
    "growing run that is not the last hold's": (
        lambda m: table(m).grow_from_now_on(Hold(4, run_at(m, 5), 3)),
        "group 0: the run that grows: expected that of its last hold, found BlockRun(3 blocks",
    ),
    "growing run that is not all cached": (
        lambda m: (table(m).grow_from_now_on(table(m).holds[-1]), bump(table(m), "num_cached_blocks")),
        "group 0: the run that grows: expected 2 blocks, hashes and cached positions, found 2 and 2 and 3",
    ),
    "growing run of several": (
        lambda m: (table(m).grow_from_now_on(table(m).holds[-1]), bump(run_at(m, 1), "num_holders")),
        "group 0: the run that grows: holders, and first unpublished: expected 1 and None, found 2 and None",
    ),
    "growing run of what is not published": (
        lambda m: (table(m).grow_from_now_on(table(m).holds[-1]), setattr(table(m), "first_unpublished", 2)),
        "group 0: the run that grows: holders, and first unpublished: expected 1 and None, found 1 and 2",
    ),
    "null block in a hold": (
        lambda m: put(table(m).block_ids, 0, 0),
        "group 0, position 0: null block: expected in no hold, found it in one",
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
        lambda m: put(table(m).block_ids, 2, 0),
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
}  # fmt: skip
NUMBER_DAMAGES: dict[str, tuple[Damage, str]] = {
    "unused beyond the pool": (
        lambda m: setattr(m.pool, "_next_unused", 12),
        "first unused block: expected 1 to 11, found 12",
    ),
    "empty places miscounted": (
        lambda m: bump(lru(m), "_num_empty"),
        "lru: empty places: expected 0, found 1 counted",
    ),
    "place forgotten": (
        lambda m: setattr(run_at(m, 5), "place", []),
        "lru: BlockRun(3 blocks from position 0 of group 0, 2 cached, 0 holders): expected it to know its place, "
        "found another",
    ),
}


def finding_of(manager: CacheManager, damage: Damage, expected: str) -> list[str]:
    """The finding that says so, in lines; and no check passes."""
    damage(manager)
    findings = list(find_contradictions(manager))
    matching = [finding for finding in findings if expected in finding.message]
    assert matching, "\n".join(finding.message for finding in findings)
    with pytest.raises(InvariantError) as caught:
        check_invariants(manager)
    assert str(caught.value).splitlines()[0] == findings[0].message
    checks = manager.checks
    return tell(manager, matching[0], None if checks is None else checks.story).splitlines()


@pytest.mark.parametrize("name", POOL_DAMAGES)
def test_damage_to_the_pool_is_found_and_the_block_tells_its_story(name: str) -> None:
    damage, expected = POOL_DAMAGES[name]
    first_line, *story = finding_of(filled(FULL), damage, expected)
    if name in {"run without blocks", "duplicate of itself", "duplicate of nothing"}:
        assert story == [], "there is no one block that it is about"
        return
    block_id = int(story[0].split()[1])
    assert f"block {block_id}" in first_line or "its run in the prefix index" in first_line
    if block_id in {1, 2}:
        assert "held by request 'a' (group 0, position " in story[0]
        assert story[1:] == [
            "  last owners, oldest first: request 'a' (call 2)",
            "  last events, oldest first:",
            "    call 2, allocate_slots of request 'a': taken",
            "    call 2, allocate_slots of request 'a': cached in group 0",
        ]
    elif block_id in {4, 5}:
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
    _, *story = finding_of(filled(FULL), damage, expected)
    owner = "ghost" if "ghost" in expected else "a"
    assert any(line.startswith(f"  request '{owner}' now, group 0: ") for line in story)


@pytest.mark.parametrize("name", NUMBER_DAMAGES)
def test_damage_to_numbers_and_to_the_policy_is_found(name: str) -> None:
    damage, expected = NUMBER_DAMAGES[name]
    assert finding_of(filled(FULL), damage, expected)[0] == expected


def test_free_and_held_are_all_usable_blocks() -> None:
    manager = filled(FULL)
    manager.pool.num_free_blocks += 2
    messages = [finding.message for finding in find_contradictions(manager)]
    assert messages == [
        "free blocks: length of the order: expected 7, found 9",
        "conservation: free and held blocks: expected 10, 11 less 1 reserved, found 12, 9 and 3",
    ]


def test_a_run_in_which_another_answers_is_not_intact() -> None:
    manager = make_manager()
    for request_id in "ab":
        run_prefill(manager, FakeRequest(request_id, list(range(9)), skip_reading_prefix_cache=True))
    check_invariants(manager)
    run_at(manager, 5).is_intact = True
    expected = f"of an intact run: expected this run, found {run_at(manager, 1)!r}"
    assert [message.rpartition(f" {'hash'} ")[2].partition(" ")[2] for message in messages_of(manager)] == [
        expected
    ] * 2


def test_what_several_hold_counts_each_of_them() -> None:
    manager = make_manager(20)
    for request_id, num_tokens in (("a", 17), ("b", 13), ("c", 9)):
        run_prefill(manager, FakeRequest(request_id, list(range(num_tokens))))
    check_invariants(manager)
    run_at(manager, 1).num_holders = 2
    run_at(manager, 3).num_holders = 3
    assert messages_of(manager) == [
        "block 1 and 1 more, a run: references: expected 3, found 2",
        "block 3: references: expected 2, found 3",
    ]


def messages_of(manager: CacheManager) -> list[str]:
    return [finding.message for finding in find_contradictions(manager)]


@pytest.mark.parametrize(
    ("groups", "damage", "expected"),
    [
        (  # the fault F1: what one group was handed is what the other has hit
            (FULL, WINDOW),
            lambda m: put(table(m, 1).block_ids, 2, 3),
            "block 3: groups whose tables have it: expected one, found groups 0 and 1",
        ),
        (
            (FULL, WINDOW),
            lambda m: table(m, 1).block_ids.reverse(),
            "request 'a', group 1: null blocks: expected before all others, found block 6 before one",
        ),
        (
            (FULL, WINDOW),
            lambda m: setattr(run_at(m, 1), "group_id", 1),
            "block 1 and 1 more, a run: group and hash, as indexed: expected group 0, hash ",
        ),
        (
            (FULL, WINDOW),
            lambda m: setattr(table(m, 1), "first_unpublished", 1),
            "request 'a', group 1, position 1: block 5 in the prefix cache: expected only before position 1",
        ),
        (
            (SINK,),
            lambda m: lru(m).push([free_run(2)]),
            "reserved block 2: in the order of free blocks: expected never, found it there",
        ),
        (
            (SINK,),
            lambda m: m.pool.held_runs.update({BlockRun([1], 0, 0, 1): None}),
            "reserved block 1: in a held run: expected never, found it there",
        ),
        (
            (SINK,),
            lambda m: put(table(m).block_ids, 0, 1),
            "request 'a', group 0: block ids in its table: expected 3 to 10, or the null block, found 1",
        ),
        (
            (SINK,),
            lambda m: setattr(m.pool, "_next_unused", 2),
            "first unused block: expected 3 to 11, found 2",
        ),
        (
            (FULL, ALIGNED),
            lambda m: setattr(table(m, 1), "previous_state_position", 9),
            "request 'a', group 1: position of the previous state: expected 0 to 3, found 9",
        ),
        (
            (FULL, ALIGNED),
            lambda m: put(table(m, 1).block_ids, 3, 0),
            "group 1: the last 2 positions, which hold the running states: expected no null block, found [",
        ),
    ],
)  # fmt: skip
def test_damage_to_other_kinds_of_attention_is_found(
    groups: tuple[GroupGeometry, ...], damage: Damage, expected: str
) -> None:
    finding_of(filled(*groups), damage, expected)


def test_a_block_cached_by_another_group_than_holds_it() -> None:
    manager = filled(FULL, WINDOW)
    run = isolate(manager.pool, 1)
    manager.pool.uncache(run, 0, 1)
    run.group_id = 1
    run.block_hashes.append(Z)
    manager.pool.indexes[1].add_more(run, [Z])
    expected = (
        "request 'a', group 0, position 0: block 1 in the prefix cache: expected as group 0's, found it as group 1's"
    )
    assert messages_of(manager) == [expected]


def test_cross_attention_and_caching_switched_off() -> None:
    manager = make_hybrid_manager(groups=(FULL, CROSS), enable_caching=False)
    request = FakeRequest("a", list(range(9)))
    manager.allocate_slots(request, 9, num_encoder_tokens=7)
    check_invariants(manager)
    run = manager.pool.cache(0, 0, [1], [Z])
    expected = "block 1: hash, prefix caching being off: expected None, found hash 7a7a7a7a7a7a7a7a"
    assert expected in messages_of(manager)
    manager.pool.uncache(run, 0, 1)
    del manager.pool.held_runs[run]
    manager.pool._places = None
    check_invariants(manager)
    put(table(manager, 1).block_ids, 0, 0)
    assert "request 'a', group 1: null blocks in a table of cross attention: expected 0, found 1" in messages_of(
        manager
    )


def test_without_the_setting_the_state_is_told_and_that_there_is_no_story() -> None:
    manager = make_manager()
    run_prefill(manager, FakeRequest("a", list(range(9))))
    isolate(manager.pool, 2).num_holders = 4
    with pytest.raises(InvariantError) as caught:
        check_invariants(manager)
    assert str(caught.value).splitlines() == [
        "block 2: references: expected 1, found 4",
        "  block 2 now: references 4, held by request 'a' (group 0, position 1); not free; "
        f"cached in group 0 as {hash_of(manager, 2).hex()[:16]}",
        "  its events were not recorded: setting check_invariants is off",
    ]


def test_one_fault_that_touches_everything_is_told_in_part() -> None:
    manager = make_manager(500)
    manager.pool.held_runs.update({BlockRun([block_id], 0, 0, 1): None for block_id in range(1, 500)})
    assert len(list(find_contradictions(manager))) == MAX_FINDINGS_PER_CHECK


def test_it_is_one_of_the_packages_errors_and_a_failed_assertion() -> None:
    assert issubclass(InvariantError, KVPlugError)
    assert issubclass(InvariantError, AssertionError)
