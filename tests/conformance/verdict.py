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
    called_ours: dict[str, int]
    called_by_test: dict[str, dict[str, int]]
    leftovers: list[str]
    inherited: list[str]

    def __add__(self, other: Swapped) -> Swapped:
        return Swapped(
            names=self.names,
            made_ours=_sum(self.made_ours, other.made_ours),
            made_upstream=_sum(self.made_upstream, other.made_upstream),
            made_by_test=self.made_by_test | other.made_by_test,
            called_ours=_sum(self.called_ours, other.called_ours),
            called_by_test=self.called_by_test | other.called_by_test,
            leftovers=list(dict.fromkeys(self.leftovers + other.leftovers)),
            inherited=list(dict.fromkeys(self.inherited + other.inherited)),
        )


def _sum(counts: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    return dict(Counter(counts) + Counter(others))


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

    def __add__(self, other: Results) -> Results:
        """Both runs as one. Both are of the same side."""
        swapped = self.swapped + other.swapped if self.swapped and other.swapped else None
        return Results(
            self.selected + other.selected, self.outcomes | other.outcomes, self.messages | other.messages, swapped
        )

    def outcome(self, node_id: str) -> str:
        """passed, failed, skipped, or `not run`."""
        return self.outcomes.get(node_id, "not run")


def counts(results: Results, listed: Mapping[str, ListedTest]) -> dict[str, int]:
    """How many tests were to run, passed, and are listed as not passing (of kvplug)."""
    outcomes = [results.outcome(node_id) for node_id in results.selected]
    return {
        "selected": len(outcomes),
        "passed": outcomes.count("passed"),
        "left_out": sum(node_id in listed for node_id in results.selected),
    }


def problems_of_upstream(results: Results) -> list[str]:
    """Why the plain run fails. Empty: it passes."""
    return [
        _problem("upstream", results, node_id) for node_id in results.selected if results.outcome(node_id) != "passed"
    ]


def problems_of_ours(
    results: Results,
    listed: Mapping[str, ListedTest],
    must_construct_ours: Collection[str],
    must_call_ours: Collection[str] = (),
) -> list[str]:
    """Why the run with kvplug swapped in fails. Empty: it passes.

    Args:
        results: of that run.
        listed: the tests that are not expected to pass.
        must_construct_ours: node ids that prove nothing unless they construct a class of ours.
        must_call_ours: node ids that prove nothing unless they call a function of ours.
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
    passed_ids = [node_id for node_id in results.selected if results.outcome(node_id) == "passed"]
    problems += [
        f"kvplug: {node_id} passes without constructing a class of ours"
        for node_id in passed_ids
        if node_id in must_construct_ours and not swapped.made_by_test.get(node_id)
    ]
    problems += [
        f"kvplug: {node_id} passes without calling a function of ours"
        for node_id in passed_ids
        if node_id in must_call_ours and not swapped.called_by_test.get(node_id)
    ]
    problems += [f"kvplug: a reference to upstream is left at {reference}" for reference in swapped.leftovers]
    problems += [f"kvplug: {base} is a class of vLLM" for base in swapped.inherited]
    return problems


def _problem(side: str, results: Results, node_id: str) -> str:
    message = results.messages.get(node_id, "")
    return f"{side}: {node_id} {results.outcome(node_id)}" + (f": {message}" if message else "")


def table(
    sides: Mapping[str, Results | None],
    listed: Mapping[str, ListedTest],
    suites: Mapping[str, Collection[str]] | None = None,
) -> str:
    """Passed, failed and left out by file and by suite, the sides beside each other.

    Only kvplug may leave a listed test out.
    """
    ran = {side: results for side, results in sides.items() if results is not None}
    node_ids = list(dict.fromkeys(node_id for results in ran.values() for node_id in results.selected))
    rows = {name: [n for n in node_ids if n.split("::")[0] == name] for name in (n.split("::")[0] for n in node_ids)}
    for suite, members in (suites or {}).items():
        chosen = [node_id for node_id in node_ids if node_id in members]
        if chosen:
            rows[f"{suite} ({len(chosen)} tests)"] = chosen
    rows["all"] = node_ids
    cells = [["file", *(f"{side} {column}" for side in ran for column in ("passed", "failed", "left out"))]]
    for name, chosen in rows.items():
        row = [name.removeprefix("tests/v1/")]
        for side, results in ran.items():
            exceptions = listed if side == "kvplug" else {}
            counts = Counter(_column(results, node_id, exceptions) for node_id in chosen)
            row += [str(counts[column]) for column in ("passed", "failed", "left out")]
        cells.append(row)
    return _aligned(cells)


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
    """What of both sides was constructed, and called of ours."""
    users = sum(1 for made in swapped.made_by_test.values() if made)
    callers = sum(1 for called in swapped.called_by_test.values() if called)
    return (
        f"{len(swapped.names)} names swapped; upstream's constructed: {_counts(swapped.made_upstream) or 'none'}\n"
        f"ours constructed, by {users} tests: {_counts(swapped.made_ours)}\n"
        f"ours called, by {callers} tests: {_counts(swapped.called_ours)}"
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
