"""Runs one row on one rank, under torchmem and, independently, under the truth; brings both sets of figures home.

Steps come in blocks, watched and bare in turn, in one process: the first watched block sees everything from the
first step on, the second is installed late, on a job that is running. The end of a step is marked by hand, so that the
truth and the books are read at one moment.

Invariants: what the truth counts less what it counted before the row was built is the row's own; the first step of a
block is checked but not timed, and neither is waiting for the truth.
Limits: what a row leaves behind in reference cycles counts as foreign to the next, until collected.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

import torchmem
from torchmem.errors import InstallError
from torchmem.validation import witness
from torchmem.validation.books import Composition, step_ends, step_peaks
from torchmem.validation.outcome import RankOutcome, Step
from torchmem.validation.rows import Row
from torchmem.validation.truth import Truth, truth_of
from torchmem.validation.workloads import Place, Workload
from torchmem.wire.record import Record

_LOOSE_ENDS = ("num_double_allocations", "num_unmatched_pops", "num_ignored_devices")
_CPU_LOOSE_ENDS = (*_LOOSE_ENDS, "num_unknown_frees")
"""On CUDA every free is seen, those of blocks that libraries made before the books began too."""
_NEVER_SECONDS = 3600.0
NUM_BLOCKS = 2


@dataclass
class _Seen:
    """What the blocks have shown so far."""

    steps: list[Step] = field(default_factory=list)
    end_bytes: list[int] = field(default_factory=list)
    bare_seconds: list[float] = field(default_factory=list)
    watched_seconds: list[float] = field(default_factory=list)
    labelers_down: dict[str, None] = field(default_factory=dict)
    loose_ends: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _True:
    """One step by the truth."""

    peak: int
    end: int
    storages: dict[str, int]


def run_row(row: Row, place: Place, num_steps: int = 4) -> RankOutcome:
    """Builds the row here and watches it.

    Args:
        row: what to run; all ranks must run the same.
        place: this rank; on the CPU the witness must be installed.
        num_steps: steps of a block, 2 or more; there are two watched blocks and two bare ones.

    Raises:
        InstallError: the native engine does not count here.
        Exception: whatever the workload raises.
    """
    truth = truth_of(place.device)
    truth.clean()
    foreign_bytes = truth.current()
    workload = row.build(place)
    seen = _Seen()
    try:
        for _ in range(NUM_BLOCKS):
            _watched_block(workload, place, truth, foreign_bytes, num_steps, seen)
            _bare_block(workload, place, num_steps, seen)
    finally:
        workload.close()
    return RankOutcome(
        seen.steps,
        seen.end_bytes,
        seen.bare_seconds,
        seen.watched_seconds,
        workload.gradients_in_buckets,
        list(seen.labelers_down),
        seen.loose_ends,
    )


def sums_of_storages(workload: Workload) -> dict[str, int]:
    """Bytes of the distinct storages of parameters, gradients, optimizer state and buffers, on all devices.

    Of those that torch's allocator made: no count of allocations can hold the others.
    """
    parameters = [*workload.model.parameters(), *_flat_parameters(workload.model)]
    states = itertools.chain.from_iterable(state.values() for state in workload.optimizer.state.values())
    return {
        "parameter": _num_bytes(parameters),
        "gradient": _num_bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer_state": _num_bytes(states),
        "buffer": _num_bytes(workload.model.buffers()),
    }


def _flat_parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    """FSDP1's: the gradient of one lasts also where this rank's part of it belongs to frozen parameters only."""
    handles = (getattr(module, "_handle", None) for module in model.modules())
    return [handle.flat_param for handle in handles if handle is not None]


def _watched_block(
    workload: Workload, place: Place, truth: Truth, foreign_bytes: int, num_steps: int, seen: _Seen
) -> None:
    true: list[_True] = []
    truth.clean()
    records = place.folder / "records"
    with torchmem.install(
        workload.model, workload.optimizer, dir=records, train_job="validate", publish_interval=_NEVER_SECONDS
    ) as monitor:
        monitor.step()  # from now on steps end by hand: this one is empty
        truth.reset_peak()
        for number in range(num_steps):
            began = time.perf_counter()
            workload.step()
            _wait(place.device)
            worked = time.perf_counter() - began
            truth.settle()
            held = sums_of_storages(workload)
            true.append(_True(truth.peak() - foreign_bytes, truth.current() - foreign_bytes, held))
            began = time.perf_counter()
            monitor.step()
            worked += time.perf_counter() - began
            truth.reset_peak()
            if number:
                seen.watched_seconds.append(worked)
        record = monitor.snapshot()
    _add_steps(record, _device_name(place.device), true, seen)


def _bare_block(workload: Workload, place: Place, num_steps: int, seen: _Seen) -> None:
    for number in range(num_steps):
        began = time.perf_counter()
        workload.step()
        _wait(place.device)
        if number:
            seen.bare_seconds.append(time.perf_counter() - began)


def _add_steps(record: Record, device: str, true: list[_True], seen: _Seen) -> None:
    if record.identity.engine != "native":
        raise InstallError(f"the native engine does not count: {record.labelers[0].reason}")
    peaks, ends = step_peaks(record, device), step_ends(record, device)
    everywhere = [step_ends(record, d.name) for d in record.ring.devices]
    for number, then in zip(sorted(peaks)[1:], true, strict=True):
        end = _sum(each[number] for each in everywhere)
        seen.steps.append(Step(then.peak, then.end, peaks[number], end, then.storages))
        seen.end_bytes.append(sum(ends[number].values()))
    seen.labelers_down.update(
        (f"{state.name} is off: {state.reason}", None) for state in record.labelers if not state.up
    )
    for counter in _CPU_LOOSE_ENDS if device == "cpu" else _LOOSE_ENDS:
        if number_of := record.counters[counter]:
            seen.loose_ends[counter] = max(number_of, seen.loose_ends.get(counter, 0))


def _sum(parts: Iterable[Composition]) -> Composition:
    total: Composition = {}
    for part in parts:
        for label, num_bytes in part.items():
            total[label] = total.get(label, 0) + num_bytes
    return total


def _num_bytes(values: Iterable[Any]) -> int:
    # Not by the labelers' own walk over tensors: what that missed would be missing here too.
    tensors = (getattr(value, "_local_tensor", value) for value in values if isinstance(value, torch.Tensor))
    held = [storage for tensor in tensors if _is_allocated(storage := tensor.untyped_storage())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def _is_allocated(storage: torch.UntypedStorage) -> bool:
    return storage.device.type != "cpu" or witness.has(storage.data_ptr())


def _device_name(device: torch.device) -> str:
    return f"cuda:{device.index}" if device.type == "cuda" else "cpu"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
