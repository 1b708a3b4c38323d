"""A real Slurm of one node, run by whoever runs the tests: needs no root, no installation and no fixed port.

Known limits: jobs run as the same user; CPU cores are not bound to tasks.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from backends import TOOLS, find_program, free_address, running, wait_until

NEEDED = ("slurmctld-wlm", "slurmd-wlm", "slurmstepd-wlm", "munged")
NEEDED += ("srun", "sbatch", "scancel", "scontrol", "squeue", "sinfo")
NUM_CPUS = 2
COMMAND_SECONDS = 30.0
JOB_SECONDS = 200.0
MAX_FIRST_JOB = 10_000_000
"""What jobs name after their number, as in /dev/shm, would meet that of other Slurms if all of them began with 1."""


@dataclass
class Cluster:
    """A running Slurm.

    Attributes:
        folder: where its files lie.
        node: its node's name.
        environment: what its commands need.
    """

    folder: Path
    node: str
    environment: dict

    def run(self, *command, **variables):
        """What a command of Slurm prints."""
        environment = {**self.environment, **variables}
        line = [find_program(command[0]), *map(str, command[1:])]
        done = subprocess.run(
            line, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, *arguments, **variables):
        """Submits a batch script; the job's number."""
        return self.run("sbatch", "--parsable", *arguments, **variables)

    def state(self, job):
        """The job's state, such as RUNNING."""
        return self.run("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")

    def wait_for_end(self, job):
        """The job's last state, once nothing of it is left."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return wait_until(lambda: (state := self.state(job)) in ends and state, f"job {job}", JOB_SECONDS)

    def node_state(self):
        """The node's state, such as idle."""
        return self.run("sinfo", "--noheader", "--format=%T")

    def processes(self, word=""):
        """Everything that runs under this Slurm: process id -> command line, where that has a word in it."""
        mark = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if line and word in line:  # a zombie has none
                        found[int(folder.name)] = line
        return found


def plugins():
    """The folder of Slurm's plugins that belong to the programs found."""
    root = Path(find_program("slurmctld-wlm")).parent
    if root == TOOLS:
        root = TOOLS.parent.parent / "packages" / "slurmd"
        return next((root / "usr" / "lib").glob("*/slurm-wlm"))
    return next(Path("/usr/lib").glob("*/slurm-wlm"))


def configuration(folder, node, settings):
    """The text of slurm.conf."""
    user = getpass.getuser()
    own = {
        "ClusterName": "test",
        "SlurmctldHost": f"{node}(127.0.0.1)",
        "SlurmctldPort": free_address().rpartition(":")[2],
        "SlurmdPort": free_address().rpartition(":")[2],
        "SlurmUser": user,
        "SlurmdUser": user,
        "AuthType": "auth/munge",
        "CryptoType": "crypto/munge",
        "AuthInfo": f"socket={folder / 'munge' / 'socket'}",
        "PluginDir": plugins(),
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.pid",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "MpiDefault": "none",
        "ReturnToService": "2",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SlurmdParameters": "config_overrides",
        "CommunicationParameters": "NoInAddrAny,NoCtldInAddrAny",
        "KillWait": "20",
        "FirstJobId": 1 + secrets.randbelow(MAX_FIRST_JOB),
    }
    lines = [f"{name}={value}" for name, value in {**own, **settings}.items()]
    lines.append(f"NodeName={node} NodeAddr=127.0.0.1 CPUs={NUM_CPUS} RealMemory=1000 State=UNKNOWN")
    lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def cluster(folder, **settings):
    """A Slurm with one idle node; whatever its jobs left is ended with it.

    Args:
        folder: for its files.
        settings: further lines of slurm.conf.
    """
    node = socket.gethostname().partition(".")[0]
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(mode=0o700)
    file = folder / "slurm.conf"
    file.write_text(configuration(folder, node, settings))
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    path = os.pathsep.join([str(Path(sys.executable).parent), str(TOOLS), os.environ["PATH"]])
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHMEM_"))}
    environment = {**outer, "SLURM_CONF": str(file), "PATH": path}
    found = Cluster(folder, node, environment)
    munged = [find_program("munged"), "--foreground", "--force"]
    munged += [f"--{what}-file={folder / 'munge' / what}" for what in ("key", "pid", "seed", "log")]
    munged.append(f"--socket={folder / 'munge' / 'socket'}")
    slurmd = [find_program("slurmd-wlm"), "-D", "-d", find_program("slurmstepd-wlm")]
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(running(munged, folder / "munged.log", environment))
        wait_until((folder / "munge" / "socket").exists, "the start of munged")
        enter(running([find_program("slurmctld-wlm"), "-D", "-c"], folder / "slurmctld.log", environment))
        enter(running(slurmd, folder / "slurmd.log", environment))
        stack.callback(_end_jobs, found)
        wait_until(lambda: _is_idle(found), "the start of Slurm")
        yield found


def _is_idle(found):
    try:
        return found.node_state() == "idle"
    except AssertionError:  # it does not answer yet
        return False


def _end_jobs(found):
    """Cancels all jobs; what does not go in time is killed by its process id."""
    with contextlib.suppress(AssertionError, TimeoutError):
        found.run("scancel", "--user", getpass.getuser())
        wait_until(lambda: not found.run("squeue", "--noheader"), "the end of the jobs")
    for process, line in found.processes().items():
        if not any(daemon in line for daemon in ("munged", "slurmctld", "slurmd-wlm")):
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)


def targets(directory):
    """What the files of a service discovery list: (address, sorted labels)."""
    groups = []
    for path in sorted(directory.glob("*.json")):
        with contextlib.suppress(FileNotFoundError):  # unlisted since
            groups += json.loads(path.read_text())
    return [(target, group["labels"]) for group in groups for target in group["targets"]]
