"""vLLM's private structure over ours: `manager.block_pool`, `manager.coordinator` and what hangs below, as live views.

vLLM itself never reads these; its own tests do, and so may code outside that grew up with them. Everything here is
looked up when it is asked for, and nothing is kept twice. The hot path never comes here, and the core does not know
this package. What upstream's tests construct on their own (a block, the queue, the hash map, the pool) works alone too,
over the same core parts. Names and signatures are upstream's.
"""

from vllm_kvplug.block import KVCacheBlocks
from vllm_kvplug.vllm_glue.hashing import (
    generate_block_hash_extra_keys,
    get_request_block_hasher,
    hash_block_tokens,
    need_extra_keys,
)
from vllm_kvplug.vllm_glue.manager import KVCacheManager
from vllm_kvplug.vllm_glue.upstream_views.blocks import KVCacheBlock
from vllm_kvplug.vllm_glue.upstream_views.coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
    get_kv_cache_coordinator,
)
from vllm_kvplug.vllm_glue.upstream_views.free_queue import FreeKVCacheBlockQueue
from vllm_kvplug.vllm_glue.upstream_views.groups import (
    ChunkedLocalAttentionManager,
    CrossAttentionManager,
    FullAttentionManager,
    MambaManager,
    SingleTypeKVCacheManager,
    SinkFullAttentionManager,
    SlidingWindowManager,
    get_manager_for_kv_cache_spec,
    spec_manager_map,
)
from vllm_kvplug.vllm_glue.upstream_views.pool import BlockPool
from vllm_kvplug.vllm_glue.upstream_views.prefix_map import BlockHashToBlockMap

__all__ = [
    "BlockHashToBlockMap",
    "BlockPool",
    "ChunkedLocalAttentionManager",
    "CrossAttentionManager",
    "FreeKVCacheBlockQueue",
    "FullAttentionManager",
    "HybridKVCacheCoordinator",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheCoordinator",
    "KVCacheCoordinatorNoPrefixCache",
    "KVCacheManager",
    "MambaManager",
    "SingleTypeKVCacheManager",
    "SinkFullAttentionManager",
    "SlidingWindowManager",
    "UnitaryKVCacheCoordinator",
    "generate_block_hash_extra_keys",
    "get_kv_cache_coordinator",
    "get_manager_for_kv_cache_spec",
    "get_request_block_hasher",
    "hash_block_tokens",
    "need_extra_keys",
    "spec_manager_map",
]
