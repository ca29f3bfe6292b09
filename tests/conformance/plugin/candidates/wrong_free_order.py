"""kvplug, but a finished request's blocks are freed head first, so that a prefix's head is reused first."""

from vllm_kvplug.groups import base
from vllm_kvplug.vllm_glue.upstream_views import *  # noqa: F403

_release = base.BlockPool.release


def _release_head_first(self, block_ids, **kwargs):
    _release(self, block_ids[::-1], **kwargs)


base.BlockPool.release = _release_head_first
