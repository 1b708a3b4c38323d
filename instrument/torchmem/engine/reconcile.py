"""The books against what the device itself says: capacity, the allocator's own statistics, the explicit remainder.

On CUDA the caching allocator keeps statistics: what it counts as allocated, less what the books name, is the
remainder, and books + remainder is its total, exactly. torch's CPU allocator keeps none: the tap is the only witness,
and the remainder is 0 by construction; what the process uses besides is ``other_bytes``.

Limits: Linux. On CUDA the remainder holds the allocator's rounding (blocks of 512 bytes; books are as requested).
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torchmem.wire.record import Allocator

_PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True)
class DeviceFacts:
    """What a device says of itself now; bytes."""

    name: str
    model: str = ""
    uuid: str = ""
    limit_bytes: int | None = None
    other_bytes: int | None = None
    unattributed_bytes: int = 0
    allocator: Allocator = Allocator()  # noqa: RUF009  # frozen
    num_ooms_tapped: int = 0
    """Of the failed allocations that the tap has counted, those that the allocator's statistics hold already."""


def device_name(device: int) -> str:
    """Torch's name of a device in the engine's numbering: 0 is the CPU, 1 + i ``cuda:i``."""
    return "cpu" if device == 0 else f"cuda:{device - 1}"


def device_facts(device: int, booked_bytes: int, num_ooms_tapped: Callable[[], int]) -> DeviceFacts:
    """Facts of a device in the engine's numbering: 0 is the CPU, 1 + i ``cuda:i``.

    Args:
        device: the device.
        booked_bytes: what the books say is alive on it, at the same moment.
        num_ooms_tapped: allocations that failed on it, as the tap counts them.
    """
    if device == 0:
        resident = _resident_bytes()
        return DeviceFacts(
            name=device_name(device),
            limit_bytes=_host_limit_bytes(),
            other_bytes=None if resident is None else max(0, resident - booked_bytes),
        )
    # The tap is asked last: a failure meanwhile is then missing for a moment, and not counted twice.
    return replace(_cuda_facts(device - 1, booked_bytes), num_ooms_tapped=num_ooms_tapped())


def _cuda_facts(index: int, booked_bytes: int) -> DeviceFacts:
    import torch

    statistics: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(index)
    free, total = torch.cuda.mem_get_info(index)
    properties = torch.cuda.get_device_properties(index)

    def current(name: str) -> int:
        return int(statistics[name]["all"]["current"])

    reserved = current("reserved_bytes")
    return DeviceFacts(
        name=device_name(1 + index),
        model=properties.name,
        uuid=str(getattr(properties, "uuid", "")),
        limit_bytes=total,
        other_bytes=max(0, total - free - reserved),
        unattributed_bytes=current("allocated_bytes") - booked_bytes,
        allocator=Allocator(
            allocated_bytes=current("allocated_bytes"),
            active_bytes=current("active_bytes"),
            reserved_bytes=reserved,
            inactive_split_bytes=current("inactive_split_bytes"),
            num_ooms=int(statistics["num_ooms"]),
            num_retries=int(statistics["num_alloc_retries"]),
        ),
    )


def _resident_bytes() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


@lru_cache(maxsize=1)
def _host_limit_bytes() -> int | None:
    """The smaller of the control group's limit and the host's memory; None where neither can be read."""
    limits = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    try:
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
        limits.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, StopIteration, IndexError):
        pass
    return min(limits, default=None)
