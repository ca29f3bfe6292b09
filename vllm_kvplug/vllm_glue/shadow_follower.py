"""The following side of a shadow: a manager that gets the serving side's calls as its own, and the comparison.

The follower works with stand-ins, with its own blocks and with its own hits (`trace/driver.py`), so that nothing it
does can reach the serving side or a request.

What is compared after each call that the follower was given:

- at both levels: the hit tokens of a lookup, whether `allocate_slots` admits, by how many the blocks in use grow or
  shrink, and whether `reset_prefix_cache` was done;
- at the exact level too, as long as nothing has differed: block ids, common prefixes, the blocks to be zeroed, and how
  many blocks the events say to be stored. After the first difference the two pools hand out different blocks, and ids
  say nothing any more.

Not compared, because vLLM's own are publicly wrong there (docs/deviations.md): statistics of lookups (F10), events of
removals (F13), how often a block is named to be zeroed (F14).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_kvplug.geometry import CacheGeometry
from vllm_kvplug.trace.driver import ManagerDriver, Outcome
from vllm_kvplug.trace.live_calls import LiveCalls
from vllm_kvplug.trace.operations import Answer, Operation, equal_rows
from vllm_kvplug.vllm_glue.shadow_divergences import Tally


class FollowerError(Exception):
    """The following manager raised; the cause is what it raised."""


class Follower:
    """Drives `manager` by the calls that `serving` gets, and tells `tally` what differs.

    Args:
        serving, manager: both sides, newly constructed.
        num_blocks: of each side's pool, the null block included.
        is_exact: the level.
        record: gets each operation with the serving side's answer, before the follower does, until it answers False.
    """

    def __init__(
        self,
        serving: Any,
        manager: Any,
        num_blocks: int,
        tally: Tally,
        *,
        is_exact: bool,
        record: Callable[[Operation], bool] | None = None,
    ) -> None:
        self.tally = tally
        self._serving = serving
        self.manager = manager
        self._is_exact = is_exact
        self._record = record
        self._calls = LiveCalls(serving.empty_kv_cache_blocks)
        self._driver = ManagerDriver(manager)
        self._num_operations = 0
        self._sizes = (_num_usable_blocks(serving, num_blocks), _num_usable_blocks(manager, num_blocks))
        self._usages = (-1.0, -1.0)
        self._in_use = self._blocks_in_use()
        self._empty_blocks = (serving.empty_kv_cache_blocks, manager.empty_kv_cache_blocks)
        # By request: its hashes, copied.
        self._hashes: dict[int, list[bytes]] = {}

    def begin(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
        """Before the serving side is called."""
        operation = self._calls.begin(method, args, kwargs)
        number = operation.request_number
        if operation.request is not None and number not in self._hashes:
            request = args[0] if args else kwargs["request"]
            self._hashes[operation.request.number] = []
            self.tally.know(operation.request.number, request.request_id)
        return operation

    def end(self, operation: Operation, result: Any) -> None:
        """After it: the follower's turn, and the comparison.

        Raises:
            FollowerError: the follower raised.
        """
        operation.number = self._num_operations
        self._num_operations += 1
        self._calls.end(operation, result)
        if self._record is not None and not self._record(operation):
            self._record = None  # the trace is full: decode steps go the shortest way again
        if operation.request is not None:
            operation.request.block_hashes = self._own_hashes(operation.request.number, operation.request.block_hashes)
        if operation.method == "evict_blocks" and self.tally.compares != "exact":
            operation.arguments["block_ids"] = self._own_block_ids(operation.arguments["block_ids"])
        outcome = self._driver.apply(operation)
        if outcome.error is not None:
            raise FollowerError(operation.method) from outcome.error
        self._compare(operation, outcome)
        if operation.method == "free" and operation.arguments.get("is_finished"):
            assert operation.request_number is not None
            self._hashes.pop(operation.request_number, None)
            self.tally.forget(operation.request_number)

    def step(self, request: Any, num_new_tokens: int, num_lookahead_tokens: int, result: Any) -> bool:
        """After the serving side's `allocate_slots` for a running request: the follower's, by the shortest way, since
        there is one for each request in each step. False, and nothing was done, where more is to be thought of.

        Raises:
            FollowerError: the follower raised.
        """
        number = self._calls.number_of(request.request_id)
        stand_in = self._driver.steady(number)
        if stand_in is None or result is None or self._record is not None:
            return False
        stand_in.num_tokens = request.num_tokens
        stand_in.num_computed_tokens = request.num_computed_tokens
        stand_in.num_output_placeholders = request.num_output_placeholders
        stand_in.num_preemptions = request.num_preemptions
        stand_in.skip_reading_prefix_cache = request.skip_reading_prefix_cache
        stand_in.block_hashes = self._own_hashes(number, request.block_hashes)
        try:
            own = self.manager.allocate_slots(stand_in, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens)
        except Exception as error:
            raise FollowerError("allocate_slots") from error
        if own is not None and self._are_equal_steps(result, own):
            self._num_operations += 1
            self.tally.num_calls_compared += 1
            return True
        # The long way, with the answer that is there already.
        keywords = {"num_lookahead_tokens": num_lookahead_tokens}
        operation = self._calls.begin("allocate_slots", (request, num_new_tokens), keywords)
        self._driver.manager = _Answered(self.manager, own)
        try:
            self.end(operation, result)
        finally:
            self._driver.manager = self.manager
        return True

    def _are_equal_steps(self, result: Any, own: Any) -> bool:
        """Whether two answers of `allocate_slots` agree at the level in force. If so, the blocks in use are noted."""
        has_equal_blocks = (
            not self._is_exact
            or not self.tally.pools_are_same
            or (result is self._empty_blocks[0] and own is self._empty_blocks[1])
            or result.get_block_ids() == own.get_block_ids()
        )
        if not has_equal_blocks:
            return False
        if self._serving.usage == self._usages[0] and self.manager.usage == self._usages[1]:
            return True
        before, after = self._in_use, self._blocks_in_use()
        if after[0] - before[0] != after[1] - before[1]:
            return False
        self._in_use = after
        return True

    def _own_hashes(self, number: int, live: Any) -> list[bytes]:
        """A copy of the request's hashes, kept up to date: each hash covers all before it, so the last one tells."""
        own = self._hashes[number]
        num_known = len(own)
        if num_known > len(live) or (num_known and own[-1] != live[num_known - 1]):
            own[:] = live
        elif num_known < len(live):
            own.extend(live[num_known:])
        return own

    def _own_block_ids(self, block_ids: Any) -> list[int]:
        """The follower's blocks in the places where the serving side's requests have these. Of a block that nobody
        holds the place is not known.
        """
        wanted, own = set(block_ids), []
        # Past a recorder on the instance: no scheduler asks this.
        read = type(self._serving).get_block_ids
        for number, request_id in self.tally.living():
            own_id = self._driver.request_id(number)
            if own_id is None:
                continue
            for row, own_row in zip(read(self._serving, request_id), self.manager.get_block_ids(own_id), strict=True):
                own += [mine for theirs, mine in zip(row, own_row, strict=False) if theirs in wanted]
        return own

    def _blocks_in_use(self) -> tuple[int, int]:
        self._usages = (self._serving.usage, self.manager.usage)
        return round(self._usages[0] * self._sizes[0]), round(self._usages[1] * self._sizes[1])

    def _compare(self, operation: Operation, outcome: Outcome) -> None:
        before, after = self._in_use, self._blocks_in_use()
        self._in_use = after
        if outcome.skipped is not None:
            self.tally.num_calls_skipped += 1
            return
        self.tally.num_calls_compared += 1
        theirs, own = operation.answer, outcome.answer
        assert own is not None, operation
        reason = _decision(theirs, own)
        if reason is None and after[0] - before[0] != after[1] - before[1]:
            reason = "blocks_in_use"
        if reason is None and self._is_exact and self.tally.pools_are_same:
            reason = _exactly(operation.method, theirs, own)
        if reason is not None:
            in_use = {"serving": (before[0], after[0]), "follower": (before[1], after[1])}
            self.tally.note(operation, outcome, reason, in_use)
        elif operation.method == "reset_prefix_cache" and operation.answer.done and not self._is_exact:
            # Both pools are empty and know nothing: they decide alike from here on.
            self.tally.pools_are_same = True


