"""Drives one manager from operations that another manager answered: in a replay, or as the follower of a live one.

The driven manager works with its own blocks and its own prefix hits, up to the same total of tokens as the recorded
one after each step; while both decide alike, it gets the very arguments that were recorded. Where they decide
otherwise:

- Its own hits are shorter or longer: its step computes more or fewer tokens. Hits that reach the recorded total
  already are followed by one new token, and later steps are skipped until the recorded total has passed its own.
- It refuses what was admitted: the request is left out. A running one gives its blocks back first, as a preempted one.
  It comes back when the trace has it looked up and admitted again; with `readmits_refused`, already at the request's
  next step, by a lookup and a step up to the recorded total.
- It admits what was refused: a waiting request is freed again at once, and the blocks that it got are not cached
  (`delay_cache_blocks`), since nothing is computed into them; one that holds blocks keeps the new ones, too, and is
  ahead of the recorded total until that has passed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from vllm_kvplug.trace.operations import (
    HITS_ABSENT,
    HITS_OTHER,
    REQUEST_ID_METHODS,
    UNKNOWN_REQUEST,
    Answer,
    Operation,
    answer_of,
    answer_of_error,
)
from vllm_kvplug.trace.seat import Seat
from vllm_kvplug.trace.stand_in import StandIn

# Why an operation was not carried out.
LEFT_OUT = "left out: refused before, and not admitted again yet"
AHEAD = "ahead: its own prefix hits or slots reach further"
FOREIGN_BLOCKS = "block ids of another manager"
UNKNOWN_CALL = "no call of this manager's vLLM"


class Outcome(msgspec.Struct, gc=False):
    """What became of one operation.

    Attributes:
        answer: the driven manager's; None where it was not called.
        skipped: why it was not called.
        error: what it raised.
        is_adjusted: it was called with other arguments than were recorded, because it had decided otherwise before.
        duration_ns: of the manager's calls alone.
    """

    answer: Answer | None = None
    skipped: str | None = None
    error: Exception | None = None
    is_adjusted: bool = False
    duration_ns: int = 0


class ManagerDriver:
    """Drives `manager`, operation by operation, see the module.

    Args:
        manager: keeps the contract, and has seen no request yet.
        readmits_refused: a request that was left out comes back at its next step.
        takes_block_ids: its block ids are the recorded ones, so that `evict_blocks` is passed on; else it is skipped.

    Attributes:
        counts: hit_tokens (of admissions), admissions, preemptions (recorded and its own), refusals (of what was
            admitted), withdrawals, readmissions, skipped.
    """

    def __init__(self, manager: Any, *, readmits_refused: bool = False, takes_block_ids: bool = True) -> None:
        self.manager = manager
        self.counts: Counter[str] = Counter()
        self._readmits_refused = readmits_refused
        self._takes_block_ids = takes_block_ids
        self._seats: dict[int, Seat] = {}
        self._duration_ns = 0
        self._handlers: dict[str, Callable[[Operation], Outcome]] = {
            "get_computed_blocks": self._look_up,
            "can_fit_full_sequence": self._can_fit,
            "allocate_slots": self._allocate,
            "cache_blocks": self._cache_blocks,
            "free": self._free,
            "evict_blocks": self._evict_blocks,
            **dict.fromkeys(REQUEST_ID_METHODS, self._ask_by_id),
        }

    def apply(self, operation: Operation) -> Outcome:
        """Carry out one operation. What the manager raises is in the outcome."""
        self._duration_ns = 0
        handler = self._handlers.get(operation.method)
        try:
            if not hasattr(self.manager, operation.method):
                outcome = Outcome(skipped=UNKNOWN_CALL)
            elif handler is not None:
                outcome = handler(operation)
            else:
                outcome = Outcome(answer_of(operation.method, self._call(operation.method)))
        except Exception as error:  # whatever another package's manager raises
            outcome = self._raised(operation, error)
        if outcome.skipped is not None:
            self.counts["skipped"] += 1
        outcome.duration_ns = self._duration_ns
        return outcome

    def request_id(self, number: int) -> str | None:
        """What the driven manager calls a request, for `get_block_ids`; None where it was left out or has ended."""
        seat = self._seats.get(number)
        return None if seat is None or seat.is_left_out else seat.stand_in.request_id

    def steady(self, number: int) -> StandIn | None:
        """The request's stand-in, while nothing about the request was ever decided otherwise: its steps are the
        recorded ones, and who follows live may call the manager with it by himself.
        """
        seat = self._seats.get(number)
        if seat is None or not seat.is_held or seat.num_ahead_tokens or seat.num_own_preemptions:
            return None
        return None if seat.lookup is not None else seat.stand_in

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        call = getattr(self.manager, method)
        started_ns = time.perf_counter_ns()
        try:
            return call(*args, **kwargs)
        finally:
            self._duration_ns += time.perf_counter_ns() - started_ns

    def _raised(self, operation: Operation, error: Exception) -> Outcome:
        seat = self._seats.get(operation.request_number) if operation.request_number is not None else None
        if seat is not None and operation.method == "allocate_slots" and operation.answer.error is None:
            # Nobody knows what the manager has of it now.
            seat.is_left_out, seat.is_held, seat.lookup, seat.num_ahead_tokens = True, False, None, 0
        return Outcome(answer_of_error(error), error=error)

    def _seat(self, operation: Operation) -> Seat:
        """The request's seat, its stand-in in the recorded state."""
        state = operation.request
        assert state is not None, operation.method
        seat = self._seats.get(state.number)
        if seat is None:
            seat = self._seats[state.number] = Seat(state)
        seat.stand_in.follow(state, seat.num_own_preemptions)
        return seat

    def _look_up(self, operation: Operation) -> Outcome:
        seat = self._seat(operation)
        seat.is_left_out, seat.is_known = False, True
        seat.lookup = result = self._call("get_computed_blocks", seat.stand_in)
        return Outcome(answer_of("get_computed_blocks", result))

    def _can_fit(self, operation: Operation) -> Outcome:
        seat, arguments = self._seat(operation), operation.arguments
        if seat.is_left_out:
            return Outcome(skipped=LEFT_OUT)
        blocks, num_hit_tokens = self._own_hits(seat, arguments)
        result = self._call(
            "can_fit_full_sequence",
            seat.stand_in,
            num_new_computed_tokens=num_hit_tokens,
            new_computed_blocks=blocks,
            num_external_computed_tokens=arguments.get("num_external_computed_tokens", 0),
            num_encoder_tokens=arguments.get("num_encoder_tokens", 0),
        )
        is_adjusted = num_hit_tokens != arguments.get("num_new_computed_tokens", 0)
        return Outcome(answer_of("can_fit_full_sequence", result), is_adjusted=is_adjusted)

    # Slots

    def _allocate(self, operation: Operation) -> Outcome:
        seat, arguments = self._seat(operation), operation.arguments
        num_recorded_hit_tokens = arguments.get("num_new_computed_tokens", 0)
        num_external_tokens = arguments.get("num_external_computed_tokens", 0)
        num_new_tokens = arguments["num_new_tokens"]
        num_started_tokens = seat.stand_in.num_computed_tokens
        num_reached_tokens = num_started_tokens + num_recorded_hit_tokens + num_external_tokens
        num_total_tokens = num_reached_tokens + num_new_tokens

        if seat.is_left_out:
            is_recorded_step = not operation.answer.refused and operation.answer.error is None
            if not (self._readmits_refused and is_recorded_step):
                return Outcome(skipped=LEFT_OUT)
            return self._readmit(operation, seat, num_total_tokens)

        blocks, num_hit_tokens = self._own_hits(seat, arguments)
        if seat.num_ahead_tokens:
            if num_total_tokens <= seat.num_ahead_tokens:
                return Outcome(skipped=AHEAD)
            num_started_tokens = max(num_started_tokens, seat.num_ahead_tokens)
            num_reached_tokens = max(num_reached_tokens, num_started_tokens)
            seat.stand_in.num_computed_tokens = num_started_tokens
        if num_external_tokens:
            # They bring it to the same token, from wherever its own hits end.
            num_external_tokens = max(0, num_reached_tokens - num_started_tokens - num_hit_tokens)
        num_own_tokens = num_started_tokens + num_hit_tokens + num_external_tokens
        num_own_new_tokens = num_total_tokens - num_own_tokens
        if num_own_new_tokens < (0 if num_external_tokens else 1) and num_own_tokens != num_reached_tokens:
            num_own_new_tokens = 1
        is_adjusted = num_own_new_tokens != num_new_tokens or num_hit_tokens != num_recorded_hit_tokens
        outcome = self._step(
            operation,
            seat,
            num_own_new_tokens,
            num_own_tokens + num_own_new_tokens,
            num_total_tokens,
            num_new_computed_tokens=num_hit_tokens,
            new_computed_blocks=blocks,
            num_lookahead_tokens=arguments.get("num_lookahead_tokens", 0),
            num_external_computed_tokens=num_external_tokens,
            delay_cache_blocks=arguments.get("delay_cache_blocks", False),
            num_encoder_tokens=arguments.get("num_encoder_tokens", 0),
        )
        outcome.is_adjusted = is_adjusted
        return outcome

    def _own_hits(self, seat: Seat, arguments: dict[str, Any]) -> tuple[Any, int]:
        """The arguments new_computed_blocks and num_new_computed_tokens."""
        hits = arguments.get("hits", HITS_ABSENT)
        if hits == HITS_ABSENT:
            return None, 0
        if hits == HITS_OTHER and not arguments.get("num_new_computed_tokens", 0):
            return self.manager.empty_kv_cache_blocks.new_empty(), 0
        if seat.lookup is not None:
            return seat.lookup
        if hits == HITS_OTHER:
            # Blocks of another request or none: what a manager must refuse. They are the recorded request's own here.
            num_hit_tokens = arguments["num_new_computed_tokens"]
            return self._call("get_blocks", seat.stand_in.request_id), num_hit_tokens
        return self.manager.empty_kv_cache_blocks, 0

    def _step(
        self,
        operation: Operation,
        seat: Seat,
        num_new_tokens: int,
        num_own_total_tokens: int,
        num_total_tokens: int,
        **keywords: Any,
    ) -> Outcome:
        """Call `allocate_slots`, and settle what the answer makes of the request."""
        num_hit_tokens = keywords["num_new_computed_tokens"]
        if operation.answer.refused and not seat.is_held:
            keywords["delay_cache_blocks"] = True
        is_admission = seat.lookup is not None and not seat.is_held
        seat.is_known = True
        if keywords["new_computed_blocks"] is None:
            # As a scheduler calls it for a running request, so that a manager's short way is taken.
            unset = [name for name, value in keywords.items() if not value and name != "num_lookahead_tokens"]
            for name in unset:
                del keywords[name]
        result = self._call("allocate_slots", seat.stand_in, num_new_tokens, **keywords)
        outcome = Outcome(answer_of("allocate_slots", result))
        is_recorded_step = not operation.answer.refused and operation.answer.error is None
        if result is None:
            if is_recorded_step:
                self._leave_out(seat)
            return outcome
        if is_recorded_step or seat.is_held:
            seat.is_held, seat.is_left_out, seat.lookup = True, False, None
            is_ahead = num_own_total_tokens > num_total_tokens or not is_recorded_step
            seat.num_ahead_tokens = num_own_total_tokens if is_ahead else 0
            if is_admission:
                self.counts["admissions"] += 1
                self.counts["hit_tokens"] += num_hit_tokens
        else:
            self._call("free", seat.stand_in)
            seat.lookup = None
        self.counts["withdrawals"] += not is_recorded_step
        return outcome

    def _leave_out(self, seat: Seat) -> None:
        self.counts["refusals"] += not seat.is_left_out
        if seat.is_held:
            self._call("free", seat.stand_in)
            self.counts["preemptions"] += 1
            seat.num_own_preemptions += 1
        seat.is_left_out, seat.is_held, seat.lookup, seat.num_ahead_tokens = True, False, None, 0

    def _readmit(self, operation: Operation, seat: Seat, num_total_tokens: int) -> Outcome:
        """As a scheduler resumes a preempted request: a lookup, and a step up to the recorded total."""
        seat.stand_in.num_computed_tokens = 0
        blocks, num_hit_tokens = seat.lookup = self._call("get_computed_blocks", seat.stand_in)
        num_new_tokens = max(num_total_tokens - num_hit_tokens, 1)
        outcome = self._step(
            operation,
            seat,
            num_new_tokens,
            num_hit_tokens + num_new_tokens,
            num_total_tokens,
            num_new_computed_tokens=num_hit_tokens,
            new_computed_blocks=blocks,
            num_lookahead_tokens=operation.arguments.get("num_lookahead_tokens", 0),
            num_encoder_tokens=operation.arguments.get("num_encoder_tokens", 0),
        )
        outcome.is_adjusted = True
        self.counts["readmissions"] += not seat.is_left_out
        return outcome

    # The rest of a request's calls

    def _cache_blocks(self, operation: Operation) -> Outcome:
        seat = self._seat(operation)
        if seat.is_left_out:
            return Outcome(skipped=LEFT_OUT)
        self._call("cache_blocks", seat.stand_in, operation.arguments["num_computed_tokens"])
        return Outcome(answer_of("cache_blocks", None))

    def _free(self, operation: Operation) -> Outcome:
        seat = self._seat(operation)
        is_finished = operation.arguments.get("is_finished", False)
        if is_finished:
            self._seats.pop(seat.number)
        was_left_out, was_held = seat.is_left_out, seat.is_held
        seat.is_left_out, seat.is_held, seat.lookup, seat.num_ahead_tokens = False, False, None, 0
        if was_left_out and not (is_finished and seat.is_known):
            return Outcome(skipped=LEFT_OUT)
        # Of a request that was left out it has nothing to free, but is to forget what it may have noted.
        seat.stand_in.has_ended = is_finished
        self._call("free", seat.stand_in)
        if was_left_out:
            return Outcome(skipped=LEFT_OUT)
        self.counts["preemptions"] += was_held and not is_finished
        return Outcome(answer_of("free", None))

    def _ask_by_id(self, operation: Operation) -> Outcome:
        number = operation.request_number
        if number == UNKNOWN_REQUEST:
            request_id = "unknown-request"
        else:
            seat = self._seats.get(number) if number is not None else None
            if seat is None or seat.is_left_out:
                return Outcome(skipped=LEFT_OUT)
            request_id = seat.stand_in.request_id
        if operation.method == "remove_skipped_blocks":
            num_tokens = operation.arguments["total_computed_tokens"]
            result = self._call(operation.method, request_id=request_id, total_computed_tokens=num_tokens)
        else:
            result = self._call(operation.method, request_id)
        return Outcome(answer_of(operation.method, result))

    def _evict_blocks(self, operation: Operation) -> Outcome:
        if not self._takes_block_ids:
            return Outcome(skipped=FOREIGN_BLOCKS)
        self._call("evict_blocks", set(operation.arguments["block_ids"]))
        return Outcome(answer_of("evict_blocks", None))
