"""A sharded job on hosts without a compiler: what the samples say, held against the native engine on the same job."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist

import torchmem
from jobs.books import step_ends, step_peaks
from jobs.fsdp2 import Variant, fsdp2_job
from jobs.model import Size
from jobs.ranks import run_alone, run_ranks
from sidecars import application, ask, series

pytestmark = pytest.mark.slow

SIZE = Size(num_layers=3, batch=8)
EVERY = 4
SAMPLED = [2, 6, 10]
NUM_STEPS = 11
RANDOM_STATE_BYTES = 5056
VARIANTS = (
    Variant("reshard"),
    Variant("mixed_keep", mixed_precision=True, reshard_after_forward=False),
    Variant("recompute", recompute=True),
)


class Seen(NamedTuple):
    """What one rank brings home of one variant."""

    engine: str
    step: int
    sampled: list
    faults: list
    warned: list
    peaks: dict
    ends: dict
    text: str


def no_compiler(folder):
    """The environment of a host on which nothing can be compiled, and nothing is yet."""
    return {"PATH": "/nowhere", "CXX": "/nonexistent", "TORCHMEM_CACHE_DIR": str(folder / "cache")}


def watched(variant, directory):
    """Runs the job; what its last record says, what was warned of, and what a sidecar says while it runs."""
    job = fsdp2_job(variant, SIZE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = torchmem.install(job.model, job.optimizer, dir=directory, publish_interval=60.0, sample_every=EVERY)
    with monitor:
        for _ in range(NUM_STEPS):
            job.step()
        record = monitor.snapshot()
    dist.barrier()  # every rank's last record is there
    return Seen(
        engine=record.identity.engine,
        step=record.clock.step,
        sampled=memoryview(record.ring.steps).cast("q").tolist(),
        faults=[one.name for one in record.labelers if not one.up],
        warned=[str(w.message) for w in caught if "torchmem" in str(w.message)],
        peaks=step_peaks(record, "cpu"),
        ends=step_ends(record, "cpu"),
        text=ask(application(directory)).text,
    )


def without_compiler(_rank, _world_size, folder):
    """Each variant where nothing can be compiled."""
    with mock.patch.dict(os.environ, no_compiler(Path(folder))):
        return [watched(variant, Path(folder) / f"without-{variant.name}") for variant in VARIANTS]


def with_compiler(_rank, _world_size, folder):
    """Each variant under the native engine."""
    return [watched(variant, Path(folder) / f"with-{variant.name}") for variant in VARIANTS]


def differs(ours, theirs):
    """By reftype, the bytes by which two compositions differ; those that are equal left out."""
    found = {reftype: ours.get(reftype, 0) - theirs.get(reftype, 0) for reftype in {*ours, *theirs}}
    return {reftype: num_bytes for reftype, num_bytes in found.items() if num_bytes}


def is_explained(difference):
    """Whether checkpointing's copies of the random state are all: those are made below the dispatcher."""
    kept = -difference.get("activation", 0)
    return set(difference) <= {"activation"} and 0 <= kept <= SIZE.num_layers * RANDOM_STATE_BYTES


def check_samples(seen):
    """What was sampled, and that it is known to be a sample."""
    assert (seen.engine, seen.step, seen.sampled) == ("dispatch", NUM_STEPS, SAMPLED)
    assert seen.faults == ["engine"]
    assert seen.warned[0].startswith(f"torchmem counts only one step in {EVERY}: no C++ compiler found")


def check_series(seen, rank):
    """Of the rank's own scrape."""
    found = series(seen.text)
    of_rank = {
        (name, dict(labels)["rank"]): (dict(labels), value)
        for (name, labels), value in found.items()
        if name in {"torchmem_rank_info", "torchmem_step_number", "torchmem_memory_peak_bytes"}
    }
    for each in ("0", "1"):
        assert of_rank["torchmem_rank_info", each][0]["engine"] == "dispatch"
        assert of_rank["torchmem_step_number", each][1] == NUM_STEPS
    highest = max(sum(peak.values()) for peak in seen.peaks.values())
    assert of_rank["torchmem_memory_peak_bytes", str(rank)][1] == highest


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """What the native engine says of each variant."""
    return run_alone(with_compiler, 2, str(tmp_path_factory.mktemp("native")))


def test_samples_say_what_the_native_engine_says(native, tmp_path):
    """Where nothing can be compiled, figures would be wrong."""
    # Where collectives move nothing: gloo's threads let go of buffers when they come to it, in each run at another
    # moment.
    for seen, theirs in zip(run_alone(without_compiler, 2, str(tmp_path)), native, strict=True):
        check_samples(seen)
        for number in SAMPLED:
            difference = differs(seen.peaks[number], theirs.peaks[number])
            assert is_explained(difference), (number, difference)
            assert differs(seen.ends[number], theirs.ends[number]) == {}, number


def test_every_rank_samples_and_publishes(native, tmp_path):
    """Samples would be of different steps on each rank, not published, or not add up where ranks communicate."""
    for rank, found in enumerate(run_ranks(without_compiler, 2, str(tmp_path))):
        for seen, theirs in zip(found, native, strict=True):
            check_samples(seen)
            check_series(seen, rank)
            for number in SAMPLED:
                ours, whole = sum(seen.peaks[number].values()), sum(theirs.peaks[number].values())
                assert abs(ours / whole - 1) < 0.15, (number, seen.peaks[number], theirs.peaks[number])
