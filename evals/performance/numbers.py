"""How costs and ratios are written."""

from __future__ import annotations

from vllm_kvplug.evals.performance.results import Goal, Reached, RowResult, Unit
from vllm_kvplug.evals.report import numbers

_STEPS: dict[Unit, tuple[tuple[float, str], ...]] = {
    "us": ((1e6, "s"), (1e3, "ms"), (1.0, "us"), (1e-3, "ns")),
    "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "objects": ((1.0, ""),),
}
REACHED_TEXTS: dict[Reached | None, str] = {
    "stretch": "stretch",
    "target": "yes",
    "partly": "partly",
    "no": "no",
    None: "",
}


def cost(value: float, unit: Unit) -> str:
    """With the unit in which it has one to three digits before the point: 1.25 ms"""
    steps = _STEPS[unit]
    factor, name = next((step for step in steps if value >= step[0]), steps[-1])
    if unit == "objects":
        return numbers.count(round(value))
    scaled = value / factor
    return f"{numbers.fixed(scaled, 2 if scaled < 10 else 1 if scaled < 100 else 0)} {name}"


def ratio(value: float | None) -> str:
    """12.3x"""
    if value is None:
        return numbers.MISSING
    return f"{numbers.fixed(value, 2 if value < 10 else 1 if value < 100 else 0)}x"


def goal(wanted: Goal) -> tuple[str, str]:
    """Target and stretch; empty where there is none."""
    if wanted.limit is not None:
        return f"≤ {wanted.limit:g}", ""
    return tuple("" if value is None else f"{value:g}x" for value in (wanted.target, wanted.stretch))  # type: ignore[return-value]


def reached(row: RowResult) -> str:
    """How far a row came, in a word."""
    return REACHED_TEXTS[row.reached]
