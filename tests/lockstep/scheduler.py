"""A small scheduler over both managers: requests are admitted, take steps and go, in the order of vLLM's schedulers."""

from __future__ import annotations

from tests.lockstep.admissions import Admissions
from tests.lockstep.trace import NO_ANSWER
from tests.lockstep.twins import Phase, Twin


class SmallScheduler(Admissions):
    """Public methods are operations of `trace.py`. One that finds no request to apply to does nothing."""

    def step(self, which: int, chunk_tokens: int, victim: int, no_hits_as: int) -> None:
        """Schedule a running request; while it is refused, preempt others, at last the request itself."""
        twin = self._pick(which, Phase.RUNNING)
        if twin is None:
            return
        num_new_tokens = min(
            twin.num_unscheduled_tokens, chunk_tokens, self.setup.max_model_len - 1 - twin.num_computed_tokens
        )
        num_new_tokens = self._cut_at_state(twin, twin.num_computed_tokens, num_new_tokens)
        if num_new_tokens <= 0:
            return
        if not self.pair.is_admitted(twin.request_id):
            no_hits_as = NO_ANSWER
        while True:
            answers = self.pair.call(
                "allocate_slots",
                twin,
                num_new_tokens,
                new_computed_blocks=self._no_hits(no_hits_as),
                num_lookahead_tokens=self.setup.num_lookahead_tokens,
            )
            if answers.upstream is not None:
                break
            self.counts["None answers"] += 1
            running = self._in_phase(Phase.RUNNING)
            preempted = running[-1 - victim % len(running)]
            self._preempt(preempted)
            if preempted is twin:
                return
        if answers.upstream is self.pair.managers.upstream.empty_kv_cache_blocks:
            self.counts["steps without a new block"] += 1
        self._advance(twin, num_new_tokens)

    def output(self, which: int, num_accepted_tokens: int, own_seed: int, num_next_drafts: int) -> None:
        """The oldest step's output arrives: some drafts are accepted, and one token more."""
        twin = self._pick(which, Phase.RUNNING)
        if twin is not None and twin.in_flight:
            self._output(twin, num_accepted_tokens, own_seed, num_next_drafts)

    def _output(self, twin: Twin, num_accepted_tokens: int, own_seed: int, num_next_drafts: int) -> None:
        setup = self.setup
        num_drafts = twin.in_flight.pop(0)
        num_accepted_tokens = min(num_accepted_tokens, num_drafts)
        num_rejected_tokens = num_drafts - num_accepted_tokens
        self.counts["rejected drafts"] += num_rejected_tokens
        twin.set(num_computed_tokens=twin.num_computed_tokens - num_rejected_tokens)
        if twin.num_placeholders:
            twin.set(num_output_placeholders=twin.num_placeholders - num_rejected_tokens)
        num_output_tokens = min(num_accepted_tokens + 1, setup.max_model_len - twin.num_tokens)
        twin.append(twin.next_tokens(num_output_tokens, own_seed))
        if setup.async_scheduling:
            twin.set(num_output_placeholders=twin.num_placeholders - num_output_tokens)
            self.pair.call("cache_blocks", twin, twin.num_computed_tokens - twin.num_placeholders)
        else:
            twin.set(spec_token_ids=[-1] * min(setup.num_draft_tokens, num_next_drafts))
        if twin.num_tokens >= setup.max_model_len:
            self.counts["requests that reached max_model_len"] += 1
            self._finish(twin)

    def decode(self, which: int, num_accepted_tokens: int, own_seed: int, num_next_drafts: int, num_steps: int) -> None:
        """Several steps of one request, each with its output."""
        twin = self._pick(which, Phase.RUNNING)
        for step in range(num_steps):
            if twin is None or twin.phase is not Phase.RUNNING:
                return
            if twin.in_flight:
                # Not each step the same number of drafts.
                self._output(twin, num_accepted_tokens, own_seed, num_next_drafts if step % 2 else 10**6)
            if twin.phase is Phase.RUNNING:
                self.step(self._in_phase(Phase.RUNNING).index(twin), 10**6, 0, NO_ANSWER)

    def lookup(self, which: int) -> None:
        """A lookup that leads to nothing."""
        twin = self._pick(which, Phase.WAITING)
        if twin is not None:
            self._lookup(twin)

    def cache(self, which: int, num_tokens: int) -> None:
        """Cache what is computed for certain, as the asynchronous scheduler asks for it."""
        twin = self._pick(which, Phase.RUNNING)
        if twin is not None:
            num_certain_tokens = min(twin.num_computed_tokens - twin.num_placeholders, twin.num_tokens)
            self.pair.call("cache_blocks", twin, max(min(num_tokens, num_certain_tokens), 0))

    def load_failed(self, which: int, block: int, evicts: int) -> None:
        """Tokens that should have come at once are missing from a block on: compute them again, or give up."""
        twin = self._pick(which, Phase.RUNNING)
        if twin is None or not twin.num_external_tokens:
            return
        rows = self.pair.call("get_block_ids", twin.request_id).upstream
        first_token = block * self.setup.hit_alignment_tokens
        if evicts:
            sizes = self.setup.block_tokens
            pairs = zip(rows, sizes, strict=True)
            failed = {block_id for row, size in pairs for block_id in row[first_token // size :] if block_id}
            self.pair.call("evict_blocks", failed)
        if evicts == 1:
            self._finish(twin)
        elif not twin.in_flight:
            twin.set(num_computed_tokens=min(first_token, twin.num_computed_tokens), spec_token_ids=[])

    def session(self, which: int, num_tokens: int, own_seed: int) -> None:
        """A streaming session goes on: the last token, not computed yet, gives way to new input; the blocks stay."""
        twin = self._pick(which, Phase.RUNNING)
        if twin is None or twin.in_flight or not 0 < twin.num_computed_tokens < twin.num_tokens:
            return
        num_tokens = min(num_tokens, self.setup.max_model_len - 1 - twin.num_computed_tokens)
        if num_tokens > 0:
            self.counts["sessions continued"] += 1
            twin.continue_session(num_tokens, own_seed)

    # Going

    def preempt(self, which: int, num_late_tokens: int) -> None:
        """Preempt a request; the output of its last step may still arrive."""
        twin = self._pick(which, Phase.RUNNING)
        if twin is None:
            return
        num_late_tokens = min(num_late_tokens, len(twin.in_flight), self.setup.max_model_len - 1 - twin.num_tokens)
        self._preempt(twin)
        if num_late_tokens > 0:
            twin.append(twin.next_tokens(num_late_tokens, 0))

    def late_output(self, which: int, num_tokens: int) -> None:
        """An output of a preempted request arrives between two lookups of it."""
        twin = self._pick(which, Phase.WAITING)
        if twin is None or not twin.upstream.num_preemptions or twin.num_computed_tokens:
            return
        num_tokens = min(num_tokens, self.setup.max_model_len - 1 - twin.num_tokens)
        if num_tokens > 0:
            self.counts["late outputs"] += 1
            self._lookup(twin)
            twin.append(twin.next_tokens(num_tokens, 0))
            self._lookup(twin)

    def finish(self, which: int) -> None:
        twin = self._pick(which, Phase.RUNNING)
        if twin is not None:
            self._finish(twin)

    def abort(self, which: int) -> None:
        """Abort a request in any phase, one that never got a block included."""
        twin = self._pick(which, Phase.WAITING, Phase.LOADING, Phase.RUNNING)
        if twin is not None:
            self.counts["aborts"] += 1
            self._finish(twin)

    def free_again(self, which: int) -> None:
        """Free a request that holds nothing any more."""
        if self._finished:
            self.pair.call("free", self._finished[which % len(self._finished)])
