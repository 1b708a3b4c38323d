"""What one rank leaves for the sidecar: the schema of a record and its bytes.

A record file is a 24-byte header (magic, major, minor, CRC-32 of the payload, payload length; little-endian) and a
msgpack payload. Books travel as packed rows (module index, reftype index, bytes) so that the training process writes
them without making a Python object per cell.

Invariants: torch-free; within a major version fields are only added, each with a default; a reader refuses another
major version by its number; ``decode`` raises ``RecordError`` and nothing else, whatever the bytes; the cells of one
book are unique, positive, and index the record's own tables of names.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from torchmem.errors import RecordError

MAGIC = b"torchmem"
MAJOR = 1
MINOR = 3
HEADER = struct.Struct("<8sHHIQ")
CELL = struct.Struct("<IIq")
MODULE_MASK = (1 << 32) - 1
"""The module index in a cell's key."""
REFTYPE_SHIFT = 32
"""Where the reftype index begins in a cell's key."""
MAX_PAYLOAD_BYTES = 8 << 20


class Cell(NamedTuple):
    """One row of a book: bytes held by a module for one purpose."""

    module: int
    reftype: int
    num_bytes: int


class Identity(msgspec.Struct, kw_only=True, frozen=True):
    """Who wrote the record; constant for the life of an attempt."""

    train_job: str
    rank: int
    local_rank: int
    world_size: int
    attempt: str
    """UUID of this process's life as this rank; a restart is a new one."""
    pid: int
    host: str
    start_time: float
    """Unix seconds at which counting began."""
    engine: str
    """``native`` or ``dispatch``: which engine counts; ``off`` where none does."""
    torch_version: str
    torchmem_version: str
    mesh: dict[str, int] = {}
    """Coordinate of the rank along each named dimension of the device mesh (``dp``, ``tp``, ``pp``)."""
    sample_every: int = 1
    """One step in so many is counted: the books and the ring are those of such steps; since 1.3."""


class Clock(msgspec.Struct, kw_only=True, frozen=True):
    """Where the attempt stands."""

    step: int
    """Steps finished, counted from ``install``."""
    step_seconds: float
    """Wall-clock seconds spent in finished steps."""
    tracker_seconds: float
    """Estimated seconds of those that torchmem itself took."""
    written_at: float
    """Unix seconds at which the record was made."""
    final: bool = False
    """True in the last record of a clean end."""


class Allocator(msgspec.Struct, kw_only=True, frozen=True):
    """The allocator's own statistics, in bytes; ``None`` where the allocator has no such figure (CPU)."""

    allocated_bytes: int | None = None
    active_bytes: int | None = None
    reserved_bytes: int | None = None
    inactive_split_bytes: int | None = None
    num_ooms: int = 0
    num_retries: int = 0


class Device(msgspec.Struct, kw_only=True, frozen=True):
    """The books of one device."""

    name: str
    """torch's name of the device: ``cpu``, ``cuda:0``."""
    usage: bytes
    """Packed cells alive at the end of the last finished step."""
    step_peak: bytes
    """Packed cells at the instant of the highest step peak of the window; they sum to that peak."""
    active_peak: bytes
    """Packed cells: for each module the composition, by reftype, at the most the device held while it ran."""
    usage_bytes: int
    step_peak_bytes: int
    peak_bytes: int
    """The most the device held since the attempt began."""
    unattributed_bytes: int
    """What the allocator holds that the books cannot name; may be negative where the allocator counts less."""
    limit_bytes: int | None = None
    """Capacity of the device."""
    other_bytes: int | None = None
    """Used on the device outside torch's allocator."""
    model: str = ""
    """The device's product name."""
    uuid: str = ""
    allocator: Allocator = Allocator()
    checkpoint_peaks: dict[str, int] = {}
    """By operation (``save``, ``load``): the most the device held, in bytes, while one ran in the latest step that had
    any; since 1.1."""
    forecast_bytes: int | None = None
    """The step peak that was forecast before the job began; ``None`` where none was, or it was of another run; since
    1.3."""


