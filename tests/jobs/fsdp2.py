"""The transformer under ``fully_shard``, in every variant that books its memory differently."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

from jobs.model import Block, Job, Size, Transformer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class Variant:
    """How a job is sharded, and how it is watched."""

    name: str
    world_size: int = 2
    reshard_after_forward: bool | int = True
    mixed_precision: bool = False
    """Parameters gathered as bfloat16, gradients reduced as float32."""
    groups_per_block: int = 1
    """Parameter groups of one module: 2 puts the feed-forward's parameters on a process group of their own."""
    grouped_head: bool = False
    """The last norm and the head in one group: ``fully_shard([norm, head])``."""
    shard_dim: int = 0
    """The dimension along which matrices are sharded; other than 0, FSDP2 rearranges them in scratch copies."""
    foreach: bool = True
    num_microbatches: int = 1
    """More than one accumulates unsharded gradients and reduces them in the last."""
    optimizer_passed: bool = True
    """Whether a watcher is told of the optimizer."""
    recompute: bool = False
    """Activation checkpointing of every block."""
    compiled: bool = False
    """Every block compiled."""


VARIANTS: tuple[Variant, ...] = (
    Variant("reshard"),
    Variant("keep", reshard_after_forward=False),
    Variant("reshard_to_2_of_4", world_size=4, reshard_after_forward=2),
    Variant("mixed", mixed_precision=True),
    Variant("mixed_keep", mixed_precision=True, reshard_after_forward=False),
    Variant("two_groups", groups_per_block=2),
    Variant("grouped_head", grouped_head=True),
    Variant("shard_dim_1", shard_dim=1),
    Variant("no_foreach", foreach=False),
    Variant("accumulate", num_microbatches=2),
    Variant("mixed_accumulate", mixed_precision=True, num_microbatches=2),
    Variant("hidden_optimizer", optimizer_passed=False),
)


def variants(world_size: int) -> tuple[Variant, ...]:
    """Those that run on this many ranks."""
    return tuple(variant for variant in VARIANTS if variant.world_size == world_size)


def fsdp2_job(variant: Variant = VARIANTS[0], size: Size = Size(), *, seed: int = 0) -> Job:  # noqa: B008 - frozen
    """A sharded transformer trained by AdamW; the process group must be initialised."""
    torch.manual_seed(seed)
    model = Transformer(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if variant.mixed_precision:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = functools.partial(
        fully_shard, mesh=mesh, reshard_after_forward=variant.reshard_after_forward, mp_policy=policy
    )
    second = FSDPMeshInfo(_mesh_of_its_own(), shard_mesh_dim=0) if variant.groups_per_block > 1 else None
    for block in model.blocks():
        if variant.recompute:
            checkpoint(block)
        if variant.compiled:
            block.compile()
        shard(block, shard_placement_fn=_placement(block, variant, second))
    if variant.grouped_head:
        shard([model.norm, model.head])
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=variant.foreach)
    torch.manual_seed(seed + 1 + dist.get_rank())

    def sync_gradients(*, last: bool) -> None:
        cast("FSDPModule", model).set_requires_gradient_sync(last)

    return Job(model, optimizer, size, variant.num_microbatches, sync_gradients)


def _mesh_of_its_own() -> DeviceMesh:
    return DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("experts",))


def _placement(
    block: Block, variant: Variant, second: FSDPMeshInfo | None
) -> Callable[[nn.Parameter], Shard | ShardPlacementResult | None] | None:
    if second is not None:
        experts = set(block.mlp.parameters())
        return lambda p: ShardPlacementResult(Shard(0), second) if p in experts else None
    if variant.shard_dim:
        return lambda p: Shard(variant.shard_dim) if p.dim() > variant.shard_dim else None
    return None
