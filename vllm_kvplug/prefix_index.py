"""Which block holds a given block hash. One index for each KV cache group; it knows no references and no order of
eviction.

Two requests can compute the same prefix at the same time, so a hash can have several blocks. The one cached first
answers lookups; when it goes, the next oldest takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice


class PrefixIndex:
    """Block hash -> block id, with later duplicates kept aside in the order of their insertion."""

    __slots__ = ("_duplicates", "_first")

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        # Only hashes with more than one block have an entry: the others, oldest first (a dict used as an ordered set).
        self._duplicates: dict[bytes, dict[int, None]] = {}

    def __len__(self) -> int:
        """Number of distinct hashes."""
        return len(self._first)

    def get(self, block_hash: bytes) -> int | None:
        """The block id that answers for this hash, or None."""
        return self._first.get(block_hash)

    def block_ids(self, block_hash: bytes) -> list[int]:
        """Every block id with this hash, the answering one first."""
        first = self._first.get(block_hash)
        return [] if first is None else [first, *self._duplicates.get(block_hash, ())]

    def match(self, block_hashes: Iterable[bytes], max_num_blocks: int) -> list[int]:
        """Block ids of the longest leading run of `block_hashes` that is cached, at most `max_num_blocks`."""
        block_ids: list[int] = []
        get = self._first.get
        for block_hash in islice(block_hashes, max_num_blocks):
            block_id = get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def insert(self, block_hash: bytes, block_id: int) -> None:
        """Add a block under a hash. The caller guarantees that the block is in no index."""
        if self._first.setdefault(block_hash, block_id) != block_id:
            self._duplicates.setdefault(block_hash, {})[block_id] = None

    def remove(self, block_hash: bytes, block_id: int) -> bool:
        """Remove a block from a hash that it was inserted under. Answers whether it was the last one with it."""
        others = self._duplicates.get(block_hash)
        if others is None:
            del self._first[block_hash]
            return True
        if self._first[block_hash] == block_id:
            block_id = self._first[block_hash] = next(iter(others))
        del others[block_id]
        if not others:
            del self._duplicates[block_hash]
        return False

    def items(self) -> Iterable[tuple[bytes, list[int]]]:
        """Every hash with its block ids, the answering one first: for checks and views."""
        return ((block_hash, self.block_ids(block_hash)) for block_hash in self._first)

    def clear(self) -> None:
        """Forget everything."""
        self._first = {}
        self._duplicates = {}
