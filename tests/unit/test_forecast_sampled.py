"""The fallback without a compiler: one step in so many under the dispatch engine, and nothing in between."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from torchmem.counting import Counting
from torchmem.model import RefType
from torchmem.sampled import StepSampler


def job():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.ones(32, 64)).sum().backward()
        optimizer.step()

    return model, optimizer, step


def by_reftype(packed):
    return {r: n for r, n in zip(RefType, struct.unpack(f"<{len(RefType)}q", packed), strict=True) if n}


def test_a_sampled_steps_books_are_the_native_ones():
    """The fallback would say something else of a step than the engine it stands in for."""
    model, optimizer, step = job()
    sampler = StepSampler(model, optimizer, depth=2, on_step=lambda: None, every=10)
    sampler.attach()
    for _ in range(3):
        step()
    sampler.detach()
    ((_, peak, end, at_peak, at_end),) = sampler.last.rows
    assert sampler.last.failures == {}

    model, optimizer, step = job()
    step()
    counting = Counting(model, optimizer, depth=2, on_step=lambda *_: None, before_forward=lambda *_: None)
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


def test_one_step_in_so_many_is_sampled():
    """Ranks would sample different steps, or more of them than was paid for."""
    model, optimizer, step = job()
    seen = []
    sampler = StepSampler(model, optimizer, depth=2, on_step=lambda: seen.append(sampler.is_sampling), every=4)
    sampler.attach()
    for _ in range(12):
        step()
        numbers = None if sampler.last is None else sampler.last.number
    sampler.detach()
    assert [number for number, on in enumerate(seen, 1) if on] == [1, 5, 9]
    assert numbers == 10


def test_an_optimizer_that_was_not_passed_in_is_found():
    """A job that gives only its model would never be sampled."""
    model, _, step = job()
    sampler = StepSampler(model, None, depth=2, on_step=lambda: None, every=4)
    sampler.attach()
    for _ in range(3):
        step()
    sampler.detach()
    assert (sampler.num_steps, sampler.last.number) == (3, 3)


def test_nothing_is_on_the_model_between_samples():
    """The steps that are not sampled would be slowed down too."""
    model, optimizer, step = job()
    call, resize = nn.Module.__call__, torch.UntypedStorage.resize_
    sampler = StepSampler(model, optimizer, depth=2, on_step=lambda: None, every=10)
    sampler.attach()
    step()
    assert sampler.is_sampling
    assert nn.Module.__call__ is not call
    step()
    assert not sampler.is_sampling
    assert (nn.Module.__call__, torch.UntypedStorage.resize_) == (call, resize)
    assert _get_current_dispatch_mode_stack() == []
    sampler.detach()


def test_detached_in_the_midst_of_a_sample():
    """A monitor closed during a sample would leave its mode active for the rest of the process."""
    model, optimizer, step = job()
    sampler = StepSampler(model, optimizer, depth=2, on_step=lambda: None, every=10)
    sampler.attach()
    step()
    sampler.detach()
    assert _get_current_dispatch_mode_stack() == []
    step()
    assert (sampler.num_steps, sampler.last) == (1, None)


class Passing(TorchDispatchMode):
    """Does nothing."""

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_jobs_own_is_left_in_place():
    """Ours would be taken off when the job's own block ends, and theirs stay."""
    model, optimizer, step = job()
    sampler = StepSampler(model, optimizer, depth=2, on_step=lambda: None, every=10)
    sampler.attach()
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
    sampler.detach()


@pytest.mark.parametrize("compile_it", [lambda model: model[0].compile(backend="eager")])
def test_a_compiled_model_is_not_sampled(compile_it):
    """torch.compile would fall back to eager under the mode, and stay so."""
    model, optimizer, step = job()
    compile_it(model)
    sampler = StepSampler(model, optimizer, depth=2, on_step=lambda: None, every=10)
    sampler.attach()
    step()
    sampler.detach()
    assert "compiled" in sampler.reason
