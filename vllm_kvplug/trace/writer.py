"""Writes a trace: lines are taken from the caller's thread, compressed and written by another.

The caller's thread only encodes and appends. A failure of the file stops the writing and is told once; it never reaches
the caller as an exception.
"""

from __future__ import annotations

import fcntl
import gzip
import logging
import multiprocessing.util
import os
import threading
from collections import deque
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import msgspec

from vllm_kvplug.errors import TraceError
from vllm_kvplug.trace.format import Header, OperationEncoder, encode_header
from vllm_kvplug.trace.operations import Operation
from vllm_kvplug.trace.parts import path_of_part, set_aside

# A trace has at least so many parts when it is full: dropping the oldest then loses no more than one of them.
NUM_PARTS = 8
MAX_MEMBER_BYTES = 1 << 18  # before compression
FLUSH_PERIOD_S = 1.0
# Lines that wait to be written have so many bytes at most; more, and the disk does not keep up.
MAX_WAITING_BYTES = 64 << 20
_COMPRESSION_LEVEL = 5

_logger = logging.getLogger("vllm.kvplug.trace")


class _Progress(NamedTuple):
    """How far the writing thread is, replaced as a whole.

    Attributes:
        part: that it writes.
        num_file_bytes: of that part, in the file.
        num_line_bytes: of that part's lines, before compression.
        num_bytes: of all lines since the beginning, before compression.
    """

    part: int
    num_file_bytes: int
    num_line_bytes: int
    num_bytes: int


