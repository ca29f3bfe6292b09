"""Two tiny random models with the default model's tokenizer: their texts mean nothing, their scheduling is real.

The weights come from PCG64's raw integers, whose stream numpy never changes, by exact arithmetic: torch's and numpy's
random distributions may change between versions, and then the checksum would.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_kvplug.cli.models.smollm2 import gguf_path, token_ids, write_tokenizer

_SEED = 20_240_517
_VOCAB_SIZE = 49_152
# A head size that vLLM's CPU attention has.
_HEAD_SIZE = 64
_HIDDEN_SIZE = 128


def build_qwen2(folder: Path) -> None:
    """Two layers: a step costs so little that the scheduler is what a load test measures."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        **_shape(), num_hidden_layers=2, max_window_layers=2, use_sliding_window=False, tie_word_embeddings=False
    )
    _write(Qwen2ForCausalLM(config), folder)


def build_hybrid(folder: Path) -> None:
    """Four layers with a sliding window of 64 tokens, two with full attention: three groups of two to vLLM."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    pattern = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        **_shape(),
        num_hidden_layers=6,
        layer_types=pattern * 2,
        sliding_window=64,
        head_dim=_HEAD_SIZE,
        query_pre_attn_scalar=_HEAD_SIZE,
        tie_word_embeddings=False,
    )
    _write(Gemma3ForCausalLM(config), folder)


def _shape() -> dict[str, int]:
    return {
        "vocab_size": _VOCAB_SIZE,
        "hidden_size": _HIDDEN_SIZE,
        "intermediate_size": 2 * _HIDDEN_SIZE,
        "num_attention_heads": _HIDDEN_SIZE // _HEAD_SIZE,
        "num_key_value_heads": 1,
        "max_position_embeddings": 8192,
        **token_ids(gguf_path()),
    }


def _write(model: Any, folder: Path) -> None:
    import torch
    from transformers import GenerationConfig

    _fill(model)
    model.generation_config = GenerationConfig(**token_ids(gguf_path()))
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)


def _fill(model: Any) -> None:
    """Uniform weights of variance 1 / fan-in in each matrix, in the names' order; vectors keep their values."""
    import numpy as np
    import torch

    bits = np.random.PCG64(_SEED)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() != 2:
                continue
            # 24 bits fit a float32 without rounding.
            raw = (bits.random_raw(parameter.numel()) >> np.uint64(40)).astype(np.float32)
            uniform = raw * np.float32(2.0**-23) - np.float32(1.0)
            scale = np.float32((3.0 / parameter.shape[1]) ** 0.5)
            parameter.copy_(torch.from_numpy(uniform * scale).view_as(parameter))
