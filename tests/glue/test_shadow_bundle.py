"""When and by whom a shadow's bundle is written: not by the engine's thread, and to the end."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.glue.shadow_runs import construct, divergences_when
from vllm_kvplug.trace.reader import TraceReader
from vllm_kvplug.trace.writer import TraceWriter
from vllm_kvplug.vllm_glue import shadow_bundle

FAULTY = "tests.glue.shadow_sides:Faulty"


def raising(method: str, after: int = 0) -> dict[str, Any]:
    return {"follower": FAULTY, "follower_config": {"fault": "raises", "method": method, "after": after}}


def test_each_report_with_news_is_written(kv_cache_config: Any, tmp_path: Path) -> None:
    """A clean run, too, says how much was compared."""
    manager = construct("shadow", {"bundle": str(tmp_path)}, kv_cache_config)
    written = divergences_when(tmp_path, lambda written: True)
    assert (written["compares"], written["num_calls_compared"]) == ("exact", 0)
    assert written["trace"] == {
        "file": "trace.jsonl.gz",
        "first_operation": None,
        "last_operation": None,
        "stopped": None,
    }
    for num_calls in (1, 2):
        manager.new_step_starts()
        manager.shadow_report()
        written = divergences_when(tmp_path, lambda written: written["num_calls_compared"] == num_calls)  # noqa: B023
        assert written["trace"]["last_operation"] == num_calls - 1
    (tmp_path / "divergences.json").unlink()
    manager.shadow_report()  # nothing new
    manager._bundle.close()
    assert divergences_when(tmp_path, lambda written: True)["num_calls_compared"] == 2


def test_nothing_new_is_not_written(kv_cache_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = construct("shadow", {"bundle": str(tmp_path)}, kv_cache_config)
    contents: list[Any] = []
    monkeypatch.setattr(manager._bundle._divergences, "_content", lambda: contents.append(1) or {"divergences": []})
    for num_contents in (0, 1, 1):
        manager.shadow_report()
        assert len(contents) == num_contents
        if not num_contents:
            manager.new_step_starts()


def test_a_follower_that_raised_is_told_without_a_report(kv_cache_config: Any, tmp_path: Path) -> None:
    manager = construct("shadow", {"bundle": str(tmp_path)} | raising("new_step_starts", after=2), kv_cache_config)
    for _ in range(4):
        manager.new_step_starts()
    written = divergences_when(tmp_path, lambda written: written["compares"] == "nothing")
    assert written["num_calls_compared"] == 2
    # The call in which it raised is in the trace.
    assert (written["trace"]["last_operation"], written["trace"]["stopped"]) == (2, "comparing has stopped")
    manager._bundle.close()
    assert sum(1 for _ in TraceReader(tmp_path / "trace.jsonl.gz")) == 3


@pytest.mark.parametrize("slow", [(TraceWriter, "_write_member"), (shadow_bundle._Divergences, "_write")])
def test_a_slow_disk_does_not_hold_up_the_engine(
    slow: tuple[type, str], kv_cache_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where the comparing stops nor in a report."""
    manager = construct("shadow", {"bundle": str(tmp_path)} | raising("new_step_starts", after=1), kv_cache_config)
    divergences_when(tmp_path, lambda written: True)
    goes_on, has_waited_to_the_end = threading.Event(), threading.Event()
    write = getattr(*slow)

    def write_slowly(*args: Any) -> None:
        if not goes_on.wait(timeout=15):
            has_waited_to_the_end.set()
        write(*args)

    monkeypatch.setattr(*slow, write_slowly)
    for _ in range(3):
        manager.new_step_starts()
        manager.shadow_report()
    assert not has_waited_to_the_end.is_set()
    goes_on.set()
    manager._bundle.close()
    assert divergences_when(tmp_path, lambda written: True)["compares"] == "nothing"
    assert sum(1 for _ in TraceReader(tmp_path / "trace.jsonl.gz")) == 2


def test_a_file_that_cannot_be_written_is_told_once(
    kv_cache_config: Any, tmp_path: Path, kvplug_log: list[str]
) -> None:
    (tmp_path / "divergences.json").mkdir()
    manager = construct("shadow", {"bundle": str(tmp_path)}, kv_cache_config)
    for _ in range(3):
        manager.new_step_starts()
        manager.shadow_report()
        thread = manager._bundle._divergences._thread
        if thread is not None:
            thread.join()
    manager._bundle.close()
    (line,) = [line for line in kvplug_log if "written no more" in line]
    assert line.startswith(f"shadow: {tmp_path}/divergences.json is written no more: ")
    assert manager.shadow_report()["num_calls_compared"] == 3


def _serve(kv_cache_config: Any, folder: Path, drops: bool) -> None:
    manager = construct("shadow", {"bundle": str(folder)}, kv_cache_config)
    for _ in range(3):
        manager.new_step_starts()
    if not drops:
        _KEPT.append(manager)


_KEPT: list[Any] = []


@pytest.mark.parametrize("drops", [False, True], ids=["at exit", "with the manager"])
def test_the_end_is_written(drops: bool, kv_cache_config: Any, tmp_path: Path) -> None:
    """Nobody asked for a report since the last calls."""
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(kv_cache_config, tmp_path, drops))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert divergences_when(tmp_path, lambda written: True)["num_calls_compared"] == 3
    assert sum(1 for _ in TraceReader(tmp_path / "trace.jsonl.gz")) == 3
