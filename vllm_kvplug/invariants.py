"""Everything that must hold between calls. Each finding names the object, what was expected and what was found.

The rules: every block is free or held and never both, the reserved ones neither (free + held = total less reserved);
references are what the tables say; a block is in one group's tables only; index, hashes and tables agree; tables keep
what their attention type promises; the decode shortcut's limits are what the groups answer; the eviction policy agrees
with itself.

A check walks the whole pool and all tables, 1 to 2 ms for each thousand blocks: see `checking.py` for the measured
costs, and for a server that checks itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvplug.block_pool import NULL_BLOCK_ID, BlockPool
from vllm_kvplug.errors import KVPlugError
from vllm_kvplug.geometry import FULL_KINDS, AttentionKind, MambaMode
from vllm_kvplug.story import BlockStory, describe_block, describe_request

if TYPE_CHECKING:
    from vllm_kvplug.groups.base import AttentionGroup
    from vllm_kvplug.manager import CacheManager

# One fault can touch every block; so many findings of a check are told.
MAX_FINDINGS_PER_CHECK = 100


class InvariantError(KVPlugError, AssertionError):
    """A manager's structures contradict each other. The message tells the story of the block or request, in lines."""


class Finding(NamedTuple):
    """One contradiction.

    Attributes:
        message: one line: object, expected and found value.
        block_id: the block that it is about, if it is about one.
        request_id: the request, if it is about one.
    """

    message: str
    block_id: int | None = None
    request_id: str | None = None

    @property
    def what(self) -> str:
        """What is wrong, without the values: the same as long as it stands, though they change."""
        return self.message.partition(": expected ")[0]


def check_invariants(manager: CacheManager) -> None:
    """See that the manager's structures agree. Changes no block and no table.

    Raises:
        InvariantError: the first contradiction, with the story of its block or request.
    """
    for finding in find_contradictions(manager):
        checks = manager.checks
        raise InvariantError(tell(manager, finding, None if checks is None else checks.story))


def find_contradictions(manager: CacheManager) -> Iterator[Finding]:
    """All contradictions, those about one block before those about numbers. Changes nothing."""
    return islice(_find(manager), MAX_FINDINGS_PER_CHECK)


def tell(manager: CacheManager, finding: Finding, story: BlockStory | None) -> str:
    """A finding with the story of its block and request: its message first, then a line for each fact."""
    lines = [finding.message]
    if finding.block_id is not None:
        lines.append(describe_block(manager, finding.block_id, story))
    if finding.request_id is not None:
        lines.append(describe_request(manager, finding.request_id))
    return "\n".join(lines)


def _find(manager: CacheManager) -> Iterator[Finding]:
    foreign = list(_foreign_ids(manager))
    if foreign:
        yield from foreign  # the other rules look blocks up by their ids
        return
    yield from _check_references(manager)
    yield from _check_free_order(manager.pool)
    yield from _check_index(manager)
    for group in manager.groups:
        for request_id, table in group.tables.items():
            yield from _check_table(manager.pool, group, request_id, table)
    yield from _check_quiet_limits(manager)


def _differs(what: str, expected: object, found: object, *about: Any) -> Finding:
    return Finding(f"{what}: expected {expected}, found {found}", *about)


def _foreign_ids(manager: CacheManager) -> Iterator[Finding]:
    num_blocks, num_reserved = manager.pool.num_blocks, manager.pool.num_reserved_blocks
    for group in manager.groups:
        for request_id, table in group.tables.items():
            for block_id in set(table.block_ids) - {NULL_BLOCK_ID}:
                if not num_reserved <= block_id < num_blocks:
                    yield _differs(
                        f"request {request_id!r}, group {group.group_id}: block ids in its table",
                        f"{num_reserved} to {num_blocks - 1}, or the null block",
                        block_id,
                        block_id,
                        request_id,
                    )


def _check_references(manager: CacheManager) -> Iterator[Finding]:
    pool = manager.pool
    holders: Counter[int] = Counter()
    group_of: dict[int, int] = {}
    for group in manager.groups:
        in_group: Counter[int] = Counter()
        for table in group.tables.values():
            in_group.update(table.block_ids)
        del in_group[NULL_BLOCK_ID]
        holders.update(in_group)
        for block_id in in_group.keys() & group_of.keys():
            groups = f"groups {group_of[block_id]} and {group.group_id}"
            yield _differs(f"block {block_id}: groups whose tables have it", "one", groups, block_id)
        group_of.update(dict.fromkeys(in_group, group.group_id))
    for block_id in range(1, pool.num_blocks):
        # What the null block counts is nobody's business.
        if pool.reference_counts[block_id] != holders[block_id]:
            found = pool.reference_counts[block_id]
            if block_id < pool.num_reserved_blocks:
                yield _differs(f"reserved block {block_id}: references", 0, found, block_id)
            else:
                yield _differs(f"block {block_id}: references", holders[block_id], found, block_id)


