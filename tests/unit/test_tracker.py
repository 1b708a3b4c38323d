"""MemTracker on plain models: its interface, what each snapshot holds, and that everything is put back."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import tracemalloc
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.optim import optimizer as optim
from torch.utils.checkpoint import checkpoint

import torchmem
from torchmem.engine import native
from torchmem.labelers.module_stats import KEPT_SNAPSHOTS, ModuleState
from torchmem.model import RefType
from torchmem.snapshots import KEYS

SIZE = 64
ROWS = 8
CPU = torch.device("cpu")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
FORWARD = (ModuleState.BEF_PRE_FW, ModuleState.AFT_PRE_FW, ModuleState.BEF_POST_FW, ModuleState.AFT_POST_FW)
BACKWARD = (ModuleState.BEF_PRE_BW, ModuleState.AFT_PRE_BW, ModuleState.BEF_POST_BW, ModuleState.AFT_POST_BW)
RECOMPUTED = (ModuleState.PRE_FW_AC, ModuleState.POST_FW_AC)
HIDDEN_BYTES = ROWS * SIZE * 4
LAYER_BYTES = (SIZE * SIZE + SIZE) * 4


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))


def train(model, optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.randn(ROWS, SIZE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def totals(stats, state) -> list[int]:
    return [snapshot[CPU]["Total"] for snapshot in stats.snapshots.get(state, [])]


def held(snapshot) -> dict[str, int]:
    return {str(key): num_bytes for key, num_bytes in snapshot[CPU].items() if num_bytes}


def touched(model) -> list:
    return [
        [dict(getattr(module, name)) for module in model.modules() for name in HOOKS],
        dict(optim._global_optimizer_pre_hooks),
        dict(optim._global_optimizer_post_hooks),
        vars(nn.Module)["__call__"],
        native.load().cpu_allocator(),
    ]


def test_current_names_every_byte(model):
    """The current snapshot would name parameters, gradients, inputs, activations or optimizer state wrongly."""
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(ROWS, SIZE)
    with torchmem.MemTracker(model, optimizer) as tracker:
        output = model(batch)
        forward = held(tracker.get_tracker_snapshot())
        output.sum().backward()
        backward = held(tracker.get_tracker_snapshot())
        optimizer.step()
        after = held(tracker.get_tracker_snapshot())
    assert forward == {
        "Parameter": 2 * LAYER_BYTES,
        "Inputs": HIDDEN_BYTES,
        "Activation": 2 * HIDDEN_BYTES,
        "Total": 2 * LAYER_BYTES + 3 * HIDDEN_BYTES,
    }
    assert backward["Gradient"] == after["Gradient"] == 2 * LAYER_BYTES
    assert after["OptState"] == 4 * LAYER_BYTES + 16  # two moments, four step counters
    assert "Temp" not in after


def test_keys_are_torchs_display_names(model):
    """Code written for torch's tracker would not find a reftype, or keys print otherwise."""
    from torch.distributed._tools.fsdp2_mem_tracker import _FSDPRefType

    with torchmem.MemTracker(model) as tracker:
        output = model(torch.randn(ROWS, SIZE))
        snapshot = tracker.get_tracker_snapshot()[CPU]
    assert {reftype.value for reftype in _FSDPRefType} <= set(snapshot)
    assert [key.value for key in KEYS] == [reftype.display_name for reftype in RefType]
    assert list(snapshot) == [*KEYS, "Total"]
    assert snapshot["Total"] == sum(snapshot[key] for key in KEYS)
    assert snapshot[_FSDPRefType.ACT] == snapshot["Activation"] >= output.nbytes


def test_snapshots_can_be_sent(model):
    """A snapshot could not be copied, or gathered from the ranks of a job."""
    with torchmem.MemTracker(model) as tracker:
        snapshot = tracker.get_tracker_snapshot()
    sent = pickle.loads(pickle.dumps(snapshot))
    assert sent == copy.deepcopy(snapshot) == snapshot
    assert next(iter(sent[CPU])).reftype is RefType.OTHER


