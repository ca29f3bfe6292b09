"""Reads a trace: all its parts that are there, in order, as one stream of operations."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vllm_kvplug.errors import TraceError
from vllm_kvplug.trace.format import Header, OperationDecoder
from vllm_kvplug.trace.operations import Operation
from vllm_kvplug.trace.parts import CutShortError, members, parts_of, read_header


class TraceReader:
    """The operations of a trace: iterate over it, once or several times.

    Args:
        path: of the first part, `PATH`; it may be gone where `PATH.1`, ... are there.

    Attributes:
        header: of the first part that is there.
        is_complete: whether the trace's first part is there.
        num_operations: that the last iteration has read so far.
        num_read_bytes, num_bytes: how far the last iteration is in the files, and their size.
        is_cut: the last iteration found the last part's end cut off, as after a crash: the last member is left out.

    Raises:
        TraceError: no trace is there, parts are missing in between, or they are of different traces.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._paths = parts_of(self.path)
        if not self._paths:
            raise TraceError(f"{self.path}: expected a trace, found no file")
        self.is_cut = self._lacks_its_last_header()
        headers = [read_header(part_path) for part_path in self._paths]
        self._headers = headers
        self.header: Header = headers[0]
        self.is_complete = self.header.first_operation == 0
        self.num_operations = 0
        self._ends_before_header = self.is_cut
        self.num_bytes = sum(part_path.stat().st_size for part_path in self._paths)
        self.num_read_bytes = 0
        for part_path, header, before in zip(self._paths[1:], headers[1:], headers, strict=False):
            if header.trace_id != self.header.trace_id:
                raise TraceError(f"{part_path}: expected a part of {self._paths[0]}, found one of another trace")
            if header.part != before.part + 1:
                raise TraceError(f"{part_path}: expected part {before.part + 1} of the trace, found part {header.part}")

    def _lacks_its_last_header(self) -> bool:
        """Whether a crash came as the last part was begun: that part is nothing then."""
        try:
            next(members(self._paths[-1]), None)
        except CutShortError:
            if len(self._paths) > 1:
                self._paths.pop()
                return True
        except OSError:
            pass  # told when it is read
        return False

    def __iter__(self) -> Iterator[Operation]:
        """
        Raises:
            TraceError: the file is broken.
        """
        self.num_operations, self.is_cut, self.num_read_bytes = 0, self._ends_before_header, 0
        decoder = OperationDecoder()
        number = self.header.first_operation
        for part_path, header in zip(self._paths, self._headers, strict=True):
            if header.first_operation != number:
                raise TraceError(
                    f"{part_path}: expected operation {number} to be its first, found {header.first_operation}"
                )
            decoder.begin_part()
            for line in self._lines(part_path):
                try:
                    operation = decoder.decode(line, number)
                except (ValueError, KeyError, TypeError) as error:  # msgspec's errors are ValueErrors
                    raise TraceError(f"{part_path}: operation {number}: expected an operation, found {error}") from None
                number += 1
                self.num_operations += 1
                yield operation

    def _lines(self, part_path: Path) -> Iterator[bytes]:
        is_header, num_earlier_bytes = True, self.num_read_bytes
        try:
            for text, num_bytes in members(part_path):
                for line in text.splitlines():
                    if not is_header:
                        yield line
                    is_header = False
                self.num_read_bytes = num_earlier_bytes + num_bytes
        except CutShortError:
            if part_path != self._paths[-1]:
                raise TraceError(f"{part_path}: expected a complete part, found its end cut off") from None
            self.is_cut = True
