"""The sampler: one step in so many under the dispatch engine, and nothing in between."""

from __future__ import annotations

import os
import struct
import threading
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode

from torchmem.counting import Counting
from torchmem.engine.dispatch import DispatchEngine
from torchmem.model import RefType
from torchmem.sampling.sampler import StepSampler


def job():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.ones(32, 64)).sum().backward()
        optimizer.step()

    return model, optimizer, step


class Watched(NamedTuple):
    """A job with a sampler on."""

    sampler: StepSampler
    step: object
    new: list
    """Steps after whose end there was a new sample."""


@pytest.fixture
def watch():
    """Makes jobs with samplers, which are taken off."""
    torch._dynamo.utils.counters.clear()  # what other tests compiled
    samplers = []

    def make(every=10, *, passed=True):
        model, optimizer, step = job()
        new = []

        def on_step():
            if sampler.end_step():
                new.append(sampler.num_steps)

        sampler = StepSampler(
            model,
            optimizer if passed else None,
            depth=2,
            every=every,
            on_step=on_step,
            before_forward=lambda _: None,
        )
        sampler.attach()
        samplers.append(sampler)
        watched = Watched(sampler, step, new)
        sampler.job = model, optimizer  # which it does not keep alive itself
        return watched

    yield make
    for sampler in samplers:
        sampler.detach()
    assert _get_current_dispatch_mode_stack() == []


def by_reftype(packed):
    return {r: n for r, n in zip(RefType, struct.unpack(f"<{len(RefType)}q", packed), strict=True) if n}


def test_a_sampled_steps_books_are_the_native_ones(watch):
    """The fallback would say something else of a step than the engine it stands in for."""
    sampler, step, _ = watch()
    for _ in range(3):
        step()
    sampler.detach()
    ((_, peak, end, at_peak, at_end),) = sampler.native.last.rows
    assert set(sampler.native.last.failures.values()) == {""}

    model, optimizer, step = job()
    step()
    counting = Counting(model, optimizer, depth=2)
    counting.attach()
    step()
    counting.native.end_step()
    step()
    counting.label_now()
    _, ((_, native_peak, native_end, native_at_peak, native_at_end),) = counting.native.end_step()
    counting.detach()
    assert abs(peak - native_peak) < 300  # what kernels allocate inside
    assert end == native_end
    assert by_reftype(at_end) == by_reftype(native_at_end)
    assert by_reftype(at_peak).keys() == by_reftype(native_at_peak).keys()


def test_one_step_in_so_many_is_sampled(watch):
    """Ranks would sample different steps, or more of them than was paid for."""
    sampler, step, new = watch(every=4)
    on = []
    for _ in range(12):
        step()
        on.append(sampler.is_sampling)
    assert [number for number, is_on in enumerate(on, 1) if is_on] == [1, 5, 9]
    assert new == [2, 6, 10]
    assert sampler.native.counters()["num_samples"] == 3


def test_every_second_step_at_the_most(watch):
    """A sample would begin before the one before it has ended."""
    _, step, new = watch(every=2)
    for _ in range(6):
        step()
    assert new == [2, 4, 6]


def test_an_optimizer_that_was_not_passed_in_is_found(watch):
    """A job that gives only its model would never be sampled."""
    _, step, new = watch(every=4, passed=False)
    for _ in range(7):
        step()
    assert new == [2, 6]  # as if it had been passed in


def test_steps_without_an_optimizer(watch):
    """A loop that ends its steps itself would never be sampled."""
    sampler, _, _ = watch()
    model = sampler.owners.model
    for _ in range(2):
        model(torch.ones(32, 64)).sum().backward()
        sampler.end_step()
    [(_, peak, *_)] = sampler.native.last.rows
    assert peak > sum(p.untyped_storage().nbytes() for p in model.parameters())


def test_nothing_is_on_the_model_between_samples(watch):
    """The steps that are not sampled would be slowed down too."""
    call, resize = nn.Module.__call__, torch.UntypedStorage.resize_
    sampler, step, _ = watch()
    step()
    assert sampler.is_sampling
    assert nn.Module.__call__ is not call
    step()
    assert not sampler.is_sampling
    assert (nn.Module.__call__, torch.UntypedStorage.resize_) == (call, resize)
    assert _get_current_dispatch_mode_stack() == []


def test_detached_in_the_midst_of_a_sample(watch):
    """A monitor closed during a sample would leave its mode active for the rest of the process."""
    call, resize = nn.Module.__call__, torch.UntypedStorage.resize_
    sampler, step, _ = watch()
    step()
    sampler.detach()
    assert _get_current_dispatch_mode_stack() == []
    assert (nn.Module.__call__, torch.UntypedStorage.resize_) == (call, resize)
    step()
    assert (sampler.num_steps, sampler.native.last) == (1, None)


