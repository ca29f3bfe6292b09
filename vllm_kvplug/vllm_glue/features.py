"""What kvplug does not serve yet, as far as vLLM's configuration tells: refused before weights load.

What only the model's layers tell (the type of a KV cache group) is refused when the manager is constructed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_kvplug.errors import UnsupportedError

_UPSTREAM = "--kv-cache-manager upstream"


def refuse_unsupported(vllm_config: Any) -> None:
    """Raise an UnsupportedError for the first feature of the configuration that kvplug does not serve."""
    for feature, found_at, works_instead in _unsupported(vllm_config):
        raise UnsupportedError(f"kvplug does not support {feature} yet ({found_at}); works instead: {works_instead}")


def _unsupported(vllm_config: Any) -> Iterator[tuple[str, str, str]]:
    """Each feature: its name, the flag or field that asks for it, what to do instead."""
    yield from _unsupported_options(vllm_config)
    if vllm_config.model_config is not None:
        yield from _unsupported_models(vllm_config)


def _unsupported_options(vllm_config: Any) -> Iterator[tuple[str, str, str]]:
    parallel = vllm_config.parallel_config
    if vllm_config.cache_config.kv_offloading_size is not None:
        yield "KV offloading", "--kv-offloading-size", f"leaving it out, or {_UPSTREAM}"
    if vllm_config.kv_transfer_config is not None:
        yield "KV connectors", "--kv-transfer-config", f"leaving it out, or {_UPSTREAM}"
    if (size := parallel.decode_context_parallel_size) > 1:
        yield "decode context parallelism", f"--decode-context-parallel-size {size}", f"size 1, or {_UPSTREAM}"
    if (size := parallel.prefill_context_parallel_size) > 1:
        yield "prefill context parallelism", f"--prefill-context-parallel-size {size}", f"size 1, or {_UPSTREAM}"
    if vllm_config.observability_config.kv_cache_metrics:
        yield "KV cache residency metrics", "--kv-cache-metrics", f"leaving it out, or {_UPSTREAM}"


def _unsupported_models(vllm_config: Any) -> Iterator[tuple[str, str, str]]:
    model = vllm_config.model_config
    found_at = f"model {model.model}, architecture {model.architecture}"
    full_attention = f"a model with full attention in every layer, or {_UPSTREAM}"
    if model.is_encoder_decoder:
        yield "encoder-decoder models", found_at, f"a decoder-only model, or {_UPSTREAM}"
    if model.is_hybrid:
        yield "hybrid (Mamba or linear attention) models", found_at, full_attention
    if model.is_attention_free:
        yield "attention-free models", found_at, full_attention
    if model.attn_type == "encoder_only":
        yield "encoder-only models, which have no KV cache,", found_at, full_attention
    yield from _unsupported_attention(vllm_config, found_at)


def _unsupported_attention(vllm_config: Any, found_at: str) -> Iterator[tuple[str, str, str]]:
    """Layers that see only a window. vLLM keeps mixed layers in one group of full attention when told so.

    `cache_config.sliding_window` is set when it holds for every layer.
    """
    from vllm.transformers_utils.config import is_interleaved

    model = vllm_config.model_config
    unified = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    one_group = f"--disable-hybrid-kv-cache-manager (every layer keeps its whole KV cache), or {_UPSTREAM}"
    window = vllm_config.cache_config.sliding_window
    if model.attention_chunk_size is not None:
        if not unified:
            yield "chunked local attention", f"{found_at}, attention_chunk_size {model.attention_chunk_size}", one_group
    elif is_interleaved(model.hf_text_config):
        kinds = ", ".join(sorted(set(model.hf_text_config.layer_types)))
        if not unified:
            yield "layers of several attention types", f"{found_at}, layer_types {kinds}", one_group
    elif window is not None:
        cap = f"--disable-sliding-window (at most {window} tokens a request), or {_UPSTREAM}"
        yield "sliding window attention", f"{found_at}, sliding_window {window}", cap
