"""What a group knows of one request."""

from __future__ import annotations


class BlockTable:
    """One request's blocks in one group.

    Attributes:
        block_ids: by position, the block that holds these tokens, or the null block.
        num_cached_blocks: leading blocks that are in the prefix cache or need not go there any more.
        is_admitted: the request took its hits or cached a block; from then on it has no further hits.
        first_unpublished: no block from this position on may go into the prefix cache (a load into it failed).
        num_leading_nulls: so many leading positions surely hold the null block (there may be more).
    """

    __slots__ = ("block_ids", "first_unpublished", "is_admitted", "num_cached_blocks", "num_leading_nulls")

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.num_cached_blocks = 0
        self.is_admitted = False
        self.first_unpublished: int | None = None
        self.num_leading_nulls = 0
