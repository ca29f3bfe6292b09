"""Everything that must be equal after each call, read from either side into plain values.

Our internals are read in `our_state` alone, upstream's in `upstream_state` alone.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks as UpstreamBlocks

from tests.lockstep.trace import Setup
from vllm_kvplug.block import KVCacheBlocks as OurBlocks
from vllm_kvplug.block_states import BlockStates
from vllm_kvplug.vllm_glue.manager import KVCacheManager as OurManager

State = dict[str, Any]


def upstream_state(manager: Any, setup: Setup) -> State:
    """Upstream's."""
    pool = manager.block_pool
    groups = manager.coordinator.single_type_managers
    cached = pool.cached_block_hash_to_block._cache.items()
    first = setup.num_reserved_blocks
    return {
        "usage": manager.usage,
        "free order": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        "references": [block.ref_cnt for block in pool.blocks[first:]],
        "block hashes": [block.block_hash for block in pool.blocks],
        "cached blocks": {key: list(found) if type(found) is dict else [found.block_id] for key, found in cached},
        "tables": [
            _tables(
                {name: [block.block_id for block in row] for name, row in group.req_to_blocks.items()}, setup, group_id
            )
            for group_id, group in enumerate(groups)
        ],
        "cached counts": [dict(group.num_cached_block) for group in groups],
    }


def our_state(manager: OurManager, setup: Setup) -> State:
    """Ours."""
    pool = manager.pool
    states = BlockStates.of(pool)
    return {
        "usage": manager.usage,
        "free order": list(pool.free_block_ids()),
        "references": states.reference_counts[setup.num_reserved_blocks :],
        "block hashes": [
            None if block_hash is None else block_hash + group_id.to_bytes(4, "big")
            for block_hash, group_id in zip(states.block_hashes, states.block_group_ids, strict=True)
        ],
        "cached blocks": {
            block_hash + group_id.to_bytes(4, "big"): block_ids
            for group_id, index in enumerate(pool.indexes)
            for block_hash, block_ids in index.items()
        },
        "tables": [
            _tables({name: list(table.block_ids) for name, table in group.tables.items()}, setup, group_id)
            for group_id, group in enumerate(manager.groups)
        ],
        "cached counts": [
            {name: table.num_cached_blocks for name, table in group.tables.items() if table.is_admitted}
            for group in manager.groups
        ],
    }


def _tables(tables: dict[str, list[int]], setup: Setup, group_id: int) -> dict[str, list[int]]:
    """The tables of a group. That a table is there though it is empty means something for full attention alone, which
    counts tables for the common prefix.
    """
    if setup.groups[group_id].is_full and setup.enable_caching:
        return tables
    return {name: row for name, row in tables.items() if row}


def plain(value: Any, manager: Any) -> Any:
    """An answer as values that compare across the sides."""
    if isinstance(value, (UpstreamBlocks, OurBlocks)):
        return {
            "block ids": value.get_block_ids(),
            "block ids or None": value.get_block_ids(allow_none=True),
            "unhashed block ids": value.get_unhashed_block_ids() if len(value.blocks) == 1 else None,
            "blocks": [[_block(block) for block in row] for row in value.blocks],
            "is the shared empty answer": value is manager.empty_kv_cache_blocks,
            "new_empty": value.new_empty().get_block_ids(),
            "added to itself": operator.add(value, value).get_block_ids(),
        }
    if isinstance(value, tuple):
        return tuple(plain(part, manager) for part in value)
    return value


def _block(block: Any) -> tuple[Any, ...]:
    # Nobody keeps the null block's references right; upstream lets them drift.
    return (block.block_id, None if block.is_null else block.ref_cnt, block.block_hash, block.is_null)


def num_new_nulls(before: Sequence[int], after: Sequence[int]) -> int:
    """Positions of a table that held a block before and are null now."""
    return sum(bool(old) and not new for old, new in zip(before, after, strict=False))
