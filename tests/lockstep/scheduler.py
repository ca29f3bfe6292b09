"""A small scheduler over both managers: requests are admitted, take steps and go, in the order of vLLM's schedulers."""

from __future__ import annotations

from tests.lockstep.compare import Both, Raised
from tests.lockstep.population import Population
from tests.lockstep.trace import NO_ANSWER
from tests.lockstep.twins import Phase, Twin


class SmallScheduler(Population):
    """Public methods are operations of `trace.py`. One that finds no request to apply to does nothing."""

    # Coming

    def admit(self, which: int, chunk_tokens: int, external: int, num_external_tokens: int, no_hits_as: int) -> None:
        twin = self._pick(which, Phase.WAITING)
        if twin is not None:
            self._admit(twin, self._lookup(twin), chunk_tokens, external, num_external_tokens, no_hits_as)

    def admit_together(
        self,
        which: int,
        num_requests: int,
        chunk_tokens: int,
        external: int,
        num_external_tokens: int,
        no_hits_as: int,
    ) -> None:
        """Lookups of several requests before any is admitted, so that none sees what the others are about to cache."""
        waiting = self._in_phase(Phase.WAITING)
        first = which % len(waiting) if waiting else 0
        answers = [(twin, self._lookup(twin)) for twin in waiting[first : first + num_requests]]
        for twin, looked_up in answers:
            # An earlier admission may have evicted what this one had found.
            is_stale = any(block.block_hash is None for block in looked_up[0].upstream.blocks[0])
            self._admit(
                twin,
                self._lookup(twin) if is_stale else looked_up,
                chunk_tokens,
                external,
                num_external_tokens,
                no_hits_as,
            )

    def _lookup(self, twin: Twin) -> tuple[Both, int]:
        """Hits as a scheduler asks for them: blocks (the shared empty answer after progress) and number of tokens."""
        if twin.num_computed_tokens:
            return self._shared_empty(), 0
        answers = self.pair.call("get_computed_blocks", twin)
        num_hit_tokens = answers.upstream[1]
        self.counts["lookups"] += 1
        self.counts["hits"] += bool(num_hit_tokens)
        return Both(answers.upstream[0], answers.ours[0]), num_hit_tokens

    def _admit(
        self,
        twin: Twin,
        looked_up: tuple[Both, int],
        chunk_tokens: int,
        external: int,
        num_external_tokens: int,
        no_hits_as: int,
    ) -> None:
        blocks: Both | None
        blocks, num_hit_tokens = looked_up
        if twin.num_computed_tokens and twin.request_id not in self.pair.state["cached counts"]:
            # It has blocks and never had a lookup's answer: neither that nor external tokens may come now.
            external, no_hits_as = 0, NO_ANSWER
        num_local_tokens = twin.num_computed_tokens + num_hit_tokens
        is_later = bool(external) and external % 2 == 0 and not twin.num_computed_tokens
        # What comes at once leaves a token to compute; what comes later may be the whole prompt.
        num_missing_tokens = twin.num_tokens - num_local_tokens - (not is_later)
        num_external_tokens = min(num_external_tokens, num_missing_tokens) if external else 0
        num_new_tokens = min(chunk_tokens, twin.num_tokens - num_local_tokens - num_external_tokens)
        if not num_hit_tokens:
            blocks = self._no_hits(no_hits_as)
        answers = self.pair.call(
            "allocate_slots",
            twin,
            0 if is_later and num_external_tokens else num_new_tokens,
            num_new_computed_tokens=num_hit_tokens,
            new_computed_blocks=blocks,
            num_lookahead_tokens=self.setup.num_lookahead_tokens if twin.num_computed_tokens else 0,
            num_external_computed_tokens=num_external_tokens,
            delay_cache_blocks=is_later,
        )
        if answers.upstream is None or isinstance(answers.upstream, Raised):
            self.counts["None answers"] += answers.upstream is None
            self.counts["retries refused again"] += bool(twin.num_refusals)
            twin.num_refusals += 1
            return
        self.counts["retries admitted"] += bool(twin.num_refusals)
        self.counts["resumptions"] += bool(twin.upstream.num_preemptions)
        twin.num_refusals = 0
        twin.num_external_tokens = num_external_tokens
        self.counts["external tokens at once"] += bool(num_external_tokens) and not is_later
        self.counts["external tokens later"] += bool(num_external_tokens) and is_later
        if is_later and num_external_tokens:
            twin.phase = Phase.LOADING
            return
        twin.phase = Phase.RUNNING
        twin.set(num_computed_tokens=num_local_tokens + num_external_tokens)
        # A waiting request is moved behind the others when it runs: the last in the list is the first to be preempted.
        self._alive.remove(twin)
        self._alive.append(twin)
        self._advance(twin, num_new_tokens)

    def load_done(self, which: int, num_valid_blocks: int) -> None:
        """Tokens from outside have arrived: all, or blocks up to a failed one, or nothing."""
        twin = self._pick(which, Phase.LOADING)
        if twin is None:
            return
        twin.phase = Phase.WAITING
        (block_ids,) = self.pair.call("get_block_ids", twin.request_id).upstream
        if num_valid_blocks >= len(block_ids):
            num_computed_tokens = min(len(block_ids) * self.setup.block_size, twin.num_tokens)
            num_computed_tokens -= num_computed_tokens == twin.num_tokens
        else:
            num_computed_tokens = num_valid_blocks * self.setup.block_size
            if not num_computed_tokens:
                self.pair.call("free", twin)
                return
        self.pair.call("cache_blocks", twin, num_computed_tokens)
        twin.set(num_computed_tokens=num_computed_tokens)

    # Running

    def step(self, which: int, chunk_tokens: int, victim: int, no_hits_as: int) -> None:
        """Schedule a running request; while it is refused, preempt others, at last the request itself."""
        twin = self._pick(which, Phase.RUNNING)
        if twin is None:
            return
        num_new_tokens = min(
            twin.num_unscheduled_tokens, chunk_tokens, self.setup.max_model_len - 1 - twin.num_computed_tokens
        )
        if num_new_tokens <= 0:
            return
        if twin.request_id not in self.pair.state["cached counts"]:
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

    def _advance(self, twin: Twin, num_new_tokens: int) -> None:
        """What a scheduler notes of a request after it has scheduled it."""
        setup = self.setup
        num_drafts = twin.num_computed_tokens + num_new_tokens - twin.num_tokens - twin.num_placeholders
        num_drafts = max(num_drafts, 0)
        twin.set(num_computed_tokens=twin.num_computed_tokens + num_new_tokens, spec_token_ids=[])
        self.counts["drafts"] += num_drafts
        if twin.num_computed_tokens < twin.num_tokens + twin.num_placeholders:
            self.counts["prefill chunks"] += 1
            return
        twin.in_flight.append(num_drafts)
        if setup.async_scheduling:
            twin.set(
                num_output_placeholders=twin.num_placeholders + 1 + num_drafts,
                spec_token_ids=[-1] * setup.num_draft_tokens,
            )

    def output(self, which: int, num_accepted_tokens: int, own_seed: int) -> None:
        """The oldest step's output arrives: some drafts are accepted, and one token more."""
        twin = self._pick(which, Phase.RUNNING)
        if twin is not None and twin.in_flight:
            self._output(twin, num_accepted_tokens, own_seed)

    def _output(self, twin: Twin, num_accepted_tokens: int, own_seed: int) -> None:
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
            twin.set(spec_token_ids=[-1] * setup.num_draft_tokens)
        if twin.num_tokens >= setup.max_model_len:
            self.counts["requests that reached max_model_len"] += 1
            self._finish(twin)

    def decode(self, which: int, num_accepted_tokens: int, own_seed: int, num_steps: int) -> None:
        """Several steps of one request, each with its output."""
        twin = self._pick(which, Phase.RUNNING)
        for _ in range(num_steps):
            if twin is None or twin.phase is not Phase.RUNNING:
                return
            if twin.in_flight:
                self._output(twin, num_accepted_tokens, own_seed)
            if twin.phase is Phase.RUNNING:
                self.step(self._in_phase(Phase.RUNNING).index(twin), 10**6, 0, NO_ANSWER)

    def lookup(self, which: int) -> None:
        """A lookup that leads to nothing."""
        twin = self._pick(which, Phase.WAITING, Phase.RUNNING)
        if twin is not None:
            self.pair.call("get_computed_blocks", twin)

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
        (block_ids,) = self.pair.call("get_block_ids", twin.request_id).upstream
        if evicts:
            self.pair.call("evict_blocks", set(block_ids[block:]))
            self._finish(twin)
        elif not twin.in_flight:
            twin.set(
                num_computed_tokens=min(block * self.setup.block_size, twin.num_computed_tokens), spec_token_ids=[]
            )

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

    def _preempt(self, twin: Twin) -> None:
        self.pair.call("free", twin)
        twin.forget_progress()
        self.counts["preemptions"] += 1

    def finish(self, which: int) -> None:
        twin = self._pick(which, Phase.RUNNING)
        if twin is not None:
            self._finish(twin)

    def _finish(self, twin: Twin) -> None:
        if self.setup.has_connector:
            self.pair.call("remove_skipped_blocks", twin.request_id, twin.num_tokens)
            self.pair.call("get_block_ids", twin.request_id)
        self.pair.call("free", twin)
        twin.phase = Phase.FINISHED
        self._alive.remove(twin)
        self._finished = [*self._finished[-3:], twin]

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
