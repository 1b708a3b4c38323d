"""A directory full of what is no record: healthy ranks are seen, fast, and each refusal is counted by its reason."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest

from hostile import BLOCKED_SECONDS, JOB, PLANTS, content, folder, judged, link_to, running_ranks, spoil_locks, spoiling
from records import WRITTEN_AT, living, make_record
from sidecars import Clock
from torchmem.wire.postmortem import FOLDER
from torchmem.wire.record import encode
from torchmem.wire.store import RECORD_NAME
from torchmem_exporter.reading.burial import BURY_AFTER_SECONDS
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import REASONS, Reader
from torchmem_exporter.reading.state import FILE_NAME

MANY = 10_000
BYTES = [bytes([number]) for number in range(1, 256) if number != ord("/")]


@pytest.fixture
def healthy(tmp_path):
    """The folder of a job with two ranks that live."""
    with living(tmp_path, make_record(0), make_record(1)):
        yield tmp_path / JOB


@pytest.fixture
def reader(tmp_path):
    return Reader(tmp_path, stale_after=60.0, clock=Clock(WRITTEN_AT + 1))


def test_all_plants_at_once(healthy, reader):
    """Two kinds of bad files together would do what neither does alone."""
    for number, plant in enumerate(PLANTS.values(), start=100):
        plant.make(healthy / f"rank-{number}.record")
    wanted = Counter(plant.reason for plant in PLANTS.values())
    for num_scans in (1, 2, 3):
        assert judged(reader) == (running_ranks(0, 1), wanted)
        counted = reader.scan(None).num_errors
        assert {reason: number for reason, number in counted.items() if number} == {
            reason: num_scans * number for reason, number in wanted.items()
        }


@pytest.mark.parametrize("name", PLANTS)
def test_plant_in_place_of_a_job_or_a_stray_file(healthy, reader, name):
    """What lies beside the jobs' folders would be opened, or taken for a job."""
    plant = PLANTS[name]
    plant.make(healthy.parent / "rank-7.record")
    plant.make(healthy / "notes.txt")
    states, refused = judged(reader)
    assert states == running_ranks(0, 1)
    assert refused == (Counter({"symlink": 1}) if plant.reason == "symlink" else Counter())


def test_records_deeper_down_are_not_looked_for(healthy, reader):
    """A tree of folders without end would be walked on each scrape."""
    deep = healthy
    for _ in range(50):
        deep = deep / "rank-9"
        deep.mkdir()
        (deep / "rank-9.record").write_bytes(encode(make_record(9)))
    assert judged(reader) == (running_ranks(0, 1), Counter())


def test_names_of_every_byte(healthy, reader):
    """A name that is no text would raise, or be taken for a rank's."""
    names = {name for byte in BYTES for name in (b"rank-5.record" + byte, byte + b"rank-5.record", b"rank-" + byte)}
    names |= {b"rank-" + byte + b".record" for byte in BYTES} - {b"rank-0.record", b"rank-1.record"}
    jobs = [byte * 3 for byte in BYTES]
    for name in names:
        Path(os.fsdecode(bytes(healthy) + b"/" + name)).write_bytes(b"garbage, but long enough for a header")
    for job in jobs:
        place = Path(os.fsdecode(bytes(healthy.parent) + b"/" + job))
        place.mkdir()
        (place / "rank-5.record").write_bytes(b"garbage, but long enough for a header")
    num_refused = sum(bool(RECORD_NAME.fullmatch(os.fsdecode(name))) for name in names)
    num_refused += sum(not job.startswith(b".") for job in jobs)
    assert judged(reader) == (running_ranks(0, 1), Counter(magic=num_refused))


@pytest.mark.parametrize(
    ("name", "make", "reason"),
    [
        pytest.param("stray-{}", content(b"garbage"), None, id="stray files"),
        pytest.param("rank-1{:05}.record", content(b"garbage, but long enough for a header"), "magic", id="garbage"),
        pytest.param("rank-1{:05}.record", link_to("rank-0.record"), "symlink", id="symlinks"),
        pytest.param("rank-1{:05}.record", folder, "not_regular", id="folders"),
        pytest.param("rank-1{:05}.lock", content(b""), None, id="locks"),
        pytest.param("../job-{}", folder, None, id="jobs"),
        pytest.param("../job-{}", link_to(JOB), "symlink", id="linked jobs"),
    ],
)
def test_ten_thousand_files(healthy, reader, name, make, reason):
    """Files that nobody cleans up would cost the scrape of the ranks that live."""
    for number in range(MANY):
        make(healthy / name.format(number))
    wanted = Counter({reason: MANY}) if reason else Counter()
    for _ in range(2):
        assert judged(reader) == (running_ranks(0, 1), wanted)


def test_spoilt_locks(healthy, reader):
    """A lock that is none would block the scan, or pass for that of a rank that lives."""
    spoilt = spoil_locks(healthy)
    gone = {(JOB, rank): State.CRASHED for rank in spoilt}
    assert judged(reader) == (running_ranks(0, 1) | gone, Counter())


def test_file_that_is_exchanged_while_it_is_read(healthy, reader, tmp_path):
    """A FIFO, a device or half a record that takes a good one's place at the last moment would block or be believed."""
    path = healthy / "rank-7.record"
    path.write_bytes(encode(make_record(7)))
    seen, wanted = Counter(), {"not_regular", "symlink", "oversize", "truncated"}
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    with spoiling(path):
        deadline = time.monotonic() + BLOCKED_SECONDS
        num_scans = 0
        while num_scans < 300 or (not wanted <= seen.keys() and time.monotonic() < deadline):
            states, refused = judged(reader)
            assert states.items() >= running_ranks(0, 1).items()
            assert states.keys() <= {(JOB, 0), (JOB, 1), (JOB, 7)}
            seen += refused
            num_scans += 1
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open
    assert wanted <= seen.keys() <= set(REASONS)


@pytest.mark.parametrize("name", PLANTS)
def test_spoilt_state_of_the_sidecar(healthy, tmp_path, name):
    """What the sidecar keeps for its next start would block it, or be written where somebody else wants it."""
    victim = tmp_path / "rank-0.record"
    victim.write_bytes(b"somebody's own")
    PLANTS[name].make(tmp_path / FILE_NAME)
    reader = Reader(tmp_path, stale_after=60.0, clock=Clock(WRITTEN_AT + 1))
    (healthy / "rank-7.record").write_bytes(b"garbage, but long enough for a header")
    for _ in range(2):
        states, refused = judged(reader)
        assert (states, refused["magic"]) == (running_ranks(0, 1), 1)
    assert victim.read_bytes() == b"somebody's own"


@pytest.mark.parametrize("name", [*PLANTS, "elsewhere"])
def test_spoilt_post_mortem_folder(healthy, tmp_path, name):
    """A rank's last record would be lost, or land in a folder of somebody else's choice."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    make = link_to(elsewhere) if name == "elsewhere" else PLANTS[name].make
    make(healthy / FOLDER)
    last = encode(make_record(7))
    (healthy / "rank-7.record").write_bytes(last)
    clock = Clock(WRITTEN_AT + 1)
    reader = Reader(tmp_path, stale_after=60.0, clock=clock)
    for _ in range(3):
        states, _ = judged(reader)
        assert states == running_ranks(0, 1) | {(JOB, 7): State.CRASHED}
        clock.now += BURY_AFTER_SECONDS
    assert list(elsewhere.iterdir()) == []
    if name == "folder":
        assert [path.read_bytes() for path in (healthy / FOLDER).iterdir()] == [last]
    else:
        assert (healthy / "rank-7.record").read_bytes() == last