def _check_free_order(pool: BlockPool) -> Iterator[Finding]:
    order = list(pool.free_blocks)
    free = set(order)
    usable = range(pool.num_reserved_blocks, pool.num_blocks)
    held = {block_id for block_id in usable if pool.reference_counts[block_id]}
    for block_id in sorted(free.difference(usable)):
        kind = "null block" if block_id == NULL_BLOCK_ID else "reserved block"
        name = kind if 0 <= block_id < pool.num_reserved_blocks else "foreign block"
        yield _differs(f"{name} {block_id}: in the order of free blocks", "never", "it there", block_id)
    for block_id in sorted(free & held):
        count = pool.reference_counts[block_id]
        yield _differs(f"block {block_id}: free", f"not, with {count} references", "it in the free order", block_id)
    for block_id in sorted(set(usable) - free - held):
        yield _differs(f"block {block_id}: free or held", "one of them", "neither", block_id)
    if len(order) != len(free):
        for block_id, count in Counter(order).items():
            if count > 1:
                yield _differs(f"block {block_id}: places in the order of free blocks", 1, count, block_id)
    if pool.num_free_blocks != len(order):
        yield _differs("free blocks: length of the order", len(order), pool.num_free_blocks)
    num_usable = pool.num_blocks - pool.num_reserved_blocks
    if pool.num_free_blocks + len(held) != num_usable:
        expected = f"{num_usable}, {pool.num_blocks} less {pool.num_reserved_blocks} reserved"
        found = f"{pool.num_free_blocks + len(held)}, {pool.num_free_blocks} and {len(held)}"
        yield _differs("conservation: free and held blocks", expected, found)
    find_contradictions_of_policy = getattr(pool.free_blocks, "find_contradictions", None)
    if find_contradictions_of_policy is not None:
        for message, block_id in find_contradictions_of_policy():
            yield Finding(message, block_id)


def _check_index(manager: CacheManager) -> Iterator[Finding]:
    pool = manager.pool
    hashes, group_ids = pool.block_hashes, pool.block_group_ids
    for block_id in range(pool.num_reserved_blocks):
        if hashes[block_id] is not None:
            kind = "reserved block" if block_id else "null block"
            yield _differs(f"{kind} {block_id}: hash", None, _short(hashes[block_id]), block_id)
    indexed: set[int] = set()
    for group_id, index in enumerate(pool.indexes):
        for block_hash, block_ids in index.items():
            for block_id in block_ids:
                if block_id in indexed:
                    yield _differs(f"block {block_id}: places in the prefix index", 1, "more", block_id)
                indexed.add(block_id)
                if not 0 <= block_id < pool.num_blocks:
                    yield _differs(f"group {group_id}: block ids in its prefix index", "the pool's", block_id, block_id)
                elif hashes[block_id] != block_hash or group_ids[block_id] != group_id:
                    expected = f"group {group_id}, {_short(block_hash)}"
                    found = f"group {group_ids[block_id]}, {_short(hashes[block_id])}"
                    yield _differs(f"block {block_id}: group and hash, as indexed", expected, found, block_id)
        yield from _check_duplicates(group_id, index)
    for block_id, known_hash in enumerate(hashes):
        if known_hash is None:
            continue
        if block_id not in indexed:
            where = f"in the index of group {group_ids[block_id]} under {_short(known_hash)}"
            yield _differs(f"block {block_id}: cached", where, "it in no index", block_id)
        if not manager.enable_caching:
            yield _differs(f"block {block_id}: hash, prefix caching being off", None, _short(known_hash), block_id)


def _check_duplicates(group_id: int, index: Any) -> Iterator[Finding]:
    # What the index's public side cannot show: blocks set aside for a hash that has none, or an entry without blocks.
    for block_hash, others in getattr(index, "_duplicates", {}).items():
        if not others or index.get(block_hash) is None:
            yield _differs(
                f"group {group_id}, {_short(block_hash)}: blocks in the prefix index",
                "an answering one and others",
                f"{index.get(block_hash)} and {list(others)}",
                next(iter(others), None),
            )