class RingDevice(msgspec.Struct, kw_only=True, frozen=True):
    """One device's columns of the ring: int64 little-endian, one row of ``len(reftypes)`` values per step."""

    name: str
    step_peak: bytes
    step_end: bytes


class Ring(msgspec.Struct, kw_only=True, frozen=True):
    """The last steps, oldest first, as packed columns of equal length."""

    steps: bytes = b""
    """int64: step numbers."""
    ended_at: bytes = b""
    """float64: Unix seconds."""
    phases: bytes = b""
    """int64: ``torchmem.model.Phase`` flags of what the step held."""
    input_sizes: bytes = b""
    """int64: how large the step's input was, as the job says or in elements; 0 where unknown; since 1.2."""
    devices: list[RingDevice] = []


class Labeler(msgspec.Struct, kw_only=True, frozen=True):
    """Whether one labeler still works."""

    name: str
    up: bool
    reason: str = ""


class OutOfMemory(msgspec.Struct, kw_only=True, frozen=True):
    """One allocation that failed, and what the device was filled with at that instant."""

    number: int
    """Of the attempt's failures, from 1."""
    device: str
    time: float
    """Unix seconds."""
    step: int
    """Steps finished before it."""
    phase: int
    """A ``torchmem.model.Phase``: what the thread that asked was doing."""
    module: int
    """Owner of what was asked for."""
    reftype: int
    requested_bytes: int
    """What was asked for; on CUDA rounded up as the allocator does."""
    held_bytes: int
    """What the device held, by the books."""
    holders: bytes = b""
    """Packed cells: all of them in the latest event, the largest in earlier ones; at most ``held_bytes`` in sum."""


class Record(msgspec.Struct, kw_only=True, frozen=True):
    """Everything one rank publishes."""

    identity: Identity
    clock: Clock
    modules: list[str]
    """Owner labels; index 0 is ``(outside modules)``, 1 the root."""
    reftypes: list[str]
    """Reftype labels; a newer library may know more than the reader does."""
    devices: list[Device]
    ring: Ring = Ring()
    labelers: list[Labeler] = []
    counters: dict[str, int] = {}
    """The engine's own counters: events, unknown frees, dropped frames and the like."""
    oom_events: list[OutOfMemory] = []
    """The last allocations that failed, oldest first; since 1.2."""


def forecast_drift_ratio(record: Record, device: Device) -> float | None:
    """The device's highest step peak of the window over its forecast, less one; None before both are known."""
    if not device.forecast_bytes or not device.step_peak_bytes or record.clock.step < 1:
        return None
    return device.step_peak_bytes / device.forecast_bytes - 1


def filled_share(device: Device) -> float | None:
    """Share of a device's limit in use at the step peak, what others hold there included; None where it is unknown."""
    if device.limit_bytes is None or device.limit_bytes <= 0:
        return None
    held = device.step_peak_bytes + max(0, device.unattributed_bytes) + max(0, device.other_bytes or 0)
    return held / device.limit_bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def pack_cells(cells: Iterable[Cell]) -> bytes:
    """Packs rows for ``Device.usage`` and its like."""
    return b"".join(CELL.pack(*cell) for cell in cells)


def unpack_cells(packed: bytes) -> list[Cell]:
    """The rows of a book; the input must be a whole number of rows (``decode`` has checked it)."""
    return [Cell._make(row) for row in CELL.iter_unpack(packed)]


def cell_columns(packed: bytes) -> tuple[list[int], list[int]]:
    """The keys of a book's cells, module index and reftype index in one number, and the bytes in each.

    Ten times as fast as ``unpack_cells``; the input must be a whole number of rows. Little-endian machines only.
    """
    words = memoryview(packed).cast("q")
    return words[::2].tolist(), words[1::2].tolist()


def encode(record: Record) -> bytes:
    """The bytes of a record file."""
    payload = _encoder.encode(record)
    return HEADER.pack(MAGIC, MAJOR, MINOR, zlib.crc32(payload), len(payload)) + payload