def test_peak_is_the_highest_of_all_steps(model):
    """A high step would be forgotten when a lower one follows, or the peak not start anew with the block."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = torchmem.MemTracker(model, optimizer)
    with tracker:
        train(model, optimizer)
        low = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
        model(torch.randn(100 * ROWS, SIZE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        high = tracker.get_tracker_snapshot("peak")
        train(model, optimizer, steps=2)
        assert tracker.get_tracker_snapshot("peak") == high
    assert tracker.get_tracker_snapshot("peak") == high
    assert high[CPU]["Total"] > low
    with tracker:
        train(model, optimizer)
    assert tracker.get_tracker_snapshot("peak")[CPU]["Total"] == low


def test_module_states(model):
    """A module's states would be missing, in the wrong order, or hold what another moment held."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchmem.MemTracker(model, optimizer) as tracker:
        train(model, optimizer, steps=2)
        stats = tracker.memory_tracking[model[2]]
        assert list(stats.snapshots) == [*FORWARD, *BACKWARD, ModuleState.PEAK_FW, ModuleState.PEAK_BW]
        static = 2 * LAYER_BYTES + HIDDEN_BYTES
        assert totals(stats, ModuleState.BEF_PRE_FW) == [static + HIDDEN_BYTES] * 2
        assert totals(stats, ModuleState.AFT_POST_FW) == [static + 2 * HIDDEN_BYTES] * 2
        before, after = totals(stats, ModuleState.BEF_PRE_BW)[0], totals(stats, ModuleState.AFT_POST_BW)[0]
        assert after == before + LAYER_BYTES - HIDDEN_BYTES + HIDDEN_BYTES  # its gradients and that of its input
        assert stats.snapshots[ModuleState.AFT_POST_BW][0][CPU]["Gradient"] == LAYER_BYTES


def test_module_sizes(model):
    """The sizes of a module's parameters, buffers, inputs and outputs would be wrong."""
    model = nn.Sequential(model, nn.BatchNorm1d(SIZE))
    with torchmem.MemTracker(model) as tracker:
        model(torch.randn(ROWS, SIZE))
    stats = tracker.memory_tracking[model]
    assert (stats.mod_fqn, tracker.memory_tracking[model[0][2]].mod_fqn) == ("Sequential", "Sequential.0.2")
    assert stats.parameter_mem == 2 * LAYER_BYTES + 2 * SIZE * 4
    assert stats.buffer_mem == 2 * SIZE * 4 + 8
    assert stats.input_mem == stats.output_mem == HIDDEN_BYTES


