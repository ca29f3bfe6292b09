"""Whether a driven manager answered as the recorded one, and what of a difference is a known one.

Block ids, hit tokens, None answers and the order of everything else are compared as they are. Three answers differ
between vLLM's manager and ours by public faults (docs/deviations.md), and between managers of different classes these
differences are excused by their ids: statistics (F10), BlockRemoved events (F13), block ids named twice (F14).
"""

from __future__ import annotations

from typing import NamedTuple

from vllm_kvplug.trace.operations import Answer, Operation, Row, equal_rows, num_blocks_of

_REMOVED = "BlockRemoved"


class Difference(NamedTuple):
    """An answer that differs.

    Attributes:
        operation: with the recorded answer.
        expected, found: the part of the answers that differs.
        excuse: the id of the deviation that it is; None: none is known.
    """

    operation: Operation
    expected: str
    found: str
    excuse: str | None = None

    def __str__(self) -> str:
        return (
            f"operation {self.operation.number}, {self.operation}: expected {self.expected}, found {self.found}"
            f"{_story(self.operation)}"
        )


def compare(operation: Operation, found: Answer, *, same_class: bool) -> Difference | None:
    """The first part of the answer that is not the recorded one; None: it is equal.

    Args:
        operation: with the recorded answer.
        found: the driven manager's.
        same_class: recorded and driven manager are of one class, so that nothing is excused.
    """
    expected = operation.answer
    # Who raises at a call raises another type of error in each manager.
    if (expected.error is None) != (found.error is None) or expected.refused != found.refused:
        return Difference(operation, outcome_of(expected), outcome_of(found))
    if expected.num_hit_tokens != found.num_hit_tokens:
        return Difference(operation, f"{expected.num_hit_tokens} hit tokens", f"{found.num_hit_tokens}")
    if not equal_rows(expected.blocks, found.blocks):
        return Difference(operation, f"blocks {_told(expected.blocks)}", _told(found.blocks))
    if (expected.numbers, expected.counts, expected.done) != (found.numbers, found.counts, found.done):
        excuse = None if same_class else _excuse(operation.method, expected, found)
        return Difference(operation, outcome_of(expected), outcome_of(found), excuse)
    return None


def _excuse(method: str, expected: Answer, found: Answer) -> str | None:
    if method == "make_prefix_cache_stats":
        return "F10"
    if method == "take_new_block_ids":
        once, once_found = (list(dict.fromkeys(answer.numbers or ())) for answer in (expected, found))
        return "F14" if once == once_found else None
    rest, rest_found = (
        {name: count for name, count in (answer.counts or {}).items() if name != _REMOVED}
        for answer in (expected, found)
    )
    return "F13" if method == "take_events" and rest == rest_found else None


def outcome_of(answer: Answer) -> str:
    """An answer in words."""
    if answer.error is not None:
        return f"{answer.error} raised"
    if answer.refused:
        return "None"
    parts = [
        f"{answer.num_hit_tokens} hit tokens" if answer.num_hit_tokens is not None else "",
        f"blocks {_told(answer.blocks)}" if answer.blocks is not None else "",
        *(str(value) for value in (answer.numbers, answer.counts, answer.done) if value is not None),
    ]
    return ", ".join(part for part in parts if part) or "nothing"


def _told(rows: list[Row] | None) -> str:
    if rows is None:
        return "none"
    return " | ".join(
        f"{num_blocks_of(row)} blocks (digest {row.partition(':')[2]})" if isinstance(row, str) else str(row)
        for row in rows
    )


def _story(operation: Operation) -> str:
    state = operation.request
    if state is None:
        return ""
    return (
        f" (the request has {state.num_tokens} tokens, {state.num_computed_tokens} of them computed, "
        f"{len(state.block_hashes)} block hashes, {state.num_preemptions} preemptions)"
    )
