"""The zoo: small models, each with one thing about it that memory trackers get wrong.

A ``Sample`` is a model, its data and the modules that a parallel style treats as units. All are a few MB, so that a
step takes milliseconds and no single scratch block of a library decides a peak.

Invariants: no model moves itself or wraps itself; data is made anew for every step, as a data loader would.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # torch's own convention

WIDTH = 128
BATCH = 16
SEQ = 16
VOCAB = 1000
DELAY_SECONDS = 0.002


class Mlp(nn.Module):
    """Two linear layers and a ReLU after each."""

    def __init__(self, width: int = WIDTH, multiplier: int = 4, *, has_buffer: bool = False) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, multiplier * width)
        self.out_proj = nn.Linear(multiplier * width, width)
        self.offset: Tensor | None
        self.register_buffer("offset", torch.randn(width) if has_buffer else None)

    def forward(self, x: Tensor) -> Tensor:
        """Adds the buffer, where there is one, to what the layers make."""
        x = F.relu(self.out_proj(F.relu(self.in_proj(x))))
        return x if self.offset is None else x + self.offset


class Block(nn.Module):
    """Causal attention and a feed-forward network, with dropout, so that recomputing must keep the random state."""

    def __init__(self, width: int = WIDTH, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = Mlp(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, width) in and out."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class Decoder(nn.Module):
    """A causal transformer; ``recompute`` runs a block in its place, for plain activation checkpointing."""

    def __init__(self, num_layers: int = 3, recompute: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers (batch, seq) in, logits (batch, seq, vocabulary) out."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x) if self.recompute is None else self.recompute(layer, x)
        # A module that ends in a view makes FSDP2 warn.
        out: Tensor = self.head(self.norm(x)) + 0.0
        return out


class SharedTransformer(nn.Module):
    """Encoder and decoder whose output projection is the embedding's weight; buffers of two types; batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.transformer = nn.Transformer(
            WIDTH, 4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=WIDTH, batch_first=True
        )
        self.projection = nn.Linear(WIDTH, VOCAB)
        self.projection.weight = self.embedding.weight
        self.bias: Tensor
        self.register_buffer("bias", torch.ones(WIDTH))
        self.counts: Tensor
        self.register_buffer("counts", torch.zeros(WIDTH, dtype=torch.long))
        self.norm = nn.BatchNorm1d(SEQ)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Two batches of token numbers in, logits out."""
        encoded = self.embedding(source) + self.bias + self.counts.type_as(self.bias)
        out: Tensor = self.projection(self.transformer(encoded, self.norm(self.embedding(target)))) + 0.0
        return out


class Experts(nn.Module):
    """A router and four experts of which each token goes to one; an expert that no token chose is called all the same.

    Skipping it would make ranks disagree about which collectives come next.
    """

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts)
        self.experts = nn.ModuleList(Mlp(multiplier=2) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width) in and out."""
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == index)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


class ExpertPerRank(nn.Module):
    """An expert that each rank keeps whole between layers that the ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.shared = Mlp()
        self.expert = Mlp()
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width) in and out."""
        out: Tensor = self.after(self.expert(self.shared(self.before(x)))) + 0.0
        return out


class DoubleLinear(nn.Module):
    """Two layers side by side: two outputs, or one and a layer that is never called."""

    def __init__(self, *, use_second: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(WIDTH, 4 * WIDTH)
        self.use_second = use_second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """A pair, or a tensor where the second layer is not used."""
        first = F.relu(self.first(x))
        return (first, F.relu(self.second(x))) if self.use_second else first


class Skip(nn.Module):
    """A layer, a module that is no unit of its own, and one nested in another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.skipped = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH))
        self.nested = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width) in and out."""
        out: Tensor = self.nested(self.skipped(self.linear(x))) + 0.0
        return out


class Twice(nn.Module):
    """A module that is called twice in a forward, the second time on what the first made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width) in and out."""
        first = self.inner(x)
        out: Tensor = self.outer(first + self.inner(first)) + 0.0
        return out


class _Scaled(torch.autograd.Function):
    """A product that saves what it needs by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum(0)


class Scale(nn.Module):
    """One parameter, used in a custom autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width) in and out."""
        scaled: Tensor = _Scaled.apply(x, self.weight)  # type: ignore[no-untyped-call]  # torch's
        return scaled


class _Slow(torch.autograd.Function):
    """Does nothing, slowly, both ways: memory then waits on communication."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        _sleep(x.device)
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        _sleep(gradient.device)
        return gradient


class Delay(nn.Module):
    """Takes its time in forward and in backward."""

    def forward(self, x: Tensor) -> Tensor:
        """The same tensor, later."""
        slow: Tensor = _Slow.apply(x)  # type: ignore[no-untyped-call]  # torch's
        return slow


