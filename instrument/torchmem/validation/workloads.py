"""What a row runs: a model, its optimizer and one training step, on one rank.

Invariants: gradients stay until the next step begins, so that they can be counted when a step ends; nothing else of a
step outlives it but what the model, the optimizer and the parallel style keep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchmem.labelers.owners import tensors_in
from torchmem.validation.models import Sample


@dataclass
class Place:
    """Where a workload runs: one rank of a job, and what the rows of that rank share.

    Attributes:
        rank: this process's number.
        world_size: how many there are; the process group is initialised, also when there is one.
        device: where models and data go.
        folder: for files, the same on all ranks.
    """

    rank: int
    world_size: int
    device: torch.device
    folder: Path
    _meshes: dict[tuple[int, ...], Any] = field(default_factory=dict)
    _solo_group: Any = None

    def mesh(self, *shape: int) -> Any:
        """The device mesh of this shape, named ``outer`` and ``inner`` where it has two dimensions; made once."""
        from torch.distributed.device_mesh import init_device_mesh

        shape = shape or (self.world_size,)
        if shape not in self._meshes:
            names = ("outer", "inner") if len(shape) == 2 else ("ranks",)  # noqa: PLR2004  # two dimensions
            self._meshes[shape] = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        return self._meshes[shape]

    def solo_group(self) -> Any:
        """A process group of this rank alone; made once, by all ranks together."""
        import torch.distributed as dist

        if self._solo_group is None:
            groups = [dist.new_group([rank]) for rank in range(self.world_size)]
            self._solo_group = groups[self.rank]
        return self._solo_group


def _done() -> None:
    """What there is to clean up by default."""


@dataclass
class Workload:
    """Something to train.

    Attributes:
        model: the root module, as ``torchmem.install`` gets it.
        optimizer: what trains it.
        step: one whole training step, the optimizer's included.
        gradients_in_buckets: True where gradients are views of DDP's buckets, and count as those.
        close: puts back what building it changed in the process.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]
    gradients_in_buckets: bool = False
    close: Callable[[], None] = _done


Build = Callable[[Place], Workload]


def made(sample: Sample, place: Place) -> nn.Module:
    """The sample's model on the device, with the same weights on every rank."""
    torch.manual_seed(0)
    model = sample.make().to(place.device)
    torch.manual_seed(1 + place.rank)
    return model


def mean_square(outputs: Any) -> Tensor:
    """A loss of whatever a model returns: one or more tensors, distributed or not."""
    losses = [_local(tensor).float().square().mean() for tensor in tensors_in(outputs)]
    return torch.stack(losses).sum()


def training(
    model: nn.Module,
    sample: Sample,
    place: Place,
    *,
    num_microbatches: int = 1,
    microbatch: Callable[[bool], AbstractContextManager[None]] | None = None,
    forward: Callable[..., Any] | None = None,
    optimizer_step: Callable[[torch.optim.Optimizer], Callable[[], Any]] | None = None,
    after: Callable[[torch.optim.Optimizer], None] | None = None,
    gradients_in_buckets: bool = False,
    close: Callable[[], None] = _done,
) -> Workload:
    """The sample's model, however it was wrapped, trained by AdamW.

    Args:
        model: the wrapped model.
        sample: where its data and its backward come from.
        place: where it runs.
        num_microbatches: forwards and backwards of a step.
        microbatch: what is entered around each, told whether it is the step's last.
        forward: called instead of the model.
        optimizer_step: makes what is called instead of ``optimizer.step``.
        after: called at the end of each step.
        gradients_in_buckets: as in ``Workload``.
        close: as in ``Workload``.
    """
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    update = optimizer.step if optimizer_step is None else optimizer_step(optimizer)
    call = forward or model

    def step() -> None:
        optimizer.zero_grad()
        for index in range(num_microbatches):
            with contextlib.nullcontext() if microbatch is None else microbatch(index == num_microbatches - 1):
                sample.backward(mean_square(call(*sample.batch(place.device))))
        update()
        if after is not None:
            after(optimizer)

    return Workload(model, optimizer, step, gradients_in_buckets, close)


def _local(tensor: Tensor) -> Tensor:
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
