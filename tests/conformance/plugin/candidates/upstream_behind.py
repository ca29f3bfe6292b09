"""kvplug in front, with one of upstream's hash maps behind it."""

from vllm.v1.core import block_pool

from vllm_kvplug.vllm_glue import upstream_views
from vllm_kvplug.vllm_glue.upstream_views import *  # noqa: F403

_UpstreamMap = block_pool.BlockHashToBlockMap


class KVCacheManager(upstream_views.KVCacheManager):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._behind = _UpstreamMap()
