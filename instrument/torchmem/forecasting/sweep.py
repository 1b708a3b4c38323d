"""Forecasts along one argument, and the largest value of it that fits a device.

Invariants: what is said to fit was forecast, not extrapolated; forecasts are run one at a time, at most
``MAX_SEARCHES`` beyond the values that were given.

Limits: the search takes the peak to grow with the argument, and the argument for a whole number; it ends at the first
value that it tries itself and the job cannot take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchmem.errors import ForecastError
from torchmem.forecasting.outcome import Forecast, Plain

MAX_SEARCHES = 12
_LARGEST_STEP = 64
"""How many times the largest known value is tried at most."""

Run = Callable[[Plain], Forecast]


@dataclass
class Sweep:
    """Forecasts by value of one argument.

    Attributes:
        name: the argument.
        points: the values and their forecasts, in the order in which they were made.
        largest_fit: the largest value that fits; None where none does, or nothing was asked.
        is_exact: whether the next larger value is known not to fit.
    """

    name: str
    points: list[tuple[Plain, Forecast]] = field(default_factory=list)
    largest_fit: Plain = None
    is_exact: bool = False


def sweep(name: str, values: Sequence[Plain], run: Run, capacity_bytes: int | None) -> Sweep:
    """Forecasts each value; with a capacity, and whole numbers, searches the largest value that fits.

    Args:
        name: the argument.
        values: what to give it.
        run: forecasts one value.
        capacity_bytes: of the device; None for no search.
    """
    found = Sweep(name)
    peaks: dict[int, int] = {}

    def fits(value: Plain) -> bool:
        forecast = run(value)
        found.points.append((value, forecast))
        if type(value) is int:
            peaks[value] = forecast.peak_bytes
        return capacity_bytes is not None and forecast.peak_bytes <= capacity_bytes

    fitting = [value for value in values if fits(value)]
    if capacity_bytes is None:
        return found
    if not all(type(value) is int for value in values):
        found.largest_fit = fitting[-1] if fitting else None
        return found
    for _ in range(MAX_SEARCHES):
        value = _next_value(peaks, capacity_bytes)
        if value is None:
            break
        try:
            fits(value)
        except ForecastError:  # nobody asked for that value: the job may not take every one
            break
    low, high = _bounds(peaks, capacity_bytes)
    found.largest_fit = low or None
    found.is_exact = high == low + 1
    return found


def _bounds(peaks: dict[int, int], capacity_bytes: int) -> tuple[int, int | None]:
    """The largest value that fits, 0 for none, and the smallest above it that does not, None for none."""
    high = min((value for value, peak in peaks.items() if peak > capacity_bytes), default=None)
    fitting = (v for v, peak in peaks.items() if peak <= capacity_bytes and (high is None or v < high))
    return max(fitting, default=0), high


def _next_value(peaks: dict[int, int], capacity_bytes: int) -> int | None:
    """The value that tells most: where the line through the two nearest points meets the capacity."""
    low, high = _bounds(peaks, capacity_bytes)
    if high is None:
        below = max((value for value in peaks if value < low), default=None)
        slope = 0.0 if below is None else (peaks[low] - peaks[below]) / (low - below)
        room = capacity_bytes - peaks[low]
        reached = low + int(room / slope) + 1 if slope > 0 else 2 * low
        return min(reached, _LARGEST_STEP * low)
    if high - low <= 1:
        return None
    if low not in peaks:
        return (low + high) // 2
    share = (capacity_bytes - peaks[low]) / max(1, peaks[high] - peaks[low])
    guess = low + int(share * (high - low))
    # One of two neighbours settles it: what lies on the line fits, what lies beyond does not.
    return min(max(guess if guess > low else low + 1, low + 1), high - 1)
