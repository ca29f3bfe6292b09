"""Paired ratios, their interval and the verdict: known cases, no difference where there is none, differences found."""

from __future__ import annotations

import math
import random

import pytest

from vllm_kvplug.evals.throughput.statistics import NO_DIFFERENCE, Metric, compare

RATE = Metric("request throughput", "requests/s", lower_is_better=False)
LATENCY = Metric("TTFT median", "ms", lower_is_better=True)


def noisy(
    rng: random.Random, num_pairs: int, ratio: float = 1.0, noise: float = 0.05
) -> tuple[list[float], list[float]]:
    """Pairs with a drift that both share, and noise of their own."""
    drift = [100 * (1 + 0.1 * pair) for pair in range(num_pairs)]
    return (
        [value * math.exp(rng.gauss(0, noise)) for value in drift],
        [value * ratio * math.exp(rng.gauss(0, noise)) for value in drift],
    )


def test_ratios_are_paired_and_their_median_is_told() -> None:
    found = compare(RATE, [10, 20, 40, 80, 100], [11, 24, 44, 92, 100])
    assert found.ratios == pytest.approx([1.1, 1.2, 1.1, 1.15, 1.0])
    assert found.ratio == pytest.approx(1.1)
    assert found.values == ([10, 20, 40, 80, 100], [11, 24, 44, 92, 100])


def test_the_interval_of_five_pairs_is_their_range() -> None:
    # 32 of 3125 resamples of five have a median that is the least value only by chance of less than the widened level's
    # half, so both ends are reached: the interval is [min, max], and it holds 1 here by one pair alone.
    found = compare(RATE, [10] * 5, [11, 12, 13, 14, 9.9])
    assert found.interval == pytest.approx((0.99, 1.4))
    assert found.verdict == NO_DIFFERENCE


def test_a_difference_says_how_much_and_whether_it_is_good() -> None:
    higher = ([100] * 6, [110, 111, 109, 110, 112, 110])
    assert compare(RATE, *higher).verdict == "candidate 10.0 % higher (better)"
    assert compare(LATENCY, *higher).verdict == "candidate 10.0 % higher (worse)"
    lower = ([100] * 6, [80, 81, 79, 80, 82, 80])
    assert compare(RATE, *lower).verdict == "candidate 20.0 % lower (worse)"
    assert compare(LATENCY, *lower).verdict == "candidate 20.0 % lower (better)"


def test_the_same_seed_gives_the_same_interval() -> None:
    values = noisy(random.Random(3), 9)
    assert compare(RATE, *values, seed=4) == compare(RATE, *values, seed=4)


def test_constant_ratios_have_an_interval_without_width() -> None:
    same = compare(RATE, [3, 5, 7, 9, 11], [3, 5, 7, 9, 11])
    assert (same.ratio, same.interval, same.verdict) == (1.0, (1.0, 1.0), NO_DIFFERENCE)
    double = compare(RATE, [3, 5, 7, 9, 11], [6, 10, 14, 18, 22])
    assert (double.interval, double.verdict) == ((2.0, 2.0), "candidate 100.0 % higher (better)")


@pytest.mark.parametrize("num_pairs", [1, 2, 3, 4])
def test_too_few_pairs_show_nothing_however_large_the_difference(num_pairs: int) -> None:
    found = compare(RATE, [1.0] * num_pairs, [50.0] * num_pairs)
    assert found.ratio == 50
    assert found.interval is None
    assert found.verdict == f"{NO_DIFFERENCE}: {num_pairs} pairs, 5 needed"


def test_zeros_on_both_sides_are_equal() -> None:
    found = compare(LATENCY, [0] * 6, [0] * 6)
    assert (found.ratios, found.ratio) == ([1.0] * 6, 1.0)
    assert found.verdict == f"{NO_DIFFERENCE}: zero on both sides"


def test_a_baseline_of_zero_has_no_ratio_and_the_signs_decide() -> None:
    always = compare(LATENCY, [0, 0, 1, 2, 0, 0], [5, 4, 6, 7, 3, 9])
    assert always.ratios[:3] == [None, None, 6.0]
    assert (always.ratio, always.interval) == (None, None)
    assert always.verdict == "candidate higher (worse): medians 0 and 5.5, no ratio because of zeros"
    # Five of six: a fair coin does that, or better, in 22 % of all cases.
    mixed = compare(LATENCY, [0, 0, 1, 2, 0, 9], [5, 4, 6, 7, 3, 0])
    assert mixed.verdict.startswith(NO_DIFFERENCE)


def test_a_candidate_of_zero_has_a_ratio_but_no_interval() -> None:
    found = compare(LATENCY, [4, 3, 5, 4, 6, 4], [0, 0, 0, 0, 0, 0])
    assert (found.ratio, found.interval) == (0, None)
    assert found.verdict.startswith("candidate lower (better): medians 4 and 0")


@pytest.mark.parametrize("num_pairs", [5, 6, 9])
def test_a_against_a_shows_no_difference_but_by_chance(num_pairs: int) -> None:
    rng = random.Random(num_pairs)
    num_runs = 200
    num_false = sum(compare(RATE, *noisy(rng, num_pairs)).verdict != NO_DIFFERENCE for _ in range(num_runs))
    # 5 % are 10; five pairs cannot do better than 6.25 % on average (12.5), and 23 are three deviations above that.
    assert num_false <= 23, f"{num_false} of {num_runs} comparisons of a side with itself showed a difference"


@pytest.mark.parametrize(("ratio", "verdict"), [(0.8, "lower"), (1.25, "higher")])
def test_a_real_difference_is_found(ratio: float, verdict: str) -> None:
    rng = random.Random(17)
    for _ in range(50):
        assert verdict in compare(RATE, *noisy(rng, 8, ratio, noise=0.03)).verdict


@pytest.mark.parametrize(
    ("baseline", "candidate"),
    [([], []), ([1.0], [1.0, 2.0]), ([1.0], [math.inf]), ([math.nan], [1.0]), ([-1.0], [1.0])],
)
def test_values_that_are_none_are_refused(baseline: list[float], candidate: list[float]) -> None:
    with pytest.raises(ValueError, match="request throughput: expected"):
        compare(RATE, baseline, candidate)
