"""What a snapshot becomes: values, sums, labels, and what is left out."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from records import GIB, cells, make_device, make_record, total
from torchmem.model import RefType
from torchmem.wire import record as wire
from torchmem_exporter import catalog
from torchmem_exporter.budget import Budget, Level
from torchmem_exporter.labels import MAX_LABEL_BYTES, clean_label
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import Rank, Snapshot
from torchmem_exporter.sampler import Sampler, versions

JOB = "llama-pretrain"


def snapshot_of(*ranks):
    """A scan that found these ranks."""
    return Snapshot(taken_at=0.0, ranks=ranks, rejections=(), num_errors={}, problem="")


def values(*ranks):
    """Metric -> labels -> value, at the level that hides nothing."""
    blocks = Sampler(Budget(Level.FULL)).blocks(snapshot_of(*ranks))
    assert len({block.key for block in blocks}) == len(blocks)
    found = {}
    for block in blocks:
        order = [catalog.METRICS.index(series.metric) for series in block.series]
        assert order == sorted(set(order))
        for series in block.series:
            points = found.setdefault(series.metric, {})
            for labels, value in zip(series.labels, series.values, strict=True):
                assert len(labels) == len(series.metric.labels)
                assert labels not in points
                points[labels] = value
    return found


def running(record):
    return Rank("job/rank-0.record", record, State.RUNNING, has_memory=True)


def test_values_of_a_rank():
    """A figure of the record would be served under another metric's name."""
    record = make_record(1, num_modules=2)
    got = values(running(record))
    on_device, on_rank = (JOB, "1", "cuda:1"), (JOB, "1")
    (device,) = record.devices
    expected = {
        catalog.PEAK: {on_device: device.peak_bytes},
        catalog.UNATTRIBUTED: {on_device: 8193},
        catalog.ALLOCATED: {on_device: device.usage_bytes + 8193},
        catalog.ACTIVE: {on_device: device.usage_bytes + 16384},
        catalog.RESERVED: {on_device: 4 * device.step_peak_bytes},
        catalog.INACTIVE_SPLIT: {on_device: device.step_peak_bytes},
        catalog.FRAGMENTATION: {on_device: 0.25},
        catalog.OOMS: {on_device: 0},
        catalog.RETRIES: {on_device: 1},
        catalog.LIMIT: {on_device: 80 * GIB},
        catalog.OTHER: {on_device: GIB // 2},
        catalog.CHECKPOINT_PEAK: {
            (*on_device, "save"): device.step_peak_bytes + 2048,
            (*on_device, "load"): device.usage_bytes + 1024,
        },
        catalog.STEP_NUMBER: {on_rank: 40},
        catalog.STEPS: {on_rank: 40},
        catalog.STEP_TIME: {on_rank: 12.25},
        catalog.TRACKER_TIME: {on_rank: 0.0625},
        catalog.SNAPSHOT_TIMESTAMP: {on_rank: 1_700_000_120.5},
        catalog.START_TIMESTAMP: {on_rank: 1_700_000_000.0},
        catalog.RANK_UP: {on_rank: 1},
        catalog.RANK_STATE: {(*on_rank, s): float(s == "running") for s in ("running", "stale", "crashed", "exited")},
        catalog.RANK_INFO: {
            (
                *on_rank,
                "5f0c7a52-0000-4000-8000-000000000001",
                "4001",
                "node-17",
                "native",
                "GPU-00000000-0000-0000-0000-000000000001",
                "1",
                "",
                "",
            ): 1
        },
        catalog.WORLD_SIZE: {(JOB,): 8},
        catalog.LABELER_UP: {(*on_rank, "modules"): 1, (*on_rank, "fsdp2"): 0},
        catalog.MODULES_FOLDED: {on_rank: 0},
    }
    assert {metric: got[metric] for metric in expected} == expected
    books = {m for m in catalog.METRICS if "reftype" in m.labels} - {catalog.MODULE_EXCESS}
    assert set(got) == set(expected) | books


@pytest.mark.parametrize(
    ("metric", "book"),
    [
        (catalog.MODULE_USAGE, "usage"),
        (catalog.MODULE_STEP_PEAK, "step_peak"),
        (catalog.MODULE_ACTIVE_PEAK, "active_peak"),
    ],
)
def test_every_cell_of_a_book_is_served(metric, book):
    """Bytes would be shown under another module or reftype, or not at all."""
    record = make_record(num_modules=7)
    expected = {
        (JOB, "0", "cuda:0", record.modules[cell.module], record.reftypes[cell.reftype]): cell.num_bytes
        for cell in wire.unpack_cells(getattr(record.devices[0], book))
    }
    assert values(running(record))[metric] == expected


CELLS = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, len(RefType) - 1)), st.integers(1, 1 << 46), max_size=40
)
NAMES = st.lists(st.text(max_size=4), min_size=4, max_size=4)


