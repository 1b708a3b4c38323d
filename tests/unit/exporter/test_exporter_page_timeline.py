"""The timeline: no step is lost in a column, whatever a ring holds."""

from __future__ import annotations

import array

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pages import CHECKPOINT_EVERY, EVAL_EVERY, trained
from records import make_record
from torchmem.model import Phase
from torchmem.wire import record as wire
from torchmem_exporter.page.drawing import chart
from torchmem_exporter.page.timeline import MAX_COLUMNS, Timeline, ticks, timeline

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
AMOUNTS = st.lists(st.tuples(INT64, INT64, INT64, st.floats()), max_size=200)


def ring_record(rows):
    """A record with two reftypes and steps of (number, peak, end, time)."""
    reftypes = ["activation", "of the future"]
    ring = wire.Ring(
        steps=array.array("q", [row[0] for row in rows]).tobytes(),
        ended_at=array.array("d", [row[3] for row in rows]).tobytes(),
        phases=array.array("q", [row[0] for row in rows]).tobytes(),
        devices=[
            wire.RingDevice(
                name="cuda:0",
                step_peak=array.array("q", [v for row in rows for v in (row[1], row[2])]).tobytes(),
                step_end=array.array("q", [v for row in rows for v in (row[2], 0)]).tobytes(),
            )
        ],
    )
    return msgspec.structs.replace(make_record(0), reftypes=reftypes, ring=ring)


@given(AMOUNTS)
def test_any_ring_can_be_drawn(rows):
    """A record with nonsense in its ring would cost everybody the page."""
    found = timeline(ring_record(rows), "cuda:0")
    assert len(found.columns) == min(len(rows), MAX_COLUMNS)
    assert found.top_bytes == max((max(0, row[1]) + max(0, row[2]) for row in rows), default=0)
    assert all(sum(column.parts) == column.peak_bytes and column.end_bytes >= 0 for column in found.columns)
    if rows:
        assert "NaN" not in str(chart(found, 1 << 40, None))


def test_columns_keep_what_matters():
    """A checkpoint or a failed allocation would vanish among the steps that share its column."""
    oom = wire.OutOfMemory(
        number=1, device="cuda:0", time=1.0, step=600, phase=2, module=1, reftype=14, requested_bytes=9, held_bytes=9
    )
    record = msgspec.structs.replace(
        trained(0, 600),
        oom_events=[msgspec.structs.replace(oom, step=340, number=1), msgspec.structs.replace(oom, number=2)],
    )
    found = timeline(record, "cuda:0")
    shown = range(89, 601)
    assert (found.columns[0].first_step, found.columns[-1].last_step) == (89, 600)
    assert sum(c.last_step - c.first_step + 1 for c in found.columns) == len(shown)
    for phase, every in ((Phase.CHECKPOINT, CHECKPOINT_EVERY), (Phase.EVAL, EVAL_EVERY)):
        assert sum(bool(column.phases & phase) for column in found.columns) == sum(step % every == 0 for step in shown)
    assert [(c.first_step <= 341 <= c.last_step, c.num_ooms) for c in found.columns if c.num_ooms] == [
        (True, 1),
        (False, 1),
    ]
    assert found.columns[-1].num_ooms == 1


def test_stack_is_in_one_order():
    """The colours of a chart would swap places from step to step."""
    found = timeline(trained(0, 40), "cuda:0")
    assert found.reftypes[:3] == ("sharded_parameter", "unsharded_parameter", "buffer")
    assert found.reftypes[-1] == "other"


def test_no_ring_is_no_chart():
    """A device without a ring would cost the page."""
    assert timeline(make_record(0, ring=wire.Ring()), "cuda:0") == Timeline((), (), ())
    assert timeline(make_record(0), "cuda:7") == Timeline((), (), ())


def test_ticks_are_few_and_round():
    """An axis would be full of lines, or have none."""
    assert ticks(100 << 20) == [32 << 20, 64 << 20, 96 << 20]
    assert ticks(0) == []
    assert all(1 <= len(ticks(top)) <= 4 for top in (1, 3, 1000, 1 << 62, (1 << 63) * 18))
