"""A call at the contract between scheduler and manager, in plain values, and the manager's answer to it.

`live_calls.py` makes operations of the calls that a running scheduler makes; `driver.py` makes calls of operations
again, on any manager; `format.py` makes lines of them. Nothing here is of one manager: of an answer is read what the
contract says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

# Methods that are called with a request, and with a request's id.
REQUEST_METHODS = ("get_computed_blocks", "can_fit_full_sequence", "allocate_slots", "cache_blocks", "free")
REQUEST_ID_METHODS = ("get_blocks", "get_block_ids", "get_num_common_prefix_blocks", "remove_skipped_blocks")
# Calls that not every supported vLLM's scheduler makes: a manager need not have them.
VERSIONS_METHODS = ("can_fit_full_sequence", "take_new_block_ids")
METHODS = (
    "new_step_starts",
    *REQUEST_METHODS,
    *REQUEST_ID_METHODS,
    "take_new_block_ids",
    "take_events",
    "evict_blocks",
    "reset_prefix_cache",
    "make_prefix_cache_stats",
)
# The number of a request that was never seen, or has ended.
UNKNOWN_REQUEST = -1

# How `allocate_slots` and `can_fit_full_sequence` were given their new_computed_blocks.
HITS_ABSENT = "absent"  # None, or left out
HITS_EMPTY = "empty"  # the manager's empty_kv_cache_blocks
HITS_LOOKUP = "lookup"  # the answer of the request's last lookup
HITS_OTHER = "other"  # another object

# A row of more block ids is written as a text, count and digest.
MAX_FULL_ROW_BLOCKS = 16

# Block ids of one group; as a text: see `short_row`.
Row = list[int] | str


class RequestState(msgspec.Struct, gc=False):
    """What a manager can read of a request when it is called.

    Attributes:
        number: stands for its id; counts the requests of a trace from 0.
        num_tokens: prompt and output.
        num_computed_tokens, num_output_placeholders, num_preemptions, skip_reading_prefix_cache: vLLM's.
        block_hashes: all of them. Of a live call it is the request's own list, which goes on growing.
        token_ids: all of them, where they were asked for.
    """

    number: int
    num_tokens: int
    num_computed_tokens: int
    num_output_placeholders: int
    num_preemptions: int
    skip_reading_prefix_cache: bool
    block_hashes: Sequence[bytes]
    token_ids: Sequence[int] | None = None


class Answer(msgspec.Struct, omit_defaults=True, gc=False):
    """What a manager answered. Fields that its method does not have keep their defaults.

    Attributes:
        blocks: `blocks[group]`, a row of block ids.
        num_hit_tokens: of a lookup.
        refused: `allocate_slots` answered None.
        numbers: the list of ints of `get_num_common_prefix_blocks` and `take_new_block_ids`.
        counts: of `take_events`, by event type, the block hashes that they name (or the events, where they name none);
            of `make_prefix_cache_stats` the numbers by name.
        done: of `reset_prefix_cache`, and whether `can_fit_full_sequence`.
        error: the type's name of the exception that came instead of an answer.
    """

    blocks: list[Row] | None = None
    num_hit_tokens: int | None = None
    refused: bool = False
    numbers: list[int] | None = None
    counts: dict[str, int] | None = None
    done: bool | None = None
    error: str | None = None


class Operation(msgspec.Struct, gc=False):
    """One call, and the recorded (or serving) manager's answer.

    Attributes:
        method: one of `METHODS`.
        arguments: plain values by name, those that differ from the method's defaults only. `allocate_slots`:
            num_new_tokens, num_new_computed_tokens, hits (one of HITS_*; absent if left out), num_lookahead_tokens,
            num_external_computed_tokens, delay_cache_blocks, num_encoder_tokens. `can_fit_full_sequence`:
            num_new_computed_tokens, hits, num_external_computed_tokens, num_encoder_tokens. `cache_blocks`:
            num_computed_tokens. `remove_skipped_blocks`: total_computed_tokens. `evict_blocks`: block_ids. `free`:
            is_finished, whether the request has ended and is not just preempted.
        request: its state, for REQUEST_METHODS.
        request_number: for REQUEST_METHODS and REQUEST_ID_METHODS.
        answer: what the manager answered.
        number: which operation of the trace this is, from 0.
        time_us: microseconds since the trace began.
    """

    method: str
    arguments: dict[str, Any]
    request: RequestState | None = None
    request_number: int | None = None
    answer: Answer = msgspec.field(default_factory=Answer)
    number: int = 0
    time_us: int = 0

    def __str__(self) -> str:
        parts = [] if self.request_number is None else [f"request {self.request_number}"]
        parts += [f"{name}={value}" for name, value in self.arguments.items()]
        return f"{self.method}({', '.join(parts)})"


NOTHING = Answer()
REFUSED = Answer(refused=True)


def _rows(blocks: Any) -> list[Row]:
    rows = blocks if isinstance(blocks, tuple) else blocks.get_block_ids()
    return [list(row) for row in rows]


def _lookup_answer(result: Any) -> Answer:
    blocks, num_hit_tokens = result
    return Answer(blocks=_rows(blocks), num_hit_tokens=int(num_hit_tokens))


def _event_counts(events: Any) -> Answer:
    counts: dict[str, int] = {}
    for event in events or ():
        name = type(event).__name__
        counts[name] = counts.get(name, 0) + len(getattr(event, "block_hashes", (None,)))
    return Answer(counts=counts)


def _stats_counts(stats: Any) -> Answer:
    if stats is None:
        return NOTHING
    numbers = {name: int(value) for name, value in vars(stats).items() if isinstance(value, (bool, int))}
    return Answer(counts=numbers)


_ANSWERS: dict[str, Callable[[Any], Answer]] = {
    "get_computed_blocks": _lookup_answer,
    "allocate_slots": lambda result: REFUSED if result is None else Answer(blocks=_rows(result)),
    "get_blocks": lambda result: Answer(blocks=_rows(result)),
    "get_block_ids": lambda result: Answer(blocks=_rows(result)),
    "get_num_common_prefix_blocks": lambda result: Answer(numbers=list(result)),
    "take_new_block_ids": lambda result: Answer(numbers=list(result)),
    "take_events": _event_counts,
    "make_prefix_cache_stats": _stats_counts,
    "reset_prefix_cache": lambda result: Answer(done=bool(result)),
    "can_fit_full_sequence": lambda result: Answer(done=bool(result)),
}


def answer_of(method: str, result: Any) -> Answer:
    """The plain answer: of vLLM's manager, ours or a third party's. Block ids are copied."""
    make = _ANSWERS.get(method)
    return NOTHING if make is None else make(result)


def answer_of_error(error: BaseException) -> Answer:
    """The answer of a call that raised. Its message stays out: it may name what no trace may tell."""
    return Answer(error=type(error).__name__)


def short_row(row: Row) -> Row:
    """The row as it is written: itself, or `COUNT:DIGEST` where it is long."""
    if isinstance(row, str) or len(row) <= MAX_FULL_ROW_BLOCKS:
        return row
    digest = blake2b(",".join(map(str, row)).encode(), digest_size=8).hexdigest()
    return f"{len(row)}:{digest}"


def equal_rows(one: list[Row] | None, other: list[Row] | None) -> bool:
    """Whether both name the same blocks; of a row written short only that is known."""
    if one is None or other is None or len(one) != len(other):
        return one is other
    return all(
        a == b if isinstance(a, list) and isinstance(b, list) else short_row(a) == short_row(b)
        for a, b in zip(one, other, strict=True)
    )


def num_blocks_of(row: Row) -> int:
    """How many block ids the row has."""
    return int(row.partition(":")[0]) if isinstance(row, str) else len(row)
