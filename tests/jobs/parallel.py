"""The transformer under DDP and FSDP1, in every variant that books its memory differently."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from jobs.model import Block, Job, Size, Transformer

SMALL = Size(width=64, num_layers=2, vocab=200, batch=2, seq=16)


@dataclass(frozen=True)
class Ddp:
    """How gradients are reduced."""

    name: str
    bucket_view: bool = False
    num_microbatches: int = 1
    static_graph: bool = False
    find_unused: bool = False
    bucket_cap_mb: float = 0.05


@dataclass(frozen=True)
class Fsdp1:
    """How parameters are flattened, sharded and cast."""

    name: str
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    use_orig_params: bool = False
    mixed_precision: bool = False
    ignore_head: bool = False
    num_microbatches: int = 1


DDP_VARIANTS = (
    Ddp("copies"),
    Ddp("views", bucket_view=True),
    Ddp("copies_accumulate", num_microbatches=2),
    Ddp("views_accumulate", bucket_view=True, num_microbatches=2),
    Ddp("static", static_graph=True, bucket_view=True),
    Ddp("unused", find_unused=True),
)
FSDP1_VARIANTS = (
    Fsdp1("full"),
    Fsdp1("full_orig", use_orig_params=True),
    Fsdp1("grad_op", ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True),
    Fsdp1("no_shard", ShardingStrategy.NO_SHARD),
    Fsdp1("no_shard_orig", ShardingStrategy.NO_SHARD, use_orig_params=True),
    Fsdp1("mixed", mixed_precision=True),
    Fsdp1("mixed_orig", use_orig_params=True, mixed_precision=True),
    Fsdp1("ignored", ignore_head=True, use_orig_params=True),
    Fsdp1("accumulate", num_microbatches=2, use_orig_params=True),
)


def ddp_job(variant: Ddp, size: Size = SMALL, *, seed: int = 0) -> Job:
    """A replicated transformer trained by AdamW; the process group must be initialised."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(
        Transformer(size),
        bucket_cap_mb=variant.bucket_cap_mb,
        gradient_as_bucket_view=variant.bucket_view,
        static_graph=variant.static_graph,
        find_unused_parameters=variant.find_unused,
    )
    return _job(model, variant.num_microbatches, size, seed)


def fsdp1_job(variant: Fsdp1, size: Size = SMALL, *, seed: int = 0) -> Job:
    """A flat-sharded transformer trained by AdamW; the process group must be initialised."""
    torch.manual_seed(seed)
    model = Transformer(size)
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=variant.strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=variant.use_orig_params,
        mixed_precision=low if variant.mixed_precision else None,
        ignored_modules=[model.head] if variant.ignore_head else None,
        device_id=torch.device("cpu"),
    )
    return _job(wrapped, variant.num_microbatches, size, seed)


def _job(model: torch.nn.Module, num_microbatches: int, size: Size, seed: int) -> Job:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(seed + 1 + dist.get_rank())
    waiting = contextlib.ExitStack()

    def sync_gradients(*, last: bool) -> None:
        waiting.close()
        if not last:
            waiting.enter_context(model.no_sync())  # type: ignore[operator]

    return Job(model, optimizer, size, num_microbatches, sync_gradients)
