"""Medians and how far they can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt


def median(samples: Sequence[float]) -> float:
    """The median of finite ``samples``, in their own unit.

    Raises ValueError when there are none or one is NaN or infinite.
    """
    return float(np.median(_finite(samples)))


def median_interval(
    samples: Sequence[float], confidence: float = 0.95
) -> tuple[float, float] | None:
    """An interval that holds the true median with at least ``confidence``, in the samples' unit.

    It is the pair of order statistics (k-th smallest, k-th largest) with the largest k whose
    coverage 1 - 2 P(Binomial(n, 1/2) <= k - 1) reaches ``confidence``. That count assumes
    independent samples of one distribution and nothing about its shape; where values tie, the
    coverage is higher. Source: W. R. Thompson, "On confidence ranges for the median", Annals of
    Mathematical Statistics 7 (1936); also David and Nagaraja, "Order Statistics", section 7.1.

    Returns None when even the smallest and the largest sample are not far enough apart for
    ``confidence``: fewer than 6 samples at 0.95. Raises ValueError when a sample is NaN or
    infinite, or ``confidence`` is not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    if len(samples) == 0:
        return None
    ordered = np.sort(_finite(samples))
    k = _rank(len(ordered), confidence)
    return None if k == 0 else (float(ordered[k - 1]), float(ordered[-k]))


@lru_cache(maxsize=256)
def _rank(n: int, confidence: float) -> int:
    """The largest usable k of ``n`` samples, or 0; in whole numbers, so that no rounding decides.

    Cached: a sweep asks for the same few sample counts thousands of times.
    """
    allowed = (1 - Fraction(confidence)) * 2**n
    ways = 1  # to choose i of n
    tail = 0  # twice the ways to have at most i of n
    for i in range(n // 2 + 1):
        tail += 2 * ways
        if tail > allowed:
            return i
        ways = ways * (n - i) // (i + 1)
    return n // 2


def _finite(samples: Sequence[float]) -> npt.NDArray[np.float64]:
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise ValueError("no samples")
    if not np.isfinite(values).all():
        raise ValueError("a sample is NaN or infinite")
    return values


def paired_interval(
    differences: Sequence[float], weights: Sequence[float], confidence: float
) -> tuple[float, float, float]:
    """(mean, low, high) of paired ``differences``, each weighed by how much it rests on.

    Student's interval for a weighted mean, whose variance is estimated from the scatter of the
    differences around it: sum w (d - m)^2 / (W (n - 1)), W the sum of the weights. Weights stand
    for inverse variances up to a factor (W. G. Cochran, "Problems arising in the analysis of a
    series of similar experiments", JRSS Supplement 4, 1937). A single difference has no scatter:
    its interval is infinite. Raises ValueError when there are none.
    """
    d, w = _finite(differences), np.asarray(weights, dtype=np.float64)
    mean = float(np.average(d, weights=w))
    n = len(d)
    if n < 2:
        return mean, -math.inf, math.inf
    variance = float(np.average((d - mean) ** 2, weights=w)) / (n - 1)
    half = student_t(confidence, n - 1) * math.sqrt(variance)
    return mean, mean - half, mean + half


@lru_cache(maxsize=1024)
def student_t(confidence: float, degrees: int) -> float:
    """How many standard errors either way hold ``confidence`` of Student's t with ``degrees``.

    By bisection on the distribution's tail, in the finite sum that it has for whole degrees of
    freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    low, high = 0.0, 1.0
    while _t_coverage(high, degrees) < confidence:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if _t_coverage(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return high


def _t_coverage(t: float, degrees: int) -> float:
    """P(|T| < t)."""
    theta = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(theta), math.sin(theta)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    return 2 / math.pi * (theta + sine * total) if odd else sine * total
