"""What grew between two runs: who is held against whom, and rows that add up."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem import diff
from torchmem.diff import Held, Pair, Row
from torchmem.show import By
from torchmem_exporter.drift.composition import Composition, Part


def held(rank=0, device="cuda:0", other_bytes=0, **parts):
    """A device; a part is named ``module__reftype`` with ``_`` for dots."""
    return of(
        [
            Part(*(name.replace("_", ".") for name in key.split("__")), num_bytes)
            for key, num_bytes in sorted(parts.items(), key=lambda item: -item[1])
        ],
        rank=rank,
        device=device,
        other_bytes=other_bytes,
    )


def of(parts, rank=0, device="cuda:0", other_bytes=0):
    """A device that holds these parts."""
    return Held(rank, device, Composition(parts=list(parts), other_bytes=other_bytes), "at the peak of a step")


def keys(matched):
    """Rank and device of each pair."""
    return [(pair.before.key, pair.after.key) for pair in matched.pairs]


def test_the_same_ranks_are_compared_each_with_itself():
    """A rank would be held against another one, whose share of the model differs."""
    runs = [[held(rank, name) for rank in (0, 1) for name in ("cuda:0", "cpu")] for _ in range(2)]
    matched = diff.match(*runs)
    assert matched.is_by_rank
    assert keys(matched) == [(one.key, one.key) for one in runs[0]]
    assert matched.only_before == matched.only_after == []


def test_a_rank_may_have_moved_to_another_device():
    """A job that was given other devices could not be compared."""
    matched = diff.match([held(0, "cuda:0"), held(0, "cpu")], [held(0, "cuda:5"), held(0, "cpu")])
    assert keys(matched) == [((0, "cuda:0"), (0, "cuda:5")), ((0, "cpu"), (0, "cpu"))]


def test_devices_that_cannot_be_told_apart_are_not_guessed():
    """Growth would be told of two devices that have nothing to do with each other."""
    matched = diff.match([held(0, "cuda:0")], [held(0, "cuda:1"), held(0, "cuda:2")])
    assert keys(matched) == []
    assert [one.device for one in matched.only_after] == ["cuda:1", "cuda:2"]
    assert [one.device for one in matched.only_before] == ["cuda:0"]


def test_other_ranks_are_compared_by_the_highest():
    """A run on fewer ranks could not be compared at all, or by whichever rank comes first."""
    before = [held(0, a__b=10), held(1, "cuda:1", a__b=30), held(0, "cpu", a__b=5)]
    after = [held(4, "cuda:4", a__b=20), held(5, "xpu:0", a__b=1)]
    matched = diff.match(before, after)
    assert not matched.is_by_rank
    assert keys(matched) == [((1, "cuda:1"), (4, "cuda:4"))]
    assert [one.key for one in matched.only_before] == [(0, "cpu")]
    assert [one.key for one in matched.only_after] == [(5, "xpu:0")]


def test_rows_by_module_and_reftype():
    """What a person or a CI job reads would name the wrong module or reftype."""
    pair = Pair(
        held(layers_0__activation=100, layers_1__activation=100, head__parameter=50, gone__temporary=7),
        held(layers_0__activation=140, layers_1__activation=110, head__parameter=50, new__optimizer=3),
    )
    both = diff.rows(pair, By.BOTH, 15, fold=True)
    assert both.shown == [
        Row("layers.*", "activation", 200, 250),
        Row("new", "optimizer", 0, 3),
        Row("gone", "temporary", 7, 0),
    ]
    assert (both.num_others, both.others) == (1, Row(None, None, 50, 50))
    assert diff.rows(pair, By.BOTH, 1).shown == [Row("layers.0", "activation", 100, 140)]
    assert diff.rows(pair, By.REFTYPE, 1).shown == [Row(None, "activation", 200, 250)]
    assert diff.rows(pair, By.MODULE, 1, fold=True).shown == [Row("layers.*", None, 200, 250)]


def test_a_large_drop_is_shown_before_small_growth():
    """Where bytes went to would be hidden in the rest."""
    found = diff.rows(Pair(held(a__x=900, b__x=1, c__x=1), held(a__x=100, b__x=2, c__x=3)), By.BOTH, 2)
    assert [row.module for row in found.shown] == ["c", "a"]
    assert found.others == Row(None, None, 1, 2)


def test_a_baseline_of_folded_names_is_compared_by_those():
    """All of a large model would seem to have come new, and all of the baseline to have gone."""
    before = of([Part("layers.*.mlp", "activation", 100)])
    after = of([Part(f"layers.{i}.mlp", "activation", 60) for i in range(2)])
    assert diff.rows(Pair(before, after), By.BOTH, 9).shown == [Row("layers.*.mlp", "activation", 100, 120)]


@pytest.mark.parametrize(("after_bytes", "is_over"), [(104, False), (105, False), (106, True), (50, False)])
def test_more_than_the_threshold(after_bytes, is_over):
    """A gate at 5% would fail a run that grew by just that, or pass one that grew by more."""
    pair = Pair(held(a__b=100), held(a__b=after_bytes))
    assert pair.exceeds(Fraction(5, 100)) is is_over
    assert pair.grown_ratio == (after_bytes - 100) / 100


def test_growth_from_nothing_exceeds():
    """A device that held nothing before would pass, or the ratio end in a division by zero."""
    pair = Pair(held(), held(a__b=1))
    assert pair.exceeds(Fraction(5, 100))
    assert pair.grown_ratio is None
    assert not Pair(held(), held()).exceeds(Fraction(0))


modules = st.sampled_from(["layers.0", "layers.1", "layers.*", "head", "(root)"])
compositions = st.builds(
    lambda amounts, other_bytes: of(
        [Part(*name, amounts[name]) for name in sorted(amounts, key=lambda name: -amounts[name])],
        other_bytes=other_bytes,
    ),
    st.dictionaries(st.tuples(modules, st.sampled_from(["activation", "parameter"])), st.integers(1, 1 << 50)),
    st.one_of(st.just(0), st.integers(0, 1 << 50)),
)


@given(compositions, compositions, st.sampled_from(By), st.integers(1, 12), st.booleans())
def test_rows_add_up(before, after, by, top, fold):
    """Bytes would be lost or counted twice between the table and its total."""
    found = diff.rows(Pair(before, after), by, top, fold=fold)
    all_rows = [*found.shown, found.others]
    assert sum(row.before_bytes for row in all_rows) == before.total_bytes
    assert sum(row.after_bytes for row in all_rows) == after.total_bytes
    assert len(found.shown) <= top
    assert len({(row.module, row.reftype) for row in found.shown}) == len(found.shown)
