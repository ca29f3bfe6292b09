"""What tests of the pool and its runs read of it, block by block."""

from __future__ import annotations

from typing import Any

from vllm_kvplug.block_pool import BlockPool
from vllm_kvplug.block_run import BlockRun
from vllm_kvplug.block_states import BlockStates
from vllm_kvplug.eviction.lru import LRUEviction
from vllm_kvplug.manager import CacheManager
from vllm_kvplug.observers import Observer, ObserverSet


def make_pool(num_blocks: int = 6, *observers: Observer, num_reserved_blocks: int = 1) -> BlockPool:
    """A pool with nothing taken yet."""
    return BlockPool(num_blocks, 1, LRUEviction(), ObserverSet(observers), num_reserved_blocks)


def snapshot(pool: BlockPool) -> Any:
    """All that a refused call must leave as it was."""
    return BlockStates.of(pool), free_ids(pool), [dict(index.items()) for index in pool.indexes], pool.usage


def free_ids(pool: BlockPool) -> list[int]:
    """The free blocks, the next to be reused first."""
    return list(pool.free_block_ids())


def loose_run(*block_ids: int) -> BlockRun:
    """Loose blocks, as they are given back."""
    return BlockRun(list(block_ids), 0, 0, 1)


def cached_run(pool: BlockPool, block_hashes: list[bytes], first_position: int = 0, group_id: int = 0) -> BlockRun:
    """Take as many blocks and cache them: a run that is held once."""
    return pool.cache(group_id, first_position, pool.take(len(block_hashes)), block_hashes)


def chain(run: BlockRun) -> list[list[int]]:
    """The ids of a run, and of what was split off behind it."""
    ids = []
    rest: BlockRun | None = run
    while rest is not None:
        ids.append(list(rest.block_ids))
        rest = rest.rest
    return ids


def match_ids(pool: BlockPool, block_hashes: list[bytes], group_id: int = 0) -> list[int]:
    """The blocks that a lookup finds."""
    return list(pool.indexes[group_id].match(block_hashes, len(block_hashes)).block_ids)


def isolate(pool: BlockPool, block_id: int) -> BlockRun:
    """The block as a run of its own."""
    run, offset = pool.places()[block_id]
    if offset:
        run = pool.split(run, offset)
    if len(run.block_ids) > 1:
        pool.split(run, 1)
    return run


def damage(manager: CacheManager, block_id: int) -> None:
    """Let a block of a run, or one that was never used, count a holder too many."""
    pool = manager.pool
    if block_id in pool.places():
        isolate(pool, block_id).num_holders += 1
    else:
        pool.held_runs[BlockRun([block_id], 0, 0, 1)] = None
        pool._places = None
