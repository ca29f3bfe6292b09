"""vLLM's cache configuration as the core's geometry, and what of it vLLM itself does not combine."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from vllm_kvplug.errors import CallError, UnsupportedError
from vllm_kvplug.geometry import FULL_KINDS, AttentionKind, CacheGeometry, GroupGeometry, MambaMode

# Exact types: a subclass that we do not know may want something else of its blocks.
_KINDS: dict[type[KVCacheSpec], AttentionKind] = {
    FullAttentionSpec: AttentionKind.FULL,
    MLAAttentionSpec: AttentionKind.MLA,
    SinkFullAttentionSpec: AttentionKind.SINK,
    SlidingWindowSpec: AttentionKind.SLIDING_WINDOW,
    ChunkedLocalAttentionSpec: AttentionKind.CHUNKED_LOCAL,
    MambaSpec: AttentionKind.MAMBA,
    CrossAttentionSpec: AttentionKind.CROSS,
}


def geometry_of(
    kv_cache_config: KVCacheConfig,
    max_model_len: int,
    *,
    hash_block_size: int,
    enable_caching: bool,
    context_parallel_size: int = 1,
) -> CacheGeometry:
    """The core's geometry for vLLM's cache configuration.

    Args:
        kv_cache_config: groups and number of blocks.
        max_model_len: the most tokens of a request.
        hash_block_size: tokens that each of a request's block hashes covers.
        enable_caching: whether requests share cached prefixes.
        context_parallel_size: ranks that share the tokens of a block, decode times prefill context parallel.

    Raises:
        UnsupportedError: a group of an unknown type, or groups that cannot share a prefix cache as asked for.
        CallError: sizes that do not fit each other.
    """
    if context_parallel_size < 1:
        raise CallError(
            f"context parallel world sizes: expected at least 1 each, found a product of {context_parallel_size}"
        )
    groups = tuple(
        group_geometry_of(group.kv_cache_spec, context_parallel_size, layer_names=group.layer_names)
        for group in kv_cache_config.kv_cache_groups
    )
    if enable_caching and context_parallel_size > 1:
        kinds = [group.kind.value for group in groups]
        if len(groups) != 1 or groups[0].kind not in FULL_KINDS:
            raise UnsupportedError(
                f"context parallelism over {context_parallel_size} ranks with prefix caching: expected one KV cache "
                f"group of full attention, found {', '.join(kinds) or 'none'}; "
                "works instead: --no-enable-prefix-caching, or world size 1"
            )
    # A model of one group has its hashes in that group's blocks; vLLM chooses so.
    if enable_caching and len(groups) == 1 and hash_block_size != groups[0].num_tokens_per_block:
        raise CallError(
            f"hash_block_size: expected the block size of the only KV cache group, "
            f"{groups[0].num_tokens_per_block} tokens, found {hash_block_size}"
        )
    return CacheGeometry(
        kv_cache_config.num_blocks,
        max_model_len,
        groups,
        num_tokens_per_hash=hash_block_size if enable_caching else None,
    )


def group_geometry_of(
    spec: KVCacheSpec, context_parallel_size: int = 1, *, layer_names: list[str] | None = None
) -> GroupGeometry:
    """The core's geometry for one of vLLM's specs; `layer_names` for the message only.

    Raises:
        UnsupportedError: a spec of an unknown type.
        CallError: a spec that contradicts itself.
    """
    kind = _KINDS.get(type(spec))
    if kind is None:
        layers = f" (layers {', '.join(layer_names[:2])}, ...)" if layer_names else ""
        raise UnsupportedError(
            f"KV cache group of {type(spec).__name__}{layers}: expected one of "
            f"{', '.join(known.__name__ for known in _KINDS)}; works instead: --kv-cache-manager upstream"
        )
    details: dict[str, Any] = {}
    if isinstance(spec, SlidingWindowSpec):
        details["window_tokens"] = spec.sliding_window
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        details["chunk_tokens"] = spec.attention_chunk_size
    elif isinstance(spec, MambaSpec):
        details["mamba_mode"] = MambaMode(spec.mamba_cache_mode)
        details["num_speculative_blocks"] = spec.num_speculative_blocks
    elif isinstance(spec, SinkFullAttentionSpec):
        details["num_sink_blocks"] = _num_sink_blocks(spec.sink_len, spec.block_size * context_parallel_size)
    return GroupGeometry(
        kind,
        spec.block_size * context_parallel_size,
        reports_new_blocks=kind is AttentionKind.FULL,
        **details,
    )


def _num_sink_blocks(sink_len: int | None, num_tokens_per_block: int) -> int:
    if not sink_len or sink_len % num_tokens_per_block:
        raise CallError(
            f"sink_len: expected a positive multiple of the block size, {num_tokens_per_block} tokens, found {sink_len}"
        )
    return sink_len // num_tokens_per_block
