"""Activation checkpointing in every form: what backward remakes is recomputation, of the module that remakes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import torchmem
from torchmem.model import RefType

if TYPE_CHECKING:
    from pathlib import Path

WIDTH, BATCH = 32, 256


class Seen(NamedTuple):
    """A tensor as it was booked right after it was made."""

    where: str
    reftype: str
    owner: str
    in_backward: bool


class Inner(nn.Module):
    """A feed-forward network that says what its results were booked as."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.note = lambda _where, _tensor: None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        self.note("inner", hidden)
        return self.down(hidden)


class Outer(nn.Module):
    """Runs its blocks as told, and a function of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        blocks: list[nn.Module] = [Inner() for _ in range(2)]
        if how == "wrapper":
            blocks = [checkpoint_wrapper(block) for block in blocks]
        elif how == "composable":
            for block in blocks:
                composable(block)
        self.blocks = nn.ModuleList(blocks)
        self.note = lambda _where, _tensor: None

    def function(self, x: Tensor) -> Tensor:
        squared = torch.sin(x) * x
        self.note("function", squared)
        return squared.exp()

    def forward(self, x: Tensor) -> Tensor:
        reentrant = self.how.startswith("reentrant")
        for block in self.blocks:
            calls = self.how in ("reentrant", "plain")
            x = checkpoint(block, x, use_reentrant=reentrant) if calls else block(x)
        if self.how.endswith("function"):
            x = checkpoint(self.function, x, use_reentrant=reentrant)
        return x


def train(model: Outer, directory: Path) -> tuple[list[Seen], torchmem.Monitor]:
    """Two steps; what the tensors inside were booked as in the second."""
    seen: list[Seen] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torchmem.install(model, optimizer, dir=directory, depth=8) as monitor:

        def note(where: str, tensor: Tensor) -> None:
            _, owner, reftype = monitor._native.lookup(tensor.data_ptr())
            in_backward = torch._C._current_graph_task_id() != -1
            seen.append(Seen(where, RefType(reftype).label, monitor._names[owner], in_backward))

        model.note = note
        for module in model.modules():
            if isinstance(module, Inner):
                module.note = note
        for _ in range(2):
            seen.clear()
            model(torch.randn(BATCH, WIDTH, requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [labeler for labeler in monitor.snapshot().labelers if not labeler.up] == []
        counters = monitor.snapshot().counters
        assert counters["num_unmatched_pops"] == counters["num_unknown_frees"] == 0
        assert monitor._native.stack_depth() == 0
    return seen, monitor


@pytest.mark.parametrize("how", ["plain", "reentrant", "wrapper", "composable"])
def test_modules_remake_their_own(tmp_path, how):
    """What a checkpointed module remakes in backward would be scratch, or belong to another module."""
    seen, _ = train(Outer(how), tmp_path)
    first, second = "blocks.0", "blocks.1"
    assert seen == [
        Seen("inner", "activation", first, in_backward=False),
        Seen("inner", "activation", second, in_backward=False),
        Seen("inner", "recomputation", second, in_backward=True),
        Seen("inner", "recomputation", first, in_backward=True),
    ]


@pytest.mark.parametrize("how", ["function", "reentrant_function"])
def test_a_function_remakes_for_the_module_that_called_it(tmp_path, how):
    """What a checkpointed function that is no module remakes would be scratch."""
    seen, _ = train(Outer(how), tmp_path)
    assert [s for s in seen if s.where == "function"] == [
        Seen("function", "activation", "(root)", in_backward=False),
        Seen("function", "recomputation", "(root)", in_backward=True),
    ]


def test_recomputation_is_in_the_peak(tmp_path):
    """The peak's composition would not show what checkpointing trades."""
    _, monitor = train(Outer("plain"), tmp_path)
    ring = monitor.snapshot().ring.devices[0]
    last = torch.frombuffer(bytearray(ring.step_peak), dtype=torch.int64).view(-1, len(RefType))[-1]
    # tanh's result, which a block saves, at least.
    assert last[RefType.RECOMPUTATION] >= BATCH * 2 * WIDTH * torch.float32.itemsize
