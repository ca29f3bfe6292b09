"""A third party's managers, as `tests.glue.managers:NAME`. Subclasses of vLLM's are fine here: the glue is on trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager


class Plain(KVCacheManager):
    """Takes vLLM's ten keywords and nothing else."""


class Another(KVCacheManager):
    """To tell two choices apart."""


class WithSettings(KVCacheManager):
    """Takes settings, validates them and describes itself."""

    def __init__(self, *, settings: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.settings = settings

    @classmethod
    def validate_settings(cls, settings: Mapping[str, Any]) -> None:
        if unknown := set(settings) - {"depth"}:
            raise ValueError(f"unknown {sorted(unknown)}, allowed: depth")

    def describe(self) -> dict[str, object]:
        return {"version": "7", "eviction": "deep", "depth": self.settings.get("depth")}


class Mute(KVCacheManager):
    """Fails to describe itself, in two lines."""

    def describe(self) -> dict[str, object]:
        raise OSError("no voice\ntoday")


class Laconic(KVCacheManager):
    """Describes itself in another form than names and values."""

    def describe(self) -> str:
        return "fine"


class Incomplete(KVCacheManager):
    """Three drifts: an argument renamed, a method gone, a keyword of the constructor gone."""

    evict_blocks = None  # type: ignore[assignment]

    def __init__(self, kv_cache_config: Any, max_model_len: int, hash_block_size: int, **kwargs: Any) -> None:
        super().__init__(kv_cache_config, max_model_len, hash_block_size, **kwargs)

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:  # type: ignore[override]
        super().remove_skipped_blocks(request_id, num_computed_tokens)


class NoEagle(KVCacheManager):
    """Its constructor does not take all of vLLM's keywords."""

    def __init__(self, kv_cache_config: Any, max_model_len: int, hash_block_size: int, enable_caching: bool) -> None:
        super().__init__(kv_cache_config, max_model_len, hash_block_size, enable_caching)


class WithoutEmptyBlocks(KVCacheManager):
    """Keeps the contract as a class, and breaks it as an instance."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        del self.empty_kv_cache_blocks


NOT_A_CLASS = 3
