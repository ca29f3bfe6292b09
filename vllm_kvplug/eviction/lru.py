"""Least recently used: the exact order of vLLM 0.17.1's free queue.

Blocks that were never used come first, by id; then freed blocks in the order in which they were freed. The never-used
part is a counter, so a pool of any size is ready at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain


class LRUEviction:
    """See the module. Every operation is O(1) for each block; `OrderedDict` because its front can be popped in O(1)."""

    def __init__(self, num_blocks: int) -> None:
        self._next_unused = 1
        self._num_blocks = num_blocks
        self._freed: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return self._num_blocks - self._next_unused + len(self._freed)

    def __iter__(self) -> Iterator[int]:
        return chain(range(self._next_unused, self._num_blocks), self._freed)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._freed or block_id in range(self._next_unused, self._num_blocks)

    def push(self, block_ids: Sequence[int]) -> None:
        self._freed.update(dict.fromkeys(block_ids))

    def pop(self, num_blocks: int) -> list[int]:
        first = self._next_unused
        end = min(first + num_blocks, self._num_blocks)
        self._next_unused = end
        popped = list(range(first, end))
        popitem = self._freed.popitem
        popped += [popitem(last=False)[0] for _ in range(num_blocks - len(popped))]
        return popped

    def remove(self, block_id: int) -> None:
        if self._next_unused <= block_id < self._num_blocks:
            # Nothing hits a block that was never used, but whoever takes one out must get the right order after it.
            self._freed = OrderedDict.fromkeys(self)
            self._next_unused = self._num_blocks
        del self._freed[block_id]