class InThread(nn.Module):
    """Runs a module's forward in another thread."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """What the module makes."""
        made: list[Tensor] = []
        in_thread(lambda: made.append(self.module(x)))
        return made[0]


class AcrossDevices(nn.Module):
    """Two blocks, of which the first may live on another device than the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Mlp()
        self.second = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width) in and out, on the device of the data."""
        out: Tensor = self.second(self.first(x.to(self.first.in_proj.weight.device)).to(x.device))
        return out


def in_thread(work: Callable[[], Any]) -> None:
    """Runs the work in a thread of its own and waits for it; an exception comes out here."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _sleep(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]  # noqa: SLF001  # cycles; only the stream waits
    else:
        time.sleep(DELAY_SECONDS)


def _nothing(_module: nn.Module) -> list[nn.Module]:
    return []


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if any(True for _ in child.parameters())]


def _layers(module: nn.Module) -> list[nn.Module]:
    kinds = (Block, Mlp, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    inner = {part for m in module.modules() if isinstance(m, kinds) for part in m.modules() if part is not m}
    return [m for m in module.modules() if isinstance(m, kinds) and m not in inner]


def _vectors(device: torch.device) -> tuple[Tensor, ...]:
    return (torch.randn(BATCH * SEQ, WIDTH, device=device),)


def _sequences(device: torch.device) -> tuple[Tensor, ...]:
    return (torch.randn(BATCH, SEQ, WIDTH, device=device),)


def _tokens(device: torch.device) -> tuple[Tensor, ...]:
    return (torch.randint(VOCAB, (BATCH, SEQ), device=device),)


def _token_pairs(device: torch.device) -> tuple[Tensor, ...]:
    return (*_tokens(device), *_tokens(device))


@dataclass(frozen=True)
class Sample:
    """A model, what it is fed and how it may be divided."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.device], tuple[Tensor, ...]] = _vectors
    """The arguments of one forward, made anew, on the device."""
    units: Callable[[nn.Module], list[nn.Module]] = _nothing
    """The modules that a parallel style wraps one by one, inner ones first."""
    uses_all_parameters: bool = True
    backward: Callable[[Tensor], None] = Tensor.backward


def mlps(*, num: int = 4, has_buffer: bool = False) -> nn.Sequential:
    """A stack of equal blocks."""
    return nn.Sequential(*(Mlp(has_buffer=has_buffer) for _ in range(num)))


def mlp_stack(*, with_norm: bool = False) -> nn.Sequential:
    """Three blocks of two sizes, and a norm for sequence parallelism."""
    norm = [nn.LayerNorm(WIDTH, bias=False)] if with_norm else []
    return nn.Sequential(Mlp(multiplier=3), Mlp(), Mlp(multiplier=3), *norm)


def _nested() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 4 * WIDTH))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def _nested_units(module: nn.Module) -> list[nn.Module]:
    parts = list(module.children())
    return [next(parts[1].children()), parts[1], parts[2]]


def _partly_frozen() -> nn.Sequential:
    model = _nested()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bool(re.match(r"3\.|1\.1\.weight", name)))
    return model


def _delayed() -> nn.Sequential:
    return nn.Sequential(Mlp(), Delay(), Mlp(), Delay(), nn.Linear(WIDTH, WIDTH))


def _custom() -> nn.Sequential:
    return nn.Sequential(Mlp(), Scale(), Mlp(), Scale(), nn.Linear(WIDTH, WIDTH))


def _threaded() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), InThread(Mlp()), Mlp())


def _backward_in_thread(loss: Tensor) -> None:
    in_thread(loss.backward)


MLPS = Sample(mlps, units=_children)
MLP_STACK = Sample(mlp_stack, _sequences, units=_children)
DECODER = Sample(Decoder, _tokens, _layers)
NESTED = Sample(_nested, units=_nested_units)
ACROSS_DEVICES = Sample(AcrossDevices)
EXPERT_PER_RANK = Sample(ExpertPerRank)

ZOO: dict[str, Sample] = {
    "transformer-shared": Sample(SharedTransformer, _token_pairs, _layers),
    "nested": NESTED,
    "partly-frozen": Sample(_partly_frozen, units=_nested_units),
    "delayed": Sample(_delayed, units=_children),
    "experts": Sample(Experts, units=_layers),
    "mlp-stack": MLP_STACK,
    "double-linear": Sample(DoubleLinear, units=_children),
    "unused-module": Sample(lambda: DoubleLinear(use_second=False), units=_children, uses_all_parameters=False),
    "skip": Sample(Skip, units=lambda m: [*m.get_submodule("nested").children(), m.get_submodule("nested")]),
    "called-twice": Sample(Twice, units=_children),
    "custom-function": Sample(_custom, units=_children),
    "threads": Sample(_threaded, units=_layers, backward=_backward_in_thread),
}
"""One row each, under every parallel style that knows it."""
