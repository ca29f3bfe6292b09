"""What vLLM wants to hear of the cache: KV events for subscribers, statistics of the prefix cache, and the residency of
blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request

from vllm_kvplug.observers import Observer
from vllm_kvplug.vllm_glue.hashing import extra_keys_of_blocks


class EventObserver(Observer):
    """Collects vLLM's KV events until the scheduler takes them. A request's hashes cover `num_tokens_per_hash` each."""

    def __init__(self, num_tokens_per_hash: int) -> None:
        self._num_tokens_per_hash = num_tokens_per_hash
        self.events: list[KVCacheEvent] = []

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call, oldest first."""
        events, self.events = self.events, []
        return events

    def on_cache(
        self,
        request: Request,
        group_id: int,
        num_tokens_per_block: int,
        block_ids: Sequence[int],
        block_hashes: Sequence[bytes],
        first_block: int,
        end_block: int,
    ) -> None:
        positions = [position for position in range(first_block, min(end_block, len(block_ids))) if block_ids[position]]
        external_hashes = [maybe_convert_block_hash(BlockHash(block_hashes[position])) for position in positions]
        extra_keys = extra_keys_of_blocks(request, positions, num_tokens_per_block, self._num_tokens_per_hash)
        lora = request.lora_request
        parent = maybe_convert_block_hash(BlockHash(block_hashes[first_block - 1])) if first_block else None
        self.events.append(
            BlockStored(
                block_hashes=external_hashes,
                parent_block_hash=parent,
                token_ids=request.all_token_ids[first_block * num_tokens_per_block : end_block * num_tokens_per_block],
                block_size=num_tokens_per_block,
                lora_id=None if lora is None else lora.adapter_id,
                lora_name=None if lora is None else lora.name,
                medium=MEDIUM_GPU,
                extra_keys=extra_keys or None,
            )
        )

    def on_evict(self, block_id: int, group_id: int, block_hash: bytes, is_last_copy: bool) -> None:
        # A subscriber counts hashes, not blocks: while another copy answers for the hash, nothing is gone.
        if is_last_copy:
            external_hash = maybe_convert_block_hash(BlockHash(block_hash))
            self.events.append(BlockRemoved(block_hashes=[external_hash], medium=MEDIUM_GPU))

    def on_reset(self) -> None:
        self.events.append(AllBlocksCleared())


class StatsObserver(Observer):
    """Counts requests, their tokens and their hits until the scheduler takes the statistics: each once, when it is
    admitted, however often it was refused before.
    """

    def __init__(self) -> None:
        self.stats = PrefixCacheStats()

    def take(self) -> PrefixCacheStats:
        """The statistics since the last call."""
        stats, self.stats = self.stats, PrefixCacheStats()
        return stats

    def on_admit(self, request: Request, num_hit_tokens: int) -> None:
        self.stats.record(request.num_tokens, num_hit_tokens, preempted=request.num_preemptions > 0)

    def on_reset(self) -> None:
        self.stats.reset = True


class ResidencyObserver(Observer):
    """Feeds vLLM's sampling of how long blocks live and how often they are hit (--kv-cache-metrics)."""

    def __init__(self, collector: KVCacheMetricsCollector, *, enable_caching: bool) -> None:
        self._collector = collector
        self._enable_caching = enable_caching

    def on_take(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            block: Any = _BlockId(block_id)
            # A block that is handed out ends its earlier life, cached or not.
            if self._enable_caching:
                self._collector.on_block_evicted(block)
            self._collector.on_block_allocated(block)

    def on_acquire(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._collector.on_block_accessed(_BlockId(block_id))  # type: ignore[arg-type]

    def on_withdraw(self, block_ids: Collection[int]) -> None:
        for block_id in block_ids:
            self._collector.on_block_evicted(_BlockId(block_id))  # type: ignore[arg-type]

    def on_reset(self) -> None:
        self._collector.reset()


class _BlockId(NamedTuple):
    """All that the collector reads of a block."""

    block_id: int
