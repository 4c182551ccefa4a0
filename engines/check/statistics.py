# SPDX-License-Identifier: Apache-2.0
"""Whether a difference is more than chance: the few tests that checks use."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_RESAMPLES = 2000


def bootstrap_ratio(
    before: Sequence[float], now: Sequence[float], *, confidence: float, seed: int = 0
) -> tuple[float, float, float]:
    """Ratio of medians ``now / before`` with its percentile bootstrap interval (Efron, 1979).

    Args:
        before: At least one value, > 0.
        now: Likewise.
        confidence: Of the two-sided interval, in (0, 1).
        seed: Of the resampling, so that the same figures give the same interval.

    Returns:
        The ratio, and the interval's ends.
    """
    rng = np.random.default_rng(seed)
    a, b = np.asarray(before, float), np.asarray(now, float)
    medians = [np.median(x[rng.integers(len(x), size=(_RESAMPLES, len(x)))], axis=1) for x in (a, b)]
    low, high = np.quantile(medians[1] / medians[0], [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(np.median(b) / np.median(a)), float(low), float(high)


def paired_interval(
    differences: Sequence[float], *, confidence: float, seed: int = 0
) -> tuple[float, float, float]:
    """Mean of paired differences with its percentile bootstrap interval."""
    rng = np.random.default_rng(seed)
    d = np.asarray(differences, float)
    means = d[rng.integers(len(d), size=(_RESAMPLES, len(d)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(d.mean()), float(low), float(high)


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
        return 1.0 if k1 / n1 >= k0 / n0 else 0.0
    return 0.5 * math.erfc((k0 / n0 - k1 / n1) / error / math.sqrt(2))
