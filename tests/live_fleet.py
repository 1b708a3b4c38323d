"""A small fleet that lives, with history in a real Prometheus: what dashboards are looked at with.

- ``shown``: two real ranks of ``jobs/shown.py`` on gloo: FSDP2, checkpoints, held against a real forecast.
- ``llama-70b``: four ranks on GPUs, whose records a thread writes through the library as their publishers would; a
  fifth has crashed, and a part of torchmem is off on one. No GPU is needed.
- garbage, in the place of a record.

One real sidecar tells of them, and pushes by OTLP too; Prometheus scrapes and judges every two seconds by the
generated rules, which hold for a second only. All is well until ``go_wrong``: then a rank of either job leaks.
"""

from __future__ import annotations

import array
import contextlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import msgspec

import backends
import otlp_receivers
import records
import sidecars
import watched
from generator.catalogue import alerts
from generator.recordings import recordings
from generator.render import alerts_yaml, rules_yaml
from generator.settings import DEFAULTS
from torchmem.wire import record as wire

SCRIPT = Path(__file__).resolve().parent / "jobs" / "shown.py"
REAL_JOB, GPU_JOB = "shown", "llama-70b"
JOBS = (REAL_JOB, GPU_JOB)
NUM_REAL, NUM_GPUS = 2, 4
CRASHED_RANK, LEAKING_GPU = 4, 3
FIRST_STEP, STEPS_A_SECOND = 700, 16
MOST_LEAKED_STEPS = 800
"""After which the GPU would be full: 16 MiB a step."""
GIB = 1 << 30
SCRAPE_INTERVAL = "2s"
"""And its timeout: a busy machine may take more than a second to answer."""
FORECAST_SECONDS, LEARN_SECONDS, TELL_SECONDS = 120.0, 240.0, 240.0

LEARNED = "count by (train_job) (torchmem_memory_baseline_bytes and torchmem_memory_drift_ratio)"
SAVED = 'count(torchmem_checkpoint_memory_peak_bytes{train_job="shown"})'
TOLD = (
    "count by (train_job) (count by (train_job) (last_over_time(torchmem_memory_exhaustion_timestamp_seconds[10m]))"
    " and on (train_job) last_over_time(torchmem_module_memory_excess_bytes[10m]))"
)
FIRING = 'count(ALERTS{alertstate="firing",train_job=~".+"})'


@dataclass
class Fleet:
    """The running fleet.

    Attributes:
        server: Prometheus; ``url`` is its address.
        sidecar: see ``sidecars.Process``.
        gpus: the writer of the GPU job's records.
        folder: where the real job looks for its fault.
        began: when, by the monotonic clock.
    """

    server: backends.Server
    sidecar: sidecars.Process
    gpus: GpuJob
    folder: Path
    began: float

    @property
    def url(self):
        return self.server.url

    @property
    def minutes(self):
        """How far back it began."""
        return round((time.monotonic() - self.began) / 60, 1)

    def wait_until_learned(self):
        """Waits until every rank has a baseline and a checkpoint was saved and loaded."""
        ranks = {REAL_JOB: NUM_REAL, GPU_JOB: NUM_GPUS}
        backends.wait_until(lambda: self._by_job(LEARNED) == ranks, "learning the baselines", LEARN_SECONDS, 1)
        backends.wait_until(lambda: self.server.value(SAVED) == 2 * NUM_REAL, "a checkpoint", LEARN_SECONDS, 1)

    def go_wrong(self):
        """Lets a rank of either job leak from now on."""
        (self.folder / "fault").touch()
        self.gpus.is_leaking = True

    def wait_until_told(self):
        """Waits until the leaks have growers, an end that is predicted, and alerts that fire."""
        backends.wait_until(lambda: set(self._by_job(TOLD)) == set(JOBS), "telling the leaks", TELL_SECONDS, 1)
        backends.wait_until(lambda: self.server.value(FIRING), "an alert", TELL_SECONDS, 1)

    def _by_job(self, query):
        return {dict(labels)["train_job"]: value for (_, labels), value in self.server.query(query).items()}


class GpuJob:
    """Writes the records of ranks on GPUs, each second."""

    def __init__(self, directory):
        self.is_leaking = False
        self._leaks_from = None
        self._ended = threading.Event()
        self._directory = directory
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._write_all)

    def __enter__(self):
        records.leave(self._directory, gpu_record(CRASHED_RANK, FIRST_STEP))
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _write_all(self):
        first = [gpu_record(rank, FIRST_STEP) for rank in range(NUM_GPUS)]
        with records.living(self._directory, *first) as stores:
            while not self._ended.wait(1.0):
                step = FIRST_STEP + int(STEPS_A_SECOND * (time.monotonic() - self._began))
                if self.is_leaking and self._leaks_from is None:
                    self._leaks_from = step
                for rank, store in enumerate(stores):
                    is_leaking = rank == LEAKING_GPU and self._leaks_from is not None
                    leaks_from = max(self._leaks_from, step - MOST_LEAKED_STEPS) if is_leaking else None
                    store.write(wire.encode(gpu_record(rank, step, leaks_from)))


