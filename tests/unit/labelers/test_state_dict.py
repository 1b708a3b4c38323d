"""The state-dict labeler on one process: what it names, what it leaves alone, and that it comes off again."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import struct
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from torchmem.engine import native
from torchmem.labelers.state_dict import StateDictLabeler
from torchmem.model import OUTSIDE_OWNER, Operation, Phase, RefType

NUM_BYTES = 4096
save, load = dcp.save, dcp.load  # as users have them: imported before torchmem comes
no_ranks = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Layer(nn.Module):
    """Makes a fresh tensor for its state, and when it is given one; notes whose each was, or fails."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_BYTES // 4))
        self.seen = []
        self.failure = None

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}fresh"] = self._make()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self._make()
        state_dict.pop(f"{prefix}fresh")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _make(self):
        made = torch.ones(NUM_BYTES // 4)
        self.seen.append(label_of(made))
        if self.failure:
            raise self.failure
        return made


class State:
    """A stateful object that is no module."""

    def __init__(self):
        self.seen = []
        self.tensor = torch.arange(8.0)

    def state_dict(self):
        self.seen.append(label_of(torch.ones(8)))
        return {"tensor": self.tensor.clone()}

    def load_state_dict(self, state):
        self.seen.append(label_of(torch.ones(8)))
        self.tensor = state["tensor"]


def label_of(tensor):
    """(owner, reftype) of the tensor in the books."""
    return native.load().lookup(tensor.data_ptr())[1:]


CHECKPOINT = (OUTSIDE_OWNER, RefType.CHECKPOINT)
OTHER = (OUTSIDE_OWNER, RefType.OTHER)


@pytest.fixture
def engine():
    """The process's engine, counting; everything put back afterwards."""
    engine = native.load()
    assert engine.attach_cpu() == ""
    engine.reset([0, 0])
    engine.set_gate(True)
    yield engine
    assert engine.stack_depth() == 0
    engine.set_gate(False)
    assert engine.detach_cpu()


@pytest.fixture
def labeler(engine):
    """The labeler, on."""
    labeler = StateDictLabeler(engine)
    labeler.attach()
    yield labeler
    assert labeler.hooks.failure == ""
    labeler.detach()


@pytest.fixture
def model():
    return nn.Sequential(Layer(), nn.Sequential(Layer(), nn.ReLU()))


def layers(model):
    return [module for module in model.modules() if isinstance(module, Layer)]


def held(engine):
    """Bytes of the CPU, and of those the checkpoint's."""
    [(_, current, totals, *_)] = engine.totals()
    return current, struct.unpack(f"<{len(RefType)}q", totals)[RefType.CHECKPOINT]


def peaks(engine):
    return {Operation(operation).label: num_bytes for _, operation, num_bytes in engine.checkpoint_peaks()}


def test_bytes_and_peak_of_saving(engine, labeler, model):
    """A state dict's bytes would not be the checkpoint's, its peak wrong, or its step look like any other."""
    before, _ = held(engine)
    state = model.state_dict()
    assert [layer.seen for layer in layers(model)] == [[CHECKPOINT], [CHECKPOINT]]
    assert held(engine) == (before + 2 * NUM_BYTES, 2 * NUM_BYTES)
    assert peaks(engine) == {"save": before + 2 * NUM_BYTES}
    assert engine.end_step()[0] == Phase.CHECKPOINT
    del state
    assert held(engine) == (before, 0)
    assert engine.end_step()[0] == Phase.OTHER


def test_bytes_and_peak_of_loading(engine, labeler, model):
    """What loading allocates would not be the checkpoint's, or its peak be taken for that of saving."""
    state = model.state_dict()
    saving = peaks(engine)["save"]
    before, _ = held(engine)
    model.load_state_dict(state)
    assert [layer.seen for layer in layers(model)] == [[CHECKPOINT] * 2] * 2
    assert peaks(engine) == {"save": saving, "load": before + NUM_BYTES}


def test_the_latest_operation_counts(engine, labeler, model):
    """After a large model was saved once, the peak of every later one would be hidden."""
    scratch = torch.ones(NUM_BYTES)
    del model.state_dict()["0.fresh"]
    first = peaks(engine)["save"]
    del scratch
    engine.end_step()
    model.state_dict()
    assert peaks(engine)["save"] == first - 4 * NUM_BYTES


def test_optimizers_are_labelled(engine, labeler, model):
    """What an optimizer's own hooks make for its state would be booked as something else."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda _: seen.append(label_of(torch.ones(8))))
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append(label_of(torch.ones(8))))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [CHECKPOINT, CHECKPOINT]
    assert peaks(engine).keys() == {"save", "load"}


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_exceptions_leave_no_label(engine, labeler, model, error):
    """After a state dict that failed everything would be the checkpoint's, or the exception be another one."""
    layers(model)[1].failure = error
    with pytest.raises(type(error)) as caught:
        model.state_dict()
    assert caught.value is error
    assert engine.stack_depth() == 0
    assert not labeler.running
    assert label_of(torch.ones(8)) == OTHER


def test_other_threads_keep_their_names(engine, labeler, model):
    """What training allocates while another thread saves would be booked as the checkpoint's."""
    inside, may_go_on = threading.Event(), threading.Event()

    def wait(*_):
        inside.set()
        may_go_on.wait(30)

    model.register_state_dict_post_hook(wait)
    thread = threading.Thread(target=model.state_dict)
    thread.start()
    inside.wait(30)
    ours = label_of(torch.ones(8))
    is_running = labeler.running
    may_go_on.set()
    thread.join()
    assert ours == OTHER
    assert not is_running


def test_a_label_that_was_cut_does_not_stop_the_next(engine, labeler, model):
    """After a Ctrl-C at the wrong moment no checkpoint of that thread would be named ever again."""
    labeler._begin(Operation.SAVE)
    assert labeler.running
    engine.cut_stack(0)  # as the next forward does
    assert not labeler.running
    model.state_dict()
    assert layers(model)[0].seen == [CHECKPOINT]


@no_ranks
def test_functions_imported_before_are_labelled(engine, labeler, tmp_path):
    """``from torch.distributed.checkpoint import save`` would escape, or a load count as a save."""
    state, loaded = State(), State()
    save({"state": state}, checkpoint_id=tmp_path / "files")
    assert peaks(engine).keys() == {"save"}
    saving = peaks(engine)["save"]
    engine.end_step()
    ballast = torch.ones(NUM_BYTES)
    loaded.tensor = torch.zeros(8)
    load({"state": loaded}, checkpoint_id=tmp_path / "files")
    assert state.seen == [CHECKPOINT]
    assert loaded.seen == [CHECKPOINT, CHECKPOINT]
    assert torch.equal(loaded.tensor, state.tensor)
    assert peaks(engine)["save"] == saving  # though loading takes a state dict first
    assert peaks(engine)["load"] >= ballast.nbytes


def patched():
    """Everything the labeler replaces, and the tables it lies in."""
    owners = [nn.Module, Optimizer, FullyShardedDataParallel, dcp_state_dict, state_dict_saver, state_dict_loader]
    return [dict(vars(owner)) for owner in (*owners, dcp.filesystem, dcp.staging.DefaultStager)]


def test_everything_is_put_back(engine):
    """After close() something of torch's would not be what it was."""
    before = patched()
    labeler = StateDictLabeler(engine)
    labeler.attach()
    assert labeler.missing == ""
    assert patched() != before
    labeler.detach()
    assert patched() == before


def test_a_wrapper_that_outlives_the_labeler_only_passes_through(engine, model, monkeypatch):
    """Whoever wrapped the method while torchmem was on would go on labelling after it was closed."""
    labeler = StateDictLabeler(engine)
    labeler.attach()
    ours = nn.Module.state_dict

    def theirs(self, **kwargs):
        return ours(self, **kwargs)

    monkeypatch.setattr(nn.Module, "state_dict", theirs)
    labeler.detach()
    assert nn.Module.state_dict is theirs
    model.state_dict()
    monkeypatch.setattr(nn.Module, "state_dict", ours.__wrapped__)
    assert layers(model)[0].seen == [OTHER]


def test_closing_while_saving(engine, model):
    """A monitor that is closed while a state dict is made would leave a label, or break the state dict."""
    labeler = StateDictLabeler(engine)
    labeler.attach()
    model.register_state_dict_pre_hook(lambda *_: labeler.detach())
    assert "0.weight" in model.state_dict()
    assert engine.stack_depth() == 0
    assert not labeler.hooks.failure


def test_a_missing_part_costs_only_itself(engine, monkeypatch, model, caplog):
    """A torch without one private name would lose the whole labeler, or nobody be told."""
    monkeypatch.delattr(state_dict_saver, "_save_state_dict")
    monkeypatch.delattr(FullyShardedDataParallel, "_optim_state_dict_impl")
    labeler = StateDictLabeler(engine)
    labeler.attach()
    try:
        model.state_dict()
        missing = ["torch.distributed.checkpoint.state_dict_saver._save_state_dict"]
        missing.append("torch.distributed.fsdp.FullyShardedDataParallel._optim_state_dict_impl")
        assert labeler.missing == ", ".join(missing)
        assert labeler.missing in caplog.text
        assert labeler.hooks.failure == ""
        assert layers(model)[0].seen == [CHECKPOINT]
        assert state_dict_loader._load_state_dict.__wrapped__
    finally:
        labeler.detach()


def test_a_failing_engine_costs_the_label_only(engine, model):
    """A fault of ours would reach whoever saves."""

    class Broken:
        def push_checkpoint(self, operation):
            raise RuntimeError("broken")

    labeler = StateDictLabeler(Broken())
    labeler.attach()
    try:
        assert list(model.state_dict()) == ["0.fresh", "0.weight", "1.0.fresh", "1.0.weight"]
        assert labeler.hooks.failure == "RuntimeError: broken"
    finally:
        labeler.detach()


def test_methods_look_as_they_did(engine, model):
    """A tool that asks for a method's name, arguments or pickle would be told something else."""
    methods = [nn.Module.state_dict, nn.Module.load_state_dict, Optimizer.state_dict, Optimizer.load_state_dict]
    before = [(method.__qualname__, method.__doc__, inspect.signature(method)) for method in methods]
    labeler = StateDictLabeler(engine)
    labeler.attach()
    try:
        methods = [nn.Module.state_dict, nn.Module.load_state_dict, Optimizer.state_dict, Optimizer.load_state_dict]
        assert [(method.__qualname__, method.__doc__, inspect.signature(method)) for method in methods] == before
        again = pickle.loads(pickle.dumps(model.state_dict))()
        assert again.keys() == model.state_dict().keys()
        assert copy.deepcopy(model).state_dict().keys() == again.keys()
        assert functools.partial(nn.Module.state_dict, self=model)().keys() == again.keys()
    finally:
        labeler.detach()


def compiled_counts(model):
    """Frames and graph breaks of a compiled function that takes a state dict, and what it returns."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    @torch.compile(backend="eager")
    def norm(x):
        return sum((value * x).sum() for value in model.state_dict().values())

    result = norm(torch.full((4,), 2.0)).item()
    counters = torch._dynamo.utils.counters
    return result, dict(counters["frames"]), dict(counters["graph_break"])


def test_compiled_regions_stay_compiled(engine):
    """A state dict inside a compiled function would break its graph."""
    model = nn.Linear(4, 4)
    before = compiled_counts(model)
    labeler = StateDictLabeler(engine)
    labeler.attach()
    try:
        assert compiled_counts(model) == before
    finally:
        labeler.detach()
