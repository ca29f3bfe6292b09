"""What the block pool asks of an eviction policy: an order over the free runs of blocks.

The pool tells the policy which runs became free (`push`), asks which one is reused next (`next_run`), and takes a run
out when a request hits it or when it has been eaten up (`remove`). The blocks of a run are reused from its end. A run
shrinks without further notice, and has no blocks left when it was eaten up. Blocks that were never used, and those of a
failed load, do not come to a policy: the pool reuses them before all others. Free blocks that are not cached (a
request's last, partly filled one; all, with prefix caching off) do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from vllm_kvplug.block_run import BlockRun


class EvictionPolicy(Protocol):
    """An order over the free runs. `BlockRun.place` of a free run is the policy's to use."""

    def __iter__(self) -> Iterator[BlockRun]:
        """The free runs, the next to be reused first. For checks and tests: may be slow."""
        ...

    def push(self, runs: Sequence[BlockRun]) -> None:
        """These runs became free, in this order (the earlier, the sooner reused)."""
        ...

    def next_run(self) -> BlockRun:
        """The run whose last block is reused next. The caller has checked that there is one."""
        ...

    def remove(self, run: BlockRun) -> None:
        """Take a run out of the order."""
        ...

    def split(self, run: BlockRun, rest: BlockRun) -> None:
        """`rest` was split off the end of a free run: it is free, too, and reused just before it."""
        ...
