"""Operations of the calls that a running scheduler makes of a manager.

Nothing here is of one manager: what is read of a request are vLLM's attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vllm_kvplug.trace.operations import (
    HITS_EMPTY,
    HITS_LOOKUP,
    HITS_OTHER,
    REQUEST_ID_METHODS,
    REQUEST_METHODS,
    UNKNOWN_REQUEST,
    Operation,
    RequestState,
    answer_of,
    answer_of_error,
)

# The arguments of each method as a scheduler gives them, by position or keyword, beside the request or its id.


def _allocate_slots(
    num_new_tokens: int,
    num_new_computed_tokens: int = 0,
    new_computed_blocks: Any = None,
    num_lookahead_tokens: int = 0,
    num_external_computed_tokens: int = 0,
    delay_cache_blocks: bool = False,
    num_encoder_tokens: int = 0,
) -> dict[str, Any]:
    arguments: dict[str, Any] = {"num_new_tokens": num_new_tokens}
    if new_computed_blocks is not None:
        arguments["hits"] = new_computed_blocks  # its name is put in its place
    if num_new_computed_tokens:
        arguments["num_new_computed_tokens"] = num_new_computed_tokens
    if num_lookahead_tokens:
        arguments["num_lookahead_tokens"] = num_lookahead_tokens
    if num_external_computed_tokens:
        arguments["num_external_computed_tokens"] = num_external_computed_tokens
    if delay_cache_blocks:
        arguments["delay_cache_blocks"] = True
    if num_encoder_tokens:
        arguments["num_encoder_tokens"] = num_encoder_tokens
    return arguments


def _can_fit_full_sequence(**keywords: Any) -> dict[str, Any]:
    """As `allocate_slots`, without a step."""
    arguments = _allocate_slots(0, **keywords)
    del arguments["num_new_tokens"]
    return arguments


def _cache_blocks(num_computed_tokens: int) -> dict[str, Any]:
    return {"num_computed_tokens": num_computed_tokens}


def _remove_skipped_blocks(total_computed_tokens: int) -> dict[str, Any]:
    return {"total_computed_tokens": total_computed_tokens}


def _evict_blocks(block_ids: Any) -> dict[str, Any]:
    return {"block_ids": list(block_ids)}


def _no_arguments() -> dict[str, Any]:
    return {}


_ARGUMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "can_fit_full_sequence": _can_fit_full_sequence,
    "allocate_slots": _allocate_slots,
    "cache_blocks": _cache_blocks,
    "remove_skipped_blocks": _remove_skipped_blocks,
    "evict_blocks": _evict_blocks,
}
_ID_KEYWORDS = ("request_id", "running_request_id")


def repeatable(method: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The call's arguments such that they can be read twice: an iterator of block ids becomes a list."""
    return (list(args[0]),) if method == "evict_blocks" and args and isinstance(args[0], Iterator) else args


class LiveCalls:
    """Makes operations of the calls of a running scheduler: `begin` before the call, `end` or `fail` after it.

    It knows the requests that are alive by number. Nothing in it grows with the requests' lengths.

    Args:
        empty_blocks: the called manager's `empty_kv_cache_blocks`.
        reads_tokens: states carry token ids.
    """

    def __init__(self, empty_blocks: Any, *, reads_tokens: bool = False) -> None:
        self._empty_blocks = empty_blocks
        self._empty_answer = answer_of("allocate_slots", empty_blocks)
        self._reads_tokens = reads_tokens
        self._numbers: dict[str, int] = {}
        self._num_requests = 0
        # By request, the object that its last lookup answered; only ever compared.
        self._lookups: dict[int, int] = {}

    def begin(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
        """The operation of this call, still without its answer. Changes nothing of the request."""
        if method in REQUEST_METHODS:
            if args:
                request, rest = args[0], args[1:]
            else:
                kwargs = dict(kwargs)
                request, rest = kwargs.pop("request"), ()
            state = self._state(request)
            if method in ("allocate_slots", "can_fit_full_sequence"):
                arguments = _ARGUMENTS[method](*rest, **kwargs)
                if "hits" in arguments:
                    arguments["hits"] = self._name_of_hits(state.number, arguments["hits"])
            elif method == "cache_blocks":
                arguments = _cache_blocks(*rest, **kwargs)
            elif method == "free" and _is_finished(request):
                arguments = {"is_finished": True}
                del self._numbers[request.request_id]
            else:
                arguments = {}
            return Operation(method, arguments, state, state.number)
        if method in REQUEST_ID_METHODS:
            kwargs = dict(kwargs)
            if args:
                request_id, rest = args[0], args[1:]
            else:
                request_id, rest = kwargs.pop(next(name for name in _ID_KEYWORDS if name in kwargs)), ()
            arguments = _ARGUMENTS.get(method, _no_arguments)(*rest, **kwargs)
            return Operation(method, arguments, None, self._numbers.get(request_id, UNKNOWN_REQUEST))
        return Operation(method, _ARGUMENTS.get(method, _no_arguments)(*args, **kwargs))

    def end(self, operation: Operation, result: Any) -> Operation:
        """Put the answer into the operation, which is returned."""
        method = operation.method
        if result is self._empty_blocks:
            operation.answer = self._empty_answer
        else:
            operation.answer = answer_of(method, result)
        number = operation.request_number
        if number is not None:
            if method == "get_computed_blocks":
                self._lookups[number] = id(result[0])
            elif method == "free":
                self._lookups.pop(number, None)
            elif method == "allocate_slots" and number in self._lookups and result is not None:
                del self._lookups[number]
        return operation

    def fail(self, operation: Operation, error: BaseException) -> Operation:
        """The call raised."""
        operation.answer = answer_of_error(error)
        return operation

    def number_of(self, request_id: str) -> int:
        """The number of a request that is alive, else UNKNOWN_REQUEST."""
        return self._numbers.get(request_id, UNKNOWN_REQUEST)

    def _state(self, request: Any) -> RequestState:
        number = self._numbers.get(request.request_id)
        if number is None:
            number = self._numbers[request.request_id] = self._num_requests
            self._num_requests += 1
        return RequestState(
            number,
            request.num_tokens,
            request.num_computed_tokens,
            request.num_output_placeholders,
            request.num_preemptions,
            request.skip_reading_prefix_cache,
            request.block_hashes,
            request.all_token_ids if self._reads_tokens else None,
        )

    def _name_of_hits(self, number: int, blocks: Any) -> str:
        if blocks is self._empty_blocks:
            return HITS_EMPTY
        return HITS_LOOKUP if self._lookups.get(number) == id(blocks) else HITS_OTHER


def _is_finished(request: Any) -> bool:
    """Whether this `free` is the request's last call. One that cannot tell is taken for ended: should it come back, it
    counts as another request.
    """
    is_finished = getattr(request, "is_finished", None)
    return bool(is_finished()) if callable(is_finished) else True
