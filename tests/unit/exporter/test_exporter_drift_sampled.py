"""The judgement of drift where only one step in so many is known: what a fallback engine sampled."""

from __future__ import annotations

import pytest

from torchmem.model import Phase
from torchmem_exporter.drift.drift import Drift
from torchmem_exporter.drift.ring_steps import Step

GIB = 1 << 30
EVERY = 200
STEP_SECONDS = 0.5
ORDINARY = int(Phase.FORWARD | Phase.BACKWARD | Phase.OPTIMIZER)


def sampled(num_samples, grows_from=0, per_step=0):
    """One step in 200, from the second on, that keeps so many bytes more each from one on."""
    found = []
    for number in range(2, 2 + EVERY * num_samples, EVERY):
        kept = per_step * max(0, number - grows_from)
        found.append(Step(number, 1000 + STEP_SECONDS * number, ORDINARY, 10 * GIB + kept, 6 * GIB + kept))
    return found


def judged(steps):
    """What is known after them; and the number of the first step at which a leak was."""
    drift = Drift()
    drift.begin("first", "8 ranks")
    first = None
    for step in steps:
        drift.feed([step])
        if first is None and drift.judge().is_floor_growing:
            first = step.number
    return drift.judge(limit_bytes=80 * GIB), first


def test_a_baseline_is_known_after_as_many_samples_as_steps():
    """A job of which steps are sampled would never have a baseline, or one of other bytes."""
    assert judged(sampled(100))[0].baseline_bytes is None
    judgement, leak = judged(sampled(400))
    assert (judgement.baseline_bytes, judgement.is_level_drifting, leak) == (10 * GIB, False, None)
    assert judgement.drift_ratio == 0


@pytest.mark.parametrize("per_step", [8192, 32768])
def test_growth_is_by_the_second_and_not_by_the_sample(per_step):
    """A leak would look 200 times as fast as it is, and the device seem full far too early; or not be seen at all."""
    begins = 300 * EVERY
    judgement, leak = judged(sampled(1600, begins, per_step))
    assert leak is not None
    assert leak > begins
    assert judgement.growth_bytes_per_second == pytest.approx(per_step / STEP_SECONDS, rel=0.05)
    last = 2 + EVERY * 1599
    full_at = 1000 + STEP_SECONDS * (begins + 70 * GIB / per_step)
    assert judgement.exhausted_at == pytest.approx(full_at, rel=0.05)
    assert judgement.exhausted_at > 1000 + STEP_SECONDS * last


def test_a_higher_level_is_seen():
    """A configuration that takes a tenth more would go unnoticed between samples."""
    steps = [s if s.number < 300 * EVERY else s._replace(peak_bytes=11 * GIB) for s in sampled(450)]
    judgement, _ = judged(steps)
    assert judgement.is_level_drifting
    assert judgement.drift_ratio == pytest.approx(0.1)
