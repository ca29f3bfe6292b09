"""What is run with each vLLM version, in the version's environment, and what the table says of it."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import xml.etree.ElementTree
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.matrix import environments

# The suites that are about vLLM's parts, engines included. The others are about kvplug alone, or have a step.
_SUITES = ("scheduler", "faults", "glue")


@dataclass(frozen=True)
class Told:
    """How a step ended, and what its cell says."""

    ok: bool
    text: str


@dataclass(frozen=True)
class Options:
    """Of the command line.

    Attributes:
        num_seeds: of lockstep.
    """

    num_seeds: int = 2000


def conformance(version: str, options: Options) -> Told:
    """Upstream's own tests of the version, plain and with kvplug."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts.json"
        done = _run(version, ["-m", "tests.conformance", "--json", str(path)])
        if not path.exists():
            return Told(False, f"exit status {done.returncode}, no test ran")
        counts = json.loads(path.read_text())
    upstream, ours = counts["upstream"], counts["kvplug"]
    left_out = f", {ours['left_out']} left out by design" if ours["left_out"] else ""
    return Told(
        done.returncode == 0,
        f"kvplug {ours['passed']} of {ours['selected']}{left_out}; upstream {upstream['passed']} of "
        f"{upstream['selected']}",
    )


def lockstep(version: str, options: Options) -> Told:
    """Random traffic on both managers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.xml"
        command = ["-m", "pytest", "tests/lockstep/test_lockstep.py", "-q", "-o", "junit_family=legacy"]
        command += ["--lockstep-seeds", str(options.num_seeds), f"--junit-xml={path}"]
        status = _run(version, command).returncode
        root = xml.etree.ElementTree.parse(path).getroot() if path.exists() else None
    found = {one.get("name"): int(one.get("value", "0")) for one in root.iter("property")} if root is not None else {}
    if status != 0 or "calls" not in found:
        return Told(False, f"exit status {status}")
    return Told(
        True,
        f"{found['calls']:,} calls equal ({options.num_seeds:,} seeds), {found['calls_as_upstream']:,} unmended",
    )


def suites(version: str, options: Options) -> Told:
    """This project's tests of what is vLLM's: its schedulers, its faults, the glue and engines."""
    done = _run(version, ["-m", "tests.suites", *_SUITES], is_shown=False)
    found = re.fullmatch(r"(\d+) passed, (\d+) failed, (\d+) skipped", (done.stdout.splitlines() or [""])[-1])
    if found is None:
        return Told(False, f"exit status {done.returncode}")
    passed, failed, skipped = map(int, found.groups())
    failing = f", {failed} failed" if failed or done.returncode else ""
    return Told(done.returncode == 0, f"{passed:,} passed{failing}, {skipped} skipped")


def serving(version: str, options: Options) -> Told:
    """`kvplug demo`: a real server with kvplug, two requests, the second with hits."""
    return _demo(version, {})


def patched(version: str, options: Options) -> Told:
    """Our fork patch in a copy of the installed vLLM: kvplug and a fork's own manager in engines, and a server."""
    status = _run(version, ["-m", "pytest", "-q", "tests/patches/test_engines.py"]).returncode
    if status != 0:
        return Told(False, f"engines: exit status {status}")
    with tempfile.TemporaryDirectory() as folder:
        patched_tree = {"PYTHONPATH": folder}
        look = "from vllm_kvplug.vllm_glue import patched_tree; raise SystemExit(not patched_tree.is_there())"
        if (
            _run(version, ["-m", "tests.patches.tree", folder]).returncode != 0
            or _run(version, ["-c", look], patched_tree).returncode != 0
        ):
            return Told(False, "the patch was not applied")
        told = _demo(version, patched_tree)
    return Told(told.ok, f"engines with kvplug and a toy; {told.text}")


@dataclass(frozen=True)
class Step:
    """A column of the table.

    Attributes:
        title: of the column.
        run: runs it and tells how it ended.
    """

    title: str
    run: Callable[[str, Options], Told]


STEPS = {
    "conformance": Step("upstream's own tests, passed of N", conformance),
    "lockstep": Step("lockstep", lockstep),
    "suites": Step("tests of scheduler, faults, glue", suites),
    "serving": Step("a real server", serving),
    "patched": Step("with the patch", patched),
}


def _run(
    version: str, arguments: list[str], variables: Mapping[str, str] | None = None, *, is_shown: bool = True
) -> subprocess.CompletedProcess[str]:
    """Python with these arguments in the version's environment; its output is shown, or kept and shown at the end."""
    done = subprocess.run(
        [str(environments.python_of(version)), *arguments], cwd=environments.ROOT,
        env=environments.variables(version) | dict(variables or {}), stdin=subprocess.DEVNULL,
        stdout=None if is_shown else subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if not is_shown:
        print(done.stdout, end="", flush=True)
    return done


def _demo(version: str, variables: Mapping[str, str]) -> Told:
    done = _run(version, ["-m", "vllm_kvplug.cli.main", "demo"], variables, is_shown=False)
    if done.returncode != 0:
        return Told(False, f"exit status {done.returncode}")
    manager = re.search(r"^served by +(\S+)", done.stdout, re.MULTILINE)
    cached = re.findall(r"(\d+) of them cached", done.stdout)
    if manager is None or len(cached) != 2:
        return Told(False, "expected a manager's name and two answers, found neither")
    return Told(manager[1] == "kvplug", f"{manager[1]} answers, {cached[-1]} cached tokens")
