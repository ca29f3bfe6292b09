"""The coordinator by upstream's name: all groups of a manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_kvplug.errors import UnsupportedError
from vllm_kvplug.vllm_glue.manager import KVCacheManager
from vllm_kvplug.vllm_glue.upstream_views.blocks import BlockRow
from vllm_kvplug.vllm_glue.upstream_views.groups import SingleTypeKVCacheManager
from vllm_kvplug.vllm_glue.upstream_views.pool import BlockPool


class KVCacheCoordinator:
    """The groups of a manager. What changes them is the manager's to call; construct that instead."""

    block_pool: BlockPool
    single_type_managers: tuple[SingleTypeKVCacheManager, ...]
    _manager: KVCacheManager

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise UnsupportedError(
            f"kvplug has no {type(self).__name__} to construct; use get_kv_cache_coordinator, or a KVCacheManager's"
        )

    @staticmethod
    def of_manager(manager: KVCacheManager) -> KVCacheCoordinator:
        """The view of a manager's groups."""
        cls = _coordinator_class(manager)
        self = cls.__new__(cls)
        self._manager, self.block_pool = manager, manager.block_pool
        self.single_type_managers = tuple(
            SingleTypeKVCacheManager.of_group(group, self.block_pool, described.kv_cache_spec)
            for group, described in zip(manager.groups, manager.kv_cache_config.kv_cache_groups, strict=True)
        )
        return self

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """The configuration that the groups were made from."""
        return self._manager.kv_cache_config

    def get_blocks(self, request_id: str) -> tuple[Sequence[Any], ...]:
        """The request's blocks by group."""
        return tuple(BlockRow(self.block_pool.core, group.block_ids(request_id)) for group in self._manager.groups)

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_cache_hit_length: int
    ) -> tuple[tuple[Sequence[Any], ...], int]:
        """The longest prefix of at most so many tokens that every group has cached: blocks by group, and its tokens."""
        if not self._manager.enable_caching:
            return tuple([] for _ in self.single_type_managers), 0
        hits, num_hit_tokens = self._manager._coordinator.match(block_hashes, max_cache_hit_length)
        return tuple(BlockRow(self.block_pool.core, hit.block_ids) for hit in hits), num_hit_tokens


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """The groups of a manager without prefix caching."""


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """The only group of a manager."""


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """The groups of a manager that has several, or none."""


def _coordinator_class(manager: KVCacheManager) -> type[KVCacheCoordinator]:
    if not manager.enable_caching:
        return KVCacheCoordinatorNoPrefixCache
    return UnitaryKVCacheCoordinator if len(manager.groups) == 1 else HybridKVCacheCoordinator


def get_kv_cache_coordinator(
    kv_cache_config: KVCacheConfig,
    max_model_len: int,
    use_eagle: bool,
    enable_caching: bool,
    enable_kv_cache_events: bool,
    dcp_world_size: int,
    pcp_world_size: int,
    hash_block_size: int,
    metrics_collector: Any = None,
) -> KVCacheCoordinator:
    """The groups of a manager that is made for them, see `KVCacheManager`."""
    return KVCacheManager(
        kv_cache_config,
        max_model_len,
        hash_block_size,
        enable_caching=enable_caching,
        use_eagle=use_eagle,
        enable_kv_cache_events=enable_kv_cache_events,
        dcp_world_size=dcp_world_size,
        pcp_world_size=pcp_world_size,
        metrics_collector=metrics_collector,
    ).coordinator
