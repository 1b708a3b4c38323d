"""The parallel styles: how a sample becomes a workload.

Each function returns a ``Build``, which makes the workload on one rank; what can be told before (how, how often) is
its argument, so that a row is one line of a table.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from torchmem.validation.models import BATCH, SEQ, WIDTH, Decoder, Sample, mlp_stack
from torchmem.validation.workloads import Build, Place, Workload, made, training

NUM_MICROBATCHES = 3


def plain(sample: Sample) -> Build:
    """One device, no communication."""
    return lambda place: training(made(sample, place), sample, place)


def across_devices(sample: Sample, *, on_host: str) -> Build:
    """A model of which the named module stays on the host."""

    def build(place: Place) -> Workload:
        model = made(sample, place)
        model.get_submodule(on_host).cpu()
        return training(model, sample, place)

    return build


def recomputing(sample: Sample, *, use_reentrant: bool) -> Build:
    """A decoder whose blocks run under ``torch.utils.checkpoint``."""

    def recompute(layer: nn.Module, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        # The reentrant kind returns no gradient where no input asks for one.
        result: Tensor = checkpoint(layer, x, use_reentrant=use_reentrant)
        return result

    def build(place: Place) -> Workload:
        model = made(sample, place)
        if not isinstance(model, Decoder):
            raise TypeError(f"{type(model).__name__} cannot be told to recompute")
        model.recompute = recompute
        return training(model, sample, place)

    return build


# -- FSDP2


def fsdp2(
    sample: Sample,
    *,
    reshard: bool = True,
    offload: bool = False,
    mixed: torch.dtype | None = None,
    hybrid: bool = False,
    recompute: str = "",
    accumulate: str = "",
    solo: str = "",
    compiled: bool = False,
) -> Build:
    """``fully_shard`` on the sample's units and on the whole.

    Args:
        sample: what is trained.
        reshard: frees the unsharded parameters after forward.
        offload: keeps parameters, gradients and optimizer state in the host's memory.
        mixed: gathers parameters in this type and reduces gradients in float32.
        hybrid: replicates over one dimension of the ranks and shards over the other.
        recompute: ``composable`` or ``wrapper``: activation checkpointing of the units.
        accumulate: ``sync`` reduces the gradients of every micro-batch, ``no-sync`` those of the last.
        solo: name of a module that each rank keeps whole.
        compiled: compiles each unit's computation.
    """

    def build(place: Place) -> Workload:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        model = made(sample, place)
        mesh = place.mesh(2, place.world_size // 2) if hybrid else place.mesh()
        shard = functools.partial(
            fully_shard,
            reshard_after_forward=reshard,
            offload_policy=CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy(),
            mp_policy=MixedPrecisionPolicy(mixed, torch.float32) if mixed else MixedPrecisionPolicy(),
        )
        if solo:
            shard(model.get_submodule(solo), mesh=_solo_mesh(place))
        for unit in _recomputed(model, sample.units(model), recompute):
            shard(unit, mesh=mesh)
            if compiled:
                unit.compile()
        shard(model, mesh=mesh)
        return training(
            model,
            sample,
            place,
            num_microbatches=NUM_MICROBATCHES if accumulate else 1,
            microbatch=_set_sync(model) if accumulate == "no-sync" else None,
            close=_reset_compiler if compiled else _nothing,
        )

    return build


def fsdp2_part(sample: Sample) -> Build:
    """Trains through the first unit of a sharded model only, as a job that fine-tunes or evaluates a part does."""

    def build(place: Place) -> Workload:
        from torch.distributed.fsdp import fully_shard

        model = made(sample, place)
        units = sample.units(model)
        for unit in units:
            fully_shard(unit, mesh=place.mesh())
        fully_shard(model, mesh=place.mesh())
        return training(model, sample, place, forward=units[0])

    return build


def _solo_mesh(place: Place) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(place.solo_group(), place.device.type, mesh_dim_names=("solo",))


def _set_sync(model: nn.Module) -> Callable[[bool], AbstractContextManager[None]]:
    set_sync: Callable[[bool], None] = model.set_requires_gradient_sync  # type: ignore[assignment]  # of FSDPModule

    def around(is_last: bool) -> AbstractContextManager[None]:  # noqa: FBT001  # as training calls it
        set_sync(is_last)
        return contextlib.nullcontext()

    return around


def _recomputed(model: nn.Module, units: list[nn.Module], how: str) -> list[nn.Module]:
    """Puts activation checkpointing on the units; returns the modules to shard in their place."""
    if how == "composable":
        from torch.distributed._composable.checkpoint_activation import checkpoint

        for unit in units:
            checkpoint(unit)
    if how != "wrapper":
        return units
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

    wrapper.apply_activation_checkpointing(model, check_fn=lambda module: module in units)
    return [module for module in model.modules() if isinstance(module, wrapper.CheckpointWrapper)]


# -- tensor parallelism


def tensor_parallel(*, sequence: bool = False, sharded: bool = False, recompute: bool = False) -> Build:
    """A stack of blocks split by columns and rows over the inner dimension of the ranks.

    Args:
        sequence: ends in a norm that is split along the sequence.
        sharded: FSDP2 over the outer dimension.
        recompute: composable activation checkpointing of the blocks.
    """
    sample = Sample(functools.partial(mlp_stack, with_norm=sequence), _shared_sequences)

    def build(place: Place) -> Workload:
        from torch.distributed.tensor.parallel import parallelize_module

        model = made(sample, place)
        mesh = place.mesh(place.world_size // 2, 2) if sharded else place.mesh(1, place.world_size)
        parallelize_module(model, mesh["inner"], _plan(sequence=sequence))
        if sharded:
            _shard_blocks(model, mesh["outer"], recompute=recompute)
        return training(model, sample, place)

    return build


def _shared_sequences(device: torch.device) -> tuple[Tensor, ...]:
    """The same on every rank: ranks of one tensor-parallel group train on the same data."""
    return (torch.ones(BATCH, SEQ, WIDTH, device=device),)


def _plan(*, sequence: bool) -> dict[str, Any]:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    plan: dict[str, Any] = {}
    for index in range(3):
        plan[f"{index}.in_proj"] = ColwiseParallel(use_local_output=False)
        plan[f"{index}.out_proj"] = RowwiseParallel(use_local_output=False)
    if sequence:
        plan["2.out_proj"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        plan["3"] = SequenceParallel(sequence_dim=1)
    else:
        plan["2.out_proj"] = RowwiseParallel()
    return plan


def _shard_blocks(model: nn.Module, mesh: Any, *, recompute: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    blocks = [block for block in model.children() if not isinstance(block, nn.LayerNorm)]
    for block in _recomputed(model, blocks, "composable" if recompute else ""):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


# -- DDP


def ddp(sample: Sample, *, accumulate: bool = False, **options: Any) -> Build:
    """``DistributedDataParallel`` with the given options; ``accumulate`` skips the sync of all but the last forward."""

    def build(place: Place) -> Workload:
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(
            made(sample, place), find_unused_parameters=not sample.uses_all_parameters, bucket_cap_mb=1, **options
        )
        return training(
            model,
            sample,
            place,
            num_microbatches=NUM_MICROBATCHES if accumulate else 1,
            microbatch=_skip_sync(model) if accumulate else None,
            gradients_in_buckets=bool(options.get("gradient_as_bucket_view")),
        )

    return build


def _skip_sync(model: Any) -> Callable[[bool], AbstractContextManager[None]]:
    @contextlib.contextmanager
    def around(is_last: bool) -> Iterator[None]:  # noqa: FBT001  # as training calls it
        with contextlib.nullcontext() if is_last else model.no_sync():
            yield

    return around


# -- FSDP1


def fsdp1_model(
    sample: Sample,
    place: Place,
    *,
    strategy: str = "FULL_SHARD",
    use_orig_params: bool = False,
    mixed: bool = False,
    offload: bool = False,
    ignored: str = "",
    solo: str = "",
) -> Any:
    """The sample under ``FullyShardedDataParallel``: its units and the whole.

    Args:
        sample: what is trained.
        place: where it runs.
        strategy: name of the sharding strategy; hybrid ones replicate over the outer dimension of the ranks.
        use_orig_params: keeps the original parameters as views of the flat ones.
        mixed: computes in bfloat16 and reduces gradients in float32.
        offload: keeps parameters and gradients in the host's memory.
        ignored: name of a module that is left out.
        solo: name of a module that each rank keeps whole.
    """
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    model = made(sample, place)
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None
    wrap = functools.partial(
        FullyShardedDataParallel,
        device_id=place.device,
        use_orig_params=use_orig_params,
        mixed_precision=precision,
        cpu_offload=CPUOffload(offload_params=True) if offload else None,
        ignored_modules=[model.get_submodule(ignored)] if ignored else None,
    )
    if solo:
        expert = model.get_submodule(solo)
        _replace(model, expert, wrap(expert, process_group=place.solo_group()))
    wrap = functools.partial(wrap, sharding_strategy=ShardingStrategy[strategy])
    if "HYBRID" in strategy:
        wrap = functools.partial(wrap, device_mesh=place.mesh(2, place.world_size // 2))
    left_out = set(model.get_submodule(ignored).modules()) if ignored else set()
    for unit in sample.units(model):
        if unit not in left_out:
            _replace(model, unit, wrap(unit))
    return wrap(model)


def fsdp1(sample: Sample, *, accumulate: bool = False, **options: Any) -> Build:
    """``FullyShardedDataParallel`` (see ``fsdp1_model``); ``accumulate`` skips the sync of all but the last forward."""

    def build(place: Place) -> Workload:
        model = fsdp1_model(sample, place, **options)
        return training(
            model,
            sample,
            place,
            num_microbatches=NUM_MICROBATCHES if accumulate else 1,
            microbatch=_skip_sync(model) if accumulate else None,
        )

    return build


def _replace(model: nn.Module, module: nn.Module, wrapped: nn.Module) -> None:
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is module and parent is not wrapped:
                setattr(parent, name, wrapped)


# -- compiled


def compiled(sample: Sample, *, what: str) -> Build:
    """Compiled computation: the whole ``model``, its ``units``, or the ``optimizer``'s step."""

    def build(place: Place) -> Workload:
        model = made(sample, place)
        if what == "model":
            model.compile()
        if what == "units":
            for unit in sample.units(model):
                unit.compile()
        return training(
            model,
            sample,
            place,
            optimizer_step=_compiled_step if what == "optimizer" else None,
            close=_reset_compiler,
        )

    return build


def _compiled_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    step: Callable[[], Any] = torch.compile(optimizer.step)
    return step


def _reset_compiler() -> None:
    torch.compiler.reset()


def _nothing() -> None:
    """What there is to clean up by default."""
