"""A small causal transformer over bytes, trained with FSDP2 on the sources of Python's standard library.

An ordinary training script, with the three lines that torchmem asks of one. Runs by itself too, on any number of ranks:
``torchrun --nproc-per-node 2 demo/train.py --steps 200``. Rank 0 prints one line a step.

Known limits: CPU and gloo only; the text is read up to a bound; nothing is saved.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import torchmem

VOCABULARY = 256
CONTEXT = 128
BATCH = 8
WIDTH = 192
NUM_LAYERS = 6
NUM_HEADS = 6
TEXT_BYTES = 4 << 20


class Attention(nn.Module):
    """Causal self-attention over (batch, context, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes each position with those before it."""
        heads = self.qkv(x).unflatten(-1, (3 * NUM_HEADS, -1)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast("Tensor", self.out(mixed.transpose(1, 2).flatten(-2)))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to its normalised input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """One layer: (batch, context, width) in and out."""
        x = x + self.attention(self.attention_norm(x))
        return cast("Tensor", x + self.mlp(self.mlp_norm(x)))


class Transformer(nn.Module):
    """Predicts the next byte at every position of (batch, context)."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (batch, context, vocabulary)."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return cast("Tensor", self.head(self.norm(x)))


def read_text() -> Tensor:
    """The standard library's own sources as bytes, bounded, in a fixed order."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)


def sample(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch of windows and the byte that follows each of their positions, both (batch, context)."""
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def train(num_steps: int) -> None:
    """Trains for ``num_steps`` steps; one process of the group that the environment describes."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    text = read_text()
    generator = torch.Generator().manual_seed(rank)

    torch.manual_seed(0)
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    monitor = torchmem.install(model, optimizer)
    for step in range(1, num_steps + 1):
        inputs, targets = sample(text, generator)
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}/{num_steps} loss {loss.item():.3f}", flush=True)
    monitor.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="number of steps (default: %(default)s)")
    train(parser.parse_args().steps)
