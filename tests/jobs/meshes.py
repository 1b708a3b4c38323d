"""Jobs on a mesh of two dimensions: hybrid sharding, tensor parallelism, and both FSDP2 and tensor parallelism."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

WIDTH, BATCH, SEQ = 64, 2, 8


@dataclass(frozen=True)
class Mesh:
    """How a stack of feed-forward blocks is spread over the ranks."""

    name: str
    world_size: int = 4
    hybrid: bool = False
    """FSDP2 sharding over the inner dimension, replicated over the outer."""
    low_reduce: bool = False
    """Gradients reduced in bfloat16."""
    tensor_parallel: bool = False
    sequence: bool = False
    sharded: bool = False
    """FSDP2 over the outer dimension of tensor parallelism."""
    num_microbatches: int = 1
    all_reduces_last_only: bool = False


MESHES = (
    Mesh("hybrid", hybrid=True),
    Mesh("hybrid_low", hybrid=True, low_reduce=True),
    Mesh("hybrid_accumulate", hybrid=True, num_microbatches=2, all_reduces_last_only=True),
    Mesh("tensor", 2, tensor_parallel=True),
    Mesh("sequence", 2, tensor_parallel=True, sequence=True),
    Mesh("tensor_sharded", tensor_parallel=True, sharded=True),
)


class FeedForward(nn.Module):
    """A residual feed-forward block behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@dataclass
class MeshJob:
    """A model on its mesh, and one step of its training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    mesh: Mesh

    def step(self) -> None:
        """Each micro-batch forward and backward, then the optimizer."""
        for index in range(self.mesh.num_microbatches):
            is_last = index == self.mesh.num_microbatches - 1
            if self.mesh.all_reduces_last_only:
                self.model.set_requires_all_reduce(is_last)  # type: ignore[operator]
            torch.manual_seed(index)  # alike on the ranks of one tensor-parallel group
            self.model(torch.randn(BATCH, SEQ, WIDTH)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def mesh_job(mesh: Mesh) -> MeshJob:
    """Three blocks trained by AdamW; the process group must be initialised."""
    torch.manual_seed(0)
    model = nn.Sequential(*(FeedForward() for _ in range(3)))
    devices = init_device_mesh("cpu", (mesh.world_size // 2, 2), mesh_dim_names=("outer", "inner"))
    if mesh.tensor_parallel:
        plan: dict[str, object] = {}
        for index in range(3):
            if mesh.sequence:
                plan[f"{index}.norm"] = SequenceParallel(sequence_dim=1)
                plan[f"{index}.up"] = ColwiseParallel(input_layouts=Shard(1))
            else:
                plan[f"{index}.up"] = ColwiseParallel()
            plan[f"{index}.down"] = RowwiseParallel(output_layouts=Shard(1) if mesh.sequence else None)
        parallelize_module(model, devices["inner"], plan)  # type: ignore[arg-type]
    if mesh.hybrid or mesh.sharded:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) if mesh.low_reduce else MixedPrecisionPolicy()
        shard = functools.partial(fully_shard, mesh=devices if mesh.hybrid else devices["outer"], mp_policy=policy)
        for block in model:
            shard(block)
        shard(model)
    dist.barrier()
    return MeshJob(model, torch.optim.AdamW(model.parameters(), lr=1e-3), mesh)
