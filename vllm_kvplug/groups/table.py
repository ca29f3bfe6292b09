"""What a group knows of one request."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from vllm_kvplug.block_run import BlockRun, RunPart


class Hold:
    """Some positions of a request whose blocks are in a run, or in what was split off behind it since.

    Attributes:
        position: the first of them.
        run: the run, held whole.
        num_blocks: how many positions.
    """

    __slots__ = ("num_blocks", "position", "run")

    def __init__(self, position: int, run: BlockRun, num_blocks: int) -> None:
        self.position = position
        self.run = run
        self.num_blocks = num_blocks

    def pieces(self) -> Iterator[RunPart]:
        """The runs that it is in now, each whole."""
        position, end, run = self.position, self.position + self.num_blocks, self.run
        while position < end:
            num_blocks = len(run.block_ids)
            yield RunPart(position, run, 0, num_blocks)
            position += num_blocks
            if position < end:
                assert run.rest is not None
                run = run.rest


class BlockTable:
    """One request's blocks in one group.

    Attributes:
        block_ids: by position, the block that holds these tokens, or the null block.
        holds: which of these blocks are in runs, by position; the others are loose.
        num_cached_blocks: leading blocks that are in the prefix cache or need not go there any more.
        growing: the last hold, whose run takes the next cached block by the shortest way, if that run's `grower` is
            this hold still. None: no run may.
        is_admitted: the request took its hits or cached a block; from then on it has no further hits.
        first_unpublished: no block from this position on may go into the prefix cache (a load into it failed).
        is_gone: the request was freed; the row stays as it was, for who looks at it still.
        num_leading_nulls: so many leading positions surely hold the null block (there may be more).
    """

    __slots__ = (
        "block_ids",
        "first_unpublished",
        "growing",
        "holds",
        "is_admitted",
        "is_gone",
        "num_cached_blocks",
        "num_leading_nulls",
    )

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.holds: list[Hold] = []
        self.growing: Hold | None = None
        self.num_cached_blocks = 0
        self.is_admitted = False
        self.is_gone = False
        self.first_unpublished: int | None = None
        self.num_leading_nulls = 0

    def hold_to_grow(self, position: int) -> Hold | None:
        """The last hold, if a cached block at this position can go into its run: it ends there, is all cached, and
        nobody else has it. Where that run was split since, its last part has a hold of its own from now on.
        """
        if not self.holds:
            return None
        hold = self.holds[-1]
        if hold.position + hold.num_blocks != position:
            return None
        run = hold.run
        if len(run.block_ids) != hold.num_blocks:
            # Split since: the part that can grow has a hold of its own from now on.
            last = list(hold.pieces())[-1]
            hold.num_blocks -= last.num_blocks
            hold = Hold(last.position, last.run, last.num_blocks)
            self.holds.append(hold)
            run = hold.run
        if run.num_holders != 1 or len(run.block_hashes) != hold.num_blocks:
            return None
        run.rest = None  # whoever else went on there is gone
        if self.growing is not None:
            self.grow_from_now_on(hold)
        return hold

    def grow_from_now_on(self, hold: Hold) -> None:
        """Further cached blocks go into the run of this hold, the last, by the shortest way."""
        self.growing = hold.run.grower = hold

    def hash_at(self, position: int) -> bytes | None:
        """The hash that the block at this position is cached under; None: it is not cached."""
        index = bisect_right(self.holds, position, key=lambda hold: hold.position) - 1
        if index < 0 or position >= self.holds[index].position + self.holds[index].num_blocks:
            return None
        for piece in self.holds[index].pieces():
            offset = position - piece.position
            if offset < piece.num_blocks:
                hashes = piece.run.block_hashes
                return hashes[offset] if offset < len(hashes) else None
        return None

    def unhashed_block_ids(self) -> list[int]:
        """Blocks that are not in the prefix cache, by position; null blocks count as such."""
        unhashed: list[int] = []
        position = 0
        for hold in self.holds:
            unhashed += self.block_ids[position : hold.position]
            for piece in hold.pieces():
                run = piece.run
                unhashed += [
                    block_id
                    for offset, block_id in enumerate(run.block_ids)
                    if offset >= len(run.block_hashes) or run.block_hashes[offset] is None
                ]
            position = hold.position + hold.num_blocks
        return unhashed + self.block_ids[position:]