def test_local_peak_is_the_most_while_the_module_ran():
    """A module's own peak would miss what it held only in between, or hold what others held."""

    class Hungry(nn.Module):
        def forward(self, x):
            torch.empty(1 << 20, dtype=torch.uint8)
            return x + 1

    model = nn.Sequential(nn.Linear(SIZE, SIZE), Hungry(), nn.Linear(SIZE, SIZE))
    with torchmem.MemTracker(model) as tracker:
        model(torch.randn(ROWS, SIZE)).sum().backward()
    hungry, last = (tracker.memory_tracking[model[index]] for index in (1, 2))
    peak = hungry.snapshots[ModuleState.PEAK_FW][0][CPU]
    assert hungry.local_peak[CPU] == peak["Total"] > 1 << 20
    assert peak["Total"] == totals(hungry, ModuleState.BEF_PRE_FW)[0] + (1 << 20)
    assert last.local_peak[CPU] < 1 << 20
    assert tracker.memory_tracking[model].local_peak == hungry.local_peak


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_has_its_own_states(model, reentrant):
    """A forward that activation checkpointing repeats would look like another forward."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    outer = nn.Sequential(nn.Linear(SIZE, SIZE), Checkpointed())
    with torchmem.MemTracker(outer) as tracker:
        for _ in range(2):
            outer(torch.randn(ROWS, SIZE)).sum().backward()
    stats = tracker.memory_tracking[model]
    assert {state: len(stats.snapshots[state]) for state in (*FORWARD, *RECOMPUTED)} == dict.fromkeys(
        (*FORWARD, *RECOMPUTED), 2
    )
    assert stats.snapshots[ModuleState.POST_FW_AC][0][CPU]["Recomputation"] > 0
    assert ModuleState.PRE_FW_AC not in tracker.memory_tracking[outer].snapshots


def own_bytes() -> int:
    """What the tracker's own files hold in Python's memory."""
    gc.collect()
    files = [
        tracemalloc.Filter(inclusive=True, filename_pattern=f"*/torchmem/{name}")
        for name in ("tracker.py", "snapshots.py", "*/states.py")
    ]
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(files).traces)


def test_many_iterations_stay_bounded(model):
    """A second step would need a reset, or snapshots grow with every step."""
    optimizer = torch.optim.AdamW(model.parameters())
    with torchmem.MemTracker(model, optimizer) as tracker:
        tracemalloc.start()
        try:
            train(model, optimizer, steps=50)
            before = own_bytes()
            train(model, optimizer, steps=500)
            assert own_bytes() <= before * 1.01
        finally:
            tracemalloc.stop()
        for stats in tracker.memory_tracking.values():
            assert {len(kept) for kept in stats.snapshots.values()} == {KEPT_SNAPSHOTS}
        assert tracker._states._watches == set()
        assert native.load().counters()["num_unmatched_pops"] == 0


def test_reset_forgets_modules_only(model):
    """reset_mod_stats() would keep old snapshots, or lose the peak."""
    with torchmem.MemTracker(model) as tracker:
        model(torch.randn(ROWS, SIZE)).sum().backward()
        peak = tracker.get_tracker_snapshot("peak")
        tracker.reset_mod_stats()
        assert len(tracker.memory_tracking) == 0
        assert tracker.get_tracker_snapshot("peak") == peak
        model(torch.randn(1, SIZE))
    assert {len(kept) for stats in tracker.memory_tracking.values() for kept in stats.snapshots.values()} == {1}


def test_tracked_inputs_and_externals(model):
    """What was made before the block would be missing, or a name of the model's own be overwritten."""
    teacher = nn.Linear(SIZE, SIZE)
    optimizer = torch.optim.AdamW([*model.parameters(), *teacher.parameters()])
    teacher(torch.ones(1, SIZE)).sum().backward()
    optimizer.step()
    inputs, table = torch.randn(ROWS, SIZE), torch.randn(100)
    tracker = torchmem.MemTracker(model)
    tracker.track_inputs({"x": [inputs, 3]})
    tracker.track_external(teacher, [optimizer, {"table": table}], None, model[0].weight)
    with tracker:
        first = held(tracker.get_tracker_snapshot())
        late = torch.randn(10)
        tracker.track_external(late)
        tracker.track_inputs((late,))
        assert held(tracker.get_tracker_snapshot())["Inputs"] == HIDDEN_BYTES + 40
    assert first == {
        "Parameter": 3 * LAYER_BYTES,
        "Gradient": LAYER_BYTES,
        "OptState": 2 * LAYER_BYTES + 8,
        "Inputs": HIDDEN_BYTES,
        "Other": 400,
        "Total": 6 * LAYER_BYTES + 8 + HIDDEN_BYTES + 400,
    }


def test_inputs_are_not_kept_alive(model):
    """track_inputs() would hold the batch for as long as the tracker lives, and so change the peak."""
    tracker = torchmem.MemTracker(model)
    batch = torch.randn(ROWS, SIZE)
    tracker.track_inputs(batch)
    del batch
    with tracker:
        assert "Inputs" not in held(tracker.get_tracker_snapshot())


