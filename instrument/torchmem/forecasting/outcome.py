"""A forecast: what each rank holds at the peak of a training step, by module and reference type; saved and loaded.

Invariants: the cells of a step sum to its peak; a saved forecast is JSON that says its schema, and one of a newer
schema is refused by its number. All sizes are bytes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from torchmem.errors import ForecastError

SCHEMA = 1
_MAX_BYTES = (1 << 63) - 1

Plain = int | float | str | bool | None


class Cell(msgspec.Struct, frozen=True, array_like=True):
    """What one module holds for one reference type."""

    module: str
    reftype: str
    num_bytes: int


class Place(msgspec.Struct, frozen=True):
    """When in a step it was: the phase, the module that ran and the operator that allocated; empty where unknown."""

    phase: str = ""
    module: str = ""
    operator: str = ""


class StepForecast(msgspec.Struct, frozen=True):
    """One training step on one device.

    Attributes:
        name: ``first``, when the optimizer makes its state, or ``steady``, any later one.
        peak_bytes: the most that is held during the step.
        end_bytes: what is held after it.
        at: when in the step the peak is.
        cells: what is held at the peak, largest first.
    """

    name: str
    peak_bytes: int
    end_bytes: int
    at: Place
    cells: list[Cell]

    @property
    def by_reftype(self) -> dict[str, int]:
        """Bytes at the peak by reference type, largest first."""
        return _sums((cell.reftype, cell.num_bytes) for cell in self.cells)

    @property
    def by_module(self) -> dict[str, int]:
        """Bytes at the peak by module, largest first."""
        return _sums((cell.module, cell.num_bytes) for cell in self.cells)


class DeviceForecast(msgspec.Struct, frozen=True):
    """One device of one rank.

    Attributes:
        device: torch's name of it.
        construction_peak_bytes: the most that is held before the first step.
        steps: the steps, in order.
        reserved_bytes: what CUDA's caching allocator takes from the device for all this; None where not simulated.
    """

    device: str
    construction_peak_bytes: int
    steps: list[StepForecast]
    reserved_bytes: int | None = None

    @property
    def highest(self) -> StepForecast:
        """The step with the highest peak; the later of equals."""
        return max(reversed(self.steps), key=lambda step: step.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that is held during a step."""
        return self.highest.peak_bytes


class RankForecast(msgspec.Struct, frozen=True):
    """One rank.

    Attributes:
        rank: which.
        devices: the devices that hold anything, the one that was forecast for first.
        notes: what limits the forecast, in words.
        seconds: how long it took.
    """

    rank: int
    devices: list[DeviceForecast]
    notes: list[str]
    seconds: float


class Forecast(msgspec.Struct, frozen=True):
    """What a job will hold.

    Attributes:
        ranks: the ranks that were forecast.
        function: what makes the model, the optimizer and the step.
        arguments: what it was called with.
        world_size: ranks of the job.
        mesh: dimensions of its device mesh, by name; empty where none was asked for.
        device: ``cpu`` or ``cuda``: the device that was forecast for.
        allocator: ``exact``, sizes as requested, or ``cuda``, as its caching allocator rounds them.
        torch_version: of the torch that forecast it.
        torchmem_version: of this library.
        schema: of the file.
    """

    ranks: list[RankForecast]
    function: str
    arguments: dict[str, Plain]
    world_size: int
    mesh: dict[str, int]
    device: str
    allocator: str
    torch_version: str
    torchmem_version: str
    schema: int = SCHEMA

    @property
    def kind(self) -> str:
        """The kind of device that its sizes are of: ``cuda`` too where the CPU stood for one."""
        return "cuda" if self.allocator == "cuda" else self.device

    @property
    def largest(self) -> RankForecast:
        """The rank that holds the most; the lowest of equals."""
        return max(self.ranks, key=lambda rank: (rank.devices[0].peak_bytes, -rank.rank))

    @property
    def highest(self) -> StepForecast:
        """The step with the highest peak, of the largest rank."""
        return self.largest.devices[0].highest

    @property
    def peak_bytes(self) -> int:
        """The most that a rank's device holds during a step."""
        return self.highest.peak_bytes

    @property
    def by_reftype(self) -> dict[str, int]:
        """That peak by reference type, largest first."""
        return self.highest.by_reftype

    @property
    def by_module(self) -> dict[str, int]:
        """That peak by module, largest first."""
        return self.highest.by_module

    def peak_bytes_of(self, rank: int, device: str) -> int | None:
        """The peak of a device of a rank: its own where that rank was forecast, else the highest of those that were.

        Args:
            rank: which.
            device: torch's name of it; any device of the type where the rank has no such one. None if there is none.
        """
        own = [one for one in self.ranks if one.rank == rank] or self.ranks
        peaks = [d.peak_bytes for one in own for d in one.devices if d.device == device]
        kind = device.partition(":")[0]
        return max(peaks or [d.peak_bytes for r in own for d in r.devices if d.device.startswith(kind)], default=None)

    def save(self, path: str | Path) -> None:
        """Writes it to a file, for ``load`` and for comparing runs with it.

        Raises:
            ForecastError: the file cannot be written.
        """
        try:
            Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        except OSError as error:
            raise ForecastError(f"{path}: {error.strerror}") from None


def load(path: str | Path) -> Forecast:
    """A saved forecast.

    Raises:
        ForecastError: the file cannot be read, is no forecast, or is of a newer schema.
    """
    try:
        text = Path(path).read_bytes()
        schema = msgspec.json.decode(text, type=_Schema).schema
        if schema > SCHEMA:
            raise ForecastError(
                f"{path}: a forecast of schema {schema}; this torchmem reads up to {SCHEMA}: upgrade it"
            )
        found = msgspec.json.decode(text, type=Forecast)
    except OSError as error:
        raise ForecastError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ForecastError(f"{path}: not a saved forecast: {error}") from None
    devices = [device for rank in found.ranks for device in rank.devices]
    if not devices or not all(device.steps and 0 <= device.peak_bytes <= _MAX_BYTES for device in devices):
        raise ForecastError(f"{path}: not a saved forecast: a device without steps, or none at all")
    return found


def as_data(forecast: Forecast) -> dict[str, Any]:
    """The forecast as plain data, ready for ``json.dumps``, with what everybody asks for on top."""
    highest = forecast.highest
    data: dict[str, Any] = {
        "peak_bytes": forecast.peak_bytes,
        "by_reftype": highest.by_reftype,
        "by_module": highest.by_module,
        "at": {"step": highest.name, **msgspec.to_builtins(highest.at)},
        "rank": forecast.largest.rank,
    }
    return data | msgspec.to_builtins(forecast)  # type: ignore[no-any-return]  # a struct becomes a dict


class _Schema(msgspec.Struct):
    schema: int


def _sums(pairs: Any) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for key, num_bytes in pairs:
        sums[key] += num_bytes
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))
