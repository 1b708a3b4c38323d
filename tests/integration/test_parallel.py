"""DDP and FSDP1 against an allocator that shares no code with torchmem, and against the job's own sizes."""

from __future__ import annotations

import gc
import tempfile
import threading
import warnings
import weakref
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import torchmem
from jobs.model import Transformer
from jobs.parallel import DDP_VARIANTS, FSDP1_VARIANTS, SMALL, Ddp, Fsdp1, ddp_job, fsdp1_job
from jobs.ranks import run_alone, run_ranks
from jobs.watched import Watched, count_foreign, watch
from torchmem.validation import witness as truth

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.model import Job

pytestmark = pytest.mark.slow

NUM_STEPS = 3
BEFORE = (0, 2)
"""Steps behind the job when the monitor is installed."""
NAMES = [f"{kind}_{v.name}" for kind, variants in (("ddp", DDP_VARIANTS), ("fsdp1", FSDP1_VARIANTS)) for v in variants]
CASES = [(name, before) for name in NAMES for before in BEFORE]


def watch_all(_rank: int, _world_size: int, directory: str, prefix: str = "") -> dict[tuple[str, int], Watched]:
    """Every variant of that prefix, installed on a fresh job and on one that has trained."""
    warnings.simplefilter("ignore")  # torch deprecates FSDP1 and comments on what DDP is told
    truth.install()
    makes: dict[str, Callable[[], Job]] = {f"ddp_{v.name}": lambda v=v: ddp_job(v) for v in DDP_VARIANTS}
    makes |= {f"fsdp1_{v.name}": lambda v=v: fsdp1_job(v) for v in FSDP1_VARIANTS}
    cases = [case for case in CASES if case[0].startswith(prefix)]
    return {(name, before): _watch(makes[name], before, directory) for name, before in cases}


def _watch(make: Callable[[], Job], num_steps_before: int, directory: str) -> Watched:
    foreign_bytes = count_foreign()
    job = make()
    for _ in range(num_steps_before):
        job.step()
    return watch(job, directory=directory, num_steps=NUM_STEPS, foreign_bytes=foreign_bytes)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, int], Watched]]:
    """Every job's figures, by rank."""
    return run_ranks(watch_all, 2, str(tmp_path_factory.mktemp("records")))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Watched]:
    """FSDP1 where no communication thread decides when a buffer is let go, so that every run peaks alike."""
    return run_alone(watch_all, 2, str(tmp_path_factory.mktemp("records")), "fsdp1_")


def variant_of(name: str) -> Ddp | Fsdp1:
    return next(v for v in (*DDP_VARIANTS, *FSDP1_VARIANTS) if name in (f"ddp_{v.name}", f"fsdp1_{v.name}"))


def unseen_bytes(name: str) -> int:
    """DDP's two tables of the parameters that were used: made with the wrapper, before torchmem comes."""
    variant = variant_of(name)
    used = isinstance(variant, Ddp) and (variant.static_graph or variant.find_unused)
    return 2 * torch.int32.itemsize * len(list(_meta().parameters())) if used else 0


def _meta() -> Transformer:
    with torch.device("meta"):
        return Transformer(SMALL)


def parameter_bytes() -> int:
    return sum(p.numel() * p.itemsize for p in _meta().parameters())


@pytest.mark.parametrize(("name", "before"), CASES)
def test_peak_and_usage_are_the_truth(watched, name, before):
    """The tap would miss or invent blocks of a replicated or flat-sharded job."""
    for by_case in watched:
        for step in by_case[name, before].steps:
            assert step.true_peak - sum(step.peak.values()) == unseen_bytes(name)
            assert step.true_end - sum(step.end.values()) == unseen_bytes(name)


@pytest.mark.parametrize(("name", "before"), CASES)
def test_lasting_reftypes_are_the_sum_of_their_storages(watched, name, before):
    """Parameters, gradients or optimizer state would be booked under another reftype, or twice."""
    in_buckets = getattr(variant_of(name), "bucket_view", False)
    for by_case in watched:
        for step in by_case[name, before].steps:
            gradients = ("gradient_bucket",) if in_buckets else ("gradient", "sharded_gradient")
            booked = {
                "parameter": step.end.get("parameter", 0) + step.end.get("sharded_parameter", 0),
                "gradient": sum(step.end.get(reftype, 0) for reftype in gradients),
                "optimizer_state": step.end.get("optimizer_state", 0),
                "buffer": step.end.get("buffer", 0),
            }
            assert booked == step.storages


