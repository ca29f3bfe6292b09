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
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from vllm_kvplug.allocation import GroupPlan, SlotDemand
from vllm_kvplug.block_pool import NULL_BLOCK_ID, BlockPool
from vllm_kvplug.errors import CallError
from vllm_kvplug.geometry import GroupGeometry, num_blocks_for
from vllm_kvplug.groups.table import BlockTable
from vllm_kvplug.hash_row import HashRow
from vllm_kvplug.observers import ObserverSet

NO_LIMIT = sys.maxsize


class AttentionGroup(ABC):
    """Base of all groups. `tables` maps a request id to its `BlockTable`; others read it, only the group changes it.

    Attributes:
        any_shorter_prefix_serves: if a prefix can be hit, every shorter one can, too.
        num_blocks_beyond_hit: so many blocks after the hit must be cached, too, since a drafter needs what was matched
            last computed again.
    """

    any_shorter_prefix_serves: ClassVar[bool] = False
    _table_class: ClassVar[type[BlockTable]] = BlockTable

    def __init__(
        self,
        group_id: int,
        geometry: GroupGeometry,
        pool: BlockPool,
        observers: ObserverSet,
        *,
        num_hashes_per_block: int = 1,
        num_blocks_beyond_hit: int = 0,
    ) -> None:
        self.group_id = group_id
        self.geometry = geometry
        self.num_tokens_per_block = geometry.num_tokens_per_block
        self.num_hashes_per_block = num_hashes_per_block
        self.num_blocks_beyond_hit = num_blocks_beyond_hit
        self.tables: dict[str, Any] = {}
        self._pool = pool
        self._observers = observers
        # An ordered set: nobody may ever ask (vLLM does so for some models only), and it must not grow for ever.
        self._unreported_block_ids: dict[int, None] = {}

    # What differs between attention types

    @classmethod
    @abstractmethod
    def min_num_blocks(cls, geometry: GroupGeometry, num_tokens: int, num_step_tokens: int = 1) -> int:
        """The fewest blocks that a request must hold in a step that computes the last `num_step_tokens` of its first
        `num_tokens` tokens; with a step of one token, in any step that computes the last of them.
        """

    @abstractmethod
    def match(self, block_hashes: Sequence[bytes], max_num_blocks: int, alignment_blocks: int = 1) -> list[int]:
        """The longest prefix that this group could serve from the cache. Changes nothing.

        Args:
            block_hashes: the request's, each for one block of this group.
            max_num_blocks: not longer than this, what must be cached beyond not counted.
            alignment_blocks: its length is a multiple of this many blocks.

        Returns:
            Block ids by position, the null block where no later token looks.
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

    def check_admission(self, request_id: str, hit_block_ids: Sequence[int], *, is_admission: bool) -> None:
        """See that the request can have these hits. Changes nothing.

        Raises:
            CallError: hits or external tokens for a request that cannot have them any more, or blocks that no lookup of
                this group can have found.
        """
        self._pool.check_hits(self.group_id, hit_block_ids, may_be_null=not self.any_shorter_prefix_serves)
        table = self.tables.get(request_id)
        if table is None:
            return
        num_held_blocks = len(table.block_ids)
        if hit_block_ids and num_held_blocks:
            raise CallError(
                f"request {request_id!r}: expected no prefix hits for a request with blocks, found {len(hit_block_ids)}"
            )
        if is_admission and num_held_blocks and not table.is_admitted:
            raise CallError(
                f"request {request_id!r}: a lookup's answer and external tokens come before its first block; "
                f"it has {num_held_blocks}"
            )

    def plan(
        self, request_id: str, demand: SlotDemand, hit_block_ids: Sequence[int], *, is_admission: bool
    ) -> GroupPlan:
        """What serving `demand` would take from the pool. Changes nothing.

        Args:
            request_id: the request.
            demand: its tokens.
            hit_block_ids: what its lookup found in this group.
            is_admission: the call brings a lookup's answer (hits or none) or external tokens.
        """
        table = self.tables.get(request_id)
        prefix = self._plan_prefix(table, demand, hit_block_ids) if is_admission else GroupPlan()
        num_positions = prefix.num_prefix_positions + (len(table.block_ids) if table is not None else 0)
        num_new_blocks = self._num_blocks(self._num_slot_tokens(demand)) - num_positions
        return replace(prefix, num_new_blocks=max(num_new_blocks, 0))

    def _plan_prefix(self, table: BlockTable | None, demand: SlotDemand, hit_block_ids: Sequence[int]) -> GroupPlan:
        """The first part of a new request's table: what is skipped, then hits, then blocks for external tokens. Nothing
        for a request that has its prefix already.
        """
        if table is not None and table.is_admitted:
            return GroupPlan()
        num_present_tokens = demand.num_present_tokens
        num_skipped_tokens = max(self.num_skipped_tokens(num_present_tokens), 0)
        num_null_blocks = num_skipped_tokens // self.num_tokens_per_block
        kept_block_ids = tuple(hit_block_ids[num_null_blocks:])
        num_external_tokens = demand.num_external_tokens
        if num_null_blocks:  # external tokens may be skipped, too
            num_external_tokens = min(num_external_tokens, num_present_tokens - num_skipped_tokens)
        num_external_blocks = 0
        if num_external_tokens > 0:
            num_external_blocks = self._num_blocks(num_present_tokens) - num_null_blocks - len(kept_block_ids)
        return GroupPlan(
            num_null_blocks=num_null_blocks,
            hit_block_ids=kept_block_ids,
            num_free_hit_blocks=self._pool.num_free_among(kept_block_ids),
            num_external_blocks=max(num_external_blocks, 0),
        )

    def _num_slot_tokens(self, demand: SlotDemand) -> int:
        """Tokens that need a slot in this group."""
        return demand.num_slot_tokens

    # Committing: the coordinator takes each of these steps for all groups before the next one

    def admit(self, request_id: str, plan: GroupPlan) -> None:
        """Give the request its hits."""
        table = self._table(request_id)
        if not table.is_admitted:
            self._pool.acquire(plan.hit_block_ids)
            table.block_ids += [NULL_BLOCK_ID] * plan.num_null_blocks
            table.block_ids += plan.hit_block_ids
            table.num_leading_nulls = plan.num_null_blocks
            table.num_cached_blocks = len(table.block_ids)
            table.is_admitted = True

    def take_external(self, request_id: str, plan: GroupPlan) -> None:
        """Give the request blocks for its external tokens."""
        if plan.num_external_blocks:
            self._take(self._table(request_id), plan.num_external_blocks)

    def take_new(self, request_id: str, plan: GroupPlan) -> list[int]:
        """Give the request the other new blocks, and answer them: the table's new positions."""
        return self._take(self._table(request_id), plan.num_new_blocks)

    def _take(self, table: BlockTable, num_blocks: int) -> list[int]:
        block_ids = self._pool.take(num_blocks)
        table.block_ids += block_ids
        if self.geometry.reports_new_blocks:
            self._unreported_block_ids.update(dict.fromkeys(block_ids))
        return block_ids

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
        first_block = table.num_cached_blocks
        if end_block <= first_block:
            return
        table.num_cached_blocks = end_block
        table.is_admitted = True
        if table.first_unpublished is not None:
            end_block = min(end_block, table.first_unpublished)
        if first_block < end_block:
            self._publish(request, table.block_ids, first_block, end_block)

    def _publish(self, request: Any, row: list[int], first_block: int, end_block: int) -> Sequence[bytes]:
        """Make blocks findable, and tell; answers their hashes."""
        block_ids = row[first_block:end_block]
        all_hashes = self.hashes_of(request.block_hashes)
        block_hashes = all_hashes[first_block : first_block + len(block_ids)]
        self._pool.cache(self.group_id, block_ids, block_hashes)
        for notify in self._observers.on_cache:
            notify(request, self.group_id, self.num_tokens_per_block, row, all_hashes, first_block, end_block)
        return block_hashes

    def stop_publishing(self, request_id: str, first_bad_token: int) -> None:
        """A load into the block of this token failed: neither it nor anything after it goes into the prefix cache any
        more, and what is there already leaves it.
        """
        table = self.tables.get(request_id)
        if table is None:
            return
        position = first_bad_token // self.num_tokens_per_block
        if table.first_unpublished is None or position < table.first_unpublished:
            table.first_unpublished = position
            self._pool.uncache(table.block_ids[position : table.num_cached_blocks])

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
            released = block_ids[position:num_skipped_blocks][::-1]
            block_ids[position:num_skipped_blocks] = [NULL_BLOCK_ID] * len(released)
            self._pool.release(released)

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request, the last first, so that the head of a prefix lives longest."""
        table = self.tables.get(request_id)
        if table is None:
            return
        block_ids = table.block_ids
        if table.first_unpublished is None:
            self._pool.release(block_ids[::-1])
        else:
            self._pool.release(block_ids[table.first_unpublished :][::-1], is_worthless=True)
            self._pool.release(block_ids[: table.first_unpublished][::-1])
        del self.tables[request_id]

    def block_ids(self, request_id: str) -> list[int]:
        """The request's table row, not a copy; empty for an unknown request."""
        table = self.tables.get(request_id)
        return table.block_ids if table is not None and table.block_ids else []

    def quiet_limit_tokens(self, request_id: str, *, caches: bool) -> int:
        """The most tokens that this request can grow to without anything to do here: no new block, none to release and,
        if it caches, none to cache.
        """
        table = self.tables.get(request_id)
        if table is None:
            return 0
        limit = min(self._capacity_tokens(table), self.quiet_limit_of_window(table))
        if not caches:
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
        block_ids, self._unreported_block_ids = self._unreported_block_ids, {}
        return list(block_ids)

    def _table(self, request_id: str) -> Any:
        table = self.tables.get(request_id)
        if table is None:
            table = self.tables[request_id] = self._table_class()
        return table

    def _num_blocks(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self.num_tokens_per_block)
