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

from vllm_kvplug.evals.performance import sides
from vllm_kvplug.evals.sides import SideChoice

NUM_STEPS = 200
NUM_RUNNING = (64, 256)
# Who serves, who follows, and whether a bundle is written.
SIDES = (("upstream", "kvplug", False), ("kvplug", "upstream", False), ("upstream", "kvplug", True))
NUM_PROMPT_TOKENS, NUM_SHARED_TOKENS = 1_024, 256


class Loop:
    """One manager and its requests."""

    def __init__(self, name: str, config: dict[str, Any], num_requests: int) -> None:
        side = sides.BenchedSide(SideChoice(label=name, manager=name, settings=config))
        num_blocks = num_requests * (NUM_PROMPT_TOKENS + NUM_STEPS) // sides.NUM_TOKENS_PER_BLOCK + num_requests + 1
        self.manager = side.manager(num_blocks)
        self.requests = [side.request(_prompt(number)) for number in range(num_requests)]
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
        manager.allocate_slots(request, num_new_tokens, **hits, **sides.ADMISSION)
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


def _prompt(number: int) -> list[int]:
    """A beginning that all share, and a part of its own."""
    own = range(number * 10_000, number * 10_000 + NUM_PROMPT_TOKENS - NUM_SHARED_TOKENS)
    return [*range(NUM_SHARED_TOKENS), *own]


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
    sides.prepare()
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
