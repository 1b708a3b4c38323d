"""Runs the ways of saving and loading, watched and not, and compares.

A flow trains a transformer, saves it, trains on, loads what it saved and trains again. What it saved and where it
ended are compared between a run that is watched and one that is not; what torchmem books meanwhile, with the storages
that the saved state holds.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.tensor import DTensor

import torchmem
from jobs import books
from jobs.checkpoint_flows import (
    FLOWS,
    App,
    Flow,
    Saved,
    as_typed,
    ddp,
    fsdp1,
    load_files,
    make_job,
    save_distributed_full,
    save_files,
)
from torchmem.engine import native
from torchmem.model import Operation, RefType
from torchmem.validation import witness as truth
from torchmem.validation.truth import CpuTruth

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs.model import Job
    from torchmem.wire import record as wire

KINDS = ("parameter", "gradient", "optimizer_state", "buffer")


# -- what is in a state, and what is in the books


def copied(value: Any) -> Any:
    """The state without what it shares with the job, as a user keeps it who trains on."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copied(item) for item in value]
    return value.clone() if isinstance(value, Tensor | ShardedTensor) else value


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of this rank anywhere in a state, by path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from named_tensors(item, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from named_tensors(item, f"{name}/{index}")
    elif isinstance(value, ShardedTensor):
        for index, shard in enumerate(value.local_shards()):
            yield f"{name}/{index}", shard.tensor
    elif isinstance(value, DTensor):
        yield name, value._local_tensor
    elif isinstance(value, Tensor):
        yield name, value


def tensor_copies(value: Any) -> dict[str, Tensor]:
    """Copies of the tensors, to compare later."""
    return {name: tensor.detach().clone() for name, tensor in named_tensors(value)}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not the same bit for bit."""
    names = one.keys() | other.keys()
    return sorted(n for n in names if n not in one or n not in other or not torch.equal(one[n], other[n]))


def storage_sizes(value: Any) -> dict[int, int]:
    """Bytes of each storage behind the state, by address; empty ones left out."""
    storages = (tensor.untyped_storage() for _, tensor in named_tensors(value))
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def job_state(job: Job) -> dict[str, Any]:
    """What the job itself holds, by reftype."""
    parameters = list(job.model.parameters())
    return {
        "parameter": parameters,
        "gradient": [p.grad for p in parameters if p.grad is not None],
        "optimizer_state": list(job.optimizer.state.values()),
        "buffer": list(job.model.buffers()),
    }


def held_now() -> dict[str, int]:
    """Alive now on the CPU, by reftype."""
    totals = next(row[2] for row in native.load().totals() if row[0] == 0)
    return dict(zip((r.label for r in RefType), struct.unpack(f"<{len(RefType)}q", totals), strict=True))


# -- running a flow


@dataclass
class Run:
    """What came of a flow, and what torchmem said of it when it watched."""

    saved: dict[str, Tensor] = field(default_factory=dict)
    """The state that was saved."""
    ended: dict[str, Tensor] = field(default_factory=dict)
    """The job's own, after it had loaded that state and trained again."""
    made_bytes: int = 0
    """In the saved state, of what is not the job's own and came through torch's allocator."""
    unseen_bytes: int = 0
    """Of what torch unpickled, in the saved or in the loaded state: that does not come through its allocator."""
    checkpoint_bytes: list[int] = field(default_factory=list)
    """Booked as ``checkpoint`` while the saved state was held, after it was let go, and a step after it was loaded."""
    added_peak_bytes: int = 0
    """The most that saving added, by the operation's published peak."""
    true_added_peak_bytes: int = 0
    """The same by the counting allocator."""
    depths: list[int] = field(default_factory=list)
    """Labels left on this thread after saving and after loading."""
    in_books: dict[str, int] = field(default_factory=dict)
    in_storages: dict[str, int] = field(default_factory=dict)
    """Parameters, gradients, optimizer state and buffers at the end of the last step."""
    record: wire.Record | None = None


def run_flow(flow: Flow, folder: str, directory: str | None) -> Run:
    """Trains, saves, trains, loads, trains; watched if there is a directory for records."""
    run = Run()
    job = make_job(flow.wrap)
    job.step()
    with contextlib.nullcontext() if directory is None else watching(job, directory) as monitor:
        job.step()
        saved = _save(flow, job, folder, run, is_watched=directory is not None)
        job.step()
        with as_typed(flow, job.model):
            flow.load(job, saved, folder)
        run.depths.append(native.load().stack_depth())
        del saved
        # Before the step lets go of its gradients.
        handle = job.optimizer.register_step_post_hook(lambda *_: run.in_storages.update(_sizes(job_state(job))))
        job.step()
        handle.remove()
        run.ended = tensor_copies(job_state(job))
        if monitor is not None:
            state = storage_sizes(job.optimizer.state)
            run.in_storages["optimizer_state"] = _seen_bytes(state)
            run.unseen_bytes = max(run.unseen_bytes, sum(state.values()) - _seen_bytes(state))
            CpuTruth().clean()
            run.checkpoint_bytes.append(held_now()["checkpoint"])
            run.record = monitor.snapshot()
            run.in_books = _in_books(run.record)
    return run


def _save(flow: Flow, job: Job, folder: str, run: Run, *, is_watched: bool) -> Saved:
    CpuTruth().clean()
    own = storage_sizes(job_state(job))
    engine = native.load()
    held_before, true_before = sum(held_now().values()) if is_watched else 0, truth.current()
    truth.reset_peak()
    with as_typed(flow, job.model):
        saved = flow.save(job, folder)
    run.true_added_peak_bytes = truth.peak() - true_before
    CpuTruth().clean()
    run.depths.append(engine.stack_depth())
    if is_watched:
        made = {address: size for address, size in storage_sizes(saved).items() if address not in own}
        run.made_bytes = _seen_bytes(made)
        run.unseen_bytes = sum(made.values()) - run.made_bytes
        peaks = {operation: num_bytes for _, operation, num_bytes in engine.checkpoint_peaks()}
        run.added_peak_bytes = peaks[Operation.SAVE] - held_before
        run.checkpoint_bytes.append(held_now()["checkpoint"])
    kept = copied(saved)
    run.saved = tensor_copies(saved)
    del saved
    CpuTruth().clean()
    if is_watched:
        run.checkpoint_bytes.append(held_now()["checkpoint"])
    return kept


def _sizes(state: dict[str, Any]) -> dict[str, int]:
    return {kind: sum(storage_sizes(part).values()) for kind, part in state.items()}


def _seen_bytes(sizes: dict[int, int]) -> int:
    """Of these storages, what lies in torchmem's books."""
    return sum(size for address, size in sizes.items() if native.load().lookup(address))


def _in_books(record: wire.Record) -> dict[str, int]:
    usage = books.usage(record)
    return {kind: usage.get(kind, 0) + usage.get(f"sharded_{kind}", 0) for kind in KINDS}


def watching(job: Job, directory: str) -> torchmem.Monitor:
    """The job, watched until the monitor's context ends."""
    return torchmem.install(job.model, job.optimizer, dir=directory, publish_interval=60.0)


# -- what ranks do


class Comparison(NamedTuple):
    """One flow, bare and watched."""

    differing: list[str]
    """Names of tensors that were saved, ended or were written to files otherwise when watched."""
    watched: Run
    """Without its tensors."""


def compare(rank: int, _world_size: int, base: str, names: list[str]) -> dict[str, Comparison]:
    """The named flows, each bare and watched."""
    truth.install()
    return {flow.name: _compare(flow, rank, base) for flow in FLOWS if flow.name in names}


def _compare(flow: Flow, rank: int, base: str) -> Comparison:
    folders = [f"{base}/{flow.name}_{kind}" for kind in ("bare", "watched")]
    bare = run_flow(flow, folders[0], None)
    watched = run_flow(flow, folders[1], base)
    found = differing(bare.saved, watched.saved) + differing(bare.ended, watched.ended)
    if rank == 0 and Path(folders[0]).exists():
        found += differing(*(files_content(folder) for folder in folders))
    dist.barrier()
    return Comparison(found, replace(watched, saved={}, ended={}))


def files_content(folder: str) -> dict[str, Tensor]:
    """The tensors in a distributed checkpoint, whole, as torch's own converter reads them."""
    target = f"{folder}.pt"
    dcp_to_torch_save(folder, target)
    return dict(named_tensors(torch.load(target)))


def save_for_resharding(rank: int, _world_size: int, folder: str, is_watched: bool) -> None:  # noqa: FBT001 - by position
    """Leaves a checkpoint of a trained FSDP1 model, and the same state whole."""
    job = make_job(fsdp1)
    with watching(job, folder) if is_watched else contextlib.nullcontext():
        job.step()
        save_files(job, f"{folder}/files")
        whole = save_distributed_full(job, "")
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")


def load_resharded(_rank: int, _world_size: int, folder: str) -> list[str]:
    """Loads that checkpoint on other ranks, bare and watched; names what differs from the whole state."""
    expected = torch.load(f"{folder}/whole.pt")
    found = []
    for is_watched in (False, True):
        job = make_job(fsdp1, seed=7)
        with watching(job, folder) if is_watched else contextlib.nullcontext():
            job.step()
            load_files(job, None, f"{folder}/files")
            whole = save_distributed_full(job, "")
        found += differing(tensor_copies(expected), tensor_copies(whole))
    return found


class HeldWriter(dcp.FileSystemWriter):
    """Writes its files only once it is told to."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.began = threading.Event()
        self.may_go_on = threading.Event()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        self.began.set()
        self.may_go_on.wait(60)
        return super().write_data(plan, planner)


class BrokenWriter(dcp.FileSystemWriter):
    """Has no space left."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        raise OSError("no space left")


def train_while_saving(rank: int, _world_size: int, base: str) -> wire.Record:
    """The record after two steps, the second of which ran while another thread was saving."""
    job = make_job(ddp)
    with watching(job, base) as monitor:
        job.step()
        writer = HeldWriter(f"{base}/files")
        saving = dcp.async_save({"model": job.model.state_dict()}, storage_writer=writer)
        writer.began.wait(60)
        job.step()
        record = monitor.snapshot()
        writer.may_go_on.set()
        saving.result()
    return record


def fail_to_save(_rank: int, _world_size: int, base: str) -> tuple[list[str], list[int], int]:
    """The exceptions of three ways to fail, the labels left after each, and bytes of a tensor named checkpoint then."""
    job = make_job(fsdp1)

    def save_to_nowhere() -> None:
        dcp.save({"app": App(job)}, storage_writer=BrokenWriter(f"{base}/files"))

    def load_from_nowhere() -> None:
        dcp.load({"app": App(job)}, checkpoint_id=f"{base}/missing")

    def load_another() -> None:
        set_state_dict(job.model, job.optimizer, model_state_dict={"x": torch.ones(1)}, optim_state_dict={"state": {}})

    errors, depths = [], []
    with watching(job, base):
        job.step()
        for attempt in (save_to_nowhere, load_from_nowhere, load_another):
            try:
                attempt()
            except BaseException as error:  # noqa: BLE001 - some are torch's own, derived from BaseException
                errors.append(type(error).__name__)
            depths.append(native.load().stack_depth())
        CpuTruth().clean()
        before = held_now()["checkpoint"]
        after = torch.ones(1000)
        num_bytes = held_now()["checkpoint"] - before
        del after
    return errors, depths, num_bytes
