"""The sidecar as tests meet it: in this process by WSGI, and as a process of its own over HTTP."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import io
import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from torchmem_exporter import server
from torchmem_exporter.reader import Reader

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
    """An application over a directory; a scrape takes exactly a quarter of a second by its timer."""
    ticks = iter(range(1_000_000))
    return server.application(Reader(directory, stale_after=stale_after, clock=clock), lambda: next(ticks) / 4)


def ask(app, path="/metrics", method="GET", **headers):
    """One request to an application in this process; headers as in ``accept_encoding="gzip"``."""
    got = []
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "wsgi.input": io.BytesIO()}
    environ |= {f"HTTP_{name.upper()}": value for name, value in headers.items()}
    body = b"".join(app(environ, lambda status, names: got.append((status, names))))
    ((status, names),) = got
    return Reply(int(status.split()[0]), dict(names), body)


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

    def ask(self, path="/metrics", method="GET", headers=None):
        """One request over HTTP."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_SECONDS)
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


def command(*arguments):
    """The command line of a sidecar."""
    return [sys.executable, "-m", "torchmem_exporter", *arguments]


@contextlib.contextmanager
def running(directory, *arguments, listen="127.0.0.1:0"):
    """A sidecar in a process of its own, on a free port; ended by its pid whatever happens."""
    read_end, write_end = os.pipe()
    line = command("--dir", str(directory), "--listen", listen, *arguments)
    process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=write_end)
    os.close(write_end)
    try:
        with os.fdopen(read_end, encoding="utf-8") as errors:
            if not select.select([errors], [], [], DEADLINE_SECONDS)[0]:
                raise TimeoutError("the sidecar said nothing")
            first_line = errors.readline()
            match = re.search(r"http://\S+:(\d+)/metrics", first_line)
            assert match, first_line
            yield Process(process, errors, int(match.group(1)), first_line)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(DEADLINE_SECONDS)