@pytest.mark.parametrize(("name", "before"), CASES)
def test_no_labeler_fails_and_no_loose_ends(watched, name, before):
    """A labeler would break on a kind of job that it claims to know, or the tap lose blocks or frames."""
    for by_case in watched:
        result = by_case[name, before]
        assert result.disabled == []
        loose = ("num_unknown_frees", "num_double_allocations", "num_unmatched_pops", "num_ignored_devices")
        assert {counter: result.counters[counter] for counter in loose} == dict.fromkeys(loose, 0)


@pytest.mark.parametrize(("name", "before"), [case for case in CASES if case[0].startswith("ddp_")])
def test_buckets_are_as_large_as_the_gradients(watched, name, before):
    """DDP's buckets would be missed when they are older than the monitor, or pass for scratch or activations."""
    for by_case in watched:
        for step in by_case[name, before].steps:
            assert step.peak["gradient_bucket"] == step.end["gradient_bucket"] == parameter_bytes()


@pytest.mark.parametrize("before", BEFORE)
def test_gradients_kept_apart_from_their_buckets_are_gradients(watched, before):
    """What ``no_sync`` accumulates would be scratch: it is gone into the buckets when the optimizer steps."""
    for by_case in watched:
        assert by_case["ddp_views_accumulate", before].steps[-1].peak["gradient"] == parameter_bytes()


@pytest.mark.parametrize("before", BEFORE)
def test_flat_gradients_accumulate_unsharded(alone, before):
    """The whole gradient that FSDP1 keeps in ``no_sync`` would pass for scratch."""
    assert alone["fsdp1_accumulate", before].steps[-1].peak["unsharded_gradient"] == parameter_bytes()


@pytest.mark.parametrize("before", BEFORE)
def test_a_sharded_flat_parameter_is_gathered_whole(alone, before):
    """The gathered parameters would pass for activations, or be counted at their shard's size."""
    peak = alone["fsdp1_full", before].steps[-1].peak
    assert peak["sharded_parameter"] * 2 == parameter_bytes()
    assert peak["unsharded_parameter"] == parameter_bytes()
    replicated = alone["fsdp1_no_shard", before].steps[-1].peak
    assert replicated["parameter"] == parameter_bytes()
    assert "unsharded_parameter" not in replicated


def look_at_buckets_in_a_hook(_rank: int, _world_size: int) -> list[int]:
    """Trains with a communication hook in Python, during which another thread asks where the buckets are."""
    job, found, threads = ddp_job(DDP_VARIANTS[0]), [], []

    def hook(_state, bucket):  # DDP would take issue with annotations that are strings
        asking = threading.Event()

        def ask() -> None:
            asking.set()
            found.append(len(monitor._native.bucket_storages(job.model.reducer)))

        threads.append(threading.Thread(target=ask))
        threads[-1].start()
        asking.wait()
        threads[-1].join(0.2)  # it waits for the reducer, which waits for this hook
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    job.model.register_comm_hook(None, hook)
    with tempfile.TemporaryDirectory() as folder, torchmem.install(job.model, job.optimizer, dir=folder) as monitor:
        job.step()
        for thread in threads:
            thread.join()
    return found


def test_buckets_can_be_looked_at_during_a_hook_in_python():
    """A backward in one thread and a forward in another would wait for each other for ever: the GIL, DDP's lock."""
    for found in run_ranks(look_at_buckets_in_a_hook, 2):
        assert found
        assert len(set(found)) == 1


def drop_a_model_with_methods_of_its_own(_rank: int, _world_size: int) -> tuple[bool, list[str]]:
    """Whether a sharded model whose groups another tool has patched can go while it is watched; what went off."""

    class Patched:
        """What torch's own tracker leaves on a group."""

        def __init__(self, group: object, name: str) -> None:
            self.group, self.original = group, getattr(group, name)

        def __call__(self, *args: object, **kwargs: object) -> object:
            return self.original(*args, **kwargs)

    model = Transformer(SMALL)
    for block in model.blocks():
        fully_shard(block)
    fully_shard(model)
    for module in (*model.blocks(), model):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for name in ("unshard", "wait_for_unshard", "pre_backward", "post_backward"):
                setattr(group, name, Patched(group, name))
    gone = weakref.ref(model)
    with tempfile.TemporaryDirectory() as folder, torchmem.install(model, dir=folder) as monitor:
        model(torch.zeros(2, SMALL.seq, dtype=torch.long)).sum().backward()
        failures = [labeler.reason for labeler in monitor.snapshot().labelers if not labeler.up]
        del model, module, group, block
        gc.collect()
        return gone() is None, failures


def test_a_model_with_patched_groups_can_go():
    """A sharded model that the job drops would stay, because the way back from our patches holds its groups."""
    assert run_alone(drop_a_model_with_methods_of_its_own, 2) == (True, [])