class TraceWriter:
    """Writes operations to `path`, and its further parts to `path.1`, `path.2`, ...

    Args:
        path: of the first part. An older trace there is kept as `path.previous`, in the place of one that was there.
        header: of the first part; further parts differ in part, first_operation and created.
        max_bytes: of all parts together, except for what a single operation has beyond it.
        when_full: "drop": the oldest part goes. "stop": there is one part, and the writing ends, so that what is there
            can be replayed from its first operation on.

    Attributes:
        num_operations: written or on their way.
        is_full: the writing has ended because `max_bytes` were reached.
        failure: why the writing has stopped; None while it goes on.

    Raises:
        TraceError: the path cannot be written, holds another kind of file, or another process writes there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: Header,
        *,
        max_bytes: int,
        when_full: Literal["drop", "stop"] = "drop",
    ) -> None:
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._stops_when_full = when_full == "stop"
        self._max_part_bytes = max_bytes if self._stops_when_full else max_bytes // NUM_PARTS
        # Of the caller's thread: the header of the part that it appends to, and the bytes of lines handed over.
        self.num_operations = 0
        self.is_full = False
        self._encoder = OperationEncoder()
        self._header = header
        self._num_part_bytes = 0
        self._num_bytes = 0
        self._num_bytes_of_next_wake = MAX_MEMBER_BYTES
        # Of both: either may set why it ended; the deque takes an end each, and whoever stops may empty it.
        self.failure: str | None = None
        self._waiting: deque[bytes | Header] = deque()
        self._wakes = threading.Event()
        self._is_closing = False
        # Of the writing thread; the caller's only reads.
        self._sizes_bytes: dict[int, int] = {}
        self._progress = _Progress(header.part, 0, 0, 0)
        self._is_writing = False
        _keep_old_trace(self.path)
        self._file: BinaryIO = self._begin_part(header)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kvplug-trace", daemon=True)
        self._thread.start()
        # Runs at exit, also in a process that multiprocessing started; a forked child has none of it.
        self._at_exit = multiprocessing.util.Finalize(self, TraceWriter._close_at_exit, (self,), exitpriority=10)

    def append(self, operation: Operation) -> bool:
        """Take one operation. Answers False once the writing has ended: it failed, is full, or was closed."""
        if self.failure is not None or self._is_closing:
            return False
        if self._size_of_part_bytes() >= self._max_part_bytes:
            if self._stops_when_full:
                self._end_full()
                return False
            self._begin_next_part()
        line = self._encoder.encode(operation)
        self._waiting.append(line)
        self.num_operations += 1
        self._num_part_bytes += len(line)
        self._num_bytes += len(line)
        if self._num_bytes >= self._num_bytes_of_next_wake:
            self._num_bytes_of_next_wake = self._num_bytes + MAX_MEMBER_BYTES
            self._wakes.set()
            num_waiting_bytes = self._num_bytes - self._progress.num_bytes
            if num_waiting_bytes > MAX_WAITING_BYTES:
                self._stop(f"{num_waiting_bytes >> 20} MiB wait to be written: the disk does not keep up")
        return self.failure is None

    def _size_of_part_bytes(self) -> int:
        """What the part has in its file, and will have at most with the lines that wait."""
        progress = self._progress
        if progress.part != self._header.part:
            return self._num_part_bytes
        return progress.num_file_bytes + self._num_part_bytes - progress.num_line_bytes

    def _begin_next_part(self) -> None:
        self._encoder.begin_part()
        self._header = msgspec.structs.replace(
            self._header, part=self._header.part + 1, first_operation=self.num_operations
        )
        self._num_part_bytes = 0
        self._waiting.append(self._header)

    def _end_full(self) -> None:
        self.is_full = True
        _logger.warning(
            "KV cache trace %s: full (%d bytes), ended after %d operations, which stay. Serving goes on.",
            self.path,
            self._max_bytes,
            self.num_operations,
        )
        self.close(wait=False)

    def flush(self, timeout_s: float = 10.0) -> None:
        """Wait until what was appended is in the file. For tests."""
        end = threading.Event()
        pause = 0.01
        for _ in range(int(timeout_s / pause)):
            if self.failure is not None or not (self._waiting or self._is_writing):
                return
            self._wakes.set()
            end.wait(pause)

    def close(self, *, wait: bool = True) -> None:
        """Write what is left, and end the thread. In a forked child it does nothing.

        `wait=False` returns at once, for a thread that serves; at the end of the process it is waited for.
        """
        if os.getpid() != self._pid:
            return
        self._is_closing = True
        self._encoder.begin_part()  # frees what it knows of requests
        self._wakes.set()
        if wait and self._thread is not threading.current_thread():
            self._thread.join(timeout=30)
            self._at_exit.cancel()

    @staticmethod
    def _close_at_exit(writer: TraceWriter) -> None:
        writer.close()

    def _stop(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            _logger.error(
                "KV cache trace %s: stopped after operation %d: %s. Serving goes on.",
                self.path,
                self.num_operations,
                reason,
            )
        self._waiting.clear()

    # The writing thread

    def _run(self) -> None:
        try:
            while True:
                is_closing = self._is_closing
                self._is_writing = True
                self._write_waiting()
                self._is_writing = False
                if is_closing or self.failure is not None:
                    break
                self._wakes.wait(FLUSH_PERIOD_S)
                self._wakes.clear()
        except Exception as error:  # a full disk, above all
            self._stop(str(error) if isinstance(error, TraceError) else f"{type(error).__name__}: {error}")
        finally:
            self._is_writing = False
            try:
                self._file.close()
            except OSError as error:
                self._stop(f"{type(error).__name__}: {error}")

    def _next(self) -> bytes | Header | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _write_waiting(self) -> None:
        lines: list[bytes] = []
        num_bytes = 0
        while self.failure is None and (item := self._next()) is not None:
            if isinstance(item, Header):
                self._write(lines)
                lines, num_bytes = [], 0
                self._file.close()
                self._file = self._begin_part(item)
                continue
            lines.append(item)
            num_bytes += len(item)
            if num_bytes >= MAX_MEMBER_BYTES:
                self._write(lines)
                lines, num_bytes = [], 0
        self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        """One gzip member with these lines."""
        if lines:
            text = b"".join(lines)
            self._write_member(text, len(text))

    def _write_member(self, text: bytes, num_line_bytes: int) -> None:
        member = gzip.compress(text, _COMPRESSION_LEVEL, mtime=0)
        sizes_bytes = self._sizes_bytes
        while sum(sizes_bytes.values()) + len(member) > self._max_bytes and len(sizes_bytes) > 1:
            oldest = min(sizes_bytes)
            del sizes_bytes[oldest]
            path_of_part(self.path, oldest).unlink(missing_ok=True)
        self._file.write(member)
        self._file.flush()
        before, part = self._progress, max(sizes_bytes)
        sizes_bytes[part] += len(member)
        self._progress = _Progress(
            part,
            sizes_bytes[part],
            num_line_bytes + (before.num_line_bytes if before.part == part else 0),
            num_line_bytes + before.num_bytes,
        )

    def _begin_part(self, header: Header) -> BinaryIO:
        path = path_of_part(self.path, header.part)
        header = msgspec.structs.replace(header, created=datetime.now(timezone.utc).isoformat(timespec="seconds"))
        try:
            file = path.open("xb")  # what is there by now is not of this trace
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileExistsError:
            raise TraceError(
                f"trace {path}: expected no file where the trace goes on, found one of somebody else"
            ) from None
        except OSError as error:
            raise TraceError(f"trace {path}: expected a file that can be written, found {error.strerror}") from error
        self._file = file
        self._sizes_bytes[header.part] = 0
        self._write_member(encode_header(header), 0)
        return file


def _keep_old_trace(path: Path) -> None:
    kept_at = set_aside(path)
    if kept_at is not None:
        _logger.info("KV cache trace %s: the older trace there is kept as %s", path, kept_at)