def test_wrong_use_is_named(model):
    """A mistake would end in an error that does not say what to do."""
    with pytest.raises(torchmem.InstallError, match="the model is a int"):
        torchmem.MemTracker(3)
    tracker = torchmem.MemTracker(model)
    with pytest.raises(TypeError, match="type str cannot be tracked"):
        tracker.track_external([model, ["table"]])
    with pytest.raises(ValueError, match="'now': choose one of current, peak"):
        tracker.get_tracker_snapshot("now")
    for display in (tracker.display_snapshot, tracker.display_modulewise_snapshots):
        with pytest.raises(ValueError, match="'MB': choose one of B, KiB, MiB, GiB"):
            display(units="MB")


def test_one_counts_at_a_time(model, tmp_path):
    """Two would share one set of books, and the first to end would stop the other's."""
    second = torchmem.MemTracker(model)
    with torchmem.MemTracker(model), pytest.raises(torchmem.InstallError, match="leave that MemTracker"):
        second.__enter__()
    with torchmem.MemTracker(model), pytest.raises(torchmem.InstallError, match="leave that MemTracker"):
        torchmem.install(model, dir=tmp_path)
    with torchmem.install(model, dir=tmp_path), pytest.raises(torchmem.InstallError, match=r"close\(\) that monitor"):
        second.__enter__()
    with torchmem.MemTracker(model) as tracker:
        assert held(tracker.get_tracker_snapshot())["Parameter"] == 2 * LAYER_BYTES


def test_exit_puts_everything_back(model):
    """A hook table, the allocator or torch's optimizer hooks would differ after the block."""
    optimizer = torch.optim.AdamW(model.parameters())
    before = touched(model)
    tracker = torchmem.MemTracker(model, optimizer)
    for _ in range(2):
        with tracker:
            while_on = touched(model)
            loss = model(torch.randn(ROWS, SIZE)).sum()
        assert while_on != before
        assert touched(model) == before
        events = native.load().counters()["num_events"]
        loss.backward()  # a graph with hooks of ours on its tensors
        optimizer.step()
        assert native.load().counters()["num_events"] == events


def test_nested_blocks_are_one(model):
    """Entering a running tracker would reset it, or leaving the inner block end the outer one."""
    with torchmem.MemTracker(model) as tracker:
        model(torch.randn(ROWS, SIZE)).sum().backward()
        peak = tracker.get_tracker_snapshot("peak")
        with tracker as same:
            assert same is tracker
        assert tracker.get_tracker_snapshot("peak") == peak
        model(torch.randn(ROWS, SIZE))
    assert len(tracker.memory_tracking[model].snapshots[ModuleState.BEF_PRE_FW]) == 2


def test_nothing_before_and_the_last_after(model):
    """A tracker that does not run would fail, or forget what it counted."""
    tracker = torchmem.MemTracker(model)
    assert tracker.get_tracker_snapshot() == tracker.get_tracker_snapshot("peak") == {}
    with tracker:
        last = tracker.get_tracker_snapshot()
    torch.randn(1000)
    assert tracker.get_tracker_snapshot() == last


@pytest.mark.parametrize("where", ["forward", "backward", "interrupt"])
def test_an_exception_leaves_the_next_step_right(where):
    """An exception inside a module would leave a peak running, or states that belong to nothing."""

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if breaking == ["backward"]:
                raise RuntimeError(*breaking)
            return gradient

    class Fragile(nn.Module):
        def forward(self, x):
            if breaking == ["forward"]:
                raise RuntimeError(*breaking)
            if breaking == ["interrupt"]:
                raise KeyboardInterrupt(*breaking)
            return Breaks.apply(x)

    breaking = [where]
    model = nn.Sequential(nn.Linear(SIZE, SIZE), Fragile(), nn.Linear(SIZE, SIZE))
    with torchmem.MemTracker(model) as tracker:
        with pytest.raises((RuntimeError, KeyboardInterrupt), match=where):
            model(torch.randn(ROWS, SIZE)).sum().backward()
        breaking.clear()
        model.zero_grad()
        tracker.reset_mod_stats()
        model(torch.randn(ROWS, SIZE)).sum().backward()
        assert tracker._states._watches == set()
        assert tracker._states._open == []
        assert tracker._states.hooks.failure == ""
        for stats in tracker.memory_tracking.values():
            assert {len(kept) for kept in stats.snapshots.values()} == {1}, stats.mod_fqn


