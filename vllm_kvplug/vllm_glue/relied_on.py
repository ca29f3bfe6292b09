"""What the glue relies on in vLLM by name: functions that it wraps or calls, classes and fields. `drift.py` looks.

Equal in all supported versions; what differs between them is in contract.py (the scheduler's calls) and asked by
`version.is_since`.
"""

from __future__ import annotations

# By file below vllm/: functions by class and name, and how their parameters begin.
FUNCTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "config/scheduler.py": {"SchedulerConfig.get_scheduler_cls": ("self",)},
    "engine/arg_utils.py": {
        "EngineArgs.add_cli_args": ("parser",),
        "EngineArgs.from_cli_args": ("cls", "args"),
        "EngineArgs.create_engine_config": ("self",),
    },
    "utils/argparse_utils.py": {"FlexibleArgumentParser.parse_args": ("self", "args", "namespace")},
    "v1/core/sched/scheduler.py": {
        "Scheduler.__init__": ("self", "vllm_config", "kv_cache_config"),
        "Scheduler.schedule": ("self",),
        "Scheduler.update_from_output": ("self", "scheduler_output", "model_runner_output"),
        "Scheduler.finish_requests": ("self", "request_ids", "finished_status"),
        "Scheduler._update_request_as_session": ("self", "session"),
    },
    "v1/request.py": {
        "Request.take_events": ("self",),
        "Request.get_finished_reason": ("self",),
        "Request.is_finished": ("self",),
    },
    "v1/core/kv_cache_utils.py": {
        "get_request_block_hasher": ("block_size", "caching_hash_fn"),
        "maybe_convert_block_hash": ("hash_bytes",),
    },
    "v1/core/kv_cache_metrics.py": {
        "KVCacheMetricsCollector.on_block_allocated": ("self", "block"),
        "KVCacheMetricsCollector.on_block_accessed": ("self", "block"),
        "KVCacheMetricsCollector.on_block_evicted": ("self", "block"),
    },
    "v1/utils.py": {"tensor_data": ("tensor",)},
    "v1/metrics/stats.py": {"PrefixCacheStats.record": ("self", "num_tokens", "num_hits", "preempted")},
    "v1/engine/core.py": {"EngineCore.__init__": ("self", "vllm_config")},
    "v1/engine/async_llm.py": {
        "AsyncLLM.get_supported_tasks": ("self",),
        "AsyncLLM.generate": ("self", "prompt"),
    },
    "v1/engine/llm_engine.py": {"LLMEngine.get_supported_tasks": ("self",)},
    "v1/engine/input_processor.py": {"InputProcessor.process_inputs": ("self", "request_id", "prompt")},
}

# By file: the fields that a class is constructed with, all of them where the glue constructs it.
FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "distributed/kv_events.py": {
        "BlockStored": (
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
            "extra_keys",
        ),
        "BlockRemoved": ("block_hashes", "medium"),
        "AllBlocksCleared": (),
    },
}

# Of a patched tree (patches/): by file the fields that the patch adds to a class, and the calls of its registry.
PATCH_FIELDS: dict[str, tuple[str, str]] = {
    "config/cache.py": ("CacheConfig", "kv_cache_manager"),
    "engine/arg_utils.py": ("EngineArgs", "kv_cache_manager"),
}
PATCH_HASHER_CALL = "KVCacheManagerFactory.create_block_hasher"
PATCH_MANAGER_CALL = "KVCacheManagerFactory.create_manager"

# By file: classes whose exact type tells the kind of attention, and others that are looked up.
CLASSES: dict[str, tuple[str, ...]] = {
    "v1/kv_cache_interface.py": (
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "SinkFullAttentionSpec",
        "SlidingWindowSpec",
        "ChunkedLocalAttentionSpec",
        "MambaSpec",
        "CrossAttentionSpec",
        "KVCacheConfig",
    ),
    "v1/core/kv_cache_manager.py": ("KVCacheManager", "KVCacheBlocks"),
    "v1/engine/__init__.py": ("EngineCoreOutput", "EngineCoreOutputs"),
}

# Attributes of a request that the manager and its hasher read; `Request` sets or has them.
REQUEST_FILE = "v1/request.py"
REQUEST_ATTRIBUTES = (
    "request_id",
    "all_token_ids",
    "block_hashes",
    "cache_salt",
    "client_index",
    "lora_request",
    "mm_features",
    "num_cached_tokens",
    "num_computed_tokens",
    "num_output_placeholders",
    "num_preemptions",
    "num_tokens",
    "prompt_embeds",
    "skip_reading_prefix_cache",
    "trace_headers",
    "_prompt_embeds_per_block_hashes",
)
