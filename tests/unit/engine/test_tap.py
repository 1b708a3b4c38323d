"""The tap on the real allocator: what it counts, from which thread, and that it leaves no trace."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

from torchmem.engine import native
from torchmem.model import RefType

ALLOCATE, RELEASE, OUT_OF_MEMORY = 0, 1, 2
OTHER, INPUT = int(RefType.OTHER), int(RefType.INPUT)


@pytest.fixture
def tap():
    """The process's tap, counting under two owners, everything put back afterwards."""
    engine = native.load()
    assert engine.attach_cpu() == ""
    engine.reset([0, 0, 1])
    engine.set_gate(True)
    yield engine
    engine.set_gate(False)
    assert engine.detach_cpu()


def held(engine, device: int = 0) -> int:
    """Bytes in the books of a device."""
    engine.end_step()
    return {row[0]: row[1] for row in engine.read_window()}.get(device, 0)


def cells(engine) -> dict:
    engine.end_step()
    rows = memoryview(engine.read_window()[0][4]).cast("I")
    values = memoryview(engine.read_window()[0][4]).cast("q")
    return {(rows[4 * i], rows[4 * i + 1]): values[2 * i + 1] for i in range(len(rows) // 4)}


def test_counts_what_is_asked_for(tap):
    """An allocation or a free would be missed, or its size be wrong."""
    before = held(tap)
    kept = torch.empty(1000, dtype=torch.float32)
    assert held(tap) == before + 4000
    kept.untyped_storage().resize_(100)
    assert held(tap) == before + 100
    del kept
    assert held(tap) == before


def test_frees_from_another_thread(tap):
    """A tensor made in one thread and freed in another would stay in the books for ever."""
    made = [torch.empty(100 + i) for i in range(2000)]
    before = tap.counters()["num_live_blocks"]
    thread = threading.Thread(target=made.clear)
    thread.start()
    thread.join()
    assert tap.counters()["num_live_blocks"] == before - 2000


def test_four_threads_lose_nothing(tap):
    """Counting from several threads at once would lose or double events."""
    gc.collect()
    before = held(tap)

    def churn() -> None:
        for i in range(3000):
            torch.empty(10 + i % 500)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held(tap) == before
    assert tap.counters()["num_unknown_frees"] == 0


def test_detaching_restores_the_allocator(tap):
    """The allocator of the process would not be the one it was."""
    assert tap.detach_cpu()
    original = tap.cpu_allocator()
    assert tap.attach_cpu() == ""
    assert tap.cpu_allocator() != original
    assert tap.detach_cpu()
    assert tap.cpu_allocator() == original
    assert tap.attach_cpu() == ""


def test_tensors_outlive_the_tap(tap):
    """A tensor made while counting would crash or be counted when it is freed afterwards."""
    kept = torch.ones(1000)
    tap.set_gate(False)
    assert tap.detach_cpu()
    assert kept.sum() == 1000
    del kept
    tap.reset([0])
    assert tap.attach_cpu() == ""
    assert tap.counters()["num_unknown_frees"] == 0


def test_adopts_what_exists(tap):
    """A block allocated before the tap came would be unknown, or its free be missed."""
    tap.set_gate(False)
    old = torch.empty(1000)
    tap.set_gate(True)
    before = held(tap)
    assert tap.adopt(old.untyped_storage()._cdata, 2, INPUT) == 2
    assert held(tap) == before + 4000
    assert cells(tap)[2, INPUT] == 4000
    del old
    assert held(tap) == before


def test_a_resize_after_adoption_is_seen(tap):
    """FSDP2 frees and allocates its buffers by resizing: the new block would bypass the tap."""
    assert tap.detach_cpu()
    old = torch.empty(1000)
    storage = old.untyped_storage()
    storage.resize_(0)
    assert tap.attach_cpu() == ""
    tap.adopt(storage._cdata, 2, INPUT)
    before = held(tap)
    storage.resize_(400)
    assert held(tap) == before + 400


def test_disowning_undoes_adoption(tap):
    """A storage would keep the tap's deleter after the monitor was closed."""
    assert tap.detach_cpu()
    old = torch.empty(1000)
    storage = old.untyped_storage()
    assert tap.attach_cpu() == ""
    tap.adopt(storage._cdata, 2, INPUT)
    tap.disown(storage._cdata)
    tap.set_gate(True)
    events = tap.counters()["num_events"]
    del old, storage
    assert tap.counters()["num_events"] == events


def test_foreign_memory_is_left_alone(tap):
    """Memory with a deleter of its own (shared, mapped, from another library) would be freed wrongly."""
    foreign = torch.frombuffer(bytearray(400), dtype=torch.uint8)
    assert tap.adopt(foreign.untyped_storage()._cdata, 2, INPUT) == 3
    shared = torch.empty(100).share_memory_()
    assert tap.adopt(shared.untyped_storage()._cdata, 2, INPUT) == 3


def test_group_relabels_tensors_and_gradients(tap):
    """Parameters' gradients would stay temporary."""
    parameter = torch.nn.Parameter(torch.empty(100))
    group = tap.make_group([(parameter._cdata, 2)])
    assert group.relabel(int(RefType.PARAMETER)) == 1
    assert group.relabel_gradients(int(RefType.GRADIENT)) == 0
    parameter.grad = torch.empty(100)
    assert group.relabel_gradients(int(RefType.GRADIENT)) == 1
    assert cells(tap)[2, RefType.PARAMETER] == 400
    assert cells(tap)[2, RefType.GRADIENT] == 400
    del parameter
    gc.collect()
    assert group.relabel(int(RefType.PARAMETER)) == 0


def test_forked_child_neither_counts_nor_hangs(tap):
    """A forked DataLoader worker would count, or hang on a lock that a thread of its parent held."""
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            torch.empty(1000)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                kept = [torch.empty(1000) for _ in range(100)]
                del kept
                os._exit(0 if tap.lookup(0) is None else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()


def test_bad_arguments_are_refused(tap):
    """A wrong owner or reftype would write outside the books."""
    with pytest.raises(ValueError, match="no owner 3"):
        tap.push_label(3, 0)
    with pytest.raises(ValueError, match="no reftype 99|no owner 0 or no reftype 99"):
        tap.push_label(0, 99)
    with pytest.raises(ValueError, match="smaller index"):
        tap.reset([0, 2, 1])
    with pytest.raises(OverflowError):
        tap.push_label(-1, 0)
    with pytest.raises(TypeError):
        tap.push_label(0)


class TestCudaEvents:
    """The source of CUDA events, driven with recorded and hostile sequences."""

    def test_recorded_sequence(self, tap):
        """Blocks of a CUDA device would be booked on the wrong device or with the wrong size."""
        tap.cuda_event(ALLOCATE, 0, 0x7F0000000000, 1000)
        tap.cuda_event(ALLOCATE, 1, 0x7F0000100000, 700_000)
        tap.cuda_event(ALLOCATE, 0, 0x7F0000200000, 30 << 20)
        tap.cuda_event(RELEASE, 0, 0x7F0000000000, 1000)
        assert held(tap, 1) == 30 << 20
        assert held(tap, 2) == 700_000
        assert {row[0]: row[3] for row in tap.read_window()}[1] == 1000 + (30 << 20)

    def test_hostile_sequence(self, tap):
        """Events that make no sense would break the books or the process."""
        for action, device, address, size in [
            (RELEASE, 0, 0xDEAD, 10),
            (ALLOCATE, 0, 0, 10),
            (ALLOCATE, 0, 0x1000, -5),
            (ALLOCATE, -1, 0x1000, 10),
            (ALLOCATE, 63, 0x2000, 10),
            (ALLOCATE, 0, 0x3000, 10),
            (ALLOCATE, 0, 0x3000, 20),
            (RELEASE, 5, 0x3000, 20),
            (RELEASE, 0, 0x3000, 20),
            (OUT_OF_MEMORY, 0, 0, 1 << 40),
        ]:
            tap.cuda_event(action, device, address, size)
        counters = tap.counters()
        assert held(tap, 1) == 0
        assert counters["num_unknown_frees"] == 2
        assert counters["num_double_allocations"] == 1
        assert counters["num_ignored_devices"] == 1
        assert counters["num_ooms"] == 1

    def test_more_devices_than_books(self, tap):
        """A tenth device would be booked on another one's page."""
        kept = torch.empty(10)
        for device in range(20):
            tap.cuda_event(ALLOCATE, device, 0x10000 + device * 64, 10)
        known = 20 - tap.counters()["num_ignored_devices"]
        assert known == 8
        assert all(held(tap, 1 + device) == 10 for device in range(known))
        assert kept.numel() == 10

    def test_without_cuda_the_reason_is_named(self, tap):
        """Attaching where there is no CUDA would crash."""
        if not torch.cuda.is_available():
            assert tap.attach_cuda() != ""

    @pytest.mark.gpu
    def test_on_a_real_device(self, tap):
        """The books of a real CUDA device would not be its allocator's."""
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        torch.cuda.init()
        kept = torch.empty(1000, device="cuda")
        assert tap.attach_cuda() == ""
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        more = [torch.empty(n, device="cuda") for n in (1, 1000, 10_000_000)]
        grown = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
        assert held(tap, 1) == grown == sum(t.untyped_storage().nbytes() for t in more)
        del more
        assert held(tap, 1) == 0
        del kept
