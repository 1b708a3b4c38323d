"""torchmem against an allocator that shares no code with it: every step's peak, and what is held when a step ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jobs.fsdp2 import VARIANTS, Variant, fsdp2_job, variants
from jobs.model import Size, plain_job, recurrent_job
from jobs.ranks import run_alone, run_ranks
from jobs.watched import MESH_BYTES, Watched, count_foreign, watch
from torchmem.validation import witness

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.model import Job

SIZE = Size(num_layers=3)
NUM_STEPS = 4
NUM_STEPS_BEFORE = (0, 2)
PLAIN_JOBS: dict[str, Callable[[], Job]] = {
    "foreach": plain_job,
    "no_foreach": lambda: plain_job(foreach=False),
    "recurrent": recurrent_job,
}
PLAIN_NAMES = [f"{name}_after_{n}" for name in PLAIN_JOBS for n in NUM_STEPS_BEFORE]
QUICK_NAMES = ["reshard", "mixed"]
"""Sharded jobs that a quick run checks; the others are marked slow."""
SLOW_NAMES = [variant.name for variant in VARIANTS if variant.name not in QUICK_NAMES]
NAMES = [
    *(pytest.param(PLAIN_NAMES, name, id=name) for name in PLAIN_NAMES),
    *(pytest.param(QUICK_NAMES, name, id=name) for name in QUICK_NAMES),
    *(pytest.param(SLOW_NAMES, name, id=name, marks=pytest.mark.slow) for name in SLOW_NAMES),
]


def watch_fsdp2(_rank: int, world_size: int, directory: str, names: list[str]) -> dict[str, Watched]:
    """The named variants for this many ranks, one after the other in the same processes."""
    witness.install()
    return {
        variant.name: _watch_variant(variant, directory) for variant in variants(world_size) if variant.name in names
    }


def _watch_variant(variant: Variant, directory: str) -> Watched:
    foreign_bytes = count_foreign()
    job = fsdp2_job(variant, SIZE)
    return watch(
        job,
        directory=directory,
        num_steps=NUM_STEPS,
        foreign_bytes=foreign_bytes,
        optimizer_passed=variant.optimizer_passed,
    )


def watch_plain(_rank: int, _world_size: int, directory: str) -> dict[str, Watched]:
    """Every plain job, watched from its first step and from its third."""
    witness.install()
    return {
        f"{name}_after_{num_steps_before}": _watch_plain(make, num_steps_before, directory)
        for name, make in PLAIN_JOBS.items()
        for num_steps_before in NUM_STEPS_BEFORE
    }


def _watch_plain(make: Callable[[], Job], num_steps_before: int, directory: str) -> Watched:
    foreign_bytes = count_foreign()
    job = make()
    for _ in range(num_steps_before):
        job.step()
    return watch(job, directory=directory, num_steps=NUM_STEPS, foreign_bytes=foreign_bytes)


class Results:
    """What each rank saw, by job; a group of jobs runs when the first of them is asked for."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._by_job: dict[str, list[Watched]] = {}

    def of(self, group: list[str], name: str) -> list[Watched]:
        """One job's, by rank."""
        if name not in self._by_job:
            self._by_job |= self._run(group)
        return self._by_job[name]

    def _run(self, group: list[str]) -> dict[str, list[Watched]]:
        if group is PLAIN_NAMES:
            return {name: [watched] for name, watched in run_alone(watch_plain, 1, self._directory).items()}
        found: dict[str, list[Watched]] = {}
        for world_size in {variant.world_size for variant in VARIANTS if variant.name in group}:
            by_rank = run_ranks(watch_fsdp2, world_size, self._directory, group)
            found |= {name: [rank[name] for rank in by_rank] for name in by_rank[0]}
        return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Every job's figures."""
    return Results(str(tmp_path_factory.mktemp("records")))


@pytest.mark.parametrize(("group", "name"), NAMES)
def test_step_peak_is_the_truth(results: Results, group: list[str], name: str) -> None:
    """The tap would miss or invent blocks that are alive when a step peaks, on any rank, in any step."""
    for watched in results.of(group, name):
        assert len(watched.steps) == NUM_STEPS
        for step in watched.steps:
            assert 0 <= step.true_peak - sum(step.peak.values()) <= MESH_BYTES


@pytest.mark.parametrize(("group", "name"), NAMES)
def test_usage_is_the_truth(results: Results, group: list[str], name: str) -> None:
    """The tap would miss frees or allocations that last beyond a step, and drift."""
    for watched in results.of(group, name):
        for step in watched.steps:
            assert 0 <= step.true_end - sum(step.end.values()) <= MESH_BYTES


@pytest.mark.parametrize(("group", "name"), NAMES)
def test_lasting_reftypes_are_the_sum_of_their_storages(results: Results, group: list[str], name: str) -> None:
    """Parameters, gradients, optimizer state or buffers would be booked under another reftype, or twice."""
    prefix = "" if group is PLAIN_NAMES else "sharded_"
    for watched in results.of(group, name):
        for step in watched.steps:
            booked = {
                "parameter": step.end.get(f"{prefix}parameter", 0),
                "gradient": step.end.get(f"{prefix}gradient", 0),
                "optimizer_state": step.end.get("optimizer_state", 0),
                "buffer": step.end.get("buffer", 0),
            }
            assert booked == step.storages


@pytest.mark.parametrize(("group", "name"), NAMES)
def test_no_labeler_fails(results: Results, group: list[str], name: str) -> None:
    """A labeler would break on a kind of job that it claims to know, and its bytes be booked as ``other``."""
    assert [watched.disabled for watched in results.of(group, name) if watched.disabled] == []


@pytest.mark.parametrize(("group", "name"), NAMES)
def test_books_have_no_loose_ends(results: Results, group: list[str], name: str) -> None:
    """The tap would see a free of a block it does not know, an allocation twice, or lose a module's frame."""
    for watched in results.of(group, name):
        loose = ("num_unknown_frees", "num_double_allocations", "num_unmatched_pops", "num_ignored_devices")
        assert {counter: watched.counters[counter] for counter in loose} == dict.fromkeys(loose, 0)
