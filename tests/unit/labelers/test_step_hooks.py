"""StepHooks: hidden from torch.compile without disturbing whoever goes through torch's tables."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.optim import optimizer as optim

from interrupts import at_every_point
from torchmem.labelers import step_hooks as module
from torchmem.labelers.hooks import HookSet
from torchmem.labelers.step_hooks import TABLES, StepHooks


def tables():
    """torch's tables, which are what they were only if they are the same objects."""
    return [getattr(optim, name) for name in TABLES]


@pytest.fixture
def steps():
    """Which of our hooks were called."""
    return []


@pytest.fixture
def hooks():
    hooks, before = HookSet("test"), [(id(table), dict(table)) for table in tables()]
    yield hooks
    hooks.close()
    assert [(id(table), dict(table)) for table in tables()] == before


@pytest.fixture
def step_hooks(hooks, steps):
    return StepHooks(hooks, lambda *_: steps.append("before"), lambda *_: steps.append("after"))


def sgd():
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    return torch.optim.SGD([parameter])


def test_hidden_hooks_are_not_called(step_hooks, steps):
    """torch would compile the optimizer's step again because of us, or the hooks not come back."""
    optimizer, sizes = sgd(), [len(table) for table in tables()]
    step_hooks.hide()
    assert [len(table) for table in tables()] == [size - 1 for size in sizes]
    optimizer.step()
    assert steps == []
    step_hooks.show()
    optimizer.step()
    assert steps == ["before", "after"]


def test_a_table_is_never_changed_under_a_thread_that_reads_it(step_hooks):
    """Another thread's optimizer step would raise that a dictionary changed while it was iterated over."""
    inside, may_go_on, failures = threading.Event(), threading.Event(), []

    def wait(*_):
        inside.set()
        may_go_on.wait(30)

    def step():
        try:
            sgd().step()
        except RuntimeError as error:
            failures.append(error)

    ours = [
        register(hook) for register in (optim.register_optimizer_step_pre_hook,) for hook in (wait, lambda *_: None)
    ]
    thread = threading.Thread(target=step)
    thread.start()
    try:
        inside.wait(30)
        step_hooks.hide()
        step_hooks.show()
    finally:
        may_go_on.set()
        thread.join()
        for handle in ours:
            handle.remove()
    assert failures == []


def test_threads_may_hide_at_the_same_time(step_hooks, steps):
    """The thread that is done first would show the hooks to one that is still inside a compiled call."""
    step_hooks.hide()
    step_hooks.hide()
    step_hooks.show()
    sgd().step()
    assert steps == []
    step_hooks.show()
    sgd().step()
    assert steps == ["before", "after"]


def test_what_others_register_meanwhile_stays(step_hooks):
    """A hook that the job registers while a compiled call runs would be lost."""
    calls = []
    step_hooks.hide()
    key = optim.register_optimizer_step_post_hook(lambda *_: calls.append("theirs")).id
    step_hooks.show()
    sgd().step()
    del optim._global_optimizer_post_hooks[key]
    assert calls == ["theirs"]


def test_what_others_remove_meanwhile_is_gone(step_hooks):
    """A hook that the job removes while a compiled call runs would be called for ever."""
    calls = []
    handle = optim.register_optimizer_step_post_hook(lambda *_: calls.append("theirs"))
    step_hooks.hide()
    handle.remove()
    step_hooks.show()
    sgd().step()
    assert calls == []


def test_closing_while_hidden(hooks, steps, step_hooks):
    """A monitor that is closed inside a compiled call would leave torch with tables of ours."""
    step_hooks.hide()
    hooks.close()
    step_hooks.show()
    sgd().step()
    assert steps == []


def test_a_signal_handler_may_close_anywhere():
    """A job that closes the monitor on SIGTERM would hang, or leave torch with tables of ours."""
    before = [(id(table), dict(table)) for table in tables()]
    for at_point in at_every_point(module.__file__):
        hooks = HookSet("test")
        step_hooks = StepHooks(hooks, lambda *_: None, lambda *_: None)
        with at_point(hooks.close):
            step_hooks.hide()
            step_hooks.show()
        hooks.close()
        assert [(id(table), dict(table)) for table in tables()] == before
