"""Every metric once, as data: what it is called, counts, means and is told apart by.

Prometheus names are derived from the OpenTelemetry ones by the rules that Prometheus itself applies to metrics
received by OTLP, so that a query finds a series by the same name whichever way it came.

Invariants: ``METRICS`` is in the order of exposition; parts and totals have different names, so that ``sum()`` over
one metric always means something; help texts need no escaping in any exposition format.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass


class Kind(enum.Enum):
    """OpenTelemetry's kinds of instrument, as far as they are used."""

    COUNTER = "counter"
    GAUGE = "gauge"
    UPDOWN = "updown"
    """Like a gauge, but adding it up over its labels is meaningful."""


@dataclass(frozen=True, eq=False)
class Metric:
    """One instrument.

    Attributes:
        otel_name: dotted name.
        unit: UCUM: ``By``, ``s``, ``1``, an annotation such as ``{step}``, or empty for what has no unit.
        labels: names in the order in which samples give their values.
        of_memory: true of what a process holds, which is untrue once it is gone; false of what stays true after it.
    """

    otel_name: str
    unit: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    of_memory: bool = False

    @property
    def prometheus_name(self) -> str:
        """Name of the series."""
        return prometheus_name(self.otel_name, self.unit, self.kind)


_UNIT_WORDS = {"By": "bytes", "s": "seconds", "By/s": "bytes_per_second"}


def unit_word(unit: str, kind: Kind) -> str:
    """The unit as Prometheus spells it; empty for annotations, none, and the ``1`` of what is no ratio."""
    if unit == "1":
        return "ratio" if kind is Kind.GAUGE else ""
    return "" if unit.startswith("{") else _UNIT_WORDS.get(unit, unit)


def prometheus_name(otel_name: str, unit: str, kind: Kind) -> str:
    """The name that OTLP ingestion gives an instrument: words joined by ``_``, then the unit, then ``total``."""
    words = [word for word in re.split(r"[^A-Za-z0-9]", otel_name) if word]
    word = unit_word(unit, kind)
    if word == "ratio":
        words = [*(w for w in words if w != word), word]
    elif word and word not in words:
        words.append(word)
    if kind is Kind.COUNTER:
        words = [*(w for w in words if w != "total"), "total"]
    return "_".join(words)


RANK = ("train_job", "rank")
DEVICE = (*RANK, "device")
REFTYPE = (*DEVICE, "reftype")
MODULE = (*DEVICE, "module", "reftype")
OPERATION = (*DEVICE, "operation")


def _memory(name: str, kind: Kind, text: str, labels: tuple[str, ...]) -> Metric:
    return Metric(name, "By", kind, text, labels, of_memory=True)


