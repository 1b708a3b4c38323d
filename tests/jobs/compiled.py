"""Small jobs that torch.compile compiles in whole or in part, and what compiling them took.

Invariants: a job is made and run the same way whoever watches it; Dynamo begins each run with nothing compiled.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

import torchmem
from jobs import books
from torchmem.validation import witness
from torchmem.validation.watch import sums_of_storages

WIDTH = 32
BATCH = 8

Watch = Callable[[nn.Module, torch.optim.Optimizer], AbstractContextManager[Any]]

SCHEDULES = {
    "never": ("compile", 6),
    "before": ("open", "compile", 6, "close"),
    "after": ("compile", 2, "open", 4, "close"),
    "again": ("open", "compile", 2, "close", 2, "open", 2, "close"),
}
"""When a job is compiled and when it is watched: numbers are steps, six in all."""


class Block(nn.Module):
    """A feed-forward network beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Broken(Stack):
    """One whose graph breaks in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1:
                torch._dynamo.graph_break()
        return self.last(x)


def hooked_stack() -> Stack:
    """One whose modules have hooks of the user's own, which Dynamo puts guards on."""
    model = Stack()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _module, args: (args[0] * 2,))
        block.up.register_forward_hook(lambda _module, _args, output: output + 1)
    return model


@dataclass
class Parts:
    """What a step calls; compiling replaces some of it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Callable[[Tensor], Tensor]
    update: Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """What is compiled, and how."""

    how: str
    backend: Any = "eager"
    make_model: Callable[[], nn.Module] = Stack
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    sharded: bool = False
    """Under FSDP2, block by block; the process group must be initialised."""


def make(case: Case) -> Parts:
    """A job of the case, not compiled yet; Dynamo has forgotten all others."""
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    torch.manual_seed(0)
    model = case.make_model()
    if case.sharded:
        _shard(model)
    optimizer = case.make_optimizer(model.parameters(), lr=0.01)
    return Parts(model, optimizer, model, optimizer.step)


def _shard(model: nn.Module) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def compile_(case: Case, parts: Parts) -> None:
    """Compiles what the case says."""
    HOW[case.how](parts, functools.partial(torch.compile, backend=case.backend))


def step(parts: Parts) -> float:
    """One training step; returns the loss."""
    loss = parts.forward(torch.randn(BATCH, WIDTH)).square().mean()
    loss.backward()
    parts.update()
    parts.optimizer.zero_grad()
    return loss.item()


def run(case: Case, schedule: str, watch: Watch) -> Figures:
    """Trains a job through a schedule, watched by what ``watch`` opens."""
    parts = make(case)
    losses: list[float] = []
    with ExitStack() as everything:
        watching = everything.enter_context(ExitStack())
        for what in SCHEDULES[schedule]:
            if what == "open":
                watching.enter_context(watch(parts.model, parts.optimizer))
            elif what == "close":
                watching.close()
            elif what == "compile":
                compile_(case, parts)
            else:
                losses += [step(parts) for _ in range(what)]
    return figures(losses, parts.model)


def _compile_module(parts: Parts, compile_: Any) -> None:
    parts.model.compile(**compile_.keywords)


def _compile_wrapper(parts: Parts, compile_: Any) -> None:
    parts.forward = compile_(parts.model)


def _compile_blocks(parts: Parts, compile_: Any) -> None:
    for block in parts.model.blocks:
        block.compile(**compile_.keywords)


def _wrap_blocks(parts: Parts, compile_: Any) -> None:
    for index, block in enumerate(list(parts.model.blocks)):
        parts.model.blocks[index] = compile_(block)


def _compile_function(parts: Parts, compile_: Any) -> None:
    model = parts.model

    def forward(x: Tensor) -> Tensor:
        return model(x)

    parts.forward = compile_(forward)


def _compile_step(parts: Parts, compile_: Any) -> None:
    parts.update = compile_(parts.optimizer.step)


def _compile_step_function(parts: Parts, compile_: Any) -> None:
    optimizer = parts.optimizer

    def update() -> None:
        optimizer.step()

    parts.update = compile_(update)


def _compile_both(parts: Parts, compile_: Any) -> None:
    _compile_module(parts, compile_)
    _compile_step(parts, compile_)


def _compile_nested(parts: Parts, compile_: Any) -> None:
    _compile_blocks(parts, compile_)
    _compile_module(parts, compile_)


HOW: dict[str, Callable[[Parts, Any], None]] = {
    "nothing": lambda _parts, _compile: None,
    "module": _compile_module,
    "wrapper": _compile_wrapper,
    "blocks": _compile_blocks,
    "wrapped_blocks": _wrap_blocks,
    "function": _compile_function,
    "step": _compile_step,
    "step_function": _compile_step_function,
    "both": _compile_both,
    "nested": _compile_nested,
}
"""What is compiled, by name."""


class Figures(NamedTuple):
    """What compiling took, and what came out."""

    frames: dict[str, int]
    graphs: int
    graph_breaks: int
    compiled: list[tuple[str, bool]]
    """Each compilation: the function's name, and whether it was a recompilation."""
    losses: list[float]
    weights: list[bytes]


def figures(losses: list[float], model: nn.Module) -> Figures:
    """What compiling took since ``make``."""
    compiled = [(str(one.co_name), bool(one.recompile_reason)) for one in get_compilation_metrics()]
    local = (getattr(parameter, "_local_tensor", parameter).detach() for parameter in model.parameters())
    weights = [bytes(tensor.flatten().view(torch.uint8).tolist()) for tensor in local]
    return Figures(
        frames=dict(counters["frames"]),
        graphs=counters["stats"]["unique_graphs"],
        graph_breaks=sum(counters["graph_break"].values()),
        compiled=compiled,
        losses=losses,
        weights=weights,
    )


class Step(NamedTuple):
    """What a step held by the books, less what it held by the witness, in bytes; and what lasts, by both."""

    peak_error: int
    end_error: int
    books: dict[str, int]
    storages: dict[str, int]


def against_witness(case: Case, directory: str, num_steps: int) -> tuple[list[Step], list[str]]:
    """Steps of a case beside the witness, which must be installed, and the labelers that went off meanwhile."""
    gc.collect()
    foreign_bytes = witness.current()
    parts = make(case)
    compile_(case, parts)
    step(parts)
    gc.collect()
    true = []
    with torchmem.install(parts.model, parts.optimizer, dir=directory, publish_interval=60.0) as monitor:
        monitor.step()  # from now on steps end by hand, so that the witness is read at the same moment
        for _ in range(num_steps):
            witness.reset_peak()
            step(parts)
            true.append((witness.peak() - foreign_bytes, witness.current() - foreign_bytes, sums_of_storages(parts)))
            monitor.step()
        record = monitor.snapshot()
    peaks, ends = (list(rows.values())[1:] for rows in (books.step_peaks(record), books.step_ends(record)))
    steps = [
        Step(
            sum(peak.values()) - then_peak,
            sum(end.values()) - then_end,
            {name: end.get(name, 0) for name in held},
            held,
        )
        for peak, end, (then_peak, then_end, held) in zip(peaks, ends, true, strict=True)
    ]
    return steps, [f"{one.name}: {one.reason}" for one in record.labelers if not one.up]
