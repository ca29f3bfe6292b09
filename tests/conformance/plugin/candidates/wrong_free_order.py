"""kvplug, but a finished request's blocks are freed head first, so that a prefix's head is reused first."""

from vllm_kvplug.groups import base
from vllm_kvplug.vllm_glue.upstream_views import *  # noqa: F403

_release = base.BlockPool.release


def _release_head_first(self, runs, **kwargs):
    blocks = []
    for run in reversed(runs):
        blocks.append(run)
        while len(blocks[-1].block_ids) > 1:
            blocks.append(self.split(blocks[-1], 1))
    _release(self, blocks, **kwargs)


base.BlockPool.release = _release_head_first
