"""What our manager is given for Qwen2-0.5B: vLLM's own sizing, from the model's public shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest
import torch
from vllm.config import CacheConfig, ModelConfig, VllmConfig
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec

from vllm_kvplug.vllm_glue.manager import KVCacheManager

_BLOCK_SIZE_TOKENS: Final = 16
_PAGE_BYTES = 8_192
_NUM_BLOCKS = 131_928
_LAYER_BYTES = 1_080_754_176
_NUM_LAYERS = 24

_QWEN2_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "num_attention_heads": 14,
    "num_hidden_layers": _NUM_LAYERS,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """vLLM's configuration of a model of this shape; no weights are needed for it."""
    folder: Path = tmp_path_factory.mktemp("qwen2-0.5b")
    (folder / "config.json").write_text(json.dumps(_QWEN2_05B))
    model_config = ModelConfig(str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True)
    return VllmConfig(model_config=model_config, cache_config=CacheConfig(block_size=_BLOCK_SIZE_TOKENS))


@pytest.fixture(scope="module")
def spec(vllm_config: VllmConfig) -> FullAttentionSpec:
    """What each attention layer of the model asks for."""
    model_config = vllm_config.model_config
    return FullAttentionSpec(
        block_size=_BLOCK_SIZE_TOKENS,
        num_kv_heads=model_config.get_num_kv_heads(vllm_config.parallel_config),
        head_size=model_config.get_head_size(),
        dtype=torch.bfloat16,
    )


@pytest.fixture(scope="module")
def kv_cache_config(vllm_config: VllmConfig, spec: FullAttentionSpec) -> KVCacheConfig:
    """vLLM's sizing for the memory that 24 layers of the expected size take."""
    num_layers = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
    specs: dict[str, KVCacheSpec] = {f"model.layers.{layer}.self_attn.attn": spec for layer in range(num_layers)}
    (config,) = get_kv_cache_configs(vllm_config, [specs], [_NUM_LAYERS * _LAYER_BYTES])
    return config


def test_a_page_of_qwen2_05b(spec: FullAttentionSpec) -> None:
    assert (spec.num_kv_heads, spec.head_size) == (2, 64)
    assert spec.page_size_bytes == _PAGE_BYTES


def test_vllm_sizes_the_cache(kv_cache_config: KVCacheConfig) -> None:
    assert kv_cache_config.num_blocks == _NUM_BLOCKS
    assert [tensor.size for tensor in kv_cache_config.kv_cache_tensors] == [_LAYER_BYTES] * _NUM_LAYERS
    assert [len(group.layer_names) for group in kv_cache_config.kv_cache_groups] == [_NUM_LAYERS]


def test_the_shape_of_a_layers_cache(spec: FullAttentionSpec) -> None:
    shape = FlashAttentionBackend.get_kv_cache_shape(_NUM_BLOCKS, spec.block_size, spec.num_kv_heads, spec.head_size)
    assert shape == (2, _NUM_BLOCKS, 16, 2, 64)


def test_our_manager_takes_it(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    max_model_len = vllm_config.model_config.max_model_len
    manager = KVCacheManager(kv_cache_config, max_model_len=max_model_len, hash_block_size=_BLOCK_SIZE_TOKENS)
    assert manager.pool.num_blocks == _NUM_BLOCKS
    assert manager.geometry.num_blocks == _NUM_BLOCKS
    assert manager.geometry.max_model_len == max_model_len == 32768
    assert [group.num_tokens_per_block for group in manager.geometry.groups] == [16]
    assert manager.pool.num_free_blocks == _NUM_BLOCKS - 1
