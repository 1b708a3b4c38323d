"""A sidecar over a large node, for many scrapes: its memory is bounded and stays where it is."""

from __future__ import annotations

import statistics

import pytest

from fleets import Fleet, soak
from sidecars import running

NUM_RANKS, NUM_MODULES = 64, 300
NUM_SCRAPES, NUM_WARM = 400, 150
MAX_RESIDENT_MB = 150.0
MAX_GROWTH_MB = 4.0
"""Above the noise of an allocator that is asked for different sizes each time; a record kept each round is 20 MB."""


@pytest.mark.slow
def test_memory_stays_where_it_is(tmp_path):
    """A sidecar would grow until its container is killed, on a node where ranks come and go."""
    with Fleet(tmp_path, NUM_RANKS, NUM_MODULES) as fleet, running(tmp_path) as sidecar:
        resident = soak(fleet, sidecar, NUM_SCRAPES, num_ranks=NUM_RANKS)
    assert max(resident) < MAX_RESIDENT_MB
    early, late = resident[NUM_WARM : NUM_WARM + 50], resident[-50:]
    assert statistics.median(late) - statistics.median(early) < MAX_GROWTH_MB, resident[::50]
