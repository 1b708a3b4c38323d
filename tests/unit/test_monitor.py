"""install() and Monitor on plain models: what is counted, when a step ends, and that everything is put back."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import weakref

import pytest
import torch
from torch import nn

import torchmem
from torchmem.engine import native
from torchmem.model import OUTSIDE, ROOT, Phase
from torchmem.wire.record import Record, forecast_drift_ratio, unpack_cells

SIZE = 64


@pytest.fixture
def settings(tmp_path):
    return {"dir": tmp_path, "train_job": "test", "publish_interval": 60.0}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))


def train(model, optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.randn(8, SIZE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def book(record: Record, name: str = "usage") -> dict[tuple[str, str], int]:
    [device] = record.devices
    return {
        (record.modules[c.module], record.reftypes[c.reftype]): c.num_bytes for c in unpack_cells(getattr(device, name))
    }


def by_reftype(record: Record, name: str = "usage") -> dict[str, int]:
    totals: dict[str, int] = {}
    for (_, reftype), num_bytes in book(record, name).items():
        totals[reftype] = totals.get(reftype, 0) + num_bytes
    return totals


def hook_tables(model) -> list:
    names = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
    return [dict(getattr(module, name)) for module in model.modules() for name in names]


def test_static_bytes_are_the_storages(model, settings):
    """Parameters, gradients or optimizer state would not be what their storages hold, or carry the wrong module."""
    optimizer = torch.optim.AdamW(model.parameters())
    with torchmem.install(model, optimizer, **settings) as monitor:
        train(model, optimizer, steps=2)
        usage = book(monitor.snapshot())
        for index in ("0", "2"):
            layer = model[int(index)]
            parameters = sum(p.untyped_storage().nbytes() for p in layer.parameters())
            state = sum(v.untyped_storage().nbytes() for p in layer.parameters() for v in optimizer.state[p].values())
            assert usage[index, "parameter"] == parameters
            assert usage[index, "gradient"] == parameters
            assert usage[index, "optimizer_state"] == state


def test_books_that_existed_before_are_adopted(model, settings):
    """A job that is watched late would miss its parameters, gradients or optimizer state."""
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    model(torch.randn(8, SIZE)).sum().backward()
    with torchmem.install(model, optimizer, **settings) as monitor:
        totals = by_reftype(monitor.snapshot())
    parameters = sum(p.untyped_storage().nbytes() for p in model.parameters())
    assert totals["parameter"] == totals["gradient"] == parameters
    assert totals["optimizer_state"] == 2 * parameters + 4 * 4  # two moments, four step counters


def test_peak_is_the_sum_of_its_parts(model, settings):
    """The parts of the step peak would not sum to the whole."""
    optimizer = torch.optim.AdamW(model.parameters())
    with torchmem.install(model, optimizer, **settings) as monitor:
        train(model, optimizer, steps=3)
        [device] = monitor.snapshot().devices
        assert sum(book(monitor.snapshot(), "step_peak").values()) == device.step_peak_bytes
        assert sum(book(monitor.snapshot(), "usage").values()) == device.usage_bytes
        assert device.usage_bytes <= device.step_peak_bytes <= device.peak_bytes


def test_optimizer_scratch_is_temporary(model, settings):
    """The scratch of a foreach optimizer would count as optimizer state, as in torch's own tracker."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with torchmem.install(model, optimizer, **settings) as monitor:
        train(model, optimizer, steps=3)
        parameters = sum(p.untyped_storage().nbytes() for p in model.parameters())
        assert by_reftype(monitor.snapshot(), "step_peak")["optimizer_state"] == 2 * parameters + 16
        assert book(monitor.snapshot(), "step_peak")[OUTSIDE, "temporary"] >= parameters


def test_any_optimizer_ends_the_step(model, settings):
    """An optimizer that was not passed in would not be found, its state booked as something else."""
    with torchmem.install(model, **settings) as monitor:
        stranger = nn.Linear(4, 4)
        elsewhere = torch.optim.SGD(stranger.parameters(), lr=0.1)
        stranger(torch.ones(1, 4)).sum().backward()
        elsewhere.step()
        assert monitor.snapshot().clock.step == 0
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer, steps=2)
        elsewhere.step()
        assert monitor.snapshot().clock.step == 2
        assert by_reftype(monitor.snapshot())["optimizer_state"] > 0


