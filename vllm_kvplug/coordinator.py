"""The groups as one: match, plan, commit, cache and free across all of them.

The order across groups is part of the behaviour: hits of all groups are held before anything new is taken, since what
one group is handed must not be what another has just hit; then come the blocks for external tokens of all groups, then
the other new ones. Groups take and free in their own order, one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from vllm_kvplug.allocation import AllocationPlan, SlotDemand
from vllm_kvplug.block_pool import NULL_BLOCK_ID, BlockPool
from vllm_kvplug.block_run import Hit
from vllm_kvplug.errors import UnsupportedError
from vllm_kvplug.geometry import FULL_KINDS, AttentionKind, CacheGeometry
from vllm_kvplug.groups import AttentionGroup, group_class
from vllm_kvplug.groups.base import NO_LIMIT
from vllm_kvplug.observers import ObserverSet


class Coordinator:
    """All KV cache groups over one pool.

    Attributes:
        groups: the groups, in the geometry's order.

    Raises:
        UnsupportedError: a drafter's dropped block together with chunked local attention, which vLLM does not have
            either.
    """

    def __init__(
        self, geometry: CacheGeometry, pool: BlockPool, observers: ObserverSet, *, enable_caching: bool, use_eagle: bool
    ) -> None:
        if enable_caching and use_eagle and any(g.kind is AttentionKind.CHUNKED_LOCAL for g in geometry.groups):
            raise UnsupportedError(
                "chunked local attention with EAGLE: expected prefix caching off, found it on (vLLM has no rule for "
                "which chunk the dropped block is in)"
            )
        num_tokens_per_hash = geometry.num_tokens_per_hash
        num_blocks_beyond_hit = _num_blocks_beyond_hit(geometry) if use_eagle else {}
        self.groups: tuple[AttentionGroup, ...] = tuple(
            group_class(group)(
                group_id,
                group,
                pool,
                observers,
                num_hashes_per_block=group.num_tokens_per_block // num_tokens_per_hash if num_tokens_per_hash else 1,
                num_blocks_beyond_hit=num_blocks_beyond_hit.get(group.kind, 0),
                caches=enable_caching,
            )
            for group_id, group in enumerate(geometry.groups)
        )
        self._enable_caching = enable_caching
        self._releasing_groups = tuple(group for group in self.groups if group.releases_skipped)
        # Whether `grow` serves running requests, and whether release_skipped has anything to do.
        self.grows_plainly = all(group.grows_plainly for group in self.groups)
        self.releases_skipped = bool(self._releasing_groups)
        self._pool = pool
        self._hit_alignment_tokens = geometry.hit_alignment_tokens
        # Groups whose answer only needs cutting when another shortens the hit come first: each is asked once.
        self._match_order = sorted(self.groups, key=lambda group: not group.any_shorter_prefix_serves)

    def match(self, block_hashes: Sequence[bytes], max_num_tokens: int) -> tuple[tuple[Hit, ...], int]:
        """The longest prefix that every group can serve: by group, and its number of tokens. Changes nothing.

        A fixed point: each group in turn accepts the others' length or shortens it, until all agree.
        """
        if len(self.groups) == 1:
            return self._match_alone(self.groups[0], block_hashes, max_num_tokens)
        alignment_tokens = self._hit_alignment_tokens
        num_hit_tokens = min((self._max_hit_tokens(group, max_num_tokens) for group in self.groups), default=0)
        num_hit_tokens -= num_hit_tokens % alignment_tokens
        hits: dict[int, Hit] = {}
        agreed = False
        while not agreed:
            agreed = True
            for group in self._match_order:
                num_blocks = num_hit_tokens // group.num_tokens_per_block
                hit = hits.get(group.group_id)
                if hit is not None and group.any_shorter_prefix_serves:
                    hits[group.group_id] = hit.up_to(num_blocks)
                elif hit is None or len(hit) != num_blocks:
                    hit = group.match(
                        group.hashes_of(block_hashes), num_blocks, alignment_tokens // group.num_tokens_per_block
                    )
                    hits[group.group_id] = hit
                    if len(hit) != num_blocks:
                        num_hit_tokens = len(hit) * group.num_tokens_per_block
                        agreed = False
        return tuple(hits[group.group_id] for group in self.groups), num_hit_tokens

    def _match_alone(
        self, group: AttentionGroup, block_hashes: Sequence[bytes], max_num_tokens: int
    ) -> tuple[tuple[Hit, ...], int]:
        """The same for the only group."""
        num_tokens_per_block, alignment_tokens = group.num_tokens_per_block, self._hit_alignment_tokens
        max_hit_tokens = self._max_hit_tokens(group, max_num_tokens)
        max_hit_tokens -= max_hit_tokens % alignment_tokens
        hit = group.match(
            group.hashes_of(block_hashes),
            max_hit_tokens // num_tokens_per_block,
            alignment_tokens // num_tokens_per_block,
        )
        return (hit,), len(hit) * num_tokens_per_block

    @staticmethod
    def _max_hit_tokens(group: AttentionGroup, max_num_tokens: int) -> int:
        """Whole blocks of the group within `max_num_tokens`, less the one that a drafter needs computed again."""
        num_blocks = max_num_tokens // group.num_tokens_per_block - (group.num_blocks_beyond_hit > 0)
        return max(num_blocks, 0) * group.num_tokens_per_block

    def note_hits_named(self, request: Any, hits: Sequence[Hit]) -> None:
        """A caller names hits that no lookup of this moment found: they may be another prefix than the request's."""
        for group, hit in zip(self.groups, hits, strict=True):
            group.note_hit_named(request, hit)

    def check_admission(self, request_id: str, hits: Sequence[Hit], *, is_admission: bool) -> None:
        """See that the request can have these hits, in every group. Changes nothing."""
        for group, hit in zip(self.groups, hits, strict=True):
            group.check_admission(request_id, len(hit), is_admission=is_admission)

    def release_skipped(self, request_id: str, num_computed_tokens: int, num_confirmed_tokens: int) -> None:
        """Free what the attention windows have left behind, in every group."""
        for group in self._releasing_groups:
            group.release_skipped(request_id, num_computed_tokens, num_confirmed_tokens)

    def plan(self, request_id: str, demand: SlotDemand, hits: Sequence[Hit], *, is_admission: bool) -> AllocationPlan:
        """What serving the demand would take, over all groups. Changes nothing."""
        plans = tuple(
            [
                group.plan(request_id, demand, hit, is_admission=is_admission)
                for group, hit in zip(self.groups, hits, strict=True)
            ]
        )
        num_free_blocks_needed = sum([plan.num_free_blocks_needed for plan in plans])
        # Lists: for the few groups that there are they take half of a generator's time.
        return AllocationPlan(plans, num_free_blocks_needed, any([plan.defers for plan in plans]))  # noqa: C419

    def admit(self, request_id: str, plan: AllocationPlan, hits: Sequence[Hit]) -> None:
        """Hold the hits of every group, then take the blocks for external tokens of every group."""
        for group, group_plan, hit in zip(self.groups, plan.groups, hits, strict=True):
            group.admit(request_id, group_plan, hit)
        for group, group_plan in zip(self.groups, plan.groups, strict=True):
            group.take_external(request_id, group_plan)

    def take_new(self, request_id: str, plan: AllocationPlan) -> tuple[list[int], ...]:
        """Take the other new blocks of every group: ids by group."""
        return tuple(
            group.take_new(request_id, group_plan) for group, group_plan in zip(self.groups, plan.groups, strict=True)
        )

    def grow(
        self, request: Any, num_slot_tokens: int, num_cache_tokens: int
    ) -> tuple[tuple[Sequence[int], ...], int] | None:
        """Plan, commit and cache at once for a running request whose groups only take blocks at their tables' ends: it
        gets the slots that it lacks, and what is full with its first `num_cache_tokens` tokens is cached.

        Returns:
            New ids by group, or () where there are none, and the quiet limit; None where the free blocks do not
            suffice, nothing was changed then.
        """
        request_id = request.request_id
        missing = [group.num_missing_blocks(request_id, num_slot_tokens) for group in self.groups]
        if sum(missing) > self._pool.num_free_blocks:
            return None
        # All groups take before one caches, as in the general case.
        rows = [group.take_more(request_id, number) for group, number in zip(self.groups, missing, strict=True)]
        if num_cache_tokens:
            self.cache_full_blocks(request, num_cache_tokens)
        return tuple(rows) if any(rows) else (), self.quiet_limit_tokens(request_id)

    def check_block_hashes(self, request: Any, num_tokens: int) -> None:
        """See that the request has the hashes that caching its first `num_tokens` tokens needs."""
        for group in self.groups:
            group.check_block_hashes(request, num_tokens)

    def check_full_blocks(self, request_id: str, num_tokens: int) -> None:
        """See that the request has the blocks that its first `num_tokens` tokens fill."""
        for group in self.groups:
            group.check_full_blocks(request_id, num_tokens)

    def cache_full_blocks(self, request: Any, num_tokens: int) -> None:
        """Put blocks that are full with the request's first `num_tokens` tokens into the prefix cache."""
        for group in self.groups:
            group.cache_full_blocks(request, num_tokens)

    def stop_publishing(self, block_ids: Collection[int]) -> None:
        """Loads into these blocks failed: what any request computed from one of them on is not to be hit.

        A block of one group holds the tokens' keys and values for its layers only, but every later layer and token is
        computed from them, so the requests that hold it stop in all groups.
        """
        failed = frozenset(block_ids) - {NULL_BLOCK_ID}
        first_bad_tokens: dict[str, int] = {}
        for group in self.groups:
            for request_id, table in group.tables.items():
                position = next((i for i, block_id in enumerate(table.block_ids) if block_id in failed), None)
                if position is not None:
                    first_token = position * group.num_tokens_per_block
                    first_bad_tokens[request_id] = min(first_token, first_bad_tokens.get(request_id, first_token))
        for request_id, first_bad_token in first_bad_tokens.items():
            for group in self.groups:
                group.stop_publishing(request_id, first_bad_token)

    def new_step_starts(self) -> None:
        """The scheduler begins a step."""
        for group in self.groups:
            group.new_step_starts()

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request, group by group."""
        for group in self.groups:
            group.free(request_id)

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """`block_ids[group][i]`: the request's tables, not copies."""
        return tuple([group.block_ids(request_id) for group in self.groups])

    def num_held_blocks(self, request_id: str) -> int:
        """Blocks of all groups that the request holds."""
        return sum(len(row) - row.count(NULL_BLOCK_ID) for row in self.block_ids(request_id))

    def num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """By group, the leading blocks that all requests share."""
        if not self._enable_caching:
            return [0] * len(self.groups)
        return [group.num_common_prefix_blocks(request_id) for group in self.groups]

    def quiet_limit_tokens(self, request_id: str) -> int:
        """The most tokens that the request can grow to without any group having something to do."""
        if len(self.groups) == 1:
            return self.groups[0].quiet_limit_tokens(request_id)
        return min((group.quiet_limit_tokens(request_id) for group in self.groups), default=NO_LIMIT)

    def take_unreported_block_ids(self) -> list[int]:
        """New block ids of all groups since the last call, each once."""
        taken = (block_id for group in self.groups for block_id in group.take_unreported_block_ids())
        return list(dict.fromkeys(taken))


def _num_blocks_beyond_hit(geometry: CacheGeometry) -> dict[AttentionKind, int]:
    """By kind, how many blocks after the hit must be cached where a drafter needs what was matched last computed again.

    Each attention group drops one block that it has matched; Mamba layers are in no drafter. Beside a sliding window,
    full attention has matched one block more, since 0.17.1 lets windows drop theirs from what full attention has left.
    """
    kinds = {group.kind for group in geometry.groups}
    has_window = AttentionKind.SLIDING_WINDOW in kinds
    beyond = dict.fromkeys(FULL_KINDS, 2 if has_window else 1)
    beyond[AttentionKind.SLIDING_WINDOW] = 1
    return beyond
