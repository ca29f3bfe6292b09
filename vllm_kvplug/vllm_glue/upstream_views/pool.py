"""The pool by upstream's name: `BlockPool`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import KVCacheEvent

from vllm_kvplug import eviction
from vllm_kvplug.block import make_key
from vllm_kvplug.block_pool import NULL_BLOCK_ID
from vllm_kvplug.block_pool import BlockPool as CorePool
from vllm_kvplug.errors import UnsupportedError
from vllm_kvplug.observers import ObserverSet
from vllm_kvplug.vllm_glue.manager import KVCacheManager
from vllm_kvplug.vllm_glue.observers import EventObserver
from vllm_kvplug.vllm_glue.upstream_views.blocks import KVCacheBlock, PoolBlocks
from vllm_kvplug.vllm_glue.upstream_views.free_queue import FreeKVCacheBlockQueue
from vllm_kvplug.vllm_glue.upstream_views.prefix_map import BlockHashToBlockMap, IndexesOnDemand

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
    from vllm.v1.request import Request


class BlockPool:
    """The blocks of a cache. Constructed, it is a pool of its own over the same core.

    Args:
        num_gpu_blocks: blocks in the pool, the null block included.
        enable_caching: whether blocks can be cached.
        hash_block_size: tokens that each of a request's block hashes covers.
        enable_kv_cache_events: whether `take_events` answers events.
        metrics_collector: vLLM's sampling of block residency.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: KVCacheMetricsCollector | None = None,
    ) -> None:
        if metrics_collector is not None:
            raise UnsupportedError("BlockPool: kvplug does not support a metrics_collector yet; leave it out")
        events = EventObserver() if enable_kv_cache_events else None
        order = eviction.create("lru", num_gpu_blocks)
        core = CorePool(num_gpu_blocks, 0, order, ObserverSet([events] if events else []))
        core.indexes = IndexesOnDemand()  # type: ignore[assignment]
        self._bind(core, events, enable_caching, hash_block_size)

    @classmethod
    def of_manager(cls, manager: KVCacheManager) -> BlockPool:
        """The view of a manager's pool."""
        self = cls.__new__(cls)
        group = manager.geometry.groups[0]
        self._bind(manager.pool, manager._events, manager.enable_caching, group.num_tokens_per_block)
        return self

    def _bind(self, core: CorePool, events: EventObserver | None, enable_caching: bool, hash_block_size: int) -> None:
        self.core, self._events = core, events
        self.num_gpu_blocks = core.num_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = events is not None
        self.blocks = PoolBlocks(core)
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self.free_block_queue = FreeKVCacheBlockQueue.of_pool(core, self.blocks)
        self.cached_block_hash_to_block = BlockHashToBlockMap.of_pool(core, self.blocks)

    @property
    def kv_event_queue(self) -> list[KVCacheEvent]:
        """The events that `take_events` would answer."""
        return self._events.events if self._events is not None else []

    def take_events(self) -> list[KVCacheEvent]:
        """KV events since the last call."""
        return self._events.take() if self._events is not None else []

    def get_num_free_blocks(self) -> int:
        """Number of free blocks."""
        return self.core.num_free_blocks

    def get_usage(self) -> float:
        """Held part of the usable blocks, 0.0 to 1.0."""
        return self.core.usage

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[KVCacheBlock] | None:
        """The cached block of each group, or None where one of them has none."""
        keys = [make_key(block_hash, group_id) for group_id in kv_cache_group_ids]
        blocks = [self.cached_block_hash_to_block.get_one_block(key) for key in keys]
        return None if None in blocks else blocks

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Sequence[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        """Cache `blocks[num_cached_blocks:num_full_blocks]` under the request's hashes."""
        if block_size != self.hash_block_size:
            raise UnsupportedError(
                f"block_size: kvplug supports only the pool's hash_block_size yet, "
                f"{self.hash_block_size} tokens; found {block_size}"
            )
        new_blocks = blocks[num_cached_blocks:num_full_blocks]
        if not new_blocks:
            return
        block_hashes = request.block_hashes[num_cached_blocks:num_full_blocks]
        block_ids = [block.block_id for block in new_blocks]
        if all(block._pool is self.core for block in new_blocks):
            self.core.cache(kv_cache_group_id, block_ids, block_hashes)
        else:
            # Blocks of somebody else: they keep their own hash, and only the index is ours.
            for block, block_hash in zip(new_blocks, block_hashes, strict=True):
                block.block_hash = make_key(block_hash, kv_cache_group_id)
                self.cached_block_hash_to_block.insert(block.block_hash, block)
        if self._events is not None:
            row = [NULL_BLOCK_ID] * num_cached_blocks + block_ids
            self._events.on_cache(request, kv_cache_group_id, block_size, row, num_cached_blocks, num_full_blocks)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take free blocks."""
        return [self.blocks[block_id] for block_id in self.core.take(num_blocks)]

    def touch(self, blocks: Sequence[Any]) -> None:
        """Hold blocks once more."""
        self.core.acquire(block.block_id for block in blocks)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Give blocks back, the first to be reused first."""
        self.core.release([block.block_id for block in ordered_blocks])

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Take blocks out of the prefix cache."""
        self.core.evict(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Drop the prefix cache; refused while a block is held."""
        return self.core.reset()

    def _maybe_evict_cached_block(self, block: Any) -> bool:
        was_cached = block.block_hash is not None
        self.core.evict([block.block_id])
        return was_cached
