"""ModuleFrames: who runs is noted around every call of a watched module, and around nothing else."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.callback import callback_handler

from torchmem.engine import native
from torchmem.labelers.frames import ModuleFrames
from torchmem.labelers.hooks import HookSet
from torchmem.labelers.owners import OwnerTable


class Probe(nn.Module):
    """Notes how many frames are open while it runs."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()
        self.seen = []

    def forward(self, x):
        self.seen.append(native.load().stack_depth())
        if isinstance(x, Exception):
            raise x
        return self.inner(x)


@pytest.fixture
def engine():
    engine = native.load()
    yield engine
    engine.set_gate(False)
    engine.reset([0])


@pytest.fixture
def watch(engine):
    """Watches a model; returns the hooks to close and what was called before the root."""
    opened = []

    def watch(model):
        owners, hooks, before = OwnerTable(model, 2), HookSet("test"), []
        engine.reset(owners.parents)
        engine.set_gate(True)
        ModuleFrames(engine, owners, lambda *call: before.append(call)).attach(hooks)
        opened.append(hooks)
        return hooks, before

    yield watch
    for hooks in opened:
        hooks.close()


def test_a_call_has_a_frame(engine, watch):
    """A module would run without its frame, or the root's arguments not be seen."""
    model = nn.Sequential(Probe())
    _, before = watch(model)
    assert model(1) == 1
    assert model[0].seen == [2]
    assert engine.stack_depth() == 0
    assert before == [(model, (1,), {})]


def test_an_exception_closes_the_frames(engine, watch):
    """A module that raises would own everything allocated afterwards, or its exception be lost."""
    model = nn.Sequential(Probe())
    watch(model)
    with pytest.raises(KeyError, match="theirs"):
        model(KeyError("theirs"))
    assert engine.stack_depth() == 0


def test_strangers_and_copies_have_none(watch):
    """A module that is not the model's would be booked as one that is."""
    model, stranger = Probe(), Probe()
    watch(model)
    twin = copy.deepcopy(model)
    stranger(1)
    twin(1)
    assert stranger.seen == twin.seen == [0]


def test_a_dead_modules_place_is_free(watch):
    """A new module at the address of one that died would be taken for it."""
    model = nn.Sequential(Probe())
    watch(model)
    address = id(model[0])
    del model[0]
    gc.collect()
    reused = [Probe() for _ in range(1000)]
    for module in reused:
        module(1)
    assert {tuple(module.seen) for module in reused} == {(0,)}
    assert address


def test_nothing_is_put_on_a_module(watch):
    """A watched module would carry something of ours into copies, pickles or TorchScript."""
    model = nn.Sequential(nn.Linear(2, 2))
    before = [dict(vars(module)) for module in model.modules()]
    watch(model)
    assert [dict(vars(module)) for module in model.modules()] == before
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        scripted = torch.jit.script(model)
    assert torch.equal(scripted(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_close_puts_the_class_back(watch):
    """``nn.Module`` would keep our wrapper, or somebody's later one be thrown away."""
    original = vars(nn.Module)["__call__"]
    model = Probe()
    hooks, _ = watch(model)
    assert vars(nn.Module)["__call__"] is not original
    hooks.close()
    assert vars(nn.Module)["__call__"] is original

    hooks, _ = watch(model)
    ours = vars(nn.Module)["__call__"]

    def theirs(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    nn.Module.__call__ = theirs
    try:
        hooks.close()
        assert vars(nn.Module)["__call__"] is theirs
        model.seen.clear()
        assert model(1) == 1
        assert model.seen == [0]
    finally:
        nn.Module.__call__ = original


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_closing_while_another_thread_compiles(watch):
    """A compilation that ends after close() would put the wrapper back for good."""
    original = vars(nn.Module)["__call__"]
    hooks, _ = watch(Probe())
    compiling, may_go_on = threading.Event(), threading.Event()

    def compile_something():
        with callback_handler.install_callbacks(None, "0"):
            compiling.set()
            may_go_on.wait(30)

    thread = in_a_thread(compile_something)
    compiling.wait(30)
    assert vars(nn.Module)["__call__"] is original
    hooks.close()
    may_go_on.set()
    thread.join()
    assert vars(nn.Module)["__call__"] is original


def test_closing_while_a_compilation_ends(watch, monkeypatch):
    """A compilation that still finds the monitor on would put the wrapper back after close() has taken it off."""
    original = vars(nn.Module)["__call__"]
    hooks, _ = watch(Probe())
    threads = []

    def look_and_lose_the_processor(self):
        found = is_active.fget(self)
        if self is hooks and not threads:
            threads.append(in_a_thread(hooks.close))
            threads[0].join(0.5)  # as far as it gets
        return found

    is_active = HookSet.active
    with callback_handler.install_callbacks(None, "0"):
        monkeypatch.setattr(HookSet, "active", property(look_and_lose_the_processor))
    threads[0].join()
    assert vars(nn.Module)["__call__"] is original


def test_closing_while_another_thread_runs_the_model(watch):
    """An exception of ours would reach a forward that was running when the monitor was closed."""
    failures, stop = [], threading.Event()

    def run():
        try:
            while not stop.is_set():
                with callback_handler.install_callbacks(None, "0"):
                    pass
                model(1)
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    model = nn.Sequential(Probe(), Probe())
    original = vars(nn.Module)["__call__"]
    threads = [in_a_thread(run) for _ in range(3)]
    try:
        for _ in range(200):
            hooks, _ = watch(model)
            hooks.close()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert vars(nn.Module)["__call__"] is original


class Tree(nn.Module):
    """Calls itself; notes how many frames are open and what the books say of what it made before."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x, depth):
        made = x + 1
        made = self(made, depth - 1) if depth else made
        self.seen.append(native.load().stack_depth())
        return made


def test_the_root_may_call_itself(engine, watch):
    """The inner call would end the outer one, whose bytes were then nobody's, and count as another iteration."""
    model = Tree()
    _, before = watch(model)
    for _ in range(2):
        model(torch.ones(1), 2)
    assert model.seen == [3, 2, 1] * 2
    assert [call[1][1] for call in before] == [2, 1, 0] * 2  # the labeler of modules asks which is the outermost
    assert engine.stack_depth() == 0


def test_the_outermost_call_of_the_root_is_known(engine):
    """A new iteration would go unnoticed, or one begin inside another."""
    model, asked, hooks = Tree(), [], HookSet("test")
    owners = OwnerTable(model, 2)
    engine.reset(owners.parents)
    engine.set_gate(True)
    frames = ModuleFrames(engine, owners, lambda *_: asked.append(frames.is_root_inside_itself()))
    frames.attach(hooks)
    try:
        model(torch.ones(1), 2)
        engine.push_label(0, 0)  # something else is open: an optimizer's step whose closure runs the model
        model(torch.ones(1), 1)
    finally:
        engine.cut_stack(0)
        hooks.close()
    assert asked == [False, True, True, False, True]
