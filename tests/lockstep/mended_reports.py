"""Upstream's events and statistics put right, where `deviations.py` says that a call triggers a deviation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.metrics.stats import PrefixCacheStats

from tests.lockstep import deviations
from tests.lockstep.deviations import PLACES_IMAGES
from tests.lockstep.trace import Setup
from tests.lockstep.triggers import Triggers, wrap


class CopiesRemain:
    """F13: BlockRemoved only when the last copy of a hash goes."""

    def __init__(self, manager: Any, triggers: Triggers) -> None:
        self._pool = manager.block_pool
        self._triggers = triggers
        wrap(self._pool, "_maybe_evict_cached_block", self._evict)

    def _evict(self, original: Callable[[Any], bool], block: Any) -> bool:
        key = block.block_hash
        if not original(block):
            return False
        events = self._pool.kv_event_queue
        if deviations.is_copy_left(self._pool, key) and events and isinstance(events[-1], BlockRemoved):
            self._triggers.note("F13")
            events.pop()
        return True


class HashedKeys:
    """F4, F5: BlockStored's extra keys are what should have been hashed."""

    def __init__(self, manager: Any, triggers: Triggers) -> None:
        self._pool = manager.block_pool
        self._triggers = triggers
        wrap(manager.block_pool, "cache_full_blocks", self._cache)

    def _cache(self, original: Callable[..., None], **kwargs: Any) -> None:
        num_events = len(self._pool.kv_event_queue)
        original(**kwargs)
        for event in self._pool.kv_event_queue[num_events:]:
            if isinstance(event, BlockStored):
                self._put_right(event, **kwargs)

    def _put_right(
        self,
        event: BlockStored,
        *,
        request: Any,
        blocks: Sequence[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        **_: Any,
    ) -> None:
        positions = [i for i in range(num_cached_blocks, num_full_blocks) if not blocks[i].is_null]
        right_keys = [_right_keys(request, i * block_size, (i + 1) * block_size) for i in positions] or None
        deviation = "F4" if request.lora_request is None else "F5"
        if deviation in deviations.TRIGGERS and deviations.has_wrong_keys(event.extra_keys, right_keys):
            self._triggers.note(deviation)
            event.extra_keys = right_keys


def _right_keys(request: Any, start_token: int, end_token: int) -> tuple[Any, ...] | None:
    """What goes into the hash of these tokens' block besides them, for the requests of `twins.py`."""
    keys: list[Any] = []
    if request.lora_request is not None:
        keys.append(("lora", request.lora_request.lora_name, request.lora_request.lora_path))
    for feature in request.mm_features:
        place = feature.mm_position
        if place.offset < end_token and start_token < place.offset + place.length:
            keys.append((feature.identifier, place.offset - start_token) if PLACES_IMAGES else feature.identifier)
    if request.cache_salt and start_token == 0:
        keys.append(request.cache_salt)
    return tuple(keys) or None


class AdmittedStats:
    """F10: a request's lookup counts once, when it is admitted; upstream counts each lookup at once.

    Keeps what is right by itself, from the lookups and admissions that it is told of.
    """

    def __init__(self, setup: Setup, triggers: Triggers) -> None:
        self._is_on = setup.log_stats
        self._triggers = triggers
        self._stats = PrefixCacheStats()
        self._pending: dict[str, tuple[int, int, bool]] = {}

    def looked_up(self, request: Any, num_hit_tokens: int) -> None:
        """A lookup that the manager looks up: not one of a request that skips reading."""
        self._pending[request.request_id] = (request.num_tokens, num_hit_tokens, request.num_preemptions > 0)

    def admitted(self, request: Any) -> None:
        """The request was given slots."""
        lookup = self._pending.pop(request.request_id, None)
        if lookup is not None:
            num_tokens, num_hits, preempted = lookup
            self._stats.record(num_tokens=num_tokens, num_hits=num_hits, preempted=preempted)

    def request_goes(self, request_id: str) -> None:
        """It was freed, perhaps without having been admitted."""
        self._pending.pop(request_id, None)

    def take(self, upstream: Any) -> Any:
        """The right answer; upstream's where no deviation was triggered."""
        if not self._is_on:
            return upstream
        right, self._stats = self._stats, PrefixCacheStats()
        right.reset = upstream.reset
        if deviations.counts_refused_lookups(upstream, right):
            self._triggers.note("F10")
        return right
