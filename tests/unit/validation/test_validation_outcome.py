"""The judgement of a row from plain figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchmem.validation.outcome import RankOutcome, Step, judged

END = {"parameter": 30, "sharded_parameter": 10, "gradient": 40, "optimizer_state": 80, "buffer": 5}
STORAGES = {"parameter": 40, "gradient": 40, "optimizer_state": 80, "buffer": 5}
STEP = Step(
    true_peak_bytes=10_000, true_end_bytes=200, peak={"activation": 9_000, "other": 1_000}, end=END, storages=STORAGES
)
RANK = RankOutcome(
    steps=[STEP, STEP],
    end_bytes=[200, 200],
    bare_seconds=[1.0, 2.0, 3.0],
    watched_seconds=[2.0, 3.0, 1.9],
    gradients_in_buckets=False,
    labelers_down=[],
    loose_ends={},
)


def judge(*ranks):
    return judged("row", ranks, tolerance=0.001, seconds=1.0)


def test_right_figures_are_ok():
    """A row that is right would be reported as off, or with other figures than its own."""
    outcome = judge(RANK, RANK)
    assert (outcome.status, outcome.problems) == ("ok", [])
    assert (outcome.peak_bytes, outcome.true_peak_bytes, outcome.ratio) == (10_000, 10_000, 1.0)
    assert (outcome.peak, outcome.slowdown, outcome.unattributed_share) == (STEP.peak, 1.0, 0.0)


@pytest.mark.parametrize("true_peak", [9_980, 10_020])
def test_the_worst_step_of_any_rank_decides(true_peak):
    """One wrong step on one rank would hide among the right ones."""
    wrong = replace(RANK, steps=[STEP, replace(STEP, true_peak_bytes=true_peak)])
    outcome = judge(RANK, wrong)
    assert (outcome.status, outcome.true_peak_bytes) == ("off", true_peak)
    assert outcome.ratio == pytest.approx(10_000 / true_peak)
    assert outcome.problems == [f"rank 1: step 2: peak 10,000 B, truth {true_peak:,} B ({10_000 / true_peak:.5f})"]


def test_within_tolerance_is_ok():
    """The few bytes that no one can reach would fail every row."""
    assert judge(replace(RANK, steps=[replace(STEP, true_peak_bytes=10_009), STEP])).status == "ok"


@pytest.mark.parametrize("kind", STORAGES)
def test_lasting_bytes_must_be_exact(kind):
    """A byte of parameters, gradients, optimizer state or buffers under another name would pass."""
    wrong = replace(STEP, storages={**STORAGES, kind: STORAGES[kind] + 1})
    outcome = judge(replace(RANK, steps=[wrong, wrong]))
    assert outcome.status == "off"
    assert outcome.problems == [f"rank 0: step 1: {kind} {STORAGES[kind]} B, tensors hold {STORAGES[kind] + 1} B"]


def test_gradients_in_buckets_count_as_buckets():
    """DDP's bucket views would be called off, or other buckets pass for gradients."""
    in_buckets = replace(STEP, end={**END, "gradient": 0, "gradient_bucket": 40})
    assert judge(replace(RANK, steps=[in_buckets, in_buckets], gradients_in_buckets=True)).status == "ok"
    assert judge(replace(RANK, steps=[in_buckets, in_buckets])).status == "off"


def test_engine_faults_are_problems():
    """A labeler that failed, or a free of an unknown block, would go unnoticed where totals are right by luck."""
    outcome = judge(replace(RANK, labelers_down=["ddp is off: KeyError: 1"], loose_ends={"num_unknown_frees": 2}))
    assert outcome.status == "off"
    assert outcome.problems == ["rank 0: labeler ddp is off: KeyError: 1", "rank 0: num_unknown_frees = 2"]


def test_unattributed_is_the_worst_of_all_steps():
    """What only one step of one rank could not name would not be shown."""
    assert judge(RANK, replace(RANK, end_bytes=[200, 150])).unattributed_share == 0.25
    assert judge(RANK, replace(RANK, end_bytes=[210, 200])).unattributed_share == pytest.approx(-0.05)
