"""The recorder on a manager: what counts as a call, what it leaves alone, and that its own faults stay its own."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.core.trace_support import (
    MIB,
    FullContractManager,
    Request,
    SmallScheduler,
    header,
    make_manager,
    record,
)
from vllm_kvplug.errors import TraceError
from vllm_kvplug.settings import Settings
from vllm_kvplug.trace.operations import METHODS
from vllm_kvplug.trace.reader import TraceReader
from vllm_kvplug.trace.recorder import Recorder
from vllm_kvplug.trace.writer import TraceWriter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.gz"


def start(manager: Any, path: Path) -> Recorder:
    return Recorder(manager, TraceWriter(path, header(), max_bytes=MIB))


def methods(path: Path) -> list[str]:
    return [operation.method for operation in TraceReader(path)]


def test_calls_of_its_own_methods_are_no_operations(path: Path) -> None:
    class Nested(FullContractManager):
        def get_block_ids(self, request_id: str) -> Any:
            self.new_step_starts()
            return self.get_blocks(request_id).get_block_ids()

    manager = make_manager()
    manager.__class__ = Nested
    recorder = start(manager, path)
    manager.get_block_ids("a")
    manager.get_blocks("a")
    recorder.close()
    assert methods(path) == ["get_block_ids", "get_blocks"]


def test_answers_and_errors_pass_and_are_recorded(path: Path) -> None:
    manager = make_manager()
    recorder = start(manager, path)
    request = Request("a", list(range(9)), 4)
    blocks, num_hit_tokens = manager.get_computed_blocks(request)
    assert blocks is manager.empty_kv_cache_blocks
    assert manager.allocate_slots(request, 9, num_hit_tokens, blocks).get_block_ids() == ([1, 2, 3],)
    with pytest.raises(ValueError, match="num_new_tokens"):
        manager.allocate_slots(request, 0)
    manager.evict_blocks(block_id for block_id in (1,))  # an iterator is read once
    assert manager.reset_prefix_cache() is False
    recorder.close()
    answers = [operation.answer for operation in TraceReader(path)]
    assert answers[1].blocks == [[1, 2, 3]]
    assert answers[2].error == "CallError"
    assert answers[4].done is False
    assert next(op for op in TraceReader(path) if op.method == "evict_blocks").arguments == {"block_ids": [1]}


def test_how_hits_were_passed(path: Path) -> None:
    manager = make_manager()
    recorder = start(manager, path)
    requests = [Request(name, list(range(9)), 4) for name in "abcd"]
    blocks, _ = manager.get_computed_blocks(requests[0])
    manager.allocate_slots(requests[0], 9, new_computed_blocks=blocks)
    requests[0].num_computed_tokens = 9
    blocks, num_hit_tokens = manager.get_computed_blocks(requests[1])
    manager.allocate_slots(requests[1], 1, num_hit_tokens, blocks)
    manager.allocate_slots(requests[2], 9, new_computed_blocks=blocks.new_empty())
    manager.allocate_slots(requests[3], 9)
    recorder.close()
    hits = [op.arguments.get("hits", "absent") for op in TraceReader(path) if op.method == "allocate_slots"]
    assert hits == ["empty", "lookup", "other", "absent"]


def test_class_and_other_managers_stay_as_they_are(path: Path) -> None:
    before = dict(vars(FullContractManager))
    manager, other = make_manager(), make_manager()
    recorder = start(manager, path)
    assert type(manager) is FullContractManager
    assert dict(vars(FullContractManager)) == before
    assert not set(METHODS) & set(vars(other))
    assert set(METHODS) <= set(vars(manager))
    recorder.close()
    assert not set(METHODS) & set(vars(manager))


def test_it_wraps_what_was_there_and_gives_it_back(path: Path) -> None:
    """`check_invariants` has wrappers of its own on the manager."""
    from vllm_kvplug.geometry import AttentionKind, CacheGeometry, GroupGeometry

    geometry = CacheGeometry(30, 256, (GroupGeometry(AttentionKind.FULL, 4),), 4)
    manager = FullContractManager(geometry, Settings(check_invariants="stop"))
    wrapper = vars(manager)["free"]
    recorder = start(manager, path)
    SmallScheduler(manager).run(4)
    assert manager.checks is not None
    num_checked = manager.checks.story.call.number
    assert num_checked > 10
    recorder.close()
    assert vars(manager)["free"] is wrapper
    assert len(methods(path)) > 10


def test_a_manager_that_goes_away_ends_its_trace(path: Path) -> None:
    manager = make_manager()
    recorder = start(manager, path)
    reference, writer = weakref.ref(manager), recorder.writer
    manager.new_step_starts()
    # Nothing holds the manager but us: vLLM takes the engine out of the garbage collector's sight.
    gc.disable()
    try:
        del manager, recorder
        assert reference() is None
    finally:
        gc.enable()
    assert not writer._thread.is_alive()
    assert methods(path) == ["new_step_starts"]


def test_a_request_that_cannot_be_read_ends_the_recording_not_the_call(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(Request):
        @property
        def num_output_placeholders(self) -> int:
            raise KeyError("odd")

        @num_output_placeholders.setter
        def num_output_placeholders(self, value: int) -> None:
            pass

    manager = make_manager()
    recorder = start(manager, path)
    monkeypatch.setattr(recorder.writer._thread, "join", lambda timeout=None: pytest.fail("the engine waited"))
    manager.new_step_starts()
    odd = Odd("a", list(range(9)), 4)
    with caplog.at_level(logging.ERROR):
        assert manager.get_computed_blocks(odd)[1] == 0
    assert len(caplog.records) == 1
    assert "stopped at a call of get_computed_blocks, which cannot be recorded: KeyError" in caplog.text
    assert "get_computed_blocks" not in vars(manager)
    monkeypatch.undo()
    recorder.close()
    assert methods(path) == ["new_step_starts"]


def test_an_answer_that_cannot_be_read_ends_the_recording_not_the_call(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(FullContractManager):
        def get_blocks(self, request_id: str) -> Any:
            return "blocks"

    manager = make_manager()
    manager.__class__ = Odd
    start(manager, path)
    with caplog.at_level(logging.ERROR):
        assert manager.get_blocks("a") == "blocks"
    assert "stopped at a call of get_blocks" in caplog.text


def test_a_manager_without_attributes_is_refused(path: Path) -> None:
    class Slotted:
        __slots__ = ("__weakref__", "empty_kv_cache_blocks")

    manager = Slotted()
    manager.empty_kv_cache_blocks = make_manager().empty_kv_cache_blocks
    writer = TraceWriter(path, header(), max_bytes=MIB)
    with pytest.raises(TraceError, match=r"expected a manager whose methods can be watched, found .*Slotted"):
        Recorder(manager, writer)
    writer.close()


def test_recording_changes_no_decision(path: Path) -> None:
    made = record(path, seed=5)
    manager = make_manager()
    SmallScheduler(manager, 5).run(60)
    again = record(path.with_name("again.gz"), seed=5)
    assert [operation.answer for operation in made] == [operation.answer for operation in again]
    assert manager.usage == 0
