"""Blocks by upstream's names: `KVCacheBlock`, and rows of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vllm_kvplug.block import BlockSequence, BlockView, split_key
from vllm_kvplug.block_pool import BlockPool as CorePool


class _LoneBlock:
    """What a block without a pool has in a pool's place."""

    def __init__(self, block_id: int, ref_cnt: int) -> None:
        self.reference_counts = {block_id: ref_cnt}
        self.block_hashes: dict[int, bytes | None] = {block_id: None}
        self.block_group_ids = {block_id: 0}


class KVCacheBlock(BlockView):
    """A block whose state can be set. Constructed, it belongs to no pool; a pool's blocks are in `BlockPool.blocks`."""

    __slots__ = ()

    def __init__(self, block_id: int, ref_cnt: int = 0) -> None:
        pool: Any = _LoneBlock(block_id, ref_cnt)
        super().__init__(pool, block_id)

    @classmethod
    def of_pool(cls, pool: CorePool, block_id: int) -> KVCacheBlock:
        """The view of a pool's block."""
        self = cls.__new__(cls)
        BlockView.__init__(self, pool, block_id)
        return self

    @property
    def ref_cnt(self) -> int:
        return super().ref_cnt

    @ref_cnt.setter
    def ref_cnt(self, count: int) -> None:
        self._pool.reference_counts[self.block_id] = count

    @property
    def block_hash(self) -> bytes | None:
        return super().block_hash

    @block_hash.setter
    def block_hash(self, key: bytes) -> None:
        if self.block_hash is not None:
            raise AssertionError(
                f"block {self.block_id}: expected no hash before one is set, found {self.block_hash!r}"
            )
        self._pool.block_hashes[self.block_id], self._pool.block_group_ids[self.block_id] = split_key(key)

    # Upstream's tests look at the field behind the property, too.
    @property
    def _block_hash(self) -> bytes | None:
        return self.block_hash

    @property
    def is_null(self) -> bool:
        return super().is_null and isinstance(self._pool, CorePool)

    def reset_hash(self) -> None:
        """Forget the hash. The prefix index is not told."""
        self._pool.block_hashes[self.block_id] = None


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
