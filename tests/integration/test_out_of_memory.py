"""Allocations that fail, in every phase of a real job: who asked for how much, and what filled the device then."""

from __future__ import annotations

import contextlib
import gc
import threading
import time

import pytest
import torch
from torch import nn

import torchmem
from torchmem.model import OUTSIDE, ROOT, Phase
from torchmem.wire import record as wire

SIZE = 64
IMPOSSIBLE = 1 << 50
DEADLINE_SECONDS = 20.0


class Greedy(torch.autograd.Function):
    """Asks for the impossible in backward."""

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.empty(IMPOSSIBLE, dtype=torch.uint8)
        return gradient


class Layer(nn.Module):
    """A linear layer that asks for the impossible when told to."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.fails_in = ""

    def forward(self, x):
        x = self.linear(x)
        if self.fails_in == "forward":
            torch.empty(IMPOSSIBLE, dtype=torch.uint8)
        return Greedy.apply(x) if self.fails_in == "backward" else x


class Hungry(torch.optim.SGD):
    """An optimizer that asks for the impossible in its step."""

    def step(self, closure=None):
        torch.empty(IMPOSSIBLE, dtype=torch.uint8)
        return super().step(closure)


class Job:
    """A model of two layers with books of its own; a step leaves what a failure finds."""

    def __init__(self, optimizer_type=torch.optim.AdamW):
        torch.manual_seed(0)
        self.model = nn.Sequential(Layer(), nn.ReLU(), Layer())
        self.optimizer = optimizer_type(self.model.parameters(), lr=0.1)

    def step(self):
        """One step; gradients stay, as far as they came."""
        self.model(torch.randn(8, SIZE)).square().mean().backward()
        self.optimizer.step()

    def fail(self):
        """One step, to the allocation that fails."""
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            self.step()


def composition(record, event):
    """(module, reftype) -> bytes at the failure."""
    cells = wire.unpack_cells(event.holders)
    return {(record.modules[cell.module], record.reftypes[cell.reftype]): cell.num_bytes for cell in cells}


def asked(record, event):
    """Who asked, what for, and in which phase."""
    return record.modules[event.module], record.reftypes[event.reftype], Phase(event.phase)


def storages(*tensors):
    """Bytes of the tensors' storages."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.fixture
def settings(tmp_path):
    return {"dir": tmp_path, "train_job": "oom", "publish_interval": 60.0}


@pytest.mark.parametrize(
    ("fails_in", "who"),
    [
        ("forward", ("2", "activation", Phase.FORWARD)),
        ("backward", ("2", "temporary", Phase.BACKWARD)),
    ],
)
def test_failure_in_a_module_names_it_and_what_filled_the_device(settings, fails_in, who):
    """After an out-of-memory error nobody could tell which module asked for how much, or what held the rest."""
    job = Job()
    with torchmem.install(job.model, job.optimizer, **settings) as monitor:
        job.step()
        job.model[2].fails_in = fails_in
        before = time.time()
        job.fail()
        record = wire.decode(wire.encode(monitor.snapshot()))
    [event] = record.oom_events
    held = composition(record, event)
    assert (event.number, event.device, event.step, event.requested_bytes) == (1, "cpu", 1, IMPOSSIBLE)
    assert asked(record, event) == who
    assert before <= event.time <= time.time()
    assert sum(held.values()) == event.held_bytes
    for name, layer in (("0.linear", job.model[0]), ("2.linear", job.model[2])):
        parameters = list(layer.parameters())
        states = [value for parameter in parameters for value in job.optimizer.state[parameter].values()]
        assert held[name, "parameter"] == storages(*parameters)
        assert held[name, "gradient"] == storages(*(parameter.grad for parameter in parameters))
        assert held[name, "optimizer_state"] == storages(*states)


def test_failure_in_the_optimizer(settings):
    """An optimizer whose scratch does not fit would look like the model's own demand."""
    job = Job(Hungry)
    with torchmem.install(job.model, job.optimizer, **settings) as monitor:
        job.fail()
        record = monitor.snapshot()
    [event] = record.oom_events
    assert asked(record, event) == (OUTSIDE, "temporary", Phase.OPTIMIZER)
    assert event.step == 0
    held = composition(record, event)
    parameters = storages(*job.model.parameters())
    assert sum(held[name, "gradient"] for name in ("0.linear", "2.linear")) == parameters


def test_failure_without_gradients_and_outside_of_the_model(settings):
    """A validation loop's failure would be blamed on training, or one outside of the model on a module."""
    job = Job()
    with torchmem.install(job.model, job.optimizer, **settings) as monitor:
        with pytest.raises(RuntimeError):
            torch.empty(IMPOSSIBLE, dtype=torch.uint8)
        job.model[0].fails_in = "forward"
        with torch.no_grad():
            job.fail()
        record = monitor.snapshot()
    assert [asked(record, event) for event in record.oom_events] == [
        (OUTSIDE, "other", Phase.OTHER),
        ("0", "activation", Phase.EVAL),
    ]
    assert record.modules[1] == ROOT


