"""The dispatch engine in the midst of things: signals' handlers, inference mode, backward, what torch compiles."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torchmem.engine.dispatch import DispatchEngine
from torchmem.engine.dispatch_mode import DispatchMode, take_off_ended
from torchmem.engine.fast_ledger import FastLedger
from torchmem.model import Operation

FLOATS = 1000
BYTES = 4 * FLOATS


@pytest.fixture
def engine():
    """A running engine, of which nothing stays."""
    found = DispatchEngine()
    found.start()
    yield found
    found.stop()
    take_off_ended()
    assert _get_current_dispatch_mode_stack() == []


def held(engine):
    """Bytes alive on the CPU."""
    return engine.all_books()[0].current


def interrupted(monkeypatch, handler):
    """From here on the handler runs once in the midst of booking a block, as that of a signal may."""
    allocate = FastLedger.allocate
    calls = []

    def in_the_midst(*arguments):
        allocate(*arguments)
        if not calls:
            calls.append(1)
            handler()

    monkeypatch.setattr(FastLedger, "allocate", in_the_midst)
    return calls


def within(seconds, function):
    """Runs the function on a thread of its own; a deadlock fails the test instead of hanging it."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive()


def test_a_signals_handler_in_the_midst_of_an_event_is_not_booked(monkeypatch):
    """A handler that saves a checkpoint would wait for its own thread for ever, or leave half-written books."""
    engine = DispatchEngine()
    kept = []

    def handler():
        depth = engine.push_checkpoint(Operation.SAVE)
        kept.append(torch.empty(FLOATS))
        kept[0].untyped_storage().resize_(2 * BYTES)
        engine.cut_stack(depth)
        assert engine.is_in_event()
        with pytest.raises(RuntimeError, match="in the midst of an event"):
            engine.end_step()

    def job():
        with engine_on(engine):
            x = torch.empty(FLOATS)
            assert held(engine) == BYTES
            assert engine.stack_depth() == 0
            y = x + 1
            kept.clear()
            assert held(engine) == 2 * BYTES
            del x, y
            assert held(engine) == 0
            done.append(1)

    done = []
    calls = interrupted(monkeypatch, handler)
    within(20, job)
    assert (calls, done) == ([1], [1])


@contextlib.contextmanager
def engine_on(engine):
    engine.start()
    try:
        yield
    finally:
        engine.stop()


def test_other_threads_wait_for_an_event(engine, monkeypatch):
    """What another thread makes while one is booking would be missing from the books."""
    other = []

    def meanwhile():
        thread = threading.Thread(target=lambda: other.append(engine.adopt(made.untyped_storage()._cdata, 0, 0)))
        thread.start()
        threads.append(thread)

    threads = []
    with engine.paused():
        made = torch.empty(FLOATS)
    interrupted(monkeypatch, meanwhile)
    x = torch.empty(FLOATS)
    threads[0].join()
    assert other == [2]
    assert held(engine) == 2 * BYTES
    del x


def test_a_mode_that_ends_in_inference_mode_leaves_torch_usable(engine):
    """Every operator after the block would fail with an internal error of torch's."""
    with torch.inference_mode():
        engine.stop()
        assert torch.ones(3).sum() == 3
    assert torch.ones(3).sum() == 3
    (left,) = _get_current_dispatch_mode_stack()
    assert left.may_go
    take_off_ended()
    assert _get_current_dispatch_mode_stack() == []
    assert torch.ones(3).sum() == 3


def test_a_mode_of_inference_mode_ends_there():
    """A forecast that is made in inference mode would leave its mode behind."""
    engine = DispatchEngine()
    with torch.inference_mode():
        engine.start()
        x = torch.empty(FLOATS)
        engine.stop()
        assert _get_current_dispatch_mode_stack() == []
    assert held(engine) == BYTES
    del x


def test_a_mode_that_ends_in_backward_counts_nothing_and_goes_later(engine):
    """Autograd puts the stack back as it was: the engine would count on, or another one never begin."""
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: engine.stop())
    y.sum().backward()
    before = held(engine)
    z = torch.empty(FLOATS)
    assert held(engine) == before
    assert [type(mode) for mode in _get_current_dispatch_mode_stack()] == [DispatchMode]
    take_off_ended()
    assert _get_current_dispatch_mode_stack() == []
    del z


def test_an_ended_mode_holds_no_books(engine):
    """What stays on a stack would keep a whole sample's books in memory."""
    import weakref

    other = DispatchEngine()
    other.start()
    with torch.inference_mode():
        other.stop()
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    assert engine.all_books() is not None


def test_an_inherited_resize_is_inherited_again():
    """``UntypedStorage`` would have a ``resize_`` of its own for the rest of the process."""
    before = dict(vars(torch.UntypedStorage))
    engine = DispatchEngine()
    engine.start()
    assert "resize_" in vars(torch.UntypedStorage)
    engine.stop()
    assert dict(vars(torch.UntypedStorage)) == before


def test_higher_order_operators_run(engine):
    """``torch.cond`` would raise in a step that is counted."""
    x = torch.ones(FLOATS)
    y = torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,))
    assert y[0] == 2
    assert held(engine) >= 2 * BYTES


def test_what_must_be_compiled_is(engine):
    """A function compiled with ``fullgraph=True`` would raise, because torch gives up compiling under a mode."""
    seen = []

    def backend(graph, _inputs):
        seen.append(graph)
        return graph.forward

    with engine.here():
        found = torch.compile(nn.Linear(4, 4), backend=backend, fullgraph=True)(torch.ones(2, 4))
    assert found.shape == (2, 4)
    assert len(seen) == 1
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
