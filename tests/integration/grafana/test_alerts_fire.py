"""Each alert fires on its fault, in time, alone, and says who it is about."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from generator.catalogue import alerts
from generator.settings import DEFAULTS
from timelines import GIB, Job, Life, State, Timeline

pytestmark = pytest.mark.slow

ALERTS = {alert.name: alert for alert in alerts()}
FAULT = 60
"""The minute at which things go wrong."""
END = 179
GROWN = {("layers.*.mlp", "activation"): 8 * GIB, ("head", "gradient"): GIB, ("norm", "buffer"): 0, ("x", "other"): 512}
GREW = "layers.*.mlp/activation +8GiB, head/gradient +1GiB, x/other +512B"


def since_fault(value, usual=0):
    return lambda minute: value if minute >= FAULT else usual


def step_up(job):
    job.add_rank(
        0, DRIFTING={("level",): since_fault(1), ("floor",): 0}, DRIFT_RATIO=since_fault(0.125), MODULE_EXCESS=GROWN
    )
    job.add_rank(1, DRIFT_RATIO=0.01)
    job.add_node(size=2)


def leak(job):
    job.add_rank(
        0, DRIFTING={("level",): 0, ("floor",): since_fault(1)}, GROWTH=since_fault(1024.0), MODULE_EXCESS=GROWN
    )
    job.add_rank(1)
    job.add_node(size=2)


def leak_that_ends_soon(job):
    """The predicted time comes nearer; it is four hours off at the fault's minute plus one."""
    at = 60.0 * (FAULT + 1) + DEFAULTS.exhaustion_seconds
    job.add_rank(0, DRIFTING={("level",): 0, ("floor",): 1}, EXHAUSTION=at, GROWTH=1024.0, MODULE_EXCESS=GROWN)
    job.add_node(size=1)


def full(job):
    job.add_rank(0, PEAKS=since_fault(78 * GIB, 40 * GIB))
    job.add_rank(1, device="cuda:1", mesh={"pp": "1"})
    job.add_node(size=2)


def full_host(job):
    """Four ranks, each of which would fit."""
    for rank in range(4):
        unknown = dict.fromkeys(["ALLOCATED", "RESERVED", "FRAGMENTATION", "UNATTRIBUTED"])
        job.add_rank(rank, device="cpu", PEAKS=since_fault(19 * GIB, 10 * GIB), **unknown)
    job.add_node(size=4)


def out_of_memory(job):
    """The job catches it and goes on."""
    job.add_rank(0, OOMS=since_fault(3, 2), START_TIMESTAMP=-7200)
    job.add_rank(1)
    job.add_node(size=2)


def out_of_memory_at_once(job):
    """The first attempt is dead before anybody has looked; the second works."""
    job.add_rank(0, Life(FAULT, FAULT, State.CRASHED), OOMS=1)
    job.add_rank(0, Life(FAULT + 3), attempt="b", OOMS=1)
    job.add_node(size=since_fault(1, None))


def hang(job):
    job.add_rank(0, Life(stale_from=FAULT))
    job.add_rank(1)
    job.add_node(size=2)


def rank_crashes(job):
    job.add_rank(0)
    job.add_rank(1, Life(0, FAULT, State.CRASHED))
    job.add_node(size=2)


def job_crashes(job):
    for rank in range(2):
        job.add_rank(rank, Life(0, FAULT, State.CRASHED))
    job.add_node(size=lambda minute: 2 if minute <= FAULT + 15 else None)


def ranks_never_begin(job):
    for rank in range(3):
        job.add_rank(rank, Life(FAULT))
    job.add_node(size=since_fault(4, None))


def second_run_lacks_a_rank(job):
    """All ranks ended cleanly; the job begins again within the hour, and one does not."""
    for rank in range(2):
        job.add_rank(rank, Life(0, 30))
    job.add_rank(0, Life(FAULT), attempt="b")
    job.add_node(size=lambda minute: 2 if minute < 32 or minute >= FAULT else None)


def last_rank_crashes(job):
    """The others have ended cleanly."""
    job.add_rank(0, Life(0, FAULT, State.CRASHED))
    for rank in (1, 2):
        job.add_rank(rank, Life(0, FAULT - 10))
    job.add_node(size=lambda minute: 3 if minute <= FAULT + 15 else None)