def decode(data: bytes) -> Record:
    """Reads the bytes of a record file.

    Raises:
        RecordError: with reason ``magic``, ``version``, ``truncated``, ``oversize``, ``checksum``, ``schema`` or
            ``books``.
    """
    if len(data) < HEADER.size:
        raise RecordError("truncated", f"{len(data)} bytes are too few for a record's header of {HEADER.size}")
    magic, major, minor, crc, length = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise RecordError("magic", "not a torchmem record")
    if major != MAJOR:
        raise RecordError(
            "version", f"record version {major}.{minor}; this reader knows {MAJOR}.x: use matching releases"
        )
    if length > MAX_PAYLOAD_BYTES:
        raise RecordError("oversize", f"payload of {length} bytes exceeds {MAX_PAYLOAD_BYTES}")
    payload = memoryview(data)[HEADER.size :]
    if len(payload) != length:
        raise RecordError("truncated", f"payload of {len(payload)} bytes, header says {length}")
    if zlib.crc32(payload) != crc:
        raise RecordError("checksum", "payload does not match its checksum")
    try:
        record = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError("schema", str(error)) from None
    _check(record)
    return record


def _check(record: Record) -> None:
    """Refuses books that index outside their tables, so that no reader has to."""
    num_modules, num_reftypes = len(record.modules), len(record.reftypes)
    for device in record.devices:
        for name, book in (
            ("usage", device.usage),
            ("step_peak", device.step_peak),
            ("active_peak", device.active_peak),
        ):
            _check_book(f"{device.name} {name}", book, num_modules, num_reftypes)
        for operation, num_bytes in device.checkpoint_peaks.items():
            if num_bytes < 0:
                raise RecordError("books", f"{device.name} checkpoint peak of {operation!r}: {num_bytes} bytes")
        if device.forecast_bytes is not None and device.forecast_bytes < 0:
            raise RecordError("books", f"{device.name} forecast: {device.forecast_bytes} bytes")
    for event in record.oom_events:
        _check_oom(event, num_modules, num_reftypes)
    num_steps = len(record.ring.steps) // 8
    columns = [record.ring.steps, record.ring.ended_at, record.ring.phases]
    columns += [record.ring.input_sizes] if record.ring.input_sizes else []
    rows = [column for device in record.ring.devices for column in (device.step_peak, device.step_end)]
    if any(len(c) != 8 * num_steps for c in columns) or any(len(r) != 8 * num_steps * num_reftypes for r in rows):
        raise RecordError("books", "the ring's columns differ in length")


def _check_oom(event: OutOfMemory, num_modules: int, num_reftypes: int) -> None:
    name = f"out of memory {event.number} on {event.device}"
    _check_book(name, event.holders, num_modules, num_reftypes)
    if not (0 <= event.module < num_modules and 0 <= event.reftype < num_reftypes):
        raise RecordError("books", f"{name}: asked for by ({event.module}, {event.reftype})")
    if min(event.step, event.requested_bytes) < 0 or not math.isfinite(event.time):
        raise RecordError("books", f"{name}: a count is negative, or a time no number")
    if sum(cell_columns(event.holders)[1]) > event.held_bytes:
        raise RecordError("books", f"{name}: the parts are more than the {event.held_bytes} bytes held")


def _check_book(name: str, book: bytes, num_modules: int, num_reftypes: int) -> None:
    if len(book) % CELL.size:
        raise RecordError("books", f"{name}: {len(book)} bytes are no whole number of cells")
    keys, amounts = cell_columns(book)
    if len(set(keys)) != len(keys):
        raise RecordError("books", f"{name}: a cell appears twice")
    if not keys:
        return
    modules = memoryview(book).cast("I")[::4].tolist()
    # One pass each in C: most of what reading a record costs is here.
    if min(keys) < 0 or max(keys) >> REFTYPE_SHIFT >= num_reftypes or max(modules) >= num_modules:
        raise RecordError("books", f"{name}: a cell is of a module or reftype that the record does not name")
    if min(amounts) <= 0:
        raise RecordError("books", f"{name}: a cell holds {min(amounts)} bytes")
