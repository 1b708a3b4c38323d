"""The FSDP2 labeler on real jobs: everything put back, owners right, failures contained."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import torchmem
from jobs.fsdp2 import Variant, fsdp2_job
from jobs.ranks import run_alone, run_ranks
from torchmem.engine import native
from torchmem.model import RefType

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


def settings() -> dict[str, Any]:
    return {"dir": tempfile.mkdtemp(), "publish_interval": 60.0}


def groups_of(model) -> list:
    return [g for m in model.modules() if isinstance(m, FSDPModule) for g in m._get_fsdp_state()._fsdp_param_groups]


def touched(model) -> list:
    """Everything install() may touch, as it is now."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.optim import optimizer

    return [
        [dict(getattr(module, name)) for module in model.modules() for name in HOOKS],
        dict(vars(FSDPParamGroup)),
        [sorted(vars(group)) for group in groups_of(model)],
        dict(optimizer._global_optimizer_pre_hooks),
        dict(optimizer._global_optimizer_post_hooks),
        native.load().cpu_allocator(),
    ]


def restore(_rank: int, _world_size: int) -> tuple[bool, bool, int]:
    job = fsdp2_job()
    job.step(job.batches())
    before = touched(job.model)
    monitor = torchmem.install(job.model, job.optimizer, **settings())
    while_on = touched(job.model)
    job.step(job.batches())
    monitor.close()
    events = native.load().counters()["num_events"]
    same = touched(job.model) == before
    job.step(job.batches())
    return same, while_on != before, native.load().counters()["num_events"] - events


def test_close_restores_fsdp2():
    """After close() a hook table, FSDP2's class or the allocator would differ, or bytes still be counted."""
    assert run_ranks(restore, 2) == [(True, True, 0)] * 2


def owners(_rank: int, _world_size: int) -> list[tuple[int, int, int]]:
    """By kind, (right bytes, all bytes, wrong reftype) of what the books say of each tensor we can reach."""
    job = fsdp2_job(Variant("keep", reshard_after_forward=False))
    engine = native.load()
    found = []
    with torchmem.install(job.model, job.optimizer, **settings()) as monitor:
        job.step(job.batches())
        batch = job.batches()[0]
        loss = job.model(batch.tokens).float().logsumexp(-1).mean()
        names = {name: index for index, name in enumerate(monitor.snapshot().modules)}
        holders = {id(m): n for n, m in job.model.named_modules()}
        for group in groups_of(job.model):
            for parameter in group.fsdp_params:
                size, owner, reftype = engine.lookup(parameter.all_gather_outputs[0].data_ptr())
                holder = holders[id(parameter._module_info.module)]
                expected = next(names[n] for n in prefixes(holder) if n in names)
                found.append((size * (owner == expected), size, int(reftype != RefType.UNSHARDED_PARAMETER)))
        loss.backward()
        for parameter in job.model.parameters():
            local = parameter.grad._local_tensor
            size, _, reftype = engine.lookup(local.untyped_storage().data_ptr())
            found.append((size, size, int(reftype != RefType.SHARDED_GRADIENT)))
    return found


def prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) or "(root)" for n in range(len(parts), -1, -1)]


def test_owners_and_reftypes_of_reachable_tensors():
    """An unsharded parameter would belong to another module, or a sharded gradient be booked as something else."""
    for found in run_ranks(owners, 2):
        assert found
        assert all(right == whole for right, whole, _ in found)
        assert sum(wrong for _, _, wrong in found) == 0


def shadowed(_rank: int, _world_size: int) -> list[str]:
    job = fsdp2_job()
    for group in groups_of(job.model):
        group.post_backward = group.post_backward
    job.step(job.batches())
    before = touched(job.model)
    with torchmem.install(job.model, job.optimizer, **settings()) as monitor:
        job.step(job.batches())
        record = monitor.snapshot()
        books = memoryview(record.ring.devices[0].step_end).cast("q").tolist()
        kinds = [record.reftypes[i] for i, num_bytes in enumerate(books) if num_bytes]
    assert touched(job.model) == before
    return kinds


def test_groups_with_methods_of_their_own():
    """A group on which another tool left a bound method would bypass the labels."""
    assert "sharded_gradient" in run_alone(shadowed, 2)


def broken(_rank: int, _world_size: int) -> tuple[dict[str, bool], bool]:
    from torchmem.labelers.fsdp2 import Fsdp2Labeler

    def fail(*_: object) -> None:
        raise RuntimeError("changed")

    job = fsdp2_job()
    Fsdp2Labeler._target = fail
    with torchmem.install(job.model, job.optimizer, **settings()) as monitor:
        for _ in range(2):
            job.step(job.batches())
        record = monitor.snapshot()
        whole = record.devices[0].usage_bytes > 0
    return {labeler.name: labeler.up for labeler in record.labelers}, whole


def test_a_changed_torch_costs_one_labeler():
    """A failure in the FSDP2 labeler would stop the job or the other labelers."""
    states, whole = run_alone(broken, 2)
    assert [name for name, up in states.items() if not up] == ["fsdp2"]
    assert whole


def identical(_rank: int, _world_size: int, watched: str) -> list[list[float]]:
    job = fsdp2_job(Variant("mixed", mixed_precision=True))
    monitor = torchmem.install(job.model, job.optimizer, **settings()) if watched else None
    for _ in range(3):
        job.step(job.batches())
    if monitor is not None:
        monitor.close()
    dist.barrier()
    return [p._local_tensor.flatten().tolist() for p in job.model.parameters()]


@pytest.mark.slow
def test_training_is_bit_identical():
    """Watching would change what the job computes."""
    on, off = run_ranks(identical, 2, "watched"), run_ranks(identical, 2, "")
    for rank in range(2):
        assert on[rank] == off[rank]
