"""Coverage-guided fuzzing of what reads a record: ``python tests/fault/exporter/fuzz_record.py -runs=50000 -seed=1``.

All arguments are libFuzzer's: ``-max_total_time=180`` fuzzes for three minutes, a folder keeps what was found. An input
is the rank's whole file if its first byte is even, else a payload that is given a header which is right about it: no
mutation would ever guess a checksum. Each is read as the sidecar reads it. A crash is an exception that is not a
rejection, a reason that is not in the list, or a rank that is exposed although its figures contradict each other.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from pathlib import Path

import atheris
import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

with atheris.instrument_imports(include=["torchmem.wire", "torchmem_exporter"]):
    from torchmem.wire import record as wire
    from torchmem_exporter.labels import clean_label
    from torchmem_exporter.reading.reader import REASONS, Reader

from hostile import framed
from records import WRITTEN_AT, make_device, make_record, make_ring

RANK = 5
WORDS = (wire.Record, wire.Identity, wire.Clock, wire.Device, wire.Allocator, wire.Ring, wire.RingDevice, wire.Labeler)


def seeds():
    """Inputs to start from."""
    small = make_record(RANK, 2, ring=make_ring(1, make_device(RANK, 2)))
    for record in (small, make_record(RANK, 1, devices=[], labelers=[]), make_record(RANK, 5, final=True)):
        data = wire.encode(record)
        yield b"\x00" + data
        yield b"\x01" + data[wire.HEADER.size :]


def words():
    """What a mutation should insert whole: the names of fields, and the first bytes of msgpack's longer things."""
    names = [name for struct in WORDS for name in struct.__struct_fields__]
    heads = [msgspec.msgpack.encode(value) for value in (2**63, -(2**63), 2**64 - 1, math.inf, math.nan, None, True)]
    return [name.encode() for name in names] + heads + [bytes([head]) + b"\xff" * 4 for head in range(0xC4, 0xE0)]


def check(reader, folder, data):
    """One input, read as the sidecar reads it."""
    content = data[1:] if not data or data[0] % 2 == 0 else framed(data[1:])
    # A new file each time: the same one, changed within a tick of the clock, need not be read again.
    (folder / "new").write_bytes(content)
    (folder / "new").rename(folder / f"rank-{RANK}.record")
    snapshot = reader.scan(None)
    assert {rejection.reason for rejection in snapshot.rejections} <= set(REASONS)
    if snapshot.rejections:
        return
    for rank in snapshot.ranks:
        identity, clock = rank.record.identity, rank.record.clock
        assert identity.rank == RANK
        assert math.isfinite(clock.written_at + clock.step_seconds + clock.tracker_seconds + identity.start_time)
        clean_label(identity.train_job).encode()
        for device in rank.record.devices:
            for book, total in ((device.usage, device.usage_bytes), (device.step_peak, device.step_peak_bytes)):
                assert sum(cell.num_bytes for cell in wire.unpack_cells(book)) == total
                assert all(cell.module < len(rank.record.modules) for cell in wire.unpack_cells(book))


def prepare(place):
    """Lays out a folder for the inputs to start from, one for the job, and the dictionary; returns their paths."""
    corpus, folder, dictionary = (place / name for name in ("corpus", "records/job", "words"))
    corpus.mkdir()
    folder.mkdir(parents=True)
    for number, seed in enumerate(seeds()):
        (corpus / str(number)).write_bytes(seed)
    lines = ('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in words())
    dictionary.write_text("".join(lines))
    return corpus, folder, dictionary


def fuzz(place):
    """Never returns: libFuzzer ends the process."""
    corpus, folder, dictionary = prepare(place)
    reader = Reader(folder.parent, stale_after=60.0, clock=lambda: WRITTEN_AT + 1)
    flags = [f"-dict={dictionary}", "-max_len=8192", f"-artifact_prefix={tempfile.gettempdir()}/"]
    atheris.Setup(
        [sys.argv[0], *flags, *sys.argv[1:], str(corpus)],
        lambda data: check(reader, folder, data),
    )
    atheris.Fuzz()


def main():
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base) as place:
        child = os.fork()
        if not child:
            fuzz(Path(place))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    raise SystemExit(main())
