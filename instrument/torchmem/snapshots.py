"""Snapshots: how many bytes each device holds at a moment, by reference type, as torch's own trackers give them.

A snapshot is ``{torch.device: {key: bytes}}`` with a key for each reftype and ``"Total"``; a key is a string equal to
the reftype's display name, so ``snapshot[device]["Activation"]`` works. Every reftype has its key, also where it holds
nothing; a device that holds nothing is left out. Until somebody looks at it a snapshot stays packed as the engine gave
it, some 200 bytes.

Invariant: the reftypes of a device sum to its ``"Total"``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from torchmem.engine.reconcile import device_name
from torchmem.model import RefType

if TYPE_CHECKING:
    from typing_extensions import Self

TOTAL_KEY = "Total"

Packed = tuple[tuple[int, bytes], ...]
"""By device, in the engine's numbering: bytes by reftype, int64 little-endian."""


class ReftypeKey(str):
    """A reftype as the key of a snapshot: its display name, which is also its ``value``, as of torch's enums.

    Attributes:
        reftype: the reftype.
    """

    __slots__ = ("reftype",)

    reftype: RefType

    def __new__(cls, reftype: RefType) -> Self:
        """The key of a reftype."""
        key = super().__new__(cls, reftype.display_name)
        key.reftype = reftype
        return key

    @property
    def value(self) -> str:
        """The display name as a plain string."""
        return str(self)

    def __getnewargs__(self) -> tuple[RefType]:  # type: ignore[override]  # str's own would be its characters
        return (self.reftype,)


Snapshot = dict[torch.device, dict[str, int]]

KEYS = tuple(ReftypeKey(reftype) for reftype in RefType)
"""In the order of the ledger's columns."""

_ROW = struct.Struct(f"<{len(RefType)}q")


def pack(rows: Iterable[tuple[int, int, bytes]]) -> Packed:
    """A snapshot of rows (device, bytes, bytes by reftype), as the engine gives them."""
    return tuple((device, totals) for device, num_bytes, totals, *_ in rows if num_bytes)


def unpack(packed: Packed) -> Snapshot:
    """The snapshot for a user."""
    return {torch_device(device): _by_key(totals) for device, totals in packed}


def torch_device(device: int) -> torch.device:
    """The device of a number in the engine's numbering."""
    return torch.device(device_name(device))


def _by_key(totals: bytes) -> dict[str, int]:
    values = _ROW.unpack(totals)
    row: dict[str, int] = dict(zip(KEYS, values, strict=True))
    row[TOTAL_KEY] = sum(values)
    return row