def _check_table(pool: BlockPool, group: AttentionGroup, request_id: str, table: Any) -> Iterator[Finding]:
    name = f"request {request_id!r}, group {group.group_id}"
    row: list[int] = table.block_ids
    num_nulls = row.count(NULL_BLOCK_ID)
    if len(row) - num_nulls != len(set(row) - {NULL_BLOCK_ID}):
        for block_id, count in Counter(row).items():
            if count > 1 and block_id != NULL_BLOCK_ID:
                yield _differs(f"{name}: positions of block {block_id}", 1, count, block_id, request_id)
    if table.num_cached_blocks > len(row):
        yield _differs(f"{name}: cached blocks", f"at most {len(row)}", table.num_cached_blocks, None, request_id)
    yield from _check_cached_blocks(pool, group, name, request_id, table)
    yield from _check_nulls(group, name, request_id, table, num_nulls)
    if group.geometry.mamba_mode is MambaMode.ALIGN and hasattr(table, "has_running_state"):
        yield from _check_running_states(group, name, request_id, table)


def _check_cached_blocks(
    pool: BlockPool, group: AttentionGroup, name: str, request_id: str, table: Any
) -> Iterator[Finding]:
    hashes, group_ids = pool.block_hashes, pool.block_group_ids
    # Hits count as cached, and a failed load takes what follows it out of the cache: nobody else publishes it.
    end_cached = table.num_cached_blocks
    if table.first_unpublished is not None:
        end_cached = min(end_cached, max(table.first_unpublished, 0))
    for position, block_id in enumerate(table.block_ids):
        if hashes[block_id] is None:
            continue
        what = f"{name}, position {position}: block {block_id} in the prefix cache"
        if group_ids[block_id] != group.group_id:
            yield _differs(
                what, f"as group {group.group_id}'s", f"it as group {group_ids[block_id]}'s", block_id, request_id
            )
        if position >= end_cached:
            yield _differs(what, f"only before position {end_cached}", "it there", block_id, request_id)


def _check_nulls(group: AttentionGroup, name: str, request_id: str, table: Any, num_nulls: int) -> Iterator[Finding]:
    row, num_leading = table.block_ids, table.num_leading_nulls
    if not 0 <= num_leading <= len(row):
        yield _differs(f"{name}: leading null blocks", f"0 to {len(row)}", num_leading, None, request_id)
    for position, block_id in enumerate(row[:num_leading]):
        if block_id != NULL_BLOCK_ID:
            what = f"{name}: leading null blocks, {num_leading} counted, position {position}"
            yield _differs(what, "the null block", f"block {block_id}", block_id, request_id)
    if not num_nulls:
        return
    kind = group.geometry.kind
    if kind in FULL_KINDS or kind is AttentionKind.CROSS:
        what = f"{name}: null blocks in a table of {kind.value} attention"
        yield _differs(what, 0, num_nulls, None, request_id)
    elif group.geometry.mamba_mode is not MambaMode.ALIGN and any(row[:num_nulls]):
        first_block = next(filter(None, row))
        what = f"{name}: null blocks"
        yield _differs(what, "before all others", f"block {first_block} before one", first_block, request_id)


def _check_running_states(group: AttentionGroup, name: str, request_id: str, table: Any) -> Iterator[Finding]:
    row, previous = table.block_ids, table.previous_state_position
    if previous is not None and not 0 <= previous < len(row):
        what = f"{name}: position of the previous state"
        yield _differs(what, f"0 to {len(row) - 1}", previous, None, request_id)
    if not table.has_running_state:
        return
    num_states = 1 + group.geometry.num_speculative_blocks
    states = row[-num_states:]
    if len(states) < num_states or NULL_BLOCK_ID in states:
        what = f"{name}: the last {num_states} positions, which hold the running states"
        yield _differs(what, "no null block", states, next(filter(None, states), None), request_id)


def _check_quiet_limits(manager: CacheManager) -> Iterator[Finding]:
    for request_id, limit in manager._quiet_limits_tokens.items():
        without = [group.group_id for group in manager.groups if request_id not in group.tables]
        if without:
            what = f"request {request_id!r}: a block table in each group, as the decode shortcut takes it"
            yield _differs(what, "one", f"none in groups {without}", None, request_id)
        expected = manager._coordinator.quiet_limit_tokens(request_id)
        if limit != expected:
            what = f"request {request_id!r}: decode shortcut's limit in tokens"
            yield _differs(what, expected, limit, None, request_id)


def _short(block_hash: bytes | None) -> str:
    return "no hash" if block_hash is None else f"hash {block_hash.hex()[:16]}"
