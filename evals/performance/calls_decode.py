"""Decode: what the manager costs in each step of requests that run.

Each function answers the repeat that a row measures on one side.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

from vllm_kvplug.evals.performance.measuring import Repeat, cool_caches, elapsed_us
from vllm_kvplug.evals.performance.sides import NUM_TOKENS_PER_BLOCK, BenchedSide, Population, Prompts, admit

NUM_RUNNING = 256
NUM_PROMPT_TOKENS = 1_024
# Steps that a row may make; more would need a larger pool.
MAX_STEPS = 1_024


def nothing_new(num_tokens_in_block: int) -> bool:
    """The token's block is there and does not become full."""
    return 1 < num_tokens_in_block < NUM_TOKENS_PER_BLOCK


def new_block(num_tokens_in_block: int) -> bool:
    """The token is a block's first."""
    return num_tokens_in_block == 1


def full_block(num_tokens_in_block: int) -> bool:
    """The token is a block's last: the block is cached."""
    return num_tokens_in_block == NUM_TOKENS_PER_BLOCK


def decode_call(side: BenchedSide, phase: Callable[[int], bool]) -> Repeat:
    """One `allocate_slots` of a running request in this phase, in microseconds: the mean of one step's calls."""
    # All requests are in the same phase.
    running = Population(side, [NUM_PROMPT_TOKENS] * NUM_RUNNING, num_steps=MAX_STEPS)

    def repeat() -> float:
        while True:
            is_wanted = phase(running.num_tokens_in_last_block())
            duration_us = _allocate(running)
            running.output_arrives()
            if is_wanted:
                return duration_us / NUM_RUNNING

    return repeat


def _allocate(running: Population) -> float:
    allocate_slots, requests = running.manager.allocate_slots, running.requests
    started_ns = perf_counter_ns()
    for request in requests:
        allocate_slots(request, 1, num_lookahead_tokens=0)
    return elapsed_us(started_ns)


def decode_step(side: BenchedSide, num_running: int, *, is_cold: bool = False, num_windows: int = 0) -> Repeat:
    """All calls of one step: allocate for each request, the answers' ids, the common prefix. Requests are in all
    phases of their blocks, so each step brings some new and some full ones."""
    lengths = [NUM_PROMPT_TOKENS + number % NUM_TOKENS_PER_BLOCK for number in range(num_running)]
    running = Population(side, lengths, num_steps=MAX_STEPS, num_windows=num_windows)
    manager, requests = running.manager, running.requests

    def repeat() -> float:
        if is_cold:
            cool_caches()
        started_ns = perf_counter_ns()
        answers = {}
        for request in requests:
            answers[request.request_id] = manager.allocate_slots(request, 1, num_lookahead_tokens=0)
        manager.get_num_common_prefix_blocks(requests[0].request_id)
        for request in requests:
            answers[request.request_id].get_block_ids(allow_none=True)
        duration_us = elapsed_us(started_ns)
        running.output_arrives()
        return duration_us

    return repeat


def block_ids(side: BenchedSide, num_tokens: int) -> Repeat:
    """`get_block_ids` of a running request, in microseconds; each has a new block since it was asked last."""
    num_running = 8
    running = Population(side, [num_tokens] * num_running, num_steps=MAX_STEPS * NUM_TOKENS_PER_BLOCK // 4)
    manager = running.manager

    def repeat() -> float:
        for request in running.requests:
            manager.allocate_slots(request, NUM_TOKENS_PER_BLOCK, num_lookahead_tokens=0)
            request.num_computed_tokens += NUM_TOKENS_PER_BLOCK
            request.append_output_token_ids([5] * NUM_TOKENS_PER_BLOCK)
        started_ns = perf_counter_ns()
        for request in running.requests:
            manager.get_block_ids(request.request_id)
        return elapsed_us(started_ns) / num_running

    return repeat


def common_prefix(side: BenchedSide, num_tokens: int) -> Repeat:
    """`get_num_common_prefix_blocks` of four running requests that share a prompt, in microseconds; one of them has a
    new block since it was asked last."""
    manager = side.manager()
    prompt = Prompts().next(num_tokens)
    requests = [side.request_of(prompt) for _ in range(4)]
    for request in requests:
        admit(manager, request)
        request.append_output_token_ids(5)

    def repeat() -> float:
        request = requests[-1]
        manager.allocate_slots(request, NUM_TOKENS_PER_BLOCK, num_lookahead_tokens=0)
        request.num_computed_tokens += NUM_TOKENS_PER_BLOCK
        request.append_output_token_ids([5] * NUM_TOKENS_PER_BLOCK)
        started_ns = perf_counter_ns()
        manager.get_num_common_prefix_blocks(requests[0].request_id)
        return elapsed_us(started_ns)

    return repeat