class _Answered:
    """The follower, whose answer to its next `allocate_slots` is known."""

    def __init__(self, manager: Any, answer: Any) -> None:
        self._manager = manager
        self._answer = answer

    def allocate_slots(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def _decision(theirs: Answer, own: Answer) -> str | None:
    """What differs in hits, admission and reset; an answer without one of them has its default."""
    if theirs.refused != own.refused:
        return "refused" if own.refused else "admitted"
    if theirs.num_hit_tokens != own.num_hit_tokens:
        return "hit_tokens"
    return "done" if theirs.done != own.done else None


def _common_prefix(theirs: Answer, own: Answer) -> str | None:
    return "num_blocks" if theirs.numbers != own.numbers else None


def _blocks_to_zero(theirs: Answer, own: Answer) -> str | None:
    return "block_ids" if set(theirs.numbers or ()) != set(own.numbers or ()) else None


def _events(theirs: Answer, own: Answer) -> str | None:
    names = ("BlockStored", "AllBlocksCleared")
    counts = [[(answer.counts or {}).get(name, 0) for name in names] for answer in (theirs, own)]
    return "events" if counts[0] != counts[1] else None


_EXACT: dict[str, Callable[[Answer, Answer], str | None]] = {
    "get_num_common_prefix_blocks": _common_prefix,
    "take_new_block_ids": _blocks_to_zero,
    "take_events": _events,
}


def _exactly(method: str, theirs: Answer, own: Answer) -> str | None:
    """What differs in what only the exact level compares."""
    if theirs.blocks is not own.blocks and not equal_rows(theirs.blocks, own.blocks):
        return "block_ids"
    compare = _EXACT.get(method)
    return None if compare is None else compare(theirs, own)


def _num_usable_blocks(manager: Any, num_blocks: int) -> int:
    """What `usage` is a part of: all blocks but the null block, and, in kvplug, but those that are reserved."""
    geometry = getattr(manager, "geometry", None)
    if isinstance(geometry, CacheGeometry):
        return geometry.num_usable_blocks
    return num_blocks - 1
