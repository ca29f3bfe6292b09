"""What a run of upstream's suite says: the table of both sides, and every reason to fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.conformance.expectations import ListedTest


@dataclass(frozen=True)
class Swapped:
    """What the plugin counted while ours was in force."""

    names: list[str]
    made_ours: dict[str, int]
    made_upstream: dict[str, int]
    made_by_test: dict[str, dict[str, int]]
    leftovers: list[str]
    inherited: list[str]


@dataclass(frozen=True)
class Results:
    """One run of the suite.

    Attributes:
        selected: the node ids that should have run.
        outcomes: node id -> passed, failed or skipped.
        messages: node id -> the first line of its failure.
        swapped: what was in force; None for plain upstream.
    """

    selected: list[str]
    outcomes: dict[str, str]
    messages: dict[str, str] = field(default_factory=dict)
    swapped: Swapped | None = None

    @classmethod
    def of_report(cls, report: Mapping[str, Any]) -> Results:
        """From the JSON that the plugin wrote."""
        swap = report.get("swap")
        return cls(report["selected"], report["outcomes"], report["messages"], Swapped(**swap) if swap else None)

    def outcome(self, node_id: str) -> str:
        """passed, failed, skipped, or `not run`."""
        return self.outcomes.get(node_id, "not run")


def problems_of_upstream(results: Results) -> list[str]:
    """Why the plain run fails. Empty: it passes."""
    return [
        _problem("upstream", results, node_id) for node_id in results.selected if results.outcome(node_id) != "passed"
    ]


def problems_of_ours(results: Results, listed: Mapping[str, ListedTest], must_use_ours: Collection[str]) -> list[str]:
    """Why the run with kvplug swapped in fails. Empty: it passes.

    Args:
        results: of that run.
        listed: the tests that are not expected to pass.
        must_use_ours: node ids that prove nothing unless they construct a class of ours.
    """
    problems = []
    for node_id in results.selected:
        passed, test = results.outcome(node_id) == "passed", listed.get(node_id)
        if passed and test is not None:
            problems.append(f"kvplug: {node_id} passes but is listed as {test.status}: remove it from open.toml")
        elif not passed and (test is None or test.error not in results.messages.get(node_id, "")):
            problems.append(_problem("kvplug", results, node_id))
    swapped = results.swapped
    if swapped is None:
        return [*problems, "kvplug: nothing was swapped in"]
    if swapped.made_upstream:
        problems.append(f"kvplug: classes of upstream were constructed: {_counts(swapped.made_upstream)}")
    if not swapped.made_ours:
        problems.append("kvplug: no class of ours was constructed")
    problems += [
        f"kvplug: {node_id} passes without constructing a class of ours"
        for node_id in results.selected
        if results.outcome(node_id) == "passed" and node_id in must_use_ours and not swapped.made_by_test.get(node_id)
    ]
    problems += [f"kvplug: a reference to upstream is left at {reference}" for reference in swapped.leftovers]
    problems += [f"kvplug: {base} is a class of vLLM" for base in swapped.inherited]
    return problems


def _problem(side: str, results: Results, node_id: str) -> str:
    message = results.messages.get(node_id, "")
    return f"{side}: {node_id} {results.outcome(node_id)}" + (f": {message}" if message else "")


def table(sides: Mapping[str, Results | None], listed: Mapping[str, ListedTest]) -> str:
    """Passed, failed and left out by file, the sides beside each other. Only kvplug may leave a listed test out."""
    ran = {side: results for side, results in sides.items() if results is not None}
    node_ids = list(dict.fromkeys(node_id for results in ran.values() for node_id in results.selected))
    files = list(dict.fromkeys(node_id.split("::")[0] for node_id in node_ids))
    header = ["file", *(f"{side} {column}" for side in ran for column in ("passed", "failed", "left out"))]
    rows = []
    for name in [*files, "all"]:
        chosen = [node_id for node_id in node_ids if name in ("all", node_id.split("::")[0])]
        row = [name.removeprefix("tests/v1/")]
        for side, results in ran.items():
            exceptions = listed if side == "kvplug" else {}
            counts = Counter(_column(results, node_id, exceptions) for node_id in chosen)
            row += [str(counts[column]) for column in ("passed", "failed", "left out")]
        rows.append(row)
    return _aligned([header, *rows])


def _column(results: Results, node_id: str, listed: Mapping[str, ListedTest]) -> str:
    outcome = results.outcome(node_id)
    if outcome == "passed":
        return "passed"
    return "left out" if node_id in listed or outcome == "skipped" else "failed"


def reasons(ours: Results, listed: Mapping[str, ListedTest]) -> str:
    """How many tests each reason of open.toml leaves out of this run."""
    counts = Counter(listed[n] for n in ours.selected if n in listed and ours.outcome(n) != "passed")
    return "\n".join(f"{count:4}  {test.status}: {test.reason}" for test, count in counts.most_common())


def in_force(swapped: Swapped) -> str:
    """One line: what of both sides was constructed."""
    users = sum(1 for made in swapped.made_by_test.values() if made)
    return (
        f"{len(swapped.names)} names swapped; ours constructed: {_counts(swapped.made_ours)}, by {users} tests; "
        f"upstream's constructed: {_counts(swapped.made_upstream) or 'none'}"
    )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _aligned(rows: Iterable[list[str]]) -> str:
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
