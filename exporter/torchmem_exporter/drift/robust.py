"""Statistics that a few wild values cannot move: spread, slope, and what white noise would do to a median.

Invariants: pure; finite numbers in, finite numbers out; an empty or constant input has spread 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

SIGMAS_PER_MAD = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation."""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, of normally distributed values."""


def spread(values: Sequence[float], center: float | None = None) -> float:
    """Standard deviation of what most of the values would come from, by their median absolute deviation."""
    if not values:
        return 0.0
    middle = median(values) if center is None else center
    return SIGMAS_PER_MAD * median([abs(value - middle) for value in values])


def middle_mean(values: Sequence[float]) -> float:
    """Mean of the middle half of the values: as hard to move as it sounds, and less noisy than the median."""
    ranked = sorted(values)
    return fmean(ranked[len(ranked) // 4 : len(ranked) - len(ranked) // 4])


def step_spread(values: Sequence[float]) -> float:
    """Standard deviation from one value to the next, whatever the values wander to in the long run."""
    differences = [b - a for a, b in pairwise(values)]
    return spread(differences, 0.0) / math.sqrt(2)


def smoothness(values: Sequence[float]) -> float:
    """Mean square of the change from one value to the next, in twice their variance: about 1 for white noise, 0 for a
    line; values far out count as less far.
    """
    middle, reach = median(values), 3 * spread(values)
    kept = [min(max(value, middle - reach), middle + reach) - middle for value in values]
    variance = sum(value * value for value in kept) / len(kept)
    changes = [(b - a) ** 2 for a, b in pairwise(kept)]
    return sum(changes) / len(changes) / (2 * variance) if variance and changes else 1.0


def median_error(sigma: float, num_values: int) -> float:
    """Standard error of the median of so many values that differ by white noise."""
    return _MEDIAN_ERROR * sigma / math.sqrt(num_values)


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The Theil-Sen slope: the median of those of all pairs; ``xs`` must not decrease.

    Costs the square of the number of points: meant for some dozens.
    """
    pairs: list[float] = []
    for i in range(len(xs) - 1):
        x, y = xs[i], ys[i]
        pairs += [(b - y) / (a - x) for a, b in zip(xs[i + 1 :], ys[i + 1 :], strict=True) if a > x]
    return median(pairs) if pairs else 0.0


def block_medians(values: Sequence[float], size: int) -> list[float]:
    """Medians of consecutive values, so many each; what is left at the end is not used."""
    return [median(values[start : start + size]) for start in range(0, len(values) - size + 1, size)]
