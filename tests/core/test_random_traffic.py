"""Random traffic over tiny pools, beside a naive manager of single blocks: every answer and all state is equal, and
nothing contradicts itself after any call.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from tests.core.naive_manager import NaiveManager
from tests.core.support import FakeRequest, make_hybrid_manager
from vllm_kvplug.block_run import BlockRun
from vllm_kvplug.block_states import BlockStates
from vllm_kvplug.geometry import AttentionKind, GroupGeometry
from vllm_kvplug.invariants import check_invariants

NUM_SEEDS, NUM_STEPS = 25, 150
WINDOWS: dict[str, tuple[int | None, ...]] = {
    "full": (None,),
    "window": (9,),
    "full and windows": (None, 6, 17),
}
# What a structure of runs could get wrong must have happened, each so often at least.
EXPECTED_EVENTS = {
    "full": ("split", "hit ends in a run", "hit of several runs", "eviction in a run", "duplicate in a run"),
    "window": ("split", "cut", "eviction in a run", "duplicate in a run"),
    "full and windows": ("split", "cut", "hit ends in a run", "eviction in a run", "duplicate in a run"),
}
ALWAYS_EXPECTED = ("refused", "old answer", "failed load", "reset", "hole in a run", "shared run")
MIN_EVENTS = 15


class Traffic:
    """One manager and its model under the same calls, and a count of what happened."""

    def __init__(self, windows: tuple[int | None, ...], seed: int, events: Counter[str]) -> None:
        self.rng, self.events, self.seed = random.Random(seed), events, seed
        num_blocks = self.rng.choice((14, 20, 30)) * len(windows) // 2 + 6
        groups = [
            GroupGeometry(AttentionKind.FULL, 4)
            if window is None
            else GroupGeometry(AttentionKind.SLIDING_WINDOW, 4, window_tokens=window)
            for window in windows
        ]
        self.manager = make_hybrid_manager(num_blocks, groups=groups)
        self.model = NaiveManager(num_blocks, windows)
        self.requests: dict[str, FakeRequest] = {}
        self.num_admitted = 0
        self._count_cuts()

    def _count_cuts(self) -> None:
        pool, events = self.manager.pool, self.events
        split, cut_head = pool.split, pool.cut_head

        def counted_split(run: BlockRun, num_blocks: int) -> BlockRun:
            events["split"] += 1
            return split(run, num_blocks)

        def counted_cut_head(run: BlockRun, num_blocks: int) -> BlockRun:
            events["cut"] += 1
            return cut_head(run, num_blocks)

        pool.split, pool.cut_head = counted_split, counted_cut_head  # type: ignore[method-assign]

    # Calls

    def step(self) -> None:
        action = self.rng.random()
        if action < 0.22 or not self.requests:
            self.admit(self.new_request())
        elif action < 0.30:
            self.admit_with_an_old_answer()
        elif action < 0.80:
            self.grow(self.rng.choice(list(self.requests.values())))
        elif action < 0.94:
            self.free(self.rng.choice(list(self.requests)))
        elif action < 0.97:
            self.evict()
        else:
            self.reset()
        self.compare()

    def new_request(self) -> FakeRequest:
        rng = self.rng
        self.num_admitted += 1
        document = [rng.choice((1, 1, 2))] * 44
        tokens = document[: rng.randint(1, 44)] + [rng.randrange(2) for _ in range(rng.randrange(8))]
        return FakeRequest(f"r{self.num_admitted}", tokens, skip_reading_prefix_cache=rng.random() < 0.15)

    def admit(self, request: FakeRequest) -> None:
        self.allocate(request, *self.look_up(request))

    def look_up(self, request: FakeRequest) -> tuple[Any, int, list[list[int]]]:
        """The manager's answer, its tokens, and the model's rows, which are the same."""
        blocks, num_hit_tokens = self.manager.get_computed_blocks(request)
        rows = self.model.lookup(request)
        assert [list(row) for row in blocks.block_ids] == rows
        assert num_hit_tokens == 4 * len(rows[0])
        hit = self.manager.pool.indexes[0].match(request.block_hashes, len(rows[0]))
        if hit.parts and hit.parts[-1].offset + hit.parts[-1].num_blocks < len(hit.parts[-1].run.block_ids):
            self.events["hit ends in a run"] += 1
        if len(hit.parts) > 1:
            self.events["hit of several runs"] += 1
        return blocks, num_hit_tokens, rows

    def allocate(self, request: FakeRequest, blocks: Any, num_hit_tokens: int, rows: list[list[int]]) -> None:
        num_new_tokens = self.rng.randint(1, request.num_tokens - num_hit_tokens)
        expected = self.model.allocate(request, num_new_tokens, rows)
        answer = self.manager.allocate_slots(request, num_new_tokens, num_hit_tokens, blocks)
        self.check_answer(answer, expected)
        if expected is not None:
            request.num_computed_tokens = num_hit_tokens + num_new_tokens
            self.requests[request.request_id] = request

    def check_answer(self, answer: Any, expected: list[list[int]] | None) -> None:
        assert (answer is None) == (expected is None)
        if expected is None:
            self.events["refused"] += 1
        else:
            assert list(answer.get_block_ids()) == expected

    def admit_with_an_old_answer(self) -> None:
        """Others come and go on between a lookup and its use."""
        request = self.new_request()
        blocks, num_hit_tokens, rows = self.look_up(request)
        keys = [[self.model.keys[block_id] for block_id in row] for row in rows]
        for _ in range(self.rng.randint(1, 3)):
            if self.rng.random() < 0.5 or not self.requests:
                self.admit(self.new_request())
            else:
                self.grow(self.rng.choice(list(self.requests.values())))
        if keys == [[self.model.keys[block_id] for block_id in row] for row in rows]:
            self.events["old answer"] += bool(num_hit_tokens)
            self.allocate(request, blocks, num_hit_tokens, rows)

    def grow(self, request: FakeRequest) -> None:
        if request.num_computed_tokens == request.num_tokens:
            request.tokens += [self.rng.randrange(2)] * self.rng.choice((1, 1, 1, 5))
        num_new_tokens = self.rng.randint(1, request.num_tokens - request.num_computed_tokens)
        expected = self.model.allocate(request, num_new_tokens, [[] for _ in self.model.windows])
        answer = self.manager.allocate_slots(request, num_new_tokens)
        self.check_answer(answer, expected)
        if expected is not None:
            request.num_computed_tokens += num_new_tokens
        elif self.rng.random() < 0.5:
            self.free(request.request_id)

    def free(self, request_id: str) -> None:
        self.manager.free(self.requests.pop(request_id))
        self.model.free(request_id)

    def evict(self) -> None:
        block_ids = self.rng.sample(range(1, self.manager.pool.num_blocks), self.rng.randint(1, 2))
        self.manager.evict_blocks(block_ids)
        self.model.evict(block_ids)
        self.events["failed load"] += 1

    def reset(self) -> None:
        if self.rng.random() < 0.5:
            for request_id in list(self.requests):
                self.free(request_id)
        done = self.model.reset()
        assert self.manager.reset_prefix_cache() is done
        self.events["reset"] += done

    # Comparing

    def compare(self) -> None:
        manager, model = self.manager, self.model
        check_invariants(manager)
        states = BlockStates.of(manager.pool)
        assert list(manager.pool.free_block_ids()) == model.free_ids
        assert states.reference_counts == model.counts
        cached_as = zip(states.block_group_ids, states.block_hashes, strict=True)
        assert [None if key[1] is None else key for key in cached_as] == model.keys
        for group_id, index in enumerate(manager.pool.indexes):
            assert dict(index.items()) == {key[1]: ids for key, ids in model.cached.items() if key[0] == group_id}
        for group, tables in zip(manager.groups, model.tables, strict=True):
            assert {name: table.block_ids for name, table in group.tables.items()} == {
                name: table.row for name, table in tables.items()
            }
        for name in self.requests:
            assert manager.get_num_common_prefix_blocks(name) == model.num_common_prefix_blocks(name)
        self.count_runs()

    def count_runs(self) -> None:
        pool = self.manager.pool
        for run in (*pool.held_runs, *pool.free_runs()):
            hashes = [block_hash for block_hash in run.block_hashes if block_hash is not None]
            index = pool.indexes[run.group_id]
            if len(hashes) > 1 and any(index.run(block_hash) is not run for block_hash in hashes):
                self.events["duplicate in a run"] += 1
            if len(hashes) < len(run.block_hashes):
                self.events["hole in a run"] += 1
            if run.num_holders > 1 and len(run.block_ids) > 1:
                self.events["shared run"] += 1


class EvictionsInRuns:
    """Counts blocks that are reused while others of their run stay cached."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._num_hashes: dict[BlockRun, int] = {}

    def note(self) -> None:
        runs = [run for run in self._traffic.manager.pool.free_runs() if run.block_hashes]
        for run in runs:
            if len(run.block_hashes) < self._num_hashes.get(run, 0):
                self._traffic.events["eviction in a run"] += 1
        self._num_hashes = {run: len(run.block_hashes) for run in runs}


@pytest.mark.parametrize("name", WINDOWS)
def test_every_answer_is_that_of_single_blocks(name: str) -> None:
    events: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        traffic = Traffic(WINDOWS[name], seed, events)
        evictions = EvictionsInRuns(traffic)
        for step in range(NUM_STEPS):
            try:
                traffic.step()
            except Exception:
                print(f"{name}: seed {seed}, step {step}")
                raise
            evictions.note()
    too_few = {what: events[what] for what in (*EXPECTED_EVENTS[name], *ALWAYS_EXPECTED) if events[what] < MIN_EVENTS}
    assert not too_few, f"{name}: expected each at least {MIN_EVENTS} times over {NUM_SEEDS} seeds, found {events}"
