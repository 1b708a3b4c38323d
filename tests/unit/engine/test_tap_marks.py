"""What the tap marks besides blocks: operations on checkpoints, recomputation, watches, what modules hold now."""

from __future__ import annotations

import struct
import threading

import pytest
import torch
from torch import nn

from torchmem.engine import native
from torchmem.model import Phase, RefType

CHECKPOINT = int(RefType.CHECKPOINT)
SAVE, LOAD = 1, 2


@pytest.fixture
def tap():
    """The process's tap, counting under the root and one module in it, everything put back afterwards."""
    engine = native.load()
    assert engine.attach_cpu() == ""
    engine.reset([0, 0, 1])
    engine.set_gate(True)
    yield engine
    engine.set_gate(False)
    assert engine.detach_cpu()


def by_reftype(packed: bytes) -> dict[str, int]:
    """What a packed row of totals holds."""
    values = struct.unpack(f"<{len(RefType)}q", packed)
    return {reftype.label: value for reftype, value in zip(RefType, values, strict=True) if value}


def label_of(tap, tensor: torch.Tensor) -> int:
    return tap.lookup(tensor.untyped_storage().data_ptr())[2]


def test_an_operation_outranks_the_labels_inside_it(tap):
    """What a state dict gathers would be booked as the buffers of the gathering, not as the checkpoint's."""
    depth = tap.push_checkpoint(SAVE)
    tap.push_label(1, RefType.ALL_GATHER)
    gathered = torch.empty(100)
    tap.relabel(gathered._cdata, 1, RefType.UNSHARDED_PARAMETER)
    assert label_of(tap, gathered) == CHECKPOINT
    tap.cut_stack(depth)
    assert label_of(tap, torch.empty(10)) == RefType.OTHER
    assert tap.relabel(gathered._cdata, 1, RefType.UNSHARDED_PARAMETER)


def test_the_latest_operation_leaves_its_peak(tap):
    """The published peak of saving would be another's, or lost when a step ends meanwhile."""
    kept = torch.empty(1000)
    depth = tap.push_checkpoint(SAVE)
    torch.empty(500)
    phases, _ = tap.end_step()
    torch.empty(100)
    tap.cut_stack(depth)
    assert phases & Phase.CHECKPOINT
    assert tap.checkpoint_peaks() == [(0, SAVE, 4 * 1500)]
    assert [bool(tap.end_step()[0] & Phase.CHECKPOINT) for _ in range(2)] == [True, False]
    depth = tap.push_checkpoint(SAVE)
    torch.empty(10)
    tap.cut_stack(depth)
    depth = tap.push_checkpoint(LOAD)
    tap.cut_stack(depth)
    assert tap.checkpoint_peaks() == [(0, SAVE, 4 * 1010), (0, LOAD, 4 * kept.numel())]


def test_operations_of_one_step_are_one_checkpoint(tap):
    """The gathering that fills the device would be hidden by the writing that follows."""
    for num in (700, 20):
        depth = tap.push_checkpoint(SAVE)
        torch.empty(num)
        tap.cut_stack(depth)
    assert tap.checkpoint_peaks() == [(0, SAVE, 4 * 700)]


def test_other_threads_count_for_an_operation(tap):
    """What a communication thread allocates while a checkpoint is gathered would not be in its peak."""
    depth = tap.push_checkpoint(SAVE)
    thread = threading.Thread(target=torch.empty, args=(3000,))
    thread.start()
    thread.join()
    tap.cut_stack(depth)
    assert tap.checkpoint_peaks() == [(0, SAVE, 4 * 3000)]
    phases, _ = tap.end_step()
    assert phases & Phase.CHECKPOINT


def test_no_such_operation(tap):
    """A wrong number would be written outside the books."""
    for number in (0, 3):
        with pytest.raises(ValueError, match="no such operation"):
            tap.push_checkpoint(number)


def test_a_watch_sees_every_thread_and_ends(tap):
    """A module's peak in backward, which runs on any thread, would be missed, or watches pile up."""
    torch.empty(5000)
    watch = tap.start_watch()
    depth = tap.push_label(1, RefType.ACTIVATION)
    torch.empty(300)
    tap.cut_stack(depth)
    ((device, most, totals),) = tap.read_watch(watch)
    assert (device, most, by_reftype(totals)) == (0, 1200, {"activation": 1200})
    torch.empty(400)
    ((_, most, totals),) = tap.stop_watch(watch)
    assert (most, by_reftype(totals)) == (1600, {"other": 1600})
    assert tap.read_watch(watch) == []


def test_totals_leave_the_step_open(tap):
    """Looking at the books would end the step and cut its peak in two."""
    kept = torch.empty(100)
    torch.empty(900)
    ((_, now, totals, peak, at_peak),) = tap.totals()
    assert (now, by_reftype(totals)) == (400, {"other": 400})
    assert (peak, by_reftype(at_peak)) == (4000, {"other": 4000})
    ((_, _, _, peak, _),) = tap.totals()
    assert peak == 4000
    del kept


def test_held_tensors_are_found_where_they_are_now(tap):
    """A parameter that was replaced, or its gradient, would keep the label of its birth; or a bucket lose its own."""
    model = nn.Linear(10, 10)
    held = tap.make_held(
        [(model, "_parameters", name, 2, int(RefType.PARAMETER)) for name in ("weight", "bias")], torch.Tensor
    )
    model.weight = nn.Parameter(torch.empty(20, 10))
    model.weight.grad, model.bias.grad = torch.empty(20, 10), torch.empty(10)
    tap.relabel(model.bias.grad._cdata, 1, RefType.GRADIENT_BUCKET)
    held.relabel(tap.is_lone_trainer())
    assert label_of(tap, model.weight) == RefType.PARAMETER
    assert label_of(tap, model.weight.grad) == RefType.GRADIENT
    assert label_of(tap, model.bias.grad) == RefType.GRADIENT_BUCKET
    del model
    held.relabel(tap.is_lone_trainer())


def test_a_bad_place_is_refused(tap):
    """A labeler's mistake would be a crash instead of an error that disables it."""
    with pytest.raises(ValueError, match="no owner"):
        tap.make_held([(nn.Linear(1, 1), "_parameters", "weight", 9, 1)], torch.Tensor)
    with pytest.raises(TypeError):
        tap.make_held([(3,)], torch.Tensor)


def test_what_is_recomputed_outside_modules_is_recomputation(tap):
    """What a checkpointed function that is no module remakes in backward would be booked as scratch."""
    depth = tap.push_recomputation()
    remade = torch.empty(10)
    tap.cut_stack(depth)
    assert label_of(tap, remade) == RefType.RECOMPUTATION