def test_two_optimizers_make_one_step(model, settings):
    """A job with an optimizer for each part would seem to make two steps an iteration."""
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with torchmem.install(model, **settings) as monitor:
        for _ in range(3):
            model(torch.randn(2, SIZE)).sum().backward()
            first.step()
            second.step()
        assert monitor.snapshot().clock.step == 3


def test_step_without_optimizer(model, settings):
    """A loop without an optimizer could not end its steps."""
    with torchmem.install(model, **settings) as monitor:
        model(torch.randn(8, SIZE)).sum().backward()
        monitor.step()
        assert monitor.snapshot().clock.step == 1
        assert by_reftype(monitor.snapshot(), "step_peak")["activation"] > 0


def test_a_step_by_hand_takes_over(model, settings):
    """A loop with a rule of its own would make two steps an iteration: the optimizer's and its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchmem.install(model, optimizer, **settings) as monitor:
        monitor.step()
        for _ in range(2):
            train(model, optimizer, steps=3)
            monitor.step()
        phases = memoryview(monitor.snapshot().ring.phases).cast("q").tolist()
        assert monitor.snapshot().clock.step == 3
        assert phases == [0, *[Phase.FORWARD | Phase.BACKWARD | Phase.OPTIMIZER] * 2]


def test_a_failed_install_leaves_nothing(model, settings, monkeypatch):
    """An install that fails halfway would hang, keep its hooks on the model, or block the next one."""
    import torchmem.monitor

    def fail(*_):
        raise RuntimeError("no identity")

    before = hook_tables(model)
    with monkeypatch.context() as patched:
        patched.setattr(torchmem.monitor, "identify", fail)
        with pytest.raises(RuntimeError, match="no identity"):
            torchmem.install(model, **settings)
    assert hook_tables(model) == before
    torchmem.install(model, **settings).close()


def test_a_loop_that_never_ends_a_step_is_named(model, settings, caplog):
    """A loop without an optimizer and without monitor.step() would publish old figures and say nothing."""
    with torchmem.install(model, **settings) as monitor, torch.no_grad():
        for _ in range(1000):
            model(torch.ones(1, SIZE))
        [step] = [labeler for labeler in monitor.snapshot().labelers if labeler.name == "step"]
        assert not step.up
        assert "call monitor.step()" in step.reason
        assert len(caplog.records) == 1
        monitor.step()
        assert all(labeler.up for labeler in monitor.snapshot().labelers)


def test_exception_in_the_optimizer_leaves_the_next_step_right(model, settings):
    """A failed optimizer step would label the whole next iteration as the optimizer's scratch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchmem.install(model, optimizer, **settings) as monitor:
        train(model, optimizer, steps=2)
        expected = by_reftype(monitor.snapshot(), "step_peak")
        group = optimizer.param_groups[0]
        model(torch.randn(8, SIZE)).square().mean().backward()
        lr = group.pop("lr")
        with pytest.raises(KeyError):
            optimizer.step()
        group["lr"] = lr
        optimizer.zero_grad()
        monitor._native.rotate_windows()
        monitor._native.rotate_windows()
        train(model, optimizer)
        assert by_reftype(monitor.snapshot(), "step_peak") == expected


def test_closure_runs_inside_the_optimizer(model, settings):
    """The forward that LBFGS runs inside its step would be taken for a failed step."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    inputs = torch.randn(8, SIZE)

    def closure():
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    with torchmem.install(model, optimizer, **settings) as monitor:
        optimizer.step(closure)
        optimizer.step(closure)
        assert monitor.snapshot().clock.step == 2
        assert monitor._native.stack_depth() == 0
        assert by_reftype(monitor.snapshot())["optimizer_state"] > 0


def test_exception_in_forward_leaves_no_frame(settings):
    """A module that raises would own everything allocated afterwards."""

    class Breaks(nn.Module):
        def forward(self, x):
            raise RuntimeError

    model = nn.Sequential(nn.Linear(SIZE, SIZE), Breaks())
    with torchmem.install(model, **settings) as monitor:
        with pytest.raises(RuntimeError):
            model(torch.randn(8, SIZE))
        assert monitor._native.stack_depth() == 0


def test_inputs_and_outsiders(model, settings):
    """The batch would count as other, or the loss as nobody's."""
    with torchmem.install(model, **settings) as monitor:
        batch = torch.randn(8, SIZE)
        loss = model(batch).square()
        loss.mean().backward()
        monitor.step()
        usage = book(monitor.snapshot())
        assert usage[ROOT, "input"] == batch.untyped_storage().nbytes()
        assert usage[OUTSIDE, "activation"] == loss.untyped_storage().nbytes()


