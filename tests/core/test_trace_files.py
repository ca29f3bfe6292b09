"""The files of a trace: parts and their bound, what a crash leaves, and what must not be overwritten."""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.core.trace_support import MIB, SmallScheduler, header, make_manager, operations, record
from vllm_kvplug.errors import TraceError
from vllm_kvplug.trace import writer as writing
from vllm_kvplug.trace.operations import Operation, RequestState, equal_rows
from vllm_kvplug.trace.parts import members, parts_of
from vllm_kvplug.trace.reader import TraceReader
from vllm_kvplug.trace.recorder import Recorder
from vllm_kvplug.trace.writer import TraceWriter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl.gz"


def write(path: Path, made: list[Operation], *, every: int = 0, **kwargs: Any) -> TraceWriter:
    """Write these operations; after each `every` of them a member ends."""
    writer = TraceWriter(path, header(), max_bytes=kwargs.pop("max_bytes", MIB))
    for number, operation in enumerate(made, 1):
        assert writer.append(operation)
        if every and number % every == 0:
            writer.flush()
    return writer


def methods(operations: Any) -> list[str]:
    return [operation.method for operation in operations]


def test_a_recorded_run_comes_back(path: Path) -> None:
    made = record(path)
    reader = TraceReader(path)
    read = list(reader)
    assert methods(read) == methods(made)
    assert all(equal_rows(a.answer.blocks, b.answer.blocks) for a, b in zip(read, made, strict=True))
    assert [operation.number for operation in read] == list(range(len(made)))
    times = [operation.time_us for operation in read]
    assert times == sorted(times)
    assert times[-1] > 0
    assert (reader.is_complete, reader.is_cut, reader.num_operations) == (True, False, len(made))
    assert reader.num_read_bytes == reader.num_bytes == path.stat().st_size
    assert list(reader) == read  # again


def test_it_is_gzipped_json_lines(path: Path) -> None:
    made = record(path)
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert len(lines) == 1 + len(made)
    assert lines[0]["format"] == "vllm-kvplug trace"
    assert lines[0]["created"].endswith("+00:00")
    text = json.dumps(lines)
    assert "the-client-s-request" not in text
    assert "token_ids" not in json.dumps(lines[1:])


def test_cut_at_every_byte_of_the_last_member(path: Path, tmp_path: Path) -> None:
    made = operations(num_steps=10)
    write(path, made, every=20).close()
    ends = [end for _, end in members(path)]
    whole, complete = path.read_bytes(), ends[-2]
    num_in_last = len(made) % 20 or 20
    cut_path = tmp_path / "cut.gz"
    assert len(ends) > 3
    for num_bytes in range(complete, len(whole)):
        cut_path.write_bytes(whole[:num_bytes])
        reader = TraceReader(cut_path)
        assert methods(reader) == methods(made[: len(made) - num_in_last]), num_bytes
        assert reader.is_cut is (num_bytes > complete), num_bytes


def test_damage_inside_is_told_with_its_place(path: Path) -> None:
    write(path, operations(num_steps=10), every=20).close()
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(
        TraceError, match=r"trace\.jsonl\.gz: expected gzip members to its end, found at about byte \d+"
    ):
        list(TraceReader(path))


