"""Optimizers that step elsewhere than between two iterations: beside the training, or in the midst of its backward."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torchmem
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


@pytest.mark.slow
def test_an_unrelated_training_in_another_thread_does_not_crash():
    """Gradients would be looked at while the other thread's backward puts them in place: a segmentation fault."""
    command = [sys.executable, str(STRANGERS), "8000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "8000 []\n"), done.stderr


def test_optimizers_that_step_in_backward_have_their_gradients_named(model, tmp_path):
    """A job that fuses its optimizer into the backward would hold gradients that nobody owns."""
    optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with torchmem.install(model, None, dir=tmp_path) as monitor:
        for _ in range(3):
            model(torch.randn(4, SIZE)).sum().backward()
        usage, record = held(monitor.snapshot()), monitor.snapshot()
    assert [labeler.name for labeler in record.labelers if not labeler.up] == []
    for name in ("0", "2"):
        expected = parameter_bytes(model[int(name)])
        assert {usage[name, reftype] for reftype in ("parameter", "gradient", "optimizer_state")} == {expected}


def test_an_optimizer_over_copies_of_the_parameters_has_the_models_gradients_named(model, tmp_path):
    """With master weights of its own, as in mixed precision, the gradients of the model would be scratch."""
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, 0.1)
    with torchmem.install(model, optimizer, dir=tmp_path) as monitor:
        for _ in range(2):
            model(torch.randn(4, SIZE)).sum().backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad.clone()
            optimizer.step()
        usage = held(monitor.snapshot())
    for name in ("0", "2"):
        assert usage[name, "gradient"] == parameter_bytes(model[int(name)])
