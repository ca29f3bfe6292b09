"""What must hold of runs of blocks: each block is in one place, runs know their holders, and the indexes know the runs.

Part of `invariants.py`, which has the rules of tables and limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvplug.block_pool import NULL_BLOCK_ID, BlockPool
from vllm_kvplug.block_run import BlockRun, RunPart

if TYPE_CHECKING:
    from vllm_kvplug.groups.table import Hold
    from vllm_kvplug.manager import CacheManager
    from vllm_kvplug.prefix_index import PrefixIndex


class Finding(NamedTuple):
    """One contradiction.

    Attributes:
        message: one line: object, expected and found value.
        block_id: the block that it is about, if it is about one.
        request_id: the request, if it is about one.
    """

    message: str
    block_id: int | None = None
    request_id: str | None = None

    @property
    def what(self) -> str:
        """What is wrong, without the values: the same as long as it stands, though they change."""
        return self.message.partition(": expected ")[0]


def differs(what: str, expected: object, found: object, *about: Any) -> Finding:
    """A finding that names the object, the expected and the found value."""
    return Finding(f"{what}: expected {expected}, found {found}", *about)


@dataclass
class Layout:
    """Where the blocks are, read afresh from all runs and tables.

    Attributes:
        held, free: the runs, each once; free ones in the order of their reuse.
        places: by block id, the run that it is in and its offset there.
        holders: by run, how many tables hold it.
        owners: by loose block, how many tables have it as their own.
    """

    held: list[BlockRun]
    free: list[BlockRun]
    places: dict[int, tuple[BlockRun, int]] = field(default_factory=dict)
    holders: Counter[BlockRun] = field(default_factory=Counter)
    owners: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, manager: CacheManager) -> Layout:
        """As they are now."""
        pool = manager.pool
        self = cls(list(pool.held_runs), list(dict.fromkeys(pool.free_runs())))
        for run in (*self.held, *self.free):
            for offset, block_id in enumerate(run.block_ids):
                self.places[block_id] = run, offset
        for group in manager.groups:
            for table in group.tables.values():
                row: list[int] = table.block_ids
                is_loose = [block_id != NULL_BLOCK_ID for block_id in row]
                for hold in table.holds:
                    pieces, _ = pieces_of(hold)
                    self.holders.update(piece.run for piece in pieces)
                    for position in range(hold.position, min(hold.position + hold.num_blocks, len(row))):
                        is_loose[position] = False
                self.owners.update(block_id for block_id, loose in zip(row, is_loose, strict=True) if loose)
        return self

    def cached_as(self, block_id: int) -> tuple[bytes, int] | None:
        """The hash that the block is cached under, and its group."""
        run, offset = self.places.get(block_id, (None, 0))
        if run is None or offset >= len(run.block_hashes):
            return None
        block_hash = run.block_hashes[offset]
        return None if block_hash is None else (block_hash, run.group_id)


def pieces_of(hold: Hold) -> tuple[list[RunPart], int]:
    """The runs that a hold is in, as far as they go on, and how many of its blocks they do not have (negative: they
    have more).
    """
    pieces: list[RunPart] = []
    run: BlockRun | None = hold.run
    num_left = hold.num_blocks
    while num_left > 0 and run is not None and run.block_ids:
        pieces.append(RunPart(hold.position + hold.num_blocks - num_left, run, 0, len(run.block_ids)))
        num_left -= len(run.block_ids)
        run = run.rest
    return pieces, num_left


def name_of(run: BlockRun) -> str:
    """A run in words, by its first block."""
    num_others = len(run.block_ids) - 1
    return f"block {run.block_ids[0]}" + (f" and {num_others} more, a run" if num_others else "")


def find_contradictions_of_runs(manager: CacheManager, layout: Layout) -> Iterator[Finding]:
    """What is wrong with runs, the order of free blocks and the indexes."""
    yield from _check_references(layout)
    yield from _check_places(manager.pool, layout)
    yield from _check_numbers(manager.pool, layout)
    for group_id, index in enumerate(manager.pool.indexes):
        yield from _check_index(group_id, index, layout)
    yield from _check_hashes(manager, layout)


def _check_references(layout: Layout) -> Iterator[Finding]:
    for run in (*layout.held, *layout.free):
        if not run.block_ids:
            yield differs(f"{run!r}: blocks of a run", "at least one", "none")
        elif run.num_holders != layout.holders[run]:
            yield differs(f"{name_of(run)}: references", layout.holders[run], run.num_holders, run.block_ids[0])
    for run in layout.held:
        if run.block_ids and run.num_holders <= 0:
            found = "it among the held runs"
            yield differs(f"{name_of(run)}: held", f"not, with {run.num_holders} references", found, run.block_ids[0])
    for run in layout.free:
        if run.block_ids and run.num_holders:
            found = "it in the free order"
            yield differs(f"{name_of(run)}: free", f"not, with {run.num_holders} references", found, run.block_ids[0])
    for block_id, num_owners in layout.owners.items():
        if num_owners != 1:
            yield differs(f"block {block_id}: tables that have it as their own", 1, num_owners, block_id)


def _check_places(pool: BlockPool, layout: Layout) -> Iterator[Finding]:
    usable = range(pool.num_reserved_blocks, pool.num_blocks)
    num_places: Counter[int] = Counter()
    for where, runs in (("in a held run", layout.held), ("in the order of free blocks", layout.free)):
        in_runs = Counter(block_id for run in runs for block_id in run.block_ids)
        num_places.update(in_runs)
        for block_id in sorted(in_runs.keys() - set(usable)):
            kind = "null block" if block_id == NULL_BLOCK_ID else "reserved block"
            name = kind if 0 <= block_id < pool.num_reserved_blocks else "foreign block"
            yield differs(f"{name} {block_id}: {where}", "never", "it there", block_id)
    runs_in_order = Counter(pool.free_runs())
    for run, count in runs_in_order.items():
        if count > 1 and run.block_ids:
            yield differs(f"{name_of(run)}: places in the order of free blocks", 1, count, run.block_ids[0])
    num_places.update(pool.unused_block_ids())
    for block_id, count in num_places.items():
        if count > 1:
            yield differs(f"block {block_id}: runs that it is in, unused blocks being one", 1, count, block_id)
    for block_id in usable:
        if not num_places[block_id] and not layout.owners[block_id]:
            yield differs(f"block {block_id}: free or held", "one of them", "neither", block_id)
        elif num_places[block_id] and layout.owners[block_id]:
            found = repr(layout.places[block_id][0]) if block_id in layout.places else "it among the unused blocks"
            yield differs(f"block {block_id}: a table's own, so in no run", "none", found, block_id)
    remembered = pool._places
    if remembered is not None and dict(remembered) != layout.places:
        ids = {*remembered, *layout.places}
        block_id = min(i for i in ids if remembered.get(i) != layout.places.get(i))
        expected, remembered_place = layout.places.get(block_id), remembered.get(block_id)
        yield differs(f"block {block_id}: remembered place", expected, remembered_place, block_id)


def _check_numbers(pool: BlockPool, layout: Layout) -> Iterator[Finding]:
    unused = pool.unused_block_ids()
    if not pool.num_reserved_blocks <= unused.start <= pool.num_blocks:
        yield differs("first unused block", f"{pool.num_reserved_blocks} to {pool.num_blocks}", unused.start)
    num_free = len(list(pool.free_block_ids()))
    if pool.num_free_blocks != num_free:
        yield differs("free blocks: length of the order", num_free, pool.num_free_blocks)
    num_usable = pool.num_blocks - pool.num_reserved_blocks
    num_held = sum(len(run.block_ids) for run in layout.held) + len(layout.owners)
    if pool.num_free_blocks + num_held != num_usable:
        expected = f"{num_usable}, {pool.num_blocks} less {pool.num_reserved_blocks} reserved"
        found = f"{pool.num_free_blocks + num_held}, {pool.num_free_blocks} and {num_held}"
        yield differs("conservation: free and held blocks", expected, found)
    for run in pool._worthless:
        if run.block_hashes:
            what = f"{name_of(run)}: hashes of a worthless run"
            yield differs(what, "none", len(run.block_hashes), run.block_ids[0])
    find_contradictions_of_policy = getattr(pool.policy, "find_contradictions", None)
    if find_contradictions_of_policy is not None:
        for message, block_id in find_contradictions_of_policy():
            yield Finding(message, block_id)


def _check_index(group_id: int, index: PrefixIndex, layout: Layout) -> Iterator[Finding]:
    """Whether the runs that the index answers with have these hashes, in this group."""
    yield from _check_heads(group_id, index, layout)
    alive = {*layout.held, *layout.free}
    hashes_of: dict[BlockRun, set[bytes | None]] = {}
    duplicates: Mapping[bytes, Mapping[BlockRun, None]] = index._duplicates
    for block_hash, others in duplicates.items():
        if not others or block_hash not in index.runs or index.runs[block_hash] in others:
            what = f"group {group_id}, {short(block_hash)}: runs in the prefix index"
            yield differs(what, "an answering one and others", f"{index.run(block_hash)} and {list(others)}")
    for block_hash in {*index.runs, *duplicates}:
        for run in (index.runs.get(block_hash), *duplicates.get(block_hash, ())):
            if run is None:
                continue
            if run not in alive:
                what = f"group {group_id}, {short(block_hash)}: its run in the prefix index"
                block_id = run.block_ids[0] if run.block_ids else None
                yield differs(what, "one that is held or free", repr(run), block_id)
                continue
            if run not in hashes_of:
                hashes_of[run] = set(run.block_hashes)
            hashes = hashes_of[run]
            if run.block_ids and (run.group_id != group_id or block_hash not in hashes):
                expected = f"group {group_id}, {short(block_hash)}"
                found = f"group {run.group_id}, {', '.join(map(short, run.block_hashes)) or 'no hash'}"
                yield differs(f"{name_of(run)}: group and hash, as indexed", expected, found, run.block_ids[0])


def _check_heads(group_id: int, index: PrefixIndex, layout: Layout) -> Iterator[Finding]:
    """Whether no other run has a hash of a run that is indexed by its first one alone."""
    runs = [run for run in (*layout.held, *layout.free) if run.group_id == group_id and run.block_hashes]
    num_runs = Counter(block_hash for run in runs for block_hash in run.block_hashes)
    for run in runs:
        if not run.indexed_by_head or not run.block_ids:
            continue
        name, block_id = name_of(run), run.block_ids[0]
        if not index.by_head:
            yield differs(f"{name}: indexed by head, in an index by each hash", "never", "it", block_id)
        if not run.is_intact:
            yield differs(f"{name}: indexed by head", "an intact run", "one that is not", block_id)
        for position, block_hash in enumerate(run.block_hashes):
            if num_runs[block_hash] > 1:
                found = num_runs[block_hash]
                yield differs(f"{name}: runs with its {short(block_hash)}, indexed by head", 1, found, block_id)
            if position and block_hash in index.runs:
                what = f"{name}: what its {short(block_hash)}, not the first, leads to"
                yield differs(what, "nothing, indexed by head", repr(index.runs[block_hash]), block_id)


def _check_hashes(manager: CacheManager, layout: Layout) -> Iterator[Finding]:
    """Whether the hashes that the runs have are in the index, and what a run says of itself."""
    indexes = manager.pool.indexes
    for run in (*layout.held, *layout.free):
        if not run.block_hashes or not run.block_ids:
            continue
        name, block_id = name_of(run), run.block_ids[0]
        if len(run.block_hashes) > len(run.block_ids):
            yield differs(f"{name}: its hashes", f"at most {len(run.block_ids)}", len(run.block_hashes), block_id)
        if not manager.enable_caching:
            yield differs(f"{name}: hash, prefix caching being off", None, short(run.block_hashes[0]), block_id)
        known = [block_hash for block_hash in run.block_hashes if block_hash is not None]
        if len(known) != len(set(known)):
            found = f"{len(known)}, of them {len(set(known))} different"
            yield differs(f"{name}: hashes of the run", "each once", found, block_id)
        if not 0 <= run.group_id < len(indexes):
            yield differs(f"{name}: group", f"0 to {len(indexes) - 1}", run.group_id, block_id)
            continue
        yield from _check_answers(run, indexes[run.group_id])


def _check_answers(run: BlockRun, index: PrefixIndex) -> Iterator[Finding]:
    runs = index.runs
    for block_id, block_hash in zip(run.block_ids, run.block_hashes, strict=False):
        if block_hash is None:
            if run.is_intact:
                yield differs(f"block {block_id}: hash in an intact run", "one", "none", block_id)
            continue
        answering = runs.get(block_hash)
        if run.indexed_by_head and block_hash != run.block_hashes[0]:
            continue  # see _check_heads
        if answering is not run:
            if run not in index._duplicates.get(block_hash, {}):
                where = f"in the index of group {run.group_id} under {short(block_hash)}"
                yield differs(f"block {block_id}: cached", where, "it in no index", block_id)
            if run.is_intact:
                what = f"block {block_id}: what answers for {short(block_hash)} of an intact run"
                yield differs(what, "this run", repr(answering), block_id)


def short(block_hash: bytes | None) -> str:
    """A hash for a message."""
    return "no hash" if block_hash is None else f"hash {block_hash.hex()[:16]}"
