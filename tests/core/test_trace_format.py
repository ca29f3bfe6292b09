"""Operations as lines: what is written of a request, what never is, and that reading gives the same back."""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.core.trace_support import Request, header, make_manager, operations
from vllm_kvplug.errors import TraceError
from vllm_kvplug.trace.format import (
    HASH_BYTES,
    OperationDecoder,
    OperationEncoder,
    decode_header,
    encode_header,
)
from vllm_kvplug.trace.live_calls import LiveCalls
from vllm_kvplug.trace.operations import (
    MAX_FULL_ROW_BLOCKS,
    Answer,
    Operation,
    RequestState,
    equal_rows,
    short_row,
)


def state(number: int = 0, num_hashes: int = 0, **changes: object) -> RequestState:
    hashes = [bytes([number, i]) * 16 for i in range(num_hashes)]
    return msgspec.structs.replace(RequestState(number, 10, 0, 0, 0, False, hashes), **changes)


def lookup(request: RequestState) -> Operation:
    return Operation("get_computed_blocks", {}, request, request.number)


def test_what_is_read_is_what_was_written() -> None:
    encoder, decoder = OperationEncoder(), OperationDecoder()
    made = operations()
    assert {operation.method for operation in made} >= {"allocate_slots", "free", "get_blocks", "reset_prefix_cache"}
    keyed_of: dict[bytes, bytes] = {}
    for number, operation in enumerate(made):
        read = decoder.decode(encoder.encode(operation), number)
        assert (read.method, read.arguments, read.request_number) == (
            operation.method,
            operation.arguments,
            operation.request_number,
        )
        assert equal_rows(read.answer.blocks, operation.answer.blocks)
        assert msgspec.structs.replace(read.answer, blocks=None) == msgspec.structs.replace(
            operation.answer, blocks=None
        )
        if operation.request is None:
            assert read.request is None
            continue
        assert read.request is not None
        raw, keyed = operation.request.block_hashes, read.request.block_hashes
        assert msgspec.structs.replace(read.request, block_hashes=raw) == operation.request
        # Equal hashes stay equal, different ones different.
        assert len(raw) == len(keyed)
        for raw_hash, keyed_hash in zip(raw, keyed, strict=True):
            assert keyed_of.setdefault(raw_hash, keyed_hash) == keyed_hash
    assert len(set(keyed_of.values())) == len(keyed_of) > 20


def test_only_what_changed_is_written_and_a_part_starts_anew() -> None:
    encoder = OperationEncoder()
    first = json.loads(encoder.encode(lookup(state(num_hashes=2))))["request"]
    assert set(first) == {
        "number",
        "num_tokens",
        "num_computed_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "skip_reading_prefix_cache",
        "new_hashes",
    }
    assert json.loads(encoder.encode(lookup(state(num_hashes=2))))["request"] == {"number": 0}
    changed = json.loads(encoder.encode(lookup(state(num_hashes=3, num_tokens=13))))["request"]
    assert set(changed) == {"number", "num_tokens", "new_hashes"}
    assert len(changed["new_hashes"]) == 1
    encoder.begin_part()
    again = json.loads(encoder.encode(lookup(state(num_hashes=3, num_tokens=13))))["request"]
    assert set(again) == set(first)
    assert again["new_hashes"] == [*first["new_hashes"], *changed["new_hashes"]]


@pytest.mark.parametrize("num_kept", [0, 1, 3])
def test_hashes_that_a_session_replaces(num_kept: int) -> None:
    encoder, decoder = OperationEncoder(), OperationDecoder()
    before = decoder.decode(encoder.encode(lookup(state(num_hashes=4))), 0).request
    hashes = [*state(num_hashes=4).block_hashes[:num_kept], b"other" * 4, b"another" * 4]
    read = decoder.decode(encoder.encode(lookup(state(block_hashes=hashes))), 1).request
    assert before is not None
    assert read is not None
    assert len(read.block_hashes) == num_kept + 2
    assert read.block_hashes[:num_kept] == before.block_hashes[:num_kept]
    assert read.block_hashes[num_kept] not in before.block_hashes
    assert len(before.block_hashes) == 4  # an operation that was read does not change


def test_neither_hashes_nor_ids_are_in_a_trace_and_each_trace_has_its_own_secret() -> None:
    hashes = [bytes(range(i, i + 32)) for i in range(8)]
    lines = [OperationEncoder().encode(lookup(state(block_hashes=hashes))) for _ in range(2)]
    written = [json.loads(line)["request"]["new_hashes"] for line in lines]
    assert not set(written[0]) & set(written[1])
    encodings = [
        form
        for block_hash in hashes
        for form in (
            block_hash.hex(),
            msgspec.json.encode(block_hash).decode().strip('"'),
            str(int.from_bytes(block_hash)),
        )
    ]
    for line in lines:
        assert not [form for form in encodings if form[:20] in line.decode()]
    assert len(msgspec.json.decode(b'"%s"' % written[0][0].encode(), type=bytes)) == HASH_BYTES