@given(cells=CELLS, modules=NAMES)
def test_parts_add_up_to_the_total_whatever_the_names(cells, modules):
    """The sum over modules would differ from the device's total: bytes lost or doubled on the way."""
    book = wire.pack_cells(wire.Cell(module, reftype, size) for (module, reftype), size in cells.items())
    got = values(running(make_record(step_peak=book, usage=book, active_peak=book, modules=modules)))
    for parts, totals in ((catalog.MODULE_STEP_PEAK, catalog.STEP_PEAK), (catalog.MODULE_USAGE, catalog.USAGE)):
        by_reftype = {}
        for labels, size in got.get(parts, {}).items():
            by_reftype[labels[-1]] = by_reftype.get(labels[-1], 0) + size
        assert by_reftype == {labels[-1]: size for labels, size in got.get(totals, {}).items()}
        assert sum(by_reftype.values()) == sum(cells.values())


def test_total_is_the_devices_own():
    """The step peak by reftype would not add up to the step peak that the rank measured."""
    record = make_record(num_modules=20)
    assert sum(values(running(record))[catalog.STEP_PEAK].values()) == record.devices[0].step_peak_bytes
    assert sum(values(running(record))[catalog.USAGE].values()) == record.devices[0].usage_bytes


def test_unknown_figures_are_absent():
    """A CPU would appear to have reserved 0 bytes of a limit of 0."""
    unknown = {"limit_bytes": None, "other_bytes": None, "uuid": "", "checkpoint_peaks": {}}
    got = values(running(make_record(name="cpu", allocator=wire.Allocator(), **unknown)))
    absent = {"ALLOCATED", "ACTIVE", "RESERVED", "INACTIVE_SPLIT", "FRAGMENTATION", "LIMIT", "OTHER", "CHECKPOINT_PEAK"}
    assert {name for name in absent if getattr(catalog, name) in got} == set()
    assert got[catalog.OOMS] == {(JOB, "0", "cpu"): 0}


