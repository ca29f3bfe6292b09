"""What is known of single blocks: for views, checks, tests, and callers who name blocks by id, in time that grows with
the pool. What vLLM's scheduler calls in each step works with runs and never comes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvplug.block_run import Hit, RunPart
from vllm_kvplug.errors import CallError

if TYPE_CHECKING:
    from vllm_kvplug.block_pool import BlockPool


def num_holders(pool: BlockPool, block_id: int) -> int:
    """How many requests hold the block. A loose block is held by the one who took it."""
    place = pool.places().get(block_id)
    if place is not None:
        return place[0].num_holders
    return int(pool.num_reserved_blocks <= block_id and block_id not in pool.unused_block_ids())


def hash_and_group(pool: BlockPool, block_id: int) -> tuple[bytes, int] | None:
    """The hash that the block is cached under, and its KV cache group. None: not cached."""
    run, offset = pool.places().get(block_id, (None, 0))
    if run is None or offset >= len(run.block_hashes):
        return None
    block_hash = run.block_hashes[offset]
    return None if block_hash is None else (block_hash, run.group_id)


class BlockStates(NamedTuple):
    """All blocks of a pool at one moment; each row is by block id.

    Attributes:
        reference_counts: how many requests hold the block.
        block_hashes: the hash that it is cached under, or None.
        block_group_ids: the KV cache group whose index the hash is in; meaningful only with a hash.
    """

    reference_counts: list[int]
    block_hashes: list[bytes | None]
    block_group_ids: list[int]

    @classmethod
    def of(cls, pool: BlockPool) -> BlockStates:
        """As they are now."""
        counts = [1] * pool.num_blocks  # of loose blocks
        counts[: pool.num_reserved_blocks] = [0] * pool.num_reserved_blocks
        for block_id in pool.unused_block_ids():
            counts[block_id] = 0
        hashes: list[bytes | None] = [None] * pool.num_blocks
        group_ids = [0] * pool.num_blocks
        for block_id, (run, offset) in pool.places().items():
            counts[block_id] = run.num_holders
            if offset < len(run.block_hashes):
                hashes[block_id] = run.block_hashes[offset]
                group_ids[block_id] = run.group_id
        return cls(counts, hashes, group_ids)


def find_hit(pool: BlockPool, group_id: int, block_ids: Sequence[int], *, may_be_null: bool) -> Hit:
    """The blocks of a row as a hit of this group: each is cached in it, or null where it may be, and none named twice.

    Raises:
        CallError: one is not, or is not of this pool.
    """
    pool.check_block_ids(block_ids)
    num_nulls = block_ids.count(0)
    if num_nulls and not may_be_null:
        raise CallError(f"KV cache group {group_id}: expected no null block among the hits, found {num_nulls}")
    if len(block_ids) - num_nulls != len(set(block_ids)) - bool(num_nulls):
        raise CallError(f"KV cache group {group_id}: expected each hit once, found blocks {list(block_ids)}")
    places = pool.places()
    parts: list[RunPart] = []
    for position, block_id in enumerate(block_ids):
        if not block_id:
            continue
        run, offset = places.get(block_id, (None, 0))
        if run is None or offset >= len(run.block_hashes) or run.block_hashes[offset] is None:
            raise CallError(
                f"block {block_id}: expected a prefix hit of KV cache group {group_id}, found one that is not cached"
            )
        if run.group_id != group_id:
            raise CallError(
                f"block {block_id}: expected a prefix hit of KV cache group {group_id}, "
                f"found one of group {run.group_id}"
            )
        last = parts[-1] if parts else None
        if (
            last is not None
            and last.run is run
            and last.position + last.num_blocks == position
            and last.offset + last.num_blocks == offset
        ):
            parts[-1] = last._replace(num_blocks=last.num_blocks + 1)
        else:
            parts.append(RunPart(position, run, offset, 1))
    return Hit(block_ids, parts)
