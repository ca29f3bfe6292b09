"""Least recently used: the exact order of vLLM 0.17.1's free queue.

Blocks that were never used come first, by id; then freed blocks in the order in which they were freed. The never-used
part is a counter, so a pool of any size is ready at once. Freed blocks are a queue of ids: a block that is hit stays in
it as a stale entry, to be passed over later, since taking it out of the middle would cost more than all the rest.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

# Stale entries are swept out when there are more of them than of the others, and more than this.
_MIN_STALE_ENTRIES = 1024


class LRUEviction:
    """See the module. Every operation is O(1) for each block, sweeps included."""

    def __init__(self, num_blocks: int) -> None:
        self._next_unused = 1
        self._num_blocks = num_blocks
        self._freed: deque[int] = deque()
        self._num_freed = 0
        # Block id -> how many of its entries are stale. They are its oldest ones: it was freed again after them.
        self._num_stale: dict[int, int] = {}
        self._worthless: deque[int] = deque()  # come before everything else; hardly ever any

    def __len__(self) -> int:
        return self._num_blocks - self._next_unused + self._num_freed + len(self._worthless)

    def __iter__(self) -> Iterator[int]:
        yield from self._worthless
        yield from range(self._next_unused, self._num_blocks)
        yield from self._freed_in_order()

    def _freed_in_order(self) -> Iterator[int]:
        num_stale = dict(self._num_stale)
        for block_id in self._freed:
            if num_stale.get(block_id):
                num_stale[block_id] -= 1
            else:
                yield block_id

    def __contains__(self, block_id: object) -> bool:
        return any(free_id == block_id for free_id in self)

    def push(self, block_ids: Sequence[int]) -> None:
        self._freed.extend(block_ids)
        self._num_freed += len(block_ids)

    def push_first(self, block_ids: Sequence[int]) -> None:
        self._worthless.extendleft(reversed(block_ids))

    def pop(self, num_blocks: int) -> list[int]:
        if self._worthless:
            num_worthless = min(num_blocks, len(self._worthless))
            popped = [self._worthless.popleft() for _ in range(num_worthless)]
            return popped + self._pop_ordinary(num_blocks - num_worthless)
        return self._pop_ordinary(num_blocks)

    def _pop_ordinary(self, num_blocks: int) -> list[int]:
        first = self._next_unused
        end = min(first + num_blocks, self._num_blocks)
        self._next_unused = end
        popped = list(range(first, end))
        num_missing = num_blocks - len(popped)
        self._num_freed -= num_missing
        popleft = self._freed.popleft
        if not self._num_stale:
            popped += [popleft() for _ in range(num_missing)]
        while len(popped) < num_blocks:
            block_id = popleft()
            if block_id not in self._num_stale:
                popped.append(block_id)
            else:
                self._pass_over(block_id)
        return popped

    def remove(self, block_id: int) -> None:
        if block_id >= self._next_unused or block_id in self._worthless:
            # Nothing hits a block without a hash, but whoever takes one out must get the right order after it.
            self._freed, self._num_freed, self._num_stale = deque(self), len(self), {}
            self._next_unused = self._num_blocks
            self._worthless.clear()
        self._num_stale[block_id] = self._num_stale.get(block_id, 0) + 1
        self._num_freed -= 1
        if len(self._freed) > 2 * self._num_freed + _MIN_STALE_ENTRIES:
            self._freed, self._num_stale = deque(self._freed_in_order()), {}

    def _pass_over(self, block_id: int) -> None:
        num_stale = self._num_stale.pop(block_id) - 1
        if num_stale:
            self._num_stale[block_id] = num_stale

    def find_contradictions(self) -> Iterator[tuple[str, int | None]]:
        """What in here does not agree: a message and, where it is about one, the block's id. Slow, for checks."""
        if not 1 <= self._next_unused <= max(self._num_blocks, 1):
            yield f"lru: first unused block: expected 1 to {self._num_blocks}, found {self._next_unused}", None
        num_entries = Counter(self._freed)
        for block_id, num_stale in self._num_stale.items():
            if not 1 <= num_stale <= num_entries[block_id]:
                expected = f"1 to its {num_entries[block_id]} entries"
                yield f"lru: block {block_id}: stale entries: expected {expected}, found {num_stale}", block_id
        num_entries.subtract(self._num_stale)
        num_live = 0
        for block_id, count in num_entries.items():
            num_live += count
            if count > 1:
                yield f"lru: block {block_id}: entries that are not stale: expected at most 1, found {count}", block_id
        if self._num_freed != num_live:
            yield f"lru: freed blocks: expected {num_live} by its entries, found {self._num_freed}", None
        for block_id, num_worthless in Counter(self._worthless).items():
            num_places = num_worthless + max(num_entries[block_id], 0)
            if num_places > 1:
                yield f"lru: worthless block {block_id}: expected 1 place, found {num_places}", block_id
        for block_id in {*self._freed, *self._worthless}:
            if not 1 <= block_id < self._next_unused:
                expected = f"1 to {self._next_unused - 1}, once used"
                yield f"lru: block {block_id} among the freed: expected an id from {expected}, found it", block_id
