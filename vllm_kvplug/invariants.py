"""Everything that must hold between calls. Each finding names the object, what was expected and what was found.

The rules: every block is unused, in one run that is free or held, or one table's own (loose), the reserved ones none of
it; a run has as many references as tables hold it; a block is in one group's tables only; runs and indexes agree
(`run_invariants.py`); a table's holds agree with its row, and its blocks before `num_cached_blocks` alone are in holds;
tables keep what their attention type promises; the decode shortcut's limits are what the groups answer; the eviction
policy agrees with itself.

A check walks the whole pool and all tables, 2 to 5 ms for each thousand blocks: see `checking.py` for the measured
costs, and for a server that checks itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm_kvplug.block_pool import NULL_BLOCK_ID
from vllm_kvplug.errors import KVPlugError
from vllm_kvplug.geometry import FULL_KINDS, AttentionKind, MambaMode
from vllm_kvplug.run_invariants import Finding, Layout, differs, find_contradictions_of_runs, pieces_of
from vllm_kvplug.story import BlockStory, describe_block, describe_request

if TYPE_CHECKING:
    from vllm_kvplug.groups.base import AttentionGroup
    from vllm_kvplug.manager import CacheManager

# One fault can touch every block; so many findings of a check are told.
MAX_FINDINGS_PER_CHECK = 100


class InvariantError(KVPlugError, AssertionError):
    """A manager's structures contradict each other. The message tells the story of the block or request, in lines."""


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
    layout = Layout.of(manager)
    yield from find_contradictions_of_runs(manager, layout)
    yield from _check_groups(manager)
    for group in manager.groups:
        for request_id, table in group.tables.items():
            yield from _check_table(layout, group, request_id, table)
    yield from _check_quiet_limits(manager)


def _foreign_ids(manager: CacheManager) -> Iterator[Finding]:
    num_blocks, num_reserved = manager.pool.num_blocks, manager.pool.num_reserved_blocks
    for group in manager.groups:
        for request_id, table in group.tables.items():
            for block_id in set(table.block_ids) - {NULL_BLOCK_ID}:
                if not num_reserved <= block_id < num_blocks:
                    yield differs(
                        f"request {request_id!r}, group {group.group_id}: block ids in its table",
                        f"{num_reserved} to {num_blocks - 1}, or the null block",
                        block_id,
                        block_id,
                        request_id,
                    )


def _check_groups(manager: CacheManager) -> Iterator[Finding]:
    group_of: dict[int, int] = {}
    for group in manager.groups:
        in_group = {block_id for table in group.tables.values() for block_id in table.block_ids} - {NULL_BLOCK_ID}
        for block_id in in_group & group_of.keys():
            groups = f"groups {group_of[block_id]} and {group.group_id}"
            yield differs(f"block {block_id}: groups whose tables have it", "one", groups, block_id)
        group_of.update(dict.fromkeys(in_group, group.group_id))


def _check_table(layout: Layout, group: AttentionGroup, request_id: str, table: Any) -> Iterator[Finding]:
    name = f"request {request_id!r}, group {group.group_id}"
    row: list[int] = table.block_ids
    num_nulls = row.count(NULL_BLOCK_ID)
    if len(row) - num_nulls != len(set(row) - {NULL_BLOCK_ID}):
        for block_id in set(row) - {NULL_BLOCK_ID}:
            if row.count(block_id) > 1:
                yield differs(f"{name}: positions of block {block_id}", 1, row.count(block_id), block_id, request_id)
    if table.num_cached_blocks > len(row):
        yield differs(f"{name}: cached blocks", f"at most {len(row)}", table.num_cached_blocks, None, request_id)
    yield from _check_holds(layout, group, name, request_id, table)
    yield from _check_cached_blocks(layout, group, name, request_id, table)
    yield from _check_nulls(group, name, request_id, table, num_nulls)
    if group.geometry.mamba_mode is MambaMode.ALIGN and hasattr(table, "has_running_state"):
        yield from _check_running_states(group, name, request_id, table)


def _check_cached_blocks(
    layout: Layout, group: AttentionGroup, name: str, request_id: str, table: Any
) -> Iterator[Finding]:
    # Hits count as cached, and a failed load takes what follows it out of the cache: nobody else publishes it.
    end_cached = table.num_cached_blocks
    if table.first_unpublished is not None:
        end_cached = min(end_cached, max(table.first_unpublished, 0))
    for position, block_id in enumerate(table.block_ids):
        cached_as = layout.cached_as(block_id)
        if cached_as is None:
            continue
        what = f"{name}, position {position}: block {block_id} in the prefix cache"
        if cached_as[1] != group.group_id:
            yield differs(what, f"as group {group.group_id}'s", f"it as group {cached_as[1]}'s", block_id, request_id)
        if position >= end_cached:
            yield differs(what, f"only before position {end_cached}", "it there", block_id, request_id)


