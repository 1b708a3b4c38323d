"""No alert fires on what is no fault, with Prometheus up all the time and with it down for a while."""

from __future__ import annotations

import random

import pytest

from timelines import GIB, Life, State, Timeline

pytestmark = pytest.mark.slow

GAP = range(82, 102)
"""Minutes in which the second Prometheus is down."""


def flat(job):
    for rank in range(4):
        job.add_rank(rank)
    job.add_node(size=4)


def varying_lengths(job):
    draw = random.Random(7)
    for rank in range(4):
        peaks = [40 * GIB + draw.randint(-8 * GIB, 8 * GIB) for _ in range(job.line.minutes)]
        drifts = [draw.gauss(0, 0.1) for _ in peaks]
        job.add_rank(rank, PEAKS=peaks.__getitem__, DRIFT_RATIO=drifts.__getitem__, GROWTH=lambda m: (-1) ** m * 1e6)
    job.add_node(size=4)


def warm_up(job):
    """Memory rises while optimizer states are made; drift is not known yet."""

    def known(value):
        return lambda minute: value if minute >= 60 else None

    job.add_rank(
        0,
        PEAKS=lambda minute: min(60, 10 + minute) * GIB,
        DRIFT_RATIO=known(0.0),
        DRIFTING={("level",): known(0), ("floor",): known(0)},
        GROWTH=lambda minute: 1e8 if minute < 50 else 0.0,
    )
    job.add_node(size=1)


def no_baseline(job):
    """A short job, or one without steps: neither drift nor forecast is ever known; not even a capacity is."""
    unknown = dict.fromkeys(["DRIFT_RATIO", "GROWTH", "FORECAST_DRIFT_RATIO", "LIMIT", "OTHER"])
    job.add_rank(0, **unknown, DRIFTING={}, CHECKPOINT_PEAK={})
    job.add_node(size=1)


def restart(job):
    """A crash and a new attempt after four minutes, which learns its baseline anew."""
    for rank in range(2):
        job.add_rank(rank, Life(0, 60, State.CRASHED), DRIFT_RATIO=0.02)
        later = lambda minute: 0.0 if minute > 80 else None  # noqa: E731
        job.add_rank(rank, Life(64), attempt="b", DRIFT_RATIO=later, PEAKS=lambda m: min(40, m - 50) * GIB)
    job.add_node(size=2)


def restart_elsewhere(job):
    """The new attempt is on another node, as another part of the model; for a while both sidecars tell of the rank."""
    for rank in range(2):
        job.add_rank(rank, Life(0, 60, State.CRASHED), mesh={"tp": str(rank)})
        job.add_rank(rank, Life(63), node=1, attempt="b", mesh={"tp": "0", "pp": str(rank)})
    job.add_node(0, size=lambda minute: 2 if minute <= 75 else None)
    job.add_node(1, size=lambda minute: 2 if minute >= 63 else None)


def told_twice(job):
    """Two sidecars tell of one living rank."""
    for node in range(2):
        job.add_rank(0, node=node)
        job.add_rank(1, node=node)
        job.add_node(node, size=2)


def checkpoints(job):
    """Three minutes of every half hour."""
    saves = {("save",): 70 * GIB}
    job.add_rank(0, PEAKS=lambda minute: (78 if minute % 30 < 3 else 40) * GIB, CHECKPOINT_PEAK=saves)
    job.add_node(size=1)


def evaluations(job):
    """Ten minutes of every hour with much less, and on rank 0 with more on the CPU."""
    for rank in range(2):
        job.add_rank(rank, PEAKS=lambda minute: (12 if minute % 60 < 10 else 40) * GIB)
    job.add_node(size=2)


def clean_exits(job):
    """Ranks end one after the other; rank 0 has the last word."""
    for rank, ended in enumerate([155, 120, 110, 110]):
        job.add_rank(rank, Life(0, ended))
    job.add_node(size=lambda minute: 4 if minute < 157 else None)


def exits_on_two_nodes(job):
    """A node whose ranks have ended says nothing of the job any more."""
    job.add_rank(0, Life(0, 140))
    job.add_rank(1, Life(0, 110), node=1)
    job.add_node(0, size=lambda minute: 2 if minute < 142 else None)
    job.add_node(1, size=lambda minute: 2 if minute < 112 else None)


def job_ends(job):
    """All ranks at once; the sidecar stays, and is ended an hour later."""
    for rank in range(4):
        job.add_rank(rank, Life(0, 60))
    job.add_node(size=lambda minute: 4 if minute < 62 else None, up=lambda minute: int(minute < 120))
    job.line.silence(job.node(), range(120, job.line.minutes))


def job_ends_with_its_pod(job):
    """The sidecar ends with the job, and so does its target."""
    job.add_rank(0, Life(0, 61))
    job.add_node(size=1, up=lambda minute: 1 if minute < 60 else None)
    job.line.silence(job.node(), range(60, job.line.minutes))


