"""Forecasts as data: sums, files, advice, the search for the largest value that fits, and the command's arguments."""

from __future__ import annotations

import argparse
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.cli import main
from torchmem.errors import ForecastError
from torchmem.forecasting.advice import HINTS, candidates
from torchmem.forecasting.command import size_bytes
from torchmem.forecasting.outcome import (
    SCHEMA,
    Cell,
    DeviceForecast,
    Forecast,
    Place,
    RankForecast,
    StepForecast,
    as_data,
    load,
)
from torchmem.forecasting.sweep import MAX_SEARCHES, sweep
from torchmem.model import RefType


def step(name, *cells):
    held = sorted((Cell(*cell) for cell in cells), key=lambda cell: -cell.num_bytes)
    return StepForecast(name, sum(cell.num_bytes for cell in held), 10, Place("backward", "a", "aten.mm"), held)


FIRST = step("first", ("a", "parameter", 100), ("a", "activation", 300))
STEADY = step(
    "steady",
    ("a", "parameter", 100),
    ("layers.0", "activation", 250),
    ("layers.1", "activation", 150),
    ("b", "activation", 300),
    ("a", "optimizer_state", 200),
)


def forecast(*ranks, **more):
    ranks = ranks or (RankForecast(0, [DeviceForecast("cpu", 50, [FIRST, STEADY])], [], 1.0),)
    return Forecast(list(ranks), "jobs:build", {"batch": 2}, 8, {"dp": 8}, "cpu", "exact", "2.13.0", "0.1.0", **more)


def of_peak(peak_bytes):
    return forecast(
        RankForecast(0, [DeviceForecast("cpu", 0, [step("steady", ("a", "activation", peak_bytes))])], [], 1)
    )


def test_the_peak_is_that_of_the_highest_step_of_the_largest_rank():
    """A forecast would report a step or a rank that is not the one that fails first."""
    small = RankForecast(7, [DeviceForecast("cpu", 0, [FIRST])], [], 1.0)
    found = forecast(small, RankForecast(0, [DeviceForecast("cpu", 50, [FIRST, STEADY])], [], 1.0))
    assert found.peak_bytes == 1000
    assert found.by_reftype == {"activation": 700, "optimizer_state": 200, "parameter": 100}
    assert found.by_module == {"a": 300, "b": 300, "layers.0": 250, "layers.1": 150}
    assert (found.largest.rank, found.highest.name) == (0, "steady")


def test_peak_of_a_rank_that_was_not_forecast_is_the_highest():
    """A running rank would be held against nothing, or against a smaller one's forecast."""
    found = forecast(
        RankForecast(0, [DeviceForecast("cuda:0", 0, [STEADY]), DeviceForecast("cpu", 0, [FIRST])], [], 1.0),
        RankForecast(7, [DeviceForecast("cuda:0", 0, [FIRST])], [], 1.0),
    )
    assert found.peak_bytes_of(7, "cuda:0") == 400
    assert found.peak_bytes_of(3, "cuda:5") == 1000
    assert found.peak_bytes_of(0, "cpu") == 400
    assert found.peak_bytes_of(7, "xpu:0") is None


def test_a_saved_forecast_is_loaded_as_it_was(tmp_path):
    """A job would be compared with something else than was forecast."""
    forecast().save(tmp_path / "forecast.json")
    assert load(tmp_path / "forecast.json") == forecast()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "not a saved forecast"),
        (b"\xff\xfe", "not a saved forecast"),
        (b"{}", "not a saved forecast"),
        (json.dumps({"schema": SCHEMA + 1}).encode(), f"schema {SCHEMA + 1}; this torchmem reads up to {SCHEMA}"),
    ],
)
def test_what_is_no_forecast_is_refused(tmp_path, text, reason):
    """A broken or newer file would be read as zeros, or end in a traceback."""
    path = tmp_path / "forecast.json"
    path.write_bytes(text)
    with pytest.raises(ForecastError, match=reason):
        load(path)


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    """The message would not say which file it is about."""
    with pytest.raises(ForecastError, match="nowhere.json: No such file"):
        load(tmp_path / "nowhere.json")
    with pytest.raises(ForecastError, match="Is a directory"):
        forecast().save(tmp_path)


def test_data_has_what_everybody_asks_for_on_top():
    """Scripts read ``peak_bytes``, ``by_reftype`` and ``by_module`` of ``--json``."""
    data = json.loads(json.dumps(as_data(forecast())))
    assert (data["peak_bytes"], data["by_reftype"]["activation"], data["by_module"]["b"]) == (1000, 700, 300)
    assert data["at"] == {"step": "steady", "phase": "backward", "module": "a", "operator": "aten.mm"}
    assert data["ranks"][0]["devices"][0]["steps"][0]["cells"][0] == ["a", "activation", 300]


