"""What the sidecar's server bears: scrapes at a fixed rate and health probes, among slow clients.

A sidecar serves 8 ranks of some 250 series each, which rewrite their records every second. Other processes ask it: one
for scrapes at the rate whatever the answers take (each counted from when it was due), one for ``/healthz``, and one
holds slow clients: half of them send their headers byte by byte, the others do not read what they have asked for; those
that are cut off come again. A scrape is lost that is not answered whole with status 200 within ten seconds.
``machine_late`` is how late the prober itself got to run: what a busy machine adds to all other times.

Prints a table, or JSON with ``--json``; exits with 1 when a full run exceeds a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import arguments, report
from fleets import cpu_seconds
from records import living, make_record
from sidecars import running, series
from torchmem.wire.record import encode

LIMITS = {"healthz_ms_p99": 100.0, "num_lost": 0.0}
NUM_RANKS = 8
NUM_MODULES = 15
PROBES_PER_SECOND = 20
ANSWER_SECONDS = 10.0
SETTLE_SECONDS = 1.0


class Client:
    """Asks for one path at a fixed rate, over as many kept connections as that takes."""

    def __init__(self, port, path, headers=b""):
        self.port = port
        self.request = b"GET %s HTTP/1.1\r\nHost: a\r\n%s\r\n" % (path, headers)
        self.idle = []
        self.seconds = []
        self.lateness = []
        self.problems = []

    async def run(self, rate, seconds):
        start = time.perf_counter() + 0.1
        tasks = []
        for number in range(round(rate * seconds)):
            due = start + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self.lateness.append(max(0.0, time.perf_counter() - due))
            tasks.append(asyncio.ensure_future(self.ask(due)))
        await asyncio.gather(*tasks)
        for _, writer in self.idle:
            writer.close()

    async def ask(self, due):
        try:
            reader, writer = self.idle.pop() if self.idle else await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(self.request)
            await asyncio.wait_for(read_answer(reader), ANSWER_SECONDS)
        except (OSError, EOFError, ValueError, asyncio.TimeoutError) as error:
            self.problems.append(repr(error))
        else:
            self.seconds.append(time.perf_counter() - due)
            self.idle.append((reader, writer))


async def read_answer(reader):
    """Reads one answer whole."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200 "):
        raise ValueError(head[:40])
    await reader.readexactly(int(head.partition(b"content-length:")[2].partition(b"\r\n")[0]))


def ask_steadily(port, path, headers, rate, seconds, results):
    """A process that asks; puts the seconds that each answer took, how late it asked, and the problems."""
    client = Client(port, path, headers)
    asyncio.run(client.run(rate, seconds))
    results.put((client.seconds, client.lateness, client.problems))


class Slow:
    """A client that sends slowly, or that does not read."""

    def __init__(self, port, is_deaf):
        self.port = port
        self.is_deaf = is_deaf
        self.num_connections = 0
        self.connect()

    def connect(self):
        self.num_connections += 1
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect(("127.0.0.1", self.port))
        self.socket.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n" + b"\r\n" * self.is_deaf)

    def go_on(self):
        try:
            if not self.is_deaf:
                self.socket.sendall(b"x")
            elif self.socket.recv(1, socket.MSG_PEEK) == b"" or self.socket.getsockopt(
                socket.SOL_SOCKET, socket.SO_ERROR
            ):
                raise ConnectionResetError
        except OSError:
            self.socket.close()
            with contextlib.suppress(OSError):
                self.connect()


def be_slow(port, number, seconds, results):
    """A process of slow clients; puts how often they connected."""
    clients = [Slow(port, is_deaf=i % 2 == 1) for i in range(number)]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for client in clients:
            client.go_on()
        time.sleep(0.2)
    results.put(sum(client.num_connections for client in clients))


def rewrite(stores, seconds):
    """What the ranks do meanwhile."""
    deadline = time.monotonic() + seconds
    step = 100
    while time.monotonic() < deadline:
        step += 1
        for rank, store in enumerate(stores):
            store.write(encode(make_record(rank, NUM_MODULES, step=step, written_at=time.time())))
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))


def spread(name, seconds):
    """Percentiles in milliseconds."""
    cuts = statistics.quantiles(seconds, n=1000, method="inclusive")
    return {
        f"{name}_ms_median": cuts[499] * 1e3,
        f"{name}_ms_p99": cuts[989] * 1e3,
        f"{name}_ms_worst": max(seconds) * 1e3,
    }


def measure(rate, num_slow, seconds):
    """All figures, by name."""
    records = [make_record(i, NUM_MODULES, written_at=time.time()) for i in range(NUM_RANKS)]
    spawn = multiprocessing.get_context("spawn")
    scrapes, probes, slow = spawn.Queue(), spawn.Queue(), spawn.Queue()
    with (
        tempfile.TemporaryDirectory() as folder,
        living(Path(folder) / "records", *records) as stores,
        running(Path(folder) / "records") as sidecar,
    ):
        port = sidecar.port
        num_series = len(series(sidecar.ask().text))
        long = seconds + 2 * SETTLE_SECONDS
        packed = b"Accept-Encoding: gzip\r\n"
        processes = [
            spawn.Process(target=be_slow, args=(port, num_slow, long, slow)),
            spawn.Process(target=ask_steadily, args=(port, b"/metrics", packed, rate, seconds, scrapes)),
            spawn.Process(target=ask_steadily, args=(port, b"/healthz", b"", PROBES_PER_SECOND, seconds, probes)),
        ]
        processes[0].start()
        time.sleep(SETTLE_SECONDS)
        used, began = cpu_seconds(sidecar.process.pid), time.monotonic()
        for process in processes[1:]:
            process.start()
        rewrite(stores, seconds)
        taken, _, lost = scrapes.get(timeout=60)
        probed, lateness, unanswered = probes.get(timeout=60)
        used, lasted = cpu_seconds(sidecar.process.pid) - used, time.monotonic() - began
        num_slow_connections = slow.get(timeout=60)
        for process in processes:
            process.join()
    for problem in sorted({*lost, *unanswered}):
        print(problem, file=sys.stderr)
    return {
        "rate": rate,
        "seconds": seconds,
        "num_slow": num_slow,
        "num_slow_connections": num_slow_connections,
        "num_series": num_series,
        "num_scrapes": len(taken) + len(lost),
        "num_lost": len(lost) + len(unanswered),
        **spread("scrape", taken),
        **spread("healthz", probed),
        **spread("machine_late", lateness),
        "cpu_share": used / lasted,
        "num_cores": os.cpu_count(),
    }


def main():
    parser = arguments(__doc__, short="less long")
    parser.add_argument("--rate", type=int, default=200, help="scrapes a second")
    parser.add_argument("--slow", type=int, default=50, help="slow clients")
    flags = parser.parse_args()
    return report(measure(flags.rate, flags.slow, 6 if flags.short else 30), flags, at_most=LIMITS)


if __name__ == "__main__":
    raise SystemExit(main())
