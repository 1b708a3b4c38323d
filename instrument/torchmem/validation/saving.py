"""The state-dict flows: a training step that ends by saving everything and loading it again.

Invariants: each flow loads what it has saved, so that training goes on as if nothing had happened; files are made in
the rank's folder and replaced every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchmem.validation.models import Sample
from torchmem.validation.parallel import fsdp1_model
from torchmem.validation.workloads import Build, Place, Workload, made, training

Flow = Callable[[nn.Module, torch.optim.Optimizer, Place], None]


def plain(sample: Sample) -> Build:
    """``torch.save`` and ``torch.load`` of the model's and the optimizer's state."""
    return lambda place: _saving(made(sample, place), sample, place, _through_file)


def ddp(sample: Sample) -> Build:
    """The same, of a model under DDP."""

    def build(place: Place) -> Workload:
        from torch.nn.parallel import DistributedDataParallel

        return _saving(DistributedDataParallel(made(sample, place)), sample, place, _through_file)

    return build


def fsdp1(sample: Sample, *, kind: str, rank0_only: bool = False, **options: Any) -> Build:
    """FSDP1's own state dicts.

    Args:
        sample: what is trained.
        kind: name of the ``StateDictType``.
        rank0_only: only rank 0 gets the state, and writes it to a file.
        **options: as ``parallel.fsdp1_model`` takes them.
    """

    def build(place: Place) -> Workload:
        model = fsdp1_model(sample, place, **options)
        return _saving(model, sample, place, functools.partial(_fsdp1_flow, kind, rank0_only))

    return build


def distributed(sample: Sample, *, is_async: bool = False, full: bool = False) -> Build:
    """``torch.distributed.checkpoint`` of an FSDP2 model and its optimizer.

    Args:
        sample: what is trained.
        is_async: saves in the background, from copies.
        full: gathers the whole state on the host instead of saving shards.
    """

    def build(place: Place) -> Workload:
        from torch.distributed.fsdp import fully_shard

        model = made(sample, place)
        for unit in sample.units(model):
            fully_shard(unit, mesh=place.mesh())
        fully_shard(model, mesh=place.mesh())
        flow = _full_flow if full else functools.partial(_sharded_flow, is_async)
        return _saving(model, sample, place, flow)

    return build


def _saving(model: nn.Module, sample: Sample, place: Place, flow: Flow) -> Workload:
    return training(model, sample, place, after=lambda optimizer: flow(model, optimizer, place))


def _through_file(model: nn.Module, optimizer: torch.optim.Optimizer, place: Place) -> None:
    path = place.folder / f"state-{place.rank}.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _fsdp1_flow(kind: str, rank0_only: bool, model: nn.Module, _optimizer: Any, place: Place) -> None:  # noqa: FBT001  # bound by position
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    # Moved to the host from the host, the state would be a view of what FSDP1 is about to free.
    offload = place.device.type != "cpu"
    config = FullStateDictConfig(offload_to_cpu=offload, rank0_only=True) if rank0_only else None
    with FullyShardedDataParallel.state_dict_type(model, StateDictType[kind], config):
        state = model.state_dict()
    if not rank0_only:
        with FullyShardedDataParallel.state_dict_type(model, StateDictType[kind]):
            model.load_state_dict(state)
    elif place.rank == 0:
        torch.save(state, place.folder / "full.pt")


def _full_flow(model: nn.Module, optimizer: torch.optim.Optimizer, _place: Place) -> None:
    from torch.distributed.checkpoint import state_dict as states

    gathered = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = states.get_state_dict(model, optimizer, options=gathered)
    # Only rank 0 has the state; it hands it out.
    handed_out = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, model_state, options=handed_out)
    states.set_optimizer_state_dict(model, optimizer, optimizer_state, options=handed_out)


def _sharded_flow(is_async: bool, model: nn.Module, optimizer: torch.optim.Optimizer, place: Place) -> None:  # noqa: FBT001  # bound by position
    from torch.distributed.checkpoint import state_dict as states
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    model_state, optimizer_state = states.get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    if is_async:
        saved: Any = state_dict_saver.async_save(state, checkpoint_id=place.folder / "async")
        saved.result()
    else:
        state_dict_saver.save(state, checkpoint_id=place.folder / "sync")
        state_dict_loader.load(state, checkpoint_id=place.folder / "sync")
    states.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
