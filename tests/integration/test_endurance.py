"""Long runs and odd ones: nothing grows, nothing hangs, no frame stays open."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import torchmem

MIB = 1 << 20
SIZE = 64


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def made() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU()) for _ in range(10)))
    return model, torch.optim.AdamW(model.parameters())


def step(model, optimizer, inputs=None) -> None:
    model(torch.randn(8, SIZE) if inputs is None else inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def in_a_thread(work, *args) -> None:
    thread = threading.Thread(target=work, args=args)
    thread.start()
    thread.join()


@pytest.mark.slow
def test_a_hundred_installs_leave_no_memory_behind(tmp_path):
    """A service that installs and closes again and again would grow."""
    for round_number in range(130):
        model, optimizer = made()
        with torchmem.install(model, optimizer, dir=tmp_path):
            step(model, optimizer)
        if round_number == 30:
            before = resident_bytes()
    assert resident_bytes() - before < 8 * MIB


@pytest.mark.slow
def test_thousands_of_steps_grow_nothing(tmp_path):
    """A job that runs for weeks would run out of memory because it is watched."""
    model, optimizer = made()
    with torchmem.install(model, optimizer, dir=tmp_path) as monitor:
        for _ in range(500):
            step(model, optimizer)
        before, blocks = resident_bytes(), monitor.snapshot().counters["num_live_blocks"]
        for _ in range(3000):
            step(model, optimizer)
        assert monitor.snapshot().counters["num_live_blocks"] == blocks
        assert resident_bytes() - before < 8 * MIB


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_leaves_no_frame(tmp_path, reentrant):
    """Activation checkpointing, which leaves a forward early, would leave its modules running for ever."""
    model, optimizer = made()
    with torchmem.install(model, optimizer, dir=tmp_path) as monitor:
        for _ in range(5):
            x = torch.randn(8, SIZE, requires_grad=True)
            for layer in model:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            x.sum().backward()
            optimizer.step()
        assert monitor._native.stack_depth() == 0
        assert monitor.snapshot().counters["num_unmatched_pops"] == 0


def test_forward_and_backward_in_threads_that_end(tmp_path):
    """A backward in another thread would crash, or its gradients be nobody's."""
    model, optimizer = made()
    with torchmem.install(model, optimizer, dir=tmp_path) as monitor:
        for _ in range(50):
            losses: list[torch.Tensor] = []
            in_a_thread(lambda kept: kept.append(model(torch.randn(8, SIZE)).sum()), losses)
            in_a_thread(losses[0].backward)
            optimizer.step()
        record = monitor.snapshot()
    assert record.clock.step == 50
    assert all(labeler.up for labeler in record.labelers)


def test_forked_workers_feed_a_watched_job(tmp_path):
    """DataLoader workers forked while the tap counts would hang."""
    model, optimizer = made()
    loader = DataLoader(TensorDataset(torch.randn(80, SIZE)), batch_size=4, num_workers=2)
    with torchmem.install(model, optimizer, dir=tmp_path) as monitor:
        for (inputs,) in loader:
            step(model, optimizer, inputs)
        assert monitor.snapshot().clock.step == 20


def test_closing_inside_a_forward(tmp_path):
    """A monitor closed by the code it watches would raise into it or leave a frame open."""
    monitors = []

    class Closes(nn.Module):
        def forward(self, x):
            monitors[0].close()
            return x

    model = nn.Sequential(nn.Linear(SIZE, SIZE), Closes())
    monitors.append(torchmem.install(model, dir=tmp_path))
    model(torch.randn(2, SIZE)).sum().backward()
    assert monitors[0].snapshot().clock.final
    with torchmem.install(model, dir=tmp_path) as monitor:
        assert monitor._native.stack_depth() == 0
