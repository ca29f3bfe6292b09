"""The same cache, block by block, with lists and dictionaries of blocks alone: what a manager must answer, however it
keeps its blocks. Full attention and sliding windows, blocks of 4 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.core.support import FakeRequest

_SIZE = 4


@dataclass
class NaiveTable:
    """One request's blocks in one group; 0: none."""

    row: list[int] = field(default_factory=list)
    num_cached: int = 0
    first_unpublished: int = 10**9


class NaiveManager:
    """See the module.

    Args:
        num_blocks: blocks of the pool, block 0 included, which is nobody's.
        windows: by group, the tokens that a token looks at; None: all.
    """

    def __init__(self, num_blocks: int, windows: Sequence[int | None]) -> None:
        self.windows = windows
        self.free_ids = list(range(1, num_blocks))
        self.counts = [0] * num_blocks
        self.keys: list[tuple[int, bytes] | None] = [None] * num_blocks
        self.cached: dict[tuple[int, bytes], list[int]] = {}
        self.tables: list[dict[str, NaiveTable]] = [{} for _ in windows]

    def lookup(self, request: FakeRequest) -> list[list[int]]:
        """By group, the blocks of the longest hit: every length is tried, the longest first."""
        hashes = request.block_hashes
        if not request.skip_reading_prefix_cache:
            for num_blocks in range((request.num_tokens - 1) // _SIZE, 0, -1):
                rows = [self._row(group_id, hashes, num_blocks) for group_id in range(len(self.windows))]
                if None not in rows:
                    return [row for row in rows if row is not None]
        return [[] for _ in self.windows]

    def _row(self, group_id: int, hashes: list[bytes], num_blocks: int) -> list[int] | None:
        first = self._num_skipped(group_id, num_blocks * _SIZE)
        found = [self.cached.get((group_id, block_hash), [0])[0] for block_hash in hashes[first:num_blocks]]
        return None if 0 in found else [0] * first + found

    def _num_skipped(self, group_id: int, num_computed_tokens: int) -> int:
        """Blocks that no later token looks at."""
        window = self.windows[group_id]
        return 0 if window is None else max(num_computed_tokens - window + 1, 0) // _SIZE

    def allocate(self, request: FakeRequest, num_new_tokens: int, hits: list[list[int]]) -> list[list[int]] | None:
        """The new blocks by group, or None where there are too few."""
        name, num_tokens = request.request_id, request.num_computed_tokens + len(hits[0]) * _SIZE + num_new_tokens
        for group_id, tables in enumerate(self.tables):
            if name in tables:
                self._release_window(group_id, tables[name], request.num_computed_tokens)
        num_missing = [
            -(-num_tokens // _SIZE) - len(tables[name].row if name in tables else hit)
            for tables, hit in zip(self.tables, hits, strict=True)
        ]
        num_free_hits = sum(bool(block_id) and not self.counts[block_id] for hit in hits for block_id in hit)
        if sum(num_missing) + num_free_hits > len(self.free_ids):
            return None
        for tables, hit in zip(self.tables, hits, strict=True):
            if name not in tables:
                tables[name] = NaiveTable(list(hit), len(hit))
                for block_id in filter(None, hit):
                    if not self.counts[block_id]:
                        self.free_ids.remove(block_id)
                    self.counts[block_id] += 1
        new_ids = []
        for tables, number in zip(self.tables, num_missing, strict=True):
            new_ids.append([self._take() for _ in range(number)])
            tables[name].row += new_ids[-1]
        for group_id, tables in enumerate(self.tables):
            self._cache(group_id, tables[name], request, min(num_tokens, request.num_tokens) // _SIZE)
        return new_ids

    def _take(self) -> int:
        block_id = self.free_ids.pop(0)
        self._uncache(block_id)
        self.counts[block_id] = 1
        return block_id

    def _uncache(self, block_id: int) -> None:
        key, self.keys[block_id] = self.keys[block_id], None
        if key is not None:
            self.cached[key].remove(block_id)
            if not self.cached[key]:
                del self.cached[key]

    def _cache(self, group_id: int, table: NaiveTable, request: FakeRequest, end: int) -> None:
        for position in range(table.num_cached, min(end, table.first_unpublished)):
            block_id = table.row[position]
            if block_id:
                key = self.keys[block_id] = group_id, request.block_hashes[position]
                self.cached.setdefault(key, []).append(block_id)
        table.num_cached = max(table.num_cached, end)

    def _release_window(self, group_id: int, table: NaiveTable, num_computed_tokens: int) -> None:
        for position in reversed(range(min(self._num_skipped(group_id, num_computed_tokens), len(table.row)))):
            if not table.row[position]:
                break
            self._release(table.row[position])
            table.row[position] = 0

    def _release(self, block_id: int) -> bool:
        """Whether it is free now."""
        self.counts[block_id] -= 1
        if not self.counts[block_id]:
            self.free_ids.append(block_id)
        return not self.counts[block_id]

    def free(self, name: str) -> None:
        """Give back the request's blocks, the last first; those behind a failed load are to be reused first."""
        for tables in self.tables:
            table = tables.pop(name, NaiveTable())
            behind = [block_id for block_id in table.row[table.first_unpublished :][::-1] if block_id]
            freed = [block_id for block_id in behind if self._release(block_id)]
            self.free_ids = freed + [block_id for block_id in self.free_ids if block_id not in freed]
            for block_id in filter(None, table.row[: table.first_unpublished][::-1]):
                self._release(block_id)

    def evict(self, block_ids: Sequence[int]) -> None:
        """Loads into these blocks failed."""
        for block_id in block_ids:
            self._uncache(block_id)
        first_bad: dict[str, int] = {}
        for tables in self.tables:
            for name, table in tables.items():
                bad = [position for position, block_id in enumerate(table.row) if block_id and block_id in block_ids]
                if bad:
                    first_bad[name] = min(bad[0], first_bad.get(name, bad[0]))
        for name, first in first_bad.items():
            for tables in self.tables:
                table = tables[name]
                table.first_unpublished = min(table.first_unpublished, first)
                for block_id in filter(None, table.row[table.first_unpublished :]):
                    self._uncache(block_id)

    def reset(self) -> bool:
        """Drop the prefix cache, unless a block is held."""
        if any(self.counts):
            return False
        self.cached.clear()
        self.keys = [None] * len(self.keys)
        return True

    def num_common_prefix_blocks(self, name: str) -> list[int]:
        """By group, the leading blocks that all requests hold; with windows it is not told."""
        answers = []
        for tables, window in zip(self.tables, self.windows, strict=True):
            row = tables[name].row if window is None else []
            differing = (i for i, block_id in enumerate(row) if self.counts[block_id] != len(tables))
            answers.append(next(differing, len(row)))
        return answers
