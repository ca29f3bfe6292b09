"""The groups as one: match, plan, commit, cache and free across all of them.

The order across groups is part of the behaviour: hits of all groups are held before anything new is taken; groups take
and free in their own order, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_kvplug.allocation import AllocationPlan, SlotDemand
from vllm_kvplug.block_pool import BlockPool
from vllm_kvplug.geometry import CacheGeometry
from vllm_kvplug.groups import GROUP_CLASSES, AttentionGroup
from vllm_kvplug.observers import ObserverSet


class Coordinator:
    """All KV cache groups over one pool.

    Attributes:
        groups: the groups, in the geometry's order.
    """

    def __init__(
        self, geometry: CacheGeometry, pool: BlockPool, observers: ObserverSet, *, enable_caching: bool, use_eagle: bool
    ) -> None:
        self.groups: tuple[AttentionGroup, ...] = tuple(
            GROUP_CLASSES[group.kind](group_id, group, pool, observers)
            for group_id, group in enumerate(geometry.groups)
        )
        self._enable_caching = enable_caching
        self._use_eagle = use_eagle

    def match(self, block_hashes: Sequence[bytes], max_num_tokens: int) -> tuple[tuple[list[int], ...], int]:
        """The longest prefix that every group has cached: block ids by group, and its number of tokens. Changes
        nothing.
        """
        (group,) = self.groups  # CacheGeometry sees to it that there is one
        block_ids = group.match(block_hashes, max_num_tokens)
        if self._use_eagle and block_ids:
            # The drafter needs the hidden states of the last matched block, so that block is computed again.
            block_ids.pop()
        return (block_ids,), len(block_ids) * group.num_tokens_per_block

    def release_skipped(self, request_id: str, num_computed_tokens: int) -> None:
        """Free what the attention windows have left behind, in every group."""
        for group in self.groups:
            group.release_skipped(request_id, num_computed_tokens)

    def plan(
        self, request_id: str, demand: SlotDemand, hit_block_ids: Sequence[Sequence[int]], *, is_admission: bool
    ) -> AllocationPlan:
        """What serving the demand would take, over all groups. Changes nothing."""
        plans = [
            group.plan(request_id, demand, group_hit_block_ids, is_admission=is_admission)
            for group, group_hit_block_ids in zip(self.groups, hit_block_ids, strict=True)
        ]
        num_free_blocks_needed = sum(p.num_free_hit_blocks + p.num_external_blocks + p.num_new_blocks for p in plans)
        return AllocationPlan(plans, num_free_blocks_needed)

    def admit(self, request_id: str, plan: AllocationPlan) -> None:
        """Hold the hits of every group."""
        for group, group_plan in zip(self.groups, plan.groups, strict=True):
            group.admit(request_id, group_plan)

    def extend(self, request_id: str, plan: AllocationPlan) -> tuple[list[int], ...]:
        """Take the new blocks of every group: ids by group."""
        return tuple(
            group.extend(request_id, group_plan) for group, group_plan in zip(self.groups, plan.groups, strict=True)
        )

    def check_block_hashes(self, request: Any, num_tokens: int) -> None:
        """See that the request has the hashes that caching its first `num_tokens` tokens needs."""
        for group in self.groups:
            group.check_block_hashes(request, num_tokens)

    def cache_full_blocks(self, request: Any, num_tokens: int) -> None:
        """Put blocks that are full with the request's first `num_tokens` tokens into the prefix cache."""
        for group in self.groups:
            group.cache_full_blocks(request, num_tokens)

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request, group by group."""
        for group in self.groups:
            group.free(request_id)

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """`block_ids[group][i]`: the request's tables, not copies."""
        return tuple(group.block_ids(request_id) for group in self.groups)

    def num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """By group, the leading blocks that all requests share."""
        if not self._enable_caching:
            return [0] * len(self.groups)
        return [group.num_common_prefix_blocks(request_id) for group in self.groups]

    def quiet_limit_tokens(self, request_id: str) -> int:
        """The most tokens that the request can grow to without any group having something to do."""
        return min(group.quiet_limit_tokens(request_id, caches=self._enable_caching) for group in self.groups)

    def take_unreported_block_ids(self) -> list[int]:
        """New block ids of all groups since the last call."""
        return [block_id for group in self.groups for block_id in group.take_unreported_block_ids()]
