"""A drop-in KV cache manager for vLLM's V1 engine: `vllm serve MODEL --kv-cache-manager kvplug`.

vLLM loads `register` through the entry point group `vllm.general_plugins`. An error while a plugin is *imported* is
only logged by vLLM, which then serves without it; so this module imports nothing that can fail, and every check is
inside `register` or later.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "KVCacheManager": "vllm_kvplug.vllm_glue.manager",
    "KVCacheBlocks": "vllm_kvplug.block",
    "BlockPool": "vllm_kvplug.vllm_glue.upstream_views",
    "Settings": "vllm_kvplug.settings",
    "get_request_block_hasher": "vllm_kvplug.vllm_glue.hashing",
}
__all__ = [
    "BlockPool",
    "KVCacheBlocks",
    "KVCacheManager",
    "Settings",
    "__version__",
    "get_request_block_hasher",
    "install",
    "register",
]


def register() -> None:
    """vLLM's entry point: put the hooks in place that offer the option. Nothing changes until a manager is chosen."""
    from vllm_kvplug.vllm_glue import install as glue

    glue.install()


def install() -> None:
    """Put the hooks in place by hand, for `LLM(model, kv_cache_manager="kvplug")`. Idempotent."""
    register()


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)
