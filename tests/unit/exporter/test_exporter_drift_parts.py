"""The parts of the judgement of drift: statistics, curves by size, compositions, baselines kept, steps of a ring."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from records import make_record
from torchmem.model import REFTYPE_LABELS
from torchmem.wire import record as wire
from torchmem_exporter.drift import baseline, robust, sizes
from torchmem_exporter.drift.composition import OTHER, Composition, Growth, Part, compare, composition
from torchmem_exporter.drift.floor import steady_growth
from torchmem_exporter.drift.learning import Level
from torchmem_exporter.drift.ring_steps import Step, steps_after

NAMES = st.sampled_from(["(root)", "layers.0", "layers.1", "layers.2", "head"])
PARTS = st.dictionaries(st.tuples(NAMES, st.sampled_from(["activation", "gradient"])), st.integers(1, 1 << 40))
LEVEL = Level(
    num_bytes=10e9,
    spread_bytes=2e7,
    highest_bytes=11e9,
    is_wandering=False,
    num_steps=256,
    first_step=16,
    last_step=256,
)


def made(parts, max_parts=1000):
    """A composition of parts by name, cut."""
    ranked = sorted(parts.items(), key=lambda part: -part[1])
    return Composition(parts=[Part(*name, num_bytes) for name, num_bytes in ranked]).cut(max_parts)


# -- statistics


def test_slope_withstands_wild_values():
    """A few spikes would turn the slope."""
    ys = [3.0 * x for x in range(32)]
    ys[5], ys[20] = 1e9, -1e9
    assert robust.slope(range(32), ys) == pytest.approx(3.0, rel=0.02)
    assert robust.slope([1, 1, 1], [1, 2, 3]) == 0


def test_spreads_tell_noise_from_wandering():
    """A job whose memory wanders would get the narrow baseline of a noisy one."""
    line, alternating = [float(i) for i in range(20)], [float(i % 2) for i in range(20)]
    assert robust.spread([]) == robust.spread([5.0]) == 0
    assert robust.step_spread(line) < robust.spread(line) / 5
    assert robust.smoothness(line) < 0.1
    assert robust.smoothness(alternating) > 1
    assert robust.smoothness([4.0] * 9) == 1
    assert robust.middle_mean([1, 2, 3, 1000]) == 2.5
    assert robust.block_medians([1, 2, 3, 9, 9, 9, 4], 3) == [2, 9]


# -- windows of the floor


@pytest.mark.parametrize(
    ("ys", "is_leak"),
    [
        ([float(i) for i in range(32)], True),
        ([0.0] * 16 + [31.0] * 16, False),
        ([31 * (1 - 0.85**i) for i in range(32)], False),
        ([float(i % 16) * 2 for i in range(32)], False),
        ([0.9 * i for i in range(32)], False),
        ([float(-i) for i in range(32)], False),
    ],
    ids=["leak", "step", "saturating", "sawtooth", "too little", "shrinking"],
)
def test_window_tells_a_leak_from_what_only_rises(ys, is_leak):
    """A step, a filling cache or a saw tooth would be a leak, or a leak none."""
    assert (steady_growth(range(32), ys, 30.0) is not None) is is_leak


# -- sizes


def test_curve_explains_within_its_range_and_a_margin():
    """Varying lengths would alarm, or longer ones than ever be explained away."""
    lengths = [512.0 * (1 + i % 8) for i in range(256)]
    curve = sizes.fit(lengths, [1e9 + 1e6 * length for length in lengths])
    assert curve.explained(4096) - curve.explained(512) == pytest.approx(1e6 * 3584)
    assert curve.explained(5000) - curve.explained(4096) == pytest.approx(1e6 * 904)
    assert curve.explained(1 << 20) == curve.explained(4096 + 3584 / 2)
    assert curve.explained(1) == curve.explained(512)
    assert curve.explained(0) == 0


@pytest.mark.parametrize("lengths", [[0.0] * 100, [2048.0] * 100, [2048.0] + [0.0] * 99, [512.0, 1024.0] * 50])
def test_sizes_that_do_not_vary_make_no_curve(lengths):
    """A line would be drawn through one or two points."""
    assert sizes.fit(lengths, [1e9] * 100) is None


# -- compositions


def test_composition_adds_up_to_its_book():
    """Bytes would be lost between a record and what is compared."""
    record = make_record(0)
    book = record.devices[0].step_peak
    made_of = composition(book, record.modules, record.reftypes)
    assert made_of.total_bytes == record.devices[0].step_peak_bytes
    assert made_of.cut(5).total_bytes == made_of.total_bytes
    assert len(made_of.cut(5).parts) == 5


def test_modules_of_one_name_are_one_part():
    """A name that appears twice would hide one of the two."""
    book = wire.pack_cells([wire.Cell(1, 2, 10), wire.Cell(2, 2, 5)])
    assert composition(book, ["a", "b", "b"], REFTYPE_LABELS).parts == [Part("b", "buffer", 15)]


def test_compare_names_what_grew_first():
    """The culprit would not stand on top."""
    before = made({("layers.0", "activation"): 100, ("head", "gradient"): 50})
    after = made({("layers.0", "activation"): 90, ("head", "gradient"): 80, ("layers.1", "activation"): 500})
    assert compare(before, after) == [
        Growth("layers.1", "activation", 0, 500),
        Growth("head", "gradient", 50, 80),
        Growth("layers.0", "activation", 100, 90),
    ]


def test_part_that_was_cut_is_no_growth():
    """A small part that a cut baseline lacks would seem to have come from nothing."""
    before = made({("layers.0", "activation"): 100, ("head", "gradient"): 50}, max_parts=1)
    after = made({("layers.0", "activation"): 100, ("head", "gradient"): 60})
    assert compare(before, after) == [
        Growth(OTHER, OTHER, 50, 60),
        Growth("layers.0", "activation", 100, 100),
    ]


@given(PARTS, PARTS, st.integers(0, 8), st.integers(0, 8))
def test_comparison_is_exact(before, after, max_before, max_after):
    """The rows of a diff would not add up to the difference of the runs."""
    one, other = made(before, max_before), made(after, max_after)
    rows = compare(one, other)
    assert sum(row.before_bytes for row in rows) == sum(before.values())
    assert sum(row.after_bytes for row in rows) == sum(after.values())
    assert [row.grown_bytes for row in rows] == sorted((row.grown_bytes for row in rows), reverse=True)
    assert len({(row.module, row.reftype) for row in rows}) == len(rows)


# -- baselines kept


def test_kept_baselines_come_back():
    """A baseline kept by name would not be the one that was saved."""
    one = baseline.Baseline(rank=3, device="cuda:3", level=LEVEL, usual=made({("head", "gradient"): 5}), mesh={"dp": 3})
    run = baseline.Baselines(name="main", train_job="llama", world_size=8, saved_at=1.5, baselines=[one])
    read = baseline.decode(baseline.encode(run))
    assert read == run
    assert read.of(3, "cuda:3") == one
    assert read.of(2, "cuda:3") is None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(run), type=baseline.Baselines) == run


@given(st.binary() | st.just(b'{"version": 2, "run": {"any": 1}}') | st.just(b'{"version": 1, "run": []}'))
def test_files_that_are_no_baselines_are_refused(data):
    """A wrong file would end in a traceback."""
    with pytest.raises(baseline.BaselineError):
        baseline.decode(data)


# -- steps of a ring


def test_only_new_steps_are_unpacked_and_summed():
    """A step would be judged twice, or by one reftype's bytes alone."""

    def packed(*values):
        return struct.pack(f"<{len(values)}q", *values)

    ring = wire.Ring(
        steps=packed(4, 5, 6),
        ended_at=struct.pack("<3d", 1.0, 2.0, 3.0),
        phases=packed(0, 8, 7),
        devices=[wire.RingDevice(name="cpu", step_peak=packed(1, 2, 3, 4, 5, 6), step_end=packed(1, 0, 2, 0, 3, 0))],
    )
    assert steps_after(ring, 4, 2) == {"cpu": [Step(5, 2.0, 8, 7, 2), Step(6, 3.0, 7, 11, 3)]}
    assert steps_after(ring, 5, 2, [10, 20, 30]) == {"cpu": [Step(6, 3.0, 7, 11, 3, 30)]}
    assert steps_after(ring, 6, 2) == {"cpu": []}
    assert len(steps_after(ring, -1, 2)["cpu"]) == 3
    assert steps_after(wire.Ring(), -1, 2) == {}


def test_books_of_a_whole_record_fit():
    """The judgement and the records would disagree about what a row is."""
    record = make_record(0)
    (steps,) = steps_after(record.ring, -1, len(record.reftypes)).values()
    assert {step.peak_bytes for step in steps} == {record.devices[0].usage_bytes}
