"""What the user has chosen, and how the terminal is shared."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import small_records
from torchmem.show import Book
from torchmem.watching.choice import WIDE, Choice, Order, heights, window
from watched import MIB, device_look, look, rank_look


def three():
    """A reading of three ranks: the second is the fullest, the third drifts most; a fourth is gone."""
    held = [100, 900, 200, 950]
    shift = [0.0, None, 0.5, 0.9]
    states = ["running", "stale", "running", "crashed"]
    ranks = []
    for rank in range(4):
        device = small_records.device(step_peak_bytes=held[rank] * MIB)
        ranks.append(rank_look(rank, states[rank], [device_look(device, drift_ratio=shift[rank])]))
    return look(*ranks)


def order(choice, reading):
    """Numbers of the ranks as they are shown."""
    return [rank.view.record.identity.rank for rank in choice.ranks(reading)]


def test_orders_put_the_worst_first_and_the_dead_last():
    """The fullest rank of many would have to be searched for, or the dead would hide the living."""
    choice = Choice()
    found = {}
    for _ in Order:
        found[choice.order] = order(choice, three())
        choice = choice.sorted_anew()
    assert found == {Order.RANK: [0, 1, 2, 3], Order.PEAK: [1, 2, 0, 3], Order.DRIFT: [2, 0, 1, 3]}
    assert choice.order is Order.RANK


def test_chosen_rank_stays_chosen_while_others_come_and_go():
    """The view would jump to another rank under the user's eyes."""
    reading = three()
    choice = Choice().moved(reading, 2)
    fewer = look(*reading.ranks[1:])
    assert choice.chosen(fewer).view.record.identity.rank == 2
    assert choice.sorted_anew().chosen(reading).view.record.identity.rank == 2


def test_rank_in_its_place_follows_a_chosen_one_that_has_gone():
    """The view would be empty, or jump to the top, when the watched rank ends."""
    reading = three()
    choice = Choice().moved(reading, 2)
    assert choice.chosen(look(*reading.ranks[:2], reading.ranks[3])).view.record.identity.rank == 3
    assert choice.chosen(look(reading.ranks[0])).view.record.identity.rank == 0
    assert choice.chosen(look()) is None


def test_moves_stop_at_the_ends():
    """A held key would leave the table."""
    reading = three()
    assert Choice().moved(reading, -1).chosen(reading).view.record.identity.rank == 0
    assert Choice().moved(reading, 99).chosen(reading).view.record.identity.rank == 3
    assert Choice().moved(look(), 1) == Choice()


def test_devices_go_around_and_a_rank_without_any_is_no_error():
    """A rank's other devices could not be seen, or one without devices would end the view."""
    devices = [device_look(small_records.device(name=name)) for name in ("cuda:0", "cuda:1", "cpu")]
    reading = look(rank_look(devices=devices), rank_look(1, devices=[]))
    choice, seen = Choice(), []
    for _ in range(4):
        seen.append(choice.chosen(reading).device(choice.device).device.name)
        choice = choice.with_next_device(reading)
    assert seen == ["cuda:0", "cuda:1", "cpu", "cuda:0"]
    alone = choice.moved(reading, 1)
    assert alone.chosen(reading).device(7) is None
    assert alone.with_next_device(reading).device == 0


def test_book_and_folding_go_back_and_forth():
    """A key pressed twice would not bring back what was there."""
    choice = Choice().with_other_book().unfolded()
    assert (choice.book, choice.unfolds) == (Book.USAGE, True)
    assert choice.with_other_book().unfolded() == Choice()


@given(st.integers(0, 300), st.integers(0, 100), st.integers(0, 500), st.integers(0, 50), st.integers(0, 10))
def test_panes_fill_the_terminal_and_never_more(width, height, num_ranks, num_alerts, num_growers):
    """Lines would be lost below the terminal's end, or left empty."""
    shared = heights(width, height, num_ranks=num_ranks, num_alerts=num_alerts, num_growers=num_growers)
    beside = shared.growers if width >= WIDE else 0
    assert min(shared) >= 0
    assert sum(shared) - beside == max(height, shared.ranks + shared.alerts)


def test_small_terminal_shows_holders_for_a_node_of_eight():
    """On 80x24 the ranks of a usual node would leave no room for who holds the memory."""
    shared = heights(80, 22, num_ranks=8, num_alerts=9, num_growers=10)
    assert shared == (6, 4, 6, 3, 3)


@given(st.integers(0, 100), st.integers(0, 99), st.integers(-3, 60))
def test_window_holds_the_chosen_row(num_rows, position, num_shown):
    """The chosen rank would be off the screen."""
    first, end = window(num_rows, position, num_shown)
    assert 0 <= first <= num_rows
    assert end - first <= max(0, num_shown)
    if 0 <= position < num_rows and num_shown > 0:
        assert first <= position < end
