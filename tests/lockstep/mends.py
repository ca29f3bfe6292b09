"""Upstream's manager with its public faults put right, one class for each, where `deviations.py` says that a call
triggers one. In all other calls upstream does what it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SingleTypeKVCacheManager

from tests.lockstep import deviations
from tests.lockstep.mended_reports import AdmittedStats, CopiesRemain, HashedKeys
from tests.lockstep.trace import Setup
from tests.lockstep.triggers import Triggers, wrap


class Mends:
    """All of one upstream manager.

    Attributes:
        triggers: what the present call triggered.
        drafting, stats: are told of each call.
        positions: says whether a group deferred.
    """

    def __init__(self, setup: Setup, manager: Any, counts: Counter[str]) -> None:
        self.triggers = Triggers(counts)
        self.stats = AdmittedStats(setup, self.triggers)
        self.drafting = DraftsInFlight(setup, manager, self.triggers)
        HitsPoppedAsNew(manager, self.triggers)
        self.positions = FewerPositions(manager, self.triggers, counts)
        SinksInUse(setup, manager, self.triggers)
        CopiesRemain(manager, self.triggers)
        HashedKeys(manager, self.triggers)
        FailedLoads(manager, self.triggers)

    def request_goes(self, request_id: str) -> None:
        """It was freed."""
        self.stats.request_goes(request_id)
        self.drafting.request_goes(request_id)


class HitsPoppedAsNew:
    """F1: the hits of all groups are held before anything is popped."""

    def __init__(self, manager: Any, triggers: Triggers) -> None:
        self._pool = manager.block_pool
        self._groups = manager.coordinator.single_type_managers
        self._triggers = triggers
        wrap(manager.coordinator, "allocate_new_computed_blocks", self._allocate)

    def _allocate(
        self,
        original: Callable[..., None],
        request_id: str,
        new_computed_blocks: Sequence[Sequence[Any]],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        held: list[Any] = []
        if num_external_computed_tokens and len(self._groups) > 1:
            num_present_tokens = num_local_computed_tokens + num_external_computed_tokens
            parts = [
                self._part(group, request_id, blocks, num_present_tokens)
                for group, blocks in zip(self._groups, new_computed_blocks, strict=True)
            ]
            hit_ids = [frozenset(block.block_id for block in hits) for hits, _ in parts]
            free_ids = [block.block_id for block in self._pool.free_block_queue.get_all_free_blocks()]
            if deviations.pops_a_later_groups_hit(free_ids, hit_ids, [num_popped for _, num_popped in parts]):
                self._triggers.note("F1")
                held = [block for hits, _ in parts for block in hits]
        self._pool.touch(held)
        original(
            request_id=request_id,
            new_computed_blocks=new_computed_blocks,
            num_local_computed_tokens=num_local_computed_tokens,
            num_external_computed_tokens=num_external_computed_tokens,
        )
        for block in held:
            block.ref_cnt -= 1

    @staticmethod
    def _part(group: Any, request_id: str, blocks: Sequence[Any], num_present_tokens: int) -> tuple[list[Any], int]:
        """The hits that a group takes over, and how many blocks it pops for external tokens."""
        if request_id in group.num_cached_block:
            return [], 0
        num_skipped_tokens = max(group.get_num_skipped_tokens(num_present_tokens), 0)
        num_skipped_blocks = num_skipped_tokens // group.block_size
        kept = list(blocks[num_skipped_blocks:])
        hits = [block for block in kept if not block.is_null]
        if num_skipped_blocks and num_present_tokens == num_skipped_tokens:
            return hits, 0
        return hits, max(-(-num_present_tokens // group.block_size) - num_skipped_blocks - len(kept), 0)


class DraftsInFlight:
    """F2: while drafts are under way, a window moves up to the last confirmed token only."""

    def __init__(self, setup: Setup, manager: Any, triggers: Triggers) -> None:
        self._triggers = triggers
        self._requests: set[str] = set()
        self._safe_tokens: int | None = None  # of the present call, if drafts are under way
        for group_setup, group in zip(setup.groups, manager.coordinator.single_type_managers, strict=True):
            wrap(group, "remove_skipped_blocks", self._bounded(group_setup.kind, group))

    def step_starts(self, request: Any, num_present_tokens: int, num_new_tokens: int) -> None:
        """A call of allocate_slots."""
        if deviations.is_confirmed(request, num_present_tokens):
            self._requests.discard(request.request_id)
        self._safe_tokens = request.num_tokens - 1 if request.request_id in self._requests else None
        if deviations.has_drafts(request, num_present_tokens, num_new_tokens):
            self._requests.add(request.request_id)

    def step_ends(self) -> None:
        """That call has answered."""
        self._safe_tokens = None

    def request_goes(self, request_id: str) -> None:
        """It was freed."""
        self._requests.discard(request_id)

    def _bounded(self, kind: str, group: Any) -> Callable[..., None]:
        def num_skipped_blocks(num_tokens: int) -> int:
            return int(max(group.get_num_skipped_tokens(num_tokens), 0) // group.block_size)

        def remove_skipped_blocks(original: Callable[..., None], request_id: str, total_computed_tokens: int) -> None:
            bound = total_computed_tokens
            if self._safe_tokens is not None:
                safe_bound = min(bound, self._safe_tokens)
                row = group.req_to_blocks.get(request_id, ())
                if deviations.frees_too_early(kind, num_skipped_blocks(safe_bound), num_skipped_blocks(bound), row):
                    self._triggers.note("F2")
                    bound = safe_bound
            original(request_id, bound)

        return remove_skipped_blocks


class FewerPositions:
    """F3: the states at hand serve; nothing is taken. (And defers and moved blocks are counted for the summary.)"""

    def __init__(self, manager: Any, triggers: Triggers, counts: Counter[str]) -> None:
        self._triggers = triggers
        self._counts = counts
        self.has_deferred = False
        for group in manager.coordinator.single_type_managers:
            if isinstance(group, MambaManager):
                wrap(group, "get_num_blocks_to_allocate", self._counting(group))
                wrap(group, "allocate_new_blocks", self._allocating(group))

    def _counting(self, group: Any) -> Callable[..., int]:
        def get_num_blocks_to_allocate(
            original: Callable[..., int],
            request_id: str,
            num_tokens: int,
            new_computed_blocks: Sequence[Any],
            total_computed_tokens: int,
            num_tokens_main_model: int,
        ) -> int:
            num_blocks = original(
                request_id, num_tokens, new_computed_blocks, total_computed_tokens, num_tokens_main_model
            )
            self._counts["mamba: defers"] += num_blocks > group.block_pool.num_gpu_blocks
            self.has_deferred |= deviations.defers(group, new_computed_blocks)
            is_triggered = deviations.wants_fewer_positions(group, request_id, num_tokens_main_model)
            return 0 if is_triggered else num_blocks

        return get_num_blocks_to_allocate

    def _allocating(self, group: Any) -> Callable[..., list[Any]]:
        def allocate_new_blocks(
            original: Callable[..., list[Any]], request_id: str, num_tokens: int, num_tokens_main_model: int
        ) -> list[Any]:
            if deviations.wants_fewer_positions(group, request_id, num_tokens_main_model):
                self._triggers.note("F3")
                return []
            before = {block.block_id for block in group.req_to_blocks[request_id] if not block.is_null}
            new_blocks = original(request_id, num_tokens, num_tokens_main_model)
            num_moved = sum(block.block_id in before for block in new_blocks)
            self._counts["mamba align: speculative blocks moved on"] += num_moved
            return new_blocks

        return allocate_new_blocks


class SinksInUse:
    """F9: sinks are no request's blocks: not in usage, and no reason to refuse a reset."""

    def __init__(self, setup: Setup, manager: Any, triggers: Triggers) -> None:
        self._pool = manager.block_pool
        self._num_sink_blocks = setup.num_reserved_blocks - 1
        self._triggers = triggers
        if deviations.has_sinks(setup):
            wrap(self._pool, "reset_prefix_cache", self._reset)
            wrap(self._pool, "get_usage", self._without_sinks)

    def _reset(self, original: Callable[[], bool]) -> bool:
        # Usage is compared after every call; what is counted is what a caller would see refused.
        self._triggers.note("F9")
        return bool(self._without_sinks(original))

    def _without_sinks(self, original: Callable[[], Any]) -> Any:
        self._pool.num_gpu_blocks -= self._num_sink_blocks
        try:
            return original()
        finally:
            self._pool.num_gpu_blocks += self._num_sink_blocks


