"""The native ledger against the one in plain Python, event for event."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ledger_events import PARENTS, events
from torchmem.engine import native
from torchmem.ledger import FrameKind, Ledger
from torchmem.model import RefType

EVENTS = events(st.integers(1, 24).map(lambda i: i * 64))


def state_of(ledger: Ledger) -> dict:
    """What ``state()`` of the native ledger says, from the plain one."""

    def nonzero(counts: dict) -> dict:
        return {key: value for key, value in counts.items() if value}

    return {
        device: (
            books.current,
            books.peak,
            books.life_peak,
            nonzero(books.cells),
            nonzero(books.cells_at_peak),
            (books.step_peak, books.step_end, books.usage),
            (
                books.windows[0].peak,
                books.windows[0].composition,
                {o: (m.max, nonzero(m.totals)) for o, m in books.windows[0].modules.items() if m.max},
            ),
        )
        for device, books in ledger.devices.items()
    }


def check_invariants(state: dict) -> None:
    for current, peak, life_peak, cells, at_peak, (step_peak, step_end, usage), window in state.values():
        assert sum(cells.values()) == current
        assert sum(at_peak.values()) == peak
        assert 0 <= current <= peak <= life_peak
        assert sum(usage.values()) == step_end <= step_peak
        assert sum(window[1].values()) == window[0]
        assert all(v > 0 for book in (cells, at_peak, usage, window[1]) for v in book.values())
        for highest, totals in window[2].values():
            assert sum(totals.values()) == highest
            assert all(v > 0 for v in totals.values())


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(EVENTS, max_size=60))
def test_native_equals_plain(events: list[tuple]) -> None:
    """The native books would differ from their specification, or break an invariant, after some event."""
    plain, fast = Ledger(PARENTS), native.load().Ledger(PARENTS)
    for name, *arguments in events:
        if name == "pop" and not plain.stacks.get(arguments[0]):
            continue
        expected = getattr(plain, name)(*arguments)
        actual = getattr(fast, name)(*arguments)
        assert actual == expected
        state = fast.state()
        assert state == state_of(plain)
        check_invariants(state)
        assert fast.counters() == {
            "num_events": plain.counters["num_events"],
            "num_unknown_frees": plain.counters["num_unknown_frees"],
            "num_double_allocations": plain.counters["num_double_allocations"],
            "num_blocks": plain.num_blocks(),
        }


@pytest.mark.parametrize("make", [Ledger, lambda parents: native.load().Ledger(parents)], ids=["plain", "native"])
class TestRules:
    """Each rule of the books by example, on both ledgers."""

    def test_composition_is_that_of_the_peak(self, make):
        """The composition would be of another moment than the peak's."""
        books = make(PARENTS)
        books.allocate(0, 64, 100, 0, 1, RefType.PARAMETER)
        books.allocate(0, 128, 50, 0, 2, RefType.TEMPORARY)
        books.release(0, 128)
        books.allocate(0, 192, 20, 0, 3, RefType.TEMPORARY)
        books.end_step()
        assert window(books) == (150, {(1, RefType.PARAMETER): 100, (2, RefType.TEMPORARY): 50})

    def test_late_label_reaches_back_to_the_peak(self, make):
        """A gradient would count as temporary at the peak because its purpose became known after it."""
        books = make(PARENTS)
        books.allocate(0, 64, 100, 0, 1, RefType.TEMPORARY)
        books.allocate(0, 128, 50, 0, 2, RefType.TEMPORARY)
        books.release(0, 128)
        books.relabel(64, 2, RefType.GRADIENT)
        books.end_step()
        assert window(books) == (150, {(2, RefType.GRADIENT): 100, (2, RefType.TEMPORARY): 50})

    def test_scratch_of_forward_is_temporary(self, make):
        """What a forward frees before it returns would count as an activation at the peak."""
        books = make(PARENTS)
        books.push(0, 2, FrameKind.FORWARD)
        books.allocate(0, 64, 100, 0, 2, RefType.ACTIVATION)
        books.allocate(0, 128, 50, 0, 2, RefType.ACTIVATION)
        books.release(0, 64)
        books.pop(0)
        books.release(0, 128)
        books.end_step()
        assert window(books) == (150, {(2, RefType.TEMPORARY): 100, (2, RefType.ACTIVATION): 50})
        assert modules(books) == {2: (150, {RefType.TEMPORARY: 100, RefType.ACTIVATION: 50})}

    def test_freed_after_return_is_an_activation(self, make):
        """An activation would become temporary only because its module's parent frees it."""
        books = make(PARENTS)
        books.push(0, 1, FrameKind.FORWARD)
        books.push(0, 2, FrameKind.FORWARD)
        books.allocate(0, 64, 100, 0, 2, RefType.ACTIVATION)
        books.pop(0)
        books.release(0, 64)
        books.pop(0)
        books.end_step()
        assert window(books) == (100, {(2, RefType.ACTIVATION): 100})

    def test_active_peak_counts_for_the_enclosing_modules(self, make):
        """A parent's own peak would miss what its child held."""
        books = make(PARENTS)
        books.push(0, 1, FrameKind.FORWARD)
        books.push(0, 2, FrameKind.FORWARD)
        books.allocate(0, 64, 100, 0, 2, RefType.TEMPORARY)
        books.release(0, 64)
        books.pop(0)
        books.push(0, 5, FrameKind.FORWARD)
        books.allocate(0, 64, 30, 0, 5, RefType.TEMPORARY)
        books.release(0, 64)
        books.pop(0)
        books.pop(0)
        books.end_step()
        temporary = RefType.TEMPORARY
        assert modules(books) == {1: (100, {temporary: 100}), 2: (100, {temporary: 100}), 5: (30, {temporary: 30})}

    def test_backward_runs_the_path_from_the_root(self, make):
        """A module's backward would not count as its parents' running."""
        books = make(PARENTS)
        books.enter_backward(0, 3, 7)
        books.allocate(0, 64, 100, 0, 3, RefType.TEMPORARY)
        books.release(0, 64)
        books.enter_backward(0, 5, 7)
        books.allocate(0, 64, 30, 0, 5, RefType.TEMPORARY)
        books.end_step()
        assert {owner: highest for owner, (highest, _) in modules(books).items()} == {1: 100, 2: 100, 3: 100, 5: 30}

    def test_the_step_starts_from_what_is_alive(self, make):
        """A second step would inherit the first one's peak."""
        books = make(PARENTS)
        books.allocate(0, 64, 100, 0, 1, RefType.TEMPORARY)
        books.allocate(0, 128, 10, 0, 1, RefType.PARAMETER)
        books.release(0, 64)
        books.end_step()
        books.rotate_windows()
        books.end_step()
        assert window(books) == (10, {(1, RefType.PARAMETER): 10})

    def test_nothing_lives_at_address_zero(self, make):
        """A tensor without memory would be taken for a block that was freed before, and disturb the books."""
        books = make(PARENTS)
        for address in range(64, 64 * 5000, 64):
            books.allocate(0, address, 100, 0, 1, RefType.TEMPORARY)
            books.release(0, address)
        assert not books.relabel(0, 2, RefType.GRADIENT)
        assert not books.release(0, 0)
        books.end_step()
        assert window(books) == (100, {(1, RefType.TEMPORARY): 100})

    def test_unknown_free_changes_only_a_counter(self, make):
        """A free of memory that was never seen would disturb the books."""
        books = make(PARENTS)
        books.allocate(0, 64, 100, 0, 1, RefType.TEMPORARY)
        assert not books.release(0, 999)
        books.end_step()
        assert window(books) == (100, {(1, RefType.TEMPORARY): 100})


def window(books) -> tuple:
    state = books.state() if hasattr(books, "state") else state_of(books)
    return state[0][6][:2]


def modules(books) -> dict:
    state = books.state() if hasattr(books, "state") else state_of(books)
    return state[0][6][2]
