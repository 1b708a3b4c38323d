"""Puts a record together from what the monitor has: who it is, what its engine counted, the ring of steps.

Invariants: nothing here touches the engine or the training loop; books pass through as the engine packed them.
"""

from __future__ import annotations

import array
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from torchmem import __version__
from torchmem.engine.reconcile import DeviceFacts, device_name
from torchmem.forecasting.held import Held, Run
from torchmem.model import Operation, RefType
from torchmem.wire import record as wire

if TYPE_CHECKING:
    from torch import nn

_EMPTY_TOTALS = bytes(8 * len(RefType))


@dataclass(frozen=True)
class Step:
    """One row of the ring."""

    number: int
    ended_at: float
    phases: int
    input_size: int
    devices: dict[int, tuple[bytes, bytes]]
    """By device: totals by reftype at the peak and at the end, int64 little-endian."""


def identify(train_job: str, engine: str, model: nn.Module, sample_every: int = 1) -> wire.Identity:
    """This process as a rank of a job, a new attempt.

    Args:
        train_job: the job's name.
        engine: which engine counts.
        model: the root module; its parameters tell the mesh.
        sample_every: one step in so many is counted.
    """
    import torch

    rank, local_rank, world_size = _ranks()
    return wire.Identity(
        train_job=train_job,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        attempt=str(uuid.uuid4()),
        pid=os.getpid(),
        host=platform.node(),
        start_time=time.time(),
        engine=engine,
        torch_version=str(torch.__version__),
        torchmem_version=__version__,
        mesh=_mesh_coordinates(model),
        sample_every=sample_every,
    )


def held_forecast(path: Path, identity: wire.Identity, model: nn.Module) -> Held:
    """What this rank is held against, from a saved forecast.

    Args:
        path: of the forecast.
        identity: of this process.
        model: the root module; its parameters tell the mesh and the kind of device.
    """
    return Held(path, Run(identity.rank, identity.world_size, _mesh_lengths(model), _device_kind(model)))


def device_books(
    facts: Sequence[DeviceFacts],
    windows: Sequence[tuple[Any, ...]],
    checkpoint_peaks: Sequence[tuple[int, int, int]] = (),
    num_ooms: Mapping[int, int] | None = None,
    forecast: Held | None = None,
) -> list[wire.Device]:
    """The devices of a record.

    Args:
        facts: by device, in the engine's order.
        windows: the engine's ``read_window``.
        checkpoint_peaks: the engine's, as (device, operation, bytes).
        num_ooms: by device, allocations that failed until now, as the tap counted them.
        forecast: what the rank is held against; None where no forecast was given.
    """
    num_ooms = num_ooms or {}
    peaks: dict[int, dict[str, int]] = {}
    for device, operation, num_bytes in checkpoint_peaks:
        peaks.setdefault(device, {})[Operation(operation).label] = num_bytes
    return [
        wire.Device(
            name=fact.name,
            usage=usage,
            step_peak=step_peak,
            active_peak=active_peak,
            usage_bytes=usage_bytes,
            step_peak_bytes=step_peak_bytes,
            peak_bytes=peak_bytes,
            unattributed_bytes=fact.unattributed_bytes,
            limit_bytes=fact.limit_bytes,
            other_bytes=fact.other_bytes,
            model=fact.model,
            uuid=fact.uuid,
            allocator=_with_ooms(fact.allocator, num_ooms.get(device, 0) - fact.num_ooms_tapped),
            checkpoint_peaks=peaks.get(device, {}),
            forecast_bytes=None if forecast is None else forecast.bytes_of(fact.name),
        )
        for fact, (device, usage_bytes, step_peak_bytes, peak_bytes, usage, step_peak, active_peak) in zip(
            facts, windows, strict=False
        )
    ]


def _with_ooms(allocator: wire.Allocator, num_new: int) -> wire.Allocator:
    return structs.replace(allocator, num_ooms=allocator.num_ooms + num_new) if num_new > 0 else allocator


def oom_events(events: Iterable[tuple[Any, ...]], num_steps_before: int) -> list[wire.OutOfMemory]:
    """The failed allocations of a record.

    Args:
        events: the engine's.
        num_steps_before: steps that the engine has ended before the job's first.
    """
    return [
        wire.OutOfMemory(
            number=number,
            device=device_name(device),
            time=time_of,
            step=max(0, num_steps - num_steps_before),
            phase=phase,
            module=module,
            reftype=reftype,
            requested_bytes=requested_bytes,
            held_bytes=held_bytes,
            holders=holders,
        )
        for (
            number,
            device,
            module,
            reftype,
            phase,
            num_steps,
            requested_bytes,
            held_bytes,
            time_of,
            holders,
        ) in events
    ]


def ring_columns(steps: Sequence[Step]) -> wire.Ring:
    """The ring of a record, oldest step first."""
    devices = sorted({device for step in steps for device in step.devices})
    empty = (_EMPTY_TOTALS, _EMPTY_TOTALS)
    return wire.Ring(
        steps=array.array("q", [step.number for step in steps]).tobytes(),
        ended_at=array.array("d", [step.ended_at for step in steps]).tobytes(),
        phases=array.array("q", [step.phases for step in steps]).tobytes(),
        input_sizes=array.array("q", [step.input_size for step in steps]).tobytes(),
        devices=[
            wire.RingDevice(
                name=device_name(device),
                step_peak=b"".join(step.devices.get(device, empty)[0] for step in steps),
                step_end=b"".join(step.devices.get(device, empty)[1] for step in steps),
            )
            for device in devices
        ],
    )


def _ranks() -> tuple[int, int, int]:
    """(rank, local rank, world size), from torch.distributed, else the launcher's environment, else a lone process."""
    import torch.distributed as dist

    def number(name: str, default: int) -> int:
        value = os.environ.get(name, "")
        return int(value) if value.isdecimal() else default

    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        rank, world_size = number("RANK", 0), number("WORLD_SIZE", 1)
    return rank, number("LOCAL_RANK", rank), world_size


def _mesh_coordinates(model: nn.Module) -> dict[str, int]:
    """This rank's place along each named dimension of the mesh that the model's parameters lie on."""
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        names: Callable[..., Any] | None = getattr(mesh, "mesh_dim_names", None)
        if names:
            coordinate = mesh.get_coordinate()  # type: ignore[union-attr]  # a mesh, as it has names
            return {} if coordinate is None else dict(zip(names, coordinate, strict=True))  # type: ignore[call-overload]  # as above
    return {}


def _mesh_lengths(model: nn.Module) -> dict[str, int]:
    """How long each named dimension is, of all meshes that the model's parameters lie on."""
    lengths: dict[str, int] = {}
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if names := getattr(mesh, "mesh_dim_names", None):
            lengths.update(zip(names, mesh.shape, strict=True))  # type: ignore[union-attr]  # a mesh, as it has names
    return lengths


def _device_kind(model: nn.Module) -> str:
    """The kind of device that is trained on; empty where parameters on the CPU may be those offloaded from a GPU."""
    import torch

    kinds = {parameter.device.type for parameter in model.parameters()}
    if "cuda" in kinds:
        return "cuda"
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    return "cpu" if kinds == {"cpu"} and not has_cuda else ""