def test_forecast_and_how_far_over_it():
    """A job that misses its forecast would not be told of, or told of by another figure than its step peak."""
    peak = make_record().devices[0].step_peak_bytes
    got = values(running(make_record(forecast_bytes=peak // 2)))
    on_device = (JOB, "0", "cuda:0")
    assert got[catalog.FORECAST] == {on_device: peak // 2}
    assert got[catalog.FORECAST_DRIFT_RATIO] == {on_device: peak / (peak // 2) - 1}
    assert sum(got[catalog.STEP_PEAK].values()) == peak


def test_forecast_is_known_before_it_can_be_compared():
    """A job that has not stepped would seem to hold less than was forecast, or none to have a forecast of 0."""
    got = values(running(make_record(step=0, forecast_bytes=1 << 30)))
    assert catalog.FORECAST in got
    assert catalog.FORECAST_DRIFT_RATIO not in got
    assert not {catalog.FORECAST, catalog.FORECAST_DRIFT_RATIO} & values(running(make_record())).keys()


def test_operations_of_one_clean_name_are_one():
    """Two series of one name and labels would make Prometheus refuse the whole scrape."""
    got = values(running(make_record(checkpoint_peaks={"sa\nve": 3, "save": 2, "copy": 0})))
    assert got[catalog.CHECKPOINT_PEAK] == {(JOB, "0", "cuda:0", "save"): 3, (JOB, "0", "cuda:0", "copy"): 0}


def test_fragmentation_of_nothing_is_absent():
    """A scrape before the first allocation would divide by zero."""
    allocator = wire.Allocator(reserved_bytes=0, inactive_split_bytes=0)
    assert catalog.FRAGMENTATION not in values(running(make_record(allocator=allocator)))


def test_rank_without_memory_keeps_its_counters():
    """A crashed rank would seem to hold memory, or lose what tells who it was."""
    got = values(Rank("job/rank-0.record", make_record(), State.CRASHED, has_memory=False))
    kept = {"OOMS", "RETRIES", "STEP_NUMBER", "STEPS", "STEP_TIME", "TRACKER_TIME", "SNAPSHOT_TIMESTAMP"}
    kept |= {"START_TIMESTAMP", "RANK_UP", "RANK_STATE", "RANK_INFO", "WORLD_SIZE", "LABELER_UP"}
    assert set(got) == {getattr(catalog, name) for name in kept}
    assert got[catalog.RANK_UP] == {(JOB, "0"): 0}


def test_two_devices_of_a_rank_are_kept_apart():
    """The books of one device would be added to another's."""
    record = make_record(devices=[make_device(0, 2), make_device(1, 2)])
    got = values(running(record))[catalog.PEAK]
    assert got == {(JOB, "0", d.name): d.peak_bytes for d in record.devices}


def test_world_size_is_the_newest_attempts():
    """A job restarted with fewer ranks would seem to miss some."""
    old, new = make_record(0, world_size=8, start_time=1.0), make_record(1, world_size=4, start_time=2.0)
    assert values(running(new), running(old))[catalog.WORLD_SIZE] == {(JOB,): 4}


def test_versions_of_ranks_are_told_once():
    """A mix of versions on a host would stay hidden."""
    identities = [make_record(i, torch_version=v).identity for i, v in enumerate(["2.13.0", "2.12.1", "2.13.0"])]
    assert versions(identities) == [("0.1.0", "2.12.1"), ("0.1.0", "2.13.0")]


def test_what_has_not_changed_is_the_same_object():
    """Every scrape would be rendered anew, however little has changed."""
    sampler = Sampler(Budget())
    first, second = running(make_record(0)), running(make_record(1))
    before = sampler.blocks(snapshot_of(first, second))
    after = sampler.blocks(snapshot_of(first, running(make_record(1, step=41))))
    assert [one is two for one, two in zip(before, after, strict=True)] == [True, False, True]
    for one, two in zip(before[1].series, after[1].series, strict=True):
        assert one.labels is two.labels


def test_a_changed_state_is_a_change():
    """A crashed rank would be shown as running for as long as its record stays the same."""
    sampler, record = Sampler(Budget()), make_record()
    sampler.blocks(snapshot_of(running(record)))
    crashed = Rank("job/rank-0.record", record, State.CRASHED, has_memory=False)
    block = sampler.blocks(snapshot_of(crashed))[0]
    assert catalog.MODULE_USAGE not in {series.metric for series in block.series}


def test_counts_of_earlier_attempts_are_kept():
    """An out-of-memory error that ended one attempt would be forgotten with it."""
    rank = Rank(
        "j/rank-0.record", make_record(), State.RUNNING, has_memory=True, ooms={"cuda:0": 3}, retries={"cuda:0": 7}
    )
    got = values(rank)
    assert got[catalog.OOMS] == {(JOB, "0", "cuda:0"): 3}
    assert got[catalog.RETRIES] == {(JOB, "0", "cuda:0"): 7}


def test_a_new_attempt_starts_with_nothing_remembered():
    """Modules of a model that is gone would be shown at 0 for ever."""
    sampler = Sampler(Budget(Level.FULL))
    sampler.blocks(snapshot_of(running(make_record(num_modules=9))))
    block = sampler.blocks(snapshot_of(running(make_record(num_modules=3, attempt="another"))))[0]
    (usage,) = [series for series in block.series if series.metric is catalog.MODULE_USAGE]
    assert {labels[3] for labels in usage.labels} == set(make_record(num_modules=3).modules)


def test_core_tells_of_labelers_that_failed_only():
    """The cheapest level would spend a tenth of its budget on what is well."""
    block = Sampler(Budget(Level.CORE)).blocks(snapshot_of(running(make_record())))[0]
    (labelers,) = [series for series in block.series if series.metric is catalog.LABELER_UP]
    assert labelers.labels == ((JOB, "0", "fsdp2"),)


def test_jobs_are_kept_apart():
    """Rank 0 of one job would be shown with the memory of rank 0 of another."""
    views = [running(make_record(train_job=job, peak_bytes=peak)) for job, peak in (("a", 1), ("b", 2))]
    assert values(*views)[catalog.PEAK] == {("a", "0", "cuda:0"): 1, ("b", "0", "cuda:0"): 2}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("layers.0", "layers.0"),
        ("", ""),
        ("a\nb\x00\x1b[31m\x7f\x9f", "ab[31m"),
        ("a\ud800b", "ab"),
        ('quote " and \\', 'quote " and \\'),
        ("模块", "模块"),
        ("x" * 200, "x" * 200),
    ],
)
def test_cleaning_of_labels(value, expected):
    """A name would break a line of the exposition, or a harmless one would be changed."""
    assert clean_label(value) == expected


@given(st.text(st.characters(codec=None), max_size=300))
def test_cleaned_labels_fit_any_scraper(value):
    """One odd name would make Prometheus refuse the whole scrape."""
    cleaned = clean_label(value)
    assert len(cleaned.encode()) <= MAX_LABEL_BYTES
    assert not set(cleaned) & {chr(i) for i in (*range(32), *range(127, 160))}
    assert clean_label(cleaned) == cleaned


def test_long_labels_stay_apart():
    """Two modules whose long names begin alike would be shown as one."""
    first, second = clean_label("é" * 150 + "a"), clean_label("é" * 150 + "b")
    assert first != second
    assert first[:91] == second[:91] == "é" * 91


def test_factory_agrees_with_itself():
    """The tests would stand on records that no rank could write."""
    record = make_record(3, num_modules=12)
    assert wire.decode(wire.encode(record)) == record
    assert record.devices[0].usage_bytes == total(
        cells((RefType.SHARDED_PARAMETER, RefType.SHARDED_GRADIENT, RefType.OPTIMIZER_STATE), 12, 512, 3)
    )
    assert msgspec.structs.asdict(make_record(step=9).clock)["step"] == 9
