"""The judgement of drift: what it says of simulated jobs, what resets it, and what it makes of odd numbers."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulated_runs import BENIGN, DRIFTING, simulate
from torchmem.model import Phase
from torchmem.wire.record import Identity
from torchmem_exporter.drift.composition import Composition, Part
from torchmem_exporter.drift.drift import ATTEMPT, CONFIGURATION, MANUAL, Drift, fingerprint_of
from torchmem_exporter.drift.floor import NUM_TIERS, TIER_BLOCKS
from torchmem_exporter.drift.learning import MAX_SAMPLES
from torchmem_exporter.drift.ring_steps import Step

GIB = 1 << 30
ORDINARY = int(Phase.FORWARD | Phase.BACKWARD | Phase.OPTIMIZER)
SEED = 77


def started():
    """What is remembered of a device before its first step."""
    drift = Drift()
    drift.begin("first", "8 ranks")
    return drift


def flat(start, stop, peak=10 * GIB, end=6 * GIB, phases=ORDINARY, size=0):
    """Steps of one second each that are all alike."""
    return [Step(i, 1000.0 + i, phases, peak, end, size) for i in range(start, stop)]


def leaking(start, stop, per_step, first=0):
    """Flat steps that keep so many bytes more each."""
    return [
        step._replace(
            peak_bytes=step.peak_bytes + per_step * (step.number - first),
            end_bytes=step.end_bytes + per_step * (step.number - first),
        )
        for step in flat(start, stop)
    ]


def first_alarm(steps):
    """The step at which either detector first alarms."""
    drift = started()
    for step in steps:
        drift.feed([step])
        judgement = drift.judge()
        if judgement.is_level_drifting or judgement.is_floor_growing:
            return step.number
    return None


@pytest.mark.parametrize("kind", BENIGN)
def test_benign_runs_are_not_alarmed_of(kind):
    """People would be woken for a job that does what it should."""
    assert first_alarm(simulate(kind, SEED).steps) is None


@pytest.mark.parametrize("kind", DRIFTING)
def test_drifts_are_found(kind):
    """A job would run out of memory without a warning."""
    run = simulate(kind, SEED)
    found = first_alarm(run.steps)
    assert found is not None
    assert run.onset < found < run.onset + (0.05 / run.speed if run.speed and run.speed < 2e-4 else 300)


def test_nothing_is_known_at_first():
    """A baseline, a drift or a growth would be published that nobody has seen yet."""
    drift = started()
    drift.feed(flat(0, 100))
    judgement = drift.judge(80 * GIB)
    assert judgement.baseline_bytes is judgement.drift_ratio is judgement.growth_bytes_per_second is None
    assert judgement.exhausted_at is None
    assert not judgement.is_level_drifting
    assert not judgement.is_floor_growing
    assert judgement.num_resets == {ATTEMPT: 0, CONFIGURATION: 0, MANUAL: 0}


def test_baseline_is_exact_where_all_steps_are_alike():
    """The published baseline would not be what the job holds."""
    drift = started()
    drift.feed([*flat(0, 3, peak=4 * GIB), *flat(3, 800)])
    judgement = drift.judge()
    assert judgement.baseline_bytes == 10 * GIB
    assert judgement.drift_ratio == 0
    assert judgement.growth_bytes_per_second == 0


def test_level_comes_back():
    """An alarm would stay on for ever after the cause has gone."""
    drift = started()
    drift.feed(flat(0, 600))
    drift.feed(flat(600, 800, peak=11 * GIB))
    up = drift.judge()
    drift.feed(flat(800, 1200))
    down = drift.judge()
    assert (up.is_level_drifting, down.is_level_drifting) == (True, False)
    assert up.drift_ratio == pytest.approx(0.1)
    assert down.drift_ratio == pytest.approx(0)


def test_drop_is_no_drift():
    """Somebody who saved memory would be alarmed for it."""
    drift = started()
    drift.feed([*flat(0, 600), *flat(600, 1000, peak=5 * GIB)])
    assert not drift.judge().is_level_drifting
    assert drift.judge().drift_ratio == pytest.approx(-0.5)


def test_growth_and_exhaustion_are_exact_for_a_steady_leak():
    """The alert would say a wrong time at which memory runs out."""
    per_step = 10 * GIB // 10000
    drift = started()
    drift.feed([*flat(0, 500), *leaking(500, 1200, per_step, first=500)])
    judgement = drift.judge(80 * GIB)
    assert judgement.is_floor_growing
    assert judgement.growth_bytes_per_second == pytest.approx(per_step, rel=1e-6)
    held = 10 * GIB + 699 * per_step
    assert judgement.exhausted_at == pytest.approx(1000 + 1199 + (80 * GIB - held) / per_step, rel=1e-6)
    assert drift.judge().exhausted_at is None
    assert drift.judge(GIB).exhausted_at == pytest.approx(1000 + 1199)


def test_leak_from_the_first_step_on_is_found():
    """A job that never settles would never be judged."""
    assert first_alarm(leaking(0, 700, 10 * GIB // 5000)) is not None


def test_leak_that_stops_is_no_leak_any_more():
    """An alarm would stay on after the growth has ended."""
    per_step = 10 * GIB // 10000
    drift = started()
    drift.feed([*flat(0, 500), *leaking(500, 1000, per_step, first=500)])
    grown = drift.judge().is_floor_growing
    drift.feed(flat(1000, 3000, peak=10 * GIB + 500 * per_step, end=6 * GIB + 500 * per_step))
    assert (grown, drift.judge().is_floor_growing) == (True, False)


@pytest.mark.parametrize("phase", [Phase.CHECKPOINT, Phase.EVAL])
def test_checkpoints_and_evaluations_are_set_apart(phase):
    """A peak during a long evaluation or a slow checkpoint would be a drift."""
    drift = started()
    drift.feed([*flat(0, 600), *flat(600, 620, peak=30 * GIB, end=20 * GIB, phases=ORDINARY | int(phase))])
    drift.feed(flat(620, 622, peak=20 * GIB, end=12 * GIB))
    assert drift.judge().drift_ratio == 0
    assert drift.highest_bytes == 10 * GIB


def test_job_that_always_evaluates_is_judged_too():
    """A job with a teacher in evaluation mode would never get a baseline."""
    drift = started()
    drift.feed(flat(0, 1000, phases=ORDINARY | int(Phase.EVAL)))
    assert drift.judge().baseline_bytes == 10 * GIB


def test_longer_inputs_than_ever_are_a_drift():
    """A step up to longer sequences would be explained away by their length."""
    drift = started()
    drift.feed(flat(0, 600, size=2048))
    drift.feed(flat(600, 800, peak=14 * GIB, size=4096))
    assert drift.judge().is_level_drifting


def test_sizes_explain_what_they_always_did():
    """Batches of long sequences in a row would be a drift although each is as large as its length makes it."""

    def steps(start, stop, lengths):
        return [
            Step(i, float(i), ORDINARY, 2 * GIB + lengths[i % len(lengths)] * 4_000_000, GIB, lengths[i % len(lengths)])
            for i in range(start, stop)
        ]

    drift = started()
    drift.feed(steps(0, 1000, [512, 1024, 2048, 640, 1536, 768, 1280]))
    level = drift.judge().baseline_bytes
    drift.feed(steps(1000, 1300, [2048]))
    judgement = drift.judge()
    assert level == pytest.approx(2 * GIB + 1024 * 4_000_000, rel=1e-3)
    assert judgement.drift_ratio == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    ("attempt", "fingerprint", "reason"),
    [("second", "8 ranks", ATTEMPT), ("first", "16 ranks", CONFIGURATION), ("second", "16 ranks", CONFIGURATION)],
)
def test_what_resets_a_baseline_is_counted(attempt, fingerprint, reason):
    """A restart on other hardware would look like a drift, or the reason would be wrong."""
    drift = started()
    drift.feed(flat(0, 600))
    drift.begin(attempt, fingerprint)
    judgement = drift.judge()
    assert judgement.baseline_bytes is None
    assert judgement.num_resets == {ATTEMPT: 0, CONFIGURATION: 0, MANUAL: 0} | {reason: 1}


def test_steps_of_a_new_attempt_count_from_its_own_first():
    """A restarted job, whose steps begin at 0 again, would never be judged."""
    drift = started()
    drift.feed(flat(0, 600))
    drift.begin("second", "8 ranks")
    drift.feed(flat(0, 600, peak=20 * GIB))
    assert drift.judge().baseline_bytes == 20 * GIB


def test_same_attempt_resets_nothing():
    """Each scrape would start the baseline anew."""
    drift = started()
    drift.feed(flat(0, 600))
    drift.begin("first", "8 ranks")
    assert drift.judge().baseline_bytes == 10 * GIB


def test_kept_baseline_can_be_held_against_a_new_run():
    """A baseline kept by name could not judge a later run."""
    before, after = started(), started()
    before.feed(flat(0, 600))
    after.adopt(before.level, None)
    after.feed(flat(0, 200, peak=11 * GIB))
    judgement = after.judge()
    assert judgement.baseline_bytes == 10 * GIB
    assert judgement.is_level_drifting
    assert judgement.num_resets[MANUAL] == 1


def test_missed_and_repeated_steps_change_nothing():
    """A ring that was overrun, or read twice, would break the judgement."""
    drift = started()
    drift.feed(flat(0, 600))
    drift.feed(flat(300, 600, peak=30 * GIB))
    drift.feed(flat(5000, 6000))
    judgement = drift.judge()
    assert judgement.drift_ratio == 0
    assert judgement.growth_bytes_per_second == 0


def test_clock_that_is_set_back_changes_nothing():
    """Growth would be infinite, negative or wrong after the clock was set."""
    per_step = 10 * GIB // 10000
    steps = [*flat(0, 500), *leaking(500, 1200, per_step, first=500)]
    drift = started()
    drift.feed(step._replace(ended_at=step.ended_at - (3600 if step.number > 900 else 0)) for step in steps)
    assert drift.judge().growth_bytes_per_second == pytest.approx(per_step, rel=1e-6)


def test_usual_composition_is_that_of_an_ordinary_peak():
    """What grew would be told against the peak of a checkpoint, or of an evaluation."""
    drift = started()
    usual = Composition(parts=[Part("layers.0", "activation", 10 * GIB)])
    drift.observe(usual)
    assert drift.usual is None
    drift.feed(flat(0, 600))
    assert drift.wants_composition
    for unusual in (Part("(root)", "checkpoint", 20 * GIB), Part("layers.0", "activation", 5 * GIB)):
        drift.observe(Composition(parts=[unusual]))
        assert drift.wants_composition
    drift.observe(usual)
    assert drift.usual == usual
    assert (drift.is_ordinary(10 * GIB), drift.is_ordinary(20 * GIB)) == (True, False)


def test_fingerprint_is_of_the_job_and_not_of_the_process():
    """Each restart would count as another configuration, or another world size as the same."""
    fields = {
        "train_job": "a",
        "rank": 1,
        "local_rank": 1,
        "pid": 7,
        "host": "n",
        "torch_version": "",
        "engine": "native",
    }
    one = Identity(**fields, torchmem_version="", attempt="1", start_time=0.0, world_size=8, mesh={"dp": 1, "tp": 0})
    assert fingerprint_of(one) == fingerprint_of(msgspec.structs.replace(one, pid=8, attempt="2", host="m"))
    assert fingerprint_of(one) != fingerprint_of(msgspec.structs.replace(one, world_size=16))
    assert fingerprint_of(one) != fingerprint_of(msgspec.structs.replace(one, mesh={"dp": 1}))


INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
odd_steps = st.lists(
    st.builds(Step, INT64, st.floats(), st.integers(0, 63), INT64, INT64, st.floats() | INT64), max_size=30
)


@given(odd_steps, st.integers(0, 400), odd_steps, st.none() | INT64)
@settings(deadline=None, max_examples=60)
def test_odd_numbers_never_raise(first, num_flat, last, limit):
    """One rank's nonsense would stop the judgement of all."""
    drift = started()
    drift.feed(first)
    drift.feed(flat(drift.last_step + 1, drift.last_step + 1 + num_flat))
    drift.feed(last)
    judgement = drift.judge(limit)
    numbers = (
        judgement.baseline_bytes,
        judgement.drift_ratio,
        judgement.growth_bytes_per_second,
        judgement.exhausted_at,
    )
    assert all(number is None or math.isfinite(number) for number in numbers)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(drift), type=Drift).judge(limit) == judgement


