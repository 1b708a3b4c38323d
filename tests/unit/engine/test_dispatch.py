"""The dispatch engine: what it sees of operators, and that it labels as the native engine does."""

from __future__ import annotations

import gc
import struct
import threading
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from torchmem.counting import Counting
from torchmem.engine.addresses import storage_address, tensor_at
from torchmem.engine.dispatch import DispatchEngine
from torchmem.labelers.owners import ROOT_OWNER
from torchmem.ledger import by_reftype
from torchmem.model import REFTYPE_LABELS, RefType

FLOATS = 1000
BYTES = 4 * FLOATS
KERNEL_BYTES = 300
RANDOM_STATE_BYTES = 5056
"""Of the CPU's generator, which checkpointing keeps, and which no operator makes."""


@pytest.fixture(params=["real", "fake"])
def engine(request):
    """A running engine, over real and over fake tensors."""
    found = DispatchEngine()
    if request.param == "fake":
        with FakeTensorMode():
            found.start()
            yield found
            found.stop()
    else:
        found.start()
        yield found
        found.stop()


def held(engine):
    """Bytes alive on the CPU."""
    books = engine.all_books().get(0)
    return 0 if books is None else books.current


def test_new_storage_is_booked_until_it_is_freed(engine):
    """An operator's result would not be counted, or stay counted after its tensor is gone."""
    x = torch.empty(FLOATS)
    assert held(engine) == BYTES
    y = x + 1
    assert held(engine) == 2 * BYTES
    del x
    assert held(engine) == BYTES
    del y
    assert held(engine) == 0


def test_views_and_in_place_operators_make_nothing(engine):
    """A view would count its storage again, and lose it when the view alone goes."""
    x = torch.zeros(FLOATS)
    view = x.view(10, -1)[2:]
    x.add_(1).relu_()
    assert held(engine) == BYTES
    del x
    assert held(engine) == BYTES
    del view
    assert held(engine) == 0


def test_every_tensor_of_a_list_is_booked(engine):
    """Operators that return several tensors, or lists of them, would be counted by half."""
    parts = torch._foreach_add([torch.empty(FLOATS) for _ in range(3)], 1)
    assert held(engine) == 3 * BYTES
    values, indices = torch.sort(torch.empty(FLOATS))
    assert held(engine) == 3 * BYTES + BYTES + 2 * BYTES
    del parts, values, indices
    assert held(engine) == 0


def test_resized_storages_are_followed(engine):
    """FSDP frees and refills its buffers by resizing them: they would count as they first were."""
    x = torch.empty(FLOATS)
    x.untyped_storage().resize_(0)
    assert held(engine) == 0
    x.untyped_storage().resize_(2 * BYTES)
    assert held(engine) == 2 * BYTES
    x.resize_(4 * FLOATS)
    assert held(engine) == 4 * BYTES
    del x
    assert held(engine) == 0


def test_an_out_argument_that_grows_is_followed(engine):
    """An ``out=`` tensor that an operator makes larger would keep its old size in the books."""
    out = torch.empty(0)
    torch.add(torch.empty(FLOATS), 1, out=out)
    assert held(engine) == BYTES


def test_nothing_is_booked_while_paused(engine):
    """DTensor's sharding propagation would be counted as if a rank held tensors of global size."""
    with engine.paused():
        x = torch.empty(FLOATS)
    assert held(engine) == 0
    y = x + 1
    assert held(engine) == BYTES
    del y


def test_tensors_inside_a_subclass_are_booked(engine):
    """The parts of a multi-storage subclass would be counted once, or not at all."""
    x = TwoTensors(torch.empty(FLOATS), torch.empty(FLOATS))
    y = x + 1
    assert held(engine) == 4 * BYTES
    del x
    assert held(engine) == 2 * BYTES
    del y
    assert held(engine) == 0


class TwoTensors(torch.Tensor):
    """A subclass with two storages."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(cls, a.size(), dtype=a.dtype, device=a.device)

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner, _context, _size, _stride):
        return TwoTensors(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, _types, args=(), kwargs=None):
        a, b = ([getattr(x, name) if isinstance(x, cls) else x for x in args] for name in "ab")
        return TwoTensors(func(*a, **(kwargs or {})), func(*b, **(kwargs or {})))


def test_stop_leaves_torch_as_it_was():
    """``UntypedStorage.resize_`` would stay replaced, and a mode active."""
    before = torch.UntypedStorage.resize_
    engine = DispatchEngine()
    engine.start()
    assert torch.UntypedStorage.resize_ is not before
    engine.stop()
    assert torch.UntypedStorage.resize_ is before
    x = torch.empty(FLOATS)
    assert held(engine) == 0
    del x


def test_garbage_collected_in_the_midst_of_an_event_is_booked():
    """A tensor in a cycle, freed while the books are being written, would corrupt or deadlock them."""
    engine = DispatchEngine()
    engine.start()
    try:
        for _ in range(200):
            cycle = [torch.empty(10)]
            cycle.append(cycle)
            del cycle
            if _ % 7 == 0:
                gc.collect()
    finally:
        engine.stop()
    gc.collect()
    assert held(engine) == 0


def test_frees_from_other_threads_are_booked():
    """A tensor that another thread drops would stay in the books for ever."""
    engine = DispatchEngine()
    engine.start()
    box = [torch.empty(FLOATS)]
    assert held(engine) == BYTES
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    engine.stop()
    assert held(engine) == 0


@pytest.mark.parametrize("tensor", [torch.empty(3), nn.Parameter(torch.empty(2)), torch.empty(6).view(2, 3)[1:]])
def test_addresses_lead_to_storages_and_tensors(tensor):
    """Labelers name tensors by address: another tensor's memory would be relabelled."""
    assert storage_address(tensor._cdata) == tensor.untyped_storage()._cdata
    assert tensor_at(tensor._cdata) is tensor


