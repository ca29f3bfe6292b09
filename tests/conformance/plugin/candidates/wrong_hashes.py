"""kvplug, but requests are hashed without their images."""

from vllm_kvplug.vllm_glue import upstream_views
from vllm_kvplug.vllm_glue.upstream_views import *  # noqa: F403


class _WithoutImages:
    mm_features = ()

    def __init__(self, request):
        self._request = request

    def __getattr__(self, name):
        return getattr(self._request, name)


def get_request_block_hasher(block_size, caching_hash_fn):
    hasher = upstream_views.get_request_block_hasher(block_size, caching_hash_fn)
    return lambda request: hasher(_WithoutImages(request))
