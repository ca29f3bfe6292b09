"""Full attention, MLA and attention with sinks: every token looks at all earlier ones, so a request keeps all its
blocks and any cached prefix serves. (The sinks' own blocks are the pool's business: they are reserved.)
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_kvplug.geometry import GroupGeometry, num_blocks_for
from vllm_kvplug.groups.base import AttentionGroup


class FullAttentionGroup(AttentionGroup):
    """See the module."""

    any_shorter_prefix_serves = True

    @classmethod
    def min_num_blocks(cls, geometry: GroupGeometry, num_tokens: int, num_step_tokens: int = 1) -> int:
        return num_blocks_for(num_tokens, geometry.num_tokens_per_block)

    def match(self, block_hashes: Sequence[bytes], max_num_blocks: int, alignment_blocks: int = 1) -> list[int]:
        block_ids = self._pool.match(self.group_id, block_hashes, max_num_blocks + self.num_blocks_beyond_hit)
        num_blocks = max(len(block_ids) - self.num_blocks_beyond_hit, 0)
        del block_ids[num_blocks - num_blocks % alignment_blocks :]
        return block_ids

    def num_common_prefix_blocks(self, request_id: str) -> int:
        # An unknown request gets an empty table and is counted from then on, as in 0.17.1.
        block_ids = self._table(request_id).block_ids
        num_requests = len(self.tables)
        if num_requests == 1:
            return len(block_ids)  # nobody else could hold one
        counts = self._pool.reference_counts
        num_common_blocks = 0
        for block_id in block_ids:
            if counts[block_id] != num_requests:
                break
            num_common_blocks += 1
        return num_common_blocks
