"""The sidecar as tests meet it: its routes in this process, and as a process of its own over HTTP."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from torchmem_exporter.budget import Budget, Level
from torchmem_exporter.exposition import Exposition
from torchmem_exporter.reading.reader import Reader
from torchmem_exporter.serving.routes import Request, Routes

DEADLINE_SECONDS = 20.0


class Clock:
    """A clock that only a test moves."""

    def __init__(self, now):
        self.now = now

    def __call__(self):
        return self.now


@dataclass
class Reply:
    status: int
    headers: dict
    body: bytes

    @property
    def text(self):
        is_packed = self.headers.get("Content-Encoding") == "gzip"
        return (gzip.decompress(self.body) if is_packed else self.body).decode()


def application(directory, clock=time.time, stale_after=60.0):
    """The routes over a directory; a scrape takes exactly a quarter of a second by its timer."""
    ticks = iter(range(1_000_000))
    reader = Reader(directory, stale_after=stale_after, clock=clock)
    return Routes(Exposition(reader, Budget(Level.FULL), lambda: next(ticks) / 4))


def ask(app, path="/metrics", method="GET", **headers):
    """One request to routes in this process; headers as in ``accept_encoding="gzip"``."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    path, _, query = path.partition("?")
    response = app.answer(Request(method, path, named, query))
    return Reply(int(response.status), dict(response.all_headers), b"".join(response.pieces))


def series(text):
    """All series of a scrape: (name, sorted labels) -> value; fails on a series that is there twice."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def values(text, name, label):
    """The values of one metric by one label; fails where two series share it."""
    found = [(dict(labels)[label], value) for (metric, labels), value in series(text).items() if metric == name]
    assert len(dict(found)) == len(found)
    return dict(found)


def states(text):
    """The state of each rank."""
    return {
        dict(labels)["rank"]: dict(labels)["state"]
        for (name, labels), value in series(text).items()
        if name == "torchmem_rank_state" and value == 1
    }


class Process:
    """A running sidecar."""

    def __init__(self, process, errors, port, first_line):
        self.process = process
        self.errors = errors
        self.port = port
        self.first_line = first_line

    def ask(self, path="/metrics", method="GET", headers=None, tls=None):
        """One request over HTTP, and over TLS where a context is given."""
        kind = http.client.HTTPConnection if tls is None else http.client.HTTPSConnection
        options = {} if tls is None else {"context": tls}
        connection = kind("127.0.0.1", self.port, timeout=DEADLINE_SECONDS, **options)
        try:
            connection.request(method, path, headers=headers or {})
            response = connection.getresponse()
            return Reply(response.status, dict(response.headers), response.read())
        finally:
            connection.close()

    def end(self, ending=signal.SIGTERM):
        """Ends it by a signal; returns its exit status and the seconds that took."""
        start = time.monotonic()
        self.process.send_signal(ending)
        status = self.process.wait(DEADLINE_SECONDS)
        return status, time.monotonic() - start


def command(*arguments, program=None):
    """The command line of a sidecar; a program of its own is Python's text."""
    how = ["-m", "torchmem_exporter"] if program is None else ["-c", program]
    return [sys.executable, *how, *arguments]


@contextlib.contextmanager
def running(directory, *arguments, listen="127.0.0.1:0", program=None):
    """A sidecar in a process of its own, on a free port; ended by its pid whatever happens; see ``command``."""
    read_end, write_end = os.pipe()
    line = command("--dir", str(directory), "--listen", listen, *arguments, program=program)
    process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=write_end)
    os.close(write_end)
    try:
        with os.fdopen(read_end, encoding="utf-8") as errors:
            if not select.select([errors], [], [], DEADLINE_SECONDS)[0]:
                raise TimeoutError("the sidecar said nothing")
            first_line = errors.readline()
            match = re.search(r"https?://\S+:(\d+)/metrics", first_line)
            assert match, first_line
            yield Process(process, errors, int(match.group(1)), first_line)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(DEADLINE_SECONDS)
