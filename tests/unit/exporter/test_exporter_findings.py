"""What a rank's reading warns of."""

from __future__ import annotations

import pytest

import small_records
import watched
from torchmem.model import RefType
from torchmem.wire import record as wire
from torchmem.wire.record import filled_share
from torchmem_exporter.drift.judge import Grower
from torchmem_exporter.findings import findings
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import Rank
from watched import GIB, MIB, NOW, device_look, rank_look

GROWER = Grower("layers.3.mlp", "activation", 2 * MIB)


def texts(state="running", devices=None, ooms=None, **changes):
    """All findings of a rank as (word, text)."""
    look = rank_look(state=state, devices=devices, **changes)
    rank = Rank(look.view.path, look.view.record, State(state), has_memory=True, ooms=ooms or {})
    verdicts = {one.device.name: one.verdict for one in look.devices}
    found = [tuple(finding) for finding in findings(rank, verdicts, NOW)]
    assert [tuple(finding) for finding in look.findings(NOW)] == found or ooms  # the live view says the same
    return found


def test_nothing_is_the_matter_with_a_healthy_rank():
    """A healthy job would look sick."""
    assert texts() == []


def test_drift_names_the_shift_and_the_grower():
    """The user would see that something drifts, but not by how much nor whose it is."""
    one = device_look(is_level_drifting=True, drift_ratio=0.123, growers=(GROWER,))
    said = "cuda:0 +12.3% over its baseline: layers.3.mlp activation +2.0 MiB"
    assert texts(devices=[one]) == [("drift", said)]


def test_a_missed_forecast_says_by_how_much():
    """A job that takes more than was planned would look as planned, or one within the margin be complained of."""
    device = small_records.device(forecast_bytes=12 * MIB, step_peak_bytes=16 * MIB, allocator=wire.Allocator())
    said = "cuda:0 +33.3% over its forecast of 12.0 MiB"
    assert texts(devices=[device_look(device)]) == [("forecast", said)]
    device = small_records.device(forecast_bytes=20 * MIB, step_peak_bytes=21 * MIB, allocator=wire.Allocator())
    assert texts(devices=[device_look(device)]) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"growth_bytes_per_second": None}, "leaks"),
        (
            {"growth_bytes_per_second": 3 * MIB, "exhausted_at": NOW + 7500},
            "leaks 3.0 MiB/s, full in 2 h 5 min",
        ),
        (
            {"growth_bytes_per_second": 1.0, "exhausted_at": NOW + 1e12},
            "leaks 3.5 KiB/h, full in over a year",
        ),
        ({"growth_bytes_per_second": 2048.0, "exhausted_at": NOW - 5}, "leaks 2.0 KiB/s, full about now"),
    ],
)
def test_leak_says_how_fast_and_until_when(changes, said):
    """The user would not know whether to act tonight or next week."""
    one = device_look(is_floor_growing=True, **changes)
    assert texts(devices=[one]) == [("leak", f"cuda:0 {said}")]


def test_a_dead_ranks_leak_fills_nothing_any_more():
    """Somebody would hurry to save a job that has ended."""
    one = device_look(is_floor_growing=True, growth_bytes_per_second=2048.0, exhausted_at=NOW + 60)
    assert texts(state="crashed", devices=[one])[1:] == [("leak", "cuda:0 leaks 2.0 KiB/s")]


def test_worst_comes_first_on_a_crashed_rank_that_ran_out_of_memory():
    """The cause of a crash would be hidden behind a warning."""
    device = small_records.device(allocator=wire.Allocator(num_ooms=3), step_peak_bytes=1020 * MIB)
    event = wire.OutOfMemory(
        number=3, device="cuda:0", time=1_700_000_090.0, step=412, phase=0, module=3,
        reftype=int(RefType.ACTIVATION), requested_bytes=2 * GIB, held_bytes=GIB,
    )  # fmt: skip
    asked = "layers.*.attention asked for 2.0 GiB of activation on cuda:0, which held 1.0 GiB"
    assert texts(state="crashed", devices=[device_look(device)], oom_events=[event]) == [
        ("crashed", "ended without a clean end; torchmem post-mortem tells who held what"),
        ("oom", f"out of memory 3 times, last 2023-11-14 22:14:50 UTC: {asked}"),
        ("full", "cuda:0 is 99.7% full at the step peak, of 1.0 GiB"),
    ]


def test_failed_allocations_of_earlier_attempts_count():
    """A job that runs out of memory at each restart would look as if it did so for the first time."""
    device = small_records.device(allocator=wire.Allocator(num_ooms=1))
    assert texts(devices=[device_look(device)]) == [("oom", "out of memory once")]
    assert texts(devices=[device_look(device)], ooms={"cuda:0": 4}) == [("oom", "out of memory 4 times")]


def test_stale_says_since_when_and_a_disabled_labeler_why():
    """A hung job would look alive, and bytes that lost their names would be no one's fault."""
    labelers = [wire.Labeler(name="fsdp2", up=False, reason="KeyError: \x1b[2J"), wire.Labeler(name="ddp", up=False)]
    assert texts(state="stale", labelers=labelers) == [
        ("stale", "alive, but wrote nothing for 1 s"),
        ("labeler", "fsdp2 is disabled: KeyError: [2J"),
        ("labeler", "ddp is disabled: no reason"),
    ]


def test_what_others_hold_on_the_device_counts_as_filled():
    """A device that another process fills would seem to have room."""
    device = small_records.device(step_peak_bytes=512 * MIB, unattributed_bytes=-5, other_bytes=256 * MIB)
    assert filled_share(device) == 0.75
    assert filled_share(small_records.device(limit_bytes=None)) is None
    assert filled_share(small_records.device(limit_bytes=0)) is None


def test_helpers_agree_with_the_wire():
    """These tests would judge records that no rank writes."""
    record = watched.trained(1, 600, leaks_from=300)
    assert wire.decode(wire.encode(record)) == record
