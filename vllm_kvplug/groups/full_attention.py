"""Full attention, MLA and attention with sinks: every token looks at all earlier ones, so a request keeps all its
blocks and any cached prefix serves. (The sinks' own blocks are the pool's business: they are reserved.)
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_kvplug.block_run import Hit
from vllm_kvplug.geometry import GroupGeometry, num_blocks_for
from vllm_kvplug.groups.base import AttentionGroup


class FullAttentionGroup(AttentionGroup):
    """See the module."""

    any_shorter_prefix_serves = True
    releases_skipped = False

    @classmethod
    def min_num_blocks(cls, geometry: GroupGeometry, num_tokens: int, num_step_tokens: int = 1) -> int:
        return num_blocks_for(num_tokens, geometry.num_tokens_per_block)

    def match(self, block_hashes: Sequence[bytes], max_num_blocks: int, alignment_blocks: int = 1) -> Hit:
        hit = self._pool.indexes[self.group_id].match(block_hashes, max_num_blocks + self.num_blocks_beyond_hit)
        num_blocks = max(len(hit) - self.num_blocks_beyond_hit, 0)
        return hit.up_to(num_blocks - num_blocks % alignment_blocks)

    def num_common_prefix_blocks(self, request_id: str) -> int:
        # An unknown request gets an empty table and is counted from then on, as in 0.17.1.
        table = self._table(request_id)
        num_requests = len(self.tables)
        if num_requests == 1:
            return len(table.block_ids)  # nobody else could hold one
        num_common_blocks = 0
        for hold in table.holds:
            for piece in hold.pieces():
                if piece.run.num_holders != num_requests:
                    return num_common_blocks
                num_common_blocks += piece.num_blocks
        return num_common_blocks
