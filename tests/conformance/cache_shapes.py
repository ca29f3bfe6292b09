"""A request and small caches for the tests of the views."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from vllm_kvplug.vllm_glue import upstream_views as views


class Request:
    """As much of vLLM's request as the manager asks for: 8 tokens, 2 blocks."""

    request_id = "r"
    num_tokens = 8
    num_computed_tokens = 0
    num_preemptions = 0
    num_output_placeholders = 0
    block_hashes = (b"hash 0", b"hash 1")
    all_token_ids = tuple(range(8))
    mm_features = ()
    lora_request = cache_salt = prompt_embeds = None
    skip_reading_prefix_cache = False


SHAPE: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
MLA = MLAAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=5)
CHUNKED = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=16)
MAMBA = MambaSpec(block_size=4, shapes=((1,),), dtypes=(torch.float32,))
CROSS = CrossAttentionSpec(**SHAPE)
SINK = SinkFullAttentionSpec(**SHAPE, sink_len=4)


def make_config(*specs: KVCacheSpec, num_blocks: int = 6) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs or [FULL])]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def make_manager(*specs: KVCacheSpec, enable_caching: bool = True, num_blocks: int = 6) -> views.KVCacheManager:
    config = make_config(*specs, num_blocks=num_blocks)
    return views.KVCacheManager(config, max_model_len=64, hash_block_size=4, enable_caching=enable_caching)
