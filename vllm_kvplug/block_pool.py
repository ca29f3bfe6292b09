"""The life of a block: unused -> held -> (full and cached) -> free but still cached -> reused.

The pool hands out block ids, keeps runs of blocks with their hashes and the number of their holders, owns the prefix
indexes and asks an eviction policy which free run is reused next. It knows no requests: who holds what is the groups'
business. Block 0 is the null block, a placeholder that is never handed out, freed, cached or counted; blocks 1 to n may
be reserved (the sinks of attention with sinks) and are no request's either.

A block that was handed out is *loose*, the business of the one who took it, until it is cached or given back: both make
it part of a run. Nothing here is kept for each block, so a pool of any size costs nothing at its start. What is known
of single blocks is in `block_states.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence

from vllm_kvplug.block_run import BlockRun
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
        policy: the order over the free runs, none in it yet.
        observers: whom to tell.
        num_reserved_blocks: leading blocks that nobody is given, the null block included.
        groups_by_head: those whose prefix index may have a run's first hash alone, see `prefix_index.py`.

    Attributes (read only for everybody else):
        policy: the eviction policy.
        indexes: by group, the prefix index.
        held_runs: runs that somebody holds (a dict used as a set).
        num_free_blocks: blocks that could be handed out now, those that are free but still cached included.
        version: another number after each change of what a lookup could find, or of the runs that it found.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int,
        policy: EvictionPolicy,
        observers: ObserverSet,
        num_reserved_blocks: int = 1,
        groups_by_head: Collection[int] = (),
    ) -> None:
        self.num_blocks = num_blocks
        self.num_reserved_blocks = num_reserved_blocks
        self.policy = policy
        self.indexes = tuple(PrefixIndex(by_head=group_id in groups_by_head) for group_id in range(num_groups))
        self.held_runs: dict[BlockRun, None] = {}
        self.num_usable_blocks = self.num_free_blocks = num_blocks - num_reserved_blocks
        self.version = 0
        self._observers = observers
        self._next_unused = num_reserved_blocks
        self._places: dict[int, tuple[BlockRun, int]] | None = None
        # Come before everything else, the first to be reused first; hardly ever any.
        self._worthless: deque[BlockRun] = deque()

    # Reading

    @property
    def num_held_blocks(self) -> int:
        """Blocks that a request holds."""
        return self.num_usable_blocks - self.num_free_blocks

    @property
    def usage(self) -> float:
        """Held part of the usable blocks, 0.0 to 1.0."""
        num_usable_blocks = self.num_usable_blocks
        # One minus the free part, not the held part: the same float as upstream reports.
        return 1.0 - self.num_free_blocks / num_usable_blocks if num_usable_blocks else 0.0

    def unused_block_ids(self) -> range:
        """Blocks that were never handed out, the next to be first."""
        return range(self._next_unused, self.num_blocks)

    def free_runs(self) -> Iterator[BlockRun]:
        """Free runs, the next to be reused first; the unused blocks come after those that are worth nothing."""
        yield from self._worthless
        yield from self.policy

    def free_block_ids(self) -> Iterator[int]:
        """All free blocks in the order of their reuse. For checks, views and tests: slow."""
        for run in self._worthless:
            yield from reversed(run.block_ids)
        yield from self.unused_block_ids()
        for run in self.policy:
            yield from reversed(run.block_ids)

    def places(self) -> Mapping[int, tuple[BlockRun, int]]:
        """By block id, the run that a block is in and its offset there. Unused and loose blocks are in none.

        Slow the first time after a change: looks at all runs.
        """
        if self._places is None:
            self._places = {
                block_id: (run, offset)
                for run in (*self.held_runs, *self.free_runs())
                for offset, block_id in enumerate(run.block_ids)
            }
        return self._places

    def check_block_ids(self, block_ids: Collection[int]) -> None:
        """See that the ids are this pool's.

        Raises:
            CallError: one is not.
        """
        for block_id in (min(block_ids), max(block_ids)) if block_ids else ():
            if not 0 <= block_id < self.num_blocks:
                raise CallError(f"block {block_id}: expected an id from 0 to {self.num_blocks - 1}")

    def _changed(self) -> None:
        """What a lookup could find, or the runs that it found, changed."""
        self.version += 1
        self._places = None

    # Taking and giving back

    def take(self, num_blocks: int) -> list[int]:
        """Hand out the next free blocks, loose; those that were cached leave the prefix cache.

        Raises:
            BlockError: fewer are free. Nothing was changed.
        """
        if not 0 <= num_blocks <= self.num_free_blocks:
            raise BlockError(
                f"cannot take {num_blocks} blocks from the pool: {self.num_free_blocks} of {self.num_blocks} are free"
            )
        first = self._next_unused
        end = first + num_blocks
        if end <= self.num_blocks and not self._worthless:
            self._next_unused = end
            block_ids = [*range(first, end)]
        elif num_blocks == 1 and not self._worthless:
            block_ids = [self._take_cached()]
        else:
            block_ids = self._take_several(num_blocks)
        self.num_free_blocks -= num_blocks
        for notify in self._observers.on_take:
            notify(block_ids)
        return block_ids

    def _take_cached(self) -> int:
        """The next free block, where all of them were used: what a decoding request takes."""
        run = self.policy.next_run()
        self._places = None
        block_id = run.block_ids.pop()
        if len(run.block_hashes) > len(run.block_ids):
            self._uncache_end(run, len(run.block_ids), [block_id])
        if not run.block_ids:
            self.policy.remove(run)
        return block_id

    def _take_several(self, num_blocks: int) -> list[int]:
        block_ids: list[int] = []
        worthless = self._worthless
        while worthless and len(block_ids) < num_blocks:
            run = worthless[0]
            block_ids += self._eat(run, num_blocks - len(block_ids))
            if not run.block_ids:
                worthless.popleft()
        first = self._next_unused
        if first < self.num_blocks:
            self._next_unused = min(first + num_blocks - len(block_ids), self.num_blocks)
            block_ids += range(first, self._next_unused)
        policy = self.policy
        while len(block_ids) < num_blocks:
            run = policy.next_run()
            block_ids += self._eat(run, num_blocks - len(block_ids))
            if not run.block_ids:
                policy.remove(run)
        return block_ids

    def _eat(self, run: BlockRun, max_num_blocks: int) -> list[int]:
        """Take blocks off the end of a free run, the last first."""
        self._places = None
        num_left = len(run.block_ids) - max_num_blocks
        if num_left > 0:
            block_ids = run.block_ids[num_left:]
            del run.block_ids[num_left:]
        else:
            num_left, block_ids, run.block_ids = 0, run.block_ids, []
        block_ids.reverse()
        if num_left < len(run.block_hashes):
            self._uncache_end(run, num_left, block_ids)
        return block_ids

    def acquire(self, run: BlockRun, offset: int, num_blocks: int) -> BlockRun:
        """Hold some blocks of a run that a lookup found: the answer is a run of these alone, held once more.

        Where the run was split since then (for another part of the same hit), `offset` counts on in its rest.
        """
        while offset >= len(run.block_ids):
            assert run.rest is not None
            offset -= len(run.block_ids)
            run = run.rest
        if offset:
            run = self.split(run, offset)
        if num_blocks < len(run.block_ids):
            self.split(run, num_blocks)
        if not run.num_holders:
            self.policy.remove(run)
            self.num_free_blocks -= num_blocks
            self.held_runs[run] = None
        run.num_holders += 1
        run.grower = None
        for notify in self._observers.on_acquire:
            notify(run.block_ids.copy())
        return run

    def release(self, runs: Sequence[BlockRun], *, is_worthless: bool = False) -> None:
        """Give up one hold on each run, in this order; a run that nobody holds any more becomes free, and its blocks
        stay cached. Worthless ones are reused before all others.

        Raises:
            BlockError: a run is not held (as often as it is named). Nothing was changed.
        """
        freed: list[BlockRun] = []
        for position, run in enumerate(runs):
            run.num_holders -= 1
            if run.num_holders <= 0:
                if run.num_holders < 0:
                    for undone in runs[: position + 1]:
                        undone.num_holders += 1
                    raise BlockError(f"cannot free {run!r}: expected one that is held, found one that nobody holds")
                freed.append(run)
        self._places = None  # there may be runs of blocks among them that were loose until now
        for run in freed:
            run.grower = run.rest = None
            self.num_free_blocks += len(run.block_ids)
            self.held_runs.pop(run, None)
        if is_worthless:
            self._worthless.extendleft(reversed(freed))
        else:
            self.policy.push(freed)
        for notify in self._observers.on_release:
            for run in runs:
                notify(run.block_ids[::-1])

    def split(self, run: BlockRun, num_blocks: int) -> BlockRun:
        """Cut a run behind its first `num_blocks` blocks: the others are a run of their own from now on, the answer.

        Whoever holds the run holds both, and finds the second as the first's `rest`.
        """
        rest = BlockRun(run.block_ids[num_blocks:], run.group_id, run.first_position + num_blocks, run.num_holders)
        del run.block_ids[num_blocks:]
        rest.block_hashes = run.block_hashes[num_blocks:]
        del run.block_hashes[num_blocks:]
        run.grower = None
        rest.rest, run.rest = run.rest, rest
        self._move(rest.block_hashes, run, rest)
        if run.num_holders:
            self.held_runs[rest] = None
        elif run in self._worthless:
            self._worthless.insert(self._worthless.index(run), rest)
        else:
            self.policy.split(run, rest)
        return rest

    def cut_head(self, run: BlockRun, num_blocks: int) -> BlockRun:
        """Cut the first `num_blocks` blocks off a run that only the caller holds, and who knows of it: the answer is a
        run of these, the run has the others. The other way round than `split`, for a window that moves over a long run.
        """
        head = BlockRun(run.block_ids[:num_blocks], run.group_id, run.first_position, run.num_holders)
        del run.block_ids[:num_blocks]
        head.block_hashes = run.block_hashes[:num_blocks]
        del run.block_hashes[:num_blocks]
        run.first_position += num_blocks
        self._move(head.block_hashes, run, head)
        self.held_runs[head] = None
        return head

    def _move(self, block_hashes: Sequence[bytes | None], run: BlockRun, to_run: BlockRun) -> None:
        self._changed()
        if block_hashes:
            to_run.is_intact = self.indexes[run.group_id].move(block_hashes, run, to_run)

    # Caching

    def cache(
        self, group_id: int, first_position: int, block_ids: list[int], block_hashes: Sequence[bytes]
    ) -> BlockRun:
        """Make loose blocks that are full findable: `block_ids[i]` holds the tokens of `block_hashes[i]`. The answer is
        a run of them, held once.
        """
        run = BlockRun(block_ids, group_id, first_position, 1)
        self.held_runs[run] = None
        run.block_hashes += block_hashes
        self._changed()
        self.indexes[group_id].add(run)
        return run

    def cache_more(self, run: BlockRun, block_ids: list[int], block_hashes: Sequence[bytes]) -> None:
        """The same, at the end of a run that only the caller holds, all of whose blocks are cached."""
        self._changed()
        self.indexes[run.group_id].add_more(run, block_hashes)
        run.block_ids += block_ids
        run.block_hashes += block_hashes

    def cache_one_more(self, run: BlockRun, block_id: int, block_hash: bytes) -> None:
        """The same for one block: what a decoding request does."""
        self.version += 1
        self._places = None
        index = self.indexes[run.group_id]
        if not index.by_head:
            if index.runs.setdefault(block_hash, run) is not run:
                index.set_aside(block_hash, run)
        elif not run.indexed_by_head or block_hash in index.runs:
            index.add_more(run, (block_hash,))
        run.block_ids.append(block_id)
        run.block_hashes.append(block_hash)

    def uncache(self, run: BlockRun, offset: int, num_blocks: int) -> None:
        """Take those of these blocks of a run out of the prefix cache that are in it. Who holds them keeps them."""
        end = min(offset + num_blocks, len(run.block_hashes))
        if offset >= end:
            return
        self._changed()
        run.grower = None
        index_of_run = self.indexes[run.group_id]
        if run.num_holders > 1:
            # Not all of them need know that the hashes are gone: who does not goes on caching behind them.
            index_of_run.index_all_in_full()
        index_of_run.index_in_full(run)
        for index in range(offset, end):
            block_hash = run.block_hashes[index]
            if block_hash is not None:
                self._remove_one(block_hash, run, run.block_ids[index])
                run.block_hashes[index] = None
        if end == len(run.block_hashes):
            del run.block_hashes[offset:]
        else:
            run.is_intact = False

    def evict(self, block_ids: Collection[int]) -> None:
        """Take blocks out of the prefix cache, held or free. Who holds them keeps them; blocks that are not cached are
        passed over. Slow: looks at all runs.

        Raises:
            CallError: an id is outside the pool. Nothing was changed.
        """
        odd = [block_id for block_id in block_ids if not isinstance(block_id, int)]
        if odd:
            raise CallError(f"block ids: expected ints, found {odd[0]!r}")
        self.check_block_ids(block_ids)
        for notify in self._observers.on_withdraw:
            notify(block_ids)
        places = self.places()
        for block_id in block_ids:
            if block_id in places:
                self.uncache(*places[block_id], 1)

    def _uncache_end(self, run: BlockRun, num_left: int, block_ids: list[int]) -> None:
        """Drop the hashes of blocks that were taken off a run's end; `block_ids` are these, the last first."""
        if num_left:
            block_hashes = run.block_hashes[num_left:]
            del run.block_hashes[num_left:]
        else:
            block_hashes, run.block_hashes = run.block_hashes, []
        self.version += 1
        observers = self._observers.on_evict
        if run.indexed_by_head or (run.is_intact and not observers):
            self.indexes[run.group_id].remove_end(run, block_hashes)  # type: ignore[arg-type]  # none is missing
            if not observers:
                return
        block_hashes.reverse()
        evicted = zip(block_hashes, block_ids[len(block_ids) - len(block_hashes) :], strict=True)
        if run.indexed_by_head:
            for block_hash, block_id in evicted:
                for notify in observers:
                    notify(block_id, run.group_id, block_hash, True)
            return
        for block_hash, block_id in evicted:
            if block_hash is not None:
                self._remove_one(block_hash, run, block_id)

    def _remove_one(self, block_hash: bytes, run: BlockRun, block_id: int) -> None:
        is_last_copy = self.indexes[run.group_id].remove_one(block_hash, run)
        for notify in self._observers.on_evict:
            notify(block_id, run.group_id, block_hash, is_last_copy)

    def reset(self) -> bool:
        """Drop the whole prefix cache. Answers False, and changes nothing, while a request holds a block."""
        if self.num_held_blocks:
            return False
        for index in self.indexes:
            index.clear()
        for run in self.free_runs():
            run.block_hashes.clear()
            run.is_intact, run.indexed_by_head = True, False
        self._changed()
        for notify in self._observers.on_reset:
            notify()
        return True