def test_what_would_have_to_shrink():
    """The advice would name too little, or a share that is not enough."""
    found = candidates(STEADY, 860)
    assert [(one.reftype, one.module, one.num_bytes) for one in found] == [
        ("activation", "layers.*", 700),
        ("optimizer_state", "a", 200),
        ("parameter", "a", 100),
    ]
    assert [round(one.share, 2) for one in found] == [0.2, 0.7, 1.4]
    assert candidates(STEADY, 1000) == []


def test_every_reftype_has_a_hint():
    """A reference type that is added would end the command in a KeyError."""
    assert set(HINTS) == set(RefType)


@given(
    st.integers(0, 10**6),
    st.integers(1, 10**4),
    st.integers(0, 30),
    st.integers(1, 10**8),
    st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True),
)
def test_the_largest_that_fits_was_forecast_and_is_the_largest(base, slope, bend, capacity, values):
    """A batch that does not fit would be recommended, or one that does be missed."""
    asked = []

    def peak(value):
        return base + slope * value + bend * value * value

    def run(value):
        asked.append(value)
        return of_peak(peak(value))

    found = sweep("batch", sorted(values), run, capacity)
    assert len(asked) <= len(values) + MAX_SEARCHES
    if found.largest_fit is None:
        assert peak(min(asked)) > capacity
    else:
        assert found.largest_fit in asked
        assert peak(found.largest_fit) <= capacity
    if found.is_exact:
        assert peak((found.largest_fit or 0) + 1) > capacity


def test_the_search_finds_the_largest_of_a_straight_line():
    """The search would give up before the answer where memory grows evenly, as it mostly does."""
    found = sweep("batch", [1, 2, 4, 8], lambda value: of_peak(1000 + 37 * value), 10_000)
    assert (found.largest_fit, found.is_exact) == (243, True)


def test_a_search_ends_at_what_the_job_cannot_take():
    """Forecasts that were asked for would be lost because of a value that nobody asked for."""

    def run(value):
        if value not in {2, 4, 8}:
            raise ForecastError(f"embed_dim must be divisible by {value}")
        return of_peak(10 * value)

    found = sweep("heads", [2, 4, 8], run, 1000)
    assert (found.largest_fit, found.is_exact, len(found.points)) == (8, False, 3)
    with pytest.raises(ForecastError, match="divisible by 3"):
        sweep("heads", [2, 3], run, 1000)


def test_a_sweep_of_words_is_not_searched():
    """Values that are no whole numbers would be interpolated."""
    found = sweep("kind", ["a", "b"], lambda value: of_peak({"a": 10, "b": 30}[value]), 20)
    assert (found.largest_fit, found.is_exact, len(found.points)) == ("a", False, 2)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("80GiB", 80 << 30), ("80 GB", 80 * 10**9), ("1.5TiB", 3 << 39), ("512", 512), ("2k", 2000), ("7mib", 7 << 20)],
)
def test_sizes(text, num_bytes):
    """A capacity would be read in other units than it was given in."""
    assert size_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "80 GiBs", "1e9", "9" * 400, "1" + "0" * 305 + "TiB"])
def test_what_is_no_size_is_refused(text):
    """A typing error would be taken for a capacity."""
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size such as 80GiB"):
        size_bytes(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["x:y", "--mesh", "dp"],
        ["x:y", "--mesh", "dp=0"],
        ["x:y", "--ranks", "first"],
        ["x:y", "--sweep", "batch"],
        ["x:y", "--set", "=1"],
        ["x:y", "--world-size", "0"],
    ],
)
def test_arguments_that_make_no_sense_are_status_2(arguments, capsys):
    """A typing error would be forecast as something else."""
    with pytest.raises(SystemExit, match="2"):
        main(["forecast", *arguments])
    assert "usage: torchmem forecast" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("nowhere", "'nowhere' is not MODULE:FUNCTION"),
        ("nowhere:build", "nowhere cannot be imported: ModuleNotFoundError"),
        ("nowhere.py:build", "there is no file nowhere.py"),
        ("json:nothing", "json has no function 'nothing'"),
    ],
)
def test_a_function_that_is_not_there_is_named(function, reason, capsys, tmp_path, monkeypatch):
    """The user would get a traceback instead of what is wrong with the argument."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["forecast", function]) == 2
    assert reason in capsys.readouterr().err
