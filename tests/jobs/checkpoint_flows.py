"""Every way of saving and loading a model's and an optimizer's state, each on a job small enough to compare in full."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from jobs.model import Block, Job, Size, Transformer

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = Size(width=32, num_layers=2, vocab=50, batch=2, seq=8)
Saved = Any
"""What a flow's ``save`` returns and its ``load`` takes."""


# -- models


def plain(model: Transformer) -> nn.Module:
    return model


def ddp(model: Transformer) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp1(model: Transformer, *, use_orig_params: bool = True) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def fsdp1_flat(model: Transformer) -> nn.Module:
    return fsdp1(model, use_orig_params=False)


def fsdp2(model: Transformer) -> nn.Module:
    for block in model.blocks():
        fully_shard(block)
    return fully_shard(model)


def make_job(wrap: Callable[[Transformer], nn.Module], *, seed: int = 0) -> Job:
    """A small transformer, wrapped, trained by AdamW on data that differs from rank to rank."""
    torch.manual_seed(seed)
    model = wrap(Transformer(SIZE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(seed + 1 + dist.get_rank())
    return Job(model, optimizer, SIZE)


# -- ways of saving and of loading


def save_own(job: Job, _folder: str) -> Saved:
    """By the methods of the model and of the optimizer."""
    return {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}


def load_own(job: Job, saved: Saved, _folder: str) -> None:
    job.model.load_state_dict(saved["model"])
    job.optimizer.load_state_dict(saved["optimizer"])


def save_model(job: Job, _folder: str) -> Saved:
    """The model alone, where torch has no such state of the optimizer."""
    return {"model": job.model.state_dict()}


def load_model(job: Job, saved: Saved, _folder: str) -> None:
    job.model.load_state_dict(saved["model"])


def save_fsdp1(job: Job, _folder: str) -> Saved:
    return {
        "model": job.model.state_dict(),
        "optimizer": FullyShardedDataParallel.optim_state_dict(job.model, job.optimizer),
    }


def load_fsdp1(job: Job, saved: Saved, _folder: str) -> None:
    job.model.load_state_dict(saved["model"])
    state = FullyShardedDataParallel.optim_state_dict_to_load(job.model, job.optimizer, saved["optimizer"])
    job.optimizer.load_state_dict(state)


def load_from_rank_0(job: Job, saved: Saved, folder: str) -> None:
    objects = [saved]
    dist.broadcast_object_list(objects, src=0)
    with FullyShardedDataParallel.state_dict_type(job.model, StateDictType.FULL_STATE_DICT):
        load_fsdp1(job, objects[0], folder)


def save_distributed(job: Job, _folder: str, *, full: bool = False) -> Saved:
    options = StateDictOptions(full_state_dict=full)
    model, optimizer = get_state_dict(job.model, job.optimizer, options=options)
    return {"model": model, "optimizer": optimizer}


def load_distributed(job: Job, saved: Saved, _folder: str, *, full: bool = False) -> None:
    set_state_dict(
        job.model,
        job.optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=StateDictOptions(full_state_dict=full),
    )


save_distributed_full = functools.partial(save_distributed, full=True)
load_distributed_full = functools.partial(load_distributed, full=True)


class App:
    """A job as torch's distributed checkpoints like it."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def state_dict(self) -> Saved:
        return save_distributed(self.job, "")

    def load_state_dict(self, saved: Saved) -> None:
        load_distributed(self.job, saved, "")


def save_files(job: Job, folder: str) -> Saved:
    dcp.save({"app": App(job)}, checkpoint_id=folder)


def save_files_by_threads(job: Job, folder: str) -> Saved:
    dcp.save({"app": App(job)}, storage_writer=dcp.FileSystemWriter(folder, thread_count=2))


def save_files_in_background(job: Job, folder: str) -> Saved:
    dcp.async_save({"app": App(job)}, checkpoint_id=folder).result()


def load_files(job: Job, _saved: Saved, folder: str) -> None:
    dcp.load({"app": App(job)}, checkpoint_id=folder)


# -- flows


class Flow(NamedTuple):
    """One way to save and to load a kind of model."""

    name: str
    wrap: Callable[[Transformer], nn.Module]
    save: Callable[[Job, str], Saved]
    load: Callable[[Job, Saved, str], None]
    fsdp1_type: StateDictType | None = None
    on_rank_0: bool = False
    """Whether only rank 0 is given the state."""


FLOWS = (
    Flow("plain", plain, save_own, load_own),
    Flow("ddp", ddp, save_own, load_own),
    Flow("fsdp1_full", fsdp1, save_fsdp1, load_fsdp1, StateDictType.FULL_STATE_DICT),
    Flow("fsdp1_rank_0", fsdp1, save_fsdp1, load_from_rank_0, StateDictType.FULL_STATE_DICT, on_rank_0=True),
    Flow("fsdp1_local", fsdp1_flat, save_model, load_model, StateDictType.LOCAL_STATE_DICT),
    Flow("fsdp1_sharded", fsdp1, save_fsdp1, load_fsdp1, StateDictType.SHARDED_STATE_DICT),
    Flow("fsdp2", fsdp2, save_own, load_own),
    Flow("ddp_distributed", ddp, save_distributed, load_distributed),
    Flow("fsdp1_distributed", fsdp1, save_distributed, load_distributed),
    Flow("fsdp1_distributed_full", fsdp1, save_distributed_full, load_distributed_full),
    Flow("fsdp2_distributed", fsdp2, save_distributed, load_distributed),
    Flow("fsdp2_distributed_full", fsdp2, save_distributed_full, load_distributed_full),
    Flow("ddp_files", ddp, save_files, load_files),
    Flow("fsdp1_files", fsdp1, save_files, load_files),
    Flow("fsdp2_files", fsdp2, save_files, load_files),
    Flow("fsdp2_files_by_threads", fsdp2, save_files_by_threads, load_files),
    Flow("fsdp2_files_in_background", fsdp2, save_files_in_background, load_files),
)


def as_typed(flow: Flow, model: nn.Module) -> Any:
    """The context in which FSDP1 makes the kind of state dict that the flow asks for."""
    if flow.fsdp1_type is None:
        return contextlib.nullcontext()
    configs: tuple[Any, ...] = ()
    if flow.on_rank_0:
        configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    elif flow.fsdp1_type is StateDictType.FULL_STATE_DICT:
        configs = FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=False)
    return FullyShardedDataParallel.state_dict_type(model, flow.fsdp1_type, *configs)
