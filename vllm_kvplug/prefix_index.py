"""Which run of blocks holds a given block hash. One index for each KV cache group; it knows no references and no order
of eviction.

A hash stands for the whole prefix up to its block's end. So where a run and a request agree in one hash they agree in
all before it, and a lookup looks at a run's ends, not at each block. Two requests can compute the same prefix at the
same time: then a hash has several runs. The one cached first answers lookups; when it goes, the next oldest takes its
place. Runs in which another answers for a hash are not intact, and looked at block by block.

**By head.** Where every lookup goes on from the block before (attention that looks at all tokens), a run needs no more
in the index than its first hash, its head: a lookup comes to it there, or at no hash at all. That holds as long as no
other run has one of its hashes. Who computes a block has the block before it in a run as well, so two runs that share
a hash share those before it, down to the head of one of them: whichever comes second finds that head in the index, or
has it found. From then on both are indexed in full, by each of their hashes.

That a request has the block before in a run, under its hash, is not so where somebody took hashes away under requests
that go on (a failed load, of which only some holders know), named blocks that are no such prefix, or cached blocks one
by one. Then every run is indexed in full, until a reset (`index_all_in_full`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat

from vllm_kvplug.block_run import BlockRun, Hit, RunPart


class PrefixIndex:
    """Block hash -> run, with later duplicates kept aside in the order of their insertion.

    Args:
        by_head: index runs by their first hash alone where that suffices (see the module): for groups whose lookups all
            are `match` from position 0, and whose requests cache their blocks from the first one on, without gaps.

    Attributes:
        by_head: whether new runs are indexed so now.
        runs: by block hash, the run that answers for it, less what is indexed by head. For reading, and for the pool's
            shortest way.
    """

    __slots__ = ("_by_head_after_reset", "_duplicates", "by_head", "runs")

    def __init__(self, *, by_head: bool = False) -> None:
        self.by_head = self._by_head_after_reset = by_head
        self.runs: dict[bytes, BlockRun] = {}
        # Only hashes with more than one run have an entry: the others, oldest first (a dict used as an ordered set).
        self._duplicates: dict[bytes, dict[BlockRun, None]] = {}

    def __len__(self) -> int:
        """Number of distinct hashes."""
        return len(self.runs) + sum(len(run.block_hashes) - 1 for run in self._runs_by_head())

    def _runs_by_head(self) -> Iterator[BlockRun]:
        return (run for run in self.runs.values() if run.indexed_by_head) if self.by_head else iter(())

    def run(self, block_hash: bytes) -> BlockRun | None:
        """The run that answers for this hash, or None. Slow where runs are indexed by head: looks at all of them."""
        run = self.runs.get(block_hash)
        if run is None and self.by_head:
            run = next((run for run in self._runs_by_head() if block_hash in run.block_hashes), None)
        return run

    def get(self, block_hash: bytes, position: int = 0) -> int | None:
        """The block id that answers for this hash, or None. `position` in the request, if known, makes it faster."""
        run = self.run(block_hash)
        return None if run is None else run.block_ids[offset_in(run, block_hash, position)]

    def block_ids(self, block_hash: bytes) -> list[int]:
        """Every block id with this hash, the answering one first."""
        first = self.run(block_hash)
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

    def add(self, run: BlockRun) -> None:
        """Add a run that is not in here yet."""
        block_hashes: Sequence[bytes] = run.block_hashes  # type: ignore[assignment]  # new: none is missing
        if self.by_head and self.runs.keys().isdisjoint(block_hashes):
            run.indexed_by_head = True
            self.runs[block_hashes[0]] = run
        else:
            self._insert(block_hashes, run)

    def add_more(self, run: BlockRun, block_hashes: Sequence[bytes]) -> None:
        """Add a run that is in here under further hashes, which it does not have itself yet."""
        if run.indexed_by_head:
            if self.runs.keys().isdisjoint(block_hashes):
                return
            self.index_in_full(run)
        self._insert(block_hashes, run)

    def index_in_full(self, run: BlockRun) -> None:
        """Index a run by each of its hashes, if it is not."""
        if run.indexed_by_head:
            run.indexed_by_head = False
            self.runs.update(zip(run.block_hashes, repeat(run)))  # type: ignore[arg-type]  # none is missing

    def index_all_in_full(self) -> None:
        """From now on, until it is cleared, every hash is in here: see the module."""
        for run in list(self._runs_by_head()):
            self.index_in_full(run)
        self.by_head = False

    def _insert(self, block_hashes: Sequence[bytes], run: BlockRun) -> None:
        first = self.runs
        if self.by_head:
            for block_hash in block_hashes:
                other = first.get(block_hash)
                if other is not None:
                    self.index_in_full(other)
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

    def remove_end(self, run: BlockRun, block_hashes: Sequence[bytes]) -> None:
        """Remove a run from hashes that were its last ones, none of them missing; it does not have them any more."""
        if run.indexed_by_head:
            if not run.block_hashes:
                del self.runs[block_hashes[0]]
        elif run.is_intact and (not self._duplicates or self._duplicates.keys().isdisjoint(block_hashes)):
            first = self.runs
            for block_hash in block_hashes:
                del first[block_hash]
        else:
            for block_hash in block_hashes:
                self.remove_one(block_hash, run)

    def remove_one(self, block_hash: bytes, run: BlockRun) -> bool:
        """Remove a run that is indexed in full from one hash. Answers whether it was the last one with it."""
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
        """Let `to_run`, which has these hashes of `run` now, take its place under them, wherever it is in their order.
        Answers whether they all lead to it.
        """
        runs, duplicates = self.runs, self._duplicates
        if run.indexed_by_head:
            to_run.indexed_by_head = True
            for part in (run, to_run):
                if part.block_hashes:
                    runs[part.block_hashes[0]] = part  # type: ignore[index]  # none is missing
            return True
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

    def items(self) -> Iterator[tuple[bytes, list[int]]]:
        """Every hash with its block ids, the answering one first: for checks and views."""
        for block_hash, run in self.runs.items():
            if run.indexed_by_head:
                for its_hash, block_id in zip(run.block_hashes, run.block_ids, strict=False):
                    assert its_hash is not None  # else it is not indexed by head
                    yield its_hash, [block_id]
            else:
                yield block_hash, self.block_ids(block_hash)

    def clear(self) -> None:
        """Forget everything; nothing is cached, nor held."""
        self.by_head = self._by_head_after_reset
        self.runs = {}
        self._duplicates = {}


def offset_in(run: BlockRun, block_hash: bytes, position: int) -> int:
    """Which block of the run has the hash: most likely the one at this position of a request."""
    offset = position - run.first_position
    hashes = run.block_hashes
    if 0 <= offset < len(hashes) and hashes[offset] == block_hash:
        return offset
    return hashes.index(block_hash)
