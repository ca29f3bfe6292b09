"""The lines of a trace: how operations are written, and read again. docs/traces.md describes the format.

A request's state is written in full at its first mention in a part, and then what has changed of it. Block hashes are
written as digests keyed with a secret that lives as long as the trace is written and is in no file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from vllm_kvplug.errors import TraceError
from vllm_kvplug.trace.operations import METHODS, REQUEST_METHODS, Answer, Operation, RequestState, short_row

FORMAT = "vllm-kvplug trace"
VERSION = 1
HASH_BYTES = 16


class Header(msgspec.Struct, kw_only=True):
    """The first line of each part.

    Attributes:
        trace_id: the same in all parts of a trace, and in no other.
        part: which part this is, from 0.
        first_operation: the number of the part's first operation, from 0.
        created: when this part was begun, UTC, ISO 8601.
        versions: of vllm_kvplug, vllm and python.
        manager: name, class and config of the recorded manager.
        constructor: the keywords that it was constructed with and that are plain values.
        kv_cache_config: `{"num_blocks": int, "groups": [{"spec": class name, "fields": {...}, "num_layers": int}]}`.
        has_token_ids: whether states carry token ids.
    """

    format: str = FORMAT
    version: int = VERSION
    trace_id: str
    part: int = 0
    first_operation: int = 0
    created: str = ""
    versions: dict[str, str] = {}
    manager: dict[str, Any] = {}
    constructor: dict[str, Any] = {}
    kv_cache_config: dict[str, Any] = {}
    has_token_ids: bool = False


class StateLine(msgspec.Struct, omit_defaults=True, gc=False):
    """A request's state as it is written: what is left out has not changed.

    Attributes:
        num_kept_hashes: of the hashes known before, so many stay; left out: all.
        new_hashes: come behind them.
        num_kept_tokens, new_token_ids: the same for token ids.
    """

    number: int
    num_tokens: int | None = None
    num_computed_tokens: int | None = None
    num_output_placeholders: int | None = None
    num_preemptions: int | None = None
    skip_reading_prefix_cache: bool | None = None
    num_kept_hashes: int | None = None
    new_hashes: list[bytes] | None = None
    num_kept_tokens: int | None = None
    new_token_ids: list[int] | None = None


class OperationLine(msgspec.Struct, omit_defaults=True, gc=False):
    """An operation as it is written. `request_number` is that of methods that take a request's id."""

    method: str
    time_us: int
    request: StateLine | None = None
    request_number: int | None = None
    arguments: dict[str, Any] | None = None
    answer: Answer | None = None


_encode = msgspec.json.Encoder().encode
_decode_line = msgspec.json.Decoder(OperationLine).decode
_decode_header = msgspec.json.Decoder(Header).decode
_NO_ANSWER = Answer()


def encode_header(header: Header) -> bytes:
    """The header as a line."""
    return _encode(header) + b"\n"


def decode_header(line: bytes, source: str) -> Header:
    """A part's first line.

    Raises:
        TraceError: it is no header, or one of a version that this package does not read.
    """
    try:
        start = msgspec.json.decode(line)
    except msgspec.DecodeError:
        start = None
    if not isinstance(start, dict) or start.get("format") != FORMAT:
        raise TraceError(f"{source}: expected a trace of vllm_kvplug, found another file")
    if start.get("version") != VERSION:
        raise TraceError(
            f"{source}: expected a trace of version {VERSION}, found version {start.get('version')}; "
            "read it with the vllm_kvplug that wrote it"
        )
    try:
        return _decode_header(line)
    except msgspec.DecodeError as error:
        raise TraceError(f"{source}: expected a trace's header, found one that is broken: {error}") from None


class _Written:
    """What the part says of a request so far."""

    __slots__ = ("hashes", "state", "token_ids")

    def __init__(self, state: RequestState) -> None:
        self.state = state
        self.hashes: list[bytes] = []
        self.token_ids: list[int] = []


