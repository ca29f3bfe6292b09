"""The manager as vLLM constructs it: from vLLM's config, with events and statistics in vLLM's types."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import PrefixCacheStats

import vllm_kvplug
from vllm_kvplug.manager import CacheManager
from vllm_kvplug.observers import Observer
from vllm_kvplug.settings import Settings
from vllm_kvplug.vllm_glue.geometry import geometry_of
from vllm_kvplug.vllm_glue.hashing import get_request_block_hasher
from vllm_kvplug.vllm_glue.log import logger
from vllm_kvplug.vllm_glue.observers import EventObserver, ResidencyObserver, StatsObserver

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector

    from vllm_kvplug.vllm_glue.upstream_views import BlockPool, KVCacheCoordinator


class KVCacheManager(CacheManager):
    """Takes the place of vLLM's KVCacheManager: the same construction and calls, described at the core's
    `CacheManager`.

    Args:
        kv_cache_config: groups and number of blocks, from vLLM's sizing.
        max_model_len: the most tokens of a request.
        hash_block_size: tokens that each of a request's block hashes covers.
        enable_caching: whether requests share cached prefixes.
        use_eagle: whether a drafter needs the last matched block computed again.
        log_stats: whether `make_prefix_cache_stats` answers statistics.
        enable_kv_cache_events: whether `take_events` answers events.
        dcp_world_size, pcp_world_size: context parallel ranks.
        metrics_collector: vLLM's sampling of block residency.
        settings: kvplug's own, see `Settings`.

    Raises:
        SettingsError: an unknown or ill-typed setting.
        UnsupportedError: groups that cannot be combined as asked for, see `geometry_of`.
        CallError: sizes that do not fit each other.
    """

    # What the engine hashes requests with while this class is its manager.
    block_hasher = staticmethod(get_request_block_hasher)

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        hash_block_size: int,
        enable_caching: bool = True,
        use_eagle: bool = False,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: KVCacheMetricsCollector | None = None,
        settings: Settings | Mapping[str, Any] | None = None,
    ) -> None:
        geometry = geometry_of(
            kv_cache_config,
            max_model_len,
            hash_block_size=hash_block_size,
            enable_caching=enable_caching,
            context_parallel_size=dcp_world_size * pcp_world_size,
        )
        self.kv_cache_config = kv_cache_config
        self.log_stats = log_stats
        self.enable_kv_cache_events = enable_kv_cache_events
        self._stats = StatsObserver() if log_stats else None
        self._events = EventObserver(hash_block_size) if enable_kv_cache_events else None
        self.metrics_collector = metrics_collector
        self.hash_block_size = hash_block_size
        observers: list[Observer] = [observer for observer in (self._stats, self._events) if observer is not None]
        if metrics_collector is not None:
            observers.append(ResidencyObserver(metrics_collector, enable_caching=enable_caching))
        super().__init__(
            geometry,
            Settings.parse(settings),
            enable_caching=enable_caching,
            use_eagle=use_eagle,
            observers=observers,
        )

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Lookups and hits since the last call, in tokens; None without `log_stats`."""
        return self._stats.take() if self._stats is not None else None

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats | None:
        """What `make_prefix_cache_stats` would answer now."""
        return self._stats.stats if self._stats is not None else None

    def take_events(self) -> list[KVCacheEvent]:
        """KV events since the last call; none without `enable_kv_cache_events`."""
        return self._events.take() if self._events is not None else []

    def reset_prefix_cache(self) -> bool:
        """Drop the whole prefix cache; refused, with a log line, while a request holds blocks."""
        done = super().reset_prefix_cache()
        if done:
            logger.info("Prefix cache reset.")
        else:
            logger.warning("Prefix cache not reset: %d blocks are held by requests.", self.pool.num_held_blocks)
        return done

    # vLLM's private structure, for code that reads it: live views, made when first asked for.

    @cached_property
    def block_pool(self) -> BlockPool:
        """The pool by upstream's names."""
        from vllm_kvplug.vllm_glue.upstream_views import BlockPool

        return BlockPool.of_manager(self)

    @cached_property
    def coordinator(self) -> KVCacheCoordinator:
        """The groups by upstream's names."""
        from vllm_kvplug.vllm_glue.upstream_views import KVCacheCoordinator

        return KVCacheCoordinator.of_manager(self)

    def describe(self) -> dict[str, str]:
        """What is in force, for the start-up line and `/metrics`."""
        groups = self.geometry.groups
        return {
            "manager": "kvplug",
            "version": vllm_kvplug.__version__,
            **{name: str(value) for name, value in self.settings.model_dump().items()},
            "groups": ",".join(group.kind.value for group in groups),
            "num_blocks": str(self.geometry.num_blocks),
            "block_size": ",".join(str(group.num_tokens_per_block) for group in groups),
            "prefix_caching": "on" if self.enable_caching else "off",
        }
