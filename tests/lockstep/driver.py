"""Carries out a trace: the scheduler's operations, and those on the cache as a whole, reading, and misuse."""

from __future__ import annotations

import random

from tests.lockstep.deviations import NAMES_NEW_BLOCKS
from tests.lockstep.scheduler import SmallScheduler
from tests.lockstep.trace import FRESH_EMPTY, NO_ANSWER, SHARED_EMPTY, Op
from tests.lockstep.twins import Phase, Twin, text


class Driver(SmallScheduler):
    """Every operation of `trace.py` is a public method, here or in the scheduler."""

    def apply(self, op: Op) -> None:
        """Carry out one operation."""
        getattr(self, op.name)(**op.values)
        self.counts["steps"] += 1

    # The cache as a whole

    def evict(self, ids_seed: int, num_ids: int) -> None:
        num_blocks = self.setup.num_blocks
        block_ids = set(random.Random(ids_seed).choices(range(num_blocks), k=num_ids))
        if not self.setup.evicts_held:
            block_ids &= {0, *self.pair.state["free order"]}
        elif ids_seed % 2:
            # Blocks that are to be loaded or computed yet, as far as nobody can tell.
            state, first = self.pair.state, self.setup.num_reserved_blocks
            is_held = [False] * first + [count > 0 for count in state["references"]]
            loose = [i for i, key in enumerate(state["block hashes"]) if is_held[i] and key is None]
            block_ids = set(random.Random(ids_seed).sample(loose, min(num_ids, len(loose))))
        num_cached = len([None for block_id in block_ids if self.pair.state["block hashes"][block_id] is not None])
        self.pair.call("evict_blocks", block_ids)
        self.counts["blocks evicted on request"] += num_cached

    def reset(self) -> None:
        done = self.pair.call("reset_prefix_cache").upstream
        self.counts["resets" if done else "resets refused"] += 1

    def reset_running(self) -> None:
        """Preempt whoever runs, then reset; refused where tokens from outside are still on their way."""
        for twin in reversed(self._in_phase(Phase.RUNNING)):
            self._preempt(twin)
        self.reset()

    def watched_step(self, which: int, chunk_tokens: int, num_more_tokens: int, resets: int) -> None:
        """A request that asks the same as a running one, and more, looks before and after a step of that, and when the
        step's output has arrived. After a reset nothing is evicted meanwhile.
        """
        if resets:
            self.reset_running()
        twin = self._pick_in_prompt(which)
        if twin is None:
            return
        tokens = list(twin.upstream.all_token_ids)
        tokens += text(twin.family, 0, len(tokens), min(len(tokens) + num_more_tokens, self.setup.max_model_len - 1))
        watcher = self._create(twin.family, tokens, twin.num_encoder_tokens, twin.options)
        if watcher is not None:
            self._lookup(watcher)
            self.step(self._in_phase(Phase.RUNNING).index(twin), chunk_tokens, 0, NO_ANSWER)
            self._lookup(watcher)
            if twin.phase is Phase.RUNNING and twin.in_flight:
                self._output(twin, 10**6, 0, 10**6)
                self._lookup(watcher)

    def _pick_in_prompt(self, which: int) -> Twin | None:
        """A running request, rather one in the middle of its prompt: its next step can cache several blocks."""
        waiting = [twin for twin in self._in_phase(Phase.WAITING) if not twin.num_computed_tokens]
        if waiting:
            twin = max(waiting, key=lambda twin: twin.num_tokens)
            self._admit(twin, self._lookup(twin), self.setup.unit_tokens, 0, 0, SHARED_EMPTY)
        running = self._in_phase(Phase.RUNNING)
        candidates = [twin for twin in running if twin.num_unscheduled_tokens > 1] or running
        return candidates[which % len(candidates)] if candidates else None

    # Reading

    def common_prefix(self, which: int) -> None:
        twin = self._pick(which, Phase.RUNNING)
        if twin is not None:
            answers = self.pair.call("get_num_common_prefix_blocks", twin.request_id)
            self.counts["common prefixes"] += any(answers.upstream)

    def common_prefix_unknown(self, which: int) -> None:
        """For a request that the managers have never seen, or not yet, or no longer."""
        names = ["ghost", f"r{self._num_created}", *(twin.request_id for twin in self._finished)]
        self.pair.call("get_num_common_prefix_blocks", names[which % len(names)])

    def take_new_block_ids(self) -> None:
        if NAMES_NEW_BLOCKS:
            self.pair.call("take_new_block_ids")

    def take_events(self) -> None:
        self.pair.call("take_events")

    def take_stats(self) -> None:
        self.pair.call("make_prefix_cache_stats")

    def read_blocks(self, which: int) -> None:
        """Look at a request's blocks, known or not, and keep the answer for a while."""
        twins = [*self._alive, *self._finished]
        request_id = twins[which % len(twins)].request_id if twins else "ghost"
        self.pair.keep(self.pair.call("get_blocks", request_id))
        self.pair.call("get_block_ids", request_id)

    def new_step(self) -> None:
        self.pair.call("new_step_starts")

    def remove_skipped(self, which: int) -> None:
        twin = self._pick(which, Phase.WAITING, Phase.RUNNING)
        if twin is not None:
            self.pair.call("remove_skipped_blocks", twin.request_id, twin.num_computed_tokens)

    # Misuse: upstream refuses it before it changes anything, and so must ours

    def misuse(self, which: int, kind: int) -> None:
        state = self.pair.state
        running = self._in_phase(Phase.RUNNING)
        admitted = [twin for twin in running if self.pair.is_admitted(twin.request_id)]
        # With several groups or windows upstream has changed something before it refuses.
        is_simple = len(self.setup.groups) == 1 and self.setup.groups[0].is_full
        others = [twin for twin in running if twin not in admitted]
        if kind == 0:
            self.pair.call("evict_blocks", {self.setup.num_blocks + which})
        elif kind == 1 and running:
            self.pair.call("allocate_slots", running[which % len(running)], 0)
        elif kind == 2 and admitted and is_simple:
            # Hits for a request that had its turn.
            twin = admitted[which % len(admitted)]
            blocks = self.pair.call("get_blocks", twin.request_id)
            self.pair.call("allocate_slots", twin, 1, self.setup.block_tokens[0], blocks)
        elif kind == 3 and others and state["free order"] and is_simple:
            # A lookup's answer, even without a hit, for a request that got its blocks without one.
            twin = others[which % len(others)]
            self.pair.call("allocate_slots", twin, 1, new_computed_blocks=self._no_hits(FRESH_EMPTY))
