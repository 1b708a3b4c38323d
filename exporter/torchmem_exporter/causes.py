"""What the page and the terminal's live view warn of, and from where on: the alerts' causes, without their waiting.

Invariant: each says what is the matter in words of its own, but they never differ on whether it is.
"""

from __future__ import annotations

WORDS = ("crashed", "stale", "oom", "full", "drift", "leak", "forecast", "labeler")
"""The worst first."""
FULL_SHARE = 0.95
"""Of the device's limit, at the step peak."""
MISSED_RATIO = 0.10
"""Of the step peak over its forecast, less one; as in the alert on it."""
