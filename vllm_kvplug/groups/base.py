"""One KV cache group: the block tables of its requests, and the arithmetic that every attention type shares.

In goes a request id and a demand in tokens; out come block ids from the pool. What differs between attention types is a
method that a subclass overrides: which cached blocks serve as a prefix (`match`), which blocks a request no longer
needs (`release_skipped`). A new attention type is one module beside this file and one line in `groups/__init__.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from vllm_kvplug.allocation import GroupPlan, SlotDemand
from vllm_kvplug.block_pool import BlockPool
from vllm_kvplug.errors import CallError
from vllm_kvplug.geometry import GroupGeometry, num_blocks_for
from vllm_kvplug.observers import ObserverSet


class BlockTable:
    """One request's blocks in one group.

    Attributes:
        block_ids: by position, the block that holds these tokens.
        num_cached_blocks: leading blocks that are in the prefix cache or need not go there any more.
        is_admitted: the request took its hits or cached a block; from then on it has no further hits.
    """

    __slots__ = ("block_ids", "is_admitted", "num_cached_blocks")

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.num_cached_blocks = 0
        self.is_admitted = False


class AttentionGroup(ABC):
    """Base of all groups. `tables` maps a request id to its `BlockTable`; others read it, only the group changes it."""

    def __init__(self, group_id: int, geometry: GroupGeometry, pool: BlockPool, observers: ObserverSet) -> None:
        self.group_id = group_id
        self.geometry = geometry
        self.num_tokens_per_block = geometry.num_tokens_per_block
        self.tables: dict[str, BlockTable] = {}
        self._pool = pool
        self._observers = observers
        # An ordered set: nobody may ever ask (vLLM does so for some models only), and it must not grow for ever.
        self._unreported_block_ids: dict[int, None] = {}

    # What differs between attention types

    @abstractmethod
    def match(self, block_hashes: Sequence[bytes], max_num_tokens: int) -> list[int]:
        """Cached blocks that can serve as the request's prefix, at most `max_num_tokens` long. Changes nothing."""

    @abstractmethod
    def num_common_prefix_blocks(self, request_id: str) -> int:
        """Leading blocks of this request that every request with a table holds too."""

    # A class that overrides nothing is right for attention that looks at all earlier tokens.
    def release_skipped(self, request_id: str, num_computed_tokens: int) -> None:  # noqa: B027
        """Free the blocks that no later token of this request looks at."""

    # Planning and committing

    def plan(
        self, request_id: str, demand: SlotDemand, hit_block_ids: Sequence[int], *, is_admission: bool
    ) -> GroupPlan:
        """What serving `demand` would take from the pool. Changes nothing.

        Args:
            request_id: the request.
            demand: its tokens.
            hit_block_ids: what its lookup found in this group.
            is_admission: the call brings a lookup's answer (hits or none) or external tokens.

        Raises:
            CallError: hits or external tokens for a request that cannot have them any more, or ids outside the pool.
        """
        self._pool.check_block_ids(hit_block_ids)
        table = self.tables.get(request_id)
        num_held_blocks = len(table.block_ids) if table is not None else 0
        is_admitted = table is not None and table.is_admitted
        if hit_block_ids and num_held_blocks:
            raise CallError(
                f"request {request_id!r}: expected no prefix hits for a request with blocks, found {len(hit_block_ids)}"
            )
        if is_admission and num_held_blocks and not is_admitted:
            raise CallError(
                f"request {request_id!r}: a lookup's answer and external tokens come before its first block; "
                f"it has {num_held_blocks}"
            )
        num_external_blocks = 0
        if demand.num_external_tokens and not is_admitted:
            num_external_blocks = self._num_blocks(demand.num_present_tokens) - len(hit_block_ids)
        num_missing_blocks = self._num_blocks(demand.num_slot_tokens) - len(hit_block_ids) - num_held_blocks
        return GroupPlan(
            hit_block_ids=list(hit_block_ids),
            num_free_hit_blocks=self._pool.num_free_among(hit_block_ids),
            num_external_blocks=num_external_blocks,
            num_new_blocks=max(num_missing_blocks - num_external_blocks, 0),
        )

    def admit(self, request_id: str, plan: GroupPlan) -> None:
        """Give the request its hits. Comes before anything new is taken, for all groups: nobody may be handed what
        another hit.
        """
        self._pool.acquire(plan.hit_block_ids)
        table = self._table(request_id)
        if not table.is_admitted:
            table.block_ids += plan.hit_block_ids
            table.num_cached_blocks = len(table.block_ids)
            table.is_admitted = True

    def extend(self, request_id: str, plan: GroupPlan) -> list[int]:
        """Give the request its new blocks. Answers those for tokens of this step, without those for external tokens."""
        block_ids = self._pool.take(plan.num_external_blocks + plan.num_new_blocks)
        self._table(request_id).block_ids += block_ids
        if self.geometry.reports_new_blocks:
            self._unreported_block_ids.update(dict.fromkeys(block_ids))
        return block_ids[plan.num_external_blocks :] if plan.num_external_blocks else block_ids

    def check_block_hashes(self, request: Any, num_tokens: int) -> None:
        """See that the request's first `num_tokens` tokens could be cached.

        Raises:
            CallError: the request has fewer block hashes than full blocks.
        """
        num_full_blocks = num_tokens // self.num_tokens_per_block
        if len(request.block_hashes) < num_full_blocks:
            raise CallError(
                f"request {request.request_id!r}: expected {num_full_blocks} block hashes for {num_tokens} tokens, "
                f"found {len(request.block_hashes)}"
            )

    # A request's life

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
        block_ids = table.block_ids[first_block:end_block]
        self._pool.cache(self.group_id, block_ids, request.block_hashes[first_block : first_block + len(block_ids)])
        table.num_cached_blocks = end_block
        table.is_admitted = True
        for notify in self._observers.on_cache:
            notify(request, self.group_id, self.num_tokens_per_block, table.block_ids, first_block, end_block)

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request, the last first, so that the head of a prefix lives longest."""
        table = self.tables.get(request_id)
        if table is not None:
            self._pool.release(table.block_ids[::-1])
            del self.tables[request_id]

    def block_ids(self, request_id: str) -> list[int]:
        """The request's table row, not a copy; empty for an unknown request."""
        table = self.tables.get(request_id)
        return table.block_ids if table is not None else []

    def quiet_limit_tokens(self, request_id: str, *, caches: bool) -> int:
        """The most tokens that this request can grow to without a new block and, if it caches, without one to cache."""
        table = self.tables[request_id]
        num_tokens_per_block = self.num_tokens_per_block
        capacity_tokens = len(table.block_ids) * num_tokens_per_block
        if not caches:
            return capacity_tokens
        return min(capacity_tokens, (table.num_cached_blocks + 1) * num_tokens_per_block - 1)

    def take_unreported_block_ids(self) -> list[int]:
        """Ids handed out since the last call, each once, in the order of their first handing out."""
        block_ids, self._unreported_block_ids = self._unreported_block_ids, {}
        return list(block_ids)

    def _table(self, request_id: str) -> BlockTable:
        table = self.tables.get(request_id)
        if table is None:
            table = self.tables[request_id] = BlockTable()
        return table

    def _num_blocks(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self.num_tokens_per_block)
