"""Blocks by upstream's names: `KVCacheBlock`, and rows of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvplug.block import BlockSequence, BlockView, split_key
from vllm_kvplug.block_pool import BlockPool as CorePool
from vllm_kvplug.vllm_glue.upstream_views.single_blocks import SingleBlocks


@dataclass(eq=False, slots=True)
class _LoneBlock:
    """What a block without a pool has in a pool's place: its own state."""

    ref_cnt: int
    block_hash: bytes | None = None


class KVCacheBlock(BlockView):
    """A block whose state can be set. Constructed, it belongs to no pool; a pool's blocks are in `BlockPool.blocks`.

    A pool's block with a hash is one in the prefix cache: setting or forgetting the hash puts it there or takes it out.
    """

    __slots__ = ()

    def __init__(self, block_id: int, ref_cnt: int = 0) -> None:
        pool: Any = _LoneBlock(ref_cnt)
        super().__init__(pool, block_id)

    @classmethod
    def of_pool(cls, pool: CorePool, block_id: int) -> KVCacheBlock:
        """The view of a pool's block."""
        self = cls.__new__(cls)
        BlockView.__init__(self, pool, block_id)
        return self

    @property
    def _own(self) -> _LoneBlock | None:
        pool: Any = self._pool
        return pool if isinstance(pool, _LoneBlock) else None

    @property
    def ref_cnt(self) -> int:
        own = self._own
        return super().ref_cnt if own is None else own.ref_cnt

    @ref_cnt.setter
    def ref_cnt(self, count: int) -> None:
        own = self._own
        if own is not None:
            own.ref_cnt = count
        else:
            SingleBlocks(self._pool).set_num_holders(self.block_id, count)

    @property
    def block_hash(self) -> bytes | None:
        own = self._own
        return super().block_hash if own is None else own.block_hash

    @block_hash.setter
    def block_hash(self, key: bytes) -> None:
        if self.block_hash not in (None, key):
            raise AssertionError(
                f"block {self.block_id}: expected no hash before one is set, found {self.block_hash!r}"
            )
        own = self._own
        if own is not None:
            own.block_hash = key
        else:
            block_hash, group_id = split_key(key)
            SingleBlocks(self._pool).cache(group_id, self.block_id, block_hash)

    # Upstream's tests look at the field behind the property, too.
    @property
    def _block_hash(self) -> bytes | None:
        return self.block_hash

    @property
    def is_null(self) -> bool:
        return super().is_null and self._own is None

    def reset_hash(self) -> None:
        """Forget the hash."""
        own = self._own
        if own is not None:
            own.block_hash = None
        else:
            SingleBlocks(self._pool).uncache(self.block_id)


class BlockRow(BlockSequence):
    """A row of a pool's blocks, as `KVCacheBlock`."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return BlockRow(self._pool, self.block_ids[index])
        return KVCacheBlock.of_pool(self._pool, self.block_ids[index])

    def __iter__(self) -> Iterator[BlockView]:
        return (KVCacheBlock.of_pool(self._pool, block_id) for block_id in self.block_ids)


class PoolBlocks(Sequence[KVCacheBlock]):
    """All blocks of a pool: the same object for an id at every asking."""

    def __init__(self, pool: CorePool) -> None:
        self._pool = pool
        self._known: dict[int, KVCacheBlock] = {}

    def __len__(self) -> int:
        return self._pool.num_blocks

    def __getitem__(self, index: Any) -> Any:
        ids = range(self._pool.num_blocks)[index]
        return [self._block(block_id) for block_id in ids] if isinstance(index, slice) else self._block(ids)

    def _block(self, block_id: int) -> KVCacheBlock:
        if block_id not in self._known:
            self._known[block_id] = KVCacheBlock.of_pool(self._pool, block_id)
        return self._known[block_id]
