"""A decoder of three sizes, built for a forecast as a user would: the jobs of the forecast's tests and benchmarks."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional

SIZES = {"tiny": (1000, 256, 2), "small": (32_000, 512, 8), "6.7B": (32_000, 4096, 32), "65B": (32_000, 8192, 80)}
"""Vocabulary, width and layers."""

OPTIMIZERS = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "single": {"foreach": False, "fused": False},
}


class Layer(nn.Module):
    """Causal attention and a feed-forward network."""

    def __init__(self, width):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in self.qkv(self.attention_norm(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.relu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """Embedding, layers, head."""

    def __init__(self, vocabulary, width, num_layers, *, recompute=False):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.head = nn.Linear(width, vocabulary)
        self.recompute = recompute

    def forward(self, tokens):
        from torch.utils.checkpoint import checkpoint

        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x) + 0.0


def step_of(model, optimizer, batch, sequence, num_microbatches=1):
    """A training step on random tokens."""

    def step():
        optimizer.zero_grad()
        for _ in range(num_microbatches):
            model(torch.randint(0, 1000, (batch, sequence))).float().mean().backward()
        optimizer.step()

    return step


def fsdp2(mesh, size="tiny", optimizer="foreach", batch=1, sequence=128, *, recompute=False):
    """``fully_shard`` on each layer and on the whole, AdamW."""
    from torch.distributed.fsdp import fully_shard

    model = Decoder(*SIZES[size], recompute=recompute)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adamw = torch.optim.AdamW(model.parameters(), **OPTIMIZERS[optimizer])
    return model, adamw, step_of(model, adamw, batch, sequence)


def plain(size="tiny", batch=1, sequence=128, num_microbatches=1, *, wide=False):
    """One device."""
    model = Decoder(*SIZES[size])
    if wide:
        model = model.to(torch.float64)
    adamw = torch.optim.AdamW(model.parameters())
    return model, adamw, step_of(model, adamw, batch, sequence, num_microbatches)


def tensor_parallel(mesh, size="tiny"):
    """The feed-forward networks split over ``tp``, all of it sharded over ``dp``."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = Decoder(*SIZES[size])
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    adamw = torch.optim.AdamW(model.parameters(), foreach=False)
    return model, adamw, step_of(model, adamw, 1, 128)


def job_under_torch_tracker(build, world_size, num_steps=2, **arguments):
    """The same job, fake, under torch's own tracker; returns its peak by reference type.

    The mesh is made outside of the fake mode, where torch can make it.
    """
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        mesh = init_device_mesh("cpu", (world_size,))
        with FakeTensorMode():
            model, optimizer, step = functools.partial(build, mesh, **arguments)()
            tracker = FSDPMemTracker(model, optimizer)
            with tracker:
                for _ in range(num_steps):
                    step()
                    tracker.reset_mod_stats()
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
        return {str(getattr(key, "value", key)): num_bytes for key, num_bytes in snapshot.items() if num_bytes}
    finally:
        dist.destroy_process_group()
