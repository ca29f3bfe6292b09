"""`python -m tests.suites [NAME ...]`: the test suites, core first, and at the end the time of each.

Each has a process of its own. A suite that fails does not stop the next. Exit status 1 if one failed or ran no test.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
# Name -> pytest folder; `core` imports no vLLM and takes seconds. Upstream's own tests are fetched and have a runner of
# their own, `python -m tests.conformance`; `harness` tests that runner.
FOLDERS = {
    "core": "core",
    "lockstep": "lockstep",
    "scheduler": "scheduler",
    "faults": "faults",
    "glue": "glue",
    "cli": "cli",
    "evals": "evals",
    "conformance": None,
    "harness": "conformance",
    "serving": "serving",
}
NAMES = tuple(FOLDERS)


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
        folder = FOLDERS[name]
        if folder is None:
            command = [sys.executable, "-m", "tests.conformance"]
        else:
            options = ["-q", "--durations=3", f"--junit-xml={report}"]
            command = [sys.executable, "-m", "pytest", str(TESTS / folder), *options]
        status = subprocess.run(command, cwd=TESTS.parent, stdin=subprocess.DEVNULL, check=False).returncode
        passed, failed, skipped = _counts(report)
    if folder is None:
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
