"""Sliding window attention: a token looks at itself and the `window_tokens` - 1 tokens before it.

A prefix can be hit if the blocks are cached that its next token looks at; what lies before them does not matter. A
request gives back the blocks that its window has left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_kvplug.block_pool import NULL_BLOCK_ID
from vllm_kvplug.block_run import NO_HIT, Hit, RunPart
from vllm_kvplug.geometry import GroupGeometry, num_blocks_for
from vllm_kvplug.groups.base import AttentionGroup
from vllm_kvplug.groups.table import BlockTable


class SlidingWindowGroup(AttentionGroup):
    """See the module."""

    def __init__(self, group_id: int, geometry: GroupGeometry, *args: Any, **kwargs: Any) -> None:
        super().__init__(group_id, geometry, *args, **kwargs)
        self._window_tokens = geometry.window_tokens
        # A run of this many cached blocks serves, those beyond the hit included. The token itself is in its window, so
        # the blocks hold one token less. 0.17.1 wants one cached block even for a window of 1 token.
        num_window_blocks = self._num_blocks(geometry.window_tokens - 1)
        self._num_run_blocks = max(num_window_blocks + self.num_blocks_beyond_hit, 1)

    @classmethod
    def min_num_blocks(cls, geometry: GroupGeometry, num_tokens: int, num_step_tokens: int = 1) -> int:
        num_skipped_tokens = max(num_tokens - num_step_tokens - geometry.window_tokens + 1, 0)
        num_skipped_blocks = num_skipped_tokens // geometry.num_tokens_per_block
        return num_blocks_for(num_tokens, geometry.num_tokens_per_block) - num_skipped_blocks

    def match(self, block_hashes: Sequence[bytes], max_num_blocks: int, alignment_blocks: int = 1) -> Hit:
        index = self._pool.indexes[self.group_id]
        num_hit_blocks = max_num_blocks - max_num_blocks % alignment_blocks
        while num_hit_blocks > 0:
            end = num_hit_blocks + self.num_blocks_beyond_hit
            first = max(end - self._num_run_blocks, 0)
            # The window's first block is missing: nor does any window serve that contains it, so go on before it.
            missing = first
            if index.run(block_hashes[first]) is not None:
                parts = index.match_back(block_hashes, end, first)
                if parts and parts[-1].position == first:
                    return _hit(first, parts[::-1]).up_to(num_hit_blocks)
                missing = (parts[-1].position if parts else end) - 1
            num_hit_blocks = missing - self.num_blocks_beyond_hit
            num_hit_blocks -= num_hit_blocks % alignment_blocks
        return NO_HIT

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens - self._window_tokens + 1, 0)

    def quiet_limit_of_window(self, table: BlockTable) -> int:
        next_release = (self._first_held_position(table) + 1) * self.num_tokens_per_block
        return next_release + self._window_tokens - 2


def _hit(first: int, parts: Sequence[RunPart]) -> Hit:
    """The null block up to position `first`, then these parts."""
    block_ids = [NULL_BLOCK_ID] * first
    for _, run, offset, num_blocks in parts:
        block_ids += run.block_ids[offset : offset + num_blocks]
    return Hit(block_ids, parts)
