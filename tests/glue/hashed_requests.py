"""vLLM's own requests with all that goes into block hashes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

Hasher = Callable[[Request], list[Any]]


def image(identifier: str, offset: int, num_tokens: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=identifier, mm_position=PlaceholderRange(offset, num_tokens)
    )


def make_request(tokens: list[int] | None, hasher: Hasher | None, **options: Any) -> Request:
    """`options` as vLLM's Request has them: mm_features, lora_request, cache_salt, prompt_embeds."""
    return Request(
        options.pop("request_id", "request"),
        tokens,
        SamplingParams(max_tokens=1000),
        None,
        block_hasher=hasher,
        **options,
    )


def random_options(rng: random.Random, num_tokens: int, *, with_lora: bool = False) -> dict[str, Any]:
    """Several images, each once, in order and apart, also across blocks; salt and adapter in some."""
    features, offset = [], rng.randint(0, 30)
    while offset < num_tokens and rng.random() < 0.9:
        num_image_tokens = rng.choice([0, 1, 16, 32, rng.randint(1, 70)])
        features.append(image(f"image {len(features)}", offset, num_image_tokens))
        offset += num_image_tokens + rng.choice([0, 1, rng.randint(0, 40)])
    return {
        "mm_features": features if rng.random() < 0.6 else None,
        "cache_salt": rng.choice(["", "salt"]) if rng.random() < 0.4 else None,
        "lora_request": LoRARequest("adapter", 1, "/adapter") if with_lora else None,
    }


def random_embeds(rng: random.Random, num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randint(0, 2**31))
    return torch.randn(num_tokens, 3, generator=generator).to(rng.choice([torch.float32, torch.bfloat16]))
