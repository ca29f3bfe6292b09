"""Which run of blocks holds a given block hash. One index for each KV cache group; it knows no references and no order
of eviction.

A hash stands for the whole prefix up to its block's end. So where a run and a request agree in one hash they agree in
all before it, and a lookup looks at a run's ends, not at each block. Two requests can compute the same prefix at the
same time: then a hash has several runs. The one cached first answers lookups; when it goes, the next oldest takes its
place. Runs in which another answers for a hash are not intact, and looked at block by block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat

from vllm_kvplug.block_run import BlockRun, Hit, RunPart


class PrefixIndex:
    """Block hash -> run, with later duplicates kept aside in the order of their insertion.

    Attributes:
        runs: by block hash, the run that answers for it. For reading, and for the pool's shortest way.
    """

    __slots__ = ("_duplicates", "runs")

    def __init__(self) -> None:
        self.runs: dict[bytes, BlockRun] = {}
        # Only hashes with more than one run have an entry: the others, oldest first (a dict used as an ordered set).
        self._duplicates: dict[bytes, dict[BlockRun, None]] = {}

    def __len__(self) -> int:
        """Number of distinct hashes."""
        return len(self.runs)

    def run(self, block_hash: bytes) -> BlockRun | None:
        """The run that answers for this hash, or None."""
        return self.runs.get(block_hash)

    def get(self, block_hash: bytes, position: int = 0) -> int | None:
        """The block id that answers for this hash, or None. `position` in the request, if known, makes it faster."""
        run = self.runs.get(block_hash)
        return None if run is None else run.block_ids[offset_in(run, block_hash, position)]

    def block_ids(self, block_hash: bytes) -> list[int]:
        """Every block id with this hash, the answering one first."""
        first = self.runs.get(block_hash)
        runs = [] if first is None else [first, *self._duplicates.get(block_hash, ())]
        return [run.block_ids[run.block_hashes.index(block_hash)] for run in runs]

    def match(self, block_hashes: Sequence[bytes], max_num_blocks: int, first_position: int = 0) -> Hit:
        """The longest cached run of positions from `first_position` on, at most up to `max_num_blocks`.

        Its row of ids begins at `first_position`.
        """
        end = min(max_num_blocks, len(block_hashes))
        block_ids: list[int] = []
        parts: list[RunPart] = []
        position = first_position
        get = self.runs.get
        while position < end:
            run = get(block_hashes[position])
            if run is None:
                break
            offset = offset_in(run, block_hashes[position], position)
            num_blocks = min(len(run.block_hashes) - offset, end - position)
            if num_blocks > 1:
                num_blocks = self._num_agreeing(run, offset, block_hashes, position, num_blocks)
            block_ids += run.block_ids[offset : offset + num_blocks]
            parts.append(RunPart(position, run, offset, num_blocks))
            position += num_blocks
        return Hit(block_ids, parts)

    def match_back(self, block_hashes: Sequence[bytes], end: int, first_position: int) -> list[RunPart]:
        """The cached blocks from position `end` - 1 down to `first_position`, as far as there is no gap; the last part
        first.
        """
        parts: list[RunPart] = []
        get = self.runs.get
        while end > first_position:
            position = end - 1
            run = get(block_hashes[position])
            if run is None:
                break
            offset = offset_in(run, block_hashes[position], position)
            num_blocks = min(offset + 1, end - first_position)
            if not run.is_intact:
                num_blocks = 1
            parts.append(RunPart(end - num_blocks, run, offset - num_blocks + 1, num_blocks))
            end -= num_blocks
        return parts

    def _num_agreeing(
        self, run: BlockRun, offset: int, block_hashes: Sequence[bytes], position: int, num_blocks: int
    ) -> int:
        """Of `num_blocks` blocks of a run, of which the first agrees, how many do one after the other."""
        hashes = run.block_hashes
        if not run.is_intact:
            get = self.runs.get
            for index in range(1, num_blocks):
                block_hash = block_hashes[position + index]
                if hashes[offset + index] != block_hash or get(block_hash) is not run:
                    return index
            return num_blocks
        if hashes[offset + num_blocks - 1] == block_hashes[position + num_blocks - 1]:
            return num_blocks
        agreeing, differing = 1, num_blocks  # the first `agreeing` do, the one numbered `differing` does not
        while differing - agreeing > 1:
            middle = (agreeing + differing) // 2
            if hashes[offset + middle - 1] == block_hashes[position + middle - 1]:
                agreeing = middle
            else:
                differing = middle
        return agreeing

    def insert(self, block_hashes: Sequence[bytes], run: BlockRun) -> None:
        """Add a run under hashes of its blocks. The caller guarantees that it is not under them yet."""
        first = self.runs
        num_hashes = len(first) + len(block_hashes)
        deque(map(first.setdefault, block_hashes, repeat(run)), maxlen=0)
        if len(first) != num_hashes:
            for block_hash in block_hashes:
                if first[block_hash] is not run:
                    self.set_aside(block_hash, run)

    def set_aside(self, block_hash: bytes, run: BlockRun) -> None:
        """Add a run under a hash for which another answers."""
        self._duplicates.setdefault(block_hash, {})[run] = None
        run.is_intact = False

    def remove(self, block_hashes: Sequence[bytes], run: BlockRun) -> None:
        """Remove a run from hashes that it was inserted under."""
        if run.is_intact and (not self._duplicates or self._duplicates.keys().isdisjoint(block_hashes)):
            first = self.runs
            for block_hash in block_hashes:
                del first[block_hash]
        else:
            for block_hash in block_hashes:
                self.remove_one(block_hash, run)

    def remove_one(self, block_hash: bytes, run: BlockRun) -> bool:
        """Remove a run from a hash that it was inserted under. Answers whether it was the last one with it."""
        others = self._duplicates.get(block_hash)
        if others is None:
            del self.runs[block_hash]
            return True
        if self.runs[block_hash] is run:
            run = self.runs[block_hash] = next(iter(others))
        del others[run]
        if not others:
            del self._duplicates[block_hash]
        return False

    def move(self, block_hashes: Sequence[bytes | None], run: BlockRun, to_run: BlockRun) -> bool:
        """Let `to_run` take the place of `run` under these hashes, wherever it is in their order. Answers whether it is
        the one that answers for all of them.
        """
        runs, duplicates = self.runs, self._duplicates
        if run.is_intact:
            runs.update(zip(block_hashes, repeat(to_run)))  # type: ignore[arg-type]  # intact: none is missing
            return True
        answers_all = True
        for block_hash in block_hashes:
            if block_hash is None:
                answers_all = False
            elif runs[block_hash] is run:
                runs[block_hash] = to_run
            else:
                answers_all = False
                others = duplicates[block_hash]
                duplicates[block_hash] = {to_run if other is run else other: None for other in others}
        return answers_all

    def items(self) -> Iterable[tuple[bytes, list[int]]]:
        """Every hash with its block ids, the answering one first: for checks and views."""
        return ((block_hash, self.block_ids(block_hash)) for block_hash in self.runs)

    def clear(self) -> None:
        """Forget everything."""
        self.runs = {}
        self._duplicates = {}


def offset_in(run: BlockRun, block_hash: bytes, position: int) -> int:
    """Which block of the run has the hash: most likely the one at this position of a request."""
    offset = position - run.first_position
    hashes = run.block_hashes
    if 0 <= offset < len(hashes) and hashes[offset] == block_hash:
        return offset
    return hashes.index(block_hash)
