"""Paired comparison of two sides: ratios by pair, their median, and a bootstrap interval that says what they show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvplug.evals.results import MetricPairs

CONFIDENCE = 0.95
# Resampling n pairs never leaves [min, max], which holds the truth in 1 - 2 * 0.5^n of all cases: 75 % for three pairs,
# 87.5 % for four, 93.75 % for five. With fewer than five every "95 % interval" would be a false promise.
MIN_PAIRS_FOR_INTERVAL = 5
# Six pairs that all point the same way are the first that a sign test at 5 % calls a difference.
SIGN_TEST_LEVEL = 0.05
NUM_RESAMPLES = 9999
NO_DIFFERENCE = "no difference shown"


@dataclass(frozen=True)
class Metric:
    """A metric's name, unit and which direction is good."""

    name: str
    unit: str
    lower_is_better: bool


def compare(metric: Metric, baseline: Sequence[float], candidate: Sequence[float], seed: int = 0) -> MetricPairs:
    """Compare values of the same pairs, `baseline[i]` with `candidate[i]`. The same seed gives the same interval.

    Ratios are candidate / baseline: 1 where both are zero, None where the baseline alone is.

    Raises:
        ValueError: no pairs, unequal numbers of values, or a value that is negative or not finite.
    """
    values = (list(baseline), list(candidate))
    if not values[0] or len(values[0]) != len(values[1]):
        raise ValueError(f"{metric.name}: expected pairs of values, found {len(values[0])} and {len(values[1])}")
    wrong = [value for side in values for value in side if not (math.isfinite(value) and value >= 0)]
    if wrong:
        raise ValueError(f"{metric.name}: expected finite values of at least 0, found {wrong[0]}")
    ratios = [_ratio(*pair) for pair in zip(*values, strict=True)]
    finite = [ratio for ratio in ratios if ratio is not None]
    complete = len(finite) == len(ratios)
    interval = _interval(finite, seed) if complete else None
    return MetricPairs(
        name=metric.name,
        unit=metric.unit,
        lower_is_better=metric.lower_is_better,
        values=values,
        ratios=ratios,
        ratio=_median(finite) if complete else None,
        interval=interval,
        confidence=CONFIDENCE,
        verdict=_verdict(metric, values, finite if complete else None, interval),
    )


def _ratio(baseline: float, candidate: float) -> float | None:
    if baseline == 0:
        return 1.0 if candidate == 0 else None
    return candidate / baseline


def _median(values: Sequence[float]) -> float:
    from statistics import median

    return float(median(values))


def _interval(ratios: Sequence[float], seed: int) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the median ratio, or None: too few pairs, or a candidate value of zero.

    The resampling is of the ratios' logarithms; its level is widened as for a mean of so few values (Hesterberg 2015,
    "What Teachers Should Know About the Bootstrap", expanded percentile interval). Without that, seven pairs without
    any difference miss 1 in 13 % of all cases; with it 5 to 16 pairs miss it in 2 to 7 %.
    """
    if len(ratios) < MIN_PAIRS_FOR_INTERVAL or min(ratios) <= 0:
        return None
    if min(ratios) == max(ratios):
        return (ratios[0], ratios[0])
    import numpy
    from scipy.stats import bootstrap

    result = bootstrap(
        (numpy.log(ratios),),
        numpy.median,
        n_resamples=NUM_RESAMPLES,
        confidence_level=_widened(CONFIDENCE, len(ratios)),
        method="percentile",
        vectorized=True,
        random_state=numpy.random.default_rng(seed),
    )
    low, high = result.confidence_interval
    return (float(math.exp(low)), float(math.exp(high)))


def _widened(confidence: float, num_pairs: int) -> float:
    from scipy.stats import norm, t

    quantile = t.ppf((1 + confidence) / 2, num_pairs - 1) * math.sqrt(num_pairs / (num_pairs - 1))
    return float(1 - 2 * norm.cdf(-quantile))


def _verdict(
    metric: Metric,
    values: tuple[list[float], list[float]],
    ratios: Sequence[float] | None,
    interval: tuple[float, float] | None,
) -> str:
    if not any(values[0]) and not any(values[1]):
        return f"{NO_DIFFERENCE}: zero on both sides"
    if interval is not None and ratios is not None:
        # A hair's breadth: exp(log(1)) need not be 1.
        if interval[0] <= 1 + 1e-9 and interval[1] >= 1 - 1e-9:
            return NO_DIFFERENCE
        return _difference(metric, _median(ratios))
    if len(values[0]) < MIN_PAIRS_FOR_INTERVAL:
        return f"{NO_DIFFERENCE}: {len(values[0])} pairs, {MIN_PAIRS_FOR_INTERVAL} needed"
    return _sign_verdict(metric, values)


def _difference(metric: Metric, ratio: float) -> str:
    higher = ratio > 1
    percent = abs(ratio - 1) * 100
    return f"candidate {percent:.1f} % {'higher' if higher else 'lower'} ({_worth(metric, higher)})"


def _worth(metric: Metric, higher: bool) -> str:
    return "worse" if higher == metric.lower_is_better else "better"


def _sign_verdict(metric: Metric, values: tuple[list[float], list[float]]) -> str:
    """For values with zeros, which have no ratio: do the pairs agree on which side is higher?"""
    from scipy.stats import binomtest

    num_higher = sum(candidate > baseline for baseline, candidate in zip(*values, strict=True))
    num_lower = sum(candidate < baseline for baseline, candidate in zip(*values, strict=True))
    medians = f"medians {_median(values[0]):g} and {_median(values[1]):g}, no ratio because of zeros"
    if num_higher + num_lower == 0 or binomtest(num_higher, num_higher + num_lower).pvalue >= SIGN_TEST_LEVEL:
        return f"{NO_DIFFERENCE}: {medians}"
    higher = num_higher > num_lower
    return f"candidate {'higher' if higher else 'lower'} ({_worth(metric, higher)}): {medians}"
