"""`python -m tests.suites [NAME ...]`: the test suites, core first, and at the end the time of each.

Each has a process of its own. A suite that fails does not stop the next. Exit status 1 if one failed or ran no test.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from dataclasses import dataclass
from pathlib import Path

from tests.processors import ONE_THREAD, num_cpus

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Suite:
    """What to run.

    Attributes:
        folder: pytest's; None: `python -m tests.conformance`.
        split_by: pytest-xdist's way to share it among two workers, where there are two CPUs. `worksteal`: any test to
            any worker; `loadfile`: a file's tests stay together, in their order. None: one process.
    """

    folder: str | None
    split_by: str | None = None


# In their order. Split is what takes minutes, for little in it uses a second core by itself: an engine computes on one
# thread here. `core` imports no vLLM and takes half a minute.
SUITES = {
    "core": Suite("core"),
    "lockstep": Suite("lockstep", "worksteal"),
    "scheduler": Suite("scheduler", "worksteal"),
    "faults": Suite("faults", "worksteal"),
    "glue": Suite("glue", "worksteal"),
    # Its tests of the wheel share one.
    "cli": Suite("cli", "loadfile"),
    # Fetches the released sources; most of its minutes are the tests of `glue` once more, on a patched vLLM.
    "patches": Suite("patches", "worksteal"),
    "evals": Suite("evals", "worksteal"),
    # Upstream's own tests are fetched and have a runner of their own, which runs its two sides at once.
    "conformance": Suite(None),
    # Of that runner.
    "harness": Suite("conformance", "worksteal"),
    # The tests of a file share a server, and the last one stops it.
    "serving": Suite("serving", "loadfile"),
}
NAMES = tuple(SUITES)


@dataclass(frozen=True)
class Outcome:
    """How one suite ended. `num_failed` counts a suite that could not run as one."""

    name: str
    status: int
    duration_s: float
    num_passed: int = 0
    num_failed: int = 0
    num_skipped: int = 0


def run_suite(name: str) -> Outcome:
    """Run one suite; its output goes to the terminal."""
    print(f"\n== {name} ==", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        suite = SUITES[name]
        # With it every process would compile vLLM and torch again, for more than half of the seconds that it starts in.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        if suite.folder is None:
            command = [sys.executable, "-m", "tests.conformance"]
        else:
            command = [sys.executable, "-m", "pytest", str(TESTS / suite.folder)]
            command += ["-q", "--durations=3", f"--junit-xml={report}"]
        if suite.split_by is not None and num_cpus() > 1:
            command += ["-n", "2", "--dist", suite.split_by]
            environment |= ONE_THREAD
        done = subprocess.run(command, cwd=TESTS.parent, env=environment, stdin=subprocess.DEVNULL, check=False)
        status = done.returncode
        passed, failed, skipped = _counts(report)
    if suite.folder is None:
        passed = int(status == 0)
    elif passed == 0:
        status = status or 1
    return Outcome(name, status, time.monotonic() - started, passed, failed or int(status != 0), skipped)


def _counts(report: Path) -> tuple[int, int, int]:
    """(passed, failed, skipped) of pytest's report; zeros where it wrote none."""
    try:
        suites = list(xml.etree.ElementTree.parse(report).getroot().iter("testsuite"))
    except (OSError, xml.etree.ElementTree.ParseError):
        return 0, 0, 0
    total, failures, errors, skipped = (
        sum(int(suite.get(key, "0")) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    return total - failures - errors - skipped, failures + errors, skipped


def print_summary(outcomes: list[Outcome]) -> None:
    """A line for each suite, and the sum as the last line."""
    print("\nsuite          minutes  passed  failed  skipped")
    for outcome in outcomes:
        minutes = f"{int(outcome.duration_s) // 60}:{int(outcome.duration_s) % 60:02d}"
        counts = f"{outcome.num_passed:7d} {outcome.num_failed:7d} {outcome.num_skipped:8d}"
        print(f"{outcome.name:<14} {minutes:>7} {counts}")
    passed, failed, skipped = (
        sum(getattr(outcome, f"num_{kind}") for outcome in outcomes) for kind in ("passed", "failed", "skipped")
    )
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the suites that are named, or all, in the order of NAMES."""
    parser = argparse.ArgumentParser(prog="python -m tests.suites", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)} (default: all)")
    chosen = parser.parse_args(arguments).names
    unknown = [name for name in chosen if name not in NAMES]
    if unknown:
        parser.error(f"no suite {unknown[0]!r}; suites: {', '.join(NAMES)}")
    outcomes = [run_suite(name) for name in NAMES if name in chosen or not chosen]
    print_summary(outcomes)
    return int(any(outcome.status != 0 for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
