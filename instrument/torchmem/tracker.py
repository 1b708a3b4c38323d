"""``MemTracker``: a context manager that says what each device and each module held, moment by moment.

It has the interface of torch's ``FSDPMemTracker``, on the native engine: the program runs as it would without it, only
its allocations are counted and its modules have hooks. For plain models, DDP, FSDP1 and FSDP2 alike.

    tracker = torchmem.MemTracker(model, optimizer)
    tracker.track_inputs((batch,))
    with tracker:
        loss = model(batch)
        loss.backward()
        optimizer.step()
    tracker.display_snapshot("peak", units="MiB", tabulate=True)
    tracker.display_modulewise_snapshots(depth=3, units="MiB")

Counts from ``__enter__`` on; may be entered again, nested or later, and be used for any number of steps. What it
counted last stays readable after the block.

Invariants: nothing of it raises into the training loop; ``__exit__`` leaves hook tables, patched attributes and the
allocator as before; one ``MemTracker`` or ``Monitor`` counts at a time in a process.

Limits: those of the engine (see the README). A snapshot names bytes as they are known at its moment, so a gradient is
``Temp`` until its module's backward is over; only the peak is corrected back to each block's birth. Tensors given to
``track_inputs`` and ``track_external`` are not kept alive.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from torchmem import counting, tracker_display
from torchmem.labelers.module_stats import ModuleStats
from torchmem.labelers.owners import ROOT_OWNER, adopt, disown, storages, tensors_in
from torchmem.labelers.states import StatesLabeler
from torchmem.model import OUTSIDE_OWNER, RefType
from torchmem.snapshots import Packed, Snapshot, pack, unpack

if TYPE_CHECKING:
    from typing_extensions import Self

_FIX = "leave that MemTracker's `with` block first"


class MemTracker:
    """Counts every byte that a model's training allocates, by device, module state and reference type.

    Args:
        mod: the root module, after parallelism was applied to it.
        optm: its optimizer; one that is not passed in is found when it steps.

    Attributes:
        memory_tracking: stats of each module that ran, by module; modules are not kept alive.

    Raises:
        InstallError: the model is no module or the optimizer no optimizer.
    """

    def __init__(self, mod: nn.Module, optm: Optimizer | None = None) -> None:
        counting.check_arguments(mod, optm)
        self.memory_tracking: MutableMapping[nn.Module, ModuleStats] = weakref.WeakKeyDictionary()
        self._model = mod
        self._optimizer = optm
        self._counting: counting.Counting | None = None
        self._states: StatesLabeler | None = None
        self._depth = 0
        self._pid = os.getpid()
        self._peaks: dict[int, tuple[int, bytes]] = {}
        self._last: Packed = ()
        self._inputs: list[TensorWeakRef] = []
        self._external: list[Callable[[], Any]] = []

    def track_inputs(self, inputs: Any) -> None:
        """Names the tensors in lists, tuples and dicts ``Inputs``; those passed to the model are so anyway.

        Args:
            inputs: may hold other objects too, which are passed over.
        """
        found = [tensor for tensor in tensors_in(inputs) if not isinstance(tensor, nn.Parameter)]
        self._inputs += [TensorWeakRef(tensor) for tensor in found]
        if self._counting is not None:
            self._adopt_inputs(self._counting)

    def track_external(self, *external: Any) -> None:
        """Counts what was made before the tracker was entered and is no part of the model or its optimizer.

        Args:
            external: modules, optimizers, tensors, None, and lists, tuples and dicts of them. Tensors that nothing
                else names are ``Other``.

        Raises:
            TypeError: an object is none of these.
        """
        found = list(_leaves(external))
        self._external += [TensorWeakRef(o) if isinstance(o, torch.Tensor) else weakref.ref(o) for o in found]
        if self._counting is not None:
            self._adopt_external(self._counting)

    def get_tracker_snapshot(self, type: str = "current") -> Snapshot:  # noqa: A002  # torch's interface
        """What each device holds.

        Args:
            type: ``"current"``, now, or when the block was left; ``"peak"``, at the most since it was entered.

        Returns:
            ``{torch.device: {key: bytes}}``: keys are equal to the display names of the reftypes, every one is there,
            and ``"Total"``; devices that hold nothing are not. Empty before the tracker was first entered.

        Raises:
            ValueError: there is no such type.
        """
        if type not in {"current", "peak"}:
            raise ValueError(f"the type of a snapshot is {type!r}: choose one of current, peak")
        if self._counting is not None:
            self._look(self._counting)
        return unpack(self._last if type == "current" else pack((d, *row) for d, row in self._peaks.items()))

    def display_snapshot(self, type: str = "current", units: str = "B", tabulate: bool = False) -> None:  # noqa: A002, FBT001, FBT002  # torch's interface
        """Prints what each device holds, reftypes that hold nothing left out.

        Args:
            type: as of ``get_tracker_snapshot``.
            units: B, KiB, MiB or GiB.
            tabulate: print a table.

        Raises:
            ValueError: there is no such type, or no such units.
        """
        units = tracker_display.check_units(units)
        tracker_display.show_snapshot(self.get_tracker_snapshot(type), units, tabulate=tabulate)

    def display_modulewise_snapshots(self, depth: int = 2, units: str = "B", tabulate: bool = False) -> None:  # noqa: FBT001, FBT002  # torch's interface
        """Prints what was kept of each module that ran: the last snapshots of each of its states.

        Args:
            depth: parts of a qualified name, the root's class included.
            units: B, KiB, MiB or GiB.
            tabulate: print tables.

        Raises:
            ValueError: there are no such units.
        """
        units = tracker_display.check_units(units)
        tracker_display.show_modules(self.memory_tracking.values(), depth, units, tabulate=tabulate)

    def reset_mod_stats(self) -> None:
        """Forgets what was kept of modules; the peak stays. Never needed between steps."""
        self.memory_tracking.clear()

    def __enter__(self) -> Self:
        """Starts counting.

        Raises:
            BuildError: the engine cannot be built.
            InstallError: a Monitor or another MemTracker counts in this process.
        """
        if self._depth == 0:
            self._start()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0 and self._counting is not None and self._pid == os.getpid():
            try:
                self._look(self._counting)
            finally:
                self._stop()

    def _start(self) -> None:
        counting.claim(self, _FIX)
        self._pid = os.getpid()
        self._peaks.clear()
        try:
            self._counting = counting.Counting(
                self._model,
                self._optimizer,
                depth=sys.maxsize,
                on_step=self._end_step,
                before_forward=_nothing,
            )
            self._counting.attach()
            self._adopt_inputs(self._counting)
            self._adopt_external(self._counting)
            self._attach_states(self._counting)
            self._end_step()
        except BaseException:
            self._stop()  # half a tracker must not stay on the model
            raise

    def _attach_states(self, running: counting.Counting) -> None:
        self._states = StatesLabeler(running.native, self._model, self.memory_tracking, running.label_now)
        running.add(self._states)

    def _stop(self) -> None:
        try:
            if self._counting is not None:
                if self._counting.owners is not None:
                    self._disown(self._counting)
                self._counting.detach()
        finally:
            self._states = self._counting = None
            counting.release(self)

    def _look(self, running: counting.Counting) -> None:
        """Reads the books as they are now."""
        running.label_now()
        rows = running.native.totals()
        self._last = pack(rows)
        self._raise_peaks((device, peak, totals) for device, _, _, peak, totals in rows)

    def _end_step(self) -> None:
        """Closes the engine's books for the step, so that the tables of its corrections start anew."""
        if self._counting is not None:
            _, rows = self._counting.native.end_step()
            self._raise_peaks((device, peak, totals) for device, peak, _, totals, _ in rows)

    def _raise_peaks(self, rows: Iterator[tuple[int, int, bytes]]) -> None:
        for device, peak, totals in rows:
            if device not in self._peaks or peak >= self._peaks[device][0]:
                self._peaks[device] = (peak, totals)

    # -- what the user points at

    def _adopt_inputs(self, running: counting.Counting) -> None:
        self._inputs = [reference for reference in self._inputs if reference() is not None]
        for reference in self._inputs:
            adopt(running.native, reference(), ROOT_OWNER, RefType.INPUT)

    def _adopt_external(self, running: counting.Counting) -> None:
        self._external = [reference for reference in self._external if reference() is not None]
        for tensor, owner, reftype in self._external_tensors(running):
            for storage in storages(tensor):
                if running.native.lookup(storage.data_ptr()) is None:  # what labelers know has a better name
                    running.native.adopt(storage._cdata, owner, reftype)  # noqa: SLF001  # the address of the StorageImpl

    def _external_tensors(self, running: counting.Counting) -> Iterator[tuple[torch.Tensor, int, RefType]]:
        for reference in self._external:
            found = reference()
            if isinstance(found, torch.Tensor):
                yield found, OUTSIDE_OWNER, RefType.OTHER
            elif isinstance(found, nn.Module):
                for parameter in found.parameters():
                    yield parameter, running.owners.of_parameter(parameter), RefType.PARAMETER
                    if parameter.grad is not None:
                        yield parameter.grad, running.owners.of_parameter(parameter), RefType.GRADIENT
                for buffer in found.buffers():
                    yield buffer, OUTSIDE_OWNER, RefType.BUFFER
            elif isinstance(found, Optimizer):
                for holder, values in found.state.items():
                    owner = running.owners.of_parameter(holder)
                    for tensor in tensors_in(values):
                        yield tensor, owner, RefType.OPTIMIZER_STATE

    def _disown(self, running: counting.Counting) -> None:
        for tensor, _, _ in self._external_tensors(running):
            disown(running.native, tensor)
        for reference in self._inputs:
            disown(running.native, reference())


def _leaves(value: Any) -> Iterator[Any]:
    """Modules, optimizers and tensors in nested lists, tuples and dicts."""
    if isinstance(value, nn.Module | Optimizer | torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    elif value is not None:
        raise TypeError(
            f"an object of type {type(value).__name__} cannot be tracked: pass modules, optimizers or tensors"
        )


def _nothing(*_arguments: object) -> None:
    """What is done before a forward."""
