"""Prompts: allocated new or on hits, looked up, freed, and their whole lives.

Each function answers the repeat that a row measures on one side.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from time import perf_counter_ns
from typing import Any

from vllm_kvplug.evals.performance.measuring import Repeat, elapsed_us
from vllm_kvplug.evals.performance.sides import (
    ADMISSION,
    NUM_BLOCKS,
    NUM_TOKENS_PER_BLOCK,
    BenchedSide,
    Prompt,
    Prompts,
    admit,
)

# Lookups go around among so many prompts.
NUM_CACHED_PROMPTS = 4


def prefill_fresh(side: BenchedSide, num_tokens: int) -> Repeat:
    """`allocate_slots` for a whole prompt that nobody has sent before, from blocks never used; requests go on
    running. A new pool where one is used up."""
    prompts = Prompts()
    manager = side.manager()
    num_used = 0
    requests: list[Any] = []

    def repeat() -> float:
        nonlocal manager, num_used
        num_blocks = num_tokens // NUM_TOKENS_PER_BLOCK
        if num_used + num_blocks >= NUM_BLOCKS:
            requests.clear()
            manager, num_used = side.manager(), 0
        num_used += num_blocks
        requests.append(side.request_of(prompts.next(num_tokens)))
        return _prefill(manager, requests[-1])

    return repeat


def _prefill(manager: Any, request: Any) -> float:
    blocks, num_hit_tokens = manager.get_computed_blocks(request)
    assert num_hit_tokens == 0
    num_tokens = request.num_tokens
    started_ns = perf_counter_ns()
    answer = manager.allocate_slots(
        request, num_tokens, num_new_computed_tokens=0, new_computed_blocks=blocks, **ADMISSION
    )
    duration_us = elapsed_us(started_ns)
    assert answer is not None
    request.num_computed_tokens = num_tokens
    return duration_us


def prefill_evicting(side: BenchedSide, num_tokens: int, *, num_tokens_before: int | None = None) -> Repeat:
    """The same where every block was left by a request before, and is still cached.

    Args:
        num_tokens_before: of each of the requests that filled the pool; as many as the new one's unless said.
    """
    prompts = Prompts()
    manager = _used_up(side, prompts, num_tokens_before or num_tokens)

    def repeat() -> float:
        request = side.request_of(prompts.next(num_tokens))
        duration_us = _prefill(manager, request)
        manager.free(request)
        return duration_us

    return repeat


def _used_up(side: BenchedSide, prompts: Prompts, num_tokens: int) -> Any:
    """A manager all of whose blocks are free and cached."""
    manager = side.manager()
    requests = []
    for _ in range((NUM_BLOCKS - 1) // (num_tokens // NUM_TOKENS_PER_BLOCK)):
        requests.append(side.request_of(prompts.next(num_tokens)))
        admit(manager, requests[-1])
    # The few that the last prompt did not fit into.
    rest = (NUM_BLOCKS - 1) % (num_tokens // NUM_TOKENS_PER_BLOCK)
    if rest:
        requests.append(side.request_of(prompts.next(rest * NUM_TOKENS_PER_BLOCK)))
        admit(manager, requests[-1])
    for request in requests:
        manager.free(request)
    return manager


def free(side: BenchedSide, num_tokens: int) -> Repeat:
    """`free` of a request whose blocks nobody else holds."""
    prompts = Prompts()
    manager = _used_up(side, prompts, num_tokens)

    def repeat() -> float:
        request = side.request_of(prompts.next(num_tokens))
        _prefill(manager, request)
        started_ns = perf_counter_ns()
        manager.free(request)
        return elapsed_us(started_ns)

    return repeat


def _with_cached_prompts(
    side: BenchedSide,
    num_tokens: int,
    *,
    num_windows: int = 0,
    is_held: bool = False,
    before_free: Callable[[Any, Any], None] = lambda manager, request: None,
) -> tuple[Any, list[Prompt]]:
    """A manager, and the prompts whose blocks it has cached. One more token than hits: the last is never one."""
    num_blocks = max(
        NUM_BLOCKS, (NUM_CACHED_PROMPTS + 1) * (1 + num_windows) * (num_tokens // NUM_TOKENS_PER_BLOCK + 2)
    )
    manager = side.manager(num_blocks, num_windows)
    prompts = Prompts()
    cached = [prompts.next(num_tokens + 1) for _ in range(NUM_CACHED_PROMPTS)]
    for prompt in cached:
        request = side.request_of(prompt)
        admit(manager, request)
        before_free(manager, request)
        if not is_held:
            manager.free(request)
    return manager, cached


def lookup(side: BenchedSide, num_tokens: int, *, num_windows: int = 0) -> Repeat:
    """`get_computed_blocks` of a request never looked up before, all of whose full blocks are cached."""
    manager, prompts = _with_cached_prompts(side, num_tokens, num_windows=num_windows)
    next_prompt = cycle(prompts)

    def repeat() -> float:
        duration_us, num_hit_tokens = _look_up(manager, side.request_of(next(next_prompt)))
        assert num_hit_tokens == num_tokens, num_hit_tokens
        return duration_us

    return repeat


def _look_up(manager: Any, request: Any) -> tuple[float, int]:
    started_ns = perf_counter_ns()
    _, num_hit_tokens = manager.get_computed_blocks(request)
    return elapsed_us(started_ns), num_hit_tokens


def lookup_without_windows(side: BenchedSide, num_tokens: int, *, num_windows: int, num_blocks_kept: int) -> Repeat:
    """The lookup of a hybrid model where the windows' blocks were evicted.

    Args:
        num_blocks_kept: of the windows' blocks, between two that were evicted; 0: none is left.
    """

    def evict(manager: Any, request: Any) -> None:
        for ids in manager.get_block_ids(request.request_id)[1:]:
            manager.evict_blocks(set(ids[num_blocks_kept :: num_blocks_kept + 1]))

    manager, prompts = _with_cached_prompts(side, num_tokens, num_windows=num_windows, before_free=evict)
    next_prompt = cycle(prompts)

    def repeat() -> float:
        duration_us, num_hit_tokens = _look_up(manager, side.request_of(next(next_prompt)))
        assert num_hit_tokens == num_blocks_kept * NUM_TOKENS_PER_BLOCK, num_hit_tokens
        return duration_us

    return repeat


def admit_on_hits(side: BenchedSide, num_tokens: int, *, is_held: bool) -> Repeat:
    """`allocate_slots` of a request that hits fully: its blocks are free (`is_held` False), or in use by another."""
    manager, prompts = _with_cached_prompts(side, num_tokens, is_held=is_held)
    next_prompt = cycle(prompts)

    def repeat() -> float:
        request = side.request_of(next(next_prompt))
        blocks, num_hit_tokens = manager.get_computed_blocks(request)
        assert num_hit_tokens == num_tokens, num_hit_tokens
        num_new_tokens = request.num_tokens - num_hit_tokens
        started_ns = perf_counter_ns()
        manager.allocate_slots(
            request, num_new_tokens, num_new_computed_tokens=num_hit_tokens, new_computed_blocks=blocks, **ADMISSION
        )
        duration_us = elapsed_us(started_ns)
        request.num_computed_tokens = request.num_tokens
        manager.free(request)
        return duration_us

    return repeat


def hash_prompt(side: BenchedSide, num_tokens: int) -> Repeat:
    """All hashes of a prompt, by the hasher that an engine with this manager has; the bytes must be vLLM's."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    upstreams = get_request_block_hasher(NUM_TOKENS_PER_BLOCK, sha256)
    prompts = Prompts()

    def repeat() -> float:
        request = side.request(prompts.next(num_tokens).tolist(), is_hashed=False)
        started_ns = perf_counter_ns()
        hashes = list(side.hasher(request))
        duration_us = elapsed_us(started_ns)
        assert hashes == upstreams(request), f"{side.label}: other hashes than vLLM's"
        return duration_us

    return repeat


def life(side: BenchedSide, num_tokens: int, *, is_hit: bool) -> Repeat:
    """All that a request costs: constructed and hashed, looked up, admitted, its block ids read, freed."""
    manager, cached = _with_cached_prompts(side, num_tokens)
    prompts, next_prompt = Prompts(seed=1), cycle(cached)

    def repeat() -> float:
        token_ids = (next(next_prompt) if is_hit else prompts.next(num_tokens + 1)).tolist()
        started_ns = perf_counter_ns()
        request = side.request(token_ids)
        blocks, num_hit_tokens = manager.get_computed_blocks(request)
        num_new_tokens = request.num_tokens - num_hit_tokens
        manager.allocate_slots(
            request, num_new_tokens, num_new_computed_tokens=num_hit_tokens, new_computed_blocks=blocks, **ADMISSION
        )
        manager.get_blocks(request.request_id).get_block_ids()
        manager.free(request)
        duration_us = elapsed_us(started_ns)
        assert num_hit_tokens == (num_tokens if is_hit else 0), num_hit_tokens
        return duration_us

    return repeat
