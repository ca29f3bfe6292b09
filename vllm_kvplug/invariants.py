"""`check_invariants(manager)`: everything that must hold between calls. Each message names the block, what was expected
and found.

Slow (it walks the whole pool): for tests and for hunting a fault.
"""

from __future__ import annotations

from collections import Counter

from vllm_kvplug.block_pool import NULL_BLOCK_ID, BlockPool
from vllm_kvplug.errors import KVPlugError
from vllm_kvplug.manager import CacheManager


class InvariantError(KVPlugError, AssertionError):
    """A manager's structures contradict each other."""


def check_invariants(manager: CacheManager) -> None:
    """Check references, the free order, the prefix index, the block tables and the decode shortcut against each other.

    Raises:
        InvariantError: the first contradiction found.
    """
    _check_references(manager)
    _check_free_order(manager.pool)
    _check_indexes(manager.pool)
    _check_tables(manager)


def _expect(what: str, expected: object, found: object) -> None:
    if expected != found:
        raise InvariantError(f"{what}: expected {expected}, found {found}")


def _check_references(manager: CacheManager) -> None:
    holders: Counter[int] = Counter()
    for group in manager.groups:
        for table in group.tables.values():
            holders.update(table.block_ids)
    for block_id, count in enumerate(manager.pool.reference_counts):
        if block_id != NULL_BLOCK_ID:
            _expect(f"block {block_id}: references", holders[block_id], count)


def _check_free_order(pool: BlockPool) -> None:
    order = list(pool.free_blocks)
    _expect("free blocks: length of the order", len(pool.free_blocks), len(order))
    repeated = [block_id for block_id, count in Counter(order).items() if count > 1]
    _expect("free blocks: blocks named twice", [], repeated)
    unheld = {block_id for block_id, count in enumerate(pool.reference_counts) if not count} - {NULL_BLOCK_ID}
    _expect("free blocks: blocks that nobody holds and that are not free", set(), unheld - set(order))
    _expect("free blocks: free blocks that are held, or the null block", set(), set(order) - unheld)


def _check_indexes(pool: BlockPool) -> None:
    found: dict[int, tuple[int, bytes]] = {}
    for group_id, index in enumerate(pool.indexes):
        for indexed_hash, block_ids in index.items():
            for block_id in block_ids:
                _expect(f"block {block_id}: places in the prefix index besides this", None, found.get(block_id))
                found[block_id] = (group_id, indexed_hash)
    for block_id, block_hash in enumerate(pool.block_hashes):
        expected = None if block_hash is None else (pool.block_group_ids[block_id], block_hash)
        _expect(f"block {block_id}: group and hash in the prefix index", expected, found.get(block_id))
    _expect("null block: hash", None, pool.block_hashes[NULL_BLOCK_ID])


def _check_tables(manager: CacheManager) -> None:
    for group in manager.groups:
        for request_id, table in group.tables.items():
            if table.num_cached_blocks > len(table.block_ids):
                _expect(
                    f"request {request_id!r}: cached blocks", f"at most {len(table.block_ids)}", table.num_cached_blocks
                )
    for request_id, limit in manager._quiet_limits_tokens.items():
        has_tables = all(request_id in group.tables for group in manager.groups)
        _expect(f"request {request_id!r}: a block table, as the decode shortcut knows it", True, has_tables)
        expected = manager._coordinator.quiet_limit_tokens(request_id)
        _expect(f"request {request_id!r}: decode shortcut's limit in tokens", expected, limit)
