"""What of a rank's books is shown: the budget is kept, sums stay exact, and what was shown stays."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from records import make_device, make_record
from torchmem.errors import ConfigError
from torchmem.model import OUTSIDE, ROOT, RefType
from torchmem.wire import record as wire
from torchmem_exporter import catalog
from torchmem_exporter.budget import OTHER, Budget, Level, choose, cut, is_challenged
from torchmem_exporter.parts import RankParts
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import Rank, Snapshot
from torchmem_exporter.sampler import Sampler

KEY = ("job", "0")
ADDITIVE = {catalog.MODULE_USAGE: catalog.USAGE, catalog.MODULE_STEP_PEAK: catalog.STEP_PEAK}
MIB = 1 << 20
SCRAPE_SECONDS = 2.0


def record_of(cells, modules, **changes):
    """A record whose three books of one device hold the same cells, {(module, reftype): bytes}."""
    book = wire.pack_cells(wire.Cell(*key, num_bytes) for key, num_bytes in cells.items())
    total = sum(cells.values())
    books = {"usage": book, "step_peak": book, "active_peak": book, "usage_bytes": total, "step_peak_bytes": total}
    return make_record(devices=[make_device(0, 1, **books, **changes)], modules=modules)


def shown(parts, record, num_others=0):
    """Metric -> labels past the rank's -> bytes."""
    return {
        series.metric: {labels[2:]: value for labels, value in zip(series.labels, series.values, strict=True)}
        for series in parts.series(record, num_others)
    }


def modules_of(points):
    """The modules that a metric names."""
    return {labels[1] for labels in points[catalog.MODULE_STEP_PEAK]}


BOOKS = st.dictionaries(
    st.tuples(st.integers(0, 11), st.integers(0, len(RefType) - 1)), st.integers(1, 1 << 46), max_size=60
)
PARTS = st.sampled_from(["layers", "0", "1", "17", "mlp", "attention", "w1", "head", OTHER])
NAMES = st.lists(st.lists(PARTS, min_size=1, max_size=4).map(".".join), min_size=12, max_size=12)
BUDGETS = st.builds(Budget, st.sampled_from(Level), st.integers(1, 4), st.integers(1, 6))


@settings(deadline=None)
@given(st.lists(BOOKS, min_size=1, max_size=4), NAMES, BUDGETS, st.integers(0, 260))
def test_sums_are_exact_under_every_setting(books, modules, budget, num_others):
    """Bytes would be lost, doubled or booked under another reftype by folding and hiding."""
    parts = RankParts(budget, KEY)
    for cells in books:
        record = record_of(cells, modules)
        points = shown(parts, record, num_others)
        by_reftype = {}
        for (_, reftype), num_bytes in cells.items():
            label = record.reftypes[reftype]
            by_reftype[label] = by_reftype.get(label, 0) + num_bytes
        for part, total in ADDITIVE.items():
            totals = {labels[1]: value for labels, value in points.get(total, {}).items()}
            assert sum(totals.values()) == sum(cells.values())
            if OTHER not in totals:
                assert {reftype: value for reftype, value in totals.items() if value} == by_reftype
            if part in points:
                sums = dict.fromkeys(totals, 0)
                for (_, _, reftype), value in points[part].items():
                    sums[reftype] += value
                assert sums == totals


@settings(deadline=None)
@given(st.lists(st.tuples(BOOKS, st.integers(0, 120)), min_size=1, max_size=4), NAMES, BUDGETS)
def test_no_rank_costs_more_than_its_budget(books, modules, budget):
    """A scrape over the storage's limit would fail whole."""
    parts = RankParts(budget, KEY)
    for cells, num_others in books:
        record = record_of(cells, modules)
        points = shown(parts, record, num_others)
        num_points = sum(map(len, points.values()))
        limit = budget.max_series(1)
        # One point of each total remains, whatever else is exposed.
        assert limit is None or num_points <= max(limit - num_others, 2)


@settings(deadline=None)
@given(BOOKS, NAMES, st.integers(1, 4), st.integers(1, 6))
def test_an_active_peak_shown_for_several_modules_is_that_of_the_highest(cells, modules, depth, top_modules):
    """Peaks of different moments would be added up to one that never was."""
    budget = Budget(Level.STANDARD, depth, top_modules)
    points = shown(RankParts(budget, KEY), record_of(cells, modules)).get(catalog.MODULE_ACTIVE_PEAK, {})
    names = {labels[1] for labels in points} - {OTHER}
    highest = {}
    for module in {module for module, _ in cells}:
        label = budget.shown_name(modules[module])
        label = label if label in names else OTHER
        held = sum(num_bytes for (m, _), num_bytes in cells.items() if m == module)
        highest[label] = max(held, highest.get(label, 0))
    sums = {}
    for (_, module, _), value in points.items():
        sums[module] = sums.get(module, 0) + value
    assert not points or sums == highest


