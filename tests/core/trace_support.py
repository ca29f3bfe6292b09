"""A small scheduler over a core manager, whose traffic traces are made of, and traces in plain Python."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.core.support import FakeRequest
from vllm_kvplug.geometry import AttentionKind, CacheGeometry, GroupGeometry
from vllm_kvplug.manager import CacheManager
from vllm_kvplug.settings import Settings
from vllm_kvplug.trace.format import Header
from vllm_kvplug.trace.live_calls import LiveCalls
from vllm_kvplug.trace.operations import Operation
from vllm_kvplug.trace.writer import TraceWriter

TOKENS_PER_BLOCK = 4
# What no trace may tell.
REQUEST_ID = "the-client-s-request-%d"
MIB = 1 << 20


class FullContractManager(CacheManager):
    """The core's manager with the two methods that the glue adds."""

    def take_events(self) -> list[Any]:
        return []

    def make_prefix_cache_stats(self) -> None:
        return None


def make_manager(num_blocks: int = 30, **kwargs: Any) -> FullContractManager:
    """One group of full attention, blocks of 4 tokens."""
    group = GroupGeometry(AttentionKind.FULL, TOKENS_PER_BLOCK)
    return FullContractManager(CacheGeometry(num_blocks, 256, (group,), TOKENS_PER_BLOCK), Settings(), **kwargs)


@dataclass
class Request(FakeRequest):
    """Tells whether it has ended, as vLLM's does, and has its token ids."""

    has_ended: bool = False
    max_tokens: int = 8
    num_prompt_tokens: int = 0

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    def is_finished(self) -> bool:
        return self.has_ended


class SmallScheduler:
    """First come, first served; a running request that is refused preempts the last one."""

    def __init__(self, manager: Any, seed: int = 0) -> None:
        self.manager = manager
        self.rng = random.Random(seed)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_requests = 0
        self.num_preemptions = 0

    def add(self) -> None:
        family = self.rng.randrange(3)
        tokens = [family * 1000 + i for i in range(self.rng.randint(0, 24))]
        tokens += [self.rng.randrange(10_000, 20_000) for _ in range(self.rng.randint(1, 10))]
        request = Request(REQUEST_ID % self.num_requests, tokens, TOKENS_PER_BLOCK)
        request.max_tokens = self.rng.randint(1, 20)
        request.num_prompt_tokens = len(tokens)
        self.waiting.append(request)
        self.num_requests += 1

    def step(self) -> None:
        manager = self.manager
        manager.new_step_starts()
        for request in list(self.running):
            while request in self.running and manager.allocate_slots(request, 1, num_lookahead_tokens=0) is None:
                victim = self.running.pop()
                manager.free(victim)
                victim.num_computed_tokens, victim.num_preemptions = 0, victim.num_preemptions + 1
                self.num_preemptions += 1
                self.waiting.insert(0, victim)
        while self.waiting and len(self.running) < 5:
            request = self.waiting[0]
            blocks, num_hit_tokens = manager.get_computed_blocks(request)
            answer = manager.allocate_slots(
                request,
                request.num_tokens - num_hit_tokens,
                num_new_computed_tokens=num_hit_tokens,
                new_computed_blocks=blocks,
                num_lookahead_tokens=0,
                num_external_computed_tokens=0,
                delay_cache_blocks=False,
                num_encoder_tokens=0,
            )
            if answer is None:
                break
            manager.get_blocks(request.request_id)
            self.running.append(self.waiting.pop(0))
        manager.take_new_block_ids()
        for request in list(self.running):
            request.num_computed_tokens = request.num_tokens
            request.tokens.append(self.rng.randrange(20_000, 30_000))
            if request.num_tokens - request.num_prompt_tokens >= request.max_tokens:
                request.has_ended = True
                self.running.remove(request)
                manager.free(request)
        manager.make_prefix_cache_stats()

    def run(self, num_steps: int) -> None:
        """Requests come for so many steps, and are then served to the end."""
        for step in range(num_steps):
            if step % 2 == 0:
                self.add()
            self.step()
        while self.waiting or self.running:
            self.step()
        self.manager.reset_prefix_cache()


def header(**changes: Any) -> Header:
    return Header(**{"trace_id": "cafe", "manager": {"name": "core"}, "kv_cache_config": {"num_blocks": 30}, **changes})


def record(path: Path, num_steps: int = 60, seed: int = 0, **kwargs: Any) -> list[Operation]:
    """Record a run to a file; the operations as they were made, for comparison."""
    from vllm_kvplug.trace.recorder import Recorder

    manager = make_manager()
    made: list[Operation] = []
    writer = TraceWriter(path, header(), max_bytes=kwargs.pop("max_bytes", MIB))
    append = writer.append

    def keep(operation: Operation) -> bool:
        made.append(frozen(operation))
        return append(operation)

    writer.append = keep  # type: ignore[method-assign]
    recorder = Recorder(manager, writer, **kwargs)
    scheduler = SmallScheduler(manager, seed)
    scheduler.run(num_steps)
    assert scheduler.num_preemptions
    recorder.close()
    assert writer.failure is None
    return made


def frozen(operation: Operation) -> Operation:
    """A copy that later calls do not change."""
    import msgspec

    request = operation.request
    if request is not None:
        token_ids = None if request.token_ids is None else list(request.token_ids)
        request = msgspec.structs.replace(request, block_hashes=list(request.block_hashes), token_ids=token_ids)
    return msgspec.structs.replace(operation, request=request)


def operations(manager: Any | None = None, num_steps: int = 40, seed: int = 0) -> list[Operation]:
    """The operations of a run, without a file."""
    manager = make_manager() if manager is None else manager
    calls = LiveCalls(manager.empty_kv_cache_blocks)
    made: list[Operation] = []

    class Watched:
        """Every method of a manager, with its operation noted."""

        empty_kv_cache_blocks = manager.empty_kv_cache_blocks

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                operation = calls.begin(name, args, kwargs)
                result = getattr(manager, name)(*args, **kwargs)
                calls.end(operation, result)
                operation.number = len(made)
                made.append(frozen(operation))
                return result

            return call

    SmallScheduler(Watched(), seed).run(num_steps)
    return made