def test_live_calls_number_requests_and_read_no_text() -> None:
    manager = make_manager()
    calls = LiveCalls(manager.empty_kv_cache_blocks)
    requests = [Request(f"secret-{i}", [7654321, 2, 3, 4, 5], 4) for i in range(2)]
    made = [calls.begin("get_computed_blocks", (request,), {}) for request in requests]
    made.append(calls.begin("get_blocks", ("secret-1",), {}))
    made.append(calls.begin("remove_skipped_blocks", (), {"request_id": "secret-0", "total_computed_tokens": 3}))
    made.append(calls.begin("get_blocks", ("never seen",), {}))
    assert [operation.request_number for operation in made] == [0, 1, 1, 0, -1]
    assert made[3].arguments == {"total_computed_tokens": 3}
    encoder = OperationEncoder()
    text = b"".join(encoder.encode(operation) for operation in made)
    assert b"secret" not in text
    assert b"7654321" not in text


def test_a_number_is_not_used_again_and_a_preempted_request_keeps_its_own() -> None:
    manager = make_manager()
    calls = LiveCalls(manager.empty_kv_cache_blocks)
    request = Request("a", [1, 2, 3, 4, 5], 4)

    def number(method: str) -> int | None:
        return calls.begin(method, (request,), {}).request_number

    assert [number("get_computed_blocks"), number("free"), number("get_computed_blocks")] == [0, 0, 0]
    request.has_ended = True
    assert [number("free"), number("get_computed_blocks")] == [0, 1]


def test_token_ids_only_where_they_are_asked_for() -> None:
    request = Request("a", list(range(10, 20)), 4)
    manager = make_manager()
    encoder, decoder = OperationEncoder(), OperationDecoder()
    calls = LiveCalls(manager.empty_kv_cache_blocks, reads_tokens=True)

    def written_and_read() -> tuple[dict[str, object], list[int]]:
        line = encoder.encode(calls.begin("get_computed_blocks", (request,), {}))
        read = decoder.decode(line, 0).request
        assert read is not None
        assert read.token_ids is not None
        return json.loads(line)["request"], list(read.token_ids)

    assert written_and_read()[1] == request.tokens
    request.tokens.append(99)
    line, read = written_and_read()
    assert line["new_token_ids"] == [99]
    assert read == request.tokens
    request.tokens[9:] = [1, 2, 3, 4]  # a session's next input
    line, read = written_and_read()
    assert (line["num_kept_tokens"], line["new_token_ids"]) == (9, [1, 2, 3, 4])
    assert read == request.tokens
    request.tokens[10:] = [5, 6, 7]  # as many as it replaces
    line, read = written_and_read()
    assert (line["num_kept_tokens"], line["new_token_ids"]) == (10, [5, 6, 7])
    assert read == request.tokens
    assert "new_token_ids" not in written_and_read()[0]
    del request.tokens[11:]
    assert written_and_read()[1] == request.tokens


def test_long_rows_are_written_as_count_and_digest() -> None:
    short, long = list(range(MAX_FULL_ROW_BLOCKS)), list(range(MAX_FULL_ROW_BLOCKS + 1))
    assert short_row(short) is short
    written = short_row(long)
    assert isinstance(written, str)
    assert written.startswith("17:")
    assert equal_rows([long], [written])
    assert equal_rows([written], [list(long)])
    assert not equal_rows([[*long[:-1], 99]], [written])
    assert not equal_rows([long[:-1]], [written])
    assert not equal_rows([short], None)
    encoder, decoder = OperationEncoder(), OperationDecoder()
    answered = Operation("get_block_ids", {}, None, 0, Answer(blocks=[short, long]))
    assert decoder.decode(encoder.encode(answered), 0).answer.blocks == [short, written]
    assert answered.answer.blocks == [short, long]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "trunc"),
        (b'{"method":"frob","time_us":1}', "unknown method 'frob'"),
        (b'{"method":"free","time_us":1}', "without a request"),
        (b'{"method":"free","time_us":1,"request":{"number":3}}', "request 3 whose state"),
        (b'{"method":"free","time_us":"x"}', "int"),
    ],
)
def test_lines_that_are_none(line: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OperationDecoder().decode(line, 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "expected a trace of vllm_kvplug, found another file"),
        (b"[]", "found another file"),
        (b'{"format": "something"}', "found another file"),
        (encode_header(header(version=2)), "expected a trace of version 1, found version 2"),
        (b'{"format":"vllm-kvplug trace","version":1}', "found one that is broken"),
    ],
)
def test_headers_that_are_none(line: bytes, message: str) -> None:
    with pytest.raises(TraceError, match=f"^some/file: .*{message}"):
        decode_header(line, "some/file")


def test_a_header_comes_back() -> None:
    assert decode_header(encode_header(header(part=3, first_operation=7)), "") == header(part=3, first_operation=7)
