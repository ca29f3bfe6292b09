"""What a run is made of: the cache's groups, the scheduler's options, and the two schedulers built from them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from vllm_kvplug.vllm_glue.choice import ManagerChoice
from vllm_kvplug.vllm_glue.seams import SchedulerBuilder
from vllm_kvplug.vllm_glue.version import is_since

HAS_FULL_PROMPT_RESERVATION = is_since("0.19.0")


@dataclass(frozen=True)
class Case:
    """One kind of run.

    Attributes:
        name: its id among the tests.
        groups: a word for each KV cache group: `full`, `mla`, `window:N`, `chunk:N` (N in tokens), `mamba:MODE`.
        drafts: None, `ngram` (any number up to num_drafts) or `eagle` (always num_drafts, with lookahead slots).
        num_in_flight: steps that may be scheduled before the oldest one's output arrives.
        is_async: AsyncScheduler, which counts tokens before they are known.
        loads: None, `any` (some requests have external tokens; some wait for them) or `within` (all in their step).
        loads_fail: whether some of those tokens do not come.
        failure_policy: what vLLM does with requests whose external tokens failed to load.
        reserves_full_prompts: a request waits until all its tokens have room, which vLLM does by default from 0.19 on
            (before, it cannot): then there are few preemptions.
    """

    name: str
    groups: tuple[str, ...] = ("full",)
    num_blocks: int = 64
    num_tokens_per_block: int = 4
    max_model_len: int = 160
    max_num_requests: int = 8
    max_num_tokens: int = 48
    long_prefill_threshold: int = 0
    is_chunked: bool = True
    is_async: bool = False
    num_in_flight: int = 1
    policy: str = "fcfs"
    drafts: str | None = None
    num_drafts: int = 3
    enable_caching: bool = True
    loads: str | None = None
    loads_fail: bool = False
    failure_policy: str = "recompute"
    reserves_full_prompts: bool = False

    def kv_cache_config(self) -> KVCacheConfig:
        """The groups as vLLM describes them."""
        groups = [
            KVCacheGroupSpec([f"layer.{group_id}"], self._spec(word)) for group_id, word in enumerate(self.groups)
        ]
        return KVCacheConfig(self.num_blocks, [], groups)

    def _spec(self, word: str) -> KVCacheSpec:
        kind, _, argument = word.partition(":")
        sizes: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        num_tokens = self.num_tokens_per_block
        if kind == "full":
            return FullAttentionSpec(num_tokens, **sizes)
        if kind == "mla":
            return MLAAttentionSpec(num_tokens, **sizes)
        if kind == "window":
            return SlidingWindowSpec(num_tokens, **sizes, sliding_window=int(argument))
        if kind == "chunk":
            return ChunkedLocalAttentionSpec(num_tokens, **sizes, attention_chunk_size=int(argument))
        assert kind == "mamba", word
        # Without prefix caching one block holds the state of a whole request.
        num_tokens = self.max_model_len if argument == "none" else num_tokens
        return MambaSpec(
            num_tokens,
            shapes=((1,),),
            dtypes=(torch.float32,),
            mamba_cache_mode=argument,
            num_speculative_blocks=self.num_drafts if self.drafts is not None else 0,
        )


def build_scheduler(
    case: Case, base_config: Any, manager: str, manager_config: Mapping[str, Any] | None = None
) -> Scheduler:
    """A scheduler of vLLM's with this manager, the way an engine gets it."""
    kv_cache_config = case.kv_cache_config()
    vllm_config = _vllm_config(case, base_config)
    if manager != "upstream" or manager_config:
        choice = ManagerChoice(name=manager, config=dict(manager_config or {}))
        vllm_config.additional_config = {"kv_cache_manager": choice}
    return SchedulerBuilder(AsyncScheduler if case.is_async else Scheduler)(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=_structured_output_manager(),
        block_size=case.num_tokens_per_block,
        log_stats=True,
    )


@cache
def _structured_output_manager() -> StructuredOutputManager:
    """Nothing here asks for structured output: one that never advances serves."""
    manager = object.__new__(StructuredOutputManager)
    manager.should_advance = lambda request: False  # type: ignore[method-assign]
    return manager


def _vllm_config(case: Case, base_config: Any) -> Any:
    """A real VllmConfig with what the scheduler reads changed: making one for each case would take seconds."""
    vllm_config = copy.copy(base_config)
    for name in ("model_config", "scheduler_config", "cache_config"):
        setattr(vllm_config, name, copy.copy(getattr(base_config, name)))
    vllm_config.model_config.max_model_len = case.max_model_len
    scheduler_config = vllm_config.scheduler_config
    scheduler_config.max_num_seqs = case.max_num_requests
    scheduler_config.max_num_batched_tokens = case.max_num_tokens
    scheduler_config.max_num_scheduled_tokens = None
    scheduler_config.long_prefill_token_threshold = case.long_prefill_threshold
    scheduler_config.enable_chunked_prefill = case.is_chunked
    scheduler_config.policy = case.policy
    scheduler_config.async_scheduling = case.is_async
    scheduler_config.disable_hybrid_kv_cache_manager = False
    if HAS_FULL_PROMPT_RESERVATION:
        scheduler_config.scheduler_reserve_full_isl = case.reserves_full_prompts
    cache_config = vllm_config.cache_config
    cache_config.block_size = case.num_tokens_per_block
    cache_config.num_gpu_blocks = case.num_blocks
    cache_config.enable_prefix_caching = case.enable_caching
    cache_config.mamba_cache_mode = "align" if "mamba:align" in case.groups else "none"
    if case.drafts is not None:
        is_eagle = case.drafts == "eagle"
        vllm_config.speculative_config = SimpleNamespace(
            num_speculative_tokens=case.num_drafts, use_eagle=lambda: is_eagle, uses_draft_model=lambda: False
        )
    if case.loads is not None:
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="FakeConnector",
            kv_connector_module_path="tests.scheduler.fake_connector",
            kv_role="kv_both",
            kv_load_failure_policy=case.failure_policy,
        )
    return vllm_config
