"""A running sidecar over a directory that is spoilt in every way at once: no scrape is lost, none is late."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from hostile import HUGE, JOB, PLANTS, RANK, framed, remove, spoil_locks, spoiling
from records import living, make_device, make_record, make_ring
from sidecars import running, states, values
from torchmem.wire.record import HEADER, encode

NUM_HEALTHY = 4
SCRAPE_SECONDS = 1.0
NUM_SCRAPES = 30
OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0"}


@pytest.fixture
def sidecar(tmp_path):
    """A sidecar over four ranks that live."""
    ranks = [make_record(number, 20, written_at=time.time()) for number in range(NUM_HEALTHY)]
    with living(tmp_path, *ranks), running(tmp_path) as sidecar:
        yield sidecar


def scrape(sidecar, headers=None):
    """The text of a scrape, the states of the healthy ranks in it, and the seconds it took."""
    began = time.monotonic()
    reply = sidecar.ask(headers=headers)
    seconds = time.monotonic() - began
    assert reply.status == 200
    healthy = {rank: state for rank, state in states(reply.text).items() if int(rank) < NUM_HEALTHY}
    assert healthy == {str(number): "running" for number in range(NUM_HEALTHY)}
    return reply.text, seconds


def refusals(text):
    """Rejections so far, by reason."""
    counted = values(text, "torchmem_snapshot_errors_total", "reason")
    return Counter({reason: int(number) for reason, number in counted.items() if number})


@pytest.mark.slow
def test_every_fault_at_once(sidecar, tmp_path):
    """Whoever may write into the directory could blind the operator to the ranks that are well."""
    job = tmp_path / JOB
    for number, plant in enumerate(PLANTS.values(), start=200):
        plant.make(job / f"rank-{number}.record")
    spoil_locks(job)
    (job / b"rank-\xff.record".decode(errors="surrogateescape")).write_bytes(b"")
    (tmp_path / b"job-\xff".decode(errors="surrogateescape")).symlink_to(JOB)
    wanted = Counter(plant.reason for plant in PLANTS.values()) + Counter(symlink=1)
    path = job / f"rank-{RANK}.record"
    path.write_bytes(encode(make_record(RANK)))
    taken = []
    with spoiling(path):
        for _ in range(NUM_SCRAPES):
            text, seconds = scrape(sidecar)
            taken.append(seconds)
        assert [sidecar.ask(page).status for page in ("/", "/healthz", "/readyz")] == [200, 200, 200]
    assert sorted(taken)[-2] < SCRAPE_SECONDS, taken  # one may have met this machine's other business
    remove(path)
    before, after = (refusals(scrape(sidecar)[0]) for _ in range(2))
    assert after - before == wanted
    assert all(number >= NUM_SCRAPES * wanted[reason] for reason, number in refusals(text).items())
    assert sidecar.end()[0] == 0
    said = sidecar.errors.read()
    assert "level=error" not in said
    assert "Traceback" not in said


def test_forged_records_never_break_a_scrape(sidecar, tmp_path):
    """A record that parses, but holds what no process could have written, would make the text unreadable for all."""
    good = encode(make_record(200, 2, ring=make_ring(1, make_device())))[HEADER.size :]
    for position, byte in enumerate(good):
        forged = good[:position] + bytes([byte ^ 0x81]) + good[position + 1 :]
        (tmp_path / f"job-{position}").mkdir()
        (tmp_path / f"job-{position}" / "rank-200.record").write_bytes(framed(forged))
    text, _ = scrape(sidecar, OPENMETRICS)
    assert len(list(parse_openmetrics(text))) > 10
    assert sum(refusals(scrape(sidecar)[0]).values()) > len(good) / 2
    assert sidecar.ask("/").status == 200


@pytest.mark.parametrize("name", HUGE)
def test_huge_record_delays_no_scrape(sidecar, tmp_path, name):
    """One rank's record of the greatest size would cost the others their scrape."""
    scrape(sidecar)
    (tmp_path / JOB / f"rank-{RANK}.record").write_bytes(HUGE[name]())
    taken = [scrape(sidecar)[1] for _ in range(3)]
    assert sorted(taken)[-2] < SCRAPE_SECONDS, taken
