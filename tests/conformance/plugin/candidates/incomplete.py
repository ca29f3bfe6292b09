"""kvplug without a pool of its own."""

from vllm_kvplug.vllm_glue.upstream_views import *  # noqa: F403

del BlockPool  # noqa: F821