MODULE_USAGE = _memory(
    "torchmem.module.memory.usage", Kind.UPDOWN, "Bytes alive at the end of the last step, by who holds them.", MODULE
)
MODULE_STEP_PEAK = _memory(
    "torchmem.module.memory.step_peak",
    Kind.GAUGE,
    "Composition of the device's memory at the instant of its step peak; the parts add up to the peak.",
    MODULE,
)
MODULE_ACTIVE_PEAK = _memory(
    "torchmem.module.memory.active_peak",
    Kind.GAUGE,
    "Composition of the device's memory at its highest while the module ran; not additive over modules.",
    MODULE,
)
MODULE_EXCESS = _memory(
    "torchmem.module.memory.excess",
    Kind.GAUGE,
    "Bytes at the step peak over the module's own baseline: who grew.",
    MODULE,
)
USAGE = _memory("torchmem.memory.usage", Kind.UPDOWN, "Bytes alive at the end of the last step.", REFTYPE)
STEP_PEAK = _memory(
    "torchmem.memory.step_peak",
    Kind.GAUGE,
    "Bytes at the instant of the device's highest step peak of the recent past; the parts add up to the peak.",
    REFTYPE,
)
PEAK = _memory("torchmem.memory.peak", Kind.GAUGE, "The most the device held since the process began counting.", DEVICE)
UNATTRIBUTED = _memory(
    "torchmem.memory.unattributed",
    Kind.UPDOWN,
    "Bytes that the allocator holds and no module could be named for.",
    DEVICE,
)
ALLOCATED = _memory(
    "torchmem.allocator.memory.allocated", Kind.UPDOWN, "Bytes that torch's allocator has handed out.", DEVICE
)
ACTIVE = _memory(
    "torchmem.allocator.memory.active",
    Kind.UPDOWN,
    "Bytes in blocks that are handed out or wait for a stream to release them.",
    DEVICE,
)
RESERVED = _memory(
    "torchmem.allocator.memory.reserved", Kind.UPDOWN, "Bytes that torch's allocator has taken from the device.", DEVICE
)
INACTIVE_SPLIT = _memory(
    "torchmem.allocator.memory.inactive_split",
    Kind.UPDOWN,
    "Bytes of free pieces of blocks in use, which cannot be given back to the device.",
    DEVICE,
)
FRAGMENTATION = Metric(
    "torchmem.allocator.fragmentation_ratio",
    "1",
    Kind.GAUGE,
    "Share of the reserved bytes that are inactive splits.",
    DEVICE,
    of_memory=True,
)
LIMIT = _memory("torchmem.device.memory.limit", Kind.UPDOWN, "Capacity of the device.", DEVICE)
OTHER = _memory(
    "torchmem.device.memory.other", Kind.UPDOWN, "Bytes used on the device outside torch's allocator.", DEVICE
)
OOMS = Metric("torchmem.allocator.ooms", "{oom}", Kind.COUNTER, "Allocations that failed for lack of memory.", DEVICE)
RETRIES = Metric(
    "torchmem.allocator.retries",
    "{retry}",
    Kind.COUNTER,
    "Allocations that succeeded only after cached blocks were given back.",
    DEVICE,
)
BASELINE = _memory(
    "torchmem.memory.baseline", Kind.GAUGE, "The usual step peak of this attempt, known once it has warmed up.", DEVICE
)
DRIFT_RATIO = Metric(
    "torchmem.memory.drift_ratio",
    "1",
    Kind.GAUGE,
    "Recent step peaks over the baseline, less one; known once the baseline is.",
    DEVICE,
    of_memory=True,
)
DRIFTING = Metric(
    "torchmem.memory.drifting",
    "",
    Kind.GAUGE,
    "1 or 0 by detector: level, step peaks lie past the baseline and its spread; floor, ends of steps keep growing.",
    (*DEVICE, "detector"),
    of_memory=True,
)
GROWTH = Metric(
    "torchmem.memory.growth",
    "By/s",
    Kind.GAUGE,
    "Slope of the bytes alive at the ends of steps, robust against outliers.",
    DEVICE,
    of_memory=True,
)
EXHAUSTION = Metric(
    "torchmem.memory.exhaustion.timestamp",
    "s",
    Kind.GAUGE,
    "Unix time at which the device is full at the present growth; absent while nothing grows.",
    DEVICE,
    of_memory=True,
)
FORECAST = _memory(
    "torchmem.memory.forecast",
    Kind.GAUGE,
    "The step peak that was forecast before the job began; absent where none was.",
    DEVICE,
)
FORECAST_DRIFT_RATIO = Metric(
    "torchmem.memory.forecast_drift_ratio",
    "1",
    Kind.GAUGE,
    "The highest step peak of the recent past, the one of step_peak, over its forecast, less one.",
    DEVICE,
    of_memory=True,
)
BASELINE_RESETS = Metric(
    "torchmem.memory.baseline.resets",
    "{reset}",
    Kind.COUNTER,
    "Times that the baseline was begun anew, by reason.",
    (*DEVICE, "reason"),
)
CHECKPOINT_PEAK = _memory(
    "torchmem.checkpoint.memory.peak",
    Kind.GAUGE,
    "The most the device held while the latest checkpoint was saved or loaded.",
    OPERATION,
)
STEP_NUMBER = Metric("torchmem.step.number", "", Kind.GAUGE, "The last finished step.", RANK)
STEPS = Metric("torchmem.steps", "{step}", Kind.COUNTER, "Steps finished by this attempt.", RANK)
STEP_TIME = Metric("torchmem.step.time", "s", Kind.COUNTER, "Time spent in finished steps.", RANK)
TRACKER_TIME = Metric("torchmem.tracker.time", "s", Kind.COUNTER, "Time that watching has cost the training.", RANK)
SNAPSHOT_TIMESTAMP = Metric(
    "torchmem.snapshot.timestamp", "s", Kind.GAUGE, "Unix time at which the rank's record was made.", RANK
)
START_TIMESTAMP = Metric(
    "torchmem.rank.start.timestamp", "s", Kind.GAUGE, "Unix time at which this attempt began counting.", RANK
)
RANK_UP = Metric("torchmem.rank.up", "", Kind.GAUGE, "Whether the rank's process lives.", RANK)
RANK_STATE = Metric(
    "torchmem.rank.state",
    "",
    Kind.UPDOWN,
    "1 for the state that the rank is in (running, stale, crashed, exited), 0 for the others.",
    (*RANK, "state"),
)
RANK_INFO = Metric(
    "torchmem.rank.info",
    "",
    Kind.GAUGE,
    "Always 1; who the rank is, to join on.",
    (*RANK, "attempt", "pid", "host", "engine", "gpu_uuid", "dp", "tp", "pp"),
)
LABELER_UP = Metric(
    "torchmem.labeler.up",
    "",
    Kind.GAUGE,
    "Whether a part that names memory works; 0: it failed and is off, its bytes count as other.",
    (*RANK, "labeler"),
)
MODULES_FOLDED = Metric(
    "torchmem.modules.folded",
    "{module}",
    Kind.UPDOWN,
    "Modules that hold memory and are not shown under their own names: summed by the budget.",
    RANK,
)
WORLD_SIZE = Metric("torchmem.job.world_size", "", Kind.GAUGE, "Ranks that the job is meant to have.", ("train_job",))
SNAPSHOT_ERRORS = Metric(
    "torchmem.snapshot.errors",
    "{error}",
    Kind.COUNTER,
    "Records that a scrape could not use, by reason; a file counts on each scrape until it is replaced.",
    ("reason",),
)
UNBURIED = Metric(
    "torchmem.exporter.unburied",
    "{record}",
    Kind.GAUGE,
    "Records of crashed ranks that could not be moved to a post-mortem folder.",
    (),
)
STATE_FAILURES = Metric(
    "torchmem.exporter.state.failures",
    "{failure}",
    Kind.COUNTER,
    "Times that what outlives the sidecar could not be kept or read.",
    (),
)
REQUESTS = Metric("torchmem.exporter.requests", "{request}", Kind.COUNTER, "Requests answered, by status.", ("code",))
REQUESTS_REFUSED = Metric(
    "torchmem.exporter.requests.refused",
    "{request}",
    Kind.COUNTER,
    "Connections and requests turned away, by reason.",
    ("reason",),
)
RELOAD_FAILURES = Metric(
    "torchmem.exporter.reload.failures",
    "{failure}",
    Kind.COUNTER,
    "Changes of the web configuration, certificates or tokens that could not be used; the former ones still hold.",
    (),
)
PUSHES = Metric(
    "torchmem.exporter.otlp.pushes",
    "{push}",
    Kind.COUNTER,
    "Pushes by OTLP, by outcome: success, failure.",
    ("outcome",),
)
DROPPED_POINTS = Metric(
    "torchmem.exporter.otlp.dropped.points",
    "{point}",
    Kind.COUNTER,
    "Points that a push could not deliver; the next push brings them up to date.",
    (),
)
PUSH_TIME = Metric(
    "torchmem.exporter.otlp.push.duration", "s", Kind.GAUGE, "Time that the last push took, with its waits.", ()
)
BUILD_INFO = Metric(
    "torchmem.build.info",
    "",
    Kind.GAUGE,
    "Always 1; versions in use: of the ranks, and of the sidecar itself, where torch is empty.",
    ("version", "torch"),
)
SCRAPE_DURATION = Metric(
    "torchmem.scrape.duration", "s", Kind.GAUGE, "Time the sidecar took to read the records and render this scrape.", ()
)

