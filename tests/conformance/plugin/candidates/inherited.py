"""Upstream's manager under our name."""

from vllm.v1.core import kv_cache_manager

from vllm_kvplug.vllm_glue.upstream_views import *  # noqa: F403


class KVCacheManager(kv_cache_manager.KVCacheManager):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