def gpu_record(rank, step, leaks_from=None):
    """The record of a rank on a GPU of 80 GiB, now; see ``watched.trained``."""
    made = watched.trained(rank, step, leaks_from=leaks_from)
    (device,) = made.devices
    peak = device.step_peak_bytes
    unnamed = GIB + rank * GIB // 16
    held = device.usage_bytes + unnamed
    allocator = wire.Allocator(
        allocated_bytes=held,
        active_bytes=held + GIB // 4,
        reserved_bytes=peak + 6 * GIB,
        inactive_split_bytes=3 * GIB,
        num_retries=(step - FIRST_STEP) // 200 if rank == LEAKING_GPU else 0,
    )
    device = msgspec.structs.replace(
        device,
        allocator=allocator,
        unattributed_bytes=unnamed,
        other_bytes=GIB,
        forecast_bytes=60 * GIB,
        checkpoint_peaks={"save": peak + 2 * GIB, "load": device.usage_bytes + GIB},
    )
    identity = msgspec.structs.replace(
        made.identity, train_job=GPU_JOB, world_size=NUM_GPUS + 1, host=f"gpu-node-{rank // 2}", start_time=time.time()
    )
    seconds = step / STEPS_A_SECOND
    clock = msgspec.structs.replace(made.clock, step_seconds=seconds, tracker_seconds=0.006 * seconds)
    labelers = [wire.Labeler(name=name, up=True) for name in ("modules", "optimizer", "recompute")]
    labelers.append(wire.Labeler(name="fsdp2", up=rank > 0, reason="" if rank else "no such hook"))
    changes = {"devices": [device], "identity": identity, "clock": clock, "labelers": labelers}
    return msgspec.structs.replace(made, ring=paced(made.ring), **changes)


def paced(ring):
    """A ring whose last step has just ended, and whose steps follow each other at the job's pace."""
    now, num_steps = time.time(), len(ring.steps) // 8
    ended_at = array.array("d", [now - back / STEPS_A_SECOND for back in reversed(range(num_steps))])
    return msgspec.structs.replace(ring, ended_at=ended_at.tobytes())


@contextlib.contextmanager
def live_fleet(prometheus, folder):
    """The fleet, from its start on; see the module.

    Args:
        prometheus: path of the binary.
        folder: an empty one, for everything that is written.
    """
    directory = folder / "records"
    directory.mkdir()
    spoil(directory)
    with contextlib.ExitStack() as stack:
        gpus = stack.enter_context(GpuJob(directory))
        sidecar = stack.enter_context(pushing_sidecar(directory))
        server = stack.enter_context(judging(prometheus, folder, sidecar))
        stack.enter_context(training(directory, folder))
        yield Fleet(server, sidecar, gpus, folder, time.monotonic())


def spoil(directory):
    """Garbage in the place of a record."""
    job = directory / "spoilt"
    job.mkdir()
    (job / "rank-0.record").write_bytes(b"\x00 no record")


@contextlib.contextmanager
def pushing_sidecar(directory):
    """A sidecar that is scraped, and pushes to a receiver in this process."""
    with otlp_receivers.http_receiver() as receiver:
        told = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_METRIC_EXPORT_INTERVAL": "5000"}
        with mock.patch.dict(os.environ, told), sidecars.running(directory) as sidecar:
            yield sidecar


@contextlib.contextmanager
def judging(prometheus, folder, sidecar):
    """A Prometheus that scrapes and evaluates the generated rules."""
    eager = replace(DEFAULTS, holds=dict.fromkeys(DEFAULTS.holds, "1s"))
    files = {"rules.yml": rules_yaml(recordings(eager)), "alerts.yml": alerts_yaml(alerts(eager), eager)}
    for name, content in files.items():
        (folder / name).write_text(content)
    paths = [str(folder / name) for name in files]
    config = backends.scrape_config(f"127.0.0.1:{sidecar.port}", interval=SCRAPE_INTERVAL, rule_files=paths)
    config["global"]["evaluation_interval"] = SCRAPE_INTERVAL
    with backends.prometheus(prometheus, folder, config) as server:
        yield server


@contextlib.contextmanager
def training(directory, folder):
    """The real ranks, held against a forecast of themselves."""
    saved = folder / "forecast.json"
    command = ["forecast", f"{SCRIPT}:build", "--world-size", str(NUM_REAL), "--save", str(saved)]
    line = [sys.executable, "-c", "import sys; from torchmem.cli import main; sys.exit(main())", *command]
    subprocess.run(line, check=True, capture_output=True, timeout=FORECAST_SECONDS)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"TORCHMEM_FORECAST": str(saved)}))
        for rank in range(NUM_REAL):
            line = [sys.executable, str(SCRIPT), str(directory), str(folder), str(rank), str(NUM_REAL)]
            stack.enter_context(backends.running(line, folder / f"rank-{rank}.log"))
        yield
