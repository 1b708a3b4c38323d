"""install() where the native engine is not there, or not wished: what is published, when, and what is left behind."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import torchmem
from torchmem.engine import native
from torchmem.errors import BuildError
from torchmem.model import Phase
from torchmem.wire.record import Record, decode, encode, unpack_cells

SIZE = 64
EVERY = 5
BROKEN = "no C++ compiler found: install g++"


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    """As on a host without a compiler."""
    torch._dynamo.utils.counters.clear()  # what other tests compiled

    def load():
        raise BuildError(BROKEN)

    monkeypatch.setattr(native, "load", load)


@pytest.fixture
def settings(tmp_path):
    return {"dir": tmp_path, "train_job": "test", "publish_interval": 60.0, "sample_every": EVERY}


@pytest.fixture
def wished(settings):
    return {**settings, "engine": "dispatch"}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))


@pytest.fixture
def optimizer(model):
    return torch.optim.AdamW(model.parameters())


def train(model, optimizer, steps=1, rows=8):
    for _ in range(steps):
        model(torch.randn(rows, SIZE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_reftype(record: Record, name="usage"):
    [device] = record.devices
    totals: dict[str, int] = {}
    for cell in unpack_cells(getattr(device, name)):
        reftype = record.reftypes[cell.reftype]
        totals[reftype] = totals.get(reftype, 0) + cell.num_bytes
    return totals


def states(record: Record):
    return {labeler.name: labeler for labeler in record.labelers}


def ring_steps(record: Record):
    return memoryview(record.ring.steps).cast("q").tolist()


def test_one_warning_says_what_is_left_and_what_to_do(model, optimizer, settings):
    """A host without a compiler would stop the job, or give figures that nobody knows to be samples."""
    with pytest.warns(RuntimeWarning, match=f"counts only one step in {EVERY}: .*install g\\+\\+") as caught:
        monitor = torchmem.install(model, optimizer, **settings)
    with monitor:
        record = monitor.snapshot()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert (record.identity.engine, record.identity.sample_every) == ("dispatch", EVERY)
    engine = states(record)["engine"]
    assert not engine.up
    assert engine.reason == f"one step in {EVERY} is counted: {BROKEN}"


def test_sampling_can_be_wished(model, optimizer, wished):
    """Who wants nothing under the allocator would be warned, or alerted, or get it all the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torchmem.install(model, optimizer, **wished) as monitor:
            record = monitor.snapshot()
    assert (record.identity.engine, record.identity.sample_every) == ("dispatch", EVERY)
    assert states(record)["engine"].up
    assert f"one step in {EVERY}" in states(record)["engine"].reason


def test_nothing_is_known_before_the_first_sample(model, optimizer, wished):
    """Memory that was not looked at yet would be published as none."""
    with torchmem.install(model, optimizer, **wished) as monitor:
        train(model, optimizer)
        record = decode(encode(monitor.snapshot()))
        assert (record.clock.step, record.devices, ring_steps(record)) == (1, [], [])
        train(model, optimizer)
        [device] = decode(encode(monitor.snapshot())).devices
        assert device.step_peak_bytes > device.usage_bytes > 0


def test_steps_are_counted_and_samples_stand(model, optimizer, wished):
    """A rank would look stale between samples, or its books change without a sample."""
    with torchmem.install(model, optimizer, **wished) as monitor:
        train(model, optimizer, steps=2, rows=512)
        first = monitor.snapshot()
        train(model, optimizer, steps=4, rows=1024)
        between = monitor.snapshot()
        train(model, optimizer, steps=1, rows=1024)
        second = monitor.snapshot()
    assert [record.clock.step for record in (first, between, second)] == [2, 6, 7]
    assert first.clock.step_seconds < between.clock.step_seconds < second.clock.step_seconds
    assert between.devices[0].step_peak == first.devices[0].step_peak
    assert by_reftype(second, "step_peak")["activation"] > 1.9 * by_reftype(first, "step_peak")["activation"]
    assert [ring_steps(record) for record in (first, between, second)] == [[2], [2], [2, 7]]
    phases = memoryview(second.ring.phases).cast("q").tolist()
    assert phases == [Phase.FORWARD | Phase.BACKWARD | Phase.OPTIMIZER] * 2
    assert memoryview(second.ring.input_sizes).cast("q").tolist() == [512 * SIZE, 1024 * SIZE]
    assert all(labeler.up for labeler in second.labelers)


def test_static_bytes_are_the_storages(model, optimizer, wished):
    """Parameters, gradients or optimizer state would not be what their storages hold."""
    parameters = sum(p.untyped_storage().nbytes() for p in model.parameters())
    with torchmem.install(model, optimizer, **wished) as monitor:
        train(model, optimizer, steps=2)
        totals = by_reftype(monitor.snapshot())
        [device] = monitor.snapshot().devices
    assert totals["parameter"] == totals["gradient"] == parameters
    assert totals["optimizer_state"] == 2 * parameters + 4 * 4  # two moments, four step counters
    assert device.usage_bytes == sum(totals.values())
    assert device.step_peak_bytes == sum(by_reftype(monitor.snapshot(), "step_peak").values())


