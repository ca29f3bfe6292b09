"""Groups and the coordinator by upstream's names. Types that kvplug does not have yet are stand-ins that refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.v1 import kv_cache_interface as specs

from vllm_kvplug.block_pool import BlockPool as CorePool
from vllm_kvplug.errors import UnsupportedError
from vllm_kvplug.groups.base import AttentionGroup
from vllm_kvplug.vllm_glue.manager import KVCacheManager
from vllm_kvplug.vllm_glue.upstream_views.blocks import BlockRow
from vllm_kvplug.vllm_glue.upstream_views.pool import BlockPool


class _RequestBlocks(Mapping[str, BlockRow]):
    """Request id -> its blocks in one group."""

    def __init__(self, pool: CorePool, group: AttentionGroup) -> None:
        self._pool, self._group = pool, group

    def __getitem__(self, request_id: str) -> BlockRow:
        return BlockRow(self._pool, self._group.tables[request_id].block_ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self._group.tables)

    def __len__(self) -> int:
        return len(self._group.tables)


class SingleTypeKVCacheManager:
    """One KV cache group of a manager. Groups are made by their manager and cannot be constructed."""

    block_pool: BlockPool
    block_size: int
    kv_cache_group_id: int
    enable_caching: bool
    req_to_blocks: Mapping[str, BlockRow]
    _group: AttentionGroup

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise UnsupportedError(
            f"kvplug cannot construct a {type(self).__name__} on its own: KVCacheManager makes its groups, "
            "so far of FullAttentionManager only"
        )

    @classmethod
    def of_group(cls, group: AttentionGroup, block_pool: BlockPool) -> SingleTypeKVCacheManager:
        """The view of a group."""
        self = cls.__new__(cls)
        self._group, self.block_pool = group, block_pool
        self.block_size = group.num_tokens_per_block
        self.kv_cache_group_id = group.group_id
        self.enable_caching = block_pool.enable_caching
        self.req_to_blocks = _RequestBlocks(block_pool.core, group)
        return self

    @property
    def num_cached_block(self) -> dict[str, int]:
        """Request id -> its leading blocks that are cached, for requests that have taken hits or cached a block."""
        tables = self._group.tables.items()
        return {request_id: table.num_cached_blocks for request_id, table in tables if table.is_admitted}


class FullAttentionManager(SingleTypeKVCacheManager):
    """A group of full attention or MLA."""


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Stand-in: kvplug has no such group yet."""


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """Stand-in: kvplug has no such group yet."""


class MambaManager(SingleTypeKVCacheManager):
    """Stand-in: kvplug has no such group yet."""


class CrossAttentionManager(SingleTypeKVCacheManager):
    """Stand-in: kvplug has no such group yet."""


class SinkFullAttentionManager(SingleTypeKVCacheManager):
    """Stand-in: kvplug has no such group yet."""


spec_manager_map: dict[type[specs.KVCacheSpec], type[SingleTypeKVCacheManager]] = {
    specs.FullAttentionSpec: FullAttentionManager,
    specs.MLAAttentionSpec: FullAttentionManager,
    specs.SlidingWindowSpec: SlidingWindowManager,
    specs.ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
    specs.MambaSpec: MambaManager,
    specs.CrossAttentionSpec: CrossAttentionManager,
    specs.SinkFullAttentionSpec: SinkFullAttentionManager,
}


def get_manager_for_kv_cache_spec(kv_cache_spec: specs.KVCacheSpec, **kwargs: Any) -> SingleTypeKVCacheManager:
    """Refuses, as constructing the class does."""
    return spec_manager_map[type(kv_cache_spec)](kv_cache_spec, **kwargs)


class KVCacheCoordinator:
    """The groups of a manager. Made by its manager; it cannot be constructed."""

    block_pool: BlockPool
    single_type_managers: tuple[SingleTypeKVCacheManager, ...]

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise UnsupportedError(f"kvplug has no {type(self).__name__} to construct; groups are made by KVCacheManager")

    @staticmethod
    def of_manager(manager: KVCacheManager) -> KVCacheCoordinator:
        """The view of a manager's groups."""
        cls = UnitaryKVCacheCoordinator if manager.enable_caching else KVCacheCoordinatorNoPrefixCache
        self = cls.__new__(cls)
        self.block_pool = manager.block_pool
        self.single_type_managers = tuple(
            FullAttentionManager.of_group(group, self.block_pool) for group in manager.groups
        )
        return self


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """The groups of a manager without prefix caching."""


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """The groups of a manager with one group."""


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Stand-in: kvplug has no managers of several groups yet."""


def get_kv_cache_coordinator(*args: Any, **kwargs: Any) -> KVCacheCoordinator:
    """Refuses, as constructing the class does."""
    return KVCacheCoordinator(*args, **kwargs)
