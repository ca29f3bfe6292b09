"""The scheduler's contract, without vLLM: what a request may use of the cache, and what it takes and gives back.

Here is the order of things, and the decode shortcut; the block algorithms are in the coordinator, the groups and the
pool. A request is any object with vLLM's attributes: request_id, num_tokens, num_computed_tokens, block_hashes,
skip_reading_prefix_cache, num_output_placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from vllm_kvplug import call_checks, eviction
from vllm_kvplug.allocation import AllocationPlan, Refusal, SlotDemand
from vllm_kvplug.block import BlocksOfIds, FoundBlocks, HeldBlocks, KVCacheBlocks, NoBlocks
from vllm_kvplug.block_pool import BlockPool
from vllm_kvplug.block_run import NO_HIT, Hit
from vllm_kvplug.block_states import find_hit
from vllm_kvplug.checking import CheckedCalls
from vllm_kvplug.coordinator import Coordinator
from vllm_kvplug.errors import CallError
from vllm_kvplug.geometry import WINDOW_KINDS, CacheGeometry
from vllm_kvplug.groups import group_class
from vllm_kvplug.groups.base import NO_LIMIT
from vllm_kvplug.observers import Observer, ObserverSet
from vllm_kvplug.settings import Settings
from vllm_kvplug.sizing import NeverFits, never_fits

_Grow = Callable[[Any, int, int], tuple[tuple[Sequence[int], ...], int] | None]


class _Lookup(NamedTuple):
    """A lookup's answer, and all that it depended on: the pool's version, the request's tokens and its last hash."""

    asked: tuple[int, int, bytes | None]
    blocks: KVCacheBlocks
    num_hit_tokens: int


