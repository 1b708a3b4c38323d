"""Children forked from a watched process, and what they count themselves."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optim

import torchmem
from jobs.ranks import run_alone
from torchmem import counting
from torchmem.wire.record import Record, unpack_cells

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

pytestmark = pytest.mark.slow

SIZE = 32
NUM_STEPS = 3


class Books(NamedTuple):
    """What a process counted."""

    names: list[str]
    num_steps: int
    usage: dict[tuple[str, str], int]
    """Bytes at the end of a step, by module and reftype."""
    peak: dict[tuple[str, str], int]
    num_hook_calls: int
    disabled: list[str]
    is_as_before: bool
    """Whether torch is afterwards what it was before anybody installed anything."""


class Parent(NamedTuple):
    """What the parent is watched by when it forks."""

    how: str
    trains: bool


PARENTS = [Parent(how, trains) for how in ("monitor", "tracker", "nobody") for trains in (False, True)]


def deep() -> nn.Module:
    """A model with more modules than the child's own."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU()) for _ in range(4)))


def flat(shared: nn.Module) -> nn.Module:
    """Another model, with one module of the parent's."""
    return nn.Sequential(OrderedDict(own=nn.Linear(SIZE, SIZE), shared=shared))


def train(model: nn.Module, num_steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        model(torch.randn(4, SIZE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def touched() -> tuple[object, ...]:
    """What is patched of torch."""
    before, after = optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks
    return (
        vars(nn.Module)["__call__"],
        nn.Module.state_dict,
        torch.optim.Optimizer.state_dict,
        dict(before),
        dict(after),
    )


def book(record: Record, name: str) -> dict[tuple[str, str], int]:
    [device] = record.devices
    cells = unpack_cells(getattr(device, name))
    return {(record.modules[c.module], record.reftypes[c.reftype]): c.num_bytes for c in cells}


def watched(model: nn.Module, untouched: tuple[object, ...]) -> Books:
    """Installs, trains, and says what was counted."""
    with tempfile.TemporaryDirectory() as folder, torchmem.install(model, dir=folder) as monitor:
        train(model, NUM_STEPS)
        record = monitor.snapshot()
        model(torch.randn(4, SIZE))
    return Books(
        record.modules,
        record.clock.step,
        book(record, "usage"),
        book(record, "step_peak"),
        record.counters["num_hook_calls"],
        [f"{one.name}: {one.reason}" for one in record.labelers if not one.up],
        touched() == untouched,
    )


@contextlib.contextmanager
def watching(how: str, model: nn.Module) -> Iterator[None]:
    """The parent's own books."""
    if how == "nobody":
        yield
    elif how == "tracker":
        with torchmem.MemTracker(model):
            yield
    else:
        with tempfile.TemporaryDirectory() as folder, torchmem.install(model, dir=folder):
            yield


def fork_all(_rank: int, _world_size: int) -> dict[Parent, Books]:
    """What a child of each kind of parent counts."""
    untouched = touched()
    found = {}
    for parent in PARENTS:
        model = deep()
        with watching(parent.how, model):
            if parent.trains:
                train(model, 1)
            found[parent] = in_a_child(flat(model[0]), untouched)
    return found


def in_a_child(model: nn.Module, untouched: tuple[object, ...]) -> Books:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def work(sender: Connection) -> None:
        sender.send(watched(model, untouched))

    process = context.Process(target=work, args=(theirs,))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join(20)
        process.kill()
        process.close()


@pytest.fixture(scope="module")
def children() -> dict[Parent, Books]:
    return run_alone(fork_all, 1)


@pytest.mark.parametrize("parent", PARENTS, ids=str)
def test_a_childs_books_are_its_own(children, parent):
    """A worker forked from a watched process would book its bytes under its parent's modules, or count steps twice."""
    books = children[parent]
    assert books.names == ["(outside modules)", "(root)", "own", "shared", "shared.0", "shared.1"]
    assert (books.num_steps, books.disabled, books.is_as_before) == (NUM_STEPS, [], True)
    assert books == children[Parent("nobody", trains=parent.trains)]


def fork_during_an_install(_rank: int, _world_size: int) -> bool:
    """Whether a child that is forked while another thread installs can install."""
    held, enough = threading.Event(), threading.Event()

    def hold() -> None:
        with counting.slot_lock:
            held.set()
            enough.wait(0.5)

    def work(sender: Connection) -> None:
        sender.send(counting.slot_lock.acquire(timeout=5))

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(theirs,))
    process.start()
    thread.join()
    can_install = ours.recv()
    process.join()
    return can_install


def test_nobody_waits_for_a_lock_that_another_thread_held():
    """A child forked while another thread installs would wait for that thread, which it does not have."""
    assert run_alone(fork_during_an_install, 1)
