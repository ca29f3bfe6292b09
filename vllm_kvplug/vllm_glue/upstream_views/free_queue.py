"""The free blocks by upstream's name: `FreeKVCacheBlockQueue`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from vllm_kvplug.block_pool import BlockPool as CorePool
from vllm_kvplug.vllm_glue.upstream_views.blocks import PoolBlocks
from vllm_kvplug.vllm_glue.upstream_views.single_blocks import SingleBlocks


class _Order(Protocol):
    """Blocks in an order. `num_blocks` is a number of its own: a test sets it to play an empty pool."""

    num_blocks: int

    def __iter__(self) -> Iterator[Any]: ...

    def remove(self, block: Any) -> None: ...

    def append(self, block: Any) -> None: ...


class _OwnOrder:
    """The order of a queue without a pool."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self._blocks: dict[int, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        return iter(self._blocks.values())

    def remove(self, block: Any) -> None:
        del self._blocks[block.block_id]
        self.num_blocks -= 1

    def append(self, block: Any) -> None:
        self._blocks[block.block_id] = block
        self.num_blocks += 1


class _PoolOrder:
    """The order of a pool's free blocks."""

    def __init__(self, pool: CorePool, blocks: PoolBlocks) -> None:
        self._pool, self._blocks, self._single = pool, blocks, SingleBlocks(pool)

    def __iter__(self) -> Iterator[Any]:
        return (self._blocks[block_id] for block_id in self._pool.free_block_ids())

    @property
    def num_blocks(self) -> int:
        return self._pool.num_free_blocks

    @num_blocks.setter
    def num_blocks(self, num_blocks: int) -> None:
        self._pool.num_free_blocks = num_blocks

    def remove(self, block: Any) -> None:
        self._single.remove_free(block.block_id)

    def append(self, block: Any) -> None:
        self._single.append_free([block.block_id])


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
    """The free blocks in the order of their reuse. Constructed, it is a queue of its own over the given blocks.

    As upstream's, the queue of a pool neither counts who holds a block nor takes it out of the prefix cache.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._bind(_OwnOrder())
        self.append_n(blocks)

    @classmethod
    def of_pool(cls, pool: CorePool, blocks: PoolBlocks) -> FreeKVCacheBlockQueue:
        """The view of a pool's free blocks."""
        self = cls.__new__(cls)
        self._bind(_PoolOrder(pool, blocks))
        return self

    def _bind(self, order: _Order) -> None:
        self._order = order
        self.fake_free_list_head, self.fake_free_list_tail = _QueueEnd(self), _QueueEnd(self)

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks. Set, it is believed, and goes on being counted from there."""
        return self._order.num_blocks

    @num_free_blocks.setter
    def num_free_blocks(self, num_blocks: int) -> None:
        self._order.num_blocks = num_blocks

    def get_all_free_blocks(self) -> list[Any]:
        """The free blocks, the next to be reused first."""
        return list(self._order)

    def popleft(self) -> Any:
        """Take the next block."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """Take the next `n` blocks."""
        blocks = list(islice(self._order, n))
        if len(blocks) < n:
            found = f"found {len(blocks)}" if blocks else "found the queue empty"
            raise ValueError(f"cannot take {n} blocks: expected as many free ones, {found}")
        for block in blocks:
            self.remove(block)
        return blocks

    def remove(self, block: Any) -> None:
        """Take one block out of the middle."""
        self._order.remove(block)

    def append(self, block: Any) -> None:
        """Put one block at the end."""
        self._order.append(block)

    def append_n(self, blocks: Iterable[Any]) -> None:
        """Put blocks at the end."""
        for block in blocks:
            self.append(block)
