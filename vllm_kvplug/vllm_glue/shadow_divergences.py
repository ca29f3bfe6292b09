"""What a shadow has found: divergences, and how many requests had one."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_kvplug.trace.driver import Outcome
from vllm_kvplug.trace.operations import UNKNOWN_REQUEST, Operation

# The label `pools` of a divergence: whether both sides had agreed on everything up to that call, or it may follow from
# an earlier difference.
POOLS_SAME, POOLS_DIFFER = "same", "differ"


class Divergence(msgspec.Struct, frozen=True):
    """One, in full.

    Attributes:
        number: counts the divergences from 1.
        operation: the call's number, from 0; in a bundle's trace it has the same.
        request, request_id: the request's number in the trace, and its id; None for a call of no request.
        reason: what differs.
        pools: `same` or `differ`: whether everything before was equal.
        call: the method with its arguments, in the serving side's numbers.
        state: what a manager reads of the request.
        serving, follower: the two answers.
        adjusted: the follower was called with other arguments, because it had decided otherwise before.
        blocks_in_use: of each side, before and after the call.
        time: when, as ISO 8601 in UTC.
    """

    number: int
    operation: int
    request: int | None
    request_id: str | None
    method: str
    reason: str
    pools: str
    call: str
    state: dict[str, Any]
    serving: dict[str, Any]
    follower: dict[str, Any]
    adjusted: bool
    blocks_in_use: dict[str, tuple[int, int]]
    time: str

    def text(self) -> str:
        """For a log, over several lines."""
        of_request = "" if self.request_id is None else f" of request {self.request_id!r} (number {self.request})"
        before = "all calls before were equal" if self.pools == POOLS_SAME else "there were differences before"
        in_use = [f"{side} {before} and {after}" for side, (before, after) in self.blocks_in_use.items()]
        return "\n  ".join(
            [
                f"shadow: divergence {self.number}{of_request}: {self.reason} in {self.method}, {before}",
                f"call {self.operation}: {self.call}",
                *([f"request: {self.state}"] if self.state else []),
                f"serving:  {self.serving}",
                f"follower: {self.follower}{' (called with its own hits)' if self.adjusted else ''}",
                f"blocks in use, before and after: {', '.join(in_use)}",
            ]
        )


@dataclass
class _Record:
    """A request that is alive: its id, and the (method, reason) pairs that were counted for it."""

    request_id: str
    counted: set[tuple[str, str]] = field(default_factory=set)


class Tally:
    """Counts what diverged, each request once for each method and reason; at the exact level once in all.

    Attributes:
        num_calls_compared: calls that went to both.
        num_calls_skipped: calls that the follower could not be given, because of what it had decided before.
        num_requests_followed, num_requests_diverged: that were seen, and that diverged at least once.
        diverged_requests: by (method, reason, pools).
        diverged_calls: the same of calls that are of no request, or of one that is not known; each call counts.
        pools_are_same: whether no difference stands.
        has_stopped: the comparing has ended, because it failed.
        overhead_ns: spent on the follower and on comparing.
        first: the first divergences in full.
    """

    def __init__(self, *, is_exact: bool, max_first: int) -> None:
        self.num_calls_compared = 0
        self.num_calls_skipped = 0
        self.num_requests_followed = 0
        self.num_requests_diverged = 0
        self.diverged_requests: Counter[tuple[str, str, str]] = Counter()
        self.diverged_calls: Counter[tuple[str, str, str]] = Counter()
        self.pools_are_same = True
        self.has_stopped = False
        self.overhead_ns = 0
        self.first: list[Divergence] = []
        self._is_exact = is_exact
        self._max_first = max_first
        self._records: dict[int, _Record] = {}

    @property
    def compares(self) -> str:
        """`exact` while block ids are compared, else `decision`; `nothing` once the comparing has ended."""
        if self.has_stopped:
            return "nothing"
        return "exact" if self._is_exact and self.pools_are_same else "decision"

    @property
    def num_divergences(self) -> int:
        """All that were counted."""
        return sum(self.diverged_requests.values()) + sum(self.diverged_calls.values())

    def know(self, number: int, request_id: str) -> None:
        """The request of this number is alive."""
        if number not in self._records:
            self._records[number] = _Record(request_id)
            self.num_requests_followed += 1

    def living(self) -> list[tuple[int, str]]:
        """Number and id of the requests that are alive."""
        return [(number, record.request_id) for number, record in self._records.items()]

    def forget(self, number: int) -> None:
        """The request has ended."""
        self._records.pop(number, None)

    def note(
        self, operation: Operation, outcome: Outcome, reason: str, blocks_in_use: dict[str, tuple[int, int]]
    ) -> None:
        """A call diverged. It is counted unless its request was counted for that already."""
        pools = POOLS_SAME if self.pools_are_same else POOLS_DIFFER
        self.pools_are_same = False
        number = operation.request_number
        record = self._records.get(UNKNOWN_REQUEST if number is None else number)
        if record is None:
            self.diverged_calls[operation.method, reason, pools] += 1
        else:
            pair = (operation.method, reason)
            if pair in record.counted or (self._is_exact and record.counted):
                return
            self.num_requests_diverged += not record.counted
            record.counted.add(pair)
            self.diverged_requests[operation.method, reason, pools] += 1
        if len(self.first) < self._max_first:
            request_id = None if record is None else record.request_id
            self.first.append(self._divergence(operation, outcome, reason, pools, blocks_in_use, request_id))

    def _divergence(
        self,
        operation: Operation,
        outcome: Outcome,
        reason: str,
        pools: str,
        blocks_in_use: dict[str, tuple[int, int]],
        request_id: str | None,
    ) -> Divergence:
        state = operation.request
        return Divergence(
            number=self.num_divergences,
            operation=operation.number,
            request=operation.request_number,
            request_id=request_id,
            method=operation.method,
            reason=reason,
            pools=pools,
            call=str(operation),
            state={}
            if state is None
            else {
                "num_tokens": state.num_tokens,
                "num_computed_tokens": state.num_computed_tokens,
                "num_output_placeholders": state.num_output_placeholders,
                "num_preemptions": state.num_preemptions,
                "skip_reading_prefix_cache": state.skip_reading_prefix_cache,
                "num_block_hashes": len(state.block_hashes),
            },
            serving=_shown(operation.answer),
            follower=_shown(outcome.answer),
            adjusted=outcome.is_adjusted,
            blocks_in_use=blocks_in_use,
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )

    def summary(self) -> dict[str, Any]:
        """What is compared now, and the counts, as plain values; counts by method, reason and pools are rows that end
        with the count.
        """
        return {
            "compares": self.compares,
            "overhead_s": self.overhead_ns / 1e9,
            "num_calls_compared": self.num_calls_compared,
            "num_calls_skipped": self.num_calls_skipped,
            "num_requests_followed": self.num_requests_followed,
            "num_requests_diverged": self.num_requests_diverged,
            "diverged_requests": [[*key, count] for key, count in sorted(self.diverged_requests.items())],
            "diverged_calls": [[*key, count] for key, count in sorted(self.diverged_calls.items())],
        }


def _shown(answer: Any) -> dict[str, Any]:
    """An answer without the fields that its method does not have."""
    return {} if answer is None else msgspec.to_builtins(answer)
