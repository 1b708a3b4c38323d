"""What somebody might plant in a directory of records, and the reason for which each must be refused."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
import time
import zlib
from collections import Counter
from dataclasses import dataclass

import msgspec
import pytest

from records import make_record
from torchmem.wire.record import HEADER, MAGIC, MAJOR, MAX_PAYLOAD_BYTES, MINOR, encode
from torchmem_exporter.reading.lifecycle import State

JOB = "llama-pretrain"
SCAN_SECONDS = 1.0
"""What a scan may take; of this thread's own time, since the machine may have others to serve."""
BLOCKED_SECONDS = 30.0
"""A scan that takes so long by the wall's clock waits for something."""
RANK = 7
"""Of the record that plants are made from."""
GOOD = encode(make_record(RANK))


@dataclass(frozen=True)
class Plant:
    """Something in place of a record."""

    reason: str
    make: object
    """A function of the path."""


def fifo(path):
    os.mkfifo(path)


def folder(path):
    path.mkdir()


def listening_socket(path):
    folder_fd = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{folder_fd}/{path.name}")  # the path itself may be too long for a socket
    os.close(folder_fd)


def device(path):
    """The kernel's own source of endless zeros."""
    try:
        os.mknod(path, 0o644 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root, and not everywhere, can make devices")


def link_to(target):
    return lambda path: path.symlink_to(target)


def hard_link(path):
    other = path.with_name(f"other name of {path.name}")
    other.write_bytes(GOOD)
    path.hardlink_to(other)


def foreign(path):
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    path.write_bytes(GOOD)
    os.chown(path, 54321, -1)


def sparse(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


def content(data):
    return lambda path: path.write_bytes(data)


def changed(offset, data):
    """A good record with other bytes from an offset on."""
    return content(GOOD[:offset] + data + GOOD[offset + len(data) :])


def framed(payload):
    """A payload in a header that is right about it."""
    return HEADER.pack(MAGIC, MAJOR, MINOR, zlib.crc32(payload), len(payload)) + payload


def with_field(name, raw):
    """A good record with a field given as msgpack."""
    fields = msgspec.msgpack.decode(GOOD[HEADER.size :])
    return framed(msgspec.msgpack.encode({**fields, name: msgspec.Raw(raw)}))


def _filled(name, item):
    """A record with a list, in one of its fields, as long as fits."""
    number = (MAX_PAYLOAD_BYTES - len(GOOD)) // len(item)
    return with_field(name, b"\xdd" + number.to_bytes(4, "big") + item * number)


def _numbered(name, number):
    """A record with a map, in one of its fields, of so many keys."""
    return with_field(name, msgspec.msgpack.encode({f"{key:x}": 1 for key in range(number)}))


HUGE = {
    "8 million modules": lambda: _filled("modules", b"\xa0"),
    "8 million reftypes": lambda: _filled("reftypes", b"\xa0"),
    "700,000 labelers": lambda: _filled("labelers", b"\x82\xa4name\xa0\xa2up\xc3"),
    "a million counters": lambda: _numbered("counters", 1_000_000),
    "a million keys of an unknown field": lambda: _numbered("later", 1_000_000),
    "8 million maps of an unknown field": lambda: _filled("later", b"\x80"),
}
"""Records of the greatest size, full of the smallest things."""

PLANTS = {
    "fifo": Plant("not_regular", fifo),
    "folder": Plant("not_regular", folder),
    "socket": Plant("not_regular", listening_socket),
    "device": Plant("not_regular", device),
    "symlink to a rank": Plant("symlink", link_to("rank-0.record")),
    "symlink out": Plant("symlink", link_to("/etc/hostname")),
    "symlink to a device": Plant("symlink", link_to("/dev/zero")),
    "symlink to itself": Plant("symlink", lambda path: path.symlink_to(path.name)),
    "dangling symlink": Plant("symlink", link_to("/nowhere")),
    "hard link": Plant("hard_link", hard_link),
    "foreign uid": Plant("uid", foreign),
    "sparse terabyte": Plant("oversize", sparse),
    "header that promises too much": Plant("oversize", content(HEADER.pack(MAGIC, MAJOR, 0, 0, 1 << 60))),
    "empty": Plant("truncated", content(b"")),
    "cut": Plant("truncated", content(GOOD[:-1])),
    "longer than said": Plant("truncated", content(GOOD + b"x")),
    "garbage": Plant("magic", content(b"\xff" * 4096)),
    "foreign major": Plant("version", changed(8, struct.pack("<H", MAJOR + 1))),
    "flipped bytes": Plant("checksum", changed(200, b"\x00\x01\x02\x03")),
    "no record inside": Plant("schema", content(framed(b"\xc0"))),
    "another rank's": Plant("identity", content(encode(make_record(3)))),
}


def judged(reader):
    """A scrape's scan, which must be quick: the states by (job, rank), and the rejections of this scan by reason.

    Others use the machine too: one that was slow may be tried again.
    """
    for is_last in (False, False, True):
        began, began_at = time.thread_time(), time.monotonic()
        snapshot = reader.scan("prometheus")
        taken = time.thread_time() - began
        assert time.monotonic() - began_at < BLOCKED_SECONDS
        if taken < SCAN_SECONDS or is_last:
            break
    assert taken < SCAN_SECONDS
    states = {(rank.record.identity.train_job, rank.record.identity.rank): rank.state for rank in snapshot.ranks}
    return states, Counter(rejection.reason for rejection in snapshot.rejections)


def running_ranks(*numbers, job=JOB):
    """The states of healthy ranks."""
    return {(job, number): State.RUNNING for number in numbers}


_SPOILER = """
import itertools, os, pathlib, sys, time
path = pathlib.Path(sys.argv[1])
other = path.with_name(".spoilt")
good = path.read_bytes()

def fifo():
    os.mkfifo(other)

def link():
    other.symlink_to("/dev/zero")

def sparse():
    with other.open("wb") as file:
        file.truncate(1 << 40)

def cut():
    other.write_bytes(good[: len(good) // 2])

def whole():
    other.write_bytes(good)

print("spoiling", flush=True)
for number, make in enumerate(itertools.cycle([fifo, link, sparse, cut, whole])):
    make()
    other.rename(path)
    if number % 7 == 0:  # of each kind in turn: who shares a core with this meets only those at which it is let in
        time.sleep(0.001)
"""


@contextlib.contextmanager
def spoiling(path):
    """A process that replaces a file by all sorts of others, as fast as it can."""
    line = [sys.executable, "-c", _SPOILER, str(path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        try:
            assert process.stdout.readline() == b"spoiling\n"
            yield
            assert process.poll() is None
        finally:
            process.kill()


def spoil_locks(directory):
    """Puts all sorts of things in place of the locks of ranks 101 to 104, whose records are good; returns the ranks."""
    kinds = (fifo, folder, link_to("rank-0.lock"), link_to("/dev/zero"))
    for rank, make in enumerate(kinds, start=101):
        (directory / f"rank-{rank}.record").write_bytes(encode(make_record(rank)))
        make(directory / f"rank-{rank}.lock")
    return range(101, 101 + len(kinds))


def remove(path):
    """Removes a plant, whatever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