def test_phases_and_ring(model, settings):
    """The ring of steps would not say what a step held, or its parts not sum to its totals."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchmem.install(model, optimizer, **settings) as monitor:
        train(model, optimizer, steps=600)
        ring = monitor.snapshot().ring
        steps = memoryview(ring.steps).cast("q").tolist()
        assert steps == list(range(89, 601))
        phases = memoryview(ring.phases).cast("q").tolist()
        assert set(phases) == {Phase.FORWARD | Phase.BACKWARD | Phase.OPTIMIZER}
        [device] = ring.devices
        rows = memoryview(device.step_peak).cast("q").tolist()
        width = len(monitor.snapshot().reftypes)
        assert sum(rows[-width:]) == monitor.snapshot().devices[0].step_peak_bytes


def input_sizes(monitor) -> list[int]:
    """Of the record's steps."""
    return memoryview(monitor.snapshot().ring.input_sizes).cast("q").tolist()


def test_the_size_of_inputs_is_noted(model, settings):
    """A long batch could not be told from a leak."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchmem.install(model, optimizer, **settings) as monitor:
        for batches in ((3,), (2, 5, 4), (1,)):
            for num_rows in batches:
                model(torch.ones(num_rows, SIZE)).sum().backward()
            optimizer.step()
        optimizer.step()
        assert input_sizes(monitor) == [3 * SIZE, 5 * SIZE, SIZE, 0]


@pytest.mark.parametrize(
    ("tokens", "expected"), [(7, 7), (None, 3 * SIZE), (-1, 0), ("many", 0), (1 << 70, (1 << 63) - 1)]
)
def test_the_job_may_say_how_large_a_step_was(model, settings, tokens, expected):
    """Sizes in the job's own unit would be ignored, or a senseless one would stop the training."""
    with torchmem.install(model, **settings) as monitor:
        model(torch.ones(3, SIZE)).sum().backward()
        monitor.step(tokens)
        assert input_sizes(monitor) == [expected]


def test_parameters_added_while_training_are_named(settings):
    """What a job adds to its model would be nobody's."""
    model = nn.Linear(SIZE, SIZE)
    model.adapters = nn.ParameterList([nn.Parameter(torch.zeros(SIZE, SIZE))])
    model.register_forward_pre_hook(lambda _, inputs: inputs[0] @ model.adapters[-1])
    optimizer = torch.optim.AdamW(model.parameters())
    with torchmem.install(model, optimizer, **settings) as monitor:
        train(model, optimizer)
        for _ in range(3):
            model.adapters.append(nn.Parameter(torch.zeros(SIZE, SIZE)))
            optimizer.add_param_group({"params": [model.adapters[-1]]})
            train(model, optimizer, steps=2)
        usage = book(monitor.snapshot())
    assert usage["adapters", "parameter"] == 4 * SIZE * SIZE * 4
    assert usage["adapters", "optimizer_state"] == 4 * (2 * SIZE * SIZE * 4 + 4)
    assert (OUTSIDE, "other") not in usage


def test_state_of_a_parameter_that_was_replaced_keeps_its_module(model, settings):
    """A job that leaks optimizer state by replacing weights would be told that it leaks outside of all modules."""
    optimizer = torch.optim.AdamW(model.parameters())
    with torchmem.install(model, optimizer, **settings) as monitor:
        train(model, optimizer)
        model[0].weight = nn.Parameter(torch.zeros(SIZE, SIZE))
        optimizer.add_param_group({"params": [model[0].weight]})
        train(model, optimizer)
        usage = book(monitor.snapshot())
    assert (OUTSIDE, "optimizer_state") not in usage
    assert usage["0", "optimizer_state"] == 2 * (2 * SIZE * SIZE * 4 + 4) + 2 * SIZE * 4 + 4


