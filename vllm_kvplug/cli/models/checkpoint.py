"""Checksums of a checkpoint folder, without torch: a model that is present is checked in about a second."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

_CHUNK_BYTES = 1 << 20


def parameters_checksum(folder: Path) -> str:
    """SHA-256 over every parameter of the folder's safetensors files: name, dtype, shape and bytes, sorted by name.

    How the parameters are spread over files, and the files' own metadata, do not count.

    Raises:
        ValueError: a file is cut short, a parameter is there twice, or there is none at all.
    """
    located: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data_start, header = _read_header(path)
        for name, entry in header.items():
            if name in located:
                raise ValueError(f"parameter {name!r} is in two files, {located[name][0].name} and {path.name}")
            located[name] = (path, data_start, entry)
    if not located:
        raise ValueError("no parameters: expected at least one *.safetensors file")
    digest = hashlib.sha256()
    for name in sorted(located):
        path, data_start, entry = located[name]
        begin, end = entry["data_offsets"]
        digest.update(json.dumps([name, entry["dtype"], entry["shape"], end - begin]).encode())
        with path.open("rb") as file:
            file.seek(data_start + begin)
            _hash_bytes(digest, file, end - begin, f"{path.name}: parameter {name!r}")
    return digest.hexdigest()


def _read_header(path: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """(where the data starts, parameter name -> dtype, shape and offsets) of one safetensors file."""
    with path.open("rb") as file:
        prefix = file.read(8)
        num_header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= num_header_bytes <= path.stat().st_size - 8:
            raise ValueError(f"{path.name}: expected a safetensors header, found a damaged or cut file")
        header = json.loads(file.read(num_header_bytes))
    header.pop("__metadata__", None)
    return 8 + num_header_bytes, header


def _hash_bytes(digest: Any, file: BinaryIO, num_bytes: int, what: str) -> None:
    remaining = num_bytes
    while remaining > 0:
        chunk = file.read(min(_CHUNK_BYTES, remaining))
        if not chunk:
            raise ValueError(f"{what}: expected {num_bytes} bytes, found {num_bytes - remaining}")
        digest.update(chunk)
        remaining -= len(chunk)


def file_checksum(path: Path) -> str:
    """SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        _hash_bytes(digest, file, path.stat().st_size, path.name)
    return digest.hexdigest()
