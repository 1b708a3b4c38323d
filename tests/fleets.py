"""Fleets of synthetic ranks that live, work, come and go; and what a process over them costs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import msgspec

from records import make_record, total
from torchmem.model import RefType
from torchmem.wire import record as wire
from torchmem.wire.store import RankStore

MEGA = 1e6
NUM_BATCH_SHAPES = 4
"""A rank's activations depend on the shape of its batch; everything else is the same in each step."""
MOVING = (RefType.ACTIVATION, RefType.TEMPORARY)
_TICKS = os.sysconf("SC_CLK_TCK")


class Fleet:
    """Ranks of one job on this host, whose records are rewritten as training would.

    Args:
        directory: where the records lie.
        num_ranks: ranks that live from the start.
        num_modules: of each rank; 14 cells each.
    """

    def __init__(self, directory, num_ranks, num_modules):
        self._directory = directory
        self._templates = [_template(rank, num_modules) for rank in range(num_ranks)]
        self._steps = [0] * num_ranks
        self._attempts = [0] * num_ranks
        self._stores = {}
        for rank in range(num_ranks):
            self.come(rank)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for store in self._stores.values():
            store.close()

    def come(self, rank):
        """A process takes the rank: a new attempt, from step 0."""
        self._attempts[rank] += 1
        self._steps[rank] = 0
        self._stores[rank] = RankStore(self._directory, "llama-pretrain", rank)
        self.work(rank)

    def work(self, *ranks, is_final=False):
        """Each rank ends a step and writes its record; all that live, if none is named."""
        for rank in ranks or list(self._stores):
            self._steps[rank] += 1
            self._stores[rank].write(wire.encode(self._record(rank, is_final=is_final)))

    def go(self, rank, *, is_clean):
        """The rank's process ends, with or without saying so."""
        if is_clean:
            self.work(rank, is_final=True)
        self._stores.pop(rank).close()

    @contextlib.contextmanager
    def working(self, seconds=1.0):
        """All ranks that live write their records, again and again, from a thread."""
        done = threading.Event()

        def run():
            while not done.wait(seconds):
                self.work()

        worker = threading.Thread(target=run)
        worker.start()
        try:
            yield
        finally:
            done.set()
            worker.join()

    def _record(self, rank, *, is_final):
        record, devices = self._templates[rank]
        step, now = self._steps[rank], time.time()
        attempt = f"{self._attempts[rank]:08x}-0000-4000-8000-{rank:012d}"
        clock = {"step": step, "step_seconds": step * 0.25, "written_at": now, "final": is_final}
        return msgspec.structs.replace(
            record,
            identity=msgspec.structs.replace(record.identity, attempt=attempt, start_time=now - step * 0.25),
            clock=msgspec.structs.replace(record.clock, **clock),
            devices=[devices[step * (rank + 1) % NUM_BATCH_SHAPES]],
        )


def _template(rank, num_modules):
    """A rank's record, and its device for each shape of a batch."""
    record = make_record(rank, num_modules)
    (device,) = record.devices
    peak = wire.unpack_cells(device.step_peak)
    devices = []
    for shape in range(NUM_BATCH_SHAPES):
        cells = [
            cell._replace(num_bytes=cell.num_bytes + 4096 * shape * (1 + cell.module))
            if cell.reftype in MOVING
            else cell
            for cell in peak
        ]
        num_bytes = total(cells)
        devices.append(
            msgspec.structs.replace(
                device,
                step_peak=wire.pack_cells(cells),
                step_peak_bytes=num_bytes,
                peak_bytes=max(num_bytes, device.peak_bytes),
            )
        )
    return record, devices


def cpu_seconds(pid):
    """Time that a process has had of all cores so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_mb(pid):
    """Resident memory of a process, now and at its highest."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 / MEGA for name in ("VmRSS", "VmHWM"))


def folder_bytes(folder):
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


GZIP = {"Accept-Encoding": "gzip"}


def soak(fleet, sidecar, num_scrapes, *, num_ranks, advance=lambda: None):
    """Scrapes a sidecar while ranks write, crash, end and come back; returns its resident MB after each scrape.

    In each round an eighth of the ranks write; in each tenth one goes that comes back a few rounds later.
    """
    resident, away = [], []
    for scrape in range(num_scrapes):
        if scrape % 10 == 0:
            rank = scrape // 10 % num_ranks
            fleet.go(rank, is_clean=scrape % 20 == 0)
            away.append(rank)
        if scrape % 10 == 5:
            fleet.come(away.pop())
        fleet.work(*(rank for rank in range(scrape % 8, num_ranks, 8) if rank not in away))
        reply = sidecar.ask(headers=GZIP)
        assert reply.status == 200
        resident.append(resident_mb(sidecar.process.pid)[0])
        advance()
    return resident
