"""What vLLM wants to hear of the cache: KV events for subscribers, and prefix-cache statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request

from vllm_kvplug.block_pool import NULL_BLOCK_ID
from vllm_kvplug.observers import Observer


class EventObserver(Observer):
    """Collects vLLM's KV events until the scheduler takes them."""

    def __init__(self) -> None:
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
        first_block: int,
        end_block: int,
    ) -> None:
        external_hashes, extra_keys = [], []
        mm_position = 0
        for position in range(first_block, min(end_block, len(block_ids))):
            if block_ids[position] == NULL_BLOCK_ID:
                continue
            external_hashes.append(maybe_convert_block_hash(request.block_hashes[position]))
            start_token = position * num_tokens_per_block
            keys, mm_position = generate_block_hash_extra_keys(
                request, start_token, start_token + num_tokens_per_block, mm_position
            )
            extra_keys.append(keys)
        lora = request.lora_request
        parent = maybe_convert_block_hash(request.block_hashes[first_block - 1]) if first_block else None
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

    def on_evict(self, block_id: int, group_id: int, block_hash: Any) -> None:
        self.events.append(BlockRemoved(block_hashes=[maybe_convert_block_hash(block_hash)], medium=MEDIUM_GPU))

    def on_reset(self) -> None:
        self.events.append(AllBlocksCleared())


class StatsObserver(Observer):
    """Counts lookups and hits, in tokens, until the scheduler takes the statistics."""

    def __init__(self) -> None:
        self.stats = PrefixCacheStats()

    def take(self) -> PrefixCacheStats:
        """The statistics since the last call."""
        stats, self.stats = self.stats, PrefixCacheStats()
        return stats

    def on_lookup(self, request: Request, num_hit_tokens: int) -> None:
        self.stats.record(request.num_tokens, num_hit_tokens, preempted=request.num_preemptions > 0)

    def on_reset(self) -> None:
        self.stats.reset = True