class CacheManager:
    """KV cache manager over a `CacheGeometry`.

    Attributes:
        empty_kv_cache_blocks: the shared answer "no blocks".
        pool, groups: for reading (checks, views); nothing outside changes them.
        checks: what checks the manager after its calls; None unless the setting `check_invariants` asks for it.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        settings: Settings,
        *,
        enable_caching: bool = True,
        use_eagle: bool = False,
        observers: Iterable[Observer] = (),
    ) -> None:
        self.geometry = geometry
        self.settings = settings
        self.max_model_len = geometry.max_model_len
        self.enable_caching = enable_caching
        self.use_eagle = use_eagle
        self.checks = CheckedCalls.of_settings(settings)
        self._observers = ObserverSet(observers if self.checks is None else (*observers, self.checks.story))
        if enable_caching and geometry.groups and geometry.num_tokens_per_hash is None:
            raise CallError("prefix caching is on: expected the geometry's num_tokens_per_hash, found none")
        self.pool = BlockPool(
            geometry.num_blocks,
            len(geometry.groups),
            eviction.create(settings.eviction),
            self._observers,
            geometry.num_reserved_blocks,
            [
                group_id
                for group_id, group in enumerate(geometry.groups)
                if group_class(group).any_shorter_prefix_serves
            ],
        )
        self._coordinator = Coordinator(
            geometry, self.pool, self._observers, enable_caching=enable_caching, use_eagle=use_eagle
        )
        self.groups = self._coordinator.groups
        self._no_block_ids: tuple[tuple[int, ...], ...] = ((),) * len(geometry.groups)
        self._no_hits: Sequence[Hit] = (NO_HIT,) * len(geometry.groups)
        self.empty_kv_cache_blocks: KVCacheBlocks = NoBlocks(self.pool, self._no_block_ids)
        # By request, the number of tokens up to which a step needs nothing: no new block, and no block becomes full.
        self._quiet_limits_tokens: dict[str, int] = {}
        # By request, its last lookup, until it is admitted: statistics count it then, once, and one that is refused and
        # asks again gets the same answer as long as nothing has changed.
        self._lookups: dict[str, _Lookup] = {}
        # Requests of which a step under way verifies drafts, so that not all tokens that count as computed may stay.
        self._drafting: set[str] = set()
        # Where a window is released, no step with drafts may pass by unnoticed.
        has_window = any(group.kind in WINDOW_KINDS for group in geometry.groups)
        self._max_quiet_new_tokens = 1 if has_window else NO_LIMIT
        self._refused_alone: dict[str, Refusal] = {}
        self._grows_plainly = self._coordinator.grows_plainly
        self._releases_skipped = self._coordinator.releases_skipped
        # Requests without hits go a short way where their groups only take blocks at their tables' ends: the only
        # group's own, if it gives none back meanwhile, else `_grow_groups`. (Which is not kept here: no cycle.)
        self._grow_alone: _Grow | None = None
        if len(self.groups) == 1 and self._grows_plainly and not self._releases_skipped:
            self._grow_alone = self.groups[0].grow_alone
        self._num_tokens_per_hash = geometry.num_tokens_per_hash or 1
        if self.checks is not None:
            self.checks.watch(self, CacheManager)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.checks is not None:
            self.checks.__reduce_ex__(protocol)  # refuses, before anything of it is copied
        return super().__reduce_ex__(protocol)

    @property
    def usage(self) -> float:
        """Part of the usable blocks that requests hold, 0.0 to 1.0."""
        return self.pool.usage

    def get_computed_blocks(self, request: Any) -> tuple[KVCacheBlocks, int]:
        """The cached prefix of a request: its blocks and its number of tokens. Changes no block and no order.

        At least the last token is left to compute, for its logits; a request that asks not to read the cache gets
        nothing.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0
        pool, block_hashes, num_tokens = self.pool, request.block_hashes, request.num_tokens
        # A hash stands for all before it, so the last one tells whether it is the same prompt still.
        asked = (pool.version, num_tokens, block_hashes[-1] if block_hashes else None)
        lookup = self._lookups.get(request.request_id)
        if lookup is not None and lookup.asked == asked:
            return lookup.blocks, lookup.num_hit_tokens
        hits, num_hit_tokens = self._coordinator.match(block_hashes, num_tokens - 1)
        blocks = FoundBlocks(pool, hits, num_hit_tokens) if num_hit_tokens else self.empty_kv_cache_blocks
        self._lookups[request.request_id] = _Lookup(asked, blocks, num_hit_tokens)
        return blocks, num_hit_tokens

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
    ) -> KVCacheBlocks | None:
        """Give a request slots for the tokens of its next step, and cache the blocks that become full with it.

        Args:
            request: the request; `request.num_computed_tokens` tokens of it are computed.
            num_new_tokens: tokens to compute in this step, unverified drafts included.
            num_new_computed_tokens: tokens that the lookup just found.
            new_computed_blocks: their blocks.
            num_lookahead_tokens: further slots for a drafter's proposals.
            num_external_computed_tokens: tokens that a KV connector brings.
            delay_cache_blocks: do not cache now; the tokens arrive later.
            num_encoder_tokens: tokens of the encoder, whose keys and values cross-attention groups keep.

        Returns:
            The new blocks of this step by group, or None where the free blocks do not suffice (nothing is taken then).

        A request that is refused while no other request holds a block is remembered for `take_refused_alone`.

        Raises:
            CallError: arguments that no request can have. Nothing was changed.
        """
        no_blocks = self.empty_kv_cache_blocks
        if num_new_tokens > 0 and not (num_new_computed_tokens or num_external_computed_tokens or num_encoder_tokens):
            num_tokens = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
            if new_computed_blocks is None:
                # The decode step that needs nothing: one look, one sum, one comparison.
                limit_tokens = self._quiet_limits_tokens.get(request.request_id, -1)
                if num_tokens <= limit_tokens and num_new_tokens <= self._max_quiet_new_tokens:
                    return no_blocks
                is_plain = not delay_cache_blocks
            else:
                is_plain = new_computed_blocks is no_blocks and not delay_cache_blocks
            is_plain = is_plain and num_tokens <= self.max_model_len
            if is_plain and self._grows_plainly and num_lookahead_tokens >= 0 and request.num_computed_tokens >= 0:
                grow = self._grow_alone or self._grow_groups
                grown = grow(request, num_tokens, num_tokens - num_lookahead_tokens)
                if grown is not None:
                    rows, self._quiet_limits_tokens[request.request_id] = grown
                    if self._lookups:
                        self._note_admission(request)
                    return BlocksOfIds(self.pool, rows) if rows else no_blocks

        demand = SlotDemand(
            num_computed_tokens=request.num_computed_tokens,
            num_hit_tokens=num_new_computed_tokens,
            num_external_tokens=num_external_computed_tokens,
            num_new_tokens=num_new_tokens,
            num_lookahead_tokens=num_lookahead_tokens,
            max_model_len=self.max_model_len,
            num_encoder_tokens=num_encoder_tokens,
        )
        # The shared empty answer says that there was nothing to find; it does not admit a request.
        has_lookup = new_computed_blocks is not None and new_computed_blocks is not no_blocks
        call_checks.check_demand(request.request_id, demand)
        hits = self._no_hits
        if has_lookup or num_new_computed_tokens:
            hits = self._hits_of(request, new_computed_blocks or no_blocks, num_new_computed_tokens)
        is_admission = has_lookup or num_external_computed_tokens > 0
        self._coordinator.check_admission(request.request_id, hits, is_admission=is_admission)
        # Drafts may be rejected: only tokens that the request has for certain are cached.
        num_cache_tokens = min(demand.num_tokens_after_step, request.num_tokens)
        if not self.enable_caching or delay_cache_blocks:
            num_cache_tokens = 0
        self._coordinator.check_block_hashes(request, num_cache_tokens)
        new_block_ids = self._serve(request, demand, hits, num_cache_tokens, is_admission=is_admission)
        return None if new_block_ids is None else self._answer(new_block_ids)

    def can_fit_full_sequence(
        self,
        request: Any,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_external_computed_tokens: int = 0,
        num_encoder_tokens: int = 0,
    ) -> bool:
        """Whether the free blocks suffice for all tokens of a waiting request, not only for its first step. Changes
        nothing. The arguments are those of `allocate_slots`.

        Where no other request holds a block the answer is True unless a group defers: no other's end makes room, so
        `allocate_slots` is to tell what can be done in steps.

        Raises:
            CallError: hits that no lookup can have found.
        """
        num_ready_tokens = request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens
        demand = SlotDemand(
            num_computed_tokens=request.num_computed_tokens,
            num_hit_tokens=num_new_computed_tokens,
            num_external_tokens=num_external_computed_tokens,
            num_new_tokens=max(min(request.num_tokens, self.max_model_len) - num_ready_tokens, 0),
            num_lookahead_tokens=0,
            max_model_len=self.max_model_len,
            num_encoder_tokens=num_encoder_tokens,
        )
        blocks = self.empty_kv_cache_blocks if new_computed_blocks is None else new_computed_blocks
        has_lookup = blocks is not self.empty_kv_cache_blocks
        hits = self._no_hits
        if has_lookup or num_new_computed_tokens:
            hits = self._hits_of(request, blocks, num_new_computed_tokens)
        is_admission = has_lookup or num_external_computed_tokens > 0
        plan = self._coordinator.plan(request.request_id, demand, hits, is_admission=is_admission)
        if plan.defers:
            return False
        return plan.num_free_blocks_needed <= self.pool.num_free_blocks or self._holds_all(request.request_id)

    def _grow_groups(
        self, request: Any, num_slot_tokens: int, num_tokens_after_step: int
    ) -> tuple[tuple[Sequence[int], ...], int] | None:
        """Serve a running request without hits whose groups only take blocks at their tables' ends. (Where there is but
        one group, which gives none back: `AttentionGroup.grow_alone`.)

        Returns:
            New ids by group, or () where there are none, and the quiet limit. None: not so easily, nothing was changed
            but for what the windows have left behind.
        """
        if request.request_id not in self._quiet_limits_tokens:
            return None
        num_cache_tokens = 0
        if self.enable_caching:
            # Drafts may be rejected: only tokens that the request has for certain are cached.
            num_cache_tokens = min(num_tokens_after_step, request.num_tokens)
            if len(request.block_hashes) < num_cache_tokens // self._num_tokens_per_hash:
                return None
        coordinator = self._coordinator
        if self._releases_skipped:
            num_computed_tokens = request.num_computed_tokens
            num_confirmed_tokens = self._num_confirmed_tokens(request, num_computed_tokens)
            coordinator.release_skipped(request.request_id, num_computed_tokens, num_confirmed_tokens)
        grown = coordinator.grow(request, num_slot_tokens, num_cache_tokens)
        if grown is None:
            return None
        if self._releases_skipped:
            self._note_drafts(request, num_tokens_after_step)
        return grown

    def _serve(
        self, request: Any, demand: SlotDemand, hits: Sequence[Hit], num_cache_tokens: int, *, is_admission: bool
    ) -> tuple[list[int], ...] | None:
        """Plan and, if the free blocks suffice, commit: hits first, then new blocks, then caching."""
        request_id = request.request_id
        # Even where the answer will be None: blocks that nobody looks at any more are free for others.
        if self._releases_skipped:
            num_present_tokens = demand.num_present_tokens
            num_confirmed_tokens = self._num_confirmed_tokens(request, num_present_tokens)
            self._coordinator.release_skipped(request_id, num_present_tokens, num_confirmed_tokens)
            self._note_drafts(request, demand.num_tokens_after_step)
        plan = self._coordinator.plan(request_id, demand, hits, is_admission=is_admission)
        if plan.defers or plan.num_free_blocks_needed > self.pool.num_free_blocks:
            self._note_refusal(request_id, plan, demand)
            return None
        if is_admission:
            self._coordinator.admit(request_id, plan, hits)
        new_block_ids = self._coordinator.take_new(request_id, plan)
        if num_cache_tokens:
            self._coordinator.cache_full_blocks(request, num_cache_tokens)
        self._quiet_limits_tokens[request_id] = self._coordinator.quiet_limit_tokens(request_id)
        self._note_admission(request)
        return new_block_ids

    def _hits_of(self, request: Any, blocks: KVCacheBlocks, num_hit_tokens: int) -> Sequence[Hit]:
        """What a lookup found, as it is now.

        Raises:
            CallError: it is not this manager's, not so many tokens, or a block is not what a lookup of its group can
                have found.
        """
        pool = self.pool
        lookup = self._lookups.get(request.request_id)
        if lookup is not None and lookup.blocks is blocks and type(blocks) is FoundBlocks:
            found = blocks.hits_in(pool, num_hit_tokens)
            if found is not None:
                return found
        call_checks.check_hits(
            request.request_id,
            blocks.block_ids,
            num_hit_tokens,
            self.geometry,
            is_ours=blocks.is_of(pool),
            enable_caching=self.enable_caching,
        )
        hits = [
            find_hit(pool, group.group_id, row, may_be_null=not group.any_shorter_prefix_serves)
            for group, row in zip(self.groups, blocks.block_ids, strict=True)
        ]
        self._coordinator.note_hits_named(request, hits)
        return hits

    def _num_confirmed_tokens(self, request: Any, num_present_tokens: int) -> int:
        """Computed tokens that stay even if every draft under way is rejected.

        Without drafts every computed token stays, also one that an asynchronous step has yet to sample.
        """
        request_id = request.request_id
        num_confirmed_tokens = num_present_tokens
        if request_id in self._drafting:
            num_confirmed_tokens = min(num_present_tokens, request.num_tokens - 1)
            if num_confirmed_tokens == num_present_tokens:
                self._drafting.discard(request_id)  # every step's output has arrived
        return num_confirmed_tokens

    def _note_drafts(self, request: Any, num_tokens_after_step: int) -> None:
        """Note it if this step has drafts."""
        if num_tokens_after_step > request.num_tokens + request.num_output_placeholders:
            self._drafting.add(request.request_id)

    def _note_admission(self, request: Any) -> None:
        lookup = self._lookups.pop(request.request_id, None)
        if lookup is not None:
            for notify in self._observers.on_admit:
                notify(request, lookup.num_hit_tokens)

    def _note_refusal(self, request_id: str, plan: AllocationPlan, demand: SlotDemand) -> None:
        if request_id in self._quiet_limits_tokens:  # the windows may have moved
            self._quiet_limits_tokens[request_id] = self._coordinator.quiet_limit_tokens(request_id)
        if not plan.defers and self._holds_all(request_id):
            num_needed_blocks = self.pool.num_held_blocks + plan.num_free_blocks_needed
            self._refused_alone[request_id] = Refusal(
                num_needed_blocks, self.pool.num_usable_blocks, demand.num_present_tokens
            )

    def _holds_all(self, request_id: str) -> bool:
        """Whether no other request holds a block. (The tables' lengths alone tell it of most requests.)"""
        num_held_blocks, rows = self.pool.num_held_blocks, self._coordinator.block_ids(request_id)
        return num_held_blocks <= sum(map(len, rows)) and num_held_blocks == self._coordinator.num_held_blocks(
            request_id
        )

    def never_fits(self, request: Any) -> NeverFits | None:
        """The blocks that the request's present tokens need, and those that the pool has, where even an empty pool
        could not hold them; else None.
        """
        return never_fits(self.geometry, request.num_tokens)

    def take_refused_alone(self) -> dict[str, Refusal]:
        """Requests that were refused in this step although no other request held a block: no other's end makes room for
        them. The same request may fit with another prefix hit or a smaller step; `never_fits` says where it cannot.
        """
        refused_alone, self._refused_alone = self._refused_alone, {}
        return refused_alone

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Cache what is full with the request's first `num_computed_tokens` tokens (after an asynchronous step)."""
        request_id = request.request_id
        limit = self._quiet_limits_tokens.get(request_id)
        if not self.enable_caching or (limit is not None and num_computed_tokens <= limit):
            return
        self._coordinator.check_block_hashes(request, num_computed_tokens)
        self._coordinator.check_full_blocks(request_id, num_computed_tokens)
        self._coordinator.cache_full_blocks(request, num_computed_tokens)
        if limit is not None:
            self._quiet_limits_tokens[request_id] = self._coordinator.quiet_limit_tokens(request_id)

    def free(self, request: Any) -> None:
        """Give back all blocks of a finished, aborted or preempted request. Full blocks stay findable until they are
        reused.
        """
        request_id = request.request_id
        self._quiet_limits_tokens.pop(request_id, None)
        self._lookups.pop(request_id, None)
        self._drafting.discard(request_id)
        self._coordinator.free(request_id)

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Free what the attention windows of a request have left behind."""
        self._coordinator.release_skipped(request_id, total_computed_tokens, total_computed_tokens)
        if request_id in self._quiet_limits_tokens:
            self._quiet_limits_tokens[request_id] = self._coordinator.quiet_limit_tokens(request_id)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Take blocks out of the prefix cache: a connector failed to load them.

        Who holds them keeps them, and publishes neither them nor anything computed from them any more; what it has
        published of that leaves the prefix cache, too, and is reused first once it is free.

        Raises:
            CallError: an id is outside the pool, or no int. Nothing was changed.
        """
        block_ids = list(block_ids)
        self.pool.evict(block_ids)
        self._coordinator.stop_publishing(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Drop the whole prefix cache. Answers False, and changes nothing, while a request holds blocks."""
        return self.pool.reset()

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """By group, the leading blocks of this request that every request with blocks holds too; 0 for groups whose
        kernels do not share them.
        """
        return self._coordinator.num_common_prefix_blocks(running_request_id)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The blocks of a request; none for an unknown one."""
        tables = [group.tables.get(request_id) for group in self.groups]
        if not any(table is not None and table.block_ids for table in tables):
            return self.empty_kv_cache_blocks
        return HeldBlocks(self.pool, tables)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """`block_ids[group][i]` of a request, copied."""
        tables = [group.tables.get(request_id) for group in self.groups]
        return tuple([table.block_ids.copy() if table is not None else [] for table in tables])

    def take_new_block_ids(self) -> list[int]:
        """Block ids handed out since the last call (the model runner zeroes them)."""
        return self._coordinator.take_unreported_block_ids()

    def new_step_starts(self) -> None:
        """The scheduler begins a step."""
        self._refused_alone.clear()
        self._coordinator.new_step_starts()

    def _answer(self, block_ids: tuple[Sequence[int], ...]) -> KVCacheBlocks:
        return KVCacheBlocks.of_ids(self.pool, block_ids) if any(block_ids) else self.empty_kv_cache_blocks
