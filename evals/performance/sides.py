"""A manager under measurement: its construction, its requests, and the calls as vLLM's scheduler makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import count
from typing import Any, cast

import numpy as np

from vllm_kvplug.evals.sides import SideChoice

NUM_TOKENS_PER_BLOCK = 16
# A 24 GB card with an 8B model in 8 bits has about so many; the other size stands for a large server.
NUM_BLOCKS, MANY_BLOCKS = 131_928, 2_000_000
MAX_MODEL_LEN = 262_144
MAX_TOKENS = 65_536
SLIDING_WINDOW_TOKENS = 1_024
_VOCAB_SIZE = 150_000
# What vLLM's scheduler always names when it admits a request without connector, drafter or encoder.
ADMISSION: dict[str, Any] = {
    "num_lookahead_tokens": 0,
    "num_external_computed_tokens": 0,
    "delay_cache_blocks": False,
    "num_encoder_tokens": 0,
}

Prompt = np.ndarray[Any, np.dtype[np.int64]]


def prepare() -> None:
    """What an engine does before its first request is hashed."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)


class Prompts:
    """Random prompts, the same for both sides and in every run. Each one's first block differs from all others'."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def next(self, num_tokens: int) -> Prompt:
        """Token ids, shape (num_tokens,)."""
        return self._random.integers(0, _VOCAB_SIZE, size=num_tokens, dtype=np.int64)


class BenchedSide:
    """One manager by its name and settings; makes instances of it and requests for them.

    Raises:
        SettingsError: an unknown name, or wrong settings.
        ContractError: its class does not keep vLLM's contract.
    """

    def __init__(self, choice: SideChoice) -> None:
        from vllm_kvplug.vllm_glue import registry

        self.label = choice.label
        self.choice = choice
        self._factory = registry.factory(choice.manager, choice.settings)
        self._make_hasher = registry.hasher_factory(choice.manager, choice.settings)
        self._numbers = count()

    def manager(self, num_blocks: int = NUM_BLOCKS, num_windows: int = 0) -> Any:
        """A new manager: a group with full attention, and `num_windows` with a sliding window beside it."""
        from vllm.v1.kv_cache_interface import KVCacheConfig

        return self._factory(
            kv_cache_config=KVCacheConfig(num_blocks, [], groups(num_windows)),
            max_model_len=MAX_MODEL_LEN,
            hash_block_size=NUM_TOKENS_PER_BLOCK,
            enable_caching=True,
            use_eagle=False,
            log_stats=True,
            enable_kv_cache_events=False,
            dcp_world_size=1,
            pcp_world_size=1,
            metrics_collector=None,
        )

    @cached_property
    def hasher(self) -> Callable[[Any], Any]:
        """What an engine with this manager gives to its requests."""
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher

        return (self._make_hasher or get_request_block_hasher)(NUM_TOKENS_PER_BLOCK, sha256)

    @cached_property
    def _sampling_params(self) -> Any:
        from vllm.sampling_params import SamplingParams

        return SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)

    def request(self, token_ids: list[int], *, is_hashed: bool = True) -> Any:
        """vLLM's request with these tokens, hashed as an engine does it."""
        from vllm.v1.request import Request

        return Request(
            request_id=f"cmpl-{next(self._numbers)}",
            prompt_token_ids=token_ids,
            sampling_params=self._sampling_params,
            pooling_params=None,
            block_hasher=self.hasher if is_hashed else None,
        )

    def request_of(self, prompt: Prompt) -> Any:
        """A request with ints of its own, as they come out of a message: no token is the same object as another's."""
        return self.request(cast("list[int]", prompt.tolist()))


def groups(num_windows: int) -> list[Any]:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

    sizes: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    window = SlidingWindowSpec(NUM_TOKENS_PER_BLOCK, **sizes, sliding_window=SLIDING_WINDOW_TOKENS)
    full = FullAttentionSpec(NUM_TOKENS_PER_BLOCK, **sizes)
    return [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate([full] + [window] * num_windows)]


def admit(manager: Any, request: Any, *, num_scheduled_tokens: int | None = None) -> Any:
    """Look up and allocate as the scheduler does for a waiting request; all its tokens count as computed then.

    Args:
        num_scheduled_tokens: tokens of this step; all that are missing unless said.
    """
    blocks, num_hit_tokens = manager.get_computed_blocks(request)
    num_new_tokens = num_scheduled_tokens or request.num_tokens - num_hit_tokens
    answer = manager.allocate_slots(
        request, num_new_tokens, num_new_computed_tokens=num_hit_tokens, new_computed_blocks=blocks, **ADMISSION
    )
    assert answer is not None, "the pool of a row is too small"
    request.num_computed_tokens = num_hit_tokens + num_new_tokens
    return answer


class Population:
    """Requests that decode on one manager: prompts of their own, already computed, one sampled token each.

    Args:
        num_prompt_tokens: of each request; its length says how many there are.
    """

    def __init__(
        self, side: BenchedSide, num_prompt_tokens: Sequence[int], *, num_steps: int, num_windows: int = 0
    ) -> None:
        num_blocks = sum(-(-(num + num_steps) // NUM_TOKENS_PER_BLOCK) for num in num_prompt_tokens)
        self.manager = side.manager(max(NUM_BLOCKS, (1 + num_windows) * num_blocks + 1), num_windows)
        prompts = Prompts()
        self.requests = [side.request_of(prompts.next(num)) for num in num_prompt_tokens]
        for request in self.requests:
            admit(self.manager, request)
            request.append_output_token_ids(5)

    def output_arrives(self) -> None:
        """What the scheduler does to its requests between two steps."""
        for request in self.requests:
            request.num_computed_tokens += 1
            request.append_output_token_ids(5)

    def num_tokens_in_last_block(self) -> int:
        """Of the next step, of the first request: 1 where it begins a block, 16 where it fills one."""
        return int(self.requests[0].num_computed_tokens) % NUM_TOKENS_PER_BLOCK + 1
