"""The files of a trace: `PATH`, `PATH.1`, `PATH.2`, ... of which the oldest may be gone."""

from __future__ import annotations

import fcntl
import zlib
from collections.abc import Iterator
from pathlib import Path

from vllm_kvplug.errors import TraceError
from vllm_kvplug.trace.format import Header, decode_header

_READ_BYTES = 1 << 16
_GZIP = 31  # zlib's window bits for a gzip member


def path_of_part(path: Path, part: int) -> Path:
    """Where a part is."""
    return path.with_name(f"{path.name}.{part}") if part else path


def parts_of(path: Path) -> list[Path]:
    """The parts that are there, in order. (A path like `t.1` names a trace of its own, too, if asked for.)"""
    numbered = {}
    if path.parent.is_dir():
        for candidate in path.parent.glob(f"{_escaped(path.name)}.*"):
            suffix = candidate.name[len(path.name) + 1 :]
            if suffix.isascii() and suffix.isdigit() and suffix == str(int(suffix)) and suffix != "0":
                numbered[int(suffix)] = candidate
    first = [path] if path.exists() else []
    return first + [numbered[number] for number in sorted(numbered)]


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


class CutShortError(Exception):
    """The file ends within a member."""


def members(path: Path) -> Iterator[tuple[bytes, int]]:
    """The texts of a part's gzip members, each with the byte of the file at which it ends.

    Raises:
        TraceError: it is no gzip file, or broken.
        CutShortError: its last member is not complete.
    """
    with path.open("rb") as file:
        data, offset = b"", 0
        while True:
            data = data or file.read(_READ_BYTES)
            if not data:
                return
            decompressor = zlib.decompressobj(_GZIP)
            pieces = []
            try:
                while not decompressor.eof:
                    pieces.append(decompressor.decompress(data))
                    offset += len(data) - len(decompressor.unused_data)
                    data = decompressor.unused_data if decompressor.eof else file.read(_READ_BYTES)
                    if not decompressor.eof and not data:
                        raise CutShortError
            except zlib.error as error:
                raise TraceError(
                    f"{path}: expected gzip members to its end, found at about byte {offset}: {error}"
                ) from None
            yield b"".join(pieces), offset


def read_header(path: Path) -> Header:
    """The header of a part.

    Raises:
        TraceError: the file is no part of a trace.
    """
    try:
        first, _ = next(members(path), (b"", 0))
    except CutShortError:
        raise TraceError(f"{path}: expected a trace's header, found a file that ends before it") from None
    except OSError as error:
        raise TraceError(f"{path}: expected a trace that can be read, found {error.strerror}") from None
    return decode_header(first.partition(b"\n")[0], str(path))


def set_aside(path: Path) -> Path | None:
    """Rename the parts of an older trace at `path` to those of a trace `path.previous`, which they replace. An empty
    file, as a start that failed leaves it, is no trace and goes.

    Returns:
        The path of the older trace now; None: there was none.

    Raises:
        TraceError: something else is at `path` or `path.previous`, or a trace that is being written. Nothing is
            changed then.
    """
    previous = path.with_name(f"{path.name}.previous")
    old_paths = _parts_to_move(path)
    has_content = any(old_path.stat().st_size for old_path in old_paths.values())
    replaced_paths = _parts_to_move(previous) if has_content else {}
    try:
        for old_path in replaced_paths.values():
            old_path.unlink()
        for part, old_path in old_paths.items():
            if has_content:
                old_path.rename(path_of_part(previous, part))
            else:
                old_path.unlink()
    except OSError as error:
        raise TraceError(f"trace {path}: expected files that can be replaced, found {error.strerror}") from error
    return previous if has_content else None


def _parts_to_move(path: Path) -> dict[int, Path]:
    """The files at `path` by their part: all of one trace, which nobody writes.

    Raises:
        TraceError: names the first that is not.
    """
    found: dict[int, Path] = {}
    trace_id: str | None = None
    for old_path in parts_of(path):
        part = 0 if old_path == path else int(old_path.name[len(path.name) + 1 :])
        header = _header_of_unused(old_path)
        found[part] = old_path
        if header is None:
            continue
        if header.part != part or trace_id not in (None, header.trace_id):
            raise TraceError(
                f"trace: will not replace {old_path}: expected part {part} of the trace {path}, "
                f"found part {header.part} of {'another' if header.part == part else 'a'} trace; move it away"
            )
        trace_id = header.trace_id
    return found


def _header_of_unused(old_path: Path) -> Header | None:
    """The header of a part that nobody writes; None: the file is empty."""
    if not old_path.is_file():
        raise TraceError(f"trace {old_path}: expected a file or none, found something else")
    try:
        header = read_header(old_path) if old_path.stat().st_size else None
        with old_path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TraceError(
            f"trace {old_path}: expected no other engine to write there, found one; give each a path of its own"
        ) from None
    except OSError as error:
        raise TraceError(f"trace {old_path}: expected a file that can be replaced, found {error.strerror}") from error
    except TraceError as error:
        raise TraceError(f"trace: will not replace {error}") from None
    return header
