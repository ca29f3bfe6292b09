"""Patched trees to test on. `PYTHONPATH=$(python -m tests.patches.tree FOLDER) pytest tests/glue` tests the other way.

The installed package is never patched in place: FOLDER gets a copy, made of hard links where that can be.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tarfile
from pathlib import Path

from tests.conformance.sdist import sdist_path
from vllm_kvplug.cli.fork_patches import Tree, match, register


def installed_folder() -> Path:
    """The folder that holds the installed package vllm."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))).parent


def make_patched_copy(folder: Path) -> Path:
    """The installed vLLM, patched; `folder` then goes in front on PYTHONPATH."""
    shutil.copytree(installed_folder() / "vllm", folder / "vllm", copy_function=_link_or_copy)
    match(Tree.at(folder)).require_known().apply()
    return folder


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def released_tree(version: str, folder: Path) -> Path:
    """Of vLLM's released sources what a patch reads: the files that it changes, and those that tell the version."""
    (patch,) = [patch for patch in register().patch if patch.vllm == version]
    prefix = f"vllm-{version}/"
    wanted = {prefix + name for name in (*patch.files, "PKG-INFO", "vllm/__init__.py", "vllm/_version.py")}
    with tarfile.open(sdist_path(version)) as tar:
        for member in tar:
            source = tar.extractfile(member) if member.name in wanted and member.isfile() else None
            if source is not None:
                path = folder / member.name.removeprefix(prefix)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(source.read())
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, git's own and compiled ones left out."""
    found = (path for path in folder.rglob("*") if path.is_file())
    kept = (path for path in found if not {".git", "__pycache__"} & set(path.relative_to(folder).parts))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in kept}


if __name__ == "__main__":
    print(make_patched_copy(Path(sys.argv[1])))
