"""One KV cache group: the block tables of its requests, and the arithmetic that every attention type shares.

In goes a request id and a demand in tokens; out come block ids from the pool. What differs between attention types is a
method that a subclass overrides: which cached blocks serve as a prefix (`match`), how many leading tokens no later
token looks at (`num_skipped_tokens`). A new attention type is one module beside this file and one line in
`groups/__init__.py`.

A position whose block no later token needs holds the null block, 0.

Longer than other files: planning, committing, caching and releasing read one table, and are read together.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, ClassVar

from vllm_kvplug.allocation import GroupPlan, SlotDemand
from vllm_kvplug.block_pool import NULL_BLOCK_ID, BlockPool
from vllm_kvplug.block_run import NO_HIT, Hit, RunPart
from vllm_kvplug.errors import CallError
from vllm_kvplug.geometry import GroupGeometry, num_blocks_for
from vllm_kvplug.groups.holding import take_all, take_out
from vllm_kvplug.groups.table import BlockTable, Hold
from vllm_kvplug.hash_row import HashRow
from vllm_kvplug.observers import ObserverSet

NO_LIMIT = sys.maxsize


class AttentionGroup(ABC):
    """Base of all groups. `tables` maps a request id to its `BlockTable`; others read it, only the group changes it.

    Attributes:
        any_shorter_prefix_serves: if a prefix can be hit, every shorter one can, too. So no request has a gap in its
            table, and lookups begin at its first block.
        num_blocks_beyond_hit: so many blocks after the hit must be cached, too, since a drafter needs what was matched
            last computed again.
    """

    any_shorter_prefix_serves: ClassVar[bool] = False
    _table_class: ClassVar[type[BlockTable]] = BlockTable
    # Whether a running request only ever takes blocks at its table's end, so that `grow` serves it.
    grows_plainly: ClassVar[bool] = True
    # Whether `release_skipped` has anything to do.
    releases_skipped: ClassVar[bool] = True

    def __init__(
        self,
        group_id: int,
        geometry: GroupGeometry,
        pool: BlockPool,
        observers: ObserverSet,
        *,
        num_hashes_per_block: int = 1,
        num_blocks_beyond_hit: int = 0,
        caches: bool = True,
    ) -> None:
        self.group_id = group_id
        self.geometry = geometry
        self._reports_new_blocks = geometry.reports_new_blocks
        self._has_short_way = num_hashes_per_block == 1 and not observers.on_cache
        self.num_tokens_per_block = geometry.num_tokens_per_block
        self.num_hashes_per_block = num_hashes_per_block
        self.num_blocks_beyond_hit = num_blocks_beyond_hit
        self._caches = caches
        self.tables: dict[str, Any] = {}
        self._pool = pool
        self._observers = observers
        # Rows of new ids. Nobody may ever ask (vLLM does so for some models only), and they must not grow for ever.
        self._unreported_rows: list[Sequence[int]] = []
        self._num_unreported_blocks = 0

    # What differs between attention types

    @classmethod
    @abstractmethod
    def min_num_blocks(cls, geometry: GroupGeometry, num_tokens: int, num_step_tokens: int = 1) -> int:
        """The fewest blocks that a request must hold in a step that computes the last `num_step_tokens` of its first
        `num_tokens` tokens; with a step of one token, in any step that computes the last of them.
        """

    @abstractmethod
    def match(self, block_hashes: Sequence[bytes], max_num_blocks: int, alignment_blocks: int = 1) -> Hit:
        """The longest prefix that this group could serve from the cache. Changes nothing.

        Args:
            block_hashes: the request's, each for one block of this group.
            max_num_blocks: not longer than this, what must be cached beyond not counted.
            alignment_blocks: its length is a multiple of this many blocks.

        Returns:
            Blocks by position, the null block where no later token looks.
        """

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that no token after the first `num_computed_tokens` looks at."""
        return 0

    def num_common_prefix_blocks(self, request_id: str) -> int:
        """Leading blocks of this request that every request with a table holds too. 0 where the kernels do not share
        them.
        """
        return 0

    def quiet_limit_of_window(self, table: BlockTable) -> int:
        """The most tokens that a request can grow to before `release_skipped` has something to free."""
        return NO_LIMIT

    def new_step_starts(self) -> None:  # noqa: B027  # most groups have nothing to do
        """The scheduler begins a step."""

    # Planning

    def note_hit_named(self, request: Any, hit: Hit) -> None:
        """A caller names a hit that no lookup of this moment found. Where that is another prefix than the request's,
        blocks that it caches do not follow those before them.
        """
        index = self._pool.indexes[self.group_id]
        if not index.by_head:
            return
        found = [run.block_hashes[offset : offset + num_blocks] for _, run, offset, num_blocks in hit.parts]
        if list(chain.from_iterable(found)) != list(self.hashes_of(request.block_hashes)[: len(hit)]):
            index.index_all_in_full()

    def check_admission(self, request_id: str, num_hit_blocks: int, *, is_admission: bool) -> None:
        """See that the request can have so many hits. Changes nothing.

        Raises:
            CallError: hits or external tokens for a request that cannot have them any more.
        """
        table = self.tables.get(request_id)
        if table is None:
            return
        num_held_blocks = len(table.block_ids)
        if num_hit_blocks and num_held_blocks:
            raise CallError(
                f"request {request_id!r}: expected no prefix hits for a request with blocks, found {num_hit_blocks}"
            )
        if is_admission and num_held_blocks and not table.is_admitted:
            raise CallError(
                f"request {request_id!r}: a lookup's answer and external tokens come before its first block; "
                f"it has {num_held_blocks}"
            )

    def plan(self, request_id: str, demand: SlotDemand, hit: Hit = NO_HIT, *, is_admission: bool) -> GroupPlan:
        """What serving `demand` would take from the pool. Changes nothing.

        Args:
            request_id: the request.
            demand: its tokens.
            hit: what its lookup found in this group.
            is_admission: the call brings a lookup's answer (hits or none) or external tokens.
        """
        table = self.tables.get(request_id)
        plan = self._plan_prefix(table, demand, hit) if is_admission else GroupPlan()
        num_positions = plan.num_prefix_positions + (len(table.block_ids) if table is not None else 0)
        plan.num_new_blocks = max(self._num_blocks(self._num_slot_tokens(demand)) - num_positions, 0)
        return plan

    def _plan_prefix(self, table: BlockTable | None, demand: SlotDemand, hit: Hit) -> GroupPlan:
        """The first part of a new request's table: what is skipped, then hits, then blocks for external tokens. Nothing
        for a request that has its prefix already.
        """
        if table is not None and table.is_admitted:
            return GroupPlan()
        num_present_tokens = demand.num_present_tokens
        num_skipped_tokens = max(self.num_skipped_tokens(num_present_tokens), 0)
        num_null_blocks = num_skipped_tokens // self.num_tokens_per_block
        num_hit_blocks = max(len(hit) - num_null_blocks, 0)
        hit_parts = hit.parts_from(num_null_blocks)
        num_external_tokens = demand.num_external_tokens
        if num_null_blocks:  # external tokens may be skipped, too
            num_external_tokens = min(num_external_tokens, num_present_tokens - num_skipped_tokens)
        num_external_blocks = 0
        if num_external_tokens > 0:
            num_external_blocks = self._num_blocks(num_present_tokens) - num_null_blocks - num_hit_blocks
        return GroupPlan(
            num_null_blocks=num_null_blocks,
            num_hit_blocks=num_hit_blocks,
            hit_parts=hit_parts,
            num_free_hit_blocks=num_free_among(hit_parts),
            num_external_blocks=max(num_external_blocks, 0),
        )

    def _num_slot_tokens(self, demand: SlotDemand) -> int:
        """Tokens that need a slot in this group."""
        return demand.num_slot_tokens

    # Committing: the coordinator takes each of these steps for all groups before the next one

    def admit(self, request_id: str, plan: GroupPlan, hit: Hit) -> None:
        """Give the request its hits."""
        table = self._table(request_id)
        if table.is_admitted:
            return
        table.is_admitted = True
        table.num_leading_nulls = plan.num_null_blocks
        table.num_cached_blocks = plan.num_null_blocks + plan.num_hit_blocks
        if plan.num_null_blocks:
            table.block_ids += [NULL_BLOCK_ID] * plan.num_null_blocks
        table.block_ids += hit.block_ids[plan.num_null_blocks :]
        acquire = self._pool.acquire
        for position, run, offset, num_blocks in plan.hit_parts:
            table.holds.append(Hold(position, acquire(run, offset, num_blocks), num_blocks))

    def take_external(self, request_id: str, plan: GroupPlan) -> None:
        """Give the request blocks for its external tokens."""
        if plan.num_external_blocks:
            self._take(self._table(request_id), plan.num_external_blocks)

    def take_new(self, request_id: str, plan: GroupPlan) -> list[int]:
        """Give the request the other new blocks, and answer them: the table's new positions."""
        return self._take(self._table(request_id), plan.num_new_blocks)

    def take_more(self, request_id: str, num_blocks: int) -> list[int]:
        """Give the request new blocks at its table's end, and answer them."""
        return self._take(self._table(request_id), num_blocks)

    def _take(self, table: BlockTable, num_blocks: int) -> list[int]:
        if not num_blocks:
            return []
        block_ids = self._pool.take(num_blocks)
        table.block_ids += block_ids
        if self._reports_new_blocks:
            self._unreported_rows.append(block_ids)
            self._num_unreported_blocks += num_blocks
            if self._num_unreported_blocks > 2 * self._pool.num_blocks:
                self._unreported_rows = [self.take_unreported_block_ids()]
                self._num_unreported_blocks = len(self._unreported_rows[0])
        return block_ids

    def num_missing_blocks(self, request_id: str, num_slot_tokens: int) -> int:
        """New blocks that a running request needs to have slots for so many tokens."""
        return max(-(-num_slot_tokens // self.num_tokens_per_block) - len(self.tables[request_id].block_ids), 0)

    def grow_alone(
        self, request: Any, num_slot_tokens: int, num_tokens_after_step: int
    ) -> tuple[tuple[Sequence[int], ...], int] | None:
        """`Coordinator.grow` where this is the only group and has no window: the shortest way for a decoding request,
        and for a new one without hits.

        Returns:
            `(new ids,)`, or () where there are none, and the quiet limit; None where the free blocks do not suffice or
            block hashes are missing, nothing was changed then.
        """
        table: BlockTable | None = self.tables.get(request.request_id)
        is_new = table is None
        if table is None:
            table = self._table_class()
        num_tokens_per_block = self.num_tokens_per_block
        row = table.block_ids
        limit = len(row) * num_tokens_per_block
        num_cached_blocks = num_full_blocks = table.num_cached_blocks
        next_full = (num_cached_blocks + 1) * num_tokens_per_block if self._caches else NO_LIMIT
        if num_tokens_after_step >= next_full:
            # Drafts may be rejected: only tokens that the request has for certain are cached.
            num_tokens = request.num_tokens
            num_full_blocks = (
                num_tokens_after_step if num_tokens_after_step < num_tokens else num_tokens
            ) // num_tokens_per_block
            if len(request.block_hashes) < num_full_blocks * self.num_hashes_per_block:
                return None
        rows: tuple[Sequence[int], ...] = ()
        if num_slot_tokens > limit:
            num_missing = -(-num_slot_tokens // num_tokens_per_block) - len(row)
            if num_missing > self._pool.num_free_blocks:
                return None
            rows = (self._take(table, num_missing),)
            limit += num_missing * num_tokens_per_block
        if is_new:
            self.tables[request.request_id] = table
        if num_full_blocks > num_cached_blocks:
            hold = table.growing
            if hold is not None and hold.run.grower is hold and num_full_blocks == num_cached_blocks + 1:
                table.num_cached_blocks = num_full_blocks
                hold.num_blocks += 1
                self._pool.cache_one_more(hold.run, row[num_cached_blocks], request.block_hashes[num_cached_blocks])
            else:
                self._cache_up_to(request, table, num_full_blocks)
            next_full += (table.num_cached_blocks - num_cached_blocks) * num_tokens_per_block
        return rows, limit if limit < next_full else next_full - 1

    # Caching

    def check_block_hashes(self, request: Any, num_tokens: int) -> None:
        """See that the request's first `num_tokens` tokens could be cached.

        Raises:
            CallError: the request has fewer block hashes than full blocks.
        """
        num_hashes = num_tokens // self.num_tokens_per_block * self.num_hashes_per_block
        if len(request.block_hashes) < num_hashes:
            raise CallError(
                f"request {request.request_id!r}: expected {num_hashes} block hashes for {num_tokens} tokens, "
                f"found {len(request.block_hashes)}"
            )

    def check_full_blocks(self, request_id: str, num_tokens: int) -> None:
        """See that the request has the blocks that its first `num_tokens` tokens fill.

        Raises:
            CallError: it has fewer.
        """
        num_blocks, num_held_blocks = num_tokens // self.num_tokens_per_block, len(self.block_ids(request_id))
        if num_held_blocks < num_blocks:
            raise CallError(
                f"request {request_id!r}: expected {num_blocks} blocks for {num_tokens} tokens, found {num_held_blocks}"
            )

    def hashes_of(self, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """A request's block hashes, each for one block of this group."""
        return block_hashes if self.num_hashes_per_block == 1 else HashRow(block_hashes, self.num_hashes_per_block)

    def cache_full_blocks(self, request: Any, num_tokens: int) -> None:
        """Put the request's blocks into the prefix cache that are full with its first `num_tokens` tokens.

        Raises:
            CallError: the request has fewer block hashes than full blocks.
        """
        self.check_block_hashes(request, num_tokens)
        end_block = num_tokens // self.num_tokens_per_block
        if not end_block:
            return
        table = self._table(request.request_id)
        if end_block > table.num_cached_blocks:
            self._cache_up_to(request, table, end_block)

    def _cache_up_to(self, request: Any, table: BlockTable, end_block: int) -> None:
        first_block = table.num_cached_blocks
        table.num_cached_blocks = end_block
        table.is_admitted = True
        if table.first_unpublished is not None:
            end_block = min(end_block, table.first_unpublished)
        if first_block < end_block:
            self._publish(request, table, first_block, end_block)

    def _publish(self, request: Any, table: BlockTable, first_block: int, end_block: int) -> None:
        """Make blocks findable, and tell."""
        all_hashes = self.hashes_of(request.block_hashes)
        row = table.block_ids
        end = min(end_block, len(row))
        first = first_block
        while first < end and row[first] == NULL_BLOCK_ID:
            first += 1
        if first < end:
            self._publish_run(table, all_hashes, first, end)
        for notify in self._observers.on_cache:
            notify(request, self.group_id, self.num_tokens_per_block, row, all_hashes, first_block, end_block)

    def _publish_run(self, table: BlockTable, all_hashes: Sequence[bytes], first: int, end: int) -> None:
        """The loose blocks at the positions `first` to `end` - 1."""
        hold = table.hold_to_grow(first)
        if hold is None:
            run = self._pool.cache(self.group_id, first, table.block_ids[first:end], all_hashes[first:end])
            table.holds.append(Hold(first, run, end - first))
            if self._has_short_way and table.first_unpublished is None:
                table.grow_from_now_on(table.holds[-1])
        elif end == first + 1:
            self._pool.cache_one_more(hold.run, table.block_ids[first], all_hashes[first])
            hold.num_blocks += 1
        else:
            self._pool.cache_more(hold.run, table.block_ids[first:end], all_hashes[first:end])
            hold.num_blocks += end - first

    def stop_publishing(self, request_id: str, first_bad_token: int) -> None:
        """A load into the block of this token failed: neither it nor anything after it goes into the prefix cache any
        more, and what is there already leaves it.
        """
        table = self.tables.get(request_id)
        if table is None:
            return
        first_bad = first_bad_token // self.num_tokens_per_block
        if table.first_unpublished is None or first_bad < table.first_unpublished:
            table.first_unpublished = first_bad
            table.growing = None
            for hold in table.holds:
                for position, run, _, num_blocks in hold.pieces():
                    self._pool.uncache(run, max(first_bad - position, 0), num_blocks)

    # A request's life

    def release_skipped(self, request_id: str, num_computed_tokens: int, num_confirmed_tokens: int) -> None:
        """Free the blocks that no later token of this request looks at, the last of them first.

        Args:
            request_id: the request; an unknown one has nothing to free.
            num_computed_tokens: its computed tokens, drafts that may yet be rejected included.
            num_confirmed_tokens: those of them that stay, whatever is rejected. (Mamba takes as many drafts as it has
                speculative blocks for as rejected instead.)
        """
        table = self.tables.get(request_id)
        if table is not None:
            self._release_leading(table, self.num_skipped_tokens(num_confirmed_tokens))

    def _release_leading(self, table: BlockTable, num_skipped_tokens: int) -> None:
        block_ids = table.block_ids
        num_skipped_blocks = min(num_skipped_tokens // self.num_tokens_per_block, len(block_ids))
        position = num_skipped_blocks
        # Nulls before a null were made by an earlier call.
        while position > 0 and block_ids[position - 1] != NULL_BLOCK_ID:
            position -= 1
        if position < num_skipped_blocks:
            released = take_out(self._pool, self.group_id, table, position, num_skipped_blocks)
            block_ids[position:num_skipped_blocks] = [NULL_BLOCK_ID] * (num_skipped_blocks - position)
            self._pool.release(released)

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request, the last first, so that the head of a prefix lives longest."""
        table = self.tables.pop(request_id, None)
        if table is None:
            return
        table.is_gone = True
        if table.first_unpublished is None:
            self._pool.release(take_all(self.group_id, table))
            return
        first_bad = max(table.first_unpublished, 0)
        end = len(table.block_ids)
        worthless = take_out(self._pool, self.group_id, table, first_bad, end)
        self._pool.release(worthless, is_worthless=True)
        self._pool.release(take_out(self._pool, self.group_id, table, 0, min(end, first_bad)))

    def block_ids(self, request_id: str) -> list[int]:
        """The request's table row, not a copy; empty for an unknown request."""
        table = self.tables.get(request_id)
        return table.block_ids if table is not None and table.block_ids else []

    def quiet_limit_tokens(self, request_id: str) -> int:
        """The most tokens that this request can grow to without anything to do here: no new block, none to release and,
        if it caches, none to cache.
        """
        table = self.tables.get(request_id)
        if table is None:
            return 0
        limit = self._capacity_tokens(table)
        if self.releases_skipped:
            limit = min(limit, self.quiet_limit_of_window(table))
        if not self._caches:
            return limit
        return min(limit, (table.num_cached_blocks + 1) * self.num_tokens_per_block - 1)

    def _capacity_tokens(self, table: BlockTable) -> int:
        return len(table.block_ids) * self.num_tokens_per_block

    def _first_held_position(self, table: BlockTable) -> int:
        """The first position that is no null block (the table's length if none is)."""
        position, block_ids = table.num_leading_nulls, table.block_ids
        while position < len(block_ids) and block_ids[position] == NULL_BLOCK_ID:
            position += 1
        table.num_leading_nulls = position
        return position

    def take_unreported_block_ids(self) -> list[int]:
        """Ids handed out since the last call, each once, in the order of their first handing out."""
        rows, self._unreported_rows, self._num_unreported_blocks = self._unreported_rows, [], 0
        return list(dict.fromkeys(chain.from_iterable(rows)))

    def _table(self, request_id: str) -> Any:
        table = self.tables.get(request_id)
        if table is None:
            table = self.tables[request_id] = self._table_class()
        return table

    def _num_blocks(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self.num_tokens_per_block)


def num_free_among(parts: Iterable[RunPart]) -> int:
    """How many of these blocks are free now (a hit takes them out of the free blocks)."""
    return sum([part.num_blocks for part in parts if not part.run.num_holders])
