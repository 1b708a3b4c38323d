"""What the sidecar costs: its start, its memory, and a scrape of 8 ranks of 300 modules each.

Each round starts a sidecar over living ranks, times it to the first answered scrape, then rewrites every record before
each further scrape, so that no scrape finds anything cached. Memory is what the kernel counts as resident after the
last scrape, and the most it ever was. Prints a table, or JSON with ``--json``; exits with 1 when a full run
exceeds a limit.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import arguments, report
from fleets import GZIP, MEGA, resident_mb
from records import living, make_record
from sidecars import running
from torchmem.wire.record import decode, encode

LIMITS = {"start_seconds": 1.0, "peak_rss_mb": 60.0}


def start_seconds(directory):
    """From the start of the process to the end of its first scrape."""
    began = time.perf_counter()
    with running(directory) as sidecar:
        assert sidecar.ask().status == 200
        return time.perf_counter() - began


def scrape_seconds(sidecar, stores, records, num_scrapes, headers):
    """Times of scrapes, with all records rewritten before each; and the last answer."""
    taken = []
    for _ in range(num_scrapes):
        for store, record in zip(stores, records, strict=True):
            store.write(encode(record))
        began = time.perf_counter()
        reply = sidecar.ask(headers=headers)
        taken.append(time.perf_counter() - began)
    return taken, reply


def wire_seconds(record):
    """Time to encode and to decode one record."""
    began = time.perf_counter()
    data = encode(record)
    encoded = time.perf_counter()
    decode(data)
    return encoded - began, time.perf_counter() - encoded


def measure(num_ranks, num_modules, num_rounds, num_scrapes):
    """All figures, by name."""
    records = [make_record(i, num_modules, written_at=time.time()) for i in range(num_ranks)]
    with tempfile.TemporaryDirectory() as folder, living(Path(folder) / "records", *records) as stores:
        directory = Path(folder) / "records"
        starts = [start_seconds(directory) for _ in range(num_rounds)]
        with running(directory) as sidecar:
            plain, reply = scrape_seconds(sidecar, stores, records, num_scrapes, {})
            packed, small = scrape_seconds(sidecar, stores, records, num_scrapes, GZIP)
            now, peak = resident_mb(sidecar.process.pid)
    encodings, decodings = zip(*(wire_seconds(records[0]) for _ in range(20)), strict=True)
    return {
        "num_ranks": num_ranks,
        "num_modules": num_modules,
        "num_series": sum(not line.startswith("#") for line in reply.text.splitlines()),
        "start_seconds": statistics.median(starts),
        "start_seconds_worst": max(starts),
        "scrape_seconds": statistics.median(plain),
        "scrape_seconds_gzip": statistics.median(packed),
        "body_mb": len(reply.body) / MEGA,
        "body_mb_gzip": len(small.body) / MEGA,
        "rss_mb": now,
        "peak_rss_mb": peak,
        "record_mb": len(encode(records[0])) / MEGA,
        "record_encode_seconds": statistics.median(encodings),
        "record_decode_seconds": statistics.median(decodings),
        "num_cores": os.cpu_count(),
    }


def main():
    parser = arguments(__doc__, short="fewer rounds")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--modules", type=int, default=300)
    flags = parser.parse_args()
    figures = measure(flags.ranks, flags.modules, *((3, 5) if flags.short else (10, 20)))
    return report(figures, flags, at_most=LIMITS)


if __name__ == "__main__":
    raise SystemExit(main())
