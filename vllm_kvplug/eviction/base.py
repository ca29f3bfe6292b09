"""What the block pool asks of an eviction policy: an order over the free blocks.

The pool tells the policy which blocks became free (`push`), takes the next ones to reuse (`pop`), and takes a block out
of the middle when a request hits it (`remove`). A policy knows neither references nor hashes. Block ids are ints; 0,
the null block, is never given to a policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """An order over the free blocks. Built with `num_blocks`: blocks 1 .. num_blocks - 1 are free, never used."""

    def __len__(self) -> int:
        """Number of free blocks."""
        ...

    def __iter__(self) -> Iterator[int]:
        """The free block ids, the next to be reused first. For checks and tests: may be slow."""
        ...

    def __contains__(self, block_id: object) -> bool:
        """Whether the block is free."""
        ...

    def push(self, block_ids: Sequence[int]) -> None:
        """These blocks became free, in this order (the earlier, the sooner reused)."""
        ...

    def push_first(self, block_ids: Sequence[int]) -> None:
        """These blocks became free and are worth nothing: reuse them before all others, in this order."""
        ...

    def pop(self, num_blocks: int) -> list[int]:
        """Take the next `num_blocks` to reuse out of the order. The caller has checked that there are so many."""
        ...

    def remove(self, block_id: int) -> None:
        """Take one free block out of the order: a request hit it."""
        ...
