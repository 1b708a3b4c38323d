"""What a running rank is held against: the part of a saved forecast that is about it, or why there is none.

A forecast stands for the run whose world size, mesh and kind of device it was made for. A rank that was forecast is
held against its own peak; any other one against the highest of those that were, as ranks that do the same hold the
same or, where shards are uneven, less.

Invariants: torch-free; nothing raises, whatever the file holds; a forecast of another run gives no figure.

Known limits: dimensions of a mesh are compared where both sides name them alike; one that the forecast's function made
by itself is not known. Only the kind of device that was forecast for is held against it: a GPU job's host is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchmem.errors import ForecastError
from torchmem.forecasting.outcome import Forecast, load


@dataclass(frozen=True)
class Run:
    """What a forecast must fit.

    Attributes:
        rank: of this process.
        world_size: ranks of the job.
        mesh: length of each dimension of the device mesh by its name, as far as it is known.
        kind: of the device that is trained on: ``cpu`` or ``cuda``; empty where unknown.
    """

    rank: int
    world_size: int
    mesh: Mapping[str, int]
    kind: str


class Held:
    """A forecast as one rank sees it.

    Args:
        path: where it was saved.
        run: who reads it.

    Attributes:
        failure: why nothing is known, and what to do; empty where something is.
    """

    def __init__(self, path: Path, run: Run) -> None:
        self.failure = ""
        self._kind = ""
        self._peaks: dict[str, int | None] = {}
        self._highest: int | None = None
        try:
            forecast = load(path)
        except ForecastError as error:
            self.failure = f"{error}; write one by `torchmem forecast ... --save FILE`"
            return
        if reason := _misfit(forecast, run):
            self.failure = f"{path} is of another run: {reason}"
            return
        # Not the forecast itself: the cells of many ranks are nothing to keep in a training process.
        self._kind = forecast.kind
        self._peaks = {
            one.device: forecast.peak_bytes_of(run.rank, one.device) for rank in forecast.ranks for one in rank.devices
        }
        self._highest = forecast.peak_bytes_of(run.rank, forecast.device)

    def bytes_of(self, device: str) -> int | None:
        """The peak that was forecast for a device of this rank, by torch's name; None where it was not forecast."""
        if device.partition(":")[0] != self._kind:
            return None
        return self._peaks.get(device) or self._highest or None


def _misfit(forecast: Forecast, run: Run) -> str:
    """Why it cannot stand for the run, and what to do; empty if it can."""
    if forecast.world_size != run.world_size:
        wanted = f"--world-size {run.world_size}"
        return f"it has {forecast.world_size} ranks, this job {run.world_size}; forecast with {wanted}"
    for name in sorted(forecast.mesh.keys() & run.mesh.keys()):
        length, own = forecast.mesh[name], run.mesh[name]
        if length != own:
            return f"its mesh has {name}={length}, this job's {name}={own}; forecast with --mesh {name}={own},..."
    if run.kind and forecast.kind != run.kind:
        return f"it is for {forecast.kind}, this job trains on {run.kind}; forecast with --allocator {_wanted(run)}"
    if forecast.peak_bytes_of(run.rank, forecast.device) is None:
        return f"it knows no {forecast.device} device of any rank; forecast anew"
    return ""


def _wanted(run: Run) -> str:
    return "cuda" if run.kind == "cuda" else "exact"
