"""Counts what happens to our runs of blocks, so that a run of seeds shows that the traffic reaches the cases which only
runs have. Reads our side alone and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm_kvplug.block import FoundBlocks
from vllm_kvplug.block_run import BlockRun, Hit
from vllm_kvplug.prefix_index import PrefixIndex

STRUCTURES = (
    "held runs split",
    "free runs split",
    "run heads left by windows",
    "hits that begin inside a run",
    "hits that end inside a run",
    "hits in several runs",
    "hits that come back to a run",
    "hits in runs not intact",
    "evictions inside a run",
    "evictions on request inside a run",
    "duplicates inside a run",
    "runs grown by one block",
    "runs grown by several",
    "runs with loose blocks back",
    "runs indexed in full, another having one of their hashes",
    "lookups remembered",
    "answers used after a change",
    "short way, one group",
    "short way, several groups",
    "short way, a window",
    "short way not possible",
)


def count_structures(manager: Any, counts: Counter[str]) -> None:
    """Count in `counts`, under the names of `STRUCTURES`, what happens to this manager's runs from now on."""
    _count_runs(manager.pool, counts)
    _count_calls(manager, counts)
    manager.pool.indexes = tuple(_CountedIndex(counts, by_head=index.by_head) for index in manager.pool.indexes)


class _CountedIndex(PrefixIndex):
    """An index, empty, that counts duplicates."""

    __slots__ = ("_counts",)

    def __init__(self, counts: Counter[str], *, by_head: bool) -> None:
        super().__init__(by_head=by_head)
        self._counts = counts

    def index_in_full(self, run: BlockRun) -> None:
        self._counts["runs indexed in full, another having one of their hashes"] += run.indexed_by_head
        super().index_in_full(run)

    def set_aside(self, block_hash: bytes, run: BlockRun) -> None:
        self._counts["duplicates inside a run"] += len(run.block_hashes) > 1
        super().set_aside(block_hash, run)


def _before(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Let `look` see the arguments of each call of this method first."""
    method = getattr(owner, name)

    def looked_at(*args: Any, **kwargs: Any) -> Any:
        look(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(owner, name, looked_at)


def _count_runs(pool: Any, counts: Counter[str]) -> None:
    def split(run: BlockRun, num_blocks: int) -> None:
        counts["held runs split" if run.num_holders else "free runs split"] += 1

    def acquire(run: BlockRun, offset: int, num_blocks: int) -> None:
        num_run_blocks = len(run.block_ids)
        counts["hits that come back to a run"] += offset >= num_run_blocks
        counts["hits that begin inside a run"] += 0 < offset < num_run_blocks
        counts["hits that end inside a run"] += offset + num_blocks < num_run_blocks
        counts["hits in runs not intact"] += not run.is_intact

    def uncache(run: BlockRun, offset: int, num_blocks: int) -> None:
        counts["evictions on request inside a run"] += offset + num_blocks < len(run.block_hashes)

    def uncache_end(run: BlockRun, num_left: int, block_ids: list[int]) -> None:
        counts["evictions inside a run"] += num_left > 0

    def release(runs: list[BlockRun], **_: Any) -> None:
        counts["runs with loose blocks back"] += sum(0 < len(run.block_hashes) < len(run.block_ids) for run in runs)

    _before(pool, "split", split)
    _before(pool, "acquire", acquire)
    _before(pool, "uncache", uncache)
    _before(pool, "_uncache_end", uncache_end)
    _before(pool, "release", release)
    _before(pool, "cut_head", lambda *_: counts.update(["run heads left by windows"]))
    _before(pool, "cache_one_more", lambda *_: counts.update(["runs grown by one block"]))
    _before(pool, "cache_more", lambda *_: counts.update(["runs grown by several"]))


def _count_calls(manager: Any, counts: Counter[str]) -> None:
    grow_alone, grow_groups = manager._grow_alone, manager._grow_groups
    grow, match = grow_alone or grow_groups, manager._coordinator.match
    get_computed_blocks = manager.get_computed_blocks
    num_groups, has_window = len(manager.groups), manager._coordinator.releases_skipped
    way = "short way, several groups" if num_groups != 1 else "short way, a window" if has_window else ""
    num_matches = 0

    def counted_grow(*args: Any) -> Any:
        answer = grow(*args)
        counts["short way not possible" if answer is None else way or "short way, one group"] += 1
        return answer

    def counted_match(*args: Any) -> tuple[tuple[Hit, ...], int]:
        nonlocal num_matches
        num_matches += 1
        hits, num_hit_tokens = match(*args)
        counts["hits in several runs"] += any(len(hit.parts) > 1 for hit in hits)
        return hits, num_hit_tokens

    def counted_lookup(request: Any) -> Any:
        before = num_matches
        answer = get_computed_blocks(request)
        is_looked_up = manager.enable_caching and not request.skip_reading_prefix_cache
        counts["lookups remembered"] += is_looked_up and before == num_matches
        return answer

    def hits_of(request: Any, blocks: Any, num_hit_tokens: int) -> None:
        is_found = type(blocks) is FoundBlocks
        counts["answers used after a change"] += is_found and blocks.hits_in(manager.pool, num_hit_tokens) is None

    if grow_alone is not None:
        manager._grow_alone = counted_grow
    else:
        manager._grow_groups = counted_grow
    manager._coordinator.match = counted_match
    manager.get_computed_blocks = counted_lookup
    _before(manager, "_hits_of", hits_of)
