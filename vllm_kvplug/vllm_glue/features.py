"""What no manager can serve, as far as vLLM's configuration tells: refused before weights load.

vLLM 0.17.1 has these with neither manager, and says so late or by an assertion. What only the model's layers tell is
refused when the manager is constructed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_kvplug.errors import UnsupportedError

_WITHOUT_CACHING = "--no-enable-prefix-caching"
# From 0.19.0 on: it takes the manager's pool and walks the linked list of its free blocks, which kvplug has not.
_POOL_CONNECTOR = "SimpleCPUOffloadConnector"
# By this method a connector gets the pool.
_TAKES_POOL = "bind_gpu_block_pool"


def refuse_unsupported(vllm_config: Any) -> None:
    """Raise an UnsupportedError for the first feature of the configuration that kvplug does not serve."""
    if _POOL_CONNECTOR in _connectors(vllm_config):
        is_offloading = getattr(getattr(vllm_config, "cache_config", None), "kv_offloading_size", None) is not None
        found_at = "VLLM_USE_SIMPLE_KV_OFFLOAD" if is_offloading else "--kv-transfer-config"
        raise UnsupportedError(_pool_refusal(f"{_POOL_CONNECTOR} ({found_at})"))
    if vllm_config.model_config is None or not vllm_config.cache_config.enable_prefix_caching:
        return
    for feature, found_at, works_instead in _unsupported_with_prefix_caching(vllm_config):
        raise UnsupportedError(
            f"kvplug does not support prefix caching with {feature} ({found_at}); works instead: {works_instead}"
        )


def refuse_pool_connector(scheduler: Any) -> None:
    """The same where only the constructed connector tells: one of another package's that takes the manager's pool."""
    connector = getattr(scheduler, "connector", None)
    if hasattr(connector, _TAKES_POOL):
        raise UnsupportedError(
            _pool_refusal(f"{type(connector).__name__} (--kv-transfer-config; it has {_TAKES_POOL})")
        )


def _pool_refusal(connector: str) -> str:
    return (
        f"kvplug does not support {connector}, which works on vLLM's own pool of blocks; works instead: "
        "OffloadingConnector"
    )


def _unsupported_with_prefix_caching(vllm_config: Any) -> Iterator[tuple[str, str, str]]:
    """Each feature: its name, the flag or field that asks for it, what to do instead."""
    model = vllm_config.model_config
    found_at = f"model {model.model}, architecture {model.architecture}"
    if model.is_encoder_decoder:
        yield "cross-attention", found_at, _WITHOUT_CACHING
    parallel = vllm_config.parallel_config
    for kind in ("decode", "prefill"):
        size = getattr(parallel, f"{kind}_context_parallel_size")
        if size > 1 and (layers := _layers_of_other_kinds(vllm_config)):
            flag = f"--{kind}-context-parallel-size"
            yield f"{kind} context parallelism over {layers}", f"{found_at}, {flag} {size}", f"{flag} 1"


def _connectors(vllm_config: Any) -> Iterator[str | None]:
    """The connectors that are asked for, those of a MultiConnector as well."""
    config = getattr(vllm_config, "kv_transfer_config", None)
    if config is not None:
        yield config.kv_connector
        for one in (config.kv_connector_extra_config or {}).get("connectors", ()):
            yield one.get("kv_connector")


def _layers_of_other_kinds(vllm_config: Any) -> str | None:
    """Layers that are no full attention; None where all are, or are kept like it (one group for all layers)."""
    from vllm.transformers_utils.config import is_interleaved

    model = vllm_config.model_config
    if model.is_hybrid:
        return "Mamba or linear attention layers"
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return None
    if model.attention_chunk_size is not None:
        return "chunked local attention"
    if vllm_config.cache_config.sliding_window is not None or is_interleaved(model.hf_text_config):
        return "sliding window attention"
    return None
