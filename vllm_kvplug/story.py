"""What befell each block lately, and who held it: for the message of a broken invariant.

`BlockStory` is an observer; whoever wraps the manager's calls tells it which one is under way. Memory is bounded by the
number of blocks: 8 events and 4 owners for each, an event being shared by the blocks that it befell together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvplug.block_states import hash_and_group, num_holders
from vllm_kvplug.observers import Observer

if TYPE_CHECKING:
    from vllm_kvplug.manager import CacheManager

NUM_EVENTS_PER_BLOCK = 8
NUM_OWNERS_PER_BLOCK = 4
# Of a request's table, so many positions are shown.
_NUM_SHOWN_POSITIONS = 32


class CallRecord(NamedTuple):
    """One call of the manager.

    Attributes:
        number: the manager's calls are counted from 1.
        name: of the method; None: no call was under way, the one of this number was the last before.
        request_id: the request it was for, if any.
    """

    number: int
    name: str | None
    request_id: str | None

    def __str__(self) -> str:
        if self.name is None:
            return f"outside any call, after call {self.number}"
        of_request = "" if self.request_id is None else f" of request {self.request_id!r}"
        return f"call {self.number}, {self.name}{of_request}"


class BlockEvent(NamedTuple):
    """What befell a block: `what` is one of taken, hit, released, cached in group ..., evicted, withdrawn, reset."""

    what: str
    call: CallRecord


class BlockStory(Observer):
    """Remembers the last events and owners of each block.

    Attributes:
        call: the manager's call under way, or that there is none.
    """

    def __init__(self) -> None:
        self.call = CallRecord(0, None, None)
        self._events: dict[int, list[BlockEvent]] = {}
        self._owners: dict[int, list[CallRecord]] = {}
        self._cached_block_ids: set[int] = set()

    def begin_call(self, name: str, request_id: str | None) -> None:
        """A call of the manager begins: what happens from now on is its doing."""
        self.call = CallRecord(self.call.number + 1, name, request_id)

    def end_call(self) -> None:
        """The call is over."""
        self.call = CallRecord(self.call.number, None, None)

    def events(self, block_id: int) -> Sequence[BlockEvent]:
        """The last events of a block, oldest first."""
        return self._events.get(block_id, ())

    def owners(self, block_id: int) -> Sequence[CallRecord]:
        """The calls by which requests came to hold the block last, oldest first."""
        return self._owners.get(block_id, ())

    def on_take(self, block_ids: Sequence[int]) -> None:
        self._note("taken", block_ids)
        self._note_owner(block_ids)

    def on_acquire(self, block_ids: Sequence[int]) -> None:
        self._note("hit", block_ids)
        self._note_owner(block_ids)

    def on_release(self, block_ids: Sequence[int]) -> None:
        self._note("released", block_ids)

    def on_cache(
        self,
        request: Any,
        group_id: int,
        num_tokens_per_block: int,
        block_ids: Sequence[int],
        block_hashes: Sequence[bytes],
        first_block: int,
        end_block: int,
    ) -> None:
        cached = block_ids[first_block:end_block]
        self._note(f"cached in group {group_id}", cached)
        self._cached_block_ids.update(cached)

    def on_evict(self, block_id: int, group_id: int, block_hash: bytes, is_last_copy: bool) -> None:
        self._note("evicted", (block_id,))
        self._cached_block_ids.discard(block_id)

    def on_withdraw(self, block_ids: Collection[int]) -> None:
        self._note("withdrawn", block_ids)

    def on_reset(self) -> None:
        self._note("reset", self._cached_block_ids)
        self._cached_block_ids.clear()

    def _note(self, what: str, block_ids: Iterable[int]) -> None:
        event = BlockEvent(what, self.call)
        for block_id in block_ids:
            _append_bounded(self._events, block_id, event, NUM_EVENTS_PER_BLOCK)

    def _note_owner(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            _append_bounded(self._owners, block_id, self.call, NUM_OWNERS_PER_BLOCK)


def _append_bounded(rows: dict[int, list[Any]], block_id: int, entry: Any, max_entries: int) -> None:
    if block_id:  # the null block has no story
        row = rows.setdefault(block_id, [])
        row.append(entry)
        if len(row) > max_entries:
            del row[0]


def describe_block(manager: CacheManager, block_id: int, story: BlockStory | None) -> str:
    """A block's state and, where it was recorded, its story: some lines, none of them long."""
    pool = manager.pool
    if not 0 <= block_id < pool.num_blocks:
        return f"  block {block_id} is none of the pool's, 0 to {pool.num_blocks - 1}"
    count = num_holders(pool, block_id)
    holders = _holders(manager, block_id)
    is_free = any(free_id == block_id for free_id in pool.free_block_ids())
    cached_as = hash_and_group(pool, block_id)
    cached = "not cached"
    if cached_as is not None:
        cached = f"cached in group {cached_as[1]} as {cached_as[0].hex()[:16]}"
    lines = [
        f"  block {block_id} now: references {count}, held by {', '.join(holders) or 'nobody'}; "
        f"{'free' if is_free else 'not free'}; {cached}"
    ]
    if story is None:
        return "\n".join([*lines, "  its events were not recorded: setting check_invariants is off"])
    owners = [f"request {call.request_id!r} (call {call.number})" for call in story.owners(block_id)]
    lines.append(f"  last owners, oldest first: {', '.join(owners) or 'none'}")
    lines.append("  last events, oldest first:")
    lines += [f"    {event.call}: {event.what}" for event in story.events(block_id)] or ["    none"]
    return "\n".join(lines)


def _holders(manager: CacheManager, block_id: int) -> list[str]:
    return [
        f"request {request_id!r} (group {group.group_id}, position {position})"
        for group in manager.groups
        for request_id, table in group.tables.items()
        for position, held_id in enumerate(table.block_ids)
        if held_id == block_id
    ]


def describe_request(manager: CacheManager, request_id: str) -> str:
    """A request's block tables, by group, cut where they are long."""
    lines = []
    for group in manager.groups:
        table = group.tables.get(request_id)
        if table is None:
            lines.append(f"  request {request_id!r} now, group {group.group_id}: no table")
            continue
        row = table.block_ids
        more = f" and {len(row) - _NUM_SHOWN_POSITIONS} more" if len(row) > _NUM_SHOWN_POSITIONS else ""
        lines.append(
            f"  request {request_id!r} now, group {group.group_id}: blocks {row[:_NUM_SHOWN_POSITIONS]}{more}, "
            f"{table.num_cached_blocks} counted as cached, first unpublished {table.first_unpublished}"
        )
    return "\n".join(lines)
