"""What Prometheus would have scraped of training jobs, minute by minute, and which alerts that would have fired.

A ``Timeline`` is filled with jobs and asked by ``promtool test rules``, which runs the real rule engine over them.
``Job.add_rank`` adds one life of a rank as the sidecar tells of it: what it held goes at a crash, what it was stays for
a quarter of an hour; a clean end is told twice.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from generator.catalogue import ALERTS, RULES
from torchmem_exporter import catalog
from torchmem_exporter.reading.lifecycle import (
    KEEP_CRASHED_SECONDS,
    KEEP_EXITED_SCRAPES,
    KEEP_STALE_MEMORY_SECONDS,
    State,
)

GRAFANA = Path(__file__).resolve().parent.parent / "grafana"
RULE_FILES = [str(GRAFANA / RULES), str(GRAFANA / ALERTS)]
GIB = 1 << 30
JOB_LABEL = "train_job"
PROMTOOL_SECONDS = 60


@dataclass
class Life:
    """One life of a process as a rank, in minutes.

    Attributes:
        began, ended: its minutes; ``ended`` None: it outlives the timeline.
        how: in which state it ended.
        stale_from: the minute from which it writes no more.
    """

    began: int = 0
    ended: int | None = None
    how: State = State.EXITED
    stale_from: int | None = None

    def at(self, minute):
        """(state, whether its memory is told) at a minute; None while nothing is told."""
        if minute < self.began:
            return None
        if self.ended is None or minute < self.ended:
            if self.stale_from is not None and minute > self.stale_from:
                return State.STALE, (minute - self.stale_from) * 60 <= KEEP_STALE_MEMORY_SECONDS
            return State.RUNNING, True
        if self.how is State.EXITED:
            return (State.EXITED, True) if minute < self.ended + KEEP_EXITED_SCRAPES else None
        return (State.CRASHED, False) if (minute - self.ended) * 60 <= KEEP_CRASHED_SECONDS else None

    def written_at(self, minute):
        """Unix seconds of its last record at a minute."""
        ends = [end for end in (self.stale_from, self.ended) if end is not None]
        return 60 * min([minute, *ends])


@dataclass
class Timeline:
    """Series of some hours.

    Attributes:
        minutes: how many samples there are.
        gap: minutes, as a range, in which Prometheus itself was down.
    """

    minutes: int = 180
    gap: range = range(0)
    _values: dict = field(default_factory=dict)

    def add(self, metric, value, instance, **labels):
        """Adds one series.

        Args:
            metric: from the catalog, or a name.
            value: of a minute, or for all; None is no sample.
            instance: the sidecar's address.
            labels: all that the metric has.
        """
        name = metric if isinstance(metric, str) else metric.prometheus_name
        if not isinstance(metric, str):
            assert set(labels) == set(metric.labels), f"{name}: {sorted(labels)}"
        key = (name, tuple(sorted({**labels, "job": "torchmem", "instance": instance}.items())))
        made = [of_minute(value, minute) for minute in range(self.minutes)]
        if key in self._values:  # an earlier life of the same rank, whose place this one takes
            made = [old if new is None else new for new, old in zip(made, self._values[key], strict=True)]
        self._values[key] = made

    def __getitem__(self, job):
        """A job, to add things to."""
        return Job(self, job)

    def silence(self, instance, minutes):
        """Takes back what a sidecar told in a range of minutes: it was down. Only ``up`` says so."""
        for (name, labels), values in self._values.items():
            if name != "up" and ("instance", instance) in labels:
                for minute in minutes:
                    if minute < self.minutes:
                        values[minute] = None

    def as_series(self):
        """What promtool takes: missing samples after a present one are marked stale, as Prometheus does."""
        return [
            {"series": f"{name}{{{_labels(labels)}}}", "values": " ".join(self._written(values))}
            for (name, labels), values in self._values.items()
        ]

    def _written(self, values):
        was_there = False
        for minute, value in enumerate(values):
            if minute in self.gap:  # whoever is down marks nothing
                yield "_"
            elif value is None:
                yield "stale" if was_there else "_"
                was_there = False
            else:
                yield repr(value)
                was_there = True

    def fired(self, promtool, folder):
        """The alerts that fired at any time: (job, alert) -> (first minute, last minute); of no job: the reason."""
        firing = f'label_replace(ALERTS{{alertstate="firing"}}, "{JOB_LABEL}", "$1", "reason", "(.+)")'
        minutes = f"(max by ({JOB_LABEL}, alertname) ({firing}) * 0 + time() / 60)[{self.minutes}m:1m]"
        queries = [f"min_over_time({minutes})", f"max_over_time({minutes})"]
        tests = [{"expr": query, "eval_time": f"{self.minutes - 1}m", "exp_samples": []} for query in queries]
        done = self._run(promtool, folder, {"promql_expr_test": tests})
        first, last = ({}, {}) if done.returncode == 0 else map(_samples, _answers(done, len(queries)))
        return {key: (first[key], last[key]) for key in first}

    def check_alert(self, promtool, folder, name, minute, labels, annotations):
        """Fails unless the alert of this name fires at a minute with exactly these labels and annotations."""
        expected = [{"exp_labels": labels, "exp_annotations": annotations}]
        test = {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": expected}
        done = self._run(promtool, folder, {"alert_rule_test": [test]})
        assert done.returncode == 0, done.stdout + done.stderr

    def _run(self, promtool, folder, tests):
        file = folder / "timeline_test.yml"
        content = {
            "rule_files": RULE_FILES,
            "evaluation_interval": "1m",
            "group_eval_order": ["torchmem.rules", "torchmem.alerts"],  # else by chance, which may cost a minute
            "tests": [{"interval": "1m", "input_series": self.as_series(), **tests}],
        }
        file.write_text(yaml.safe_dump(content, width=10**9))
        command = [promtool, "test", "rules", file]
        return subprocess.run(command, capture_output=True, text=True, timeout=PROMTOOL_SECONDS, check=False)


@dataclass(frozen=True)
class Job:
    """A job on a timeline.

    Attributes:
        line: the timeline.
        name: of the job; its nodes are called after it.
    """

    line: Timeline
    name: str

    def node(self, number=0):
        """The address of a node's sidecar."""
        return f"{self.name}-{number}:20471"

    def add_node(self, number=0, *, up=1, size=None, errors=None):
        """Adds what a sidecar tells besides its ranks: that it is scraped, the job's size, rejections by reason."""
        self.line.add("up", up, self.node(number))
        self.line.add(catalog.WORLD_SIZE, size, self.node(number), train_job=self.name)
        for reason, count in (errors or {"checksum": 0}).items():
            self.line.add(catalog.SNAPSHOT_ERRORS, count, self.node(number), reason=reason)

    def add_rank(self, rank, life=None, *, node=0, device="cuda:0", mesh=None, attempt="a", **differing):
        """Adds everything that a sidecar tells of one life of a rank.

        Args:
            rank: its number.
            life: see there.
            node: its node's number.
            device: where it holds memory.
            mesh: what differs of its ``dp``, ``tp``, ``pp``.
            attempt: names the life.
            differing: by name in the catalog what differs from a job that is well, of a minute or for all; for a
                metric with labels of its own by those labels' values.
        """
        life = life or Life()
        told = [life.at(minute) for minute in range(self.line.minutes)]
        who = {"train_job": self.name, "rank": str(rank)}
        own = {"attempt": attempt, "pid": "7", "host": self.node(node).split(":")[0], "engine": "native"}
        own |= {"gpu_uuid": "", "dp": str(rank), "tp": "", "pp": "", **(mesh or {})}
        usual = {
            "RANK_UP": lambda minute: int(told[minute][0].is_alive),
            "RANK_STATE": {(state.value,): _is(told, state) for state in State},
            "RANK_INFO": {tuple(own.values()): 1},
            "START_TIMESTAMP": 60 * life.began,
            "SNAPSHOT_TIMESTAMP": life.written_at,
            **_counters(life),
            **_DEVICE,
        }
        peak = differing.pop("PEAKS", 40 * GIB)
        parameters = 8 * GIB
        usual["STEP_PEAK"] = {
            ("sharded_parameter",): parameters,
            ("activation",): lambda minute: of_minute(peak, minute) - parameters,
        }
        for name, value in {**usual, **differing}.items():
            metric = getattr(catalog, name)
            has_device = metric.labels[: len(catalog.DEVICE)] == catalog.DEVICE
            place = {**who, "device": device} if has_device else who
            more = metric.labels[len(place) :]
            for labels, one in value.items() if more else [((), value)]:
                shown = _shown(one, told, of_memory=metric.of_memory)
                self.line.add(metric, shown, self.node(node), **place, **dict(zip(more, labels, strict=True)))


