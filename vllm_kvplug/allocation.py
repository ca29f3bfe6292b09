"""What a request asks of `allocate_slots`, and what serving it would take: values, nothing here changes a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvplug.block_run import RunPart


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
        num_encoder_tokens: of the encoder, whose keys and values cross-attention keeps; 0 after the first step.
        num_present_tokens: tokens that need no computing in this step: computed, hits and external, not above
            max_model_len.
        num_tokens_after_step: tokens that the model has seen after this step, drafts included, lookahead not.
        num_slot_tokens: tokens that need a slot: everything, not above max_model_len.
    """

    __slots__ = (
        "num_computed_tokens",
        "num_encoder_tokens",
        "num_external_tokens",
        "num_hit_tokens",
        "num_lookahead_tokens",
        "num_new_tokens",
        "num_present_tokens",
        "num_slot_tokens",
        "num_tokens_after_step",
    )

    def __init__(
        self,
        num_computed_tokens: int,
        num_hit_tokens: int,
        num_external_tokens: int,
        num_new_tokens: int,
        num_lookahead_tokens: int,
        max_model_len: int,
        num_encoder_tokens: int = 0,
    ) -> None:
        self.num_computed_tokens = num_computed_tokens
        self.num_hit_tokens = num_hit_tokens
        self.num_external_tokens = num_external_tokens
        self.num_new_tokens = num_new_tokens
        self.num_lookahead_tokens = num_lookahead_tokens
        self.num_encoder_tokens = num_encoder_tokens
        self.num_present_tokens = min(num_computed_tokens + num_hit_tokens + num_external_tokens, max_model_len)
        self.num_tokens_after_step = self.num_present_tokens + num_new_tokens
        self.num_slot_tokens = min(self.num_tokens_after_step + num_lookahead_tokens, max_model_len)


@dataclass(slots=True)
class GroupPlan:
    """What one KV cache group would do.

    Attributes:
        num_null_blocks: leading positions without a block, since no later token looks at them.
        num_hit_blocks: positions of cached blocks that the request takes over, after those.
        hit_parts: the blocks themselves, null blocks among those positions left out.
        num_free_hit_blocks: how many of them are free now, so that holding them uses up free blocks.
        num_external_blocks: new blocks for external tokens (vLLM does not report them as this step's new blocks).
        num_new_blocks: further new blocks.
        num_spare_blocks: blocks that must be free besides, though they are not taken.
        defers: the group cannot serve this in the present step, whatever is free.
    """

    num_null_blocks: int = 0
    num_hit_blocks: int = 0
    hit_parts: Sequence[RunPart] = ()
    num_free_hit_blocks: int = 0
    num_external_blocks: int = 0
    num_new_blocks: int = 0
    num_spare_blocks: int = 0
    defers: bool = False

    @property
    def num_prefix_positions(self) -> int:
        """Positions of the table that come before the new blocks: null, hits and external tokens."""
        return self.num_null_blocks + self.num_hit_blocks + self.num_external_blocks

    @property
    def num_free_blocks_needed(self) -> int:
        """Free blocks that this takes or counts on."""
        return self.num_free_hit_blocks + self.num_external_blocks + self.num_new_blocks + self.num_spare_blocks


@dataclass(frozen=True)
class Refusal:
    """A request that was refused although no other request held a block: what ends cannot make room for it.

    Attributes:
        num_needed_blocks: blocks that it would have to hold at one time in this step.
        num_usable_blocks: blocks of the pool that requests can hold.
        num_present_tokens: its tokens that needed no computing in this step.
    """

    num_needed_blocks: int
    num_usable_blocks: int
    num_present_tokens: int


@dataclass(slots=True)
class AllocationPlan:
    """What all groups would do.

    Attributes:
        groups: by group.
        num_free_blocks_needed: free blocks that they need together.
        defers: one of them cannot serve this in the present step.
    """

    groups: tuple[GroupPlan, ...]
    num_free_blocks_needed: int
    defers: bool
