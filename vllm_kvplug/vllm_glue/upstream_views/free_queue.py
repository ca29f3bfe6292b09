"""The free blocks by upstream's name: `FreeKVCacheBlockQueue`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vllm_kvplug.block_pool import BlockPool as CorePool
from vllm_kvplug.eviction.base import EvictionPolicy
from vllm_kvplug.eviction.lru import LRUEviction
from vllm_kvplug.vllm_glue.upstream_views.blocks import PoolBlocks


class _MiscountedOrder:
    """An eviction order that reports another number of free blocks than it has: a test plays an empty pool this way."""

    def __init__(self, order: EvictionPolicy, num_blocks_off: int) -> None:
        self.order, self._num_blocks_off = order, num_blocks_off

    def __len__(self) -> int:
        return max(len(self.order) + self._num_blocks_off, 0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self.order

    def push(self, block_ids: Sequence[int]) -> None:
        self.order.push(block_ids)

    def push_first(self, block_ids: Sequence[int]) -> None:
        self.order.push_first(block_ids)

    def pop(self, num_blocks: int) -> list[int]:
        return self.order.pop(num_blocks)

    def remove(self, block_id: int) -> None:
        self.order.remove(block_id)


class _LoneQueue:
    """What a queue without a pool has in a pool's place: an order, nothing in it yet."""

    def __init__(self) -> None:
        self.free_blocks: EvictionPolicy = LRUEviction(1)


class _QueueEnd:
    """One end of the queue, asking the queue for its neighbour. The blocks themselves are in no linked list."""

    def __init__(self, queue: FreeKVCacheBlockQueue) -> None:
        self._queue = queue

    @property
    def next_free_block(self) -> Any:
        return next(iter(self._queue.get_all_free_blocks()), self._queue.fake_free_list_tail)

    @property
    def prev_free_block(self) -> Any:
        return next(reversed(self._queue.get_all_free_blocks()), self._queue.fake_free_list_head)


class FreeKVCacheBlockQueue:
    """The free blocks in the order of their reuse. Constructed, it is a queue of its own over the given blocks."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._bind(_LoneQueue(), {block.block_id: block for block in blocks})
        self.append_n(blocks)

    @classmethod
    def of_pool(cls, pool: CorePool, blocks: PoolBlocks) -> FreeKVCacheBlockQueue:
        """The view of a pool's free blocks."""
        self = cls.__new__(cls)
        self._bind(pool, blocks)
        return self

    def _bind(self, holder: CorePool | _LoneQueue, blocks: Any) -> None:
        self._holder, self._blocks = holder, blocks
        self.fake_free_list_head, self.fake_free_list_tail = _QueueEnd(self), _QueueEnd(self)

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks. Set, the pool believes it; set to the true number, it counts again."""
        return len(self._holder.free_blocks)

    @num_free_blocks.setter
    def num_free_blocks(self, num_blocks: int) -> None:
        order = self._holder.free_blocks
        if isinstance(order, _MiscountedOrder):
            order = order.order
        num_blocks_off = num_blocks - len(order)
        self._holder.free_blocks = _MiscountedOrder(order, num_blocks_off) if num_blocks_off else order

    def get_all_free_blocks(self) -> list[Any]:
        """The free blocks, the next to be reused first."""
        return [self._blocks[block_id] for block_id in self._holder.free_blocks]

    def popleft(self) -> Any:
        """Take the next block."""
        if not self.num_free_blocks:
            raise ValueError("the queue of free blocks is empty")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """Take the next `n` blocks."""
        return [self._blocks[block_id] for block_id in self._holder.free_blocks.pop(n)]

    def remove(self, block: Any) -> None:
        """Take one block out of the middle."""
        self._holder.free_blocks.remove(block.block_id)

    def append(self, block: Any) -> None:
        """Put one block at the end."""
        self.append_n([block])

    def append_n(self, blocks: Sequence[Any]) -> None:
        """Put blocks at the end."""
        if isinstance(self._blocks, dict):
            self._blocks.update((block.block_id, block) for block in blocks)
        self._holder.free_blocks.push([block.block_id for block in blocks])
