"""The prefix cache by upstream's name: `BlockHashToBlockMap`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from vllm_kvplug.block import make_key, split_key
from vllm_kvplug.block_pool import BlockPool as CorePool
from vllm_kvplug.prefix_index import PrefixIndex
from vllm_kvplug.vllm_glue.upstream_views.blocks import PoolBlocks


class IndexesOnDemand(defaultdict[int, PrefixIndex]):
    """An index for any group number, where no groups were declared. Iterates over indexes, as the core's row does."""

    def __init__(self) -> None:
        super().__init__(PrefixIndex)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())


class CachedBlocks(MutableMapping[bytes, Any]):
    """Key -> its block, or, where several share it, `{block_id: block}`. Setting and deleting change the index only."""

    def __init__(self, indexes: Sequence[PrefixIndex] | IndexesOnDemand, blocks: PoolBlocks | dict[int, Any]) -> None:
        self._indexes = indexes
        self.blocks = blocks

    def block_ids(self, key: bytes) -> list[int]:
        """The blocks of a key, the one that answers lookups first."""
        block_hash, group_id = split_key(key)
        return self._indexes[group_id].block_ids(block_hash)

    def insert(self, key: bytes, block_id: int) -> None:
        """Add a block under a key."""
        block_hash, group_id = split_key(key)
        self._indexes[group_id].insert(block_hash, block_id)

    def remove(self, key: bytes, block_id: int) -> None:
        """Remove a block from a key that has it."""
        block_hash, group_id = split_key(key)
        self._indexes[group_id].remove(block_hash, block_id)

    def __getitem__(self, key: bytes) -> Any:
        blocks = {block_id: self.blocks[block_id] for block_id in self.block_ids(key)}
        if not blocks:
            raise KeyError(key)
        return blocks if len(blocks) > 1 else next(iter(blocks.values()))

    def __setitem__(self, key: bytes, value: Any) -> None:
        self.pop(key, None)
        for block in _as_row(value):
            self.insert(key, block.block_id)

    def __delitem__(self, key: bytes) -> None:
        block_ids = self.block_ids(key)
        if not block_ids:
            raise KeyError(key)
        for block_id in block_ids:
            self.remove(key, block_id)

    def __iter__(self) -> Iterator[bytes]:
        indexes = self._indexes
        numbered = indexes.items() if isinstance(indexes, IndexesOnDemand) else enumerate(indexes)
        return iter([make_key(block_hash, group_id) for group_id, index in numbered for block_hash, _ in index.items()])

    def __len__(self) -> int:
        return sum(len(index) for index in self._indexes)

    def __copy__(self) -> dict[bytes, Any]:
        return dict(self)

    def __eq__(self, other: object) -> bool:
        # Upstream keeps a key's dict when one block is left in it: one block and a dict of one block are the same here.
        if not isinstance(other, Mapping):
            return NotImplemented
        return {key: _as_row(value) for key, value in self.items()} == {
            key: _as_row(value) for key, value in other.items()
        }

    __hash__ = None  # type: ignore[assignment]  # as a dict


def _as_row(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else [value]


class BlockHashToBlockMap:
    """The prefix cache: which blocks a key has. Constructed, it is a map of its own."""

    def __init__(self) -> None:
        self._cache = CachedBlocks(IndexesOnDemand(), {})

    @classmethod
    def of_pool(cls, pool: CorePool, blocks: PoolBlocks) -> BlockHashToBlockMap:
        """The view of a pool's prefix indexes."""
        self = cls.__new__(cls)
        self._cache = CachedBlocks(pool.indexes, blocks)
        return self

    def __len__(self) -> int:
        return len(self._cache)

    def get_one_block(self, key: bytes) -> Any:
        """The block that answers for a key, or None."""
        block_ids = self._cache.block_ids(key)
        return self._cache.blocks[block_ids[0]] if block_ids else None

    def insert(self, key: bytes, block: Any) -> None:
        """Add a block under a key."""
        if isinstance(self._cache.blocks, dict):
            self._cache.blocks[block.block_id] = block
        self._cache.insert(key, block.block_id)

    def pop(self, key: bytes, block_id: int) -> Any:
        """Remove a block from a key and answer it; None where it is not there."""
        if block_id not in self._cache.block_ids(key):
            return None
        self._cache.remove(key, block_id)
        return self._cache.blocks[block_id]
