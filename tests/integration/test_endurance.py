"""Long runs and odd ones: nothing grows, nothing hangs, no frame stays open."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import torchmem
from torchmem.model import RefType

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


def test_a_copy_outlives_the_books_its_hooks_were_made_for(tmp_path):
    """An averaged copy of a model, run after another model was installed, would write outside the books."""
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(300)))
    with torchmem.install(model, dir=tmp_path):
        twin = copy.deepcopy(model)
    with torchmem.install(nn.Linear(4, 4), dir=tmp_path) as monitor:
        for _ in range(3):
            twin(torch.randn(8, SIZE)).sum().backward()
        assert monitor.snapshot().counters["num_hook_calls"] == 0


def test_an_evaluation_in_another_thread(tmp_path):
    """A second thread that runs the model would switch the optimizer's labels off, and steps would never end."""
    model, optimizer = made()
    stop = threading.Event()

    def evaluate() -> None:
        while not stop.is_set():
            with torch.no_grad():
                model(torch.randn(8, SIZE))

    with torchmem.install(model, optimizer, dir=tmp_path) as monitor:
        thread = threading.Thread(target=evaluate)
        thread.start()
        try:
            for _ in range(200):
                step(model, optimizer)
        finally:
            stop.set()
            thread.join()
        assert monitor.snapshot().clock.step == 200
        assert all(labeler.up for labeler in monitor.snapshot().labelers)


def test_an_interrupted_forward_leaves_no_frame(tmp_path):
    """Ctrl-C in a notebook would leave a module running for ever, the owner of all that follows."""

    class Interrupts(nn.Module):
        on = True

        def forward(self, x):
            if self.on:
                raise KeyboardInterrupt
            return x

    model = nn.Sequential(nn.Linear(SIZE, SIZE), Interrupts())
    with torchmem.install(model, dir=tmp_path) as monitor:
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                model(torch.randn(2, SIZE))
        model[1].on = False
        model(torch.randn(2, SIZE))
        assert monitor._native.stack_depth() == 0


def test_a_loaded_optimizer_state_is_booked(tmp_path):
    """State loaded from a checkpoint would be missing because the one before had the same identity."""
    model, optimizer = made()
    with torchmem.install(model, optimizer, dir=tmp_path) as monitor:
        step(model, optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        for _ in range(20):
            optimizer.load_state_dict(saved)
            optimizer.load_state_dict(saved)
            step(model, optimizer)
            state = optimizer.state[next(model.parameters())]["exp_avg"]
            assert monitor._native.lookup(state.data_ptr())[2] == RefType.OPTIMIZER_STATE


def test_inputs_that_cannot_be_looked_into(tmp_path):
    """A functorch wrapper or a list that holds itself would switch the module labeler off."""
    model = nn.Linear(SIZE, SIZE)
    endless: list = []
    endless.append(endless)
    parameters = dict(model.named_parameters())
    with torchmem.install(model, dir=tmp_path) as monitor:
        torch.func.vmap(lambda x: torch.func.functional_call(model, parameters, (x,)))(torch.randn(3, SIZE))
        model.register_forward_pre_hook(lambda *_: None)
        with pytest.raises(TypeError):
            model(torch.randn(2, SIZE), extra=endless)
        assert all(labeler.up for labeler in monitor.snapshot().labelers)
