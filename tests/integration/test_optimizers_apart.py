"""Optimizers that step elsewhere than between two iterations, and threads beside a training."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import torchmem
from torchmem.labelers.anchor import MAX_SILENT_STEPS
from torchmem.wire.record import unpack_cells

STRANGERS = Path(__file__).parents[1] / "jobs" / "strangers.py"
SIZE = 32


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))


def held(record, book="usage"):
    """(module, reftype) -> bytes."""
    (device,) = record.devices
    cells = unpack_cells(getattr(device, book))
    return {(record.modules[cell.module], record.reftypes[cell.reftype]): cell.num_bytes for cell in cells}


def parameter_bytes(module):
    return sum(p.untyped_storage().nbytes() for p in module.parameters())


def down(record):
    """The labelers that gave up."""
    return [labeler.name for labeler in record.labelers if not labeler.up]


def train(model, *optimizers, steps=1):
    for _ in range(steps):
        model(torch.randn(4, SIZE)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["stranger", "part", "heartbeat", "fork", "close"])
def test_a_thread_beside_the_training_does_not_crash_it(case):
    """Gradients would be looked at while another thread puts them in place or frees them: a segmentation fault."""
    command = [sys.executable, str(STRANGERS), case, "6000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_optimizers_that_step_in_backward_have_their_gradients_named(model, tmp_path):
    """A job that fuses its optimizer into the backward would hold gradients that nobody owns."""
    optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with torchmem.install(model, None, dir=tmp_path) as monitor:
        for _ in range(3):
            model(torch.randn(4, SIZE)).sum().backward()
        usage, record = held(monitor.snapshot()), monitor.snapshot()
    assert down(record) == []
    for name in ("0", "2"):
        expected = parameter_bytes(model[int(name)])
        assert {usage[name, reftype] for reftype in ("parameter", "gradient", "optimizer_state")} == {expected}


@pytest.mark.parametrize("is_passed", [True, False])
def test_an_optimizer_over_copies_of_the_parameters_has_the_models_gradients_named(model, tmp_path, is_passed):
    """With master weights of its own, as in mixed precision, the gradients of the model would be scratch."""
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, 0.1)
    with torchmem.install(model, optimizer if is_passed else None, dir=tmp_path) as monitor:
        for _ in range(2):
            model(torch.randn(4, SIZE)).sum().backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad.clone()
            optimizer.step()
            if not is_passed:
                model.zero_grad()
                monitor.step()
        peak = held(monitor.snapshot(), "step_peak")
    for name in ("0", "2"):
        assert peak[name, "gradient"] == parameter_bytes(model[int(name)])


def test_an_optimizer_for_each_part_has_its_gradients_named(model, tmp_path):
    """The gradients of all but the first part would be scratch."""
    optimizers = [torch.optim.SGD(part.parameters(), 0.1, momentum=0.9) for part in (model[0], model[2])]
    with torchmem.install(model, optimizers[0], dir=tmp_path) as monitor:
        for _ in range(3):
            for part, optimizer in zip((model[0], model[2]), optimizers, strict=True):
                model.zero_grad(set_to_none=False)
                part(torch.randn(4, SIZE)).sum().backward()
                optimizer.step()
        usage = held(monitor.snapshot())
    for name in ("0", "2"):
        assert usage[name, "gradient"] == parameter_bytes(model[int(name)])


class Wrapper(Optimizer):
    """As Accelerate's: an optimizer by type, without torch's hooks."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.__dict__["optimizer"], name)

    @property
    def state(self):
        return self.optimizer.state

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        return self.optimizer.step(closure)


def test_a_wrapper_stands_for_the_optimizer_that_it_wraps(model, tmp_path):
    """A job under Accelerate would publish nothing, without a word."""
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), 0.1))
    with torchmem.install(model, optimizer, dir=tmp_path) as monitor:
        train(model, optimizer, steps=3)
        assert monitor.snapshot().clock.step == 3


def test_a_job_that_goes_on_with_another_optimizer_goes_on_making_steps(model, tmp_path):
    """A job that changes from Adam to SGD would seem to stand still while it trains."""
    first, second = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    with torchmem.install(model, first, dir=tmp_path) as monitor:
        train(model, first, steps=3)
        train(model, second, steps=MAX_SILENT_STEPS)
        assert monitor.snapshot().clock.step == 3
        train(model, second, steps=4)
        assert monitor.snapshot().clock.step == 7


def test_turns_of_several_optimizers_are_no_change(model, tmp_path):
    """A critic that steps five times before its generator would end five steps an iteration."""
    generator, critic = (torch.optim.SGD(part.parameters(), 0.1) for part in (model[0], model[2]))
    with torchmem.install(model, generator, dir=tmp_path) as monitor:
        for _ in range(MAX_SILENT_STEPS // 2):
            train(model, *([critic] * 5), generator)
        assert monitor.snapshot().clock.step == MAX_SILENT_STEPS // 2


def test_a_part_in_torchscript_gives_nothing_up(model, tmp_path):
    """A model with a scripted part would make no steps at all, and its gradients there be scratch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # people have them
        scripted = torch.jit.script(nn.Linear(SIZE, SIZE))
    whole = nn.Sequential(model, scripted)
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    with torchmem.install(whole, optimizer, dir=tmp_path, depth=1) as monitor:
        for _ in range(2):
            whole(torch.randn(4, SIZE)).sum().backward()
            optimizer.step()
        record = monitor.snapshot()
    assert (record.clock.step, down(record)) == (2, [])
    assert held(record)["1", "gradient"] == parameter_bytes(scripted)


def test_the_values_of_a_sparse_gradient_are_the_modules(tmp_path):
    """The gradient of an embedding would be scratch that nobody owns."""
    model = nn.Sequential(nn.Embedding(500, SIZE, sparse=True), nn.Linear(SIZE, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torchmem.install(model, optimizer, dir=tmp_path) as monitor:
        for _ in range(2):
            model.zero_grad()
            model(torch.arange(100)).sum().backward()
            optimizer.step()
        usage = held(monitor.snapshot())
    assert usage["0", "gradient"] == model[0].weight.grad._values().untyped_storage().nbytes()
