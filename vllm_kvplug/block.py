"""What callers see of blocks: `KVCacheBlocks`, the manager's answer, and `BlockView`, one block of it.

Inside the package a block is its id, an int. Objects exist only for those who ask for them (KV connectors, metrics,
tests), so a pool of any size costs no object for each block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from vllm_kvplug.block_states import hash_and_group, num_holders

if TYPE_CHECKING:
    from vllm_kvplug.block_pool import BlockPool
    from vllm_kvplug.block_run import Hit
    from vllm_kvplug.groups.table import BlockTable

_NUM_GROUP_ID_BYTES = 4


def make_key(block_hash: bytes, group_id: int) -> bytes:
    """What a block is cached under, as vLLM shows it outside: its hash and, after it, its group, big endian."""
    return block_hash + group_id.to_bytes(_NUM_GROUP_ID_BYTES, "big")


def split_key(key: bytes) -> tuple[bytes, int]:
    """A block's hash and its group: the reverse of `make_key`."""
    return key[:-_NUM_GROUP_ID_BYTES], int.from_bytes(key[-_NUM_GROUP_ID_BYTES:], "big")


class BlockView:
    """One block of a pool, as it is at the moment of asking. Equal to every other view of the same block."""

    __slots__ = ("_pool", "block_id")

    def __init__(self, pool: BlockPool, block_id: int) -> None:
        self._pool = pool
        self.block_id = block_id

    @property
    def ref_cnt(self) -> int:
        """How many requests hold the block."""
        return num_holders(self._pool, self.block_id)

    @property
    def block_hash(self) -> bytes | None:
        """What the block is cached under, see `make_key`. None: not cached."""
        cached = hash_and_group(self._pool, self.block_id)
        return None if cached is None else make_key(*cached)

    @property
    def is_null(self) -> bool:
        """Whether this is the placeholder for a position without a block."""
        return self.block_id == 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockView) and self._pool is other._pool and self.block_id == other.block_id

    def __hash__(self) -> int:
        return hash((id(self._pool), self.block_id))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(block_id={self.block_id}, ref_cnt={self.ref_cnt}, block_hash={self.block_hash!r})"
        )


class BlockSequence(Sequence[BlockView]):
    """A row of blocks: made from a list of ids, each block's view built when it is asked for."""

    __slots__ = ("_pool", "block_ids")

    def __init__(self, pool: BlockPool, block_ids: Sequence[int]) -> None:
        self._pool = pool
        self.block_ids = block_ids

    def __len__(self) -> int:
        return len(self.block_ids)

    @overload
    def __getitem__(self, index: int) -> BlockView: ...
    @overload
    def __getitem__(self, index: slice) -> BlockSequence: ...
    def __getitem__(self, index: int | slice) -> BlockView | BlockSequence:
        if isinstance(index, slice):
            return BlockSequence(self._pool, self.block_ids[index])
        return BlockView(self._pool, self.block_ids[index])

    def __iter__(self) -> Iterator[BlockView]:
        return (BlockView(self._pool, block_id) for block_id in self.block_ids)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockSequence) and other._pool is self._pool:
            return list(self.block_ids) == list(other.block_ids)
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.block_ids)})"


