"""Single blocks of a pool that works with runs: what upstream's structure allows to do to each block by itself.

Whoever names a block gets it as a run of its own: the run that it is in is split around it, which changes nothing for
those who hold it. What is done to it then is what upstream's own fields allow, also in steps between which the pool
contradicts itself (out of the queue, not yet counted). Slow: each step looks at all runs. A loose block, one that a
request took and has not cached yet, is its block table's alone, which must stay right: it can be read, not changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vllm_kvplug.block_pool import NULL_BLOCK_ID, BlockPool
from vllm_kvplug.block_run import BlockRun, Hit, RunPart
from vllm_kvplug.block_states import hash_and_group, num_holders
from vllm_kvplug.errors import BlockError


class SingleBlocks:
    """The blocks of a pool, one by one."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def run(self, block_id: int) -> BlockRun:
        """The block as a run of its own.

        Raises:
            CallError: the id is not of this pool.
            BlockError: the block is loose.
        """
        pool = self._pool
        pool.check_block_ids([block_id])
        for index in pool.indexes:
            index.index_all_in_full()  # whoever asks for this holds and caches what they like
        if block_id in pool.unused_block_ids() or any(block_id in run.block_ids for run in pool._worthless):
            self._settle()
        run, offset = pool.places().get(block_id, (None, 0))
        if run is None:
            if block_id >= pool.num_reserved_blocks:
                raise BlockError(
                    f"cannot change block {block_id}: expected it cached or free, found it a request's own"
                )
            run, offset = BlockRun([block_id], 0, 0, 0), 0
            self._keep(run)
        if offset:
            run = pool.split(run, offset)
        if len(run.block_ids) > 1:
            pool.split(run, 1)
        run.grower = None  # something happens to it
        return run

    def _settle(self) -> None:
        """Let the policy have all free blocks, in the order that they are in: those that the pool itself keeps, since
        they are worth nothing or were never used, come first.
        """
        pool = self._pool
        runs = [*pool._worthless]
        if pool.unused_block_ids():
            runs.append(BlockRun([*reversed(pool.unused_block_ids())], 0, 0, 0))
        pool._worthless.clear()
        pool._next_unused = pool.num_blocks
        others = list(pool.policy)
        for run in others:
            pool.policy.remove(run)
        pool.policy.push([*runs, *others])
        pool._changed()

    def _keep(self, run: BlockRun) -> None:
        """A run that is in no order: held, or on its way."""
        self._pool.held_runs[run] = None
        self._pool._changed()

    # References

    def set_num_holders(self, block_id: int, count: int) -> None:
        """Let the block count so many holders. Its place among the free blocks is the caller's business; what the null
        block counts is nobody's, and is not kept.
        """
        if block_id != NULL_BLOCK_ID and count != num_holders(self._pool, block_id):
            self.run(block_id).num_holders = count

    def take(self, num_blocks: int) -> list[int]:
        """Hand out the next free blocks, each held once. They are nobody's own."""
        block_ids = self._pool.take(num_blocks)
        for block_id in block_ids:
            self._keep(BlockRun([block_id], 0, 0, 1))
        return block_ids

    def hold(self, block_ids: Sequence[int]) -> None:
        """Hold blocks once more; null blocks are passed over."""
        for block_id in block_ids:
            if block_id != NULL_BLOCK_ID:
                self._hold_one(block_id)
        for notify in self._pool._observers.on_acquire:
            notify(block_ids)

    def _hold_one(self, block_id: int) -> None:
        self.check_usable(block_id, "hold")
        run = self.run(block_id)
        if not run.num_holders and run not in self._pool.held_runs:
            self.remove_free(block_id)
        run.num_holders += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up one hold on each block, in this order; null blocks are passed over.

        Raises:
            BlockError: a block is not held as often as it is named. Nothing was changed.
        """
        block_ids = [block_id for block_id in block_ids if block_id != NULL_BLOCK_ID]
        for block_id, count in Counter(block_ids).items():
            self.check_usable(block_id, "free")
            if self.run(block_id).num_holders < count:
                raise BlockError(
                    f"cannot free block {block_id}: expected it held, found one that nobody holds (any more)"
                )
        self._pool.release([self.run(block_id) for block_id in block_ids])

    def check_usable(self, block_id: int, what: str) -> None:
        """See that the block is one that requests can hold.

        Raises:
            BlockError: it is not.
        """
        first, end = self._pool.num_reserved_blocks, self._pool.num_blocks
        if not first <= block_id < end:
            raise BlockError(f"cannot {what} block {block_id}: expected one of this pool, {first} to {end - 1}")

    def make_loose(self, block_id: int) -> None:
        """Hand the block to a table, whose own it is from now on: a free one, or one that was handed out to nobody."""
        run = self.run(block_id)
        if run not in self._pool.held_runs:
            self.remove_free(block_id)
        del self._pool.held_runs[run]
        self._pool._changed()

    # The order of free blocks

    def remove_free(self, block_id: int) -> None:
        """Take the block out of the order of free blocks, whoever counts as its holder."""
        run, pool = self.run(block_id), self._pool
        if run in pool.held_runs:
            raise BlockError(f"cannot take block {block_id} out of the free blocks: expected it there, found it held")
        pool.policy.remove(run)
        pool.num_free_blocks -= 1
        self._keep(run)

    def append_free(self, block_ids: Sequence[int]) -> None:
        """Put blocks at the end of the order of free blocks, whoever counts as their holder."""
        for block_id in block_ids:
            self.check_usable(block_id, "free")
            run, pool = self.run(block_id), self._pool
            if run not in pool.held_runs:
                raise BlockError(f"cannot free block {block_id}: expected it not among the free blocks, found it there")
            del pool.held_runs[run]
            pool.policy.push([run])
            pool.num_free_blocks += 1
            pool._changed()

    # The prefix cache

    def cache(self, group_id: int, block_id: int, block_hash: bytes) -> None:
        """Make the block findable; one that is so already stays as it is.

        Raises:
            BlockError: it is cached under another hash.
        """
        cached_as = hash_and_group(self._pool, block_id)
        if cached_as == (block_hash, group_id):
            return
        if cached_as is not None:
            raise BlockError(f"cannot cache block {block_id}: it is cached already, in group {cached_as[1]}")
        run = self.run(block_id)
        run.group_id, run.block_hashes, run.is_intact = group_id, [block_hash], True
        self._pool._changed()
        self._pool.indexes[group_id].add(run)

    def uncache(self, block_id: int) -> None:
        """Take a block that is cached out of the prefix cache. No observer is told: nothing says that it is over."""
        cached_as = hash_and_group(self._pool, block_id)
        if cached_as is None:
            return
        run = self.run(block_id)
        self._pool.indexes[cached_as[1]].remove_one(cached_as[0], run)
        run.block_hashes, run.is_intact = [], True
        self._pool._changed()

    # Hits that the caller names

    def hit(self, group_id: int, block_ids: Sequence[int], *, is_for_plan: bool) -> Hit:
        """These blocks as a hit, cached or not. `is_for_plan`: to be looked at only, so no run is split for it."""
        self._pool.check_block_ids(block_ids)
        part_of = self._stand_in if is_for_plan else lambda _, block_id: self._ready_run(block_id)
        parts = [
            RunPart(position, part_of(group_id, block_id), 0, 1)
            for position, block_id in enumerate(block_ids)
            if block_id != NULL_BLOCK_ID
        ]
        return Hit(list(block_ids), parts)

    def _stand_in(self, group_id: int, block_id: int) -> BlockRun:
        run = BlockRun([block_id], group_id, 0, num_holders(self._pool, block_id))
        cached_as = hash_and_group(self._pool, block_id)
        run.block_hashes = [None if cached_as is None else cached_as[0]]
        return run

    def _ready_run(self, block_id: int) -> BlockRun:
        """The block's run, where the pool looks for one that is hit: held, or in the policy's order."""
        self.check_usable(block_id, "hold")
        run = self.run(block_id)
        if not run.num_holders and run in self._pool.held_runs:
            self.append_free([block_id])
        return run
