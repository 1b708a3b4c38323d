"""A small FSDP2 job with all that dashboards show: checkpoints, a forecast, and, once told, a leak on one rank.

A script, one process a rank: ``python tests/jobs/shown.py DIRECTORY FOLDER RANK WORLD_SIZE``. It trains until it is
ended, slowly enough to leave the cores to others, and keeps what a layer makes on rank 1 once ``FOLDER/fault`` exists.
``build`` is also what ``torchmem forecast`` takes; ``$TORCHMEM_FORECAST`` names what that has saved.
"""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import torchmem

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "shown"
LEAKING_RANK = 1
VOCAB, WIDTH, INNER, NUM_HEADS, NUM_LAYERS = 512, 64, 256, 4, 4
BATCH, LENGTH = 4, 32
SECONDS_BETWEEN_STEPS = 0.01
CHECKPOINT_EVERY = 50
LEAK_EVERY, MOST_KEPT = 8, 80
"""Steps from one thing that is kept to the next, and how many are: half of what the job needs."""


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Tokens (batch, length) in, logits (batch, length, vocabulary) out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(mesh: Any = None) -> tuple[Any, torch.optim.Optimizer, Callable[[], None]]:
    """Model, optimizer and a training step, as ``torchmem forecast`` takes them; ``mesh`` is the ranks'."""
    model: Any = Decoder()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1))
        logits = model(tokens[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def leak(model: Any) -> None:
    """Keeps, from now on, some of what one layer makes."""
    kept: list[Tensor] = []
    calls = iter(range(sys.maxsize))

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if next(calls) % LEAK_EVERY == 0 and len(kept) < MOST_KEPT:
            kept.append(output.detach())

    model.layers[2].out.register_forward_hook(keep)


def checkpoint(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Saves this rank's shards and takes them back."""
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)
    states = torch.load(saved, weights_only=False)
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])


def train(directory: str, folder: Path, rank: int, world_size: int) -> None:
    """Trains until the process is ended."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    store = dist.FileStore(str(folder / f"store-{NAME}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    model, optimizer, step = build()
    is_broken = False
    with torchmem.install(model, optimizer, train_job=NAME, dir=directory):
        for number in range(1, sys.maxsize):
            if not is_broken and (folder / "fault").exists():
                is_broken = True
                if rank == LEAKING_RANK:
                    leak(model)
            step()
            if number % CHECKPOINT_EVERY == 0:
                checkpoint(model, optimizer)
            time.sleep(SECONDS_BETWEEN_STEPS)


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