def test_a_crash_loses_no_more_than_the_last_moments(path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from tests.core.trace_support import *
from vllm_kvplug.trace.recorder import Recorder
manager = make_manager()
writer = TraceWriter(Path({str(path)!r}), header(), max_bytes=MIB)
recorder = Recorder(manager, writer)
SmallScheduler(manager).run(20)
writer.flush()
print(writer.num_operations, flush=True)
SmallScheduler(manager).run(20)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    reader = TraceReader(path)
    assert len(list(reader)) >= int(done.stdout)


@pytest.mark.parametrize("method", ["normal", "spawn", "fork"])
def test_the_end_of_a_process_flushes(path: Path, method: str) -> None:
    program = f"""
import multiprocessing
from pathlib import Path
from tests.core.trace_support import *
from vllm_kvplug.trace.recorder import Recorder

def work():
    global writer
    manager = make_manager()
    writer = TraceWriter(Path({str(path)!r}), header(), max_bytes=MIB)
    globals().update(manager=manager, recorder=Recorder(manager, writer))
    SmallScheduler(manager).run(20)
    print(writer.num_operations, flush=True)

if __name__ == "__main__":
    if {method!r} == "normal":
        work()
    else:
        process = multiprocessing.get_context({method!r}).Process(target=work)
        process.start()
        process.join()
"""
    script = path.with_name("program.py")
    script.write_text(program)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    reader = TraceReader(path)
    assert len(list(reader)) == int(done.stdout)
    assert not reader.is_cut


def test_parts_and_their_bound(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_MEMBER_BYTES", 2000)
    made = operations(num_steps=400)
    max_bytes = 12_000
    writer = TraceWriter(path, header(), max_bytes=max_bytes)
    for number, operation in enumerate(made):
        writer.append(operation)
        if number % 50 == 0:
            writer.flush()
            assert sum(part.stat().st_size for part in parts_of(path)) <= max_bytes
    writer.close()
    parts = parts_of(path)
    assert not path.exists()  # the oldest went first
    assert len(parts) >= 4
    reader = TraceReader(path)
    read = list(reader)
    assert not reader.is_complete
    assert reader.header.first_operation == read[0].number > 0
    # Every part has all that it needs, and nothing is missing in between.
    assert methods(read) == methods(made[read[0].number :])
    for operation in read:
        expected = made[operation.number]
        if expected.request is not None:
            assert operation.request is not None
            assert operation.request.num_tokens == expected.request.num_tokens
            assert len(operation.request.block_hashes) == len(expected.request.block_hashes)


def test_a_missing_part_and_parts_of_another_trace(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_MEMBER_BYTES", 2000)
    monkeypatch.setattr(writing, "NUM_PARTS", 400)
    write(path, operations(num_steps=100), every=100).close()
    parts = parts_of(path)
    assert len(parts) >= 3
    text = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(TraceError, match=r"gz\.2: expected part 1 of the trace, found part 2"):
        TraceReader(path)
    other = gzip.decompress(text).replace(b"cafe", b"beef", 1)
    parts[1].write_bytes(gzip.compress(other))
    with pytest.raises(TraceError, match=r"gz\.1: expected a part of .*gz, found one of another trace"):
        TraceReader(path)
    parts[1].write_bytes(text[:-3])
    with pytest.raises(TraceError, match=r"gz\.1: expected a complete part, found its end cut off"):
        list(TraceReader(path))


def test_a_crash_while_a_part_begins(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_MEMBER_BYTES", 2000)
    monkeypatch.setattr(writing, "NUM_PARTS", 400)
    write(path, operations(num_steps=100), every=100).close()
    last = parts_of(path)[-1]
    last.write_bytes(last.read_bytes()[:7])
    reader = TraceReader(path)
    assert list(reader)
    assert reader.is_cut


@pytest.mark.parametrize("content", [b"my diary", gzip.compress(b'{"format": "of somebody else"}\n'), b"\x1f\x8b"])
def test_another_file_is_not_overwritten(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"trace: will not replace .*trace\.jsonl\.gz: expected"):
        TraceWriter(path, header(), max_bytes=MIB)
    assert path.read_bytes() == content
    path.unlink()
    later = path.with_name(path.name + ".3")
    later.write_bytes(content)
    with pytest.raises(TraceError, match="will not replace"):
        TraceWriter(path, header(), max_bytes=MIB)
    assert later.read_bytes() == content
    assert not path.exists()


def write_parts(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    with monkeypatch.context() as patch:
        patch.setattr(writing, "NUM_PARTS", 400)
        write(path, operations(num_steps=100)).close()
    parts = parts_of(path)
    assert len(parts) > 2
    return parts


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_an_old_trace_is_kept_once_with_all_its_parts(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    previous = path.with_name(f"{path.name}.previous")
    old_parts = [part.read_bytes() for part in write_parts(path, monkeypatch)]
    path.with_name(path.name + ".notes").write_text("kept")
    with caplog.at_level(logging.INFO):
        write(path, operations(num_steps=2)).close()
    assert parts_of(path) == [path]
    assert [part.read_bytes() for part in parts_of(previous)] == old_parts
    assert TraceReader(previous).is_complete
    assert [entry.getMessage() for entry in caplog.records] == [
        f"KV cache trace {path}: the older trace there is kept as {previous}"
    ]
    # Another one takes the place of the older generation, with all its parts.
    newer = path.read_bytes()
    write(path, operations(num_steps=3)).close()
    assert parts_of(previous) == [previous]
    assert previous.read_bytes() == newer
    assert path.with_name(path.name + ".notes").read_text() == "kept"
    # What a start that failed may leave is no trace.
    path.write_bytes(b"")
    caplog.clear()
    TraceWriter(path, header(), max_bytes=MIB).close()
    assert previous.read_bytes() == newer
    assert not caplog.records


def test_a_trace_of_which_the_first_parts_are_gone_is_kept_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = write_parts(path, monkeypatch)
    parts[0].unlink()
    write(path, operations(num_steps=2)).close()
    previous = path.with_name(f"{path.name}.previous")
    assert [part.name for part in parts_of(previous)] == [
        part.name.replace(path.name, previous.name) for part in parts[1:]
    ]


@pytest.mark.parametrize("generation", ["", ".previous"])
@pytest.mark.parametrize("other", ["a whole trace", "a part of another trace"])
def test_a_trace_that_only_looks_like_a_part_is_not_touched(path: Path, generation: str, other: str) -> None:
    write(path, operations(num_steps=2)).close()
    write(path, operations(num_steps=2)).close()
    stranger = path.with_name(f"{path.name}{generation}.1")
    if other == "a whole trace":
        write(stranger, operations(num_steps=3)).close()
        found = rf"expected part 1 of the trace .*{generation}, found part 0 of a trace"
    else:
        foreign = header(part=1, first_operation=5, trace_id="beef")
        TraceWriter(path.with_name("foreign"), foreign, max_bytes=MIB).close()
        path.with_name("foreign.1").rename(stranger)
        found = "found part 1 of another trace"
    before = contents(path.parent)
    with pytest.raises(TraceError, match=rf"^trace: will not replace {re.escape(str(stranger))}: .*{found}; move it"):
        TraceWriter(path, header(), max_bytes=MIB)
    assert contents(path.parent) == before


def test_a_file_that_comes_where_the_trace_goes_on_is_not_overwritten(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writing, "NUM_PARTS", 400)
    writer = TraceWriter(path, header(), max_bytes=MIB)
    stranger = path.with_name(f"{path.name}.1")
    write(stranger, operations(num_steps=2)).close()
    before = stranger.read_bytes()
    for operation in operations(num_steps=100):
        writer.append(operation)
    writer.flush()
    assert writer.failure is not None
    assert f"trace {stranger}: expected no file where the trace goes on" in writer.failure
    assert stranger.read_bytes() == before
    assert len(caplog.records) == 1
    writer.close()


def test_a_second_engine_is_refused_the_same_file(path: Path) -> None:
    writer = write(path, operations(num_steps=2))
    with pytest.raises(TraceError, match="expected no other engine to write there, found one"):
        TraceWriter(path, header(), max_bytes=MIB)
    writer.close()
    TraceWriter(path, header(), max_bytes=MIB).close()


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "no folder" / "trace", tmp_path):
        with pytest.raises(TraceError, match=r"trace .*: expected a file"):
            TraceWriter(path, header(), max_bytes=MIB)


def test_no_trace_is_there(path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl\.gz: expected a trace, found no file"):
        TraceReader(path)
    for content in (b"", gzip.compress(b"")):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=r"trace\.jsonl\.gz: expected a trace"):
            TraceReader(path)


def test_a_full_disk_ends_the_recording_with_one_line_and_not_the_serving(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    manager = make_manager()
    writer = TraceWriter(path, header(), max_bytes=MIB)
    recorder = Recorder(manager, writer)
    writer._file = FullDisk(writer._file)  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR):
        SmallScheduler(manager).run(10)
        writer.flush()
        SmallScheduler(manager).run(10)
    assert "allocate_slots" not in vars(manager)  # nothing is left of it
    errors = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "No space left on device" in errors[0]
    recorder.close()


def hold_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The disk takes nothing of writers made from now on until the event comes."""
    goes_on = threading.Event()
    original = TraceWriter._write_waiting

    def late(self: TraceWriter) -> None:
        goes_on.wait()
        original(self)

    monkeypatch.setattr(TraceWriter, "_write_waiting", late)
    return goes_on


def test_a_writer_that_does_not_keep_up_gives_up_before_it_holds_more_than_it_may(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "MAX_WAITING_BYTES", 5000)
    monkeypatch.setattr(writing, "MAX_MEMBER_BYTES", 100)
    goes_on = hold_up(monkeypatch)
    writer = TraceWriter(path, header(), max_bytes=MIB)
    # Long prompts: few operations of many bytes.
    hashes = [bytes([i]) * 32 for i in range(40)]
    requests = [RequestState(number, 700, 0, 0, 0, False, hashes) for number in range(20)]
    with caplog.at_level(logging.ERROR):
        answers = [writer.append(Operation("get_computed_blocks", {}, request, 0)) for request in requests]
    # Each has about 1,200 bytes.
    assert 3 <= answers.count(True) <= 5
    assert not any(answers[answers.count(True) :])
    assert not writer._waiting
    assert len(caplog.records) == 1
    assert "MiB wait to be written: the disk does not keep up" in caplog.text
    goes_on.set()
    writer.close()


@pytest.mark.parametrize("max_bytes", [12_000, 40_000])
def test_the_bound_holds_for_what_comes_faster_than_it_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    made = operations(num_steps=400)
    goes_on = hold_up(monkeypatch)
    writer = TraceWriter(path, header(), max_bytes=max_bytes)
    for operation in made:
        assert writer.append(operation)
    assert writer._num_bytes > 4 * max_bytes
    goes_on.set()
    writer.flush()
    assert sum(part.stat().st_size for part in parts_of(path)) <= max_bytes
    writer.close()
    reader = TraceReader(path)
    read = list(reader)
    assert methods(read) == methods(made[reader.header.first_operation :])
    assert len(read) > 20


def test_no_part_is_begun_without_need(path: Path) -> None:
    """Lines that wait count whole, and so a part may seem full: once written they are less."""
    writer = TraceWriter(path, header(), max_bytes=100_000)
    made = operations(num_steps=60)
    for operation in made:
        writer.append(operation)
        writer.flush()
        if path.with_name(f"{path.name}.1").exists():
            break
    writer.close()
    assert path.stat().st_size >= 100_000 // writing.NUM_PARTS


@pytest.mark.parametrize("is_held_up", [False, True])
def test_when_full_it_stops_and_keeps_the_beginning(
    path: Path, is_held_up: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = operations(num_steps=400)
    max_bytes = 12_000
    goes_on = hold_up(monkeypatch)
    writer = TraceWriter(path, header(), max_bytes=max_bytes, when_full="stop")
    if not is_held_up:
        goes_on.set()
    monkeypatch.setattr(writer._thread, "join", lambda timeout=None: pytest.fail("the engine waited"))
    with caplog.at_level(logging.INFO):
        answers = []
        for number, operation in enumerate(made):
            answers.append(writer.append(operation))
            if not is_held_up and number % 20 == 0:
                writer.flush()
    goes_on.set()
    num_taken = answers.index(False)
    assert not any(answers[num_taken:])
    assert (writer.is_full, writer.failure, writer.num_operations) == (True, None, num_taken)
    (entry,) = caplog.records
    assert f"full (12000 bytes), ended after {num_taken} operations, which stay" in entry.getMessage()
    monkeypatch.undo()
    writer.close()
    assert parts_of(path) == [path]
    assert path.stat().st_size <= max_bytes + 500  # what the last operation has beyond it
    reader = TraceReader(path)
    assert methods(reader) == methods(made[:num_taken])
    assert (reader.is_complete, reader.is_cut) == (True, False)
    if not is_held_up:
        assert path.stat().st_size > max_bytes // 2


def test_closing_without_waiting_returns_at_once_and_writes_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = operations(num_steps=10)
    goes_on = hold_up(monkeypatch)
    writer = TraceWriter(path, header(), max_bytes=MIB)
    for operation in made:
        writer.append(operation)
    monkeypatch.setattr(writer._thread, "join", lambda timeout=None: pytest.fail("it waited"))
    writer.close(wait=False)
    assert not writer.append(made[0])
    monkeypatch.undo()
    goes_on.set()
    writer.close()
    assert methods(TraceReader(path)) == methods(made)


def test_the_end_of_a_process_waits_for_what_was_closed_without_waiting(path: Path) -> None:
    program = f"""
from pathlib import Path
from tests.core.trace_support import *
import time
writer = TraceWriter(Path({str(path)!r}), header(), max_bytes=MIB)
original = writer._write
def slow(lines):
    time.sleep(0.5)
    original(lines)
writer._write = slow
made = operations(num_steps=10)
for operation in made:
    writer.append(operation)
writer.close(wait=False)
print(len(made))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list(TraceReader(path))) == int(done.stdout)


def test_members_are_independent(path: Path) -> None:
    write(path, operations(num_steps=10), every=20).close()
    data = path.read_bytes()
    texts = []
    while data:
        decompressor = zlib.decompressobj(31)
        texts.append(decompressor.decompress(data))
        data = decompressor.unused_data
    assert all(text.endswith(b"\n") for text in texts)
    assert texts[0].count(b"\n") == 1  # the header alone
