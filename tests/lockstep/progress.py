"""What a scheduler notes of a request as it goes on, and what it does when the request stops."""

from __future__ import annotations

from tests.lockstep.population import Population
from tests.lockstep.twins import Phase, Twin


class Progress(Population):
    """No operations: what several of them need."""

    def _cut_at_state(self, twin: Twin, num_present_tokens: int, num_new_tokens: int) -> int:
        """Prompt steps end where Mamba's align mode keeps a state: at a block's end, the last one of the prompt above
        all (with eagle the one before it, since a block is dropped from hits).
        """
        block_tokens = self.setup.aligned_block_tokens
        if not block_tokens or num_present_tokens >= max(len(twin.prompt), twin.num_tokens - 1):
            return num_new_tokens
        last_state = twin.num_tokens // block_tokens * block_tokens
        if self.setup.use_eagle:
            last_state = max(last_state - block_tokens, 0)
        end = num_present_tokens + num_new_tokens
        if end < last_state:
            return num_new_tokens // block_tokens * block_tokens
        return last_state - num_present_tokens if num_present_tokens < last_state else num_new_tokens

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

    def _preempt(self, twin: Twin) -> None:
        self.pair.call("free", twin)
        twin.forget_progress()
        self.counts["preemptions"] += 1

    def _finish(self, twin: Twin) -> None:
        if self.setup.has_connector:
            self.pair.call("remove_skipped_blocks", twin.request_id, twin.num_tokens)
            self.pair.call("get_block_ids", twin.request_id)
        self.pair.call("free", twin)
        twin.phase = Phase.FINISHED
        self._alive.remove(twin)
        self._finished = [*self._finished[-3:], twin]