METRICS = (
    MODULE_USAGE,
    MODULE_STEP_PEAK,
    MODULE_ACTIVE_PEAK,
    MODULE_EXCESS,
    USAGE,
    STEP_PEAK,
    PEAK,
    UNATTRIBUTED,
    ALLOCATED,
    ACTIVE,
    RESERVED,
    INACTIVE_SPLIT,
    FRAGMENTATION,
    OOMS,
    RETRIES,
    LIMIT,
    OTHER,
    CHECKPOINT_PEAK,
    BASELINE,
    DRIFT_RATIO,
    DRIFTING,
    GROWTH,
    EXHAUSTION,
    FORECAST,
    FORECAST_DRIFT_RATIO,
    BASELINE_RESETS,
    STEP_NUMBER,
    STEPS,
    STEP_TIME,
    TRACKER_TIME,
    SNAPSHOT_TIMESTAMP,
    START_TIMESTAMP,
    RANK_UP,
    RANK_STATE,
    RANK_INFO,
    LABELER_UP,
    MODULES_FOLDED,
    WORLD_SIZE,
    SNAPSHOT_ERRORS,
    UNBURIED,
    STATE_FAILURES,
    REQUESTS,
    REQUESTS_REFUSED,
    RELOAD_FAILURES,
    PUSHES,
    DROPPED_POINTS,
    PUSH_TIME,
    BUILD_INFO,
    SCRAPE_DURATION,
)