@pytest.mark.slow
def test_composition_is_the_truth_of_an_independent_count(tmp_path):
    """The composition at a failure would not add up to what torch's allocator had given out at that instant."""
    from jobs.ranks import run_alone

    assert run_alone(compare_with_witness, 1, str(tmp_path)) == {"forward": (0, 1), "backward": (0, 1)}


def compare_with_witness(_rank, _world_size, directory):
    """By phase: how far the composition is from the witness's count, and how many failures the record holds."""
    from torchmem.validation import witness

    witness.install()
    return {fails_in: _gap(fails_in, directory, witness) for fails_in in ("forward", "backward")}


def _gap(fails_in, directory, witness):
    gc.collect()
    foreign_bytes = witness.current()
    job = Job()
    x = torch.randn(8, SIZE)
    true_bytes = []
    impossible = torch.empty

    def empty(size, **options):
        true_bytes.append(witness.current() - foreign_bytes)
        return impossible(size, **options)

    with torchmem.install(job.model, job.optimizer, dir=directory) as monitor:
        x = torch.randn(8, SIZE)  # noqa: F841  # made under the books, as the witness's count has it
        job.step()
        job.model[2].fails_in = fails_in
        torch.empty = empty
        try:
            job.fail()
        finally:
            torch.empty = impossible
        record = monitor.snapshot()
    [event] = record.oom_events
    return true_bytes[-1] - sum(composition(record, event).values()), len(record.oom_events)


def test_a_search_for_the_largest_batch_goes_on(settings):
    """A job that tries sizes until one fits would fail, or fill its record with failures."""
    job = Job()
    with torchmem.install(job.model, job.optimizer, **settings) as monitor:
        job.step()
        job.model[2].fails_in = "forward"
        for _ in range(100):
            with contextlib.suppress(RuntimeError):
                job.model(torch.randn(8, SIZE))
        job.model[2].fails_in = ""
        job.step()
        record = wire.decode(wire.encode(monitor.snapshot()))
    assert [event.number for event in record.oom_events] == list(range(93, 101))
    assert record.counters["num_ooms"] == record.devices[0].allocator.num_ooms == 100
    assert record.clock.step == 2
    assert sum(composition(record, record.oom_events[-1]).values()) == record.oom_events[-1].held_bytes


def test_only_the_last_failure_is_kept_whole(tmp_path):
    """Every record of a large model would carry its composition eight times over, for as long as the job lives."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(100)))
    with torchmem.install(model, dir=tmp_path, train_job="oom", publish_interval=60.0) as monitor:
        for _ in range(2):
            with pytest.raises(RuntimeError):
                torch.empty(IMPOSSIBLE, dtype=torch.uint8)
        older, latest = (wire.unpack_cells(event.holders) for event in monitor.snapshot().oom_events)
    assert len(latest) >= 100
    assert len(older) == 64
    assert sum(cell.num_bytes for cell in older) < monitor.snapshot().oom_events[0].held_bytes


def test_failures_on_several_threads(settings):
    """Failures at the same time on several threads would be lost, or break the books."""
    job = Job()
    with torchmem.install(job.model, job.optimizer, **settings) as monitor:
        job.step()

        def fail():
            for _ in range(25):
                with contextlib.suppress(RuntimeError):
                    torch.empty(IMPOSSIBLE, dtype=torch.uint8)

        threads = [threading.Thread(target=fail) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        record = wire.decode(wire.encode(monitor.snapshot()))
    assert record.counters["num_ooms"] == 100
    for event in record.oom_events[-1:]:
        assert sum(composition(record, event).values()) == event.held_bytes


def test_the_count_is_in_the_record_before_the_next_step_ends(settings):
    """A job that dies of its first failure would leave a record that denies it."""
    job = Job()
    with torchmem.install(job.model, job.optimizer, **settings) as monitor:
        job.step()
        job.model[0].fails_in = "forward"
        job.fail()
        [device] = monitor.snapshot().devices
        assert device.allocator.num_ooms == 1
        job.model[0].fails_in = ""
        for _ in range(2):
            job.step()
            monitor._facts_at = 0.0
        [device] = monitor.snapshot().devices
    assert device.allocator.num_ooms == 1


def test_nothing_is_noted_after_close(settings):
    """A closed monitor would go on counting what fails in the process."""
    job = Job()
    with torchmem.install(job.model, job.optimizer, **settings) as monitor:
        job.step()
        native = monitor._native
    with pytest.raises(RuntimeError):
        torch.empty(IMPOSSIBLE, dtype=torch.uint8)
    assert (monitor.snapshot().oom_events, native.ooms()) == ([], ([], []))
