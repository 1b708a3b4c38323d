"""Numbers and names as people read them, on the page and in findings.

Invariants: pure; any number gives a text, an infinite one too; what ``shown`` returns holds nothing that could change
the text around it.
"""

from __future__ import annotations

import math
from datetime import datetime, timezone

from torchmem.wire import ranks
from torchmem_exporter.labels import clean_label

MAX_NAME = 60
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_KIBI = 1024
_HOUR = 3600
_LEAST_SHARE = 0.0005
_LONG_SECONDS = 365 * 86400.0


def shown(text: str, max_characters: int = MAX_NAME) -> str:
    """A name from a record; a long one keeps its head and its tail."""
    text = ranks.printable(clean_label(text))
    if len(text) <= max_characters:
        return text
    tail = (max_characters - 1) // 2
    return f"{text[: max_characters - 1 - tail]}\u2026{text[len(text) - tail :]}"


def size(num_bytes: float) -> str:
    """A number of bytes in the largest binary unit that leaves something before the point."""
    amount, unit = float(num_bytes), 0
    while round(abs(amount), 1) >= _KIBI and unit < len(_UNITS) - 1:
        amount, unit = amount / _KIBI, unit + 1
    return f"{amount:.0f} B" if unit == 0 else f"{amount:.1f} {_UNITS[unit]}"


def rate(bytes_per_second: float) -> str:
    """A growth in a unit that suits it: by the hour where a second's would be less than a KiB."""
    if abs(bytes_per_second) >= _KIBI:
        return f"{size(bytes_per_second)}/s"
    return f"{size(bytes_per_second * _HOUR)}/h"


def until(seconds: float) -> str:
    """How long something takes yet; what should have happened by now happens about now."""
    return f"in {span(seconds)}" if seconds > 0 else "about now"


def percent(ratio: float) -> str:
    """A share of one; what is more than nothing never reads like nothing."""
    return "<0.1%" if 0 < ratio < _LEAST_SHARE else f"{ratio:.1%}"


def signed_percent(ratio: float) -> str:
    """A change, relative."""
    return f"{ratio:+.1%}".replace("-0.0%", "+0.0%")


def span(seconds: float) -> str:
    """A length of time as people say it, no more exactly than matters."""
    return "over a year" if _LONG_SECONDS < seconds < math.inf else ranks.span(seconds)


def moment(unix_seconds: float) -> str:
    """A point in time, UTC."""
    try:
        return datetime.fromtimestamp(unix_seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "an unknown time"