def test_a_failing_part_costs_only_itself(model, caplog, monkeypatch):
    """A failure in a hook would reach the training loop, or nobody be told."""
    monkeypatch.setattr("torchmem.labelers.module_stats.storage_bytes", lambda _: 1 / 0)
    with torchmem.MemTracker(model) as tracker:
        model(torch.randn(ROWS, SIZE)).sum().backward()
        assert tracker.get_tracker_snapshot("peak")[CPU]["Activation"] > 0
    assert len(tracker.memory_tracking) == 0
    assert [record.getMessage() for record in caplog.records] == [
        "labeler states is off: ZeroDivisionError: division by zero"
    ]


def test_no_engine_is_an_error(model, monkeypatch):
    """A tracker that cannot count would say so nowhere, or stay on the model."""

    def fail():
        raise torchmem.BuildError("no C++ compiler found")

    before = touched(model)
    tracker = torchmem.MemTracker(model)
    with monkeypatch.context() as patched:
        patched.setattr(native, "load", fail)
        with pytest.raises(torchmem.BuildError, match="no C"):
            tracker.__enter__()
    assert touched(model) == before
    with tracker:
        assert tracker.get_tracker_snapshot() != {}


def test_shared_and_handed_through_modules():
    """A module called twice, one that hands its input through or one with several outputs would lose a state."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.same, self.split = nn.Linear(SIZE, SIZE), nn.Identity(), Split()

        def forward(self, x):
            left, right = self.split(self.same(self.shared(self.shared(x))))
            return left + right

    class Split(nn.Module):
        def forward(self, x):
            return x * 2, x * 3

    model = Net()
    with torchmem.MemTracker(model) as tracker:
        model(torch.randn(ROWS, SIZE)).sum().backward()
        assert tracker._states._watches == set()
    counts = {
        name: {state: len(kept) for state, kept in tracker.memory_tracking[module].snapshots.items()}
        for name, module in model.named_children()
    }
    whole = dict.fromkeys([*FORWARD, *BACKWARD, ModuleState.PEAK_FW, ModuleState.PEAK_BW], 1)
    assert counts["shared"] == dict.fromkeys(whole, 2)
    assert counts["split"] == whole
    assert counts["same"] == dict.fromkeys([*FORWARD, ModuleState.PEAK_FW], 1)


def test_a_root_that_calls_itself():
    """The inner call would end the outer one: its bytes be nobody's, its arguments inputs, its states be lost."""

    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(SIZE, SIZE)

        def forward(self, x, depth):
            made = self.layer(x)
            kept.append(made)
            return self(made, depth - 1) + made.exp() if depth else made

    model, kept = Tree(), []
    with torchmem.MemTracker(model) as tracker:
        for _ in range(2):
            kept.clear()
            batch = torch.randn(ROWS, SIZE)
            output = model(batch, 2)
            now = held(tracker.get_tracker_snapshot())
            output.sum().backward()
        stats = tracker.memory_tracking[model]
        assert {state: len(stats.snapshots[state]) for state in FORWARD} == dict.fromkeys(FORWARD, 6)
        assert stats.input_mem == batch.nbytes
        assert tracker._states._watches == set()
        assert native.load().counters()["num_unmatched_pops"] == 0
    assert now["Inputs"] == batch.nbytes
    assert now["Activation"] >= 5 * batch.nbytes
    assert "Other" not in now


def test_in_place_models_still_train():
    """Hooks on tensors would break a model that works in place, or change its gradients."""

    def gradients(*, watched: bool) -> list:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten())
        image = torch.randn(2, 3, 8, 8)
        if watched:
            with torchmem.MemTracker(model):
                model(image).sum().backward()
        else:
            model(image).sum().backward()
        return [parameter.grad.tolist() for parameter in model.parameters()]

    assert gradients(watched=True) == gradients(watched=False)


