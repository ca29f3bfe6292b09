"""A scheduler with a shadow under random traffic: preemptions, aborts, resets; and all that its manager answered."""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.scheduler.cases import Case
from tests.scheduler.loops import Side
from tests.scheduler.traffic import Script, random_scripts
from vllm_kvplug.trace.operations import Answer, answer_of
from vllm_kvplug.vllm_glue import contract, registry

MAX_STEPS = 3_000


@dataclass
class Run:
    """One run: its manager, what that answered call by call, and how often requests were preempted and hit."""

    manager: Any
    side: Side
    answers: list[tuple[str, Answer]] = field(default_factory=list)
    num_resets: int = 0
    num_evictions: int = 0
    depth: int = 0

    @property
    def report(self) -> dict[str, Any]:
        """The shadow's counts."""
        return self.manager.shadow_report()


def run(
    case: Case, base_config: Any, manager: str, config: Mapping[str, Any], seed: int, *, evicts: bool = False
) -> Run:
    """Serve random scripts to the end. The same seed gives the same traffic, whatever the manager.

    `evicts`: blocks that requests hold are taken out of the prefix cache now and then.
    """
    print(f"case {case.name!r}, seed {seed}, {manager} {dict(config)}")
    scripts = random_scripts(case, seed)
    side = Side(case, base_config, manager, scripts, manager_config=config)
    done = Run(side.manager, side)
    _watch(done)
    _serve(done, scripts, random.Random(seed), evicts=evicts)
    return done


def construct(name: str, config: Mapping[str, Any], kv_cache_config: Any, *, engine_index: int = 0) -> Any:
    """A manager as a scheduler constructs it, without a scheduler."""
    keywords = dict.fromkeys(contract.CONSTRUCTOR_KEYWORDS, False) | {
        "kv_cache_config": kv_cache_config,
        "max_model_len": 256,
        "hash_block_size": 16,
        "dcp_world_size": 1,
        "pcp_world_size": 1,
        "metrics_collector": None,
    }
    return registry.factory(name, config, engine_index=engine_index)(**keywords)


def divergences_when(folder: Path, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """A bundle's divergences.json, which another thread writes, once it is as the condition says."""
    deadline = time.monotonic() + 30
    while True:
        path = folder / "divergences.json"
        written = json.loads(path.read_text()) if path.exists() else {}
        if written and condition(written):
            return written
        assert time.monotonic() < deadline, written
        time.sleep(0.02)


def _watch(done: Run) -> None:
    """Keep every answer to a call from outside, over the class's methods or what stands over them already."""
    for name in contract.CALLS:
        setattr(done.manager, name, _watched(done, name, getattr(done.manager, name)))


def _watched(done: Run, name: str, method: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        done.depth += 1
        try:
            result = method(*args, **kwargs)
        finally:
            done.depth -= 1
        if not done.depth:
            done.answers.append((name, answer_of(name, result)))
        return result

    return call


def _serve(done: Run, scripts: Sequence[Script], rng: random.Random, *, evicts: bool) -> None:
    side, waiting, step = done.side, deque(scripts), 0
    while waiting or not side.is_done:
        step += 1
        assert step < MAX_STEPS, side.story()
        while waiting and waiting[0].arrives_at <= step:
            side.add(waiting.popleft())
        _disturb(done, scripts, step, rng)
        if evicts and rng.random() < 0.1:
            _evict(done, rng)
        if side.can_schedule:
            output = side.schedule()
            if output.total_num_scheduled_tokens and len(side.in_flight) < side.case.num_in_flight:
                continue
        if side.in_flight:
            side.update()


def _disturb(done: Run, scripts: Sequence[Script], step: int, rng: random.Random) -> None:
    for script in scripts:
        if script.aborted_at == step:
            done.side.abort(script.request_id)
    scheduler = done.side.scheduler
    if rng.random() < 0.03:
        with_running = rng.random() < 0.5 and not done.side.in_flight and not done.side.case.loads
        done.num_resets += scheduler.reset_prefix_cache(reset_running_requests=with_running)


def _evict(done: Run, rng: random.Random) -> None:
    """As after a failed load."""
    manager = done.manager
    held = [
        block_id
        for request in done.side.scheduler.running
        for row in manager.get_block_ids(request.request_id)
        for block_id in row
        if block_id
    ]
    if held:
        done.num_evictions += 1
        manager.evict_blocks(set(rng.sample(held, min(3, len(held)))))
