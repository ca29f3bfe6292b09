"""Which of upstream's tests are run, what they must have used, and which of them are not expected to pass."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.sdist import VLLM_VERSION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HERE = Path(__file__).parent
LISTS_FOLDER = _HERE / "lists"
LISTS = ("relevant", "fast", "end_to_end", "slow")
# What a suite runs, list by list; `standard` is all that is a matter of minutes. `relevant` is part of `fast`.
SUITES = {"standard": ("fast", "end_to_end"), **{name: (name,) for name in LISTS}}

# Its engine was made for the test before it, which must construct ours.
_USES_THE_ENGINE_BEFORE = {"tests/v1/core/test_scheduler_e2e.py::test_prefix_cache_stats_is_recorded"}
_HASHING_TEST = re.compile("::test_(generate_block_hash_extra_keys|hash_|request_block_hasher)")


@dataclass(frozen=True)
class ListedTest:
    """A test that is listed as not passing.

    Attributes:
        status: `open` (kvplug cannot do it yet) or `left out` (by design).
        reason: why, in words.
        error: what the test's failure says; another failure is a fault.
    """

    status: str
    reason: str
    error: str


def node_ids(suite: str) -> list[str]:
    """The tests of a suite in the installed vLLM, by pytest node id."""
    return [node_id for name in SUITES[suite] for node_id in listed_in(name, VLLM_VERSION)]


def changes_path(version: str) -> Path:
    """Where the changes of a version's series are: its releases have the same test files here."""
    return LISTS_FOLDER / f"changes-{version.rpartition('.')[0]}.txt"


def listed_in(name: str, version: str) -> list[str]:
    """The tests of one list in a version: those of the baseline, with the changes that `survey.py` has found."""
    found = (LISTS_FOLDER / f"{name}.txt").read_text().splitlines()
    path = changes_path(version)
    if not path.exists():
        return found
    changes = [line.split(" ", 2) for line in path.read_text().splitlines() if line.startswith(("+", "-"))]
    gone = {node_id for sign, changed, node_id in changes if sign == "-" and changed == name}
    return [one for one in found if one not in gone] + [
        node_id for sign, changed, node_id in changes if sign == "+" and changed == name
    ]


def must_construct_ours() -> set[str]:
    """The tests that prove nothing unless they construct a class of ours."""
    return {*node_ids("relevant"), *node_ids("end_to_end")} - _USES_THE_ENGINE_BEFORE


def must_hash_with_ours() -> set[str]:
    """The tests that prove nothing unless they call a function of ours: those of block hashes."""
    return {
        node_id for node_id in node_ids("fast") if "test_kv_cache_utils" in node_id and _HASHING_TEST.search(node_id)
    }


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