def test_a_copied_model_does_not_report(model):
    """A deep copy of a tracked model would write into the original's stats."""
    with torchmem.MemTracker(model) as tracker:
        copy.deepcopy(model)(torch.randn(ROWS, SIZE)).sum().backward()
        assert len(tracker.memory_tracking) == 0
        assert tracker._states.hooks.failure == ""


class Block(nn.Module):
    """What people compile one by one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return x + self.inner(x).relu()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
@pytest.mark.parametrize("how", ["compile()", "torch.compile"])
def test_compiled_blocks_are_compiled_as_often(how):
    """Tracking would make torch.compile compile each block anew, until it reaches its limit and gives up for good."""

    def frames(*, watched: bool) -> tuple:
        torch._dynamo.reset()
        counters.clear()
        model = nn.Sequential(*[Block() for _ in range(torch._dynamo.config.recompile_limit + 4)])
        for index, block in enumerate(model):
            if how == "compile()":
                block.compile(backend="eager")
            else:
                model[index] = torch.compile(block, backend="eager")
        tracker = torchmem.MemTracker(model)
        with tracker if watched else contextlib.nullcontext():
            for _ in range(2):
                model(torch.randn(ROWS, SIZE)).sum().backward()
        if watched:
            states = [*FORWARD, *BACKWARD, ModuleState.PEAK_FW, ModuleState.PEAK_BW]
            assert list(tracker.memory_tracking[model[0]].snapshots) == states
        return dict(counters["frames"]), dict(counters["graph_break"]), dict(counters["stats"])

    assert frames(watched=True) == frames(watched=False)


def test_displays(model, capsys):
    """What is printed would lack a device, a reftype, a module or a state, or show those that hold nothing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = torchmem.MemTracker(model, optimizer)
    tracker.display_snapshot("peak")
    assert capsys.readouterr().out == "No memory tracked.\n"
    with tracker:
        train(model, optimizer)
        optimizer.zero_grad()
    tracker.display_snapshot(units="KiB")
    assert capsys.readouterr().out == "Device: cpu\n\tParameter: 32.5 KiB\n\tTotal: 32.5 KiB\n"
    tracker.display_snapshot("current", units="B", tabulate=True)
    assert [line.split() for line in capsys.readouterr().out.splitlines() if "cpu" in line] == [
        ["cpu", "33280", "B", "33280", "B"]
    ]
    tracker.display_modulewise_snapshots(depth=1)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("Module")] == [
        "Module:  Sequential"
    ]
    tracker.display_modulewise_snapshots(depth=2, units="KiB", tabulate=True)
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if line.startswith("Module")] == [
        f"Module:  Sequential{name}" for name in ("", ".0", ".1", ".2")
    ]
    assert "After Post-Backward # 1" in text
    assert "Unsharded" not in text


def test_names_sort_as_numbers(capsys):
    """Layer 10 would be shown before layer 2."""
    model = nn.Sequential(*[nn.ReLU() for _ in range(11)])
    with torchmem.MemTracker(model) as tracker:
        model(torch.randn(1))
    tracker.display_modulewise_snapshots()
    shown = [line.rpartition(".")[2] for line in capsys.readouterr().out.splitlines() if line.startswith("Module")]
    assert shown[1:] == [str(index) for index in range(11)]


def test_a_forked_child_leaves_the_parent_alone(model):
    """A forked worker that leaves the block would report, or take the parent's place to count."""
    with torchmem.MemTracker(model) as tracker:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a process with threads forks
            child = os.fork()
        if child == 0:
            tracker.__exit__(None, None, None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        model(torch.randn(ROWS, SIZE))
        assert held(tracker.get_tracker_snapshot())["Parameter"] == 2 * LAYER_BYTES
