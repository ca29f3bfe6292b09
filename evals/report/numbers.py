"""How values are written, in every format. What is missing or not finite is n/a."""

from __future__ import annotations

import math
from typing import TypeGuard

MISSING = "n/a"


def is_number(value: float | None) -> TypeGuard[float]:
    """Whether there is a finite value."""
    return value is not None and math.isfinite(value)


def count(value: int) -> str:
    """12,345"""
    return f"{value:,}"


def fixed(value: float | None, num_decimals: int, *, sign: bool = False) -> str:
    """1,234.50; with `sign` also a plus, and 0 without one."""
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{abs(value):,.{num_decimals}f}"
    if not text.strip("0.,"):
        return text
    if value < 0:
        return "-" + text
    return "+" + text if sign else text


def score(value: float | None) -> str:
    """A task's score: four decimals, fewer where the metric is not a part of one."""
    return fixed(value, _score_decimals(value))


def score_with_error(value: float | None, error: float | None) -> str:
    """0.3700 ± 0.0279; without a standard error only the score."""
    if not is_number(error) or not is_number(value):
        return score(value)
    return f"{score(value)} ± {fixed(error, _score_decimals(value))}"


def score_difference(value: float | None) -> str:
    """+0.0033"""
    return fixed(value, _score_decimals(value), sign=True)


def _score_decimals(value: float | None) -> int:
    return 4 if value is None or not math.isfinite(value) or abs(value) < 10 else 2


def measured(value: float | None) -> str:
    """Four significant digits, never an exponent for what is common; large counts in full."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -6:
        return f"{value:.3g}"
    return fixed(value, max(0, 3 - magnitude))


def short(value: float | None) -> str:
    """At most four significant digits: 1, 0.375"""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.4g}"


def ratio(value: float | None) -> str:
    """0.987"""
    return fixed(value, 3)


def ratio_with_interval(value: float | None, interval: tuple[float, float] | None) -> str:
    """0.987 [0.951, 1.020]; without a finite interval only the ratio."""
    if interval is None or not all(math.isfinite(end) for end in interval):
        return ratio(value)
    return f"{ratio(value)} [{ratio(interval[0])}, {ratio(interval[1])}]"


def percent(value: float | None, num_decimals: int = 1) -> str:
    """A part of one as 12.3 %."""
    return MISSING if value is None or not math.isfinite(value) else f"{value * 100:.{num_decimals}f} %"


def share(part: float, whole: float) -> float | None:
    """`part` of `whole`; None of nothing."""
    return part / whole if whole else None


def p_value(value: float | None) -> str:
    """0.125, or < 0.001."""
    if value is None or not math.isfinite(value):
        return MISSING
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def duration(seconds: float | None) -> str:
    """6 min 53 s"""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
