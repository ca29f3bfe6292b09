"""`make ab` runs both comparisons, and ends with the worse status."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize(
    ("statuses", "asked", "worst"),
    [
        ((0, 0), ["eval", "bench"], None),
        ((1, 0), ["eval", "bench"], 1),
        ((3, 0), ["eval", "bench"], 3),
        ((3, 1), ["eval", "bench"], 1),
        ((0, 1), ["eval", "bench"], 1),
        ((2, 0), ["eval"], 2),
        ((130, 0), ["eval"], 130),
    ],
)
def test_both_run_and_the_worst_counts(
    statuses: tuple[int, int], asked: list[str], worst: int | None, tmp_path: Path
) -> None:
    kvplug = tmp_path / "kvplug"
    seen = tmp_path / "seen"
    kvplug.write_text(
        f'#!/bin/sh\necho "$2" >> {seen}\ncase "$2" in eval) exit {statuses[0]};; *) exit {statuses[1]};; esac\n'
    )
    kvplug.chmod(0o755)
    # -o: the environment is taken to be there.
    command = ["make", "--no-print-directory", "-o", "env", "ab", f"BIN={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert seen.read_text().split() == asked
    assert done.returncode == (0 if worst is None else 2)
    assert (f"Error {worst}" in done.stderr) == (worst is not None), done.stderr
