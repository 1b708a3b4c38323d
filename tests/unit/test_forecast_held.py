"""What a running rank is held against: its own forecast, or the reason why there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchmem.forecasting.held import Held, Run
from torchmem.forecasting.outcome import Cell, DeviceForecast, Forecast, Place, RankForecast, StepForecast

FIX = "write one by `torchmem forecast ... --save FILE`"
RUN = {"rank": 0, "world_size": 8, "mesh": {}, "kind": "cpu"}


def of_rank(rank, **devices):
    """A rank's forecast, as peaks by device."""
    peaks = {name.replace("_", ":"): peak for name, peak in devices.items()}
    return RankForecast(rank, [DeviceForecast(name, 0, [step(peak)]) for name, peak in peaks.items()], [], 1.0)


def step(peak_bytes):
    return StepForecast("steady", peak_bytes, 0, Place(), [Cell("a", "activation", peak_bytes)])


@pytest.fixture
def held(tmp_path):
    """What a run, with changes, is held against."""

    def hold(*ranks, device="cpu", allocator="exact", forecast_mesh=None, **run):
        saved = Forecast(
            list(ranks or [of_rank(0, cpu=1000)]),
            "jobs:build",
            {},
            8,
            forecast_mesh or {},
            device,
            allocator,
            "2.13.0",
            "0.1.0",
        )
        saved.save(tmp_path / "forecast.json")
        return Held(tmp_path / "forecast.json", Run(**{**RUN, **run}))

    return hold


def test_a_rank_has_its_own_forecast_and_any_other_the_highest(held):
    """A rank would be held against another one's peak, or a rank that was not forecast against a smaller one's."""
    ranks = of_rank(0, cpu=1000), of_rank(7, cpu=400)
    assert [held(*ranks, rank=rank).bytes_of("cpu") for rank in (0, 7, 3)] == [1000, 400, 1000]
    assert held(*ranks).failure == ""


def test_any_gpu_of_a_rank_is_the_one_that_was_forecast(held):
    """Rank 3 computes on cuda:3, where a forecast says cuda:0."""
    found = held(of_rank(0, cuda_0=1000, cpu=50), device="cuda", allocator="cuda", kind="cuda", rank=3)
    assert [found.bytes_of(device) for device in ("cuda:0", "cuda:3")] == [1000, 1000]


def test_two_gpus_of_a_rank_are_told_apart(held):
    """The smaller half of a model that is split would never miss its forecast."""
    found = held(of_rank(0, cuda_0=1000, cuda_1=300), device="cuda", allocator="cuda", kind="cuda")
    assert [found.bytes_of(device) for device in ("cuda:0", "cuda:1")] == [1000, 300]


def test_the_host_of_a_gpu_job_is_held_against_nothing(held):
    """A batch in the host's memory would miss a forecast of a few counters, and wake somebody."""
    assert held(of_rank(0, cuda_0=1000, cpu=50), device="cuda", allocator="cuda", kind="cuda").bytes_of("cpu") is None


def test_a_forecast_made_without_a_gpu_stands_for_gpus(held):
    """``--device cpu --allocator cuda``, the way out without a GPU, would be of no use to the job that has one."""
    found = held(allocator="cuda", kind="cuda")
    assert (found.failure, found.bytes_of("cuda:3"), found.bytes_of("cpu")) == ("", 1000, None)


@pytest.mark.parametrize(
    ("forecast", "run", "reason"),
    [
        ({}, {"world_size": 4}, "it has 8 ranks, this job 4; forecast with --world-size 4"),
        (
            {"forecast_mesh": {"dp": 4, "tp": 2}},
            {"mesh": {"dp": 2, "other": 4}},
            "its mesh has dp=4, this job's dp=2; forecast with --mesh dp=2,...",
        ),
        ({}, {"kind": "cuda"}, "it is for cpu, this job trains on cuda; forecast with --allocator cuda"),
        ({"allocator": "cuda"}, {}, "it is for cuda, this job trains on cpu; forecast with --allocator exact"),
    ],
)
def test_a_forecast_of_another_run_is_refused_with_the_fix(held, tmp_path, forecast, run, reason):
    """A job would be held against figures that are not of it, and seem to have missed them."""
    found = held(**forecast, **run)
    assert found.failure == f"{tmp_path / 'forecast.json'} is of another run: {reason}"
    assert [found.bytes_of(device) for device in ("cpu", "cuda:0")] == [None, None]


def test_what_cannot_be_compared_is_no_reason(held):
    """A mesh with names of its own, or parameters that were offloaded, would have a good forecast refused."""
    found = held(forecast_mesh={"dp": 8}, mesh={"shards": 4}, kind="")
    assert (found.failure, found.bytes_of("cpu")) == ("", 1000)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file or directory"),
        (b"", "not a saved forecast"),
        (b"[" * 100_000, "not a saved forecast"),
        (b'{"schema": 2}', "this torchmem reads up to 1: upgrade it"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_with_the_fix(tmp_path, text, reason):
    """A job would end because of a file that is only for watching it, or nobody know why it is not watched."""
    path = tmp_path / "forecast.json"
    if text is not None:
        path.write_bytes(text)
    found = Held(path, Run(**RUN))
    assert found.failure.startswith(f"{path}: ")
    assert reason in found.failure
    assert found.failure.endswith(FIX)
    assert found.bytes_of("cpu") is None


@pytest.mark.parametrize("peaks", [{}, {"cpu": -1}, {"cpu": 1 << 63}])
def test_figures_that_no_record_can_hold_are_refused(held, peaks):
    """The record could not be written, and the job would not be watched at all."""
    assert "not a saved forecast" in held(of_rank(0, **peaks)).failure


def test_a_device_without_steps_is_refused(held):
    """A file that was cut down by hand would end ``install`` in a ValueError."""
    assert "a device without steps" in held(RankForecast(0, [DeviceForecast("cpu", 0, [])], [], 1.0)).failure


def test_reading_needs_no_torch():
    """``install`` would import what it does not need."""
    code = "import sys; import torchmem.forecasting.held; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
