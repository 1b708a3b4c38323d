#!/usr/bin/env python3
"""Runs torchmem-exporter on one node of a Slurm job, and lists it for Prometheus for as long as it lives.

    srun --overlap --ntasks-per-node=1 sidecar.py --sd-dir /shared/file_sd -- --dir "$TORCHMEM_DIR" --listen 0.0.0.0:0

Once the exporter serves, ``<cluster>-<job>-<node>.json`` appears in the directory, whole or not at all, in the format
of Prometheus' file-based service discovery; it goes before the exporter does, however either ends. Port 0: a free one.

Invariants: standard library only; the exporter never outlives this process; exit status is the exporter's.

Known limits: after a SIGKILL or a node's death the file stays; epilog.sh removes it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import NoReturn

SERVING = re.compile(r"serving (https?://\S+)/metrics ")
"""What the exporter says once it listens."""
ENDINGS = (signal.SIGTERM, signal.SIGINT)
OWN_END_SECONDS = 1.0
END_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1


class StoppedError(Exception):
    """A signal asked this process to end."""


class Target:
    """The file that lists one exporter.

    Args:
        directory: what Prometheus watches.
        cluster: the Slurm cluster's name.
        job: the Slurm job's number.
        node: Slurm's name of this node.
    """

    def __init__(self, directory: Path, cluster: str, job: str, node: str) -> None:
        self.path = directory / f"{cluster}-{job}-{node}.json"
        self._labels = {"job": "torchmem", "cluster": cluster, "slurm_job_id": job}
        self._node = node

    def add(self, url: str) -> None:
        """Lists the exporter.

        Raises:
            OSError: the directory cannot be written.
        """
        address = urllib.parse.urlsplit(url)
        labels = {**self._labels, "__scheme__": address.scheme}
        text = json.dumps([{"targets": [self._reached_at(address)], "labels": labels}])
        # Its suffix keeps Prometheus, which reads *.json, from reading half a file.
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            partial.write_text(text + "\n", encoding="utf-8")
            partial.chmod(0o644)
            partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)

    def remove(self) -> None:
        """Unlists it, where it is listed."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _reached_at(self, address: urllib.parse.SplitResult) -> str:
        """Where other machines reach it: who listens on every address is reached by the node's name."""
        host = self._node if address.hostname in {"0.0.0.0", "::"} else address.hostname or ""  # noqa: S104
        return f"[{host}]:{address.port}" if ":" in host else f"{host}:{address.port}"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sd-dir", type=Path, required=True, metavar="DIR", help="directory that Prometheus watches")
    parser.add_argument(
        "--exporter", default="torchmem-exporter", metavar="COMMAND", help="what to run (default: %(default)s)"
    )
    parser.add_argument("--uid", type=int, default=os.geteuid(), help="user to run it as (default: who runs this)")
    parser.add_argument("--gid", type=int, default=os.getegid(), help="group to run it as (default: who runs this)")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="the exporter's own, after --")
    return parser.parse_args()


def from_slurm(name: str) -> str:
    """A variable that Slurm sets for steps, prologs and epilogs alike.

    Raises:
        SystemExit: it is not set, or cannot be part of a file's name.
    """
    value = os.environ.get(name, "")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", value):
        sys.exit(f"sidecar.py: {name} is {value!r}: run this in a job of Slurm")
    return value


def start(wanted: argparse.Namespace) -> subprocess.Popen[str]:
    """The exporter, as the wanted user; it is told to end when this process dies.

    Raises:
        OSError: it cannot be started.
    """
    library = ctypes.CDLL(None)
    identity = {} if wanted.uid == os.geteuid() else {"user": wanted.uid, "group": wanted.gid, "extra_groups": []}
    return subprocess.Popen(  # noqa: S603  # what the operator says
        [wanted.exporter, *wanted.flags],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        # A change of user would take the wish back, so it is made after that.
        preexec_fn=lambda: library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509  # there is one thread
        **identity,
    )


def stop(*_: object) -> NoReturn:
    """Handles the first signal that ends this process, and has further ones ignored.

    Raises:
        StoppedError: always.
    """
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)
    raise StoppedError


def relay(exporter: subprocess.Popen[str], target: Target) -> None:
    """Passes on what the exporter says until it ends, and lists it once it serves.

    Raises:
        OSError: it cannot be listed.
        StoppedError: a signal came.
    """
    for line in exporter.stderr or ():
        print(line, end="", file=sys.stderr, flush=True)
        if serving := SERVING.search(line):
            target.add(serving[1])


def end(exporter: subprocess.Popen[str]) -> int:
    """Ends the exporter; its exit status.

    Whoever ends a step of Slurm signals all of its processes, and a second signal would cut the exporter's last push
    short: it is signalled only if it does not end by itself.
    """
    for seconds, ending in ((OWN_END_SECONDS, exporter.terminate), (END_SECONDS, exporter.kill)):
        try:
            return exporter.wait(seconds)
        except subprocess.TimeoutExpired:
            ending()
    return exporter.wait()


def main() -> int:
    """Runs until the exporter ends or a signal comes; the exit status."""
    wanted = arguments()
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURMD_NODENAME")
    target = Target(wanted.sd_dir, *map(from_slurm, names))
    for number in ENDINGS:
        signal.signal(number, stop)
    try:
        exporter = start(wanted)
    except OSError as error:
        print(f"sidecar.py: {wanted.exporter}: {error.strerror}", file=sys.stderr)
        return 127
    try:
        relay(exporter, target)
    except OSError as error:
        print(f"sidecar.py: {target.path}: {error.strerror}", file=sys.stderr)
    except StoppedError:
        pass
    finally:
        target.remove()
        status = end(exporter)
    return status


if __name__ == "__main__":
    sys.exit(main())
