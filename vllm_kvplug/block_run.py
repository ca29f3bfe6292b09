"""Blocks in runs: what is held, hit, freed and reused together is one object, whatever its length.

A `BlockRun` is a row of blocks at consecutive positions of one KV cache group. All of them have the same holders, so
one count serves them all. A run is split where somebody wants a part of it, and eaten from its end when its blocks are
reused: the order in which a request gives its blocks back.

A `Hit` is what a lookup found: rows of ids for whoever asks, and the parts of runs that they are in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class BlockRun:
    """See the module.

    Attributes:
        block_ids: by position. Others read them; only the pool changes a run.
        block_hashes: of the leading blocks that are, or were, in the prefix cache; None: one that left it since.
        group_id: the KV cache group whose index has the hashes.
        first_position: of the first block in the request that computed it.
        num_holders: requests that hold all of these blocks; 0: they are free.
        rest: what was split off behind this run. Only who holds more blocks than this run has may follow it: for all
            others it may be out of date. None again when nobody holds the run, or only one who holds no more.
        is_intact: each of the hashes leads to this run. (Not so where another block had the hash before, or where one
            left the cache.)
        indexed_by_head: the index has the first of the hashes alone; no other run has any of them.
        grower: a table's last hold, where this run is all of it, cached and nobody else's: the table may put further
            blocks at the run's end as they are cached. None as soon as that may no longer be so: the run is hit, split,
            in part taken out of the cache, or given back.
        place: where an eviction policy keeps a free run; the policy's own.
    """

    __slots__ = (
        "block_hashes",
        "block_ids",
        "first_position",
        "group_id",
        "grower",
        "indexed_by_head",
        "is_intact",
        "num_holders",
        "place",
        "rest",
    )

    def __init__(self, block_ids: list[int], group_id: int, first_position: int, num_holders: int) -> None:
        self.block_ids = block_ids
        self.block_hashes: list[bytes | None] = []
        self.group_id = group_id
        self.first_position = first_position
        self.num_holders = num_holders
        self.rest: BlockRun | None = None
        self.is_intact = True
        self.indexed_by_head = False
        self.grower: object = None
        self.place: Any = None

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self.block_ids)} blocks from position {self.first_position} of group "
            f"{self.group_id}, {len(self.block_hashes)} cached, {self.num_holders} holders)"
        )


class RunPart(NamedTuple):
    """Some blocks of a run, as they lie in a request.

    Attributes:
        position: of the first of them in the request.
        run: the run.
        offset: of the first of them in the run.
        num_blocks: how many.
    """

    position: int
    run: BlockRun
    offset: int
    num_blocks: int


class Hit:
    """What a lookup found in one group.

    Attributes:
        block_ids: by position; the null block where no later token looks.
        parts: the blocks among them that are none, by position.
    """

    __slots__ = ("block_ids", "parts")

    def __init__(self, block_ids: Sequence[int] = (), parts: Iterable[RunPart] = ()) -> None:
        self.block_ids = block_ids
        self.parts = tuple(parts)

    def __len__(self) -> int:
        return len(self.block_ids)

    def up_to(self, num_blocks: int) -> Hit:
        """The first `num_blocks` positions of it."""
        if num_blocks >= len(self.block_ids):
            return self
        parts = [
            part
            if part.position + part.num_blocks <= num_blocks
            else part._replace(num_blocks=num_blocks - part.position)
            for part in self.parts
            if part.position < num_blocks
        ]
        return Hit(self.block_ids[:num_blocks], parts)

    def parts_from(self, position: int) -> Sequence[RunPart]:
        """The parts at or behind a position."""
        if not position:
            return self.parts
        parts = []
        for part in self.parts:
            num_before = position - part.position
            if num_before <= 0:
                parts.append(part)
            elif num_before < part.num_blocks:
                parts.append(RunPart(position, part.run, part.offset + num_before, part.num_blocks - num_before))
        return parts


NO_HIT = Hit()