class FailedLoads:
    """F15: from the first token of the first failed block on, a holder publishes nothing more in any group, what it has
    published from there on leaves the index, and when it is freed those blocks are reused before all others.
    """

    def __init__(self, manager: Any, triggers: Triggers) -> None:
        self._pool = manager.block_pool
        self._groups = manager.coordinator.single_type_managers
        self._triggers = triggers
        # By group and request, the first position that it may not publish.
        self._positions: list[dict[str, int]] = [{} for _ in self._groups]
        wrap(self._pool, "evict_blocks", self._evict)
        wrap(self._pool, "cache_full_blocks", self._cache)
        for group_id, group in enumerate(self._groups):
            wrap(group, "free", self._freeing(group_id, group))
            if isinstance(group, MambaManager):
                wrap(group, "cache_blocks", self._caching(group))

    def _evict(self, original: Callable[[set[int]], None], block_ids: set[int]) -> None:
        original(block_ids)
        first_tokens: dict[str, int] = {}
        for group in self._groups:
            for request_id, row in group.req_to_blocks.items():
                position = deviations.first_failed_position(block_ids, row)
                if position is not None:
                    first_token = position * group.block_size
                    first_tokens[request_id] = min(first_token, first_tokens.get(request_id, first_token))
        for request_id, first_token in first_tokens.items():
            self._triggers.note("F15")
            for group_id, group in enumerate(self._groups):
                self._stop(group_id, request_id, first_token // group.block_size)

    def _stop(self, group_id: int, request_id: str, position: int) -> None:
        row = self._groups[group_id].req_to_blocks.get(request_id)
        positions = self._positions[group_id]
        if row is None or position >= positions.get(request_id, position + 1):
            return
        positions[request_id] = position
        for block in row[position:]:
            if not block.is_null:
                self._pool._maybe_evict_cached_block(block)

    def _cache(
        self,
        original: Callable[..., None],
        *,
        request: Any,
        num_full_blocks: int,
        kv_cache_group_id: int,
        **kwargs: Any,
    ) -> None:
        position = self._positions[kv_cache_group_id].get(request.request_id, num_full_blocks)
        if position < num_full_blocks:
            self._triggers.note("F15")
            num_full_blocks = position
        original(request=request, num_full_blocks=num_full_blocks, kv_cache_group_id=kv_cache_group_id, **kwargs)

    def _caching(self, group: Any) -> Callable[..., None]:
        """Upstream's Mamba asserts that every full block was cached."""

        def cache_blocks(original: Callable[..., None], request: Any, num_tokens: int) -> None:
            if request.request_id not in self._positions[group.kv_cache_group_id]:
                original(request, num_tokens)
                return
            first = group.num_cached_block.get(request.request_id, 0)
            MethodType(SingleTypeKVCacheManager.cache_blocks, group)(request, num_tokens)
            end = group.num_cached_block.get(request.request_id, 0)
            hashes = (block.block_hash for block in group.req_to_blocks[request.request_id][first:end])
            group.cached_blocks_this_step.update(block_hash for block_hash in hashes if block_hash is not None)

        return cache_blocks

    def _freeing(self, group_id: int, group: Any) -> Callable[..., None]:
        def free(original: Callable[[str], None], request_id: str) -> None:
            position = self._positions[group_id].pop(request_id, None)
            if position is None:
                original(request_id)
                return
            self._triggers.note("F15")
            row = group.req_to_blocks[request_id]
            first_to_go = [block for block in reversed(row[position:]) if not block.is_null and block.ref_cnt == 1]
            original(request_id)
            queue = self._pool.free_block_queue
            others = [block for block in queue.get_all_free_blocks() if block not in first_to_go]
            for block in (*first_to_go, *others):
                queue.remove(block)
            queue.append_n([*first_to_go, *others])

        return free