def test_full_shows_every_cell():
    """What an operator asked to see whole would be folded."""
    record = make_record(num_modules=30)
    points = shown(RankParts(Budget(Level.FULL), KEY), record)
    expected = {
        ("cuda:0", record.modules[cell.module], record.reftypes[cell.reftype]): cell.num_bytes
        for cell in wire.unpack_cells(record.devices[0].step_peak)
    }
    assert points[catalog.MODULE_STEP_PEAK] == expected


def test_core_shows_no_module_and_all_reftypes():
    """The cheapest level would cost as much as the next, or hide what holds the memory."""
    record = make_record(num_modules=30)
    parts = RankParts(Budget(Level.CORE), KEY)
    points = shown(parts, record)
    assert set(points) == {catalog.USAGE, catalog.STEP_PEAK}
    assert sum(points[catalog.STEP_PEAK].values()) == record.devices[0].step_peak_bytes
    assert parts.num_hidden == 31


def test_layers_are_one_at_standard():
    """A model of a hundred layers would cost a hundred times as much as one of one layer."""
    record = make_record(num_modules=100)
    parts = RankParts(Budget(), KEY)
    points = shown(parts, record)
    names = {"layers.*", "layers.*.attention", "layers.*.feed_forward", "layers.*.attention_norm", "layers.*.ffn_norm"}
    assert modules_of(points) == names | {ROOT, OUTSIDE}
    assert parts.num_hidden == 99


@pytest.mark.parametrize(
    ("module", "depth", "expected"),
    [
        ("layers.*.attention.wq", 1, "layers.*"),
        ("layers.*.attention.wq", 2, "layers.*.attention"),
        ("layers.*.attention.wq", 9, "layers.*.attention.wq"),
        ("blocks.*.experts.*.w1", 2, "blocks.*.experts.*"),
        (ROOT, 1, ROOT),
    ],
)
def test_indices_do_not_count_as_depth(module, depth, expected):
    """The sidecar would tell modules apart at another depth than the library counts."""
    assert cut(module, depth) == expected


MODULES = [OUTSIDE, ROOT, *(f"part{letter}" for letter in "abcdefghij")]


def sizes(**held):
    """One activation cell for each named part, in MiB."""
    return {(MODULES.index(f"part{name}"), int(RefType.ACTIVATION)): size * MIB for name, size in held.items()}


def test_the_largest_modules_are_shown_and_stay():
    """A module's series would come and go with every step that changes the order a little."""
    parts = RankParts(Budget(top_modules=2), KEY)
    assert modules_of(shown(parts, record_of(sizes(a=10, b=8, c=7, d=1), MODULES))) == {"parta", "partb", OTHER}
    assert modules_of(shown(parts, record_of(sizes(a=10, b=8, c=15, d=1), MODULES))) == {"parta", "partb", OTHER}


def test_a_module_that_outgrows_the_shown_ones_takes_a_place():
    """The module that leaks would stay hidden for the life of the attempt."""
    parts = RankParts(Budget(top_modules=2), KEY)
    shown(parts, record_of(sizes(a=10, b=8, c=7), MODULES))
    points = shown(parts, record_of(sizes(a=10, b=8, c=17), MODULES))
    assert modules_of(points) == {"parta", "partc", OTHER}
    assert points[catalog.MODULE_STEP_PEAK]["cuda:0", OTHER, "activation"] == 8 * MIB


def test_what_has_ever_held_bytes_stays_at_zero():
    """A gap instead of a zero: usage would look as if it had stayed what it was."""
    parts = RankParts(Budget(), KEY)
    shown(parts, record_of(sizes(a=10, b=8), MODULES))
    points = shown(parts, record_of(sizes(a=10), MODULES))
    assert points[catalog.MODULE_STEP_PEAK]["cuda:0", "partb", "activation"] == 0
    assert points[catalog.STEP_PEAK]["cuda:0", "activation"] == 10 * MIB


def test_what_never_held_bytes_is_left_out():
    """Every module would cost as many series as there are reftypes."""
    points = shown(RankParts(Budget(Level.FULL), KEY), record_of(sizes(a=10), MODULES))
    assert set(points[catalog.MODULE_USAGE]) == {("cuda:0", "parta", "activation")}


