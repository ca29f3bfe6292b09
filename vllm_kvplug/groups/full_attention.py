"""Full attention and MLA: every token looks at all earlier ones, so a request keeps all its blocks and any cached
prefix serves.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_kvplug.groups.base import AttentionGroup


class FullAttentionGroup(AttentionGroup):
    """See the module."""

    def match(self, block_hashes: Sequence[bytes], max_num_tokens: int) -> list[int]:
        return self._pool.match(self.group_id, block_hashes, max_num_tokens // self.num_tokens_per_block)

    def num_common_prefix_blocks(self, request_id: str) -> int:
        # An unknown request gets an empty table and is counted from then on, as in 0.17.1.
        block_ids = self._table(request_id).block_ids
        num_requests = len(self.tables)
        counts = self._pool.reference_counts
        num_common_blocks = 0
        for block_id in block_ids:
            if counts[block_id] != num_requests:
                break
            num_common_blocks += 1
        return num_common_blocks
