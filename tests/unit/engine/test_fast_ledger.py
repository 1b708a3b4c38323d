"""The fast ledger in Python against the plain one, event for event."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ledger_events import PARENTS, events
from torchmem.engine.fast_ledger import FastLedger
from torchmem.ledger import FrameKind, Ledger

EVENTS = events(st.integers(1, 12))


def nonzero(counts):
    items = counts.items() if isinstance(counts, dict) else enumerate(counts)
    return {key: value for key, value in items if value}


def state_of(ledger):
    """All that can be asked of the books."""
    return {
        device: (
            (books.current, books.peak, books.life_peak, books.peak_sequence),
            nonzero(books.totals()),
            nonzero(books.cells),
            nonzero(books.at_peak() if isinstance(ledger, FastLedger) else books.cells_at_peak),
            (books.step_peak, books.step_end, books.usage, nonzero(books.step_peak_totals)),
            [
                (
                    window.peak,
                    window.composition,
                    {owner: (m.max, m.sequence, nonzero(m.totals)) for owner, m in window.modules.items() if m.max},
                )
                for window in books.windows
            ],
        )
        for device, books in ledger.devices.items()
    }


def run_both(events):
    plain, fast = Ledger(PARENTS), FastLedger(PARENTS)
    for name, *arguments in events:
        if name == "pop" and not plain.stacks.get(arguments[0]):
            continue
        assert getattr(fast, name)(*arguments) == getattr(plain, name)(*arguments)
        assert state_of(fast) == state_of(plain), name
        assert fast.counters == plain.counters
        assert fast.num_blocks() == plain.num_blocks()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(EVENTS, max_size=60))
def test_fast_equals_plain(events):
    """The books of the dispatch engine would differ from their specification after some event."""
    run_both(events)


def test_fast_equals_plain_over_a_long_run():
    """What is carried from step to step (saved cells, shared marks) would drift from the specification."""
    draw = random.Random(7)
    events = []
    for number in range(3000):
        address, owner, reftype = draw.randrange(60), draw.randrange(len(PARENTS)), draw.choice([3, 14, 14, 16, 15])
        events.append(
            draw.choice(
                [
                    ("allocate", 0, address, 1 + number % 97, 0, owner, reftype),
                    ("allocate", 0, address, 1 + number % 31, 0, owner, reftype),
                    ("release", 0, address),
                    ("relabel", address, owner, reftype),
                    ("push", 0, owner, FrameKind.FORWARD, 0, -1),
                    ("pop", 0),
                    ("enter_backward", 0, owner, 1),
                    ("end_step",) if number % 5 == 0 else ("settle", 0, -1),
                ]
            )
        )
    run_both(events)
