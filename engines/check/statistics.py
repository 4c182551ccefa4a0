# SPDX-License-Identifier: Apache-2.0
"""Whether a difference is more than chance: the few tests that checks use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.check.verdict import Figure, Status

_RESAMPLES = 2000


def ratio_interval(
    before: Sequence[float], now: Sequence[float], *, confidence: float, paired: bool
) -> tuple[float, float, float]:
    """Ratio ``now / before`` with its percentile bootstrap interval (Efron, 1979).

    Args:
        before: At least one value, > 0.
        now: Likewise.
        confidence: Of the two-sided interval, in (0, 1).
        paired: Whether values of one place were measured one after another, so that what slows the machine down for a
            while is in both: the median of their ratios is taken, else the ratio of their medians.

    Returns:
        The ratio, and the interval's ends. The resampling is the same each time.
    """
    a, b = np.asarray(before, float), np.asarray(now, float)
    if paired:
        ratios = b / a
        medians = np.median(_resampled(ratios, 0), axis=1)
        return float(np.median(ratios)), *_interval(medians, confidence)
    spread = np.median(_resampled(b, 1), axis=1) / np.median(_resampled(a, 0), axis=1)
    return float(np.median(b) / np.median(a)), *_interval(spread, confidence)


def paired_interval(differences: Sequence[float], *, confidence: float) -> tuple[float, float, float]:
    """Mean of paired differences with its percentile bootstrap interval."""
    d = np.asarray(differences, float)
    if not np.isfinite(d).all():
        return math.nan, math.nan, math.nan
    return float(d.mean()), *_interval(_resampled(d, 0).mean(axis=1), confidence)


def proportion_fell(before: tuple[int, int], now: tuple[int, int]) -> float:
    """One-sided p-value that a proportion did not fall: two-proportion z-test with pooled variance.

    Args:
        before: Successes and trials.
        now: Likewise.
    """
    (k0, n0), (k1, n1) = before, now
    if not n0 or not n1:
        return 1.0
    pooled = (k0 + k1) / (n0 + n1)
    error = math.sqrt(pooled * (1 - pooled) * (1 / n0 + 1 / n1))
    if error == 0:
        return 1.0
    return 0.5 * math.erfc((k0 / n0 - k1 / n1) / error / math.sqrt(2))


def sign_test(worse: int, better: int) -> float:
    """One-sided exact p-value that of paired yes-or-no results no more got worse than better (McNemar, 1947).

    Args:
        worse: Pairs of which only the first is right.
        better: Pairs of which only the second is.
    """
    n = worse + better
    return float(sum(math.comb(n, k) for k in range(worse, n + 1)) / 2**n)


def wilson_interval(successes: int, trials: int, *, confidence: float) -> tuple[float, float]:
    """Interval of a proportion (Wilson, 1927)."""
    from statistics import NormalDist

    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p, n = successes / trials, trials
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def growth_figures(
    now: Mapping[str, int], before: Mapping[str, int], grow: float, slack: int
) -> list[Figure]:
    """A figure for each number of bytes; what grew beyond a fraction and a slack regresses."""
    figures = []
    for name in sorted({*now, *before}):
        value, old = now.get(name, 0), before.get(name, 0)
        limit = max(old * (1 + grow), old + slack)
        change = f"{value / old - 1:+.1%}" if old else "new" if value else ""
        status = Status.REGRESS if value > limit else Status.PASS
        figures.append(Figure(name, status, value, old, f"at most {limit:.0f}", change))
    return figures


def _resampled(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    return np.asarray(values[rng.integers(len(values), size=(_RESAMPLES, len(values)))])


def _interval(spread: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    low, high = np.quantile(spread, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
