"""Block hashes for blocks larger than the hashes' own: each is a run of the request's hashes, joined.

The same bytes as vLLM's. Computed when asked for, so a lookup that ends early joins no more than it looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload


class HashRow(Sequence[bytes]):
    """A view of `block_hashes` (it may grow) in which `num_hashes_per_block` of them make one."""

    __slots__ = ("_block_hashes", "_num_hashes_per_block")

    def __init__(self, block_hashes: Sequence[bytes], num_hashes_per_block: int) -> None:
        self._block_hashes = block_hashes
        self._num_hashes_per_block = num_hashes_per_block

    def __len__(self) -> int:
        return len(self._block_hashes) // self._num_hashes_per_block

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        start = range(len(self))[index] * self._num_hashes_per_block
        return b"".join(self._block_hashes[start : start + self._num_hashes_per_block])
