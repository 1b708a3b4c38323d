"""Simple rules that one might write instead of a drift detector, to compare with.

Each sees what a scrape every 15 seconds shows: the highest step peak since the one before. Each returns the step at
which it first alarms, or None. Their thresholds are those of common use.
"""

from __future__ import annotations

import numpy as np

SCRAPE_SECONDS = 15.0
HOUR_SCRAPES = 240
LIMIT_RATIO = 1.3
"""Capacity of the device, relative to the run's usual peak: what ``predict_linear`` looks out for."""


def scraped(run):
    """(values, steps): one of each a scrape."""
    ended = np.array([step.ended_at for step in run.steps])
    peaks = np.array([step.peak_bytes for step in run.steps], dtype=float)
    marks = np.searchsorted(ended, np.arange(ended[0] + SCRAPE_SECONDS, ended[-1], SCRAPE_SECONDS))
    kept = np.unique(np.append(0, marks))
    return np.maximum.reduceat(peaks, kept)[:-1], kept[1:]


def predict_linear(values, usual):
    """``predict_linear(peak[1h], 4 * 3600) > limit``, in three scrapes in a row."""
    num = HOUR_SCRAPES
    if len(values) <= num:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(values, num)
    x = np.arange(num) - (num - 1) / 2
    slopes = windows @ x / (x @ x)
    is_over = windows.mean(axis=1) + slopes * ((num - 1) / 2 + 4 * HOUR_SCRAPES) > LIMIT_RATIO * usual
    return _first(is_over[2:] & is_over[1:-1] & is_over[:-2], num + 1)


def ratio_to_an_hour_ago(values, usual):
    """``avg_over_time(peak[5m]) / avg_over_time(peak[5m] offset 1h) > 1.05``."""
    means = np.convolve(values, np.ones(20) / 20, mode="valid")
    if len(means) <= HOUR_SCRAPES:
        return None
    return _first(means[HOUR_SCRAPES:] / means[:-HOUR_SCRAPES] > 1.05, HOUR_SCRAPES + 19)


def mann_kendall(values, usual):
    """The test for a trend in the last hour, in 30 means of two minutes, at z > 3.3."""
    means = values[: len(values) // 8 * 8].reshape(-1, 8).mean(axis=1)
    if len(means) < 30:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(means, 30)
    i, j = np.triu_indices(30, 1)
    scores = np.sign(windows[:, j] - windows[:, i]).sum(axis=1) / np.sqrt(30 * 29 * 65 / 18)
    found = _first(scores > 3.3, 29)
    return None if found is None else 8 * found + 7


def page_hinkley(values, usual):
    """Page and Hinkley's test against the mean of the first half hour: delta 0.5, lambda 50 deviations."""
    start = HOUR_SCRAPES // 2
    if len(values) <= start:
        return None
    known = values[:start]
    deviations = (values[start:] - known.mean()) / (known.std() + 1e-3 * known.mean()) - 0.5
    sums = np.cumsum(deviations)
    return _first(sums - np.minimum.accumulate(np.minimum(sums, 0)) > 50, start)


def _first(is_alarm, offset):
    found = np.flatnonzero(is_alarm)
    return int(found[0]) + offset if len(found) else None


RULES = {
    "predict_linear": predict_linear,
    "ratio to 1 h ago": ratio_to_an_hour_ago,
    "Mann-Kendall": mann_kendall,
    "Page-Hinkley": page_hinkley,
}


def first_alarm(rule, run):
    """The step at which the rule first alarms, or None."""
    values, steps = scraped(run)
    scrape = RULES[rule](values, float(np.median(values[: HOUR_SCRAPES // 2])))
    return None if scrape is None else int(steps[min(scrape, len(steps) - 1)])
