"""A scheduler that is no subclass of vLLM's and constructs the manager itself, by the name in its own module."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager


class Small:
    """As much of a scheduler as the swap needs."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self.kv_cache_config = kv_cache_config
        self.kv_cache_manager = KVCacheManager(
            kv_cache_config=kv_cache_config, max_model_len=256, hash_block_size=16, enable_caching=True
        )


class Forgetful(Small):
    """Does not keep what the manager was made for."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, kv_cache_config)
        del self.kv_cache_config
