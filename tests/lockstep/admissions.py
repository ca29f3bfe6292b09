"""How requests get their first slots: lookups, hits, tokens from outside, refusals."""

from __future__ import annotations

import random

from tests.lockstep.compare import Both, Raised
from tests.lockstep.deviations import HAS_GATE
from tests.lockstep.oracle import longest_hit
from tests.lockstep.progress import Progress
from tests.lockstep.trace import NO_ANSWER, SHARED_EMPTY
from tests.lockstep.twins import Phase, Twin, text


class Admissions(Progress):
    """Public methods are operations of `trace.py`. One that finds no request to apply to does nothing."""

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
        self._admit_all(waiting[first : first + num_requests], chunk_tokens, external, num_external_tokens, no_hits_as)

    def _admit_all(
        self, twins: list[Twin], chunk_tokens: int, external: int, num_external_tokens: int, no_hits_as: int
    ) -> None:
        answers = [(twin, looked_up, _hashes(looked_up)) for twin in twins for looked_up in [self._lookup(twin)]]
        for twin, looked_up, hashes in answers:
            # An earlier admission may have evicted what this one had found.
            is_stale = _hashes(looked_up) != hashes
            self._admit(
                twin,
                self._lookup(twin) if is_stale else looked_up,
                chunk_tokens,
                external,
                num_external_tokens,
                no_hits_as,
            )

    def come_back(
        self,
        which: int,
        num_more_tokens: int,
        flood_percent: int,
        chunk_tokens: int,
        external: int,
        num_external_tokens: int,
        no_hits_as: int,
    ) -> None:
        """The next turn of a conversation: what a finished request had, and more. After a flood of other tokens what is
        left of its blocks is next to go.
        """
        if not self._finished:
            return
        before = self._finished[which % len(self._finished)]
        if flood_percent:
            self._flood(before, flood_percent)
        tokens = list(before.upstream.all_token_ids)
        most_tokens = self.setup.max_model_len - 1
        tokens = (tokens + text(before.family, 3, len(tokens), len(tokens) + num_more_tokens))[:most_tokens]
        twin = self._create(before.family, tokens, before.num_encoder_tokens, before.options)
        if twin is not None:
            self._admit(twin, self._lookup(twin), chunk_tokens, external, num_external_tokens, no_hits_as)

    def recompute(self, which: int, ids_seed: int, num_requests: int, chunk_tokens: int, no_hits_as: int) -> None:
        """Some cached blocks of a prompt are evicted, and several requests compute these anew at the same time: for
        parts of what they cache the older blocks answer, for others theirs. The last request looks when they have.
        """
        twins = [*self._alive, *self._finished]
        if not twins:
            return
        before, setup, state = twins[which % len(twins)], self.setup, self.pair.state
        request, rng = before.upstream, random.Random(ids_seed)
        hit = longest_hit(setup, request.block_hashes, request.num_tokens, state["cached blocks"])
        block_ids = [block_id for row in hit.block_ids for block_id in row if block_id]
        if not setup.evicts_held:
            block_ids = [block_id for block_id in block_ids if block_id in set(state["free order"])]
        if block_ids:
            # Either some of them, or all but a part in the middle.
            first = rng.randrange(len(block_ids))
            outside = [*block_ids[:first], *block_ids[rng.randint(first + 1, len(block_ids)) :]]
            some = rng.sample(block_ids, rng.randint(1, -(-len(block_ids) // 2)))
            self.pair.call("evict_blocks", set(rng.choice([outside, some]) or some))
            self.counts["prompts computed anew"] += 1
        copies = [
            self._create(before.family, before.prompt, before.num_encoder_tokens, before.options)
            for _ in range(num_requests)
        ]
        created = [twin for twin in copies if twin is not None]
        self._admit_all(created[:-1], chunk_tokens, 0, 0, no_hits_as)
        for twin in created[-1:]:
            self._admit(twin, self._lookup(twin), chunk_tokens, 0, 0, no_hits_as)

    def branch(self, which: int, shares_seed: int, num_requests: int, chunk_tokens: int, no_hits_as: int) -> None:
        """Requests that share their beginnings with another, each so much of it, all looked up before any is admitted:
        what is one run for the first is split when the second takes its part.
        """
        twins = [*self._alive, *self._finished]
        if not twins:
            return
        before, rng = twins[which % len(twins)], random.Random(shares_seed)
        tokens, unit_tokens = list(before.upstream.all_token_ids), self.setup.unit_tokens
        shares = [rng.randint(0, len(tokens) // unit_tokens + 1) * unit_tokens for _ in range(num_requests)]
        created = []
        for num_shared_tokens in rng.choice([shares, sorted(shares)]):
            prompt = tokens[:num_shared_tokens]
            num_own_tokens = rng.choice([1, 1, rng.randint(1, unit_tokens)])
            end = min(len(prompt) + num_own_tokens, self.setup.max_model_len - 1)
            prompt += text(before.family, rng.randint(3, 9), len(prompt), end)
            created.append(self._create(before.family, prompt[:end], before.num_encoder_tokens, before.options))
        self._admit_all([twin for twin in created if twin is not None], chunk_tokens, 0, 0, no_hits_as)

    def _flood(self, before: Twin, percent: int) -> None:
        """A request that nobody repeats comes and goes, and takes so much of the free blocks that would go before the
        first of those that another request would hit.
        """
        setup, state = self.setup, self.pair.state
        request = before.upstream
        hit = longest_hit(setup, request.block_hashes, request.num_tokens, state["cached blocks"])
        hit_ids = {block_id for row in hit.block_ids for block_id in row if block_id}
        num_blocks = next((i for i, block_id in enumerate(state["free order"]) if block_id in hit_ids), 0)
        num_tokens = int(num_blocks * percent / 100 / sum(1 / size for size in setup.block_tokens)) if num_blocks else 0
        if not num_tokens:
            return
        tokens = text(90 + self._num_created, 0, 0, min(num_tokens, setup.max_model_len - 1))
        twin = self._create(0, tokens, 0, {"salt": 0, "lora": 0, "image": 0, "skips_reading": 0})
        if twin is not None:
            self._admit(twin, self._lookup(twin), len(tokens), 0, 0, SHARED_EMPTY)
            self._finish(twin)

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
        if twin.num_computed_tokens and not self.pair.is_admitted(twin.request_id):
            # It has blocks and never had a lookup's answer: neither that nor external tokens may come now.
            external, no_hits_as = 0, NO_ANSWER
        elif no_hits_as == NO_ANSWER and self.pair.has_blocks(twin.request_id):
            no_hits_as = SHARED_EMPTY  # a scheduler that has asked for hits passes the answer on
        num_local_tokens = twin.num_computed_tokens + num_hit_tokens
        is_later = bool(external) and external % 2 == 0 and not twin.num_computed_tokens
        # What comes at once leaves a token to compute; what comes later may be the whole prompt.
        num_missing_tokens = twin.num_tokens - num_local_tokens - (not is_later)
        num_external_tokens = min(num_external_tokens, num_missing_tokens) if external else 0
        num_new_tokens = min(chunk_tokens, twin.num_tokens - num_local_tokens - num_external_tokens)
        num_new_tokens = self._cut_at_state(twin, num_local_tokens + num_external_tokens, num_new_tokens)
        if not num_new_tokens and not (is_later and num_external_tokens):
            return
        if not num_hit_tokens:
            blocks = self._no_hits(no_hits_as)
        # The encoder's tokens come with the first step that computes something.
        num_encoder_tokens = 0 if twin.has_encoder or is_later else twin.num_encoder_tokens
        if HAS_GATE:
            # Its answer is compared; the request goes on whatever it is.
            fits = self.pair.call(
                "can_fit_full_sequence",
                twin,
                num_new_computed_tokens=num_hit_tokens,
                new_computed_blocks=blocks,
                num_external_computed_tokens=num_external_tokens,
                num_encoder_tokens=num_encoder_tokens,
            )
            self.counts["full sequences that do not fit"] += fits.upstream is False
        answers = self.pair.call(
            "allocate_slots",
            twin,
            0 if is_later and num_external_tokens else num_new_tokens,
            num_new_computed_tokens=num_hit_tokens,
            new_computed_blocks=blocks,
            num_lookahead_tokens=self.setup.num_lookahead_tokens if twin.num_computed_tokens else 0,
            num_external_computed_tokens=num_external_tokens,
            delay_cache_blocks=is_later,
            num_encoder_tokens=num_encoder_tokens,
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
        twin.num_loading_tokens = num_local_tokens + num_external_tokens
        twin.has_encoder = twin.has_encoder or not is_later
        self.counts["external tokens at once"] += bool(num_external_tokens) and not is_later
        self.counts["external tokens behind hits"] += bool(num_external_tokens) and bool(num_hit_tokens)
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
        rows = self.pair.call("get_block_ids", twin.request_id).upstream
        num_valid_tokens = num_valid_blocks * self.setup.hit_alignment_tokens
        if num_valid_tokens >= twin.num_loading_tokens:
            num_loaded_tokens = twin.num_loading_tokens
            if len(rows) == 1 and self.setup.groups[0].is_full:
                # As 0.17.1 has it for one group: whole blocks, more tokens than were announced.
                num_loaded_tokens = len(rows[0]) * self.setup.block_tokens[0]
            num_computed_tokens = min(num_loaded_tokens, twin.num_tokens)
            num_computed_tokens -= num_computed_tokens == twin.num_tokens
        else:
            num_computed_tokens = num_valid_tokens
            if not num_computed_tokens:
                self.pair.call("free", twin)
                return
        self.pair.call("cache_blocks", twin, num_computed_tokens)
        twin.set(num_computed_tokens=num_computed_tokens)


def _hashes(looked_up: tuple[Both, int]) -> list[object]:
    """What the blocks of a lookup's answer hold."""
    return [block.block_hash for row in looked_up[0].upstream.blocks for block in row]