@given(st.integers(0, 1 << 32), st.lists(st.tuples(INT64, INT64, INT64), min_size=16, max_size=16))
@settings(deadline=None, max_examples=30)
def test_odd_numbers_in_blocks_never_raise(start, rows):
    """Levels, curves and floors of nonsense would stop the judgement of all."""
    drift = started()
    drift.feed(Step(start + i, float(i), 0, *rows[i * i % 16]) for i in range(2200))
    drift.judge(1 << 40)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(drift), type=Drift).judge(0) == drift.judge(0)


@given(st.sampled_from([*BENIGN, *DRIFTING]), st.lists(st.integers(1, 700), min_size=3, max_size=12))
@settings(deadline=None, max_examples=12)
def test_batches_make_no_difference(kind, sizes):
    """What is judged would depend on when the sidecar happened to look, or on its restarts."""
    steps = simulate(kind, SEED).steps[: sum(sizes)]
    one_by_one, in_batches = started(), started()
    for step in steps:
        one_by_one.feed([step])
    start = 0
    for size in sizes:
        in_batches.feed(steps[start : start + size])
        start += size
        in_batches = msgspec.msgpack.decode(msgspec.msgpack.encode(in_batches), type=Drift)
    assert in_batches == one_by_one


@pytest.mark.parametrize("kind", ["noise", "autocorrelated lengths", "leak of 0.01% a step"])
def test_state_is_bounded(kind):
    """The sidecar would grow with the length of the job: a leak of its own."""
    drift, highest = started(), 0
    steps = simulate(kind, SEED).steps
    for round_ in range(4):
        for step in steps:
            drift.feed([step._replace(number=step.number + round_ * len(steps))])
            if step.number % 64 == 0:
                highest = max(highest, len(msgspec.msgpack.encode(drift)))
    assert highest < 64 * MAX_SAMPLES + 24 * NUM_TIERS * TIER_BLOCKS
    assert len(msgspec.msgpack.encode(drift)) < 16 << 10