def small_model():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(64, 128), nn.ReLU(inplace=True), nn.Linear(128, 64))
    return nn.Sequential(nn.Linear(32, 64), inner, nn.BatchNorm1d(64), nn.Linear(64, 32))


def step_plain(model, optimizer):
    model(torch.ones(16, 32)).square().mean().backward()
    optimizer.step()


def step_twice(model, optimizer):
    (model(torch.ones(16, 32)).sum() + model(torch.ones(8, 32)).sum()).backward()
    optimizer.step()


def step_recomputing(model, optimizer):
    x = model[0](torch.ones(16, 32))
    x = checkpoint(model[1], x, use_reentrant=False)
    model[3](model[2](x)).sum().backward()
    optimizer.step()


def step_reentrant(model, optimizer):
    x = model[0](torch.ones(16, 32))
    x = checkpoint(model[1], x, use_reentrant=True)
    model[3](model[2](x)).sum().backward()
    optimizer.step()


def step_retaining(model, optimizer):
    loss = model(torch.ones(16, 32)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def step_evaluating(model, optimizer):
    with torch.no_grad():
        model(torch.ones(64, 32))
    step_plain(model, optimizer)


STEPS = [step_plain, step_twice, step_recomputing, step_reentrant, step_retaining, step_evaluating]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("foreach", [False, True])
def test_labels_are_those_of_the_native_engine(step, foreach):
    """A forecast would name owners and reference types otherwise than the running job does."""
    dispatched = DispatchEngine()
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    dispatched.start()
    counting = Counting(model, optimizer, depth=3, engine=dispatched)
    counting.attach()
    try:
        by_dispatch = [compositions(counting, lambda: step(model, optimizer)) for _ in range(2)]
    finally:
        dispatched.stop()
        counting.detach()
    assert [one.hooks.failure for one in counting.labelers] == [""] * len(counting.labelers)

    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    counting = Counting(model, optimizer, depth=3, on_step=lambda *_: None, before_forward=lambda *_: None)
    counting.attach()
    try:
        native = [compositions(counting, lambda: step(model, optimizer)) for _ in range(2)]
    finally:
        counting.detach()
    for ours, theirs in zip(by_dispatch, native, strict=True):
        assert ours.usage == theirs.usage
        slack = RANDOM_STATE_BYTES if step is step_reentrant else KERNEL_BYTES
        assert near(ours.peak, theirs.peak, slack)
        assert near(ours.peak_cells, theirs.peak_cells, slack)


class Books(NamedTuple):
    """Of one step: bytes by (owner, reftype) at its end, by reftype and by both at its peak."""

    usage: dict
    peak: dict
    peak_cells: dict


def near(ours, theirs, slack):
    """Equal but for the scalars and scratch that kernels allocate inside an operator."""
    return all(abs(ours.get(key, 0) - theirs.get(key, 0)) <= slack for key in {*ours, *theirs})


def compositions(counting, step):
    """The books of one step."""
    step()
    counting.label_now()
    for _ in range(2):
        counting.native.rotate_windows()
    _, ((_, _, _, by_reftype_at_peak, _),) = counting.native.end_step()
    ((_, _, _, _, usage, at_peak, _),) = counting.native.read_window()
    totals = struct.unpack(f"<{len(RefType)}q", by_reftype_at_peak)
    return Books(
        cells(usage), {reftype: num_bytes for reftype, num_bytes in enumerate(totals) if num_bytes}, cells(at_peak)
    )


def cells(packed):
    return {(owner, reftype): num_bytes for owner, reftype, num_bytes in struct.iter_unpack("<IIq", packed)}


def test_fake_and_real_tensors_make_the_same_books():
    """A forecast on fake tensors would differ from what the same engine counts of real ones."""

    def run(mode):
        engine = DispatchEngine()
        with mode:
            engine.start()
            model = small_model()
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            counting = Counting(model, optimizer, depth=3, engine=engine)
            counting.attach()
            engine.end_step()
            step_plain(model, optimizer)
            counting.label_now()
            composition = by_reftype(engine.all_books()[0].at_peak())
            engine.stop()
            counting.detach()
        return {REFTYPE_LABELS[reftype]: num_bytes for reftype, num_bytes in composition.items() if num_bytes}

    class Nothing:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    assert run(FakeTensorMode()) == run(Nothing())


def test_what_exists_already_is_adopted():
    """Parameters made before the engine ran would be missing from the books."""
    model = nn.Linear(10, 10)
    engine = DispatchEngine()
    engine.start()
    counting = Counting(model, None, depth=2, engine=engine)
    counting.attach()
    engine.stop()
    assert dict(engine.all_books()[0].cells) == {(ROOT_OWNER, RefType.PARAMETER): 440}
    counting.detach()