class Passing(TorchDispatchMode):
    """Does nothing."""

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_jobs_own_is_left_in_place(watch):
    """Ours would be taken off when the job's own block ends, and theirs stay."""
    sampler, step, _ = watch()
    with Passing():
        step()
        assert not sampler.is_sampling
        assert "a dispatch mode of its own" in sampler.reason
    step()
    mode = Passing()
    sampler.num_steps = 10
    step()
    assert sampler.is_sampling
    with mode:
        step()
        assert _get_current_dispatch_mode_stack() == [mode]
    assert _get_current_dispatch_mode_stack() == []


def test_a_compiled_model_is_not_sampled(watch):
    """torch.compile would fall back to eager under the mode, and stay so."""
    sampler, step, new = watch()
    sampler.owners.model[0].compile(backend="eager")
    for _ in range(3):
        step()
    assert "torch.compile" in sampler.reason
    assert (sampler.num_steps, new) == (3, [])


def test_a_compiled_function_outside_the_model_is_seen_too(watch):
    """A compiled loss would run eagerly from the first sample on."""
    loss = torch.compile(lambda x: x.square().sum(), backend="eager")
    sampler, step, _ = watch()
    loss(torch.ones(3))
    step()
    assert "torch.compile" in sampler.reason


def test_an_optimizer_that_steps_in_backward_is_not_sampled(watch):
    """The mode would be put on in the midst of autograd, which takes it off again at a time of its own."""
    sampler, _, _ = watch()
    model, optimizer = sampler.job
    last = model[0].weight  # whose gradient comes last
    handle = last.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    model(torch.ones(32, 64)).sum().backward()
    assert "while backward runs" in sampler.reason
    assert not sampler.is_sampling
    handle.remove()


def break_note(monkeypatch):
    monkeypatch.setattr(DispatchEngine, "_book", lambda *_: 1 / 0)


def break_frames(monkeypatch):
    monkeypatch.setattr("torchmem.engine.dispatch_context.Contexts.enter_module", lambda *_: 1 / 0)


def break_resize(monkeypatch):
    monkeypatch.setattr(DispatchEngine, "_follow_size", lambda *_: 1 / 0)


def break_beginning(monkeypatch):
    monkeypatch.setattr(DispatchEngine, "start", lambda *_: 1 / 0)


def break_end(monkeypatch):
    monkeypatch.setattr(DispatchEngine, "read_window", lambda *_: 1 / 0)


@pytest.mark.parametrize("broken", [break_note, break_frames, break_resize, break_beginning, break_end])
def test_what_breaks_in_a_sample_stays_in_it(watch, monkeypatch, broken):
    """An error of ours would end the training, slow it down for good, or be published as a sample."""
    call = nn.Module.__call__
    sampler, step, new = watch(every=4)
    broken(monkeypatch)
    for _ in range(6):
        step()
        torch.ones(3).untyped_storage().resize_(64)
    assert (sampler.num_steps, new) == (6, [])
    assert not sampler.is_sampling
    assert "ZeroDivisionError" in sampler.labelers[0].hooks.failure
    assert nn.Module.__call__ is call
    assert _get_current_dispatch_mode_stack() == []


def test_an_error_of_the_jobs_own_passes_through(watch):
    """A job that catches its own errors would not see them in a sampled step."""
    sampler, step, new = watch()
    step()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        sampler.owners.model(torch.ones(3, 3))
    step()
    assert new == [2]


def test_a_step_that_ends_on_another_thread(watch):
    """A mode would be taken off a stack on which it is not, and an error reach the job."""
    sampler, step, new = watch()
    step()
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert new == []
    assert "different threads" in sampler.labelers[0].hooks.failure
    _pop_mode()  # what stays on the job's own thread, and counts nothing


def test_a_child_forked_in_a_sample_has_none_of_it(watch):
    """A data loader's worker would count what it loads, or wait for ever for a lock of a thread it does not have."""
    call, resize = nn.Module.__call__, torch.UntypedStorage.resize_
    sampler, step, new = watch()
    step()
    engine = sampler._running.engine
    with engine._lock:
        child = os.fork()
    if child == 0:
        clean = _get_current_dispatch_mode_stack() == [] and not sampler.is_sampling
        clean &= (nn.Module.__call__, torch.UntypedStorage.resize_) == (call, resize)
        torch.ones(8)
        os._exit(0 if clean else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sampler.is_sampling
    step()
    assert new == [2]


def test_the_model_is_not_kept_alive():
    """A sampler that was never taken off would hold the model's memory."""
    import gc
    import weakref

    model, optimizer, step = job()
    sampler = StepSampler(
        model, None, depth=2, every=4, on_step=lambda: sampler.end_step() and None, before_forward=lambda _: None
    )
    sampler.attach()
    for _ in range(4):
        step()
    watched = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer, step
    gc.collect()
    assert [one() for one in watched] == [None, None]
    assert sampler.native.last.number == 2
    sampler.detach()


def test_what_a_sample_costs_is_known(watch):
    """Nobody could see what the fallback costs."""
    sampler, step, _ = watch(every=6)
    spent = []
    for _ in range(14):
        step()
        spent.append(sampler.labelers[0].hooks.seconds)
    assert spent == sorted(spent)
    assert spent[-1] > spent[0] > 0
