"""A causal transformer of any size, and one training step of it, split where a watcher may want to look."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Size:
    """Dimensions of a transformer and of its batches."""

    width: int = 128
    num_layers: int = 12
    num_heads: int = 4
    vocab: int = 1000
    batch: int = 4
    seq: int = 64
    scratch_bytes: int = 0
    """What each block allocates in its forward and lets go of before it returns."""


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and beside a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.scratch_bytes = size.scratch_bytes
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        if self.scratch_bytes:
            torch.empty(self.scratch_bytes, dtype=torch.uint8)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Tokens (batch, seq) in, logits (batch, seq, vocab) out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocab, size.width)
        self.positions: Tensor
        self.register_buffer("positions", torch.randn(size.seq, size.width))
        self.layers = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab)

    def blocks(self) -> list[Block]:
        """The layers, first to last."""
        return [layer for layer in self.layers if isinstance(layer, Block)]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Batch(NamedTuple):
    """Token numbers and the numbers that should follow them, both (batch, seq), int64."""

    tokens: Tensor
    targets: Tensor


def _nothing() -> None:
    """What is done where there is nothing to do."""


def _no_sync(*, last: bool) -> None:
    """What a model that shares nothing with other ranks does between micro-batches."""


@dataclass
class Job:
    """A model, its optimizer and where its data comes from."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    size: Size
    num_microbatches: int = 1
    sync_gradients: Callable[..., None] = field(default=_no_sync)
    """Called as ``sync_gradients(last=...)`` before each micro-batch."""

    def batch(self) -> Batch:
        """A fresh random batch, as a data loader would hand it over."""
        shape = (self.size.batch, self.size.seq)
        return Batch(torch.randint(self.size.vocab, shape), torch.randint(self.size.vocab, shape))

    def forward_backward(self, batch: Batch) -> float:
        """Adds one micro-batch to the gradients; returns its loss."""
        logits = self.model(batch.tokens)
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten())
        loss.backward()
        return loss.item()

    def batches(self) -> list[Batch]:
        """Fresh data for one step."""
        return [self.batch() for _ in range(self.num_microbatches)]

    def evaluate(self) -> None:
        """One forward pass without gradients."""
        with torch.no_grad():
            self.model(self.batch().tokens)

    def step(self, batches: list[Batch] | None = None, *, before_microbatch: Callable[[], None] = _nothing) -> float:
        """One whole step; returns the last micro-batch's loss."""
        loss = 0.0
        for index, batch in enumerate(batches or self.batches()):
            before_microbatch()
            self.sync_gradients(last=index == self.num_microbatches - 1)
            loss = self.forward_backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def plain_job(size: Size = Size(num_layers=3), *, foreach: bool = True, seed: int = 0) -> Job:
    """A transformer trained by AdamW in one process."""
    torch.manual_seed(seed)
    model = Transformer(size)
    return Job(model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach), size)


class Recurrent(nn.Module):
    """A two-layer LSTM over an embedding: its kernels allocate workspaces of their own."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocab, size.width)
        self.lstm = nn.LSTM(size.width, size.width, num_layers=2, batch_first=True)
        self.head = nn.Linear(size.width, size.vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.head(hidden)


def recurrent_job(size: Size = Size(), *, seed: int = 0) -> Job:
    """An LSTM trained by AdamW in one process."""
    torch.manual_seed(seed)
    model = Recurrent(size)
    return Job(model, torch.optim.AdamW(model.parameters(), lr=1e-3), size)
