"""Files of a tree replaced by others: all of them or none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path


class _Swap:
    """One file: `new` and `old` lie beside it, so that each step is a rename in one file system."""

    def __init__(self, target: Path, source: Path) -> None:
        self.target = target
        self.source = source
        self.new, self.old = (
            target.with_name(f".{target.name}.kvplug-{what}-{os.getpid()}") for what in ("new", "old")
        )

    def stage(self) -> None:
        """Everything that needs space. The mode stays what it was."""
        there = self.target.is_file()
        if there:
            try:
                os.link(self.target, self.old)
            except OSError:  # a file system without hard links
                shutil.copy2(self.target, self.old)
        if self.source.is_file():
            shutil.copyfile(self.source, self.new)
            shutil.copymode(self.target if there else self.source, self.new)

    def swap(self) -> None:
        if self.new.is_file():
            os.replace(self.new, self.target)
        else:
            self.target.unlink(missing_ok=True)

    def restore(self) -> None:
        if self.old.is_file():
            os.replace(self.old, self.target)
        else:
            self.target.unlink(missing_ok=True)

    def clean(self) -> None:
        self.new.unlink(missing_ok=True)
        self.old.unlink(missing_ok=True)


def replace_files(folder: Path, source: Path, names: Sequence[str]) -> None:
    """Replace the named files of `folder` by those of `source`; what is not there is removed.

    A file is replaced, never written to, so another name of it (a hard link) keeps what it has. Modes are kept.

    Raises:
        OSError: a file cannot be written or replaced; all are as they were.
    """
    swaps = [_Swap(folder / name, source / name) for name in names]
    begun: list[_Swap] = []
    try:
        for swap in swaps:
            swap.stage()
        for swap in swaps:
            begun.append(swap)
            swap.swap()
    except BaseException:
        for swap in begun:
            swap.restore()  # where this fails the backups stay
        _clean(swaps)
        raise
    _clean(swaps)


def _clean(swaps: Sequence[_Swap]) -> None:
    for swap in swaps:
        swap.clean()