def test_close_puts_everything_back(model, settings):
    """A hook table, an allocator or torch's optimizer hooks would differ after close()."""
    from torch.optim import optimizer as optim

    engine = native.load()
    optimizer = torch.optim.AdamW(model.parameters())
    before = (hook_tables(model), engine.cpu_allocator(), dict(optim._global_optimizer_pre_hooks))
    monitor = torchmem.install(model, optimizer, **settings)
    train(model, optimizer, steps=2)
    monitor.close()
    monitor.close()
    after = (hook_tables(model), engine.cpu_allocator(), dict(optim._global_optimizer_pre_hooks))
    assert after == before
    events = engine.counters()["num_events"]
    train(model, optimizer)
    model.zero_grad()
    del optimizer, model
    gc.collect()
    assert engine.counters()["num_events"] == events


def test_a_copy_and_a_pickle_still_run(model, settings):
    """A copied or saved model would break after the monitor was closed, or at once."""
    with torchmem.install(model, **settings):
        twin = copy.deepcopy(model)
        batch = torch.ones(2, SIZE)
        assert torch.equal(twin(batch), model(batch))
        loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(batch), model(batch))
    assert torch.equal(loaded(batch), model(batch))


def test_the_model_is_not_kept_alive(settings):
    """A monitor that was never closed would hold the model's memory."""
    model = nn.Linear(SIZE, SIZE)
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = torchmem.install(model, optimizer, **settings)
    model(torch.randn(2, SIZE)).sum().backward()
    optimizer.step()
    watch = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in watch] == [None, None]
    assert by_reftype(monitor.snapshot())["parameter"] > 0
    monitor.step()
    assert "parameter" not in by_reftype(monitor.snapshot())
    monitor.close()


def test_depth_decides_who_owns(settings):
    """Modules would be told apart deeper, or less deep, than asked for."""
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(8, 8))})])})
    seen = {}
    for depth in (0, 1, 2):
        with torchmem.install(model, depth=depth, **settings) as monitor:
            seen[depth] = list(book(monitor.snapshot()))
    assert seen == {
        0: [(ROOT, "parameter")],
        1: [("layers.0", "parameter")],
        2: [("layers.0.mlp.0", "parameter")],
    }


def test_disabled_touches_nothing(model, settings):
    """Switched off by its setting it would still hook, count or publish."""
    before = hook_tables(model)
    with torchmem.install(model, enabled=False, **settings) as monitor:
        assert hook_tables(model) == before
        assert monitor.snapshot().devices == []
        monitor.step()
    assert list(settings["dir"].iterdir()) == []


def test_bad_arguments(model, settings):
    """A wrong argument would surface later as something else, or leave half a monitor behind."""
    before = hook_tables(model)
    with pytest.raises(torchmem.InstallError, match="not a torch.nn.Module"):
        torchmem.install([model], **settings)
    with pytest.raises(torchmem.InstallError, match="not a torch.optim.Optimizer"):
        torchmem.install(model, "adam", **settings)
    with pytest.raises(torchmem.ConfigError, match="unknown setting 'deptth'"):
        torchmem.install(model, deptth=3)
    with pytest.raises(torchmem.ConfigError, match="depth"):
        torchmem.install(model, depth=-1)
    with (
        torchmem.install(model, **settings),
        pytest.raises(torchmem.InstallError, match="close\\(\\) that monitor first"),
    ):
        torchmem.install(model, **settings)
    assert hook_tables(model) == before


def test_forked_child_leaves_the_parent_alone(model, settings):
    """A forked worker that steps or closes would write the parent's record or end its counting."""
    with torchmem.install(model, **settings) as monitor:
        child = os.fork()
        if child == 0:
            monitor.step()
            monitor.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        model(torch.randn(8, SIZE))
        monitor.step()
        assert monitor.snapshot().clock.step == 1
        assert not monitor.snapshot().clock.final


def test_a_failing_labeler_is_named(model, settings, monkeypatch):
    """An exception in a hook would reach the training loop, or the failure go unnoticed."""
    from torchmem.labelers.optimizer import OptimizerLabeler

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchmem.install(model, optimizer, **settings) as monitor:
        monkeypatch.setattr(OptimizerLabeler, "_label_state", lambda self, optimizer: 1 / 0)
        train(model, optimizer, steps=2)
        states = {labeler.name: labeler for labeler in monitor.snapshot().labelers}
        assert not states["optimizer"].up
        assert "ZeroDivisionError" in states["optimizer"].reason
        assert states["module"].up


