"""Which of upstream's tests are run, and which of them are not expected to pass yet."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HERE = Path(__file__).parent
SUITES = ("relevant", "fast", "slow")


@dataclass(frozen=True)
class ListedTest:
    """A test that is listed as not passing.

    Attributes:
        status: `open` (kvplug cannot do it yet) or `left out` (kvplug does without, by design).
        reason: why, in words.
        error: what the test's failure says; another failure is a fault.
    """

    status: str
    reason: str
    error: str


def node_ids(suite: str) -> list[str]:
    """The tests of a suite, by pytest node id."""
    return (_HERE / "lists" / f"{suite}.txt").read_text().splitlines()


def listed_tests() -> dict[str, ListedTest]:
    """Every test of open.toml: node id -> why it does not pass."""
    listed: dict[str, ListedTest] = {}
    groups = tomllib.loads((_HERE / "open.toml").read_text())
    for key, status in (("open", "open"), ("left_out", "left out")):
        for group in groups.get(key, []):
            for node_id in group["tests"]:
                if node_id in listed:
                    raise ValueError(f"open.toml: {node_id} is listed twice")
                listed[node_id] = ListedTest(status, group["reason"], group["error"])
    return listed
