"""`python -m tests.matrix [--versions "0.18.1 0.19.1"]`: kvplug with every vLLM version that it supports.

For each an environment of its own; in it upstream's own tests of that version on both sides, lockstep against that
version's manager, and a real server that answers. Exit status 1 if one failed. docs/versions.md has the table.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.matrix import environments, results
from vllm_kvplug.vllm_glue.version import SUPPORTED_VLLM_VERSIONS

NUM_SEEDS = 2000
STEPS = ("conformance", "lockstep", "serving")


class Told(NamedTuple):
    """How a step ended, and what its cell says."""

    ok: bool
    text: str


def main(arguments: list[str] | None = None) -> int:
    """Run the steps of each version; a failure does not stop the next."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--versions", default=" ".join(SUPPORTED_VLLM_VERSIONS), help="(default: %(default)s)")
    parser.add_argument("--steps", default=" ".join(STEPS), help="some of them (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="of lockstep (default: %(default)s)")
    options = parser.parse_args(arguments)
    versions, steps = options.versions.split(), options.steps.split()
    for given, known in ((versions, SUPPORTED_VLLM_VERSIONS), (steps, STEPS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"expected some of {', '.join(known)}, found {unknown[0]!r}")
    run: dict[str, Callable[[str], Told]] = {
        "conformance": conformance,
        "lockstep": lambda version: lockstep(version, options.seeds),
        "serving": serving,
    }
    has_failed = False
    for version in versions:
        environments.make(version)
        for step in steps:
            print(f"\n== vLLM {version}: {step} ==", flush=True)
            started = time.monotonic()
            told = run[step](version)
            results.keep(version, step, ok=told.ok, told=told.text)
            print(f"== vLLM {version}: {step}: {told.text} ({time.monotonic() - started:.0f} s)", flush=True)
            has_failed |= not told.ok
    print(f"\n{results.table(results.load())}")
    return int(has_failed)


def conformance(version: str) -> Told:
    """Upstream's own tests of the version, plain and with kvplug."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts.json"
        done = _run(version, "-m", "tests.conformance", "--json", str(path))
        if not path.exists():
            return Told(False, f"exit status {done}, no test ran")
        counts = json.loads(path.read_text())
    upstream, ours = counts["upstream"], counts["kvplug"]
    left_out = f", {ours['left_out']} left out by design" if ours["left_out"] else ""
    return Told(
        done == 0,
        f"kvplug {ours['passed']} of {ours['selected']}{left_out}; upstream {upstream['passed']} of "
        f"{upstream['selected']}",
    )


def lockstep(version: str, num_seeds: int) -> Told:
    """Random traffic on both managers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.xml"
        test = "tests/lockstep/test_lockstep.py"
        done = _run(
            version,
            "-m",
            "pytest",
            test,
            "-q",
            "--lockstep-seeds",
            str(num_seeds),
            "-o",
            "junit_family=legacy",
            f"--junit-xml={path}",
        )
        root = xml.etree.ElementTree.parse(path).getroot() if path.exists() else None
    found = {one.get("name"): int(one.get("value", "0")) for one in root.iter("property")} if root is not None else {}
    if done != 0 or "calls" not in found:
        return Told(False, f"exit status {done}")
    return Told(True, f"{found['calls']:,} calls equal ({num_seeds:,} seeds), {found['calls_as_upstream']:,} unmended")


def serving(version: str) -> Told:
    """`kvplug demo` in the version's environment: a real server with kvplug, two requests, the second with hits."""
    command = environments.python_of(version).parent / "kvplug"
    done = subprocess.run(
        [str(command), "demo"], cwd=environments.ROOT, env=_environment(version), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    print(done.stdout, end="")
    if done.returncode != 0:
        return Told(False, f"exit status {done.returncode}")
    manager = re.search(r"^served by +(\S+)", done.stdout, re.MULTILINE)
    cached = re.findall(r"(\d+) of them cached", done.stdout)
    if manager is None or len(cached) != 2:
        return Told(False, "expected a manager's name and two answers, found neither")
    return Told(manager[1] == "kvplug", f"{manager[1]} answers, {cached[-1]} cached tokens")


def _run(version: str, *arguments: str) -> int:
    python = str(environments.python_of(version))
    return subprocess.run(
        [python, *arguments], cwd=environments.ROOT, env=_environment(version), stdin=subprocess.DEVNULL, check=False
    ).returncode


def _environment(version: str) -> dict[str, str]:
    """0.18's CPU worker does not start unless these two libraries are preloaded; the second is the environment's."""
    environ = dict(os.environ)
    if version.startswith("0.18."):
        allocator = ctypes.util.find_library("tcmalloc_minimal")
        if allocator is None:
            sys.exit("vLLM 0.18 needs libtcmalloc_minimal, found none; Debian: apt-get install libtcmalloc-minimal4")
        openmp = environments.FOLDER / version / "venv" / "lib" / "libiomp5.so"
        environ["LD_PRELOAD"] = f"{allocator}:{openmp}"
    return environ


if __name__ == "__main__":
    sys.exit(main())