def test_lazy_modules_are_watched(settings):
    """One module without parameters yet would cost the whole model its names."""
    model = nn.Sequential(nn.LazyLinear(SIZE), nn.Linear(SIZE, SIZE))
    with torchmem.install(model, **settings) as monitor:
        model(torch.randn(2, SIZE))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, steps=1)
        assert [labeler.name for labeler in monitor.snapshot().labelers if not labeler.up] == []
        assert by_reftype(monitor.snapshot())["parameter"] == 2 * 4 * (SIZE * SIZE + SIZE)


def test_global_hooks_of_the_users_are_left_alone(model, settings):
    """Measuring ourselves would call hooks that expect the job's modules, and their errors stop the job."""
    calls = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(module))
    with torchmem.install(model, **settings):
        assert calls == []
    handle.remove()


def test_a_second_optimizer_takes_over(model, settings):
    """After the first optimizer is gone no step would ever end again."""
    with torchmem.install(model, **settings) as monitor:
        for _ in range(2):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            train(model, optimizer, steps=2)
            del optimizer
            gc.collect()
        assert monitor.snapshot().clock.step == 4


def test_an_interrupted_install_leaves_nothing(model, settings, monkeypatch):
    """Ctrl-C while torchmem is put on would leave half of it on for good."""
    from torchmem.labelers.ddp import DdpLabeler

    call = nn.Module.__call__

    def interrupted(_labeler) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DdpLabeler, "attach", interrupted)
    with pytest.raises(KeyboardInterrupt):
        torchmem.install(model, **settings)
    assert nn.Module.__call__ is call
    monkeypatch.undo()
    torchmem.install(model, **settings).close()


def test_importing_does_not_import_torch():
    """`import torchmem` would cost every process torch's import."""
    import subprocess
    import sys

    program = "import sys, torchmem, torchmem.config; sys.exit('torch' in sys.modules or len(torchmem.__all__) > 10)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_crash_is_not_a_clean_end(model, settings):
    """A job that died of an exception would look as if it had ended well, and a stopped one as if it had crashed."""
    for error, clean in ((ValueError, False), (KeyboardInterrupt, True)):
        with pytest.raises(error), torchmem.install(model, **settings) as monitor:
            raise error
        assert monitor.snapshot().clock.final is clean


def build_for_forecast():
    """The same model and steps as of these tests."""
    made = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))
    optimizer = torch.optim.AdamW(made.parameters())
    return made, optimizer, lambda: train(made, optimizer)


def test_a_job_is_held_against_its_forecast(model, settings, tmp_path):
    """A forecast that was given would be forgotten, or be another figure than the one that was saved."""
    forecast = torchmem.forecast(build_for_forecast)
    forecast.save(tmp_path / "forecast.json")
    optimizer = torch.optim.AdamW(model.parameters())
    with torchmem.install(model, optimizer, forecast=tmp_path / "forecast.json", **settings) as monitor:
        assert forecast_drift_ratio(monitor.snapshot(), monitor.snapshot().devices[0]) is None
        train(model, optimizer, steps=2)
        record = monitor.snapshot()
    (device,) = record.devices
    assert device.forecast_bytes == forecast.peak_bytes
    assert forecast_drift_ratio(record, device) == pytest.approx(0.0, abs=0.01)
    assert [labeler.up for labeler in record.labelers if labeler.name == "forecast"] == [True]


def test_a_forecast_that_cannot_be_used_costs_a_warning(model, settings, tmp_path):
    """A job would end because of a file that only watches it, or nobody know that it is not watched."""
    with pytest.warns(RuntimeWarning, match=r"gone\.json: No such file or directory; write one by") as warned:
        monitor = torchmem.install(model, forecast=tmp_path / "gone.json", **settings)
    with monitor:
        record = monitor.snapshot()
    assert warned[0].filename == __file__
    (state,) = [labeler for labeler in record.labelers if labeler.name == "forecast"]
    assert not state.up
    assert "No such file" in state.reason
    assert record.devices[0].forecast_bytes is None


def test_without_a_forecast_nothing_is_said_of_one(model, settings):
    """Every job would have a series of a forecast that nobody made."""
    with torchmem.install(model, **settings) as monitor:
        assert "forecast" not in {labeler.name for labeler in monitor.snapshot().labelers}
