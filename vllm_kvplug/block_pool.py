"""The life of a block: unused -> held -> (full and cached) -> free but still cached -> reused.

The pool counts references, keeps the hash of every cached block, owns the prefix indexes and asks an eviction policy
which free block is reused next. It knows no requests: who holds what is the groups' business. Block 0 is the null
block, a placeholder that is never handed out, freed, cached or counted; blocks 1 to n may be reserved (the sinks of
attention with sinks) and are no request's either.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence

from vllm_kvplug.block import BlockView
from vllm_kvplug.errors import BlockError, CallError
from vllm_kvplug.eviction.base import EvictionPolicy
from vllm_kvplug.observers import ObserverSet
from vllm_kvplug.prefix_index import PrefixIndex

NULL_BLOCK_ID = 0


class BlockPool:
    """All blocks of one KV cache.

    Args:
        num_blocks: blocks in the pool, the null block and reserved ones included.
        num_groups: KV cache groups, each with a prefix index of its own.
        free_blocks: the order over the free blocks; fresh, every block but the null block in it.
        observers: whom to tell.
        num_reserved_blocks: leading blocks that nobody is given, the null block included.

    Attributes (read only for everybody else):
        reference_counts: by block id, how many requests hold the block.
        block_hashes: by block id, the hash that the block is cached under, or None.
        block_group_ids: by block id, the KV cache group whose index the hash is in; meaningful only with a hash.
        free_blocks: the eviction policy, an order over the free blocks.
        indexes: by group, the prefix index.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int,
        free_blocks: EvictionPolicy,
        observers: ObserverSet,
        num_reserved_blocks: int = 1,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_reserved_blocks = num_reserved_blocks
        self.free_blocks = free_blocks
        if num_reserved_blocks > 1:
            reserved = free_blocks.pop(num_reserved_blocks - 1)
            if reserved != list(range(1, num_reserved_blocks)):
                raise BlockError(
                    f"reserved blocks: expected ids 1 to {num_reserved_blocks - 1} first in the fresh order of "
                    f"{type(free_blocks).__name__}, found {reserved}"
                )
        self.reference_counts = [0] * num_blocks
        self.block_hashes: list[bytes | None] = [None] * num_blocks
        self.block_group_ids = array("H", bytes(2 * num_blocks))
        self.indexes = tuple(PrefixIndex() for _ in range(num_groups))
        self._observers = observers

    # Reading

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now, those that are free but still cached included."""
        return len(self.free_blocks)

    @property
    def num_held_blocks(self) -> int:
        """Blocks that a request holds."""
        return self.num_usable_blocks - len(self.free_blocks)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold."""
        return self.num_blocks - self.num_reserved_blocks

    @property
    def usage(self) -> float:
        """Held part of the usable blocks, 0.0 to 1.0."""
        num_usable_blocks = self.num_usable_blocks
        # One minus the free part, not the held part: the same float as upstream reports.
        return 1.0 - len(self.free_blocks) / num_usable_blocks if num_usable_blocks else 0.0

    def view(self, block_id: int) -> BlockView:
        """An object for a block id; equal to every other one for it."""
        return BlockView(self, block_id)

    def match(self, group_id: int, block_hashes: Iterable[bytes], max_num_blocks: int) -> list[int]:
        """Block ids of the longest cached leading run, at most `max_num_blocks`. Changes nothing."""
        return self.indexes[group_id].match(block_hashes, max_num_blocks)

    def check_block_ids(self, block_ids: Collection[int]) -> None:
        """See that the ids are this pool's.

        Raises:
            CallError: one is not.
        """
        for block_id in (min(block_ids), max(block_ids)) if block_ids else ():
            if not 0 <= block_id < self.num_blocks:
                raise CallError(f"block {block_id}: expected an id from 0 to {self.num_blocks - 1}")

    def check_hits(self, group_id: int, block_ids: Sequence[int], *, may_be_null: bool) -> None:
        """See that each of the blocks is cached in this group, or null where it may be, and none is named twice.

        Raises:
            CallError: one is not, or is not of this pool.
        """
        self.check_block_ids(block_ids)
        num_nulls = block_ids.count(NULL_BLOCK_ID)
        if num_nulls and not may_be_null:
            raise CallError(f"KV cache group {group_id}: expected no null block among the hits, found {num_nulls}")
        if len(block_ids) - num_nulls != len(set(block_ids)) - bool(num_nulls):
            raise CallError(f"KV cache group {group_id}: expected each hit once, found blocks {list(block_ids)}")
        hashes, group_ids = self.block_hashes, self.block_group_ids
        for block_id in block_ids:
            if block_id != NULL_BLOCK_ID and (hashes[block_id] is None or group_ids[block_id] != group_id):
                found = "one that is not cached" if hashes[block_id] is None else f"one of group {group_ids[block_id]}"
                raise CallError(f"block {block_id}: expected a prefix hit of KV cache group {group_id}, found {found}")

    def num_free_among(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks are free now (a hit takes them out of the free blocks)."""
        counts = self.reference_counts
        return sum(1 for block_id in block_ids if not counts[block_id] and block_id != NULL_BLOCK_ID)

    # Taking and giving back

    def take(self, num_blocks: int) -> list[int]:
        """Hand out the next free blocks, each held once; those that were cached leave the prefix cache.

        Raises:
            BlockError: fewer are free. Nothing was changed.
        """
        if not 0 <= num_blocks <= len(self.free_blocks):
            raise BlockError(
                f"cannot take {num_blocks} blocks from the pool: {len(self.free_blocks)} of {self.num_blocks} are free"
            )
        block_ids = self.free_blocks.pop(num_blocks)
        counts, hashes = self.reference_counts, self.block_hashes
        for block_id in block_ids:
            counts[block_id] = 1
            if hashes[block_id] is not None:
                self._drop_hash(block_id)
        for notify in self._observers.on_take:
            notify(block_ids)
        return block_ids

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Hold blocks that a lookup found: one reference more each; free ones leave the free blocks.

        Raises:
            CallError: an id is outside the pool. Nothing was changed.
        """
        self.check_block_ids(block_ids)
        counts = self.reference_counts
        for block_id in block_ids:
            if block_id == NULL_BLOCK_ID:
                continue
            if not counts[block_id]:
                self.free_blocks.remove(block_id)
            counts[block_id] += 1
        for notify in self._observers.on_acquire:
            notify(block_ids)

    def release(self, block_ids: Sequence[int], *, is_worthless: bool = False) -> None:
        """Give up one reference on each block, in this order; a block that nobody holds any more becomes free and stays
        cached. Worthless ones are reused before all others.

        Raises:
            BlockError: a block is not held (as often as it is named). Nothing was changed.
        """
        counts = self.reference_counts
        freed: list[int] = []
        first_usable = self.num_reserved_blocks
        for position, block_id in enumerate(block_ids):
            count = counts[block_id] - 1 if first_usable <= block_id < self.num_blocks else -1
            if count > 0:
                counts[block_id] = count
            elif count == 0:
                counts[block_id] = 0
                freed.append(block_id)
            elif block_id != NULL_BLOCK_ID:
                for undone in block_ids[:position]:
                    counts[undone] += undone != NULL_BLOCK_ID
                raise BlockError(
                    f"cannot free block {block_id}: expected a held block of this pool "
                    f"({first_usable} to {self.num_blocks - 1}), "
                    "found one that nobody holds (freed twice?)"
                )
        if is_worthless:
            self.free_blocks.push_first(freed)
        else:
            self.free_blocks.push(freed)
        for notify in self._observers.on_release:
            notify(block_ids)

    # Caching

    def cache(self, group_id: int, block_ids: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Make full blocks findable: `block_ids[i]` holds the tokens of `block_hashes[i]`. Null blocks are skipped.

        Raises:
            BlockError: a block is cached already, or there are not as many hashes as blocks. Nothing was changed.
        """
        if len(block_ids) != len(block_hashes):
            raise BlockError(
                f"cannot cache {len(block_ids)} blocks: expected as many hashes, found {len(block_hashes)}"
            )
        hashes, group_ids, insert = self.block_hashes, self.block_group_ids, self.indexes[group_id].insert
        for block_id in block_ids:
            if hashes[block_id] is not None:
                raise BlockError(f"cannot cache block {block_id}: it is cached already, in group {group_ids[block_id]}")
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            if block_id == NULL_BLOCK_ID:
                continue
            hashes[block_id] = block_hash
            group_ids[block_id] = group_id
            insert(block_hash, block_id)

    def evict(self, block_ids: Collection[int]) -> None:
        """Take blocks out of the prefix cache, held or free. Who holds them keeps them; blocks that are not cached are
        passed over.

        Raises:
            CallError: an id is outside the pool. Nothing was changed.
        """
        odd = [block_id for block_id in block_ids if not isinstance(block_id, int)]
        if odd:
            raise CallError(f"block ids: expected ints, found {odd[0]!r}")
        self.check_block_ids(block_ids)
        for notify in self._observers.on_withdraw:
            notify(block_ids)
        self.uncache(block_ids)

    def uncache(self, block_ids: Collection[int]) -> None:
        """Take those of these blocks out of the prefix cache that are cached."""
        for block_id in block_ids:
            if self.block_hashes[block_id] is not None:
                self._drop_hash(block_id)

    def reset(self) -> bool:
        """Drop the whole prefix cache. Answers False, and changes nothing, while a request holds a block."""
        if self.num_held_blocks:
            return False
        for index in self.indexes:
            index.clear()
        self.block_hashes = [None] * self.num_blocks
        for notify in self._observers.on_reset:
            notify()
        return True

    def _drop_hash(self, block_id: int) -> None:
        block_hash, group_id = self.block_hashes[block_id], self.block_group_ids[block_id]
        assert block_hash is not None
        is_last_copy = self.indexes[group_id].remove(block_hash, block_id)
        self.block_hashes[block_id] = None
        for notify in self._observers.on_evict:
            notify(block_id, group_id, block_hash, is_last_copy)
