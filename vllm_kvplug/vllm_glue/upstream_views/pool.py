"""The pool by upstream's name: `BlockPool`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import KVCacheEvent

from vllm_kvplug import eviction
from vllm_kvplug.block import make_key
from vllm_kvplug.block_pool import NULL_BLOCK_ID
from vllm_kvplug.block_pool import BlockPool as CorePool
from vllm_kvplug.errors import BlockError, CallError
from vllm_kvplug.groups import AttentionGroup
from vllm_kvplug.hash_row import HashRow
from vllm_kvplug.observers import Observer, ObserverSet
from vllm_kvplug.vllm_glue.manager import KVCacheManager
from vllm_kvplug.vllm_glue.observers import EventObserver, ResidencyObserver
from vllm_kvplug.vllm_glue.upstream_views.blocks import KVCacheBlock, PoolBlocks
from vllm_kvplug.vllm_glue.upstream_views.free_queue import FreeKVCacheBlockQueue
from vllm_kvplug.vllm_glue.upstream_views.prefix_map import BlockHashToBlockMap, IndexesOnDemand
from vllm_kvplug.vllm_glue.upstream_views.single_blocks import SingleBlocks

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
        events = EventObserver(hash_block_size) if enable_kv_cache_events else None
        observers: list[Observer] = [events] if events is not None else []
        if metrics_collector is not None:
            observers.append(ResidencyObserver(metrics_collector, enable_caching=enable_caching))
        core = CorePool(num_gpu_blocks, 0, eviction.create("lru"), ObserverSet(observers))
        core.indexes = IndexesOnDemand()  # type: ignore[assignment]
        self._bind(core, events, enable_caching, hash_block_size)

    @classmethod
    def of_manager(cls, manager: KVCacheManager) -> BlockPool:
        """The view of a manager's pool."""
        self = cls.__new__(cls)
        self._bind(manager.pool, manager._events, manager.enable_caching, manager.hash_block_size)
        return self

    def _bind(self, core: CorePool, events: EventObserver | None, enable_caching: bool, hash_block_size: int) -> None:
        self.core, self._events = core, events
        self.single_blocks = SingleBlocks(core)
        # Whose tables hold its blocks: a manager's, or those that were constructed over this pool.
        self.groups: list[AttentionGroup] = []
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
        if block_size % self.hash_block_size:
            raise CallError(
                f"block_size: expected a multiple of hash_block_size, {self.hash_block_size} tokens; found {block_size}"
            )
        new_blocks = blocks[num_cached_blocks:num_full_blocks]
        if not new_blocks:
            return
        all_hashes = HashRow(request.block_hashes, block_size // self.hash_block_size)
        block_hashes = all_hashes[num_cached_blocks:num_full_blocks]
        block_ids = [block.block_id for block in new_blocks]
        for block, block_hash in zip(new_blocks, block_hashes, strict=True):
            if block.is_null:
                continue
            key = make_key(block_hash, kv_cache_group_id)
            if block.block_hash is not None:
                raise BlockError(f"cannot cache block {block.block_id}: expected no hash, found {block.block_hash!r}")
            self.cached_block_hash_to_block.insert(key, block)
            block.block_hash = key  # of a block of somebody else; one of this pool has it by now
        if self._events is not None:
            row = [NULL_BLOCK_ID] * num_cached_blocks + block_ids
            self._events.on_cache(
                request, kv_cache_group_id, block_size, row, all_hashes, num_cached_blocks, num_full_blocks
            )

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take free blocks."""
        return [self.blocks[block_id] for block_id in self.single_blocks.take(num_blocks)]

    def touch(self, blocks: Sequence[Any]) -> None:
        """Hold blocks once more."""
        self.single_blocks.hold([block.block_id for block in blocks])

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Give blocks back, the first to be reused first."""
        blocks = list(ordered_blocks)
        for block in blocks:
            if isinstance(block._pool, CorePool) and block._pool is not self.core:
                raise BlockError(f"cannot free block {block.block_id}: expected one of this pool, found another pool's")
        self.single_blocks.release([block.block_id for block in blocks])

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
