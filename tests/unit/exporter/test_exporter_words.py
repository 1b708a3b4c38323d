"""Numbers and names as people read them."""

from __future__ import annotations

import math

import pytest

from torchmem_exporter.words import MAX_NAME, moment, percent, rate, shown, signed_percent, size, span, until


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1 << 30, "1.0 GiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_sizes(num_bytes, text):
    """A size would be told in a unit that hides it."""
    assert size(num_bytes) == text


def test_rates_and_shares():
    """Growth or drift would be told wrongly."""
    assert (rate(2048), rate(1)) == ("2.0 KiB/s", "3.5 KiB/h")
    assert (percent(0.5), percent(0.00001), percent(0)) == ("50.0%", "<0.1%", "0.0%")
    assert (signed_percent(0.05), signed_percent(-0.00001)) == ("+5.0%", "+0.0%")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s"),
        (61, "1 min 1 s"),
        (7300, "2 h 1 min"),
        (90_000, "1 d 1 h"),
        (1e300, "over a year"),
        (math.nan, "an unknown time"),
    ],
)
def test_spans(seconds, text):
    """An age would be unreadable, or cost the page."""
    assert span(seconds) == text


def test_moments():
    """A record with a time beyond all calendars would cost the page."""
    assert moment(0) == "1970-01-01 00:00:00 UTC"
    assert {moment(value) for value in (1e300, math.inf, math.nan)} == {"an unknown time"}
    assert (until(90), until(-1)) == ("in 1 min 30 s", "about now")


def test_long_names_keep_both_ends():
    """Two modules whose names begin alike would look the same."""
    name = "a" * 100 + "mlp.w1"
    assert shown("layers.*.mlp") == "layers.*.mlp"
    assert (len(shown(name)), shown(name)[0], shown("x\u202ey")) == (MAX_NAME, "a", "x\ufffdy")
    assert shown("a." * 60 + "w1").endswith("a.w1")