class OperationEncoder:
    """Turns operations into lines. Begin a new part with `begin_part`."""

    def __init__(self) -> None:
        # The secret is in here alone; a copy of it is cheaper than a digest keyed anew.
        self._keyed_digest = blake2b(key=os.urandom(32), digest_size=HASH_BYTES)
        self._requests: dict[int, _Written] = {}

    def begin_part(self) -> None:
        """Forget what was written: the next part must be readable without it."""
        self._requests.clear()

    def encode(self, operation: Operation) -> bytes:
        """The operation as a line."""
        state, answer = operation.request, operation.answer
        if answer.blocks is not None and any(answer.blocks):
            answer = msgspec.structs.replace(answer, blocks=[short_row(row) for row in answer.blocks])
        line = OperationLine(
            operation.method,
            operation.time_us,
            None if state is None else self._state_line(state),
            operation.request_number if state is None else None,
            operation.arguments or None,
            None if answer == _NO_ANSWER else answer,
        )
        if state is not None and operation.arguments.get("is_finished"):
            self._requests.pop(state.number, None)
        return _encode(line) + b"\n"

    def _state_line(self, state: RequestState) -> StateLine:
        written = self._requests.get(state.number)
        line = StateLine(state.number)
        if written is None:
            written = self._requests[state.number] = _Written(state)
            line.num_tokens = state.num_tokens
            line.num_computed_tokens = state.num_computed_tokens
            line.num_output_placeholders = state.num_output_placeholders
            line.num_preemptions = state.num_preemptions
            line.skip_reading_prefix_cache = state.skip_reading_prefix_cache
        else:
            before = written.state
            if state.num_tokens != before.num_tokens:
                line.num_tokens = state.num_tokens
            if state.num_computed_tokens != before.num_computed_tokens:
                line.num_computed_tokens = state.num_computed_tokens
            if state.num_output_placeholders != before.num_output_placeholders:
                line.num_output_placeholders = state.num_output_placeholders
            if state.num_preemptions != before.num_preemptions:
                line.num_preemptions = state.num_preemptions
            if state.skip_reading_prefix_cache != before.skip_reading_prefix_cache:
                line.skip_reading_prefix_cache = state.skip_reading_prefix_cache
            written.state = state
        hashes, known_hashes = state.block_hashes, written.hashes
        # A hash stands for all that comes before it: where the last known one is still there, all are.
        num_known = len(known_hashes)
        if len(hashes) != num_known or (num_known and hashes[-1] != known_hashes[-1]):
            num_kept = num_kept_hashes(known_hashes, hashes)
            if num_kept < num_known:
                del known_hashes[num_kept:]
                line.num_kept_hashes = num_kept
            new_hashes = list(hashes[num_kept:])
            if new_hashes:
                known_hashes += new_hashes
                line.new_hashes = [self._keyed(block_hash) for block_hash in new_hashes]
        token_ids, known_token_ids = state.token_ids, written.token_ids
        # A session's next input may replace tokens by as many: the last known one tells.
        if token_ids is not None and (
            len(token_ids) != len(known_token_ids) or (known_token_ids and token_ids[-1] != known_token_ids[-1])
        ):
            self._put_tokens(line, token_ids, known_token_ids)
        return line

    def _put_tokens(self, line: StateLine, token_ids: Sequence[int], known_token_ids: list[int]) -> None:
        num_known = len(known_token_ids)
        if num_known and not (len(token_ids) == num_known + 1 and token_ids[num_known - 1] == known_token_ids[-1]):
            # More than a sampled token: a session's next input may have replaced tokens.
            pairs = zip(token_ids, known_token_ids, strict=False)
            num_kept = next((i for i, (new, known) in enumerate(pairs) if new != known), min(num_known, len(token_ids)))
            if num_kept < num_known:
                line.num_kept_tokens = num_kept
                del known_token_ids[num_kept:]
        line.new_token_ids = list(token_ids[len(known_token_ids) :])
        known_token_ids += line.new_token_ids

    def _keyed(self, block_hash: bytes) -> bytes:
        digest = self._keyed_digest.copy()
        digest.update(block_hash)
        return digest.digest()


def num_kept_hashes(known_hashes: Sequence[bytes], hashes: Sequence[bytes]) -> int:
    """How many of the known hashes the request still has."""
    num_kept = min(len(known_hashes), len(hashes))
    while num_kept and known_hashes[num_kept - 1] != hashes[num_kept - 1]:
        num_kept -= 1
    return num_kept


class OperationDecoder:
    """Turns the lines of parts into operations again. A state's lists are not changed once it was answered."""

    def __init__(self) -> None:
        self._requests: dict[int, RequestState] = {}

    def begin_part(self) -> None:
        """The next line is of another part, or of the first."""
        self._requests.clear()

    def decode(self, line: bytes, number: int) -> Operation:
        """The operation of a line.

        Raises:
            ValueError: it is none.
        """
        found = _decode_line(line)
        if found.method not in METHODS:
            raise ValueError(f"unknown method {found.method!r}")
        state = None
        if found.method in REQUEST_METHODS:
            if found.request is None:
                raise ValueError(f"{found.method} without a request")
            state = self._state(found.request)
        operation = Operation(
            found.method,
            found.arguments or {},
            state,
            found.request_number if state is None else state.number,
            found.answer or _NO_ANSWER,
            number,
            found.time_us,
        )
        if state is not None and operation.arguments.get("is_finished"):
            del self._requests[state.number]
        return operation

    def _state(self, line: StateLine) -> RequestState:
        before = self._requests.get(line.number)
        if before is None:
            before = RequestState(line.number, -1, -1, -1, -1, False, [], None)

        def now(value: Any, known: Any) -> Any:
            return known if value is None else value

        hashes, token_ids = before.block_hashes, before.token_ids
        if line.new_hashes is not None or line.num_kept_hashes is not None:
            hashes = [*hashes[: line.num_kept_hashes], *(line.new_hashes or ())]
        if line.new_token_ids is not None or line.num_kept_tokens is not None:
            token_ids = [*(token_ids or [])[: line.num_kept_tokens], *(line.new_token_ids or ())]
        state = RequestState(
            line.number,
            now(line.num_tokens, before.num_tokens),
            now(line.num_computed_tokens, before.num_computed_tokens),
            now(line.num_output_placeholders, before.num_output_placeholders),
            now(line.num_preemptions, before.num_preemptions),
            now(line.skip_reading_prefix_cache, before.skip_reading_prefix_cache),
            hashes,
            token_ids,
        )
        if state.num_tokens < 0 or state.num_computed_tokens < 0:
            raise ValueError(f"request {line.number} whose state the part does not give")
        self._requests[line.number] = state
        return state