def test_points_keep_their_labels_object():
    """Renderers would make every template anew on every scrape."""
    parts = RankParts(Budget(), KEY)
    first = parts.series(record_of(sizes(a=10, b=8), MODULES), 0)
    again = parts.series(record_of(sizes(a=11), MODULES), 0)
    assert [one.labels is two.labels for one, two in zip(first, again, strict=True)] == [True] * 5


def test_hidden_modules_are_counted():
    """Nobody would know that the picture is not whole."""
    parts = RankParts(Budget(top_modules=2), KEY)
    shown(parts, record_of(sizes(a=10, b=8, c=7, d=1), MODULES))
    assert parts.num_hidden == 2


@pytest.mark.parametrize("level", [Level.CORE, Level.STANDARD])
@pytest.mark.parametrize("num_devices", [1, 2, 5])
def test_a_whole_rank_keeps_its_budget(level, num_devices):
    """The fixed series would not be counted, or further accelerators not allowed for."""
    devices = [make_device(i, 200) for i in range(num_devices - 1)] + [make_device(9, 200, name="cpu")]
    record = make_record(devices=devices, modules=make_record(num_modules=200).modules)
    snapshot = Snapshot(0.0, (Rank("j/rank-0.record", record, State.RUNNING, has_memory=True),), (), {}, "")
    block, _ = Sampler(Budget(level)).blocks(snapshot)
    num_points = sum(len(series.labels) for series in block.series)
    assert num_points <= Budget(level).max_series(num_devices)
    assert catalog.STEP_PEAK in {series.metric for series in block.series}


def test_modules_make_room_for_what_is_told_besides():
    """A rank that begins to drift would cost more than its budget, by the series that say so."""
    names = [f"block_{letter}.part" for letter in "abcdefghijklmnopqrstuvwxy"]
    cells = {(module, reftype): MIB * (module + reftype + 1) for module in range(25) for reftype in range(10)}
    parts, record = RankParts(Budget(), KEY), record_of(cells, names)
    few, many, again = (shown(parts, record, num_others) for num_others in (40, 60, 40))
    assert sum(map(len, few.values())) + 40 <= Budget().max_series(1)
    assert sum(map(len, many.values())) + 60 <= Budget().max_series(1)
    assert modules_of(again) == modules_of(many) < modules_of(few), "a series would come and go with the drift"


def test_choice_skips_nothing_that_is_larger():
    """A small module would be shown while a larger one is hidden."""
    sizes, costs = {"a": 9, "b": 8, "c": 1}, {"a": 2, "b": 9, "c": 1}
    assert choose(sizes, costs, frozenset(), max_modules=9, max_cost=5) == {"a"}
    assert choose(sizes, costs, frozenset(), max_modules=2, max_cost=50) == {"a", "b"}


def test_challenge_needs_twice_the_size():
    """Two modules of nearly one size would take turns."""
    assert not is_challenged({"a": 10, "b": 20}, frozenset("a"))
    assert is_challenged({"a": 10, "b": 21}, frozenset("a"))
    assert not is_challenged({"b": 21}, frozenset())


def test_a_record_of_very_many_cells_takes_no_long_time():
    """One hostile record would hold up the scrape of all ranks for half a minute."""
    modules, reftypes = [f"m{i}" for i in range(300)], [f"r{i}" for i in range(256)]
    cells = {(module, reftype): module + reftype + 1 for module in range(300) for reftype in range(256)}
    record = msgspec.structs.replace(record_of(cells, modules), reftypes=reftypes)
    began = time.process_time()
    points = shown(RankParts(Budget(), KEY), record)
    assert time.process_time() - began < SCRAPE_SECONDS
    assert sum(map(len, points.values())) == Budget().max_series(1)
    assert sum(points[catalog.STEP_PEAK].values()) == sum(cells.values())


def test_the_largest_reftypes_are_shown():
    """A reftype would be summed with others although there is room for it, or a smaller one be shown in its place."""
    record = record_of({(0, reftype): 100 - reftype for reftype in range(10)}, MODULES)
    points = shown(RankParts(Budget(Level.CORE), KEY), record, num_others=75 - 2 * 7)
    held = {label: value for (_, label), value in points[catalog.USAGE].items()}
    assert held == {**dict(zip(record.reftypes, range(100, 94, -1), strict=False)), OTHER: 94 + 93 + 92 + 91}


@pytest.mark.parametrize("numbers", [{"depth": 0}, {"top_modules": 0}])
def test_senseless_numbers_are_refused(numbers):
    """A typing error would silently hide every module."""
    with pytest.raises(ConfigError, match="--level core"):
        Budget(**numbers)
