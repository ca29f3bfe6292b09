"""The folder that a shadow writes: what was asked of the managers, and what diverged.

`kvplug replay FOLDER/trace.jsonl.gz` repeats it. The engine's thread hands over what is to be written; other threads
write it.
"""

from __future__ import annotations

import multiprocessing.util
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from vllm_kvplug.errors import SettingsError
from vllm_kvplug.trace.operations import Operation
from vllm_kvplug.trace.writer import TraceWriter
from vllm_kvplug.vllm_glue import recording
from vllm_kvplug.vllm_glue.log import logger
from vllm_kvplug.vllm_glue.shadow_divergences import Tally

TRACE_NAME = "trace.jsonl.gz"
DIVERGENCES_NAME = "divergences.json"
FORMAT, VERSION = "vllm_kvplug divergences", 1
_MIB = 1 << 20
# How long the end of a process waits for a file that is being written.
_MAX_WAIT_S = 10.0


class Bundle:
    """A trace of the serving side as long as it is compared and has room, and `divergences.json`, which is replaced.

    Args:
        folder: made if it is not there; of a further engine (data parallel) `FOLDER.engineN`.
        serving, name, config: the serving manager and its part of the choice.
        constructor: the keywords that it was constructed with.
        sides: who serves and who follows, for `divergences.json`.
        tally: what it tells beside that.

    Raises:
        SettingsError, TraceError: the folder or the trace cannot be written.
    """

    def __init__(
        self,
        folder: str,
        serving: Any,
        name: str,
        config: Mapping[str, Any],
        constructor: Mapping[str, Any],
        sides: Mapping[str, str],
        tally: Tally,
        *,
        max_mib: int,
        engine_index: int = 0,
    ) -> None:
        self.folder = Path(os.path.abspath(folder) + (f".engine{engine_index}" if engine_index else ""))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(
                f"kv_cache_manager_config: setting 'bundle': expected a folder that can be made, found {error}"
            ) from error
        header = recording.header_of(type(serving), name, config, constructor)
        # The calls from the start on, which a replay needs, and not the last ones.
        self._writer = TraceWriter(self.folder / TRACE_NAME, header, max_bytes=max_mib * _MIB, when_full="stop")
        self._divergences = _Divergences(self.folder / DIVERGENCES_NAME, sides, tally, self._writer)
        self._divergences.update()
        # When the bundle is gone, and at exit, also of a process that multiprocessing started. Before the writer's own.
        self._at_end = multiprocessing.util.Finalize(self, _Divergences.close, (self._divergences,), exitpriority=11)
        self._started_ns = time.perf_counter_ns()
        logger.info("shadow: the serving side's calls and the first divergences go to %s", self.folder)

    def append(self, operation: Operation) -> bool:
        """A call and the serving side's answer. False once the trace takes no more; why, the writer tells by itself."""
        operation.time_us = (time.perf_counter_ns() - self._started_ns) // 1000
        return self._writer.append(operation)

    def update(self) -> None:
        """Replace `divergences.json` by and by, if there is something new. What fails is logged once, and ends it."""
        self._divergences.update()

    def end_trace(self) -> None:
        """The comparing has ended, and with it the trace; what is left is written by and by."""
        self._writer.close(wait=False)
        self._divergences.update()

    def close(self) -> None:
        """Write what is left of both files, and wait for it."""
        self._at_end()


class _Divergences:
    """`divergences.json`. A thread of its own writes it, and lives as long as there is something to write."""

    def __init__(self, path: Path, sides: Mapping[str, str], tally: Tally, writer: TraceWriter) -> None:
        self._path = path
        self._sides = dict(sides)
        self._tally = tally
        self._writer = writer
        self._has_failed = False
        self._is_closed = False
        # What the last content said, its times aside.
        self._news: tuple[Any, ...] | None = None
        self._lock = threading.RLock()
        # Under the lock: the latest content, until the thread takes it; the thread, while it runs.
        self._waiting: dict[str, Any] | None = None
        self._thread: threading.Thread | None = None

    def update(self) -> None:
        news = self._changes()
        if self._has_failed or self._is_closed or news == self._news:
            return
        self._news = news
        with self._lock:
            self._waiting = self._content()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvplug-shadow", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # no more threads
                    self._fail(error)
                else:
                    self._thread = thread

    def close(self) -> None:
        """The trace's end, then the last content."""
        self._is_closed = True
        self._writer.close()
        with self._lock:
            self._waiting, thread = None, self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_MAX_WAIT_S)
        if not self._has_failed:
            self._write(self._content())

    def _changes(self) -> tuple[Any, ...]:
        tally = self._tally
        counts = (tally.num_calls_compared, tally.num_calls_skipped, tally.num_divergences)
        return (*counts, tally.compares, self._why_stopped())

    def _why_stopped(self) -> str | None:
        """Why the trace goes no further than it does; None while it goes on."""
        if self._writer.is_full:
            return "full"
        if self._writer.failure is not None:
            return self._writer.failure
        return "comparing has stopped" if self._tally.has_stopped else None

    def _content(self) -> dict[str, Any]:
        num_operations = self._writer.num_operations
        return {
            "format": FORMAT,
            "version": VERSION,
            "trace": {
                "file": TRACE_NAME,
                "first_operation": 0 if num_operations else None,
                "last_operation": num_operations - 1 if num_operations else None,
                "stopped": self._why_stopped(),
            },
            **self._sides,
            **self._tally.summary(),
            "divergences": list(self._tally.first),
        }

    def _run(self) -> None:
        while True:
            with self._lock:
                content, self._waiting = self._waiting, None
                if content is None:
                    self._thread = None
                    return
            self._write(content)

    def _write(self, content: dict[str, Any]) -> None:
        if self._has_failed:  # while this content waited
            return
        # As in the trace, requests are numbers here: ids may come from clients.
        content["divergences"] = [msgspec.structs.replace(one, request_id=None) for one in content["divergences"]]
        fresh = self._path.with_suffix(".new")
        try:
            fresh.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
            fresh.replace(self._path)
        except Exception as error:  # a full disk, above all
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        logger.error("shadow: %s is written no more: %s", self._path, error)
