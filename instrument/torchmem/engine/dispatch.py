"""The dispatch engine: books what operators return, for fake tensors and for hosts without a compiler.

A ``TorchDispatchMode`` sees the result of every operator and books the storages that are new; a weak reference tells
when one is freed, and ``UntypedStorage.resize_`` is watched. The engine has the functions that labelers call on the
native one, so the same labelers run on both.

Invariants: per operator a dictionary says whether it can return new storage (its schema's alias annotations), and
nothing grows with the number of modules; tensor subclasses with tensors inside take their turn first, so that what they
make is seen; while paused nothing is counted; after ``stop`` torch is as before, but for a mode that
does nothing where it cannot be taken off (see ``dispatch_mode``).

Limits: what kernels allocate and free inside one operator is not seen, nor what bypasses the dispatcher (C++ code below
it, ``no_dispatch``); threads that were not started by autograd see no mode. Blocks are as large as their storages.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from torchmem.engine import addresses
from torchmem.engine.dispatch_books import end_step_rows, totals_rows, window_rows
from torchmem.engine.dispatch_calls import Held, Hook, LabelCall, Target, TensorGroup
from torchmem.engine.dispatch_context import graph_task
from torchmem.engine.dispatch_mode import DispatchMode, enter, leave
from torchmem.engine.dispatch_patch import patched
from torchmem.engine.dispatch_storages import StorageBooks, alone, device_id, nothing
from torchmem.ledger import FrameKind
from torchmem.model import OUTSIDE_OWNER, Phase, RefType

if TYPE_CHECKING:
    from torchmem.engine.fast_ledger import FastBooks

_NOWHERE = -1
"""The stack of what was made before it was booked."""


def _no_depth() -> int:
    """Beyond every stack: cut back to it, it stays as it is."""
    return sys.maxsize


def _refuse() -> NoReturn:
    raise RuntimeError("the books were asked for in the midst of an event")


class DispatchEngine(StorageBooks):
    """Books every storage that operators make while it runs on the thread that made it; arguments as ``StorageBooks``.

    Attributes:
        bucket_keys: gives the keys of a DDP reducer's buckets.
    """

    def __init__(self, block_bytes: Callable[[int], int] | None = None, default_device: int = 0) -> None:
        super().__init__(block_bytes, default_device)
        self.bucket_keys: Callable[[Any], Iterable[int]] = _no_buckets
        self._mode: DispatchMode | None = None
        self._thread = threading.get_ident()
        self._patches = contextlib.ExitStack()

    # -- running

    def start(self) -> None:
        """Counts from here on, on this thread and in its backward."""
        self._patches.enter_context(patched(torch.UntypedStorage, "resize_", self._watched_resize))
        self._mode = DispatchMode(self)
        enter(self._mode)

    def stop(self) -> None:
        """Counts no more; modes that were entered since stay."""
        if self._mode is not None:
            leave(self._mode)
            self._mode = None
        self._patches.close()

    def stop_in_child(self) -> None:
        """As ``stop``, in a forked child, whose copy of the lock may be held by a thread that it does not have."""
        self._lock = threading.RLock()
        self.is_booking = False
        self.num_pauses += 1
        self.stop()

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Counts on this thread too, if it runs."""
        if self._mode is None:
            yield
            return
        with self._mode:
            yield

    # -- what labelers call: as the native engine's functions of the same names

    @alone(nothing)
    def set_parents(self, parents: Sequence[int]) -> None:
        """Gives the owners their parents; what is booked stays, and belongs to nobody."""
        self.ledger.parents = list(parents)
        self._contexts.clear_timelines()

    @alone(nothing)
    def reset(self, parents: Sequence[int]) -> None:
        """Forgets all books."""
        self._references.clear()
        self.ledger.__init__(list(parents))  # type: ignore[misc]  # as new, and the same object
        self._contexts.__init__(self.ledger)  # type: ignore[misc]  # as above
        self.peak_places.clear()

    def is_lone_trainer(self) -> bool:
        """Whether this is the thread whose operators it sees: only that one may look at gradients."""
        return threading.get_ident() == self._thread

    def set_gate(self, is_open: Any) -> None:
        """Nothing: a mode that is not entered counts nothing."""

    def attach_cpu(self) -> str:
        """Why it cannot count: nothing stands in its way."""
        return ""

    def detach_cpu(self) -> bool:
        """Whether it is off."""
        return True

    def attach_cuda(self) -> str:
        """Why it cannot count there: operators are seen on every device."""
        return ""

    @alone(int)
    def adopt(self, storage_address: int, owner: int, reftype: int) -> int:
        """Books or relabels a storage that exists already."""
        if self.ledger.relabel(storage_address, owner, reftype):
            return 1
        if storage_address in self._references:  # empty
            return 0
        storage = torch.UntypedStorage._new_with_weak_ptr(storage_address)  # noqa: SLF001  # torch shares storages between processes so
        if storage is None:
            return 0
        found = device_id(storage.device)
        device = self._default_device if found is None else found
        self._refer(storage, storage_address, device)
        if storage.nbytes():
            num_bytes = self._taken(storage.nbytes())
            self.ledger.allocate(_NOWHERE, storage_address, num_bytes, device, owner, reftype)
            if self.on_block is not None:
                self.on_block(device, storage_address, num_bytes)
        return 2

    def disown(self, storage_address: int) -> None:
        """Nothing: no storage was changed."""

    @alone(bool)
    def relabel(self, tensor_address: int, owner: int, reftype: int) -> bool:
        """Relabels the storage of a tensor; returns whether that changed anything."""
        if self._contexts.in_checkpoint(self._contexts.current()):
            return False
        key = addresses.storage_address(tensor_address)
        block = self.ledger.find(key)
        if block is None or block.cell == (owner, reftype):
            return False
        return self.ledger.relabel(key, owner, reftype)

    def reftype_of(self, tensor_address: int) -> int | None:
        """What the storage of a tensor is booked as; None where it is not."""
        block = self.ledger.find(addresses.storage_address(tensor_address))
        return None if block is None else block.cell[1]

    @alone(nothing)
    def lookup(self, key: int) -> tuple[int, int, int] | None:
        """(bytes, owner, reftype) of what is booked under a key: the address of a storage."""
        block = self.ledger.find(key)
        return None if block is None else (block.num_bytes, *block.cell)

    def make_hook(self, owner: int, enters: int) -> Hook:
        """What enters or leaves a module."""
        return Hook(self._enter_module if enters else self._leave_module, owner)

    def make_group(self, tensors: Iterable[tuple[int, int]]) -> TensorGroup:
        """Tensors, by address, with their owners."""
        return TensorGroup(self, tensors)

    def make_held(self, places: Iterable[tuple[Any, str, str, int, int]], tensor_type: type) -> Held:
        """What modules hold under names."""
        return Held(self, places, tensor_type)

    def make_target(self, owner: int) -> Target:
        """What is to be known of a parameter group."""
        return Target(owner)

    def make_label_call(self, *arguments: Any) -> LabelCall:
        """A labelled method; arguments as ``LabelCall`` takes them."""
        return LabelCall(self, *arguments)

    @alone(_no_depth)
    def push_label(self, owner: int, reftype: int) -> int:
        """Opens a label for what this thread allocates; returns the depth to cut the stack back to."""
        return self._push(owner, reftype)

    @alone(_no_depth)
    def push_checkpoint(self, _operation: int) -> int:
        """The same for an operation on a checkpoint: all that this thread allocates meanwhile is the checkpoint's."""
        depth = self._push(OUTSIDE_OWNER, RefType.CHECKPOINT)
        context = self._contexts.current()
        if not self._contexts.in_checkpoint(context):
            context.checkpoint = depth + 1
        self._contexts.phases |= Phase.CHECKPOINT
        return depth

    @alone(_no_depth)
    def push_recomputation(self) -> int:
        """The same for what is recomputed outside any module: its own is the module whose backward asked for it."""
        context = self._contexts.current()
        is_backward = graph_task() != -1
        owner = self._contexts.node_owner(context) if is_backward else self._contexts.enclosing_module(context)
        return self._push(owner, RefType.RECOMPUTATION)

    def _push(self, owner: int, reftype: int) -> int:
        context, task = self._contexts.current(), graph_task()
        self.ledger.settle(context.stack, task)
        depth = len(self.ledger.stacks[context.stack])
        self.ledger.push(context.stack, owner, FrameKind.LABEL, reftype, task)
        return depth

    @alone(nothing)
    def cut_stack(self, depth: int) -> None:
        """Closes what this thread opened since the stack had this depth."""
        context = self._contexts.current()
        frames = self.ledger.stacks[context.stack]
        while len(frames) > depth:
            self.ledger.pop(context.stack)

    def stack_depth(self) -> int:
        """How many frames are open on this thread."""
        return len(self.ledger.stacks[self._contexts.current().stack])

    def bucket_storages(self, reducer: Any) -> list[tuple[int, int]]:
        """(address of the storage, key of the books) of each of a DDP reducer's buckets that was seen being made."""
        return [(key, key) for key in self.bucket_keys(reducer) if key in self._references]

    def _enter_module(self, owner: int) -> None:
        try:
            self._note_enter(owner)
        except Exception as error:  # noqa: BLE001  # a running job must go on
            self.fail(error)

    def _leave_module(self, owner: int) -> None:
        try:
            self._note_leave(owner)
        except Exception as error:  # noqa: BLE001  # as above
            self.fail(error)

    @alone(nothing)
    def _note_enter(self, owner: int) -> None:
        self._contexts.enter_module(owner)

    @alone(nothing)
    def _note_leave(self, owner: int) -> None:
        self._contexts.leave_module(owner)

    # -- reading

    @alone(lambda: True)
    def is_in_event(self) -> bool:
        """Whether this thread is in the midst of booking an event, where the books cannot be read."""
        return False

    @alone(_refuse)
    def all_books(self) -> dict[int, FastBooks]:
        """The books of each device that ever held anything, as they are now."""
        return dict(self.ledger.devices)

    @alone(_refuse)
    def end_step(self) -> tuple[int, list[tuple[int, int, int, bytes, bytes]]]:
        """Closes the step: (phases, [(device, peak, bytes at its end, peak by reftype, end by reftype), ...])."""
        self.ledger.end_step()
        self.peak_places.clear()
        return int(self._contexts.end_step()), end_step_rows(self.ledger)

    @alone(_refuse)
    def totals(self) -> list[tuple[int, int, bytes, int, bytes]]:
        """[(device, bytes now, by reftype, peak of the running step, by reftype), ...]."""
        return totals_rows(self.ledger)

    @alone(_refuse)
    def read_window(self) -> list[tuple[int, int, int, int, bytes, bytes, bytes]]:
        """[(device, usage, step peak of the window, peak since reset, usage, peak and active-peak cells), ...]."""
        return window_rows(self.ledger)

    @alone(_refuse)
    def rotate_windows(self) -> None:
        """Starts a new time window."""
        self.ledger.rotate_windows()

    def checkpoint_peaks(self) -> list[tuple[int, int, int]]:
        """None are kept."""
        return []

    def counters(self) -> dict[str, int]:
        """What was counted of events; times are not taken."""
        counted = self.ledger.counters
        names = ("num_events", "num_unknown_frees", "num_double_allocations", "num_unmatched_pops")
        nothing = ("num_label_calls", "label_nanoseconds", "event_nanoseconds", "num_hook_calls", "num_ooms")
        return {
            **{name: counted[name] for name in names},
            **dict.fromkeys((*nothing, "num_dropped_corrections", "num_ignored_devices"), 0),
            "num_live_blocks": self.ledger.num_blocks(),
        }

    def ooms(self) -> tuple[list[Any], list[Any]]:
        """None are seen."""
        return [], []


def _no_buckets(_reducer: Any) -> Iterable[int]:
    return ()
