"""What is kept of each module: its sizes, its own peak, and the last snapshots of each of its states.

Invariant: of each state at most ``KEPT_SNAPSHOTS`` are kept, packed; the oldest goes first.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable

import torch
from torch import nn

from torchmem.labelers.owners import storages
from torchmem.snapshots import Packed, Snapshot, torch_device, unpack

KEPT_SNAPSHOTS = 16


class ModuleState(str, enum.Enum):
    """A moment, or a span, of a module's forward or backward."""

    BEF_PRE_FW = "Before Pre-Forward"
    AFT_PRE_FW = "After Pre-Forward"
    BEF_POST_FW = "Before Post-Forward"
    AFT_POST_FW = "After Post-Forward"
    BEF_PRE_BW = "Before Pre-Backward"
    AFT_PRE_BW = "After Pre-Backward"
    BEF_POST_BW = "Before Post-Backward"
    AFT_POST_BW = "After Post-Backward"
    PRE_FW_AC = "Pre-Forward AC"
    POST_FW_AC = "Post-Forward AC"
    PEAK_FW = "Peak Forward"
    PEAK_BW = "Peak Backward"


class ModuleStats:
    """What was seen of one module; sizes are bytes.

    Attributes:
        mod_fqn: the root's class and the module's qualified name, ``Net.layers.0``.
        parameter_mem: its parameters, those of its children included, before its first forward.
        buffer_mem: likewise its buffers.
        input_mem: the inputs of its latest forward.
        output_mem: the outputs of its latest forward.
        local_peak: the most each device held while its forward or backward ran.
    """

    def __init__(self, mod_fqn: str, module: nn.Module) -> None:
        self.mod_fqn = mod_fqn
        self.parameter_mem = storage_bytes(module.parameters())
        self.buffer_mem = storage_bytes(module.buffers())
        self.input_mem = 0
        self.output_mem = 0
        self.local_peak: dict[torch.device, int] = {}
        self._kept: dict[ModuleState, deque[list[Packed]]] = {}

    @property
    def snapshots(self) -> dict[ModuleState, list[Snapshot]]:
        """By state, the last ``KEPT_SNAPSHOTS`` snapshots, oldest first; a copy."""
        found = {state: list(self._kept[state]) for state in ModuleState if state in self._kept}
        return {state: [unpack(entry[0]) for entry in kept] for state, kept in found.items()}

    def keep(self, state: ModuleState, packed: Packed) -> list[Packed]:
        """Adds a snapshot; returns the place where a later one may replace it."""
        entry = [packed]
        self._kept.setdefault(state, deque(maxlen=KEPT_SNAPSHOTS)).append(entry)
        return entry

    def raise_peak(self, rows: Iterable[tuple[int, int, bytes]]) -> None:
        """Takes (device, most bytes, ...) rows into ``local_peak``."""
        for number, num_bytes, *_ in rows:
            device = torch_device(number)
            self.local_peak[device] = max(num_bytes, self.local_peak.get(device, 0))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind the tensors, each storage once."""
    found = {storage._cdata: storage.nbytes() for tensor in tensors for storage in storages(tensor)}  # noqa: SLF001  # the address of the StorageImpl
    return sum(found.values())