def shrinks(job):
    """An elastic restart with half of the ranks; the other node tells of the old size until it forgets the dead."""
    for rank in range(4):
        job.add_rank(rank, Life(0, 40, State.CRASHED), node=rank // 2)
    for rank in range(2):
        job.add_rank(rank, Life(42), attempt="b")
    job.add_node(0, size=lambda minute: 4 if minute < 42 else 2)
    job.add_node(1, size=lambda minute: 4 if minute <= 55 else None)


def grows(job):
    """An elastic restart with twice the ranks, which begin within three minutes."""
    for rank in range(2):
        job.add_rank(rank, Life(0, 40, State.CRASHED))
    for rank in range(4):
        job.add_rank(rank, Life(42 + rank % 2 * 3), node=rank // 2, attempt="b")
    job.add_node(0, size=lambda minute: 2 if minute < 42 else 4)
    job.add_node(1, size=lambda minute: 4 if minute >= 42 else None)


def old_failures(job):
    """What attempts before counted is still told: from the beginning, and over a restart."""
    job.add_rank(0, START_TIMESTAMP=-7200, OOMS=3, RETRIES=40)
    job.add_rank(1, Life(0, 30, State.CRASHED), START_TIMESTAMP=-7200, OOMS=3, RETRIES=40)
    job.add_rank(1, Life(33), attempt="b", OOMS=3, RETRIES=40)
    job.add_node(size=2)


def zeros(job):
    """Nothing allocated, no capacity, no steps: nothing to divide by."""
    counters = dict.fromkeys(["STEPS", "STEP_TIME"], 0)
    job.add_rank(0, LIMIT=0, ALLOCATED=0, UNATTRIBUTED=GIB, RESERVED=GIB, FRAGMENTATION=0.9, **counters)
    job.add_node(size=1)


def cpu_only(job):
    """Training on the CPU, whose allocator keeps no statistics; four ranks of one host."""
    unknown = dict.fromkeys(["ALLOCATED", "RESERVED", "FRAGMENTATION"])
    for rank in range(4):
        job.add_rank(rank, device="cpu", PEAKS=10 * GIB, **unknown)
    job.add_node(size=4)


def pipeline(job):
    """Stages differ by nature; ranks of one stage do not."""
    for rank in range(4):
        stage = rank // 2
        job.add_rank(
            rank, device=f"cuda:{rank}", mesh={"dp": str(rank % 2), "pp": str(stage)}, PEAKS=(60 - 30 * stage) * GIB
        )
    job.add_node(size=4)


def roomy(job):
    """Fragments on a device with plenty of room; a small job whose few bytes lack names; bytes that need no name."""
    job.add_rank(0, FRAGMENTATION=0.6, UNATTRIBUTED=GIB // 4, ALLOCATED=GIB)
    job.add_rank(1, FRAGMENTATION=0.6, UNATTRIBUTED=-GIB)
    job.add_node(size=2)


def hiccups(job):
    """One record rejected once, three minutes without records, three without the sidecar, a retry now and then."""
    stops = lambda minute: int(50 <= minute < 53)  # noqa: E731
    states = {
        (state.value,): (lambda minute, state=state: int((state is State.STALE) == bool(stops(minute))))
        for state in (State.RUNNING, State.STALE)
    }
    job.add_rank(0, RANK_STATE=states, RETRIES=lambda minute: minute // 15)
    job.add_node(size=1, errors={"vanished": lambda minute: int(minute > 40)}, up=lambda m: int(not 60 <= m < 63))
    job.line.silence(job.node(), range(60, 63))


def labeler_of_the_dead(job):
    """A labeler was down in an attempt that is over; its node still tells of it."""
    job.add_rank(0, Life(0, 4, State.CRASHED), LABELER_UP={("fsdp2",): 0})
    job.add_rank(0, Life(5), node=1, attempt="b")
    job.add_node(0, size=lambda minute: 1 if minute < 20 else None)
    job.add_node(1, size=lambda minute: 1 if minute >= 5 else None)


JOBS = [
    flat,
    varying_lengths,
    warm_up,
    no_baseline,
    restart,
    restart_elsewhere,
    told_twice,
    checkpoints,
    evaluations,
    clean_exits,
    exits_on_two_nodes,
    job_ends,
    job_ends_with_its_pod,
    shrinks,
    grows,
    old_failures,
    zeros,
    cpu_only,
    pipeline,
    roomy,
    hiccups,
    labeler_of_the_dead,
]


@pytest.fixture(scope="module", params=[range(0), GAP], ids=["steady", "prometheus-restarts"])
def fired(request, promtool, tmp_path_factory):
    """All jobs watched by one Prometheus, as of a fleet."""
    line = Timeline(gap=request.param)
    for job in JOBS:
        job(line[job.__name__])
    return line.fired(promtool, tmp_path_factory.mktemp("silent"))


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_nothing_fires(fired, job):
    """Somebody would be woken for nothing."""
    assert {alert: when for (name, alert), when in fired.items() if name == job.__name__} == {}


def test_no_reason_fires(fired):
    """Somebody would be told of rejected records where one was, once."""
    assert {name for name, _ in fired} <= {job.__name__ for job in JOBS}
