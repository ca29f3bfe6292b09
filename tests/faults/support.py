"""Both managers over one configuration, and requests for them, in the notation of the faults: a block holds 16 tokens,
`num_blocks` counts the null block, `run` looks a request up and allocates all that remains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager as UpstreamManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from vllm_kvplug.invariants import check_invariants
from vllm_kvplug.vllm_glue.manager import KVCacheManager as OurManager

BLOCK = 16

_SHAPE: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
FULL = FullAttentionSpec(**_SHAPE)


def sliding_window(num_tokens: int) -> SlidingWindowSpec:
    """SWA(num_tokens) of the faults."""
    return SlidingWindowSpec(sliding_window=num_tokens, **_SHAPE)


def sink(num_tokens: int) -> SinkFullAttentionSpec:
    """Full attention with so many tokens of sinks."""
    return SinkFullAttentionSpec(sink_len=num_tokens, **_SHAPE)


def mamba(mode: str, num_speculative_blocks: int = 0) -> MambaSpec:
    """A Mamba group."""
    return MambaSpec(
        block_size=BLOCK,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
        num_speculative_blocks=num_speculative_blocks,
    )


def build(manager_class: type[Any], specs: Sequence[KVCacheSpec], num_blocks: int, **options: Any) -> Any:
    """A manager with one group for each spec."""
    init_none_hash(sha256)
    groups = [KVCacheGroupSpec([f"layer.{position}"], spec) for position, spec in enumerate(specs)]
    return manager_class(
        kv_cache_config=KVCacheConfig(num_blocks, [], groups),
        max_model_len=options.pop("max_model_len", 8192),
        hash_block_size=BLOCK,
        **{"enable_caching": True, "log_stats": True, **options},
    )


def ours(specs: Sequence[KVCacheSpec], num_blocks: int, **options: Any) -> OurManager:
    """Ours."""
    manager: OurManager = build(OurManager, specs, num_blocks, **options)
    return manager


def upstream(specs: Sequence[KVCacheSpec], num_blocks: int, **options: Any) -> UpstreamManager:
    """vLLM's own."""
    manager: UpstreamManager = build(UpstreamManager, specs, num_blocks, **options)
    return manager


def prompt(num_tokens: int) -> list[int]:
    """P(num_tokens) of the faults: tokens 0, 1, 2, ..."""
    return list(range(num_tokens))


def request(request_id: str, tokens: Sequence[int], **options: Any) -> Request:
    """A request of these tokens, its block hashes in blocks of 16."""
    return Request(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=8192),
        pooling_params=None,
        arrival_time=0.0,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **options,
    )


def run(manager: Any, new_request: Request) -> int | None:
    """Look up, allocate all that remains; the hit tokens, or None where it was refused."""
    blocks, num_hit_tokens = manager.get_computed_blocks(new_request)
    num_new_tokens = new_request.num_tokens - num_hit_tokens
    if manager.allocate_slots(new_request, num_new_tokens, num_hit_tokens, blocks) is None:
        return None
    new_request.num_computed_tokens = new_request.num_tokens
    check(manager)
    return int(num_hit_tokens)


def check(manager: Any) -> None:
    """Our invariants, where the manager is ours."""
    if isinstance(manager, OurManager):
        check_invariants(manager)


def on_both(
    act: Callable[[Any], Any], specs: Sequence[KVCacheSpec], num_blocks: int, **options: Any
) -> tuple[Any, Any]:
    """What `act(manager)` gives: (with upstream's manager, with ours)."""
    return act(upstream(specs, num_blocks, **options)), act(ours(specs, num_blocks, **options))
