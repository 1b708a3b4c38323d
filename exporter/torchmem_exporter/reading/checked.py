"""Reads one record file, and refuses what parsed and yet cannot be exposed.

Invariants: whatever lies under the name, ``RecordError`` with a countable reason and nothing else is raised; the books
of a record that is returned add up, its amounts are finite and not negative, no two of its devices share a name, and it
tells of no more things, by no longer names, than a process could have: what one rank costs stays bounded.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Sized

from torchmem.errors import RecordError
from torchmem.wire.record import Device, Record, cell_columns, decode
from torchmem.wire.store import MAX_RECORD_BYTES, open_record_bytes
from torchmem_exporter.labels import clean_label

MAX_MODULES = 1 << 16
"""Beyond them the books of a record would not fit into it."""
MAX_REFTYPES = 256
MAX_DEVICES = 64
"""Of the engine; an accelerator's host among them."""
MAX_LABELERS = 64
MAX_OPERATIONS = 16
MAX_NAME_CHARACTERS = 4096


def read_checked(dir_fd: int, name: str, rank: int, status: os.stat_result, uids: frozenset[int]) -> Record:
    """Reads and checks one record; looks before it opens, since opening some devices has effects.

    Args:
        dir_fd: descriptor of the folder.
        name: the file's name in it.
        rank: whose record it must be.
        status: of the file, links not followed.
        uids: who may own it.

    Raises:
        RecordError: it cannot be used.
    """
    if stat.S_ISLNK(status.st_mode):
        raise RecordError("symlink", "links are not followed")
    if not stat.S_ISREG(status.st_mode):
        raise RecordError("not_regular", "not a regular file")
    if status.st_size > MAX_RECORD_BYTES:
        raise RecordError("oversize", f"{status.st_size} bytes exceed {MAX_RECORD_BYTES}")
    data, _ = open_record_bytes(dir_fd, name, uids)
    record = decode(data)
    _check(record, rank)
    return record


def _check(record: Record, rank: int) -> None:
    """Refuses what parsed and yet cannot be exposed: it would break the whole scrape, or say what is not so."""
    if record.identity.rank != rank:
        raise RecordError("identity", f"claims to be rank {record.identity.rank}")
    _check_extent(record)
    clock = record.clock
    amounts = [clock.step, clock.step_seconds, clock.tracker_seconds, clock.written_at, record.identity.start_time]
    amounts += [
        amount for device in record.devices for amount in (device.allocator.num_ooms, device.allocator.num_retries)
    ]
    if not all(math.isfinite(amount) and amount >= 0 for amount in amounts):
        raise RecordError("values", "a time or a count is negative or no number")
    if _repeats(d.name for d in record.devices) or _repeats(labeler.name for labeler in record.labelers):
        raise RecordError("values", "a device or a labeler appears twice")
    for device in record.devices:
        _check_sums(device)


def _check_extent(record: Record) -> None:
    """Refuses what would hold up the scrape of all ranks, or be more series than any storage takes."""
    extents: list[tuple[str, Sized, int]] = [
        ("modules", record.modules, MAX_MODULES),
        ("reftypes", record.reftypes, MAX_REFTYPES),
        ("devices", record.devices, MAX_DEVICES),
        ("labelers", record.labelers, MAX_LABELERS),
        *(("operations", device.checkpoint_peaks, MAX_OPERATIONS) for device in record.devices),
    ]
    for what, found, most in extents:
        if len(found) > most:
            raise RecordError("values", f"{len(found)} {what}, of which a process has {most} at most")
    names = [record.identity.train_job, record.identity.attempt, record.identity.host, record.identity.engine]
    names += [device.name for device in record.devices] + [labeler.name for labeler in record.labelers]
    names += [device.uuid for device in record.devices]
    names += [operation for device in record.devices for operation in device.checkpoint_peaks]
    if max(map(len, names)) > MAX_NAME_CHARACTERS:
        raise RecordError("values", f"a name has more than {MAX_NAME_CHARACTERS} characters")


def _check_sums(device: Device) -> None:
    for name, book, total in (
        ("usage", device.usage, device.usage_bytes),
        ("step_peak", device.step_peak, device.step_peak_bytes),
    ):
        held = sum(cell_columns(book)[1])
        if held != total:
            raise RecordError("sums", f"{device.name} {name}: the parts are {held} bytes, the total {total}")


def _repeats(names: Iterable[str]) -> bool:
    listed = [clean_label(name) for name in names]
    return len(set(listed)) < len(listed)