def _check_holds(layout: Layout, group: AttentionGroup, name: str, request_id: str, table: Any) -> Iterator[Finding]:
    row, end = table.block_ids, 0
    held = set(layout.held)
    for hold in table.holds:
        what = f"{name}, hold of {hold.num_blocks} blocks from position {hold.position}"
        if hold.position < end or hold.num_blocks <= 0:
            yield differs(f"{what}: where it begins", f"{end} or later", hold.position, None, request_id)
        end = hold.position + hold.num_blocks
        if end > table.num_cached_blocks:
            yield differs(f"{what}: its end", f"at most {table.num_cached_blocks}, as cached", end, None, request_id)
        pieces, num_missing = pieces_of(hold)
        if num_missing:
            found = hold.num_blocks - num_missing
            yield differs(f"{what}: blocks of its runs", hold.num_blocks, found, None, request_id)
        for position, run, _, num_blocks in pieces:
            where, block_id = f"{name}, position {position}", run.block_ids[0]
            if row[position : position + num_blocks] != run.block_ids:
                in_row = row[position : position + num_blocks]
                yield differs(f"{where}: blocks of its hold", in_row, run.block_ids, block_id, request_id)
            if run not in held:
                yield differs(f"{where}: its run", "one of the pool's held ones", repr(run), block_id, request_id)
            if run.first_position != position:
                yield differs(f"{where}: where its run begins", position, run.first_position, block_id, request_id)
    yield from _check_uncovered(name, request_id, table)
    yield from _check_growing(name, request_id, table)


def _check_growing(name: str, request_id: str, table: Any) -> Iterator[Finding]:
    """Whether a run that takes the next cached block by the shortest way may do so."""
    last = table.growing
    if last is None or last.run.grower is not last:
        return
    run = last.run
    what = f"{name}: the run that grows"
    if not table.holds or table.holds[-1] is not last:
        yield differs(what, "that of its last hold", repr(run), None, request_id)
        return
    lengths = len(run.block_ids), len(run.block_hashes), table.num_cached_blocks - last.position
    if lengths != (last.num_blocks,) * 3:
        expected = f"{last.num_blocks} blocks, hashes and cached positions"
        yield differs(what, expected, " and ".join(map(str, lengths)), run.block_ids[0], request_id)
    if run.num_holders != 1 or table.first_unpublished is not None:
        found = f"{run.num_holders} and {table.first_unpublished}"
        yield differs(f"{what}: holders, and first unpublished", "1 and None", found, run.block_ids[0], request_id)


def _check_uncovered(name: str, request_id: str, table: Any) -> Iterator[Finding]:
    end_cached = min(table.num_cached_blocks, len(table.block_ids))
    if table.first_unpublished is not None:
        end_cached = min(end_cached, max(table.first_unpublished, 0))
    covered = {position for hold in table.holds for position in range(hold.position, hold.position + hold.num_blocks)}
    for position, block_id in enumerate(table.block_ids[:end_cached]):
        if block_id != NULL_BLOCK_ID and position not in covered:
            what = f"{name}, position {position}: block {block_id}, counted as cached"
            yield differs(what, "it in a hold", "it the table's own", block_id, request_id)
        elif block_id == NULL_BLOCK_ID and position in covered:
            yield differs(f"{name}, position {position}: null block", "in no hold", "it in one", None, request_id)


def _check_nulls(group: AttentionGroup, name: str, request_id: str, table: Any, num_nulls: int) -> Iterator[Finding]:
    row, num_leading = table.block_ids, table.num_leading_nulls
    if not 0 <= num_leading <= len(row):
        yield differs(f"{name}: leading null blocks", f"0 to {len(row)}", num_leading, None, request_id)
    for position, block_id in enumerate(row[:num_leading]):
        if block_id != NULL_BLOCK_ID:
            what = f"{name}: leading null blocks, {num_leading} counted, position {position}"
            yield differs(what, "the null block", f"block {block_id}", block_id, request_id)
    if not num_nulls:
        return
    kind = group.geometry.kind
    if kind in FULL_KINDS or kind is AttentionKind.CROSS:
        what = f"{name}: null blocks in a table of {kind.value} attention"
        yield differs(what, 0, num_nulls, None, request_id)
    elif group.geometry.mamba_mode is not MambaMode.ALIGN and any(row[:num_nulls]):
        first_block = next(filter(None, row))
        what = f"{name}: null blocks"
        yield differs(what, "before all others", f"block {first_block} before one", first_block, request_id)


def _check_running_states(group: AttentionGroup, name: str, request_id: str, table: Any) -> Iterator[Finding]:
    row, previous = table.block_ids, table.previous_state_position
    if previous is not None and not 0 <= previous < len(row):
        what = f"{name}: position of the previous state"
        yield differs(what, f"0 to {len(row) - 1}", previous, None, request_id)
    if not table.has_running_state:
        return
    num_states = 1 + group.geometry.num_speculative_blocks
    states = row[-num_states:]
    if len(states) < num_states or NULL_BLOCK_ID in states:
        what = f"{name}: the last {num_states} positions, which hold the running states"
        yield differs(what, "no null block", states, next(filter(None, states), None), request_id)


def _check_quiet_limits(manager: CacheManager) -> Iterator[Finding]:
    for request_id, limit in manager._quiet_limits_tokens.items():
        without = [group.group_id for group in manager.groups if request_id not in group.tables]
        if without:
            what = f"request {request_id!r}: a block table in each group, as the decode shortcut takes it"
            yield differs(what, "one", f"none in groups {without}", None, request_id)
        expected = manager._coordinator.quiet_limit_tokens(request_id)
        if limit != expected:
            what = f"request {request_id!r}: decode shortcut's limit in tokens"
            yield differs(what, expected, limit, None, request_id)