class KVCacheBlocks:
    """Blocks by group, the manager's answer to the scheduler: `blocks[group][i]` holds the i-th block of tokens.

    Built from rows of block objects (anything with a `block_id`), or by `of_ids` from rows of ids.
    """

    __slots__ = ("_block_ids", "_blocks", "_pool")

    def __init__(self, blocks: tuple[Sequence[Any], ...]) -> None:
        self._blocks: tuple[Sequence[Any], ...] | None = blocks
        self._block_ids: tuple[Sequence[int], ...] | None = None
        self._pool: BlockPool | None = None

    @classmethod
    def of_ids(cls, pool: BlockPool, block_ids: tuple[Sequence[int], ...]) -> KVCacheBlocks:
        """Blocks of `pool` by id. The rows are kept, not copied."""
        return BlocksOfIds(pool, block_ids)

    def is_of(self, pool: BlockPool) -> bool:
        """Whether these are blocks of `pool`; of rows of objects that is not known, and taken for granted."""
        return self._pool is None or self._pool is pool

    @property
    def block_ids(self) -> tuple[Sequence[int], ...]:
        """`block_ids[group][i]`. Not a copy: read only."""
        if self._block_ids is not None:
            return self._block_ids
        return tuple([block.block_id for block in row] for row in self.blocks)

    @property
    def blocks(self) -> tuple[Sequence[Any], ...]:
        """`blocks[group][i]`, as objects."""
        if self._blocks is None:
            assert self._block_ids is not None
            assert self._pool is not None
            pool = self._pool
            self._blocks = tuple(BlockSequence(pool, row) for row in self._block_ids)
        return self._blocks

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """The ids by group, each a new list. With `allow_none`, None where no group has a block."""
        rows = self._block_ids
        if rows is None:
            rows = self.block_ids
        if allow_none and not any(rows):
            return None
        return tuple([[*row] for row in rows])

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of the blocks that are not in the prefix cache; for one group only (KV connectors ask)."""
        if len(self.block_ids) != 1:
            raise AssertionError(f"get_unhashed_block_ids: expected one KV cache group, found {len(self.block_ids)}")
        return [block.block_id for block in self.blocks[0] if block.block_hash is None]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """By group, the ids of the blocks that are not in the prefix cache, null blocks left out (connectors of several
        groups ask).
        """
        return [
            [block.block_id for block in row if block.block_hash is None and not block.is_null] for row in self.blocks
        ]

    def new_empty(self) -> KVCacheBlocks:
        """No blocks, for as many groups."""
        return KVCacheBlocks(tuple(() for _ in self.block_ids))

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        if self._pool is not None and self._pool is other._pool:
            rows = tuple([*mine, *others] for mine, others in zip(self.block_ids, other.block_ids, strict=True))
            return KVCacheBlocks.of_ids(self._pool, rows)
        return KVCacheBlocks(tuple([*mine, *others] for mine, others in zip(self.blocks, other.blocks, strict=True)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVCacheBlocks) and self.blocks == other.blocks

    __hash__ = None  # type: ignore[assignment]  # it can change, as a list can

    def __repr__(self) -> str:
        return f"{type(self).__name__}(block_ids={tuple(list(row) for row in self.block_ids)})"


class BlocksOfIds(KVCacheBlocks):
    """Blocks by id.

    Args:
        pool: their pool.
        block_ids: `block_ids[group][i]`. The rows are kept, not copied.
    """

    __slots__ = ()

    def __init__(self, pool: BlockPool, block_ids: tuple[Sequence[int], ...]) -> None:
        self._blocks = None
        self._block_ids = block_ids
        self._pool = pool


class NoBlocks(BlocksOfIds):
    """No blocks, the answer that a running request gets most of the time: quick to read."""

    __slots__ = ()

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        return None if allow_none else tuple([[] for _ in self.block_ids])


class FoundBlocks(KVCacheBlocks):
    """The answer to a lookup, which remembers in which runs it found the blocks.

    Args:
        pool: the pool that was looked in.
        hits: what was found, by group.
        num_tokens: of the hit.
    """

    __slots__ = ("_hits", "_num_tokens", "_version")

    def __init__(self, pool: BlockPool, hits: tuple[Hit, ...], num_tokens: int) -> None:
        self._blocks, self._block_ids, self._pool = None, tuple([hit.block_ids for hit in hits]), pool
        self._hits, self._num_tokens, self._version = hits, num_tokens, pool.version

    def hits_in(self, pool: BlockPool, num_tokens: int) -> tuple[Hit, ...] | None:
        """What was found, if it was so many tokens of this pool, in which nothing has changed since; else None."""
        is_current = self._pool is pool and self._version == pool.version and self._num_tokens == num_tokens
        return self._hits if is_current else None


class HeldBlocks(KVCacheBlocks):
    """The blocks of a request, as they are whenever they are read.

    Args:
        pool: their pool.
        tables: the request's, by group; None where a group has none.
    """

    __slots__ = ("_tables",)

    def __init__(self, pool: BlockPool, tables: Sequence[BlockTable | None]) -> None:
        self._blocks, self._pool = None, pool
        self._block_ids = tuple([table.block_ids if table is not None and table.block_ids else () for table in tables])
        self._tables = tables

    def get_unhashed_block_ids(self) -> list[int]:
        # Connectors ask at each admission: the table knows it without a look at all runs.
        table = self._tables[0] if len(self._tables) == 1 else None
        if table is None or table.is_gone:
            return super().get_unhashed_block_ids()
        return table.unhashed_block_ids()

    @property
    def blocks(self) -> tuple[Sequence[Any], ...]:
        """`blocks[group][i]`, as objects."""
        if self._blocks is None:
            assert self._block_ids is not None
            assert self._pool is not None
            pool = self._pool
            self._blocks = tuple(
                [
                    HeldRow(pool, row, group_id, table) if table is not None else BlockSequence(pool, row)
                    for group_id, (row, table) in enumerate(zip(self._block_ids, self._tables, strict=True))
                ]
            )
        return self._blocks


class HeldBlockView(BlockView):
    """A block at a position of a request's table, which knows its hash without a look at all runs."""

    __slots__ = ("_position", "_row")

    def __init__(self, row: HeldRow, position: int) -> None:
        super().__init__(row._pool, row.block_ids[position])
        self._row, self._position = row, position

    @property
    def block_hash(self) -> bytes | None:
        """What the block is cached under, see `make_key`. None: not cached."""
        table, position = self._row.table, self._position
        if table.is_gone or position >= len(table.block_ids) or table.block_ids[position] != self.block_id:
            return super().block_hash
        block_hash = table.hash_at(position)
        return None if block_hash is None else make_key(block_hash, self._row.group_id)


class HeldRow(BlockSequence):
    """A request's row of blocks in one group."""

    __slots__ = ("group_id", "table")

    def __init__(self, pool: BlockPool, block_ids: Sequence[int], group_id: int, table: BlockTable) -> None:
        super().__init__(pool, block_ids)
        self.group_id, self.table = group_id, table

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [HeldBlockView(self, position) for position in range(*index.indices(len(self)))]
        return HeldBlockView(self, range(len(self))[index])

    def __iter__(self) -> Iterator[BlockView]:
        return (HeldBlockView(self, position) for position in range(len(self)))
