"""What a request asks of `allocate_slots`, and what serving it would take: values, nothing here changes a block."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SlotDemand:
    """The tokens of one `allocate_slots` call, by kind, in the order in which they lie in the request:

    `| computed | hits | external | new | lookahead |`

    Attributes:
        num_computed_tokens: already computed for this request, in earlier steps.
        num_hit_tokens: found in the prefix cache just now.
        num_external_tokens: a KV connector brings their keys and values.
        num_new_tokens: to be computed in this step, unverified draft tokens included.
        num_lookahead_tokens: slots beyond, for tokens that a drafter will propose.
        max_model_len: no slot is needed beyond this many tokens.
    """

    num_computed_tokens: int
    num_hit_tokens: int
    num_external_tokens: int
    num_new_tokens: int
    num_lookahead_tokens: int
    max_model_len: int

    @property
    def num_present_tokens(self) -> int:
        """Tokens that need no computing in this step: computed, hits and external, not above max_model_len."""
        return min(self.num_computed_tokens + self.num_hit_tokens + self.num_external_tokens, self.max_model_len)

    @property
    def num_tokens_after_step(self) -> int:
        """Tokens that the model has seen after this step, drafts included, lookahead not."""
        return self.num_present_tokens + self.num_new_tokens

    @property
    def num_slot_tokens(self) -> int:
        """Tokens that need a slot: everything, not above max_model_len."""
        return min(self.num_tokens_after_step + self.num_lookahead_tokens, self.max_model_len)


@dataclass(frozen=True)
class GroupPlan:
    """What one KV cache group would do.

    Attributes:
        hit_block_ids: cached blocks that the request takes over.
        num_free_hit_blocks: how many of them are free now, so that holding them uses up free blocks.
        num_external_blocks: new blocks for external tokens (vLLM does not report them as this step's new blocks).
        num_new_blocks: further new blocks, the call's answer.
    """

    hit_block_ids: list[int]
    num_free_hit_blocks: int
    num_external_blocks: int
    num_new_blocks: int


@dataclass(frozen=True)
class AllocationPlan:
    """What all groups would do, and how many free blocks it takes.

    Attributes:
        groups: by group.
        num_free_blocks_needed: free blocks that hits and new blocks take together.
    """

    groups: list[GroupPlan]
    num_free_blocks_needed: int