def node_is_lost(job):
    job.add_rank(0)
    job.add_rank(1, node=1)
    job.add_node(0, size=2)
    job.add_node(1, size=2, up=since_fault(0, 1))
    job.line.silence(job.node(1), range(FAULT, END + 1))


def node_is_lost_and_replaced(job):
    """The sidecar of the lost one is no reason any more once the rank lives elsewhere."""
    job.add_rank(0)
    job.add_rank(1, node=1)
    job.add_rank(1, Life(FAULT + 10), node=2, attempt="b")
    job.add_node(0, size=2)
    job.add_node(1, size=2, up=since_fault(0, 1))
    job.add_node(2, size=lambda minute: 2 if minute >= FAULT + 10 else None)
    job.line.silence(job.node(1), range(FAULT, END + 1))


def retries(job):
    job.add_rank(0, RETRIES=lambda minute: max(0, minute - FAULT) // 2)
    job.add_rank(1)
    job.add_node(size=2)


def fragments(job):
    job.add_rank(0, FRAGMENTATION=since_fault(0.4, 0.1), RESERVED=75 * GIB)
    job.add_rank(1, RESERVED=75 * GIB)
    job.add_node(size=2)


def skew(job):
    """Of four ranks that do the same, one takes nearly half as much again; another stage takes less."""
    for rank in range(4):
        job.add_rank(rank, device=f"cuda:{rank}", mesh={"pp": "0"}, PEAKS=(40, 41, 60, 39)[rank] * GIB)
    for rank in range(4, 6):
        job.add_rank(rank, device=f"cuda:{rank}", mesh={"pp": "1"}, PEAKS=20 * GIB)
    job.add_node(size=6)


def forecast(job):
    job.add_rank(0, FORECAST_DRIFT_RATIO=since_fault(0.25))
    job.add_node(size=1)


def unnamed(job):
    job.add_rank(0, UNATTRIBUTED=since_fault(8 * GIB), ALLOCATED=32 * GIB)
    job.add_rank(1)
    job.add_node(size=2)


def checkpoint(job):
    job.add_rank(0, CHECKPOINT_PEAK={("save",): since_fault(79 * GIB, 45 * GIB), ("load",): 45 * GIB})
    job.add_node(size=1)


def rejected(job):
    job.add_rank(0)
    job.add_node(size=1, errors={"version": lambda minute: max(0, minute - FAULT), "uid": 0})


def labeler(job):
    job.add_rank(0, LABELER_UP={("fsdp2",): since_fault(0, 1), ("module",): 1})
    job.add_rank(1, LABELER_UP={("fsdp2",): 1, ("module",): 1})
    job.add_node(size=2)


def overhead(job):
    job.add_rank(0, TRACKER_TIME=lambda minute: 0.6 * minute + max(0, minute - FAULT) * 11.4)
    job.add_node(size=1)


@dataclass(frozen=True)
class Case:
    """A faulty job.

    Attributes:
        job: puts it on a timeline.
        fires: by alert the first minute, and the last.
        told: by annotation what the first of them says, besides the description and the runbook.
        labels: that alert's, besides the severity.
        minute: at which that is looked at.
    """

    job: object
    fires: dict
    told: dict
    labels: dict | None = None
    minute: int = FAULT + 14

    @property
    def name(self):
        return self.job.__name__


CASES = [
    Case(
        step_up,
        {"TorchMemPeakDrift": (FAULT + 5, END)},
        {"summary": "step_up: step peak 12.5% over its baseline", "growers": GREW}
        | {"ranks": "rank 0 cuda:0 12.5%, rank 1 cuda:0 1%"},
    ),
    Case(
        leak,
        {"TorchMemLeakSuspected": (FAULT + 5, END)},
        {"summary": "leak: memory kept between steps keeps growing on 1 device(s)", "growers": GREW}
        | {"ranks": "rank 0 cuda:0 1kiB/s"},
    ),
    Case(
        leak_that_ends_soon,
        {"TorchMemExhaustionPredicted": (FAULT + 7, END), "TorchMemLeakSuspected": (5, END)},
        {"summary": "leak_that_ends_soon: a device is full in 3h 47m 0s at the present growth", "growers": GREW}
        | {"ranks": "rank 0 cuda:0 in 3h 47m 0s"},
    ),
    Case(
        full,
        {"TorchMemHeadroomLow": (FAULT + 10, END)},
        {"summary": "full: 98.83% of a device is in use at the step peak"}
        | {"ranks": "rank 0 cuda:0 98.83%, rank 1 cuda:1 51.33%", "hosts": "not known"},
    ),
    Case(
        full_host,
        {"TorchMemHeadroomLow": (FAULT + 10, END)},
        {"summary": "full_host: 100% of a device is in use at the step peak"}
        | {"ranks": "no accelerator", "hosts": "host full_host-0 100%"},
    ),
    Case(
        out_of_memory,
        {"TorchMemOutOfMemory": (FAULT, FAULT + 14)},
        {"summary": "out_of_memory: out of memory", "ranks": "rank 0 cuda:0 (3 over all attempts)"},
    ),
    Case(
        out_of_memory_at_once,
        {"TorchMemOutOfMemory": (FAULT, FAULT + 14)},
        {"summary": "out_of_memory_at_once: out of memory", "ranks": "rank 0 cuda:0 (1 over all attempts)"},
    ),
    Case(
        hang,
        {"TorchMemSnapshotStale": (FAULT + 6, END)},
        {"summary": "hang: 1 rank(s) live but tell nothing", "ranks": "rank 0"},
    ),
    Case(
        rank_crashes,
        {"TorchMemRanksMissing": (FAULT + 5, END)},
        {"summary": "rank_crashes: 1 rank(s) missing", "ranks": "rank 1 crashed"},
    ),
    Case(
        job_crashes,
        {"TorchMemRanksMissing": (FAULT + 5, FAULT + 15)},
        {"summary": "job_crashes: 2 rank(s) missing", "ranks": "rank 0 crashed, rank 1 crashed"},
    ),
    Case(
        ranks_never_begin,
        {"TorchMemRanksMissing": (FAULT + 5, END)},
        {"summary": "ranks_never_begin: 1 rank(s) missing"}
        | {"ranks": "none told of as crashed: never begun, or nobody tells"},
    ),
    Case(
        second_run_lacks_a_rank,
        {"TorchMemRanksMissing": (FAULT + 5, END)},
        {"summary": "second_run_lacks_a_rank: 1 rank(s) missing"}
        | {"ranks": "none told of as crashed: never begun, or nobody tells"},
    ),
    Case(
        last_rank_crashes,
        {"TorchMemRanksMissing": (FAULT + 5, FAULT + 15)},
        {"summary": "last_rank_crashes: 1 rank(s) missing", "ranks": "rank 0 crashed"},
    ),
    Case(
        node_is_lost,
        {"TorchMemExporterDown": (FAULT + 5, END), "TorchMemRanksMissing": (FAULT + 5, END)},
        {"summary": "node_is_lost: 1 sidecar(s) down", "targets": "node_is_lost-1:20471 (1 ranks)"},
    ),
    Case(
        node_is_lost_and_replaced,
        {"TorchMemExporterDown": (FAULT + 5, FAULT + 9), "TorchMemRanksMissing": (FAULT + 5, FAULT + 9)},
        {"summary": "node_is_lost_and_replaced: 1 sidecar(s) down"}
        | {"targets": "node_is_lost_and_replaced-1:20471 (1 ranks)"},
        minute=FAULT + 7,
    ),
    Case(
        retries,
        {"TorchMemAllocatorRetries": (FAULT + 22, END)},
        {"summary": "retries: 15 retries of the allocator on a rank", "ranks": "rank 0 cuda:0 15"},
        minute=FAULT + 60,
    ),
    Case(
        fragments,
        {"TorchMemFragmentationHigh": (FAULT + 30, END)},
        {"summary": "fragments: 40% of the reserved memory is fragments"}
        | {"ranks": "rank 0 cuda:0 40%, rank 1 cuda:0 2%"},
        minute=FAULT + 40,
    ),
    Case(
        skew,
        {"TorchMemRankSkew": (30, END)},
        {"summary": "skew: a rank takes 1.48 times what its peers do"}
        | {
            "ranks": "rank 2 (dp 2, tp , pp 0) 60GiB, rank 1 (dp 1, tp , pp 0) 41GiB, rank 0 (dp 0, tp , pp 0) 40GiB",
        },
    ),
    Case(
        forecast,
        {"TorchMemForecastMissed": (FAULT + 15, END)},
        {"summary": "forecast: step peak 25% over its forecast", "ranks": "rank 0 cuda:0 25%"},
        minute=FAULT + 30,
    ),
    Case(
        unnamed,
        {"TorchMemUnattributedHigh": (FAULT + 15, END)},
        {"summary": "unnamed: 25% of the allocated memory has no name"}
        | {"ranks": "rank 0 cuda:0 8GiB, rank 1 cuda:0 64MiB"},
        minute=FAULT + 30,
    ),
    Case(
        checkpoint,
        {"TorchMemCheckpointPeakHigh": (FAULT + 5, END)},
        {"summary": "checkpoint: a checkpoint filled 100% of a device"}
        | {"ranks": "rank 0 cuda:0 save 79GiB, rank 0 cuda:0 load 45GiB"},
    ),
    Case(
        rejected,
        {},
        {"summary": "Records are rejected: version", "targets": "rejected-0:20471"},
        labels={"reason": "version"},
        minute=FAULT + 30,
    ),
    Case(
        labeler,
        {"TorchMemLabelerDown": (FAULT + 5, END)},
        {"summary": "labeler: labeler fsdp2 is off on 1 rank(s)", "ranks": "rank 0"},
        labels={"train_job": "labeler", "labeler": "fsdp2"},
    ),
    Case(
        overhead,
        {"TorchMemOverheadHigh": (FAULT + 18, END)},
        {"summary": "overhead: watching takes 20% of the step time", "ranks": "rank 0 20%"},
        minute=FAULT + 60,
    ),
]


@pytest.fixture(scope="module")
def fired(promtool, tmp_path_factory):
    """All jobs watched by one Prometheus, as of a fleet."""
    line = Timeline()
    for case in CASES:
        case.job(line[case.name])
    return line.fired(promtool, tmp_path_factory.mktemp("fire"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fires_in_time_and_alone(fired, case):
    """The fault would go unnoticed, be told late or too long, or under another name as well."""
    assert {alert: when for (job, alert), when in fired.items() if job == case.name} == case.fires


def test_rejected_records_are_told_by_reason(fired):
    """Records of another release would be ignored in silence."""
    assert {key: when for key, when in fired.items() if key[0] not in {case.name for case in CASES}} == {
        ("version", "TorchMemSnapshotRejected"): (FAULT + 16, END)
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_says_who_it_is_about(promtool, tmp_path, case):
    """Whoever is woken would not be told which module, rank or device it is."""
    name = next(iter(case.fires), "TorchMemSnapshotRejected")
    alert = ALERTS[name]
    line = Timeline(minutes=case.minute + 1)
    case.job(Job(line, case.name))
    labels = {"severity": alert.severity.value, **(case.labels or {"train_job": case.name})}
    page = {"description": alert.description, "runbook_url": f"{DEFAULTS.runbook_base}/{name}.md"}
    line.check_alert(promtool, tmp_path, name, case.minute, labels, case.told | page)


def test_a_job_may_be_called_anything(promtool, tmp_path):
    """The annotation of a job with an odd name would be an error message."""
    name = 'a "b" `c` \\ {{ d }} %s é'
    line = Timeline(minutes=FAULT + 15)
    leak(line[name])
    summary = f"{name}: memory kept between steps keeps growing on 1 device(s)"
    labels = {"severity": "warning", "train_job": name}
    alert = ALERTS["TorchMemLeakSuspected"]
    told = {"summary": summary, "growers": GREW, "ranks": "rank 0 cuda:0 1kiB/s", "description": alert.description}
    told["runbook_url"] = f"{DEFAULTS.runbook_base}/{alert.name}.md"
    line.check_alert(promtool, tmp_path, alert.name, FAULT + 14, labels, told)


def test_every_alert_has_a_case():
    """An alert could be wrong in every way without a test failing."""
    assert {name for case in CASES for name in case.fires} | {"TorchMemSnapshotRejected"} == set(ALERTS)


def test_a_leak_is_told_again_after_prometheus_was_down(promtool, tmp_path):
    """A restart of Prometheus would hide a leak for good."""
    line = Timeline(gap=range(90, 110))
    leak(line["leak"])
    assert line.fired(promtool, tmp_path) == {("leak", "TorchMemLeakSuspected"): (FAULT + 5, END)}
