"""Hybrid sharding and tensor parallelism against an independent allocator and the job's own sizes, on gloo ranks."""

from __future__ import annotations

import pytest

from jobs.meshes import MESHES, MeshJob, mesh_job
from jobs.ranks import run_alone, run_ranks
from jobs.watched import MESH_BYTES, Watched, count_foreign, watch
from torchmem.validation import witness as truth

pytestmark = pytest.mark.slow

NUM_STEPS = 3
NAMES = [mesh.name for mesh in MESHES]
BLOCK_NUMEL = 2 * 64 + (64 + 1) * 256 + (256 + 1) * 64
FP32, BF16 = 4, 2


def watch_all(_rank: int, world_size: int, directory: str) -> dict[str, Watched]:
    """Every mesh of this many ranks."""
    truth.install()
    return {mesh.name: _watch(mesh.name, directory) for mesh in MESHES if mesh.world_size == world_size}


def _watch(name: str, directory: str) -> Watched:
    foreign_bytes = count_foreign()
    job: MeshJob = mesh_job(next(mesh for mesh in MESHES if mesh.name == name))
    return watch(job, directory=directory, num_steps=NUM_STEPS, foreign_bytes=foreign_bytes)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Watched]]:
    """Every job's figures, by rank."""
    directory = str(tmp_path_factory.mktemp("records"))
    ranks = [run_ranks(watch_all, world_size, directory) for world_size in (2, 4)]
    return {name: [rank[name] for rank in by_rank] for by_rank in ranks for name in by_rank[0]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Watched]:
    """The same where no communication thread decides when a buffer is let go, so that every run peaks alike."""
    return run_alone(watch_all, 4, str(tmp_path_factory.mktemp("records")))


@pytest.mark.parametrize("name", NAMES)
def test_peak_and_usage_are_the_truth(watched, name):
    """The tap would miss or invent blocks where collectives, subclasses and redistribution allocate."""
    for result in watched[name]:
        assert len(result.steps) == NUM_STEPS
        for step in result.steps:
            assert 0 <= step.true_peak - sum(step.peak.values()) <= MESH_BYTES
            assert 0 <= step.true_end - sum(step.end.values()) <= MESH_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_lasting_reftypes_are_the_sum_of_their_storages(watched, name):
    """The parts of a DTensor would be booked under another reftype than the parameter or gradient that it is."""
    prefix = "" if name in ("tensor", "sequence") else "sharded_"
    for result in watched[name]:
        assert result.disabled == []
        for step in result.steps:
            assert step.end[f"{prefix}parameter"] == step.storages["parameter"]
            assert step.end[f"{prefix}gradient"] == step.storages["gradient"]
            assert step.end["optimizer_state"] == step.storages["optimizer_state"]


def test_gradients_of_unsharded_dtensors_are_named(alone):
    """Under tensor parallelism the whole gradients of a block would be scratch until they are reduced."""
    peak = alone["tensor_sharded"].steps[-1].peak
    # At the peak all of the block's gradients are there but for the bias, of which a rank has 128 values, made last.
    assert peak["unsharded_gradient"] == peak["all_gather"] - FP32 * 128


def test_a_low_precision_all_reduce_has_a_buffer(alone):
    """Hybrid sharding's all-reduce buffer would be booked as the reduce-scatter's."""
    assert alone["hybrid_low"].steps[-1].peak["all_reduce"] == BF16 * BLOCK_NUMEL // 2
    assert "all_reduce" not in alone["hybrid"].steps[-1].peak


def test_gradients_waiting_for_the_all_reduce_are_its(alone):
    """What a block keeps reduced within its shard group, for a later all-reduce, would be scratch."""
    # Those of all three blocks, less the last one's, which is being all-reduced already.
    assert alone["hybrid_accumulate"].steps[-1].peak["all_reduce"] == 2 * FP32 * BLOCK_NUMEL // 2