def of_minute(value, minute):
    """A value that may be a function of the minute."""
    return value(minute) if callable(value) else value


def _is(told, state):
    return lambda minute: int(told[minute][0] is state)


def _shown(value, told, *, of_memory):
    """The value as long as the sidecar tells it."""

    def shown(minute):
        is_told = told[minute] is not None and (told[minute][1] or not of_memory)
        return of_minute(value, minute) if is_told else None

    return shown


def _labels(labels):
    return ",".join(f"{name}={json.dumps(value)}" for name, value in labels)


def _counters(life):
    """A step a second, of which watching takes one part in a hundred."""

    def seconds(minute):
        return 60 * (minute - life.began)

    return {"STEPS": seconds, "STEP_TIME": seconds, "TRACKER_TIME": lambda minute: seconds(minute) / 100}


_DEVICE = {
    "USAGE": {("optimizer_state",): 20 * GIB},
    "UNATTRIBUTED": GIB // 16,
    "ALLOCATED": 21 * GIB,
    "RESERVED": 50 * GIB,
    "FRAGMENTATION": 0.02,
    "LIMIT": 80 * GIB,
    "OTHER": GIB,
    "DRIFT_RATIO": 0.0,
    "DRIFTING": {("level",): 0, ("floor",): 0},
    "GROWTH": 0.0,
    "OOMS": 0,
    "RETRIES": 0,
    "LABELER_UP": {("fsdp2",): 1},
    "FORECAST_DRIFT_RATIO": 0.01,
    "CHECKPOINT_PEAK": {("save",): 45 * GIB},
}


_SAMPLE = re.compile(r'\{alertname="(\w+)", train_job="([^"]+)"\} ([-+.\deE]+)')


def _answers(done, num_queries):
    """What promtool says it got instead of nothing, one line a query."""
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip().startswith("got:")]
    assert len(lines) == num_queries, done.stdout + done.stderr
    return lines


def _samples(line):
    return {(job, alert): round(float(value)) for alert, job, value in _SAMPLE.findall(line)}
