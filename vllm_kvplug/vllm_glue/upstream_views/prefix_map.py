"""The prefix cache by upstream's name: `BlockHashToBlockMap`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Protocol

from vllm_kvplug.block import make_key, split_key
from vllm_kvplug.block_pool import BlockPool as CorePool
from vllm_kvplug.block_run import BlockRun
from vllm_kvplug.errors import BlockError
from vllm_kvplug.prefix_index import PrefixIndex
from vllm_kvplug.vllm_glue.upstream_views.blocks import PoolBlocks
from vllm_kvplug.vllm_glue.upstream_views.single_blocks import SingleBlocks


class IndexesOnDemand(defaultdict[int, PrefixIndex]):
    """An index for any group number, where no groups were declared. Iterates over indexes, as the core's row does."""

    def __init__(self) -> None:
        super().__init__(PrefixIndex)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())


class _Entries(Protocol):
    """What a map of the prefix cache is made of."""

    def __len__(self) -> int: ...

    def keys(self) -> list[bytes]: ...

    def blocks(self, key: bytes) -> list[Any]: ...

    def insert(self, key: bytes, block: Any) -> None: ...

    def remove(self, key: bytes, block_id: int) -> None: ...


class _OwnEntries:
    """The entries of a map without a pool."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, dict[int, Any]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def keys(self) -> list[bytes]:
        return list(self._by_key)

    def blocks(self, key: bytes) -> list[Any]:
        return list(self._by_key.get(key, {}).values())

    def insert(self, key: bytes, block: Any) -> None:
        self._by_key.setdefault(key, {})[block.block_id] = block

    def remove(self, key: bytes, block_id: int) -> None:
        blocks = self._by_key[key]
        del blocks[block_id]
        if not blocks:
            del self._by_key[key]


class _PoolEntries:
    """The prefix indexes of a pool.

    Its own blocks have their hash as long as they are in here. A block of somebody else keeps a hash of its own, and is
    in the index alone; no request can hit it, so the pools of managers take none.
    """

    def __init__(self, pool: CorePool, blocks: PoolBlocks) -> None:
        self._pool, self._blocks, self._single = pool, blocks, SingleBlocks(pool)

    def __len__(self) -> int:
        return sum(len(index) for index in self._pool.indexes)

    def keys(self) -> list[bytes]:
        indexes: Any = self._pool.indexes
        numbered = indexes.items() if isinstance(indexes, IndexesOnDemand) else enumerate(indexes)
        return [make_key(block_hash, group_id) for group_id, index in numbered for block_hash, _ in index.items()]

    def blocks(self, key: bytes) -> list[Any]:
        block_hash, group_id = split_key(key)
        return [self._blocks[block_id] for block_id in self._pool.indexes[group_id].block_ids(block_hash)]

    def insert(self, key: bytes, block: Any) -> None:
        block_hash, group_id = split_key(key)
        if block._pool is self._pool:
            self._single.cache(group_id, block.block_id, block_hash)
            return
        if not isinstance(self._pool.indexes, IndexesOnDemand):
            raise BlockError(f"cannot cache block {block.block_id}: expected one of this manager's pool, found another")
        run = BlockRun([block.block_id], group_id, 0, 0)
        run.block_hashes.append(block_hash)
        self._pool.indexes[group_id].add(run)

    def remove(self, key: bytes, block_id: int) -> None:
        block_hash, group_id = split_key(key)
        index = self._pool.indexes[group_id]
        runs = [index.run(block_hash), *index._duplicates.get(block_hash, ())]
        run = next(run for run in runs if run is not None and block_id in run.block_ids)
        if run is self._pool.places().get(block_id, (None, 0))[0]:
            self._single.uncache(block_id)
        else:
            index.remove_one(block_hash, run)


class CachedBlocks(MutableMapping[bytes, Any]):
    """Key -> its block, or, where several share it, `{block_id: block}`."""

    def __init__(self, entries: _Entries) -> None:
        self.entries = entries

    def __getitem__(self, key: bytes) -> Any:
        blocks = {block.block_id: block for block in self.entries.blocks(key)}
        if not blocks:
            raise KeyError(key)
        return blocks if len(blocks) > 1 else next(iter(blocks.values()))

    def __setitem__(self, key: bytes, value: Any) -> None:
        self.pop(key, None)
        for block in _as_row(value):
            self.entries.insert(key, block)

    def __delitem__(self, key: bytes) -> None:
        blocks = self.entries.blocks(key)
        if not blocks:
            raise KeyError(key)
        for block in blocks:
            self.entries.remove(key, block.block_id)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.entries.keys())

    def __len__(self) -> int:
        return len(self.entries)

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
        self._cache = CachedBlocks(_OwnEntries())

    @classmethod
    def of_pool(cls, pool: CorePool, blocks: PoolBlocks) -> BlockHashToBlockMap:
        """The view of a pool's prefix indexes."""
        self = cls.__new__(cls)
        self._cache = CachedBlocks(_PoolEntries(pool, blocks))
        return self

    def __len__(self) -> int:
        return len(self._cache)

    def get_one_block(self, key: bytes) -> Any:
        """The block that answers for a key, or None."""
        return next(iter(self._cache.entries.blocks(key)), None)

    def insert(self, key: bytes, block: Any) -> None:
        """Add a block under a key."""
        self._cache.entries.insert(key, block)

    def pop(self, key: bytes, block_id: int) -> Any:
        """Remove a block from a key and answer it; None where it is not there."""
        for block in self._cache.entries.blocks(key):
            if block.block_id == block_id:
                self._cache.entries.remove(key, block_id)
                return block
        return None
