"""What a shadow costs the engine's thread: `python -m evals.shadow_overhead`.

Managers are called as vLLM's scheduler calls them, with and without a follower in turn, so that drift of the machine
cancels: requests of 1,024 tokens that share a quarter are admitted, then all decode. Prints microseconds, least and
median; nothing of the scheduler itself is in them.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

NUM_STEPS = 200
NUM_RUNNING = (64, 256)
# Who serves, who follows, and whether a bundle is written.
SIDES = (("upstream", "kvplug", False), ("kvplug", "upstream", False), ("upstream", "kvplug", True))
NUM_TOKENS_PER_BLOCK = 16
NUM_PROMPT_TOKENS, NUM_SHARED_TOKENS = 1_024, 256
MAX_TOKENS = 4_096
# What vLLM's scheduler always names when it admits a request.
SCHEDULERS_DEFAULTS: dict[str, Any] = {
    "num_lookahead_tokens": 0,
    "num_external_computed_tokens": 0,
    "delay_cache_blocks": False,
    "num_encoder_tokens": 0,
}


class Loop:
    """One manager and its requests."""

    def __init__(self, name: str, config: dict[str, Any], num_requests: int) -> None:
        self.manager = _manager(name, config, num_requests)
        self.requests = [_request(number) for number in range(num_requests)]
        self.admission_us: list[float] = []
        self.decode_us: list[float] = []
        self.step_us: list[float] = []

    def admit_next(self, number: int) -> None:
        """Look up, allocate and read the blocks of one request."""
        manager, request = self.manager, self.requests[number]
        started_ns = time.perf_counter_ns()
        blocks, num_hit_tokens = manager.get_computed_blocks(request)
        num_new_tokens = request.num_tokens - num_hit_tokens
        hits = {"num_new_computed_tokens": num_hit_tokens, "new_computed_blocks": blocks}
        manager.allocate_slots(request, num_new_tokens, **hits, **SCHEDULERS_DEFAULTS)
        manager.get_blocks(request.request_id)
        self.admission_us.append((time.perf_counter_ns() - started_ns) / 1e3)
        request.num_computed_tokens = request.num_tokens

    def step(self) -> None:
        """All requests decode a token."""
        manager = self.manager
        for request in self.requests:
            request.append_output_token_ids(5)
        started_ns = time.perf_counter_ns()
        manager.new_step_starts()
        decoding_ns = time.perf_counter_ns()
        for request in self.requests:
            manager.allocate_slots(request, 1, num_lookahead_tokens=0)
        decoded_ns = time.perf_counter_ns()
        manager.get_num_common_prefix_blocks(self.requests[0].request_id)
        manager.take_events()
        manager.make_prefix_cache_stats()
        self.step_us.append((time.perf_counter_ns() - started_ns) / 1e3)
        self.decode_us.append((decoded_ns - decoding_ns) / 1e3 / len(self.requests))
        for request in self.requests:
            request.num_computed_tokens += 1


def _manager(name: str, config: dict[str, Any], num_requests: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from vllm_kvplug.vllm_glue import registry

    spec = FullAttentionSpec(NUM_TOKENS_PER_BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    num_blocks = num_requests * (NUM_PROMPT_TOKENS + NUM_STEPS) // NUM_TOKENS_PER_BLOCK + num_requests + 1
    return registry.factory(name, config)(
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=MAX_TOKENS,
        hash_block_size=NUM_TOKENS_PER_BLOCK,
        enable_caching=True,
        use_eagle=False,
        log_stats=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        metrics_collector=None,
    )


def _request(number: int) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    own = range(number * 10_000, number * 10_000 + NUM_PROMPT_TOKENS - NUM_SHARED_TOKENS)
    return Request(
        request_id=f"request-{number}",
        prompt_token_ids=[*range(NUM_SHARED_TOKENS), *own],
        sampling_params=SamplingParams(max_tokens=NUM_STEPS + 1, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(NUM_TOKENS_PER_BLOCK, sha256),
    )


def _row(what: str, off_us: Sequence[float], on_us: Sequence[float]) -> str:
    least = (min(off_us), min(on_us))
    median = (statistics.median(off_us), statistics.median(on_us))
    return (
        f"  {what:<22} without {least[0]:8.2f} {median[0]:8.2f}   with {least[1]:8.2f} {median[1]:8.2f}   "
        f"more {least[1] - least[0]:8.2f} {median[1] - median[0]:8.2f}"
    )


def main() -> None:
    """Measure, and print a table."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)
    print("microseconds, least and median")
    for num_running in NUM_RUNNING:
        for serving, follower, has_bundle in SIDES:
            with tempfile.TemporaryDirectory(prefix="kvplug-shadow-") as folder:
                bundle = {"bundle": folder} if has_bundle else {}
                _measure(num_running, {"serving": serving, "follower": follower, **bundle})


def _measure(num_running: int, config: dict[str, Any]) -> None:
    off, on = Loop(config["serving"], {}, num_running), Loop("shadow", config, num_running)
    for number in range(num_running):
        for loop in (off, on):
            loop.admit_next(number)
    for _ in range(NUM_STEPS):
        for loop in (off, on):
            loop.step()
    diverged = on.manager.shadow_report()["num_requests_diverged"]
    bundle = ", with a bundle" if "bundle" in config else ""
    sides = f"{config['serving']} serves, {config['follower']} follows{bundle}"
    print(f"{num_running} running, {sides}; {diverged} diverged")
    print(_row("a decode call", off.decode_us, on.decode_us))
    print(_row("all calls of a step", off.step_us, on.step_us))
    print(_row("an admission", off.admission_us, on.admission_us), flush=True)


if __name__ == "__main__":
    main()
