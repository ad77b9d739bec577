"""The median and its distribution-free interval."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.stats import median, median_interval

finite = st.floats(-1e6, 1e6)
confidences = st.floats(0.01, 0.999)


def coverage(n: int, k: int) -> Fraction:
    """P(k-th smallest <= true median <= k-th largest) of n continuous samples."""
    inside = sum(math.comb(n, below) for below in range(k, n - k + 1))
    return Fraction(inside, 2**n)


def rank(n: int, confidence: float = 0.95) -> int | None:
    """Which k the interval used: the samples are their own ranks."""
    interval = median_interval(range(1, n + 1), confidence)
    if interval is None:
        return None
    assert interval[0] + interval[1] == n + 1
    return int(interval[0])


@pytest.mark.parametrize(
    ("n", "k"), [(5, None), (6, 1), (8, 1), (9, 2), (12, 3), (20, 6), (25, 8), (50, 18)]
)
def test_the_published_ranks(n: int, k: int | None) -> None:
    # The table of 95% sign-test intervals found in textbooks.
    assert rank(n) == k


@given(st.integers(0, 300), confidences)
def test_it_covers_and_no_tighter_pair_does(n: int, confidence: float) -> None:
    k = rank(n, confidence)
    if k is None:
        assert n == 0 or coverage(n, 1) < Fraction(confidence)
        return
    assert coverage(n, k) >= Fraction(confidence)
    if k + 1 <= n - k:
        assert coverage(n, k + 1) < Fraction(confidence)


@pytest.mark.parametrize("n", [6, 9, 13])
def test_every_pattern_above_and_below_the_median_counted(n: int) -> None:
    """No formula: all 2**n equally likely ways to fall below or above a true median of 0."""
    held = 0
    for signs in itertools.product((-1, 1), repeat=n):
        low, high = median_interval(signs) or (math.nan, math.nan)
        held += low <= 0 <= high
    k = rank(n)
    assert k is not None
    assert Fraction(held, 2**n) == coverage(n, k)


@pytest.mark.parametrize("n", [6, 10, 25])
def test_simulated_skewed_samples(n: int) -> None:
    draws = np.random.default_rng(7).lognormal(size=(4000, n))  # true median 1
    intervals = [median_interval(list(row)) for row in draws]
    held = np.mean([low <= 1 <= high for low, high in intervals])  # type: ignore[misc]
    k = rank(n)
    assert k is not None
    assert held == pytest.approx(float(coverage(n, k)), abs=0.015)


@given(st.lists(finite, min_size=6, max_size=60))
def test_the_interval_holds_the_median_and_ignores_the_order(samples: list[float]) -> None:
    interval = median_interval(samples)
    assert interval is not None
    assert interval[0] <= median(samples) <= interval[1]
    assert set(interval) <= set(samples)
    assert median_interval(samples[::-1]) == interval


@given(st.lists(finite, max_size=5))
def test_too_few(samples: list[float]) -> None:
    assert median_interval(samples) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_samples(bad: float) -> None:
    with pytest.raises(ValueError, match="NaN"):
        median([1.0, bad])
    with pytest.raises(ValueError, match="NaN"):
        median_interval([1.0] * 6 + [bad])
    with pytest.raises(ValueError, match="no samples"):
        median([])


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0, math.nan])
def test_bad_confidence(confidence: float) -> None:
    with pytest.raises(ValueError, match="confidence"):
        median_interval([1.0] * 9, confidence)