def test_the_peak_is_that_of_all_samples(model, optimizer, wished):
    """The peak since the beginning would fall with the next small step, and counters with it."""
    with torchmem.install(model, optimizer, **wished) as monitor:
        train(model, optimizer, steps=2, rows=512)
        high = monitor.snapshot()
        train(model, optimizer, steps=EVERY)
        low = monitor.snapshot()
    assert low.devices[0].step_peak_bytes < high.devices[0].step_peak_bytes == low.devices[0].peak_bytes
    assert low.counters["num_events"] > high.counters["num_events"]
    assert (high.counters["num_samples"], low.counters["num_samples"]) == (1, 2)


def test_steps_by_hand(model, wished):
    """A loop without an optimizer would never be sampled, one with its own rule at the wrong steps."""
    with torchmem.install(model, **wished) as monitor:
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(8, SIZE)).sum().backward()
            monitor.step(tokens=77)
        record = monitor.snapshot()
    assert (record.clock.step, ring_steps(record)) == (3, [2])
    assert memoryview(record.ring.input_sizes).cast("q").tolist() == [77]


def test_closed_in_the_midst_of_a_sample(model, optimizer, wished):
    """Hooks, patches or the mode would stay for the rest of the process, or the last record be empty."""
    from torch.optim import optimizer as optim

    def everything():
        tables = [dict(module._forward_hooks) for module in model.modules()]
        return (
            tables,
            nn.Module.__call__,
            torch.UntypedStorage.resize_,
            dict(optimizer._optimizer_step_post_hooks),
            dict(optim._global_optimizer_post_hooks),
            _get_current_dispatch_mode_stack(),
        )

    before = everything()
    monitor = torchmem.install(model, optimizer, **wished)
    train(model, optimizer, steps=EVERY + 1)
    assert everything() != before
    monitor.close()
    monitor.close()
    assert everything() == before
    assert monitor.snapshot().clock.final
    assert ring_steps(monitor.snapshot()) == [2]
    torchmem.install(model, optimizer, **wished).close()


def test_a_failed_sample_costs_samples_only(model, optimizer, wished, monkeypatch):
    """An error of ours would reach the job, stop the count of its steps, or go unnoticed."""
    with torchmem.install(model, optimizer, **wished) as monitor:
        train(model, optimizer, steps=2)
        monkeypatch.setattr("torchmem.engine.dispatch.DispatchEngine._book", lambda *_: 1 / 0)
        train(model, optimizer, steps=2 * EVERY)
        record = monitor.snapshot()
    assert (record.clock.step, ring_steps(record)) == (2 + 2 * EVERY, [2])
    assert not states(record)["sampler"].up
    assert "ZeroDivisionError" in states(record)["sampler"].reason


def test_a_torch_that_no_engine_knows(model, optimizer, settings, monkeypatch):
    """The job would stop where not even samples can be taken."""
    from torchmem.engine import addresses

    def check():
        raise BuildError("tensors look otherwise")

    monkeypatch.setattr(addresses, "check", check)
    with pytest.warns(RuntimeWarning, match="torchmem counts nothing: no C"):
        monitor = torchmem.install(model, optimizer, **settings)
    with monitor:
        train(model, optimizer, steps=3)
        record = monitor.snapshot()
    assert (record.identity.engine, record.identity.sample_every, record.clock.step) == ("off", 1, 0)
    assert not states(record)["engine"].up


class Squared(nn.Module):
    """What Dynamo compiles, as it does not torch's own modules."""

    def forward(self, x):
        return x.square()


def compiled_frames(model, optimizer):
    """How many frames Dynamo compiles in eight steps, from the first on."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    train(model, optimizer, steps=8)
    return dict(torch._dynamo.utils.counters["frames"])


def test_compiled_jobs_stay_compiled(model, optimizer, wished):
    """A job would run eagerly from its first sample on, much slower; or nobody know why nothing is counted."""
    model.insert(0, Squared())
    model[0].compile(backend="eager")
    alone = compiled_frames(model, optimizer)
    with torchmem.install(model, optimizer, **wished) as monitor:
        watched = compiled_frames(model, optimizer)
        record = monitor.snapshot()
    torch.compiler.reset()
    assert watched == alone
    assert alone["ok"] > 0
    assert (record.clock.step, record.devices) == (8, [])
    assert not states(record)["sampler"].up
    assert "torch.compile" in states(record)["sampler"].reason


def test_a_child_forked_in_a_sample_leaves_the_parent_alone(model, optimizer, wished):
    """A worker would count, hang, or write the parent's record."""
    with torchmem.install(model, optimizer, **wished) as monitor:
        train(model, optimizer)
        child = os.fork()
        if child == 0:
            torch.ones(8)
            monitor.step()
            monitor.close()
            os._exit(0 if _get_current_dispatch_mode_stack() == [] else 1)
        assert os.waitpid(child, 0)[1] == 0
        train(model, optimizer)
        record = monitor.snapshot()
    assert (record.clock.step, record.clock.final, ring_steps(record)) == (2, False, [2])
