"""What the offline model hub holds: the public configuration of each model that upstream's tests name.

`tiny` is laid over the configuration when the model gets (random) weights, so that an end-to-end test loads it in a
second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TOKENIZER_VOCAB_SIZE = 49152  # of the default model's tokenizer, which stands in for every model's own


@dataclass(frozen=True)
class HubModel:
    """One model of the offline hub.

    Attributes:
        config: config.json.
        tiny: what is laid over config.json for a model with weights; None: the model never gets weights.
        files: further JSON files, by name.
        tokens: special tokens that a multimodal processor asks for, by the id that the configuration gives them.
        tokenizer_class: where the processor insists on one.
    """

    config: dict[str, Any]
    tiny: dict[str, Any] | None = None
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    tokens: dict[int, str] = field(default_factory=dict)
    tokenizer_class: str | None = None


def _tiny(hidden_size: int, num_layers: int, num_heads: int, num_kv_heads: int) -> dict[str, Any]:
    return {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 64,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": TOKENIZER_VOCAB_SIZE,
    }


_OPT_125M = {
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
_OPT_350M = _OPT_125M | {
    "do_layer_norm_before": False,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "word_embed_proj_dim": 512,
}
_LLAMA_32_1B = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN15_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    **_tiny(128, 2, 2, 2),
}
_LLAVA = HubModel(
    config={
        "architectures": ["LlavaForConditionalGeneration"],
        "image_seq_length": 576,
        "image_token_index": 32000,
        "model_type": "llava",
        "pad_token_id": 32001,
        "projector_hidden_act": "gelu",
        "text_config": {
            "architectures": ["LlamaForCausalLM"],
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "torch_dtype": "float16",
            "vocab_size": 32064,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vision_config": {
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "model_type": "clip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
            "vocab_size": 32000,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "vocab_size": 32064,
    },
    files={
        "preprocessor_config.json": {
            "crop_size": {"height": 336, "width": 336},
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_processor_type": "CLIPImageProcessor",
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "processor_class": "LlavaProcessor",
            "size": {"shortest_edge": 336},
        },
        "processor_config.json": {
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
            "patch_size": 14,
            "processor_class": "LlavaProcessor",
            "vision_feature_select_strategy": "default",
        },
    },
    tokens={32000: "<image>", 32001: "<pad>"},
)
_QWEN25_VL = HubModel(
    config={
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "image_token_id": 151655,
        "intermediate_size": 11008,
        "max_position_embeddings": 128000,
        "max_window_layers": 70,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "video_token_id": 151656,
        "vision_config": {
            "depth": 32,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "hidden_act": "silu",
            "hidden_size": 1280,
            "in_chans": 3,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
        "vision_token_id": 151654,
        "vocab_size": 151936,
    },
    files={
        "preprocessor_config.json": {
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_processor_type": "Qwen2VLImageProcessor",
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "max_pixels": 12845056,
            "merge_size": 2,
            "min_pixels": 3136,
            "patch_size": 14,
            "processor_class": "Qwen2_5_VLProcessor",
            "temporal_patch_size": 2,
        },
    },
    tokens={
        151652: "<|vision_start|>",
        151653: "<|vision_end|>",
        151654: "<|vision_pad|>",
        151655: "<|image_pad|>",
        151656: "<|video_pad|>",
    },
    tokenizer_class="Qwen2Tokenizer",
)

HUB_MODELS = {
    "facebook/opt-125m": HubModel(_OPT_125M, tiny={}),
    "facebook/opt-350m": HubModel(_OPT_350M),
    "hmellor/tiny-random-LlamaForCausalLM": HubModel(_TINY_LLAMA, tiny={}),
    "llava-hf/llava-1.5-7b-hf": _LLAVA,
    "meta-llama/Llama-3.2-1B": HubModel(_LLAMA_32_1B, tiny=_tiny(256, 4, 4, 2)),
    "meta-llama/Llama-3.2-1B-Instruct": HubModel(_LLAMA_32_1B, tiny=_tiny(256, 4, 4, 2)),
    "Qwen/Qwen1.5-7B": HubModel(_QWEN15_7B),
    "Qwen/Qwen2.5-VL-3B-Instruct": _QWEN25_VL,
    "Qwen/Qwen3-0.6B": HubModel(_QWEN3_06B, tiny=_tiny(128, 4, 4, 2)),
}
