"""Cross-attention: the decoder looks at the encoder's tokens, whose keys and values are there from the first step on.

They belong to one request alone, so there is nothing to hit, to cache or to release early.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_kvplug.allocation import GroupPlan, SlotDemand
from vllm_kvplug.block_run import NO_HIT, Hit
from vllm_kvplug.errors import CallError
from vllm_kvplug.geometry import GroupGeometry
from vllm_kvplug.groups.base import NO_LIMIT, AttentionGroup


class CrossAttentionGroup(AttentionGroup):
    """See the module."""

    grows_plainly = False
    releases_skipped = False

    @classmethod
    def min_num_blocks(cls, geometry: GroupGeometry, num_tokens: int, num_step_tokens: int = 1) -> int:
        return 0  # the decoder's tokens take none

    def match(self, block_hashes: Sequence[bytes], max_num_blocks: int, alignment_blocks: int = 1) -> Hit:
        return NO_HIT

    def check_admission(self, request_id: str, num_hit_blocks: int, *, is_admission: bool) -> None:
        if num_hit_blocks:
            raise CallError(
                f"request {request_id!r}: expected no prefix hits in a group of cross-attention, found {num_hit_blocks}"
            )

    def plan(self, request_id: str, demand: SlotDemand, hit: Hit = NO_HIT, *, is_admission: bool) -> GroupPlan:
        num_held_blocks = len(self.block_ids(request_id))
        return GroupPlan(num_new_blocks=max(self._num_blocks(demand.num_encoder_tokens) - num_held_blocks, 0))

    def admit(self, request_id: str, plan: GroupPlan, hit: Hit) -> None:
        """Nothing: there are no hits."""

    def check_block_hashes(self, request: Any, num_tokens: int) -> None:
        """Nothing: nothing is cached."""

    def check_full_blocks(self, request_id: str, num_tokens: int) -> None:
        """Nothing: nothing is cached."""

    def cache_full_blocks(self, request: Any, num_tokens: int) -> None:
        """Nothing: nothing is cached."""

    def quiet_limit_tokens(self, request_id: str) -> int:
        return NO_LIMIT
