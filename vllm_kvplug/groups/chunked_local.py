"""Chunked local attention: a token looks at itself and the earlier tokens of its own chunk of `chunk_tokens`.

A prefix can be hit if the blocks from the start of its next token's chunk on are cached; at a chunk's start nothing
need be. A request gives back the blocks of the chunks behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_kvplug.block_pool import NULL_BLOCK_ID
from vllm_kvplug.block_run import NO_HIT, Hit
from vllm_kvplug.geometry import GroupGeometry, num_blocks_for
from vllm_kvplug.groups.base import AttentionGroup
from vllm_kvplug.groups.table import BlockTable


class ChunkedLocalGroup(AttentionGroup):
    """See the module."""

    @classmethod
    def min_num_blocks(cls, geometry: GroupGeometry, num_tokens: int, num_step_tokens: int = 1) -> int:
        chunk_start = max(num_tokens - num_step_tokens, 0) // geometry.chunk_tokens * geometry.chunk_tokens
        return num_blocks_for(num_tokens, geometry.num_tokens_per_block) - chunk_start // geometry.num_tokens_per_block

    def match(self, block_hashes: Sequence[bytes], max_num_blocks: int, alignment_blocks: int = 1) -> Hit:
        index = self._pool.indexes[self.group_id]
        num_hit_blocks = max_num_blocks - max_num_blocks % alignment_blocks
        while num_hit_blocks > 0:
            first = self.num_skipped_tokens(num_hit_blocks * self.num_tokens_per_block) // self.num_tokens_per_block
            hit = index.match(block_hashes, num_hit_blocks, first)
            if first + len(hit) == num_hit_blocks:
                return Hit([NULL_BLOCK_ID] * first + list(hit.block_ids), hit.parts)
            num_hit_blocks = first + len(hit)
            num_hit_blocks -= num_hit_blocks % alignment_blocks
        return NO_HIT

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.geometry.chunk_tokens * self.geometry.chunk_tokens

    def quiet_limit_of_window(self, table: BlockTable) -> int:
        next_release = (self._first_held_position(table) + 1) * self.num_tokens_per_block
        return num_blocks_for(next_release, self.geometry.chunk_tokens) * self.geometry.chunk_tokens
